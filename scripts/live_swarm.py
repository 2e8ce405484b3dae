"""Real nodes on loopback for scripts that measure: started, asked, switched between strategies, ended.

Learners are a regression whose updates take as long as wanted (``min_update_s``), so that many nodes fit on
few cores: what is measured is the swarm, not the machine's arithmetic.
"""

from __future__ import annotations

import io
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

import numpy as np
import psutil

from p2pdrl.cli.client import NodeClient
from p2pdrl.cli.fleet import Fleet, Member
from p2pdrl.cli.ports import ReservedPorts
from p2pdrl.config.mode import changed_options, protocol_of
from p2pdrl.config.strategy import StrategyConfig, mode_of
from p2pdrl.errors import P2PDRLError
from p2pdrl.planner.books import STALENESS_BOUNDS
from p2pdrl.tensors.checkpoint import from_bytes

ASK_S = 5.0


@dataclass
class Measured:
    """One strategy over some seconds; means over nodes.

    Attributes:
        seconds: how long.
        updates_s: per second and node, one number for each node.
        rounds_s: that a node began or took part in, and that ended well.
        lost_s: that came to nothing.
        bytes_s: payload that left a node; that came is about the same.
        body_s: all that left it, heads and membership included, without HTTP's.
        waiting: share of the time in which learners stood still.
        round_s: mean seconds of a round.
        staleness: mean, in policy versions.
        cpu: share of all cores that was busy meanwhile, whatever with.
    """

    seconds: float
    updates_s: list[float]
    rounds_s: float
    lost_s: float
    bytes_s: float
    body_s: float
    waiting: float
    round_s: float
    staleness: float
    cpu: float
    outcomes: dict[str, int] = field(default_factory=dict)


class LiveSwarm:
    """A context manager.

    Args:
        nodes: how many.
        options: of all, as for ``--set``.
        own: of single nodes, by place.
    """

    def __init__(
        self, nodes: int, options: dict[str, Any], own: dict[int, dict[str, Any]] | None = None
    ) -> None:
        self.nodes = nodes
        self._folder = Path(tempfile.mkdtemp(prefix="p2pdrl-live-"))
        self._arguments = [f"--set={key}={_text(value)}" for key, value in options.items()]
        self._own = own or {}
        self._ports = ReservedPorts(nodes)
        self._pool = ThreadPoolExecutor(max_workers=nodes, thread_name_prefix="ask")
        self._fleet: Fleet | None = None

    def __enter__(self) -> Self:
        self._ports.__enter__()
        self._fleet = _OwnFleet(self._folder, self._ports.ports, self._arguments, self._own)
        self._fleet.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fleet is not None:
            self._fleet.__exit__(kind, error, trace)
        self._ports.__exit__(kind, error, trace)
        self._pool.shutdown(cancel_futures=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def members(self) -> list[Member]:
        """The nodes."""
        return [] if self._fleet is None else self._fleet.members

    def statuses(self) -> list[dict[str, Any]]:
        """Each node's status; an empty one of those that don't answer."""
        return list(self._pool.map(_status, self.members))

    def vectors(self) -> np.ndarray:
        """Each node's parameters, a row each."""
        return np.array(list(self._pool.map(_parameters, self.members)))

    def wait(self, ready: Callable[[dict[str, Any]], bool], timeout_s: float, what: str) -> None:
        """Wait until all nodes' statuses are ``ready``.

        Raises:
            SystemExit: they aren't in time, or a node has ended.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            ended = [member for member in self.members if member.exit_code is not None]
            if ended:
                raise SystemExit(f"{ended[0].name} ended: {ended[0].last_words()}")
            statuses = self.statuses()
            if all(status and ready(status) for status in statuses):
                return
            if time.monotonic() > until_s:
                states = [status.get("state") for status in statuses]
                raise SystemExit(f"after {timeout_s:.0f} s still not: {what}; nodes are {states}")
            time.sleep(0.3)

    def training(self, timeout_s: float = 120.0) -> None:
        """Wait until all train, and know each other."""
        self.wait(lambda status: status.get("state") == "training", timeout_s, "all nodes train")

    def set_mode(self, strategy: StrategyConfig) -> None:
        """Put another strategy in force, and wait until all follow."""
        pairs = [f"protocol={protocol_of(strategy)}"]
        pairs += [f"{key}={_text(value)}" for key, value in changed_options(strategy).items()]
        query = urlencode([("mode", mode_of(strategy)), *(("set", pair) for pair in pairs)])
        record = _client(self.members[0]).post(f"/v1/mode?{query}")
        epoch = record.get("epoch")
        self.wait(lambda status: status.get("mode_epoch") == epoch, 30, f"mode epoch {epoch}")

    def measure(self, protocol: str, seconds: float) -> Measured:
        """Watch the strategy in force for a while."""
        psutil.cpu_percent()
        first, began_s = self.statuses(), time.monotonic()
        time.sleep(seconds)
        last, took_s = self.statuses(), time.monotonic() - began_s
        return _difference(first, last, protocol, took_s, psutil.cpu_percent() / 100.0)


class _OwnFleet(Fleet):
    """A fleet some of whose nodes have options of their own."""

    def __init__(
        self, folder: Path, ports: list[int], arguments: list[str], own: dict[int, dict[str, Any]]
    ) -> None:
        super().__init__(folder, ports, arguments)
        self._common, self._own = arguments, own

    def _start(self, name: str, port: int) -> Member:
        mine = self._own.get(len(self.members), {})
        self._arguments = [*self._common, *(f"--set={key}={_text(value)}" for key, value in mine.items())]
        return super()._start(name, port)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _client(member: Member) -> NodeClient:
    folder = str(member.folder) if (member.folder / "token").exists() else None
    return NodeClient(member.address, data_dir=folder, timeout_s=ASK_S)


def _status(member: Member) -> dict[str, Any]:
    try:
        return _client(member).status()
    except P2PDRLError:
        return {}


def _parameters(member: Member) -> np.ndarray:
    room = io.BytesIO()
    _client(member).download("/v1/checkpoint", room)
    return np.asarray(from_bytes(room.getvalue()).params, np.float64)


def _difference(
    first: list[dict[str, Any]], last: list[dict[str, Any]], protocol: str, seconds: float, cpu: float
) -> Measured:
    nodes = len(last)
    sums: dict[str, float] = {}
    outcomes: dict[str, int] = {}
    staleness: dict[str, int] = {}
    for before, after in zip(first, last, strict=True):
        old = before["accounting"].get(protocol, {})
        new = after["accounting"].get(protocol, {})
        for key in ("learner_wait_s", "round_s", "bytes_in", "bytes_out"):
            sums[key] = sums.get(key, 0.0) + new.get(key, 0) - old.get(key, 0)
        for key in ("bytes_in", "bytes_out"):
            sums[f"body_{key}"] = sums.get(f"body_{key}", 0.0) + after[key] - before[key]
        for field_name, counts in (("rounds", outcomes), ("staleness", staleness)):
            for key, count in new.get(field_name, {}).items():
                counts[key] = counts.get(key, 0) + count - old.get(field_name, {}).get(key, 0)
    good = outcomes.get("pushed", 0) or outcomes.get("ok", 0)
    begun = {key: count for key, count in outcomes.items() if key not in ("answered", "unchanged")}
    ended = sum(outcomes.values())
    lost = sum(begun.values()) - outcomes.get("pushed", 0) - outcomes.get("ok", 0)
    bounds = (*STALENESS_BOUNDS, 2 * STALENESS_BOUNDS[-1])
    merged = sum(staleness.values())
    aged = sum(count * bound for count, bound in zip(staleness.values(), bounds, strict=False))
    return Measured(
        seconds=seconds,
        updates_s=[(b["updates"] - a["updates"]) / seconds for a, b in zip(first, last, strict=True)],
        rounds_s=good / seconds / nodes,
        lost_s=lost / seconds / nodes,
        bytes_s=(sums["bytes_in"] + sums["bytes_out"]) / 2 / seconds / nodes,
        body_s=(sums["body_bytes_in"] + sums["body_bytes_out"]) / 2 / seconds / nodes,
        waiting=sums["learner_wait_s"] / seconds / nodes,
        round_s=sums["round_s"] / ended if ended else 0.0,
        staleness=aged / merged if merged else 0.0,
        cpu=cpu,
        outcomes=outcomes,
    )
