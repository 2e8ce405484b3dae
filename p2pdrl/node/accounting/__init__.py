"""What was done, by whom, and what it cost.

| to … | modules |
|---|---|
| count by lineage, once for each node | `counters`, `progress_tracker` (with normaliser moments) |
| know who says so, and whether it can be so | `facts`, `claims` |
| tell the others | `metrics_gossip`, `report_table` |
| know what each strategy cost | `exchanges` |
"""
