"""Pipeline parallelism as arithmetic: who does what when, how long it takes, where a model is cut.

| module | noun |
|---|---|
| `schedule` | the actions of each rank: GPipe, 1F1B, interleaved 1F1B; the check of any schedule |
| `timeline` | predicted start and end of each action, bubbles, speed-up; a timeline as text |
| `layers` | what layers, peers and links cost |
| `partition` | the best cut of a chain of layers for peers, in a given order or the best one; a cut by hand |
| `plan` | who holds which blocks; what a learner is told that becomes a rank, and what it tells |
| `advice` | what an update computes and sends, and whether a pipeline pays or one peer alone is faster |
| `wording` | seconds and bytes for people |
| `trace` | timelines and what really happened, for a trace viewer |

A **stage** is a contiguous part of the model, a **rank** a device that holds one stage (or several, when
interleaved), a **microbatch** a part of the batch, and a **bubble** time in which a rank computes nothing.
Used by what runs the stages, by what chooses them, and by ``p2pdrl pipeline``. Torch-free and pure: no input,
no output, no clock.
Modules are imported by their own names: this package exports nothing.
"""

from __future__ import annotations

__all__: list[str] = []
