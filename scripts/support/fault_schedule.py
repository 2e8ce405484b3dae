"""What a campaign of faults does when: drawn from a seed before anything runs, so it can be run again."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["KINDS", "Scene", "draw"]

KINDS = {
    "kill": "kill -9 of one node, which starts again on its folder",
    "kill two": "kill -9 of two nodes at once, which start again",
    "leave": "a node leaves as told by SIGTERM, and joins again",
    "stranger": "a node leaves, and another with an empty folder joins in its place",
    "pause": "SIGSTOP of a node for less than the least suspicion, then SIGCONT",
    "freeze": "SIGSTOP of a node for longer than a suspicion lasts, then SIGCONT",
    "learner": "kill -9 of a node's learner",
    "stop learner": "SIGSTOP of a node's learner, then SIGCONT",
    "actor": "kill -9 of a node's actor",
    "halves": "the network falls into two halves",
    "halves, kill": "the same, and one node is killed meanwhile and starts again after it",
    "island": "one node is cut off",
    "one way": "nothing gets from one node to another; the way back is whole",
    "loss": "a fifth of all packets is lost",
    "slow": "each way takes 50 to 150 ms",
    "slow, loss": "both",
    "clock": "a node's wall clock jumps by half a minute",
    "far clock": "a node's wall clock jumps by an hour, and back",
    "disk": "a node's disk is full for a while",
}
"""Every fault there is, and what it is."""

_SECONDS = {
    "kill": (2.0, 15.0),
    "kill two": (5.0, 15.0),
    "leave": (2.0, 10.0),
    "stranger": (2.0, 10.0),
    "pause": (1.0, 3.0),
    "freeze": (15.0, 25.0),
    "learner": (5.0, 5.0),
    "stop learner": (3.0, 10.0),
    "actor": (5.0, 5.0),
    "halves": (30.0, 60.0),
    "halves, kill": (30.0, 40.0),
    "island": (15.0, 40.0),
    "one way": (20.0, 40.0),
    "loss": (15.0, 30.0),
    "slow": (15.0, 30.0),
    "slow, loss": (20.0, 40.0),
    "clock": (10.0, 15.0),
    "far clock": (10.0, 20.0),
    "disk": (10.0, 20.0),
}


@dataclass(frozen=True)
class Scene:
    """One fault and the quiet after it.

    Attributes:
        kind: of `KINDS`.
        nodes: numbers of those that it concerns: who is killed, one half, source and target of a way.
        seconds: how long it lasts.
        rest_s: quiet time after all is well again.
        value: a number for the kind: seconds by which a clock jumps.
    """

    kind: str
    nodes: tuple[int, ...]
    seconds: float
    rest_s: float
    value: float = 0.0


def draw(
    seed: int,
    count: int,
    scenes: int,
    *,
    without: Collection[str] = (),
    clock: int = 0,
    disk: int = 0,
    actor: int = 0,
    shorter: float = 1.0,
) -> list[Scene]:
    """Draw scenes: all kinds in a random order, again and again.

    Args:
        seed: decides on everything.
        count: nodes, from number 0.
        scenes: how many.
        without: kinds that can't be done.
        clock, disk, actor: numbers of the nodes that have a clock, a disk, an actor that can be broken.
        shorter: factor on what lasts longer than five seconds.
    """
    rng = random.Random(seed)
    kinds = [kind for kind in KINDS if kind not in without]
    found: list[Scene] = []
    while len(found) < scenes:
        rng.shuffle(kinds)
        for kind in kinds:
            seconds = rng.uniform(*_SECONDS[kind])
            if seconds > 5.0:
                seconds = max(5.0, seconds * shorter)
            rest_s = rng.uniform(2.0, 5.0)
            nodes = tuple(rng.sample(range(count), _concerned(kind, count)))
            value = 0.0
            if kind in ("clock", "far clock"):
                nodes = (clock,)
                value = rng.choice((-1, 1)) * (30.0 if kind == "clock" else 3600.0)
            elif kind == "disk":
                nodes = (disk,)
            elif kind == "actor":
                nodes = (actor,)
            found.append(Scene(kind, nodes, round(seconds, 1), round(rest_s, 1), value))
    return found[:scenes]


def _concerned(kind: str, count: int) -> int:
    if kind.startswith("halves"):
        return count // 2
    if kind in ("loss", "slow", "slow, loss"):
        return 0
    return 2 if kind in ("kill two", "one way") else 1
