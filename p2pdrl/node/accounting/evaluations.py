"""The swarm's learning curve: evaluations by all nodes, whose turn the next is, what the curve says. Pure.

Whenever the swarm has made another ``every`` environment steps, one node plays episodes with the parameters
that it holds then; the nodes take turns by their ids. What it found rides in its report, so everybody has
the whole curve and judges alike.

An evaluation that reaches the goal is confirmed by the next node at once, on other episodes: one good
sample among many doesn't end a run, and neither does what one node alone says.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["Entry", "Evaluation", "EvaluationLog", "Fall", "Turns"]

Natural = Annotated[int, Meta(ge=0, lt=2**53)]
NonNegative = Annotated[float, Meta(ge=0)]

MOST_ENTRIES = 1000
"""Evaluations kept; beyond that every second one of the older half goes."""
REST = 9.0
"""A node rests this many times as long as its last evaluation took: at most a tenth of its time."""
SMOOTH = 5
"""Evaluations that a fall is judged over."""
FALLEN = 1 / 3
"""A curve has fallen when it has lost this part of what it had gained."""


class Evaluation(msgspec.Struct, frozen=True, array_like=True):
    """Episodes that one node has played with the policy it held."""

    env_steps: Natural
    """Of the whole swarm when it began."""
    policy_version: Natural
    episodes: Annotated[int, Meta(ge=1, lt=2**31)]
    mean: float
    """Of the episodes' returns: raw rewards, undiscounted."""
    std: NonNegative
    """Of the returns, over the population."""
    length: NonNegative
    """Mean steps of an episode."""
    seconds: NonNegative
    """The episodes took, without the start of a process that plays them."""

    @property
    def finite(self) -> bool:
        """Whether all numbers are; a peer's, or an environment's, may not be."""
        return all(map(math.isfinite, (self.mean, self.std, self.length, self.seconds)))


@dataclass(frozen=True, slots=True)
class Entry:
    """An evaluation and the node that made it."""

    node: str
    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class Fall:
    """A learning curve that has fallen for long."""

    best: float
    """Mean return at its height, over `SMOOTH` evaluations."""
    best_steps: int
    """The swarm's environment steps there."""
    last: float
    """Mean return over the last `SMOOTH`."""

    def __str__(self) -> str:
        return (
            f"the evaluated return has fallen from {self.best:.4g} (at {self.best_steps:,} steps) "
            f"to {self.last:.4g} and stays there"
        )


class EvaluationLog:
    """Evaluations of one lineage in the order of their environment steps."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._known: set[tuple[str, int]] = set()
        self._fall: Fall | None = None

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> Sequence[Entry]:
        """All that are kept, the oldest first."""
        return self._entries

    @property
    def newest(self) -> Entry | None:
        """The one that began last."""
        return self._entries[-1] if self._entries else None

    @property
    def best(self) -> Entry | None:
        """The one with the greatest mean return, the earliest of equal ones."""
        return max(self._entries, key=lambda entry: entry.evaluation.mean, default=None)

    def add(self, node: str, evaluation: Evaluation) -> bool:
        """Take an evaluation in; tell whether it is new. One that isn't finite is passed over."""
        new = self._insert(node, evaluation)
        if new:
            self._fall = self._judge()  # here and not where it is asked: that is every second
        return new

    def _insert(self, node: str, evaluation: Evaluation) -> bool:
        key = (node, evaluation.env_steps)
        if key in self._known or not evaluation.finite:
            return False
        self._known.add(key)
        bisect.insort(self._entries, Entry(node, evaluation), key=_order)
        if len(self._entries) > MOST_ENTRIES:
            half = len(self._entries) // 2
            self._entries[:half] = self._entries[:half:2]
            self._known = {(entry.node, entry.evaluation.env_steps) for entry in self._entries}
        return True

    def rows(self) -> list[tuple[str, Evaluation]]:
        """Return what a checkpoint keeps of it: see `restore`."""
        return [(entry.node, entry.evaluation) for entry in self._entries]

    def restore(self, rows: object) -> None:
        """Take in what `rows` made, as plain JSON types; what isn't of that form is forgotten."""
        try:
            known = msgspec.convert(rows, list[tuple[str, Evaluation]])
        except msgspec.ValidationError:
            return
        for node, evaluation in known:
            self._insert(node, evaluation)
        self._fall = self._judge()

    def reached(self, goal: float, *, alone: bool = False) -> tuple[Entry, Entry] | None:
        """Return two evaluations of different nodes if they, and all since, reach the goal.

        Args:
            alone: whether a single node trains: its last two are enough then.
        """
        newest = self.newest
        if newest is None or newest.evaluation.mean < goal:
            return None
        for entry in reversed(self._entries[:-1]):
            if entry.evaluation.mean < goal:
                return None
            if alone or entry.node != newest.node:
                return entry, newest
        return None

    def unconfirmed(self, goal: float | None, *, alone: bool = False) -> Entry | None:
        """Return the newest evaluation if it reaches the goal and isn't confirmed: see `reached`."""
        newest = self.newest
        if goal is None or newest is None or newest.evaluation.mean < goal:
            return None
        return newest if self.reached(goal, alone=alone) is None else None

    def fall(self) -> Fall | None:
        """Tell whether the curve has fallen for long: see `Fall`."""
        return self._fall

    def _judge(self) -> Fall | None:
        """Judge the curve as it is now.

        Compared are the mean of the last `SMOOTH` evaluations and the greatest such mean. It has fallen when
        `FALLEN` of what was gained since the lowest is lost again, more than three standard errors of the
        difference, and the height lies at least twice `SMOOTH` evaluations back.
        """
        if len(self._entries) < 3 * SMOOTH:
            return None
        curve = [entry.evaluation for entry in self._entries]
        returns = [one.mean for one in curve]
        means = [sum(returns[at : at + SMOOTH]) / SMOOTH for at in range(len(returns) - SMOOTH + 1)]
        top = max(range(len(means)), key=means.__getitem__)
        if top > len(means) - 1 - 2 * SMOOTH:
            return None
        best, last, lowest = means[top], means[-1], min(means[: top + 1])
        lost = best - last
        height = curve[top : top + SMOOTH]
        error = math.hypot(_error(height), _error(curve[-SMOOTH:]))
        # A curve that only ever fell has gained nothing: what it lost counts then.
        gained = best - lowest if best > lowest else lost
        if lost <= 0 or lost < FALLEN * gained or lost < 3.0 * error:
            return None
        return Fall(best, height[-1].env_steps, last)


def _order(entry: Entry) -> tuple[int, str]:
    return entry.evaluation.env_steps, entry.node


def _error(window: Sequence[Evaluation]) -> float:
    """Standard error of the mean of some evaluations' means."""
    # not by squares: those of a peer's numbers may be more than a float holds, which raises
    return math.hypot(*(one.std / math.sqrt(one.episodes) for one in window)) / len(window)


class Turns:
    """Tells a node when it is to evaluate.

    Args:
        me: this node's id.
        every: environment steps of the swarm between two evaluations.
        env_steps: the swarm's, now: the first is due at the next multiple of ``every``.
    """

    def __init__(self, me: str, every: int, env_steps: int) -> None:
        self._me = me
        self._every = every
        self._mark = env_steps // every
        self._rests_until_s = float("-inf")

    def took(self, seconds: float, now_s: float) -> None:
        """Rest: an evaluation of ours has ended, or failed."""
        self._rests_until_s = now_s + REST * seconds

    def mine(
        self, env_steps: int, nodes: Sequence[str], log: EvaluationLog, goal: float | None, now_s: float
    ) -> bool:
        """Tell whether this node is to evaluate now.

        Args:
            env_steps: the swarm's.
            nodes: ids of all living nodes that train, this one's included, in any order.
            goal: that the swarm trains to; None for none.
            now_s: monotonic time.
        """
        order = sorted(nodes)
        mark, before = env_steps // self._every, self._mark
        self._mark = max(mark, before)
        if self._me not in order:
            return False
        unconfirmed = log.unconfirmed(goal, alone=len(order) == 1)
        if unconfirmed is not None:
            after = bisect.bisect_right(order, unconfirmed.node) % len(order)
            if order[after] == self._me and env_steps > unconfirmed.evaluation.env_steps:
                return True
        if now_s < self._rests_until_s:
            return False
        passed = range(max(before + 1, mark - len(order) + 1), mark + 1)
        return any(order[at % len(order)] == self._me for at in passed)
