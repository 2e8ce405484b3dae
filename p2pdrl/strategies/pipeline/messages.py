"""What peers of a pipeline say to each other on the route ``stage``.

Everything names the group view that its sender acts in, whose key holds the mode epoch; whoever acts in
another one refuses it (409). Everything is bounded before it is believed.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdrl.config.schedules import MAX_CHUNKS, MAX_STAGES
from p2pdrl.group.compatibility import Natural, Short
from p2pdrl.group.view import GroupNote, ViewKey
from p2pdrl.pipeline.plan import StageBackend

__all__ = [
    "MAX_GENERATION",
    "MAX_PROBE_BYTES",
    "Form",
    "Leave",
    "PipeHead",
    "PipelineDone",
    "PipelineNote",
    "Probe",
    "RankOffer",
    "RankRequest",
    "Request",
    "as_reason",
]

MAX_GENERATION = 2**62
"""Learners get it as a signed number of 64 bits."""
MAX_PROBE_BYTES = 4 << 20
MAX_BLOCKS = 100_000
MAX_WHY = 500

Generation = Annotated[int, Meta(ge=0, lt=MAX_GENERATION)]
Digest = Annotated[bytes, Meta(max_length=32)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Cut = Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]


class PipelineNote(GroupNote, frozen=True, array_like=True):
    """What a member says of itself when it acknowledges a view; under 256 bytes."""

    blocks: Natural = 0
    """Of the policy."""
    generation: Generation = 0
    """Of the pipeline that it is in; 0 for none, or one that broke or ended."""
    rank0: Short = ""
    """Node id of that pipeline's rank 0."""
    rank: Annotated[int, Meta(ge=0, lt=MAX_STAGES)] = 0
    ranks: Annotated[int, Meta(ge=0, le=MAX_STAGES)] = 0
    alone: bool = False
    """Whether all these ranks compute by themselves, because a pipeline would be slower."""


class RankRequest(msgspec.Struct, frozen=True, tag="offer"):
    """A coordinator's question to a rank of its pipeline: what could you contribute?"""

    key: ViewKey
    call: Natural = 0


class RankOffer(msgspec.Struct, frozen=True):
    """What a rank holds, and how fast it is."""

    lineage: Short
    lineage_steps: Natural
    policy_version: Natural
    digest: Digest
    """Of its parameters."""
    generation: Generation
    """The last that it was part of."""
    seconds: Seconds
    """Of all blocks there, forwards and backwards, for one microbatch."""
    blocks: Natural
    device: Short
    trusted: bool
    """Whether it may use torch.distributed."""
    memory_bytes: Natural = 0
    """That its stage may take; 0 where nobody knows."""
    gpu: Short = ""
    """What tells its GPU from all others, where NCCL can reach it; empty elsewhere."""
    direct: bool = False
    """Whether peers reach any port of its machine, and, of one that might use torch, it reaches them all."""


class Form(msgspec.Struct, frozen=True, tag="form"):
    """A coordinator's order to a rank; answered with `PipelineDone` once its learner is in place."""

    key: ViewKey
    generation: Generation
    members: Annotated[tuple[Short, ...], Meta(min_length=1, max_length=MAX_STAGES)]
    """Node ids by rank."""
    blocks: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]
    cuts: Annotated[tuple[Cut, ...], Meta(max_length=MAX_STAGES * MAX_CHUNKS)]
    microbatches: Annotated[int, Meta(ge=1, le=65_536)]
    lineage: Short
    policy_version: Natural
    digest: Digest
    """Of the parameters with which all begin; rank 0 has them."""
    alone: bool = False
    """No pipeline: compute by yourself, and agree with the others by gossip."""
    backend: StageBackend = "stream"
    """What carries the activations: as configured, or as the coordinator chose where that is ``auto``."""
    port: Annotated[int, Meta(ge=0, lt=65_536)] = 0
    """Where the store of torch.distributed is, at rank 0; 0 without that."""
    step_s: Seconds = 0.0
    """Predicted for one minibatch."""
    bubble: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Predicted part of the time in which ranks idle."""
    why: Annotated[str, Meta(max_length=MAX_WHY)] = ""
    """Why it is as it is, in a sentence for people."""
    call: Natural = 0

    def __post_init__(self) -> None:
        """Check what a peer wrote for people.

        Raises:
            ValueError: it would move a cursor; msgspec turns it into its own ValidationError.
        """
        if not self.why.isprintable():
            raise ValueError("the reason must be printable")


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """A rank's request to rank 0 to end a generation, for it leaves."""

    key: ViewKey
    generation: Generation
    call: Natural = 0


class PipelineDone(msgspec.Struct, frozen=True):
    """The answer to `Form` and `Leave`: it is done."""

    generation: Generation


class PipeHead(msgspec.Struct, frozen=True):
    """Metadata of a request for a pipe, from a rank to the next one."""

    key: ViewKey
    generation: Generation
    rank: Annotated[int, Meta(ge=0, lt=MAX_STAGES)]
    """The sender's."""


class Probe(msgspec.Struct, frozen=True, tag="probe", forbid_unknown_fields=True):
    """A vector to be thrown away, and a request for one that long: see `link_probe`."""

    answer_bytes: Annotated[int, Meta(ge=0, le=MAX_PROBE_BYTES)] = 0


Request = RankRequest | Form | Leave | Probe


def as_reason(text: str) -> str:
    """Return ``text`` as `Form.why` may be: printable, and no longer than that."""
    clean = "".join(one if one.isprintable() else " " for one in text)
    return clean if len(clean) <= MAX_WHY else f"{clean[: MAX_WHY - 1]}…"
