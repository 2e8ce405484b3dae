"""How it goes, for people and programs.

| to … | modules |
|---|---|
| collect it | `figures`, `mode_figures`, `pipeline_figures`, `health` |
| show it | `view` (HTTP), `meters` (Prometheus), `summary` (a file at the end) |
| show what a pipeline did | `timelines` |
"""
