"""What was done, by whom, and what it cost.

| to … | modules |
|---|---|
| count by lineage, once for each node | `counters`, `ledger` (and moments) |
| tell the others | `rumours`, `ration`, `digest` |
| know what agreeing cost | `accounting` |
"""
