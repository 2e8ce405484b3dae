"""Who is in which pipeline: from a group view and its notes, alike at all members. Pure.

A pipeline that is whole goes on whoever comes or goes: its ranks say so in their notes, all naming the same
generation. Everybody else is taken in the view's order, S at a time; the first of each lot is its head. Those
who are left over stand by. Where there are fewer than S members, all of them make one pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from p2pdrl.config.checks import Problem, too_few_blocks
from p2pdrl.config.strategy import PipelineConfig
from p2pdrl.strategies.pipeline.messages import PipelineNote

__all__ = ["PipelineLayout", "PipelineMembers", "blocks_of", "lay_out", "limits", "width"]


@dataclass(frozen=True, slots=True)
class PipelineMembers:
    """One pipeline.

    Attributes:
        number: of the pipeline, from 0, in the order of the heads' ids.
        members: node ids, the head first; by rank where it is kept.
        generation: of one that goes on; 0 for one that is to be formed.
        alone: whether its members compute by themselves.
    """

    number: int
    members: tuple[str, ...]
    generation: int = 0
    alone: bool = False

    @property
    def head(self) -> str:
        """Who makes the experience and drives the others."""
        return self.members[0]

    @property
    def others(self) -> tuple[str, ...]:
        """All but the head."""
        return self.members[1:]


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """All pipelines of a view.

    Attributes:
        pipelines: in the order of their heads' ids.
        standby: who is in none.
    """

    pipelines: tuple[PipelineMembers, ...]
    standby: tuple[str, ...]

    def place_of(self, member: str) -> PipelineMembers | None:
        """Return a member's pipeline; None when it stands by."""
        return next((place for place in self.pipelines if member in place.members), None)

    @property
    def heads(self) -> tuple[str, ...]:
        """Whose parameters are trained: heads, and all who compute by themselves."""
        return tuple(
            member for place in self.pipelines for member in (place.members if place.alone else (place.head,))
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
        members: of the view, in its order.
        notes: what each said when it acknowledged the view.
        most: ranks of a pipeline.
    """
    size = min(most, len(members))
    kept = _whole(members, notes, size)
    taken = {member for place in kept for member in place.members}
    free = [member for member in members if member not in taken]
    full = len(free) - len(free) % size
    lots = [PipelineMembers(0, tuple(free[start : start + size])) for start in range(0, full, size)]
    places = sorted([*kept, *lots], key=lambda place: place.head)
    numbered = tuple(
        PipelineMembers(number, place.members, place.generation, place.alone)
        for number, place in enumerate(places)
    )
    return PipelineLayout(numbered, tuple(free[full:]))


def _whole(members: Sequence[str], notes: Mapping[str, PipelineNote], size: int) -> list[PipelineMembers]:
    """Pipelines of the right size all of whose ranks are there."""
    found: dict[tuple[int, str], dict[int, str]] = {}
    for member in members:
        note = notes.get(member, PipelineNote())
        if note.generation and note.ranks == size:
            found.setdefault((note.generation, note.head), {})[note.rank] = member
    return [
        PipelineMembers(0, tuple(ranks[rank] for rank in range(size)), generation, notes[head].alone)
        for (generation, head), ranks in found.items()
        if set(ranks) == set(range(size)) and ranks[0] == head
    ]


def limits(
    config: PipelineConfig, notes: Mapping[str, PipelineNote], place: PipelineMembers | None
) -> Iterator[Problem]:
    """Yield what our pipeline does without.

    Args:
        config: the strategy's options.
        notes: of the view's members.
        place: our pipeline; None where we stand by.
    """
    blocks = blocks_of(notes)
    if blocks:
        problem = too_few_blocks(config, blocks)
        if problem is not None:
            yield problem
    if config.cuts and place is not None and len(place.members) != config.stages:
        yield Problem(
            "task.strategy.cuts",
            f"they are for pipelines of {config.stages} peers, and go unused while this one has "
            f"{len(place.members)}",
        )
