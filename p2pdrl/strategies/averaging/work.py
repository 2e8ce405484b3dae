"""What a strategy averages in the rounds of a group: the part of it that `rounds` doesn't know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from p2pdrl.strategies.averaging.averager import Average, Part
from p2pdrl.strategies.protocol import AnswerKind, Post

__all__ = ["NOTHING", "Work"]

NOTHING = Part(None, 0.0, 0)
"""The part of a member that takes part without giving anything."""


class Work(Protocol):
    """Gradients, parameters or noised differences."""

    @property
    def led(self) -> bool:
        """Whether a history begins with one member's state; else the first round brings all together."""
        ...

    @property
    def seeded(self) -> bool:
        """Whether that member begins with the mean of all members' parameters, which it sees for that."""
        ...

    @property
    def lockstep(self) -> bool:
        """Whether the state is the learner's, who must make each step: who missed one takes another's."""
        ...

    @property
    def facts(self) -> dict[str, float | str]:
        """Figures for people."""
        ...

    async def found(self) -> None:
        """Begin a history with our own state."""
        ...

    def state(self) -> Sequence[memoryview]:
        """What a newcomer needs besides our learner's state; empty for nothing."""
        ...

    def room(self) -> memoryview:
        """Where another member's `state` goes; of the same length."""
        ...

    async def take(self) -> None:
        """What is in `room` is the state from now on.

        Raises:
            PoisonedVectorError: it can't be.
        """
        ...

    async def part(self, post: Post, number: int, members: Sequence[str]) -> Part:
        """What we give to round ``number``.

        Raises:
            PoisonedVectorError: our own vector can't be given to anybody.
        """
        ...

    async def apply(self, post: Post | None, average: Average, number: int) -> tuple[AnswerKind, float]:
        """Take a round's result.

        Args:
            post: the learner's; None when it wasn't there.
            average: of all members.
            number: of the round.

        Returns:
            What to answer the learner, and the norm of what was added to our vector.
        """
        ...
