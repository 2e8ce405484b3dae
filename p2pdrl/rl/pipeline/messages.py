"""What ranks say to each other.

    down (to the next rank)                  up (to the rank before)
    Activation   of a microbatch, …          Gradient   of a microbatch's activation, …
                 the first with Opening      Sums       once each backward is done
    Step         the gradient is known
      … the next minibatch, or
    Over         the update is done          Slice      one of each rank below
    Whole        everybody's slices

All is said to neighbours; what concerns ranks further away is passed on. Activation, Gradient, Slice and
Whole bring tensors, whose shapes and types follow from the plan, the task and Opening's length and parts. A
number of microbatches, stages or steps that isn't the one expected is an error.

With ``torch_runner`` a minibatch has one Activation, whose tensors are targets and context of all rows, and
no Gradient: torch.distributed brings what they are named for.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdrl.config.fields import Precision
from p2pdrl.pipeline.plan import MAX_MICROBATCHES

__all__ = [
    "Activation",
    "Gradient",
    "Message",
    "Opening",
    "Slice",
    "StepMessage",
    "Sums",
    "UpdateOver",
    "Whole",
]

_MAX_TERMS = 64
_MAX_OBJECTIVE_BYTES = 4096

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Place = Annotated[int, Meta(ge=0, le=MAX_MICROBATCHES)]


class Opening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must be known of a minibatch before its first forward."""

    generation: Count
    """Of the pipeline: what comes from an older one is refused."""
    step: Count
    """Number of minibatches stepped with, or skipped, before this one."""
    rows: Count
    """Rows that count: what sums are divided by."""
    length: Count
    """First dimension of its tensors."""
    parts: Annotated[int, Meta(ge=1, le=MAX_MICROBATCHES)]
    """Microbatches; ``gradients.cut`` says where."""
    precision: Precision
    objective: Annotated[bytes, Meta(max_length=_MAX_OBJECTIVE_BYTES)]
    """Fields of the objective, as MessagePack; its type is known."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """First dimension of each microbatch."""
        size, longer = divmod(self.length, self.parts)
        return (size + 1,) * longer + (size,) * (self.parts - longer)


class Activation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="activation"):
    """A stage's input; on its way to the last rank for the first time, with targets and context."""

    stage: Place
    """That gets it."""
    microbatch: Place
    opening: Opening | None = None
    """With the first message that a rank gets of a minibatch."""


class Gradient(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="gradient"):
    """Of the loss by a stage's output."""

    stage: Place
    """That gets it."""
    microbatch: Place


class Sums(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sums"):
    """What the ranks from the sender on have found."""

    step: Count
    squares: float
    """Of their gradients' entries, added up."""
    terms: Annotated[tuple[float, ...], Meta(max_length=_MAX_TERMS)]
    """Of the objective."""


class StepMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="step"):
    """Clip and step, all by the same numbers; a sum of squares that isn't finite skips the step."""

    step: Count
    squares: float
    """Of the whole gradient."""
    learning_rate: float
    max_grad_norm: float
    took_s: float = 0.0
    """Seconds from the minibatch's beginning at the first rank until this, which no other rank knows."""


class UpdateOver(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="over"):
    """There are no more minibatches in this update: hand over the slices."""

    step: Count
    state: bool
    """With the optimizer's."""
    spread: bool
    """Every rank is to get all of them."""
    last: bool = False
    """The pipeline ends with this."""


class Slice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="slice"):
    """The parameters of one rank, and with ``UpdateOver.state`` its optimizer's vectors."""

    rank: Place
    step: Count
    optimizer_steps: Count


class Whole(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="whole"):
    """All slices, put together; or what the first rank has made of that, or has all ranks begin with."""

    step: Count
    optimizer_steps: Count
    version: Count = 0
    """Policy version that the first rank gives it."""
    place: Count = 0
    """Of the first rank in its data, where that goes on in order: whoever is first next goes on there."""
    changed: bool = False
    """Whether it isn't what the slices say: every rank goes on with its part of this."""


Message = Activation | Gradient | Sums | StepMessage | UpdateOver | Slice | Whole
