"""One running node: everything below is put together here.

| to … | modules |
|---|---|
| come up and go down | `daemon` (order of life), `opening`, `datadir`, `endpoint`, `farewell` |
| find or found a swarm | `gate` (judges joins), `joining` (rules), `first_state` |
| run the learner | `training`, `supervisor`, `learner_link`, `workplace` (regime, posts), `hanging` |
| have it hold a stage | `stage_port` |
| be seen by strategies | `swarm_side`, `learner_port` |
| run several on one vector | `crew`, `helper` |
| run torch.distributed beside it | `group_process`, `group_link` |
| start and end a child process | `process_link`, on which both links stand |
| take and give whole states | `adoption`, `giving`, `state_transfer`, `quarantine` |
| follow and change the swarm's records | `conduct`, `mode` (the strategy in force), `settings` |
| know what was done | `ledger` (counts by lineage, moments), `counters`, `rumours`, `ration`, `digest` |
| know what agreeing cost | `accounting` |
| keep it | `saving`, `checkpoints`, `atomic` |
| judge how it goes | `health`, `looplag`, `stop` |
| show it | `figures`, `mode_figures`, `pipeline_figures`, `view`, `meters`, `events`, `parts`, `summary` |
| show what a pipeline did | `timelines` |
"""
