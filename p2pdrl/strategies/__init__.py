"""How the swarm agrees: whom to meet and with which weight (pure cores), and the exchange itself (I/O).

| to … | look at |
|---|---|
| see what a strategy is given and must offer | `protocol`, `registry`, `local` |
| average in pairs, asynchronously | `gossip` (AD-PSGD, of parameters or gradients) |
| push without waiting | `gossip` (SGP, GALA) |
| meet neighbours on a graph, in rounds | `neighbours` (D-PSGD), `topology` |
| send everybody thresholded updates | `relay` (Strom) |
| average exactly, all together | `allreduce` (gradients, parameters, federated) |
| serve parameters | `servers` (synchronous, asynchronous) |
| hold one model over several peers | `pipeline` |
| agree on one list of members | `p2pdrl.group` |
| judge who may exchange, and how long to wait for one | `admission`, `call_timeouts` |
| wait for the learner, read its vector | `learner_requests`, `own_vector` |
| begin exchanges now and then | `gossip.asynchronous` |
| lose nothing by compression | `feedback` |
| run tasks, and long arithmetic beside the event loop | `task_runner`, `offload` |
| run one in a test | `p2pdrl.testing` |
"""
