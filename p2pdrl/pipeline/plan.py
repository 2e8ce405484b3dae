"""Who holds which blocks of a model, and in which schedule they run it: what all ranks must know alike.

Whoever forms a pipeline makes one, from `partition` or by hand; each rank reads its part from it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.schedule import Action, Schedule, ScheduleName, make_schedule

__all__ = ["MAX_MICROBATCHES", "PipelinePlan"]

MAX_MICROBATCHES = 65_536


@dataclass(frozen=True)
class PipelinePlan:
    """A chain of blocks, cut into stages, on ranks.

    Attributes:
        blocks: of the whole chain.
        cuts: number of the first block of each stage but the first, rising.
        schedule: its name.
        microbatches: into how many a batch is cut, at most.
        ranks: R devices; as many as stages, or fewer when interleaved.

    Raises:
        ConfigError: the numbers don't fit each other.

    Example:
        >>> plan = Plan(blocks=5, cuts=(2, 3, 4), schedule="interleaved", microbatches=4, ranks=2)
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
