"""One running node: everything below is put together here.

| to … | modules |
|---|---|
| come up, live and go down | `daemon` (order of life), `context` (what it is made of), `daemon` |
| run the learner by a strategy | `training`, `swarm_view` (the node as strategies see it) |
| follow the swarm's records | `record_follower`, `training` (the strategy in force), `settings`, `stop` |
| tell what happens, and notice being slow | `events`, `looplag` |
| run something as long as a block | `children.child_process` |

| package | what for |
|---|---|
| `bootstrap` | to come up, and to find or found a swarm |
| `children` | processes of this node: learners, their helpers, torch.distributed |
| `state` | whole states: taken, given, kept on disk |
| `accounting` | what was done, by whom, and what it cost |
| `status` | how it goes, for people and programs |
"""
