"""When each action of a schedule begins and ends, from what stages and links cost.

A rank does one thing at a time, in its schedule's order. Sends are asynchronous: their rank goes on at
once, and a message leaves when the messages before it have left the same direction of the same link
(activations and gradients between the same two ranks share it). It arrives a latency later, and a receive
waits for it. What several links of one machine have in common isn't modelled.

With S equal stages and messages that cost nothing these are the values of the papers: GPipe and 1F1B take
(M+S−1)(f+b) seconds and each rank idles (S−1)/(M+S−1) of them (Huang 2019, arXiv 1811.06965, section 2.3);
interleaved with V stages on each of R ranks, M a multiple of R, idles (R−1)/(V·M+R−1) of them
(Narayanan 2021, arXiv 2104.04473, section 2.2, there relative to the ideal time).

When a message takes t seconds, one microbatch more costs 1F1B f+b+2t(S−1)/S seconds, because a rank sends no
further microbatch before a gradient is back; GPipe, which stores them all, hides t behind computing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.layers import FREE, Links, check_links, check_numbers, link_between
from p2pdrl.pipeline.schedule import Action, MessageRoute, check_schedule, peak_activations, route

__all__ = ["MicrobatchCosts", "Timed", "Timeline", "draw", "legend", "predict"]


@dataclass(frozen=True, slots=True)
class MicrobatchCosts:
    """What one microbatch costs, at each stage and between them.

    Attributes:
        message_bytes: of the activation from each stage to the next, S−1 of them, or one number for all; its
            gradient has as many.
        links: between ranks; by default messages cost nothing.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    message_bytes: float | tuple[float, ...] = 0.0
    links: Links = FREE

    @property
    def stages(self) -> int:
        """S."""
        return len(self.forward_s)

    def boundary_bytes(self, way: MessageRoute) -> float:
        """Bytes of a message between two neighbouring stages."""
        if isinstance(self.message_bytes, tuple):
            return self.message_bytes[min(way)]
        return self.message_bytes

    def check(self) -> None:
        """Raise a `ConfigError` for numbers that are too few, negative, not finite, or all zero."""
        sizes = self.message_bytes if isinstance(self.message_bytes, tuple) else (self.message_bytes,)
        if len(self.backward_s) != self.stages:
            raise ConfigError(
                f"{self.stages} forward times need as many backward times, not {len(self.backward_s)}"
            )
        if isinstance(self.message_bytes, tuple) and len(sizes) != self.stages - 1:
            raise ConfigError(
                f"{self.stages} stages have {self.stages - 1} messages' bytes, not {len(sizes)}"
            )
        check_numbers("the seconds of a stage", (*self.forward_s, *self.backward_s))
        check_numbers("the bytes of a message", sizes)
        check_links(self.links)
        if not any(self.forward_s) and not any(self.backward_s):
            raise ConfigError("at least one stage must take more than 0 seconds")


class Timed(NamedTuple):
    """An action and its time.

    Attributes:
        start_s: when it begins; a send when its first byte leaves, a receive when its rank begins to wait.
        end_s: when it ends; a send when its last byte arrives.
    """

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A schedule with its times, which begin at 0.

    Attributes:
        total_s: when the last rank has computed all: the time of one batch.
        busy_s: how long each rank computes.
        bubbles: the part of the total in which each rank computes nothing.
        stored: most microbatches whose activations each rank keeps at once (interleaved: times stages).
        one_device_s: what one device takes that computes each stage as fast as its rank does.
    """

    rows: tuple[tuple[Timed, ...], ...]
    total_s: float
    busy_s: tuple[float, ...]
    bubbles: tuple[float, ...]
    stored: tuple[int, ...]
    one_device_s: float
    stages: int
    microbatches: int

    @property
    def speedup(self) -> float:
        """How many times as fast as one device."""
        return self.one_device_s / self.total_s

    @property
    def ideal_speedup(self) -> float:
        """That of equal stages and free messages: R·V·M / (V·M + R − 1), with V = 1 unless interleaved."""
        ranks = len(self.rows)
        turns = self.stages // ranks * self.microbatches
        return ranks * turns / (turns + ranks - 1)


def predict(schedule: Sequence[Sequence[Action]], costs: MicrobatchCosts) -> Timeline:
    """Predict when everything happens.

    Raises:
        ConfigError: the costs are bad, or it isn't a schedule of as many stages as they are of.
    """
    costs.check()
    microbatches = 1 + max((action.microbatch for actions in schedule for action in actions), default=-1)
    check_schedule(schedule, costs.stages, microbatches)
    rows = _Clockwork(schedule, costs).run()
    total_s = max(t.end_s for row in rows for t in row if t.action.kind == "backward")
    each_s = [microbatches * sum(both) for both in zip(costs.forward_s, costs.backward_s, strict=True)]
    busy_s = tuple(sum(each_s[rank :: len(rows)]) for rank in range(len(rows)))
    return Timeline(
        rows=rows,
        total_s=total_s,
        busy_s=busy_s,
        bubbles=tuple(max(0.0, 1.0 - busy / total_s) for busy in busy_s),
        stored=tuple(peak_activations(actions) for actions in schedule),
        one_device_s=sum(each_s),
        stages=costs.stages,
        microbatches=microbatches,
    )


class _Clockwork:
    """Runs the ranks of a checked schedule as far as their messages let them, until all are done.

    A direction of a link has one sender, so that messages leave it in that rank's own order, and
    the order in which ranks are run here changes no time.
    """

    def __init__(self, schedule: Sequence[Sequence[Action]], costs: MicrobatchCosts) -> None:
        self._schedule, self._costs = schedule, costs
        self._now_s = [0.0] * len(schedule)
        self._rows: list[list[Timed]] = [[] for _ in schedule]
        self._free_s: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._arrives_s: dict[tuple[MessageRoute, int], float] = {}

    def run(self) -> tuple[tuple[Timed, ...], ...]:
        """All actions with their times."""
        while any(len(row) < len(actions) for row, actions in zip(self._rows, self._schedule, strict=True)):
            for rank, actions in enumerate(self._schedule):
                row = self._rows[rank]
                while len(row) < len(actions) and self._step(rank, actions[len(row)]):
                    pass
        return tuple(map(tuple, self._rows))

    def _step(self, rank: int, action: Action) -> bool:
        """Do one action, unless its message isn't sent yet."""
        now_s = start_s = self._now_s[rank]
        if action.kind == "forward":
            end_s = self._now_s[rank] = now_s + self._costs.forward_s[action.stage]
        elif action.kind == "backward":
            end_s = self._now_s[rank] = now_s + self._costs.backward_s[action.stage]
        elif action.kind.startswith("send"):
            start_s, end_s = self._send(action, now_s)
        else:
            arrives_s = self._arrives_s.get((route(action), action.microbatch))
            if arrives_s is None:
                return False
            end_s = self._now_s[rank] = max(now_s, arrives_s)
        self._rows[rank].append(Timed(action, start_s, end_s))
        return True

    def _send(self, action: Action, now_s: float) -> tuple[float, float]:
        way = route(action)
        pair = way.source % len(self._schedule), way.target % len(self._schedule)
        link = link_between(self._costs.links, *pair)
        start_s = max(now_s, self._free_s[pair])
        self._free_s[pair] = start_s + link.busy_s(self._costs.boundary_bytes(way))
        end_s = self._free_s[pair] + link.latency_s
        self._arrives_s[way, action.microbatch] = end_s
        return start_s, end_s


def draw(timeline: Timeline, width: int) -> list[str]:
    """Draw one line per rank and one of time, at most ``width`` columns, but 30 at least.

    Time runs from left to right, with dots where a rank computes nothing. ``F3----`` is the forward of the
    third microbatch, ``B3`` its backward, as long as they take: here, as in the papers' figures, microbatches
    count from 1. Where a rank holds several stages a letter tells which: ``F3b`` is that of its second. Where
    there is no room for a name, its first letter fills the place.
    """
    names = [f"rank {rank}" for rank in range(len(timeline.rows))]
    indent = len(names[-1]) + 2
    columns = _columns(timeline, max(30, width) - indent)
    lines = [f"{name:<{indent}}{_row(timeline, rank, columns)}" for rank, name in enumerate(names)]
    end = f"{timeline.total_s:.4g} s"
    axis = "0" + end.rjust(max(columns - 1, len(end) + 1))
    return [*lines, " " * indent + axis]


def legend(timeline: Timeline) -> str:
    """Say in a line what the drawing's signs are."""
    if timeline.stages > len(timeline.rows):
        return "F1a--: forward of microbatch 1, stage a of the rank; B: backward; dots: waiting"
    return "F1--: forward of microbatch 1, as long as it takes; B: backward; dots: waiting"


def _columns(timeline: Timeline, room: int) -> int:
    """Of the whole time; whole numbers for the quickest action where they fit, up to its name and a space."""
    computed = [t for row in timeline.rows for t in row if _computes(t) and t.end_s > t.start_s]
    quickest_s = min(t.end_s - t.start_s for t in computed)
    longest = max(len(_label(timeline, t.action)) for t in computed)
    quickest = timeline.total_s / quickest_s
    if quickest > room:
        return room
    return round(min(longest + 1, room // quickest) * quickest)


def _row(timeline: Timeline, rank: int, columns: int) -> str:
    cells = ["."] * columns
    for t in timeline.rows[rank]:
        if _computes(t):
            first, end = (_column(timeline, time_s, columns) for time_s in (t.start_s, t.end_s))
            cells[first:end] = _block(_label(timeline, t.action), end - first)
    return "".join(cells)


def _column(timeline: Timeline, time_s: float, columns: int) -> int:
    """The nearest column; what ends when another begins shares its edge."""
    return math.floor(time_s / timeline.total_s * columns + 0.5)


def _block(label: str, size: int) -> str:
    if size < len(label):
        return label[0] * size
    return label.ljust(size - 1, "-").ljust(size)


def _label(timeline: Timeline, action: Action) -> str:
    ranks = len(timeline.rows)
    chunk = action.stage // ranks
    several = timeline.stages > ranks
    letter = (chr(ord("a") + chunk) if chunk < 26 else "+") if several else ""
    return f"{action.kind[0].upper()}{action.microbatch + 1}{letter}"


def _computes(timed: Timed) -> bool:
    return timed.action.kind in {"forward", "backward"}
