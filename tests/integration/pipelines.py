"""Who is which rank in a live swarm of pipelines, and how soon updates go on after something happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

Json = Any
STREAM = ("backend=stream",)
"""These models are so small that ``auto`` would rightly train them without a pipeline."""
SMALL = {
    "task.env.num_envs": 4,
    "task.algorithm.unroll_steps": 64,
    "task.algorithm.epochs": 2,
    "task.algorithm.minibatches": 2,
    "task.strategy.compression": "none",
    "node.checkpoint.every_s": 0,
}
"""Options of nodes whose updates take little time."""


def place(node) -> Json:
    """A node's ``pipeline`` of its status, where it is a rank; else None."""
    found = node.status().get("pipeline") or {}
    return found if found.get("rank") is not None else None


def ranks(nodes) -> dict[str, tuple[int, int, int]]:
    """By name: generation, rank and number of ranks of those that are in a pipeline."""
    found = {node.name: place(node) for node in nodes}
    return {
        name: (each["generation"], each["rank"], each["ranks"])
        for name, each in found.items()
        if each is not None
    }


def holder(nodes, rank: int) -> Any:
    """The node that is this rank, of the first pipeline in which somebody is."""
    return next(node for node in nodes if (place(node) or {}).get("rank") == rank)


def whole(nodes, stages: int, count: int = 1) -> bool:
    """Whether there are ``count`` pipelines of so many ranks, and all other nodes stand by."""
    found = ranks(nodes).values()
    ranked = sorted(rank for _, rank, of in found if of == stages)
    return len(found) == stages * count and ranked == sorted([*range(stages)] * count)


def updates(nodes) -> dict[str, int]:
    """Updates by name, so far."""
    return {node.name: node.status().get("updates", 0) for node in nodes}


class Watch:
    """Watches the survivors of a loss, or all at a change of mode.

    Args:
        nodes: who is watched.
    """

    def __init__(self, nodes: Sequence[Any]) -> None:
        self.nodes = list(nodes)
        self.pids = {node.name: (node.process.pid, node.learner_pid()) for node in nodes}
        self.version = max(node.status()["policy_version"] for node in nodes)
        self.at_s = time.time()

    def lose(self, victim, how: Callable[[], object]) -> None:
        """Lose a member by ``how``; what it had reached counts."""
        status = victim.status()
        self.version = max(self.version, status["policy_version"], self._version())
        self._name, self._id = victim.name, status["id"]
        self.at_s = time.time()
        how()

    def known_s(self) -> float | None:
        """Seconds from the loss until a survivor told of it; None while none has."""
        times = [
            event["time"]
            for node in self.nodes
            for event in node.events()
            if event["time"] > self.at_s and self._about(event)
        ]
        return min(times) - self.at_s if times else None

    def _about(self, event: Json) -> bool:
        kind = event["kind"]
        if "member" in kind or "pipeline" in kind:
            return self._id in str(event) or self._name in event["text"]
        return kind == "group" and self._name not in event["text"].split(": ")[-1]

    def goes_on(self, within_s: float, formed: Callable[[], bool] = lambda: True) -> float:
        """Wait until all is formed and somebody made an update after that; return the seconds it took."""
        before: dict[str, int] | None = None
        while True:
            if before is None and formed():
                before = updates(self.nodes)
            if before is not None:
                now = updates(self.nodes)
                if any(now[name] > count for name, count in before.items()):
                    return round(time.time() - self.at_s, 2)
            took_s = time.time() - self.at_s
            assert took_s < within_s, f"after {took_s:.1f} s: {ranks(self.nodes)}\n" + "\n".join(
                f"{node.name}: {node.text()[-2000:]}" for node in self.nodes
            )
            time.sleep(0.03)

    def begun_with(self) -> int:
        """The lowest version with which a generation began since; the newest one where none began."""
        return min((event["policy_version"] for event in self._begun()), default=self._version())

    def told_back(self) -> int | None:
        """How many updates people were told that a generation went back since; None where nobody knew."""
        return max(
            (event["updates_back"] for event in self._begun() if "updates_back" in event), default=None
        )

    def _begun(self) -> list[Json]:
        return [
            event
            for node in self.nodes
            for event in node.events()
            if event["time"] > self.at_s and "generation" in event
        ]

    def nobody_began_anew(self) -> None:
        """Neither a node nor a learner was started again."""
        for node in self.nodes:
            status = node.status()
            assert (node.process.pid, status["learner"]["pid"]) == self.pids[node.name], node.text()[-2000:]
            assert status["learner"]["restarts"] == 0

    def nothing_lost(self, most: int) -> None:
        """Nobody was started anew, and the newest state is at most so many updates older than before."""
        self.nobody_began_anew()
        assert self._version() >= self.version - most

    def _version(self) -> int:
        return max(node.status()["policy_version"] for node in self.nodes)


def held_until_whole(nodes, stages: int, wait_until: Callable[..., Any]) -> None:
    """Hold nodes that just start until they form one pipeline, so that all updates are made by it; let go.

    The pause is a record of the swarm, which learners know before their first update.
    """
    first = nodes[0]
    first.hold()
    wait_until(
        lambda: whole(nodes, stages) and all(node.status().get("state") == "paused" for node in nodes),
        90,
        "nodes that are held form a pipeline",
    )
    assert not any(updates(nodes).values()), f"updates before there was a pipeline: {updates(nodes)}"
    first.post("/v1/resume?scope=swarm")
