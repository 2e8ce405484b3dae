"""A simulator that predicts how a swarm will do under each strategy, before anybody starts one.

| to … | modules |
|---|---|
| say what the swarm is | `description` (machines, links, churn, costs), `parsing` (what people type) |
| run virtual time | `event_queue`, `world` (all parts together), `churn` |
| know what takes how long | `network`, `processors`, `payload` (bytes of a vector) |
| be the nodes | `learners`, `replicas` (a small vector each, to see how fast they come together) |
| be gossip | `exchange_timing`, and on it `gossip` (in pairs), `sgp`, `gala` |
| be another | `strom`, `neighbours`, `rounds`, `servers`, and on it `servers_sync`, `servers_async` |
| count | `statistics`, `forecast` |
| predict, and advise | `simulate`, `advice` |

Strategies' own pure cores decide here as they do on a node, so that timing, partners, graphs, weights and
deadlines are the real ones; only bytes and seconds are modelled. Pure: no input, no output, no clock but
the events's, and one seed for everything random.
"""
