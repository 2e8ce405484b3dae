"""The replay memory of value-based and off-policy algorithms. NumPy alone; torch-free.

| module | noun |
|---|---|
| `memory` | rows of every environment's stream, contiguous in time; n-step samples of them, uniform or
prioritized | | `sum_tree` | masses of numbered leaves, drawn from in proportion |

Modules are imported by their own names: this package exports nothing.
"""

from __future__ import annotations

__all__: list[str] = []
