"""What people and programs see of a node.

| to … | modules |
|---|---|
| collect it | `reporter`, `pipeline`, `health` |
| show it | `view` (HTTP), `meters` (Prometheus, TensorBoard, ``summary.json``) |
| show what a pipeline did | `traces` |
"""
