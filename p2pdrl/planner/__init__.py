"""Predicts how a swarm will do under each strategy, before anybody starts one.

| to … | module |
|---|---|
| say what the swarm is | `description` (machines, links, churn, costs), `parsing` (what people type) |
| run the real strategies of a small one in virtual time | `emulate` |
| simulate up to 1,000 nodes with models | `simulate`; `gossip`, `strom`, `neighbours`, `rounds`, `servers` |
| be what models stand on | `world` (virtual time, learners, churn), `network` (links, processors, bytes) |
| count, and say what came of it | `forecast` |
| recommend | `advice` |

Models decide with the strategies' own pure cores where these say when, with whom and how long to wait; bytes
and seconds are modelled, and tests hold them against `emulate`. Pure: no input, no output, no clock but the
events', and one seed for everything random.
"""
