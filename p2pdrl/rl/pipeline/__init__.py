"""A model over several ranks: stages of it, what they say to each other, and in which order they work.

| module | noun |
|---|---|
| `parts` | a model as a chain of blocks, with its optimizer and objective: what a trainer gives |
| `stage_parameters` | one rank's blocks, their parameters, gradients and optimizer |
| `messages` | what ranks say to each other, as values and as bytes; the tensors that come along |
| `links` | neighbours connected: a protocol; queues; any carrier of bytes |
| `runner`, `torch_runner` | one rank's actions for one minibatch: over links; by torch.distributed |
| `rank` | sums, steps and slices: the first rank (a gradient engine and stepper), and any other |
| `model_split` | all ranks in one process, one device each; as a trainer's gradient engine |

`pipeline` says who holds what and who does what when (`plan`, `schedule`). Modules are imported by their own
names: this package exports nothing.
"""

from __future__ import annotations

__all__: list[str] = []
