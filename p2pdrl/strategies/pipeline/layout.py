"""Who is in which pipeline: from a group view and its notes, alike at all members. Pure.

A pipeline that is whole goes on whoever comes or goes: its ranks say so in their notes, all naming the same
generation. Everybody else is taken in the view's order, S at a time; the first of each S is rank 0. Those
who are left over stand by. Where there are fewer than S members, all of them make one pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from p2pdrl.config.checks import Problem, too_few_blocks
from p2pdrl.config.strategy import PipelineConfig
from p2pdrl.strategies.pipeline.messages import PipelineNote

__all__ = ["PipelineLayout", "PipelineMembers", "blocks_of", "lay_out", "limits", "width"]


@dataclass(frozen=True, slots=True)
class PipelineMembers:
    """One pipeline.

    Attributes:
        number: of the pipeline, from 0, in the order of their rank 0's ids.
        members: node ids, rank 0 first; by rank in one that goes on.
        generation: of one that goes on; 0 for one that is to be formed.
        alone: whether its members compute by themselves.
    """

    number: int
    members: tuple[str, ...]
    generation: int = 0
    alone: bool = False

    @property
    def rank0(self) -> str:
        """Who coordinates it, and makes its experience."""
        return self.members[0]

    @property
    def others(self) -> tuple[str, ...]:
        """All but rank 0."""
        return self.members[1:]


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """All pipelines of a view.

    Attributes:
        pipelines: in the order of their rank 0's ids.
        standby: who is in none.
    """

    pipelines: tuple[PipelineMembers, ...]
    standby: tuple[str, ...]

    def pipeline_of(self, member: str) -> PipelineMembers | None:
        """Return a member's pipeline; None when it stands by."""
        return next((one for one in self.pipelines if member in one.members), None)

    @property
    def rank0s(self) -> tuple[str, ...]:
        """Node ids of each pipeline's rank 0, and of all who compute by themselves."""
        return tuple(
            member for one in self.pipelines for member in (one.members if one.alone else one.members[:1])
        )


def blocks_of(notes: Mapping[str, PipelineNote]) -> int:
    """Return how many blocks the members' policies have; 0 where nobody says so."""
    return min((note.blocks for note in notes.values() if note.blocks), default=0)


def width(notes: Mapping[str, PipelineNote], stages: int, chunks: int) -> int:
    """Return how many ranks a pipeline has at most: S, or as many as there are blocks for."""
    blocks = blocks_of(notes)
    return max(1, min(stages, blocks // chunks)) if blocks else stages


def lay_out(members: Sequence[str], notes: Mapping[str, PipelineNote], most: int) -> PipelineLayout:
    """Compute the pipelines of a view.

    Args:
        notes: what each said when it acknowledged the view.
        most: ranks of a pipeline.
    """
    size = min(most, len(members))
    kept = _whole(members, notes, size)
    taken = {member for one in kept for member in one.members}
    free = [member for member in members if member not in taken]
    full = len(free) - len(free) % size
    fresh = [PipelineMembers(0, tuple(free[start : start + size])) for start in range(0, full, size)]
    ordered = sorted([*kept, *fresh], key=lambda one: one.rank0)
    numbered = tuple(replace(one, number=number) for number, one in enumerate(ordered))
    return PipelineLayout(numbered, tuple(free[full:]))


def _whole(members: Sequence[str], notes: Mapping[str, PipelineNote], size: int) -> list[PipelineMembers]:
    """Return the pipelines of the right size all of whose ranks are there."""
    found: dict[tuple[int, str], dict[int, str]] = {}
    for member in members:
        note = notes.get(member, PipelineNote())
        if note.generation and note.ranks == size:
            found.setdefault((note.generation, note.rank0), {})[note.rank] = member
    return [
        PipelineMembers(0, tuple(ranks[rank] for rank in range(size)), generation, notes[rank0].alone)
        for (generation, rank0), ranks in found.items()
        if set(ranks) == set(range(size)) and ranks[0] == rank0
    ]


def limits(
    config: PipelineConfig, notes: Mapping[str, PipelineNote], pipeline: PipelineMembers | None
) -> Iterator[Problem]:
    """Yield which options our pipeline can't have.

    Args:
        pipeline: ours; None where we stand by.
    """
    blocks = blocks_of(notes)
    if blocks:
        problem = too_few_blocks(config, blocks)
        if problem is not None:
            yield problem
    if config.cuts and pipeline is not None and len(pipeline.members) != config.stages:
        yield Problem(
            "task.strategy.cuts",
            f"they are for pipelines of {config.stages} peers, and go unused while this one has "
            f"{len(pipeline.members)}",
        )
