"""Who holds which blocks of a model, and in which schedule they run it: what all ranks must know alike.

The coordinator of a pipeline makes a plan, from `partition` or by hand. A daemon orders its learner to become
one rank of it; the learner answers with news. Orders and news don't come from the network.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import msgspec

from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.schedule import Action, Schedule, ScheduleName, make_schedule

__all__ = [
    "MAX_MICROBATCHES",
    "PipelinePlan",
    "Rendezvous",
    "StageBackend",
    "StageNews",
    "StageOrder",
    "StageSide",
]

MAX_MICROBATCHES = 65_536


@dataclass(frozen=True)
class PipelinePlan:
    """A chain of blocks, cut into stages, on ranks.

    Attributes:
        cuts: number of the first block of each stage but the first, rising.
        microbatches: into how many a batch is cut, at most.
        ranks: R devices; as many as stages, or fewer when interleaved.

    Raises:
        ConfigError: the numbers don't fit each other.

    Example:
        >>> plan = PipelinePlan(blocks=5, cuts=(2, 3, 4), schedule="interleaved", microbatches=4, ranks=2)
        >>> plan.numbers(0), plan.numbers(1)
        ((0, 1, 3), (2, 4))
    """

    blocks: int
    cuts: tuple[int, ...]
    schedule: ScheduleName
    microbatches: int
    ranks: int

    def __post_init__(self) -> None:
        edges = (0, *self.cuts, self.blocks)
        if any(one >= other for one, other in itertools.pairwise(edges)):
            raise ConfigError(
                f"cuts must rise from 1 to at most {self.blocks - 1}, the last block's number, "
                f"not be {list(self.cuts)}"
            )
        if not 1 <= self.microbatches <= MAX_MICROBATCHES:
            raise ConfigError(f"a batch is cut into 1 to {MAX_MICROBATCHES} parts, not {self.microbatches}")
        _schedule(self.schedule, self.stages, self.microbatches, self.ranks)

    @property
    def stages(self) -> int:
        """S, of the whole chain."""
        return len(self.cuts) + 1

    def stages_of(self, rank: int) -> range:
        """Return the stages that a rank holds."""
        return range(rank, self.stages, self.ranks)

    def blocks_of(self, stage: int) -> range:
        """Return the numbers of a stage's blocks."""
        edges = (0, *self.cuts, self.blocks)
        return range(edges[stage], edges[stage + 1])

    def numbers(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of all blocks that a rank holds, in their order."""
        return tuple(number for stage in self.stages_of(rank) for number in self.blocks_of(stage))

    def actions(self, rank: int, microbatches: int) -> tuple[Action, ...]:
        """Return what a rank does with a batch of so many microbatches.

        Raises:
            ConfigError: the schedule doesn't allow that number.
        """
        return _schedule(self.schedule, self.stages, microbatches, self.ranks)[rank]

    def parts(self, rows: int, *, most: int = MAX_MICROBATCHES) -> int:
        """Return into how many microbatches a batch is cut: no more than it has rows, or than ``most``.

        Of those the most that the schedule allows; one is always allowed.
        """
        parts = max(min(self.microbatches, rows, most), 1)
        while parts > 1 and not self._allows(parts):
            parts -= 1
        return parts

    def _allows(self, microbatches: int) -> bool:
        try:
            self.actions(0, microbatches)
        except ConfigError:
            return False
        return True


@lru_cache(maxsize=64)
def _schedule(name: ScheduleName, stages: int, microbatches: int, ranks: int) -> Schedule:
    return make_schedule(name, stages, microbatches, ranks=ranks)


StageBackend = Literal["stream", "torch"]
"""What carries activations: the swarm's own connections, or torch.distributed."""

StageSide = Literal["next", "previous"]
"""A neighbour: activations go to the next and come from the previous one."""


class Rendezvous(msgspec.Struct, frozen=True):
    """Where the ranks of a torch.distributed group meet."""

    host: str
    """Where the store is; for rank 0, which opens it, where any other rank is."""
    port: int
    """0 for rank 0."""
    come_s: float = 30.0
    """The longest that all may take to come: one whose learner is new imports torch.distributed before."""


class StageOrder(msgspec.Struct, frozen=True):
    """Be one rank of a pipeline, from now on until told otherwise."""

    generation: int
    """Grows with each pipeline that this node is part of; the same on all its ranks."""
    rank: int
    """0 makes experience, drives the others and has the whole of the parameters after each update."""
    blocks: int
    cuts: tuple[int, ...]
    schedule: ScheduleName
    microbatches: int
    ranks: int
    """These five are `PipelinePlan`'s."""
    timeout_s: float
    """Bound on each wait for a neighbour within an update; with ``torch`` also on how long those who have all
    come take to connect."""
    idle_timeout_s: float
    """Bound on the wait for the next update, but for rank 0."""
    state_every: int
    """Updates until all ranks get the whole of the parameters and of the optimizer's state again (K)."""
    tune: bool = False
    """Rank 0 measures numbers of microbatches up to the plan's and stays with the fastest."""
    backend: StageBackend = "stream"
    meeting: Rendezvous | None = None
    """With ``torch`` only."""
    checkpoint_activations: bool = False

    @property
    def plan(self) -> PipelinePlan:
        """Who holds what.

        Raises:
            ConfigError: the numbers don't fit each other.
        """
        return PipelinePlan(self.blocks, self.cuts, self.schedule, self.microbatches, self.ranks)


class StageNews(msgspec.Struct, frozen=True):
    """What has become of an order."""

    generation: int
    what: Literal["meeting", "ready", "copied", "over", "broken"]
    """``meeting``: the store is open at ``port``; ``ready``: this rank waits for the first minibatch (rank 0:
    collects experience); ``copied``: the whole state, the optimizer's too, is on the board; ``over``: told to
    finish, it did, with the whole state on the board; ``broken``: a neighbour failed, or time ran out."""
    side: StageSide | None = None
    """With ``broken``: which neighbour, where one is to blame."""
    why: str = ""
    port: int = 0
    policy_version: int = 0
    """Of what is on the board."""
    behind: int = 0
    """With ``broken``: updates that this rank took part in since; only rank 0 has what has become of them."""
