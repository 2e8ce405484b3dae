"""One running node: everything below is put together here.

| to … | modules |
|---|---|
| come up, live and go down | `daemon` (order of life), `parts` (what it is made of), `farewell` |
| run the learner by a strategy | `training`, `swarm_side` (the node as strategies see it) |
| follow and change the swarm's records | `conduct`, `mode` (the strategy in force), `settings`, `stop` |
| tell what happens, and notice being slow | `events`, `looplag` |
| run something as long as a block | `beside` |

| package | what for |
|---|---|
| `entry` | to come up, and to find or found a swarm |
| `children` | processes of this node: learners, their helpers, torch.distributed |
| `states` | whole states: taken, given, kept on disk |
| `counting` | what was done, by whom, and what it cost |
| `showing` | how it goes, for people and programs |
"""
