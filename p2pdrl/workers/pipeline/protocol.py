"""What the daemon and its learner say to each other about stages of a pipeline.

Part of `protocol`, which frames it. Under a learner mode of stages the learner stands still until it has an
order:

    daemon                                    learner
      │  Measure                                │
      ├────────────────────────────────────────▶│  runs each block some times
      │                                 Blocks  │
      │◀────────────────────────────────────────┤
      │  StartStage (+ descriptors of its pipes)│
      ├────────────────────────────────────────▶│  is one rank of a pipeline until it has another order
      │                       News, News, …     │
      │◀────────────────────────────────────────┤
      │  Finish                                 │
      ├────────────────────────────────────────▶│  (rank 0) ends with the update that it is in
      │                    News(what="over")    │
      │◀────────────────────────────────────────┤

Torch-free: the daemon imports this module.
"""

from __future__ import annotations

import msgspec

from p2pdrl.pipeline.layers import Layer
from p2pdrl.pipeline.plan import StageNews, StageOrder, StageSide
from p2pdrl.pipeline.trace import TraceSpan
from p2pdrl.transport.pipe.ticket import PipeTicket

__all__ = ["Blocks", "Finish", "Measure", "News", "StartStage", "Trace", "Traced"]


class StartStage(msgspec.Struct, frozen=True, tag="stage"):
    """Be a stage, at once: whatever the learner did before ends, in the midst of an update too.

    The descriptors of its pipes travel beside this frame, in the order of ``tickets``; the learner owns them.
    """

    order: StageOrder
    tickets: tuple[tuple[StageSide, PipeTicket], ...] = ()
    """``next`` is missing on the last rank and ``previous`` on the first, unless the schedule is interleaved,
    which closes the circle. None with one rank alone, or with ``torch``."""


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """End a generation with the update that is under way, the whole state on all boards.

    To rank 0; others pass it over, and so does one that is in another generation.
    """

    generation: int


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Say what each block costs here; answered with `Blocks`.

    Done between two updates, or between two of those that a rank serves; so by one in a pipeline it may take
    as long as an update takes. It ends a meeting of a torch.distributed group, which the daemon gave up.
    """

    microbatches: int
    """Into which the task's longest batch is cut; one of them is measured."""
    over_torch: bool = False
    """Whether stages will run over torch.distributed: what that needs is imported now, for seconds."""


class Blocks(msgspec.Struct, frozen=True, tag="blocks"):
    """What each block of the policy costs on this device."""

    microbatches: int
    layers: tuple[Layer, ...]
    device: str
    error: str = ""
    """Why the policy can't be cut, where it can't; ``layers`` is empty then."""
    usable_bytes: int = 0
    """Of a GPU's memory, that a stage of this learner may take now; 0 where it computes on none."""
    gpu: str = ""
    """What tells its GPU from all others, where NCCL can reach it; empty elsewhere."""


class Trace(msgspec.Struct, frozen=True, tag="trace"):
    """Say what you did lately as a stage; answered with `Traced` at the next chance."""

    number: int
    """Comes back with the answer."""
    seconds: float
    """How far back."""


class Traced(msgspec.Struct, frozen=True, tag="traced"):
    """What a stage did, with two clocks read at the same moment."""

    number: int
    clock_s: float
    """Of the spans' clock."""
    monotonic_s: float
    """Of ``time.monotonic``, which all processes of a machine share."""
    spans: tuple[TraceSpan, ...] = ()


class News(msgspec.Struct, frozen=True, tag="news"):
    """What has become of an order. Of each generation, ``over`` or ``broken`` is the last.

    A generation that another order or another learner mode ended is heard of no more.
    """

    news: StageNews
