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
| agree on one list of members | `group` |
| judge, wait, collect, count | `admission`, `call_timeouts`, `task_runner`, and all of `p2pdrl.group` |
| begin exchanges now and then | `gossip.asynchronous` |
| lose nothing by compression | `feedback` |
| run tasks, and long arithmetic beside the event loop | `task_runner`, `offload`, `own_vector` |
| run one in a test | `testing` |
"""
