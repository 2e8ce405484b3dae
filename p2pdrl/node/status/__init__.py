"""How it goes, for people and programs.

| to … | modules |
|---|---|
| collect it | `reporter`, `reporter`, `pipeline`, `health` |
| show it | `view` (HTTP), `meters` (Prometheus), `meters` (a file at the end) |
| show what a pipeline did | `traces` |
"""
