"""What people and programs see of a node.

| to … | modules |
|---|---|
| collect it | `reporter`, `pipeline`, `health` |
| show it | `view` (HTTP), `meters` (Prometheus, run writers, ``summary.json``) |
| show what a pipeline did | `traces` |
"""
