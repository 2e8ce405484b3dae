"""One running node: everything below is put together here.

| to … | modules |
|---|---|
| come up, live and go down | `daemon` (order of life), `context` (what other modules see of the node) |
| join, and admit others | `admission` |
| train by the mode in force | `training`, `swarm_view` (the node as its strategy sees it) |
| follow the swarm's records | `record_follower`, `settings` (records as typed values), `stop` (condition) |
| tell what happens, notice a slow loop and too much memory | `events`, `looplag`, `memory_watch` |
| run tasks in the background | `background` |

| package | what for |
|---|---|
| `bootstrap` | to come up, and to join or found a swarm |
| `children` | processes of this node: learners, actors, torch.distributed |
| `state` | whole states: adopted, given, kept on disk |
| `accounting` | what was done, by whom, and what it cost |
| `status` | what people and programs see |
"""
