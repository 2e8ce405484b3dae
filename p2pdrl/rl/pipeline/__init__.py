"""A model over several ranks: stages of it, what they say to each other, and in which order they work.

| module | noun |
|---|---|
| `parts` | a model as a chain of blocks, with its optimizer and objective: what a trainer gives |
| `stage_parameters` | one rank's blocks, their parameters, gradients and optimizer |
| `tensor_specs` | what tensors on their way look like, and memory for them |
| `messages`, `frames` | what ranks say, as values and as bytes |
| `links` | neighbours connected: a protocol; queues; any carrier of bytes |
| `runner` | what computes one rank's part of a minibatch: a protocol |
| `runner`, `torch_runner` | one rank's actions for one minibatch, over links; by torch.distributed |
| `runner` | when it did what |
| `runner` | what a rank keeps of a microbatch until its backward |
| `torch_runner` | what torch.distributed means by its errors |
| `rank` | sums, steps and slices: what ranks do together |
| `pipelined` | the first rank: a gradient engine and stepper |
| `server` | any other rank |
| `model_split` | all ranks in one process, one device each; as a trainer's gradient engine |

`pipeline` says who holds what and who does what when (`plan`, `schedule`). Modules are imported by their own
names: this package exports nothing.
"""

from __future__ import annotations

__all__: list[str] = []
