"""A node that isn't one: for tests of the API, of the command line and of scripts.

`FakeNode` answers with constants that a test may change; `ServedNode` runs its API on a free
loopback port in a thread of its own, so that synchronous clients can call it.
"""

# ruff: noqa: N803, N806 (names carry shape suffixes)
from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
from aiohttp import web

from p2pdrl.api.protocol import Event
from p2pdrl.api.routes import mount
from p2pdrl.config.mode import strategy_from
from p2pdrl.errors import ConfigError
from p2pdrl.membership.identity import verify
from p2pdrl.membership.invites import Inviter
from p2pdrl.membership.records import SwarmRecord, Verifier
from p2pdrl.membership.swarm_records import SwarmRecords
from p2pdrl.tensors.inference_slots import InferenceSpec, PolicyAnswer
from p2pdrl.transport.dial import dial_back
from p2pdrl.transport.protocol import Address

__all__ = ["FakeEvents", "FakeNode", "ServedNode"]


class FakeEvents:
    """An event log without a bound.

    Args:
        capacity: length of a subscriber's queue.
    """

    def __init__(self, capacity: int = 100) -> None:
        self._log: list[Event] = []
        self._queues: set[asyncio.Queue[Event]] = set()
        self._capacity = capacity

    def emit(self, kind: str, text: str, **fields: object) -> Event:
        """Append one event and hand it to the subscribers; a full queue is dropped."""
        event: Event = {
            "seq": len(self._log) + 1,
            "time": 1_700_000_000.0,
            "kind": kind,
            "text": text,
            **fields,
        }
        self._log.append(event)
        for queue in list(self._queues):
            if queue.full():
                self._queues.discard(queue)
            else:
                queue.put_nowait(event)
        return event

    def since(self, seq: int) -> list[Event]:
        """Events after ``seq``."""
        return self._log[max(0, seq) :]

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[asyncio.Queue[Event]]:
        """A queue of the events to come."""
        queue: asyncio.Queue[Event] = asyncio.Queue(self._capacity)
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)


class FakeNode:
    """A `p2pdrl.api.protocol.NodeView` of constants.

    Attributes:
        done: the changes that were asked for, in order: ``"pause swarm"``, ``"leave"``, …
        invited: whether it is a member of a swarm with a key that it doesn't hold.
        on_leave: called by `leave`, for a test that ends the server then.
        on_mode: called by `set_mode`, for a test that lets the members follow.
        policy_spec: what its policy takes: CartPole's, unless a test sets another.
        acted: the observations that it was asked about, and whether greedily.
        dialled_why: why it dials nobody back.
        on_act: called by `act_spec` and `act`, for a test that has them fail.
    """

    def __init__(
        self, name: str = "node-1", *, swarm_key: bytes | None = None, data_dir: str = "/nowhere"
    ) -> None:
        self.name = name
        self.node_id = hashlib.sha256(name.encode()).hexdigest()[:32]
        self.token = "7" * 64
        self.swarm_keys = () if swarm_key is None else (swarm_key,)
        self.invited = False
        self.inviter: Inviter | None = None
        self.open_metrics = False
        self.swarm_key_file: str | None = None
        self.data_dir = data_dir
        self.reasons: list[str] = []
        self.log = FakeEvents()
        self.done: list[str] = []
        self.on_leave: Callable[[], None] | None = None
        self.on_mode: Callable[[FakeNode], None] = lambda _node: None
        self.mode_state: dict[str, object] = _mode(name)
        self.max_act_rows = 8
        self.policy_spec = InferenceSpec(
            obs_shape=(4,), obs_dtype="float32", action_shape=(), action_dtype="int64", has_values=True
        )
        self.acted: list[tuple[npt.NDArray[Any], bool]] = []
        self.on_act: Callable[[], None] = lambda: None
        self.dialled_why = ""
        self.timeline: dict[str, object] | None = {"traceEvents": [{"name": "forward 1", "ph": "X"}]}
        self.last_rounds: list[dict[str, object]] = [_round(1, "ok"), _round(2, "timeout")]
        self.last_evaluations: list[dict[str, object]] = [_evaluation(name, 1), _evaluation(name, 2)]
        self.state: dict[str, object] = _status(name, data_dir)
        self.swarm_records = SwarmRecords(Verifier("0e27fcf7e5231f75", verify))
        self.swarm_records.follow("ab" * 16)
        self.members: list[dict[str, object]] = [_peer(name, 1, True), _peer("node-2", 2, False)]

    @property
    def keyed(self) -> bool:
        """Whether its swarm has a key."""
        return bool(self.swarm_keys) or self.invited

    @property
    def operator_keys(self) -> tuple[bytes, ...]:
        """Those of its records, which name none unless a test does."""
        return tuple(operator.public_key for operator in self.swarm_records.operators)

    def records(self) -> dict[str, object]:
        """See `NodeView`."""
        return self.swarm_records.document()

    async def submit(self, record: bytes) -> dict[str, object]:
        """Noted in ``done``, and kept if it is signed by who may."""
        decoded = msgspec.msgpack.decode(record, type=SwarmRecord)
        self.swarm_records.merge(decoded)
        self.done.append(f"record {decoded.key}")
        self.on_mode(self)
        return {"epoch": decoded.epoch, "proposer": decoded.proposer}

    async def set_stop(self, sets: Sequence[str]) -> dict[str, object]:
        """Noted in ``done``."""
        self.done.append(" ".join(["stop", *sets]))
        return {"epoch": 2, "proposer": "01" * 16}

    async def halt(self, reason: str) -> dict[str, object]:
        """Noted in ``done``."""
        self.done.append(f"halt {reason}".strip())
        return {"epoch": 1, "proposer": "01" * 16}

    async def ban(self, node: str, *, reason: str, banned: bool) -> dict[str, object]:
        """Noted in ``done``."""
        self.done.append(f"{'ban' if banned else 'unban'} {node} {reason}".strip())
        return {"epoch": 1, "proposer": "01" * 16}

    def status(self) -> dict[str, object]:
        """The constants, with health as set."""
        return {**self.state, "healthy": not self.reasons, "reasons": list(self.reasons)}

    def peers(self) -> list[dict[str, object]]:
        """Two members, or what the test has set."""
        return self.members

    def health(self) -> tuple[bool, list[str]]:
        """Well while no reasons are set."""
        return not self.reasons, self.reasons

    def ready(self) -> tuple[bool, list[str]]:
        """As healthy."""
        return self.health()

    def metrics(self) -> bytes:
        """One metric."""
        return b"p2pdrl_env_steps_total 1.0\n"

    def events(self) -> FakeEvents:
        """The log."""
        return self.log

    async def set_roles(self, roles: Sequence[str]) -> None:
        """See `NodeView`."""
        if not roles or set(roles) - {"actor", "learner", "replay", "server"}:
            raise ConfigError("no such role")
        self.done.append(f"roles {','.join(roles)}")

    async def dial_back(self, host: str, port: int, nonce: str) -> dict[str, object]:
        """Really dials, unless ``dialled_why`` says why not."""
        why = self.dialled_why or await dial_back(Address(host, port), nonce)
        return {"connected": not why, "host": host, "why": why}

    async def leave(self) -> None:
        """Noted in ``done``."""
        self.done.append("leave")
        if self.on_leave is not None:
            self.on_leave()

    async def pause(self, *, paused: bool, swarm: bool) -> None:
        """Noted in ``done``."""
        self.done.append(f"{'pause' if paused else 'resume'} {'swarm' if swarm else 'node'}")

    def mode(self) -> dict[str, object]:
        """The constants, or what the test has set."""
        return self.mode_state

    def rounds(self) -> list[dict[str, object]]:
        """Two rounds, or what the test has set."""
        return self.last_rounds

    def history(self) -> dict[str, object]:
        """One sample."""
        return {"times": [1.0], "env_steps": [0], "steps_per_s": [0.0], "nodes": {}}

    def evaluations(self) -> list[dict[str, object]]:
        """Two evaluations, or what the test has set."""
        return self.last_evaluations

    async def trace(self, seconds: float) -> dict[str, object]:
        """One box, or what the test has set; None is no pipeline."""
        if self.timeline is None:
            raise ConfigError("this node is in no pipeline at the moment")
        return {**self.timeline, "seconds": seconds}

    async def set_mode(self, mode: str, sets: Sequence[str]) -> dict[str, object]:
        """Noted in ``done`` if it makes sense; nobody follows unless the test says so."""
        strategy_from(mode, sets)
        self.done.append(" ".join(["mode", mode, *sets]))
        record = {"epoch": 2, "proposer": "01" * 16}
        self.on_mode(self)
        return dict(record)

    async def act_spec(self) -> InferenceSpec:
        """As set."""
        self.on_act()
        return self.policy_spec

    async def act(self, obs_NX: npt.NDArray[Any], *, greedy: bool) -> PolicyAnswer:
        """Noted in ``acted``; action i is i, its value i / 2."""
        self.on_act()
        self.acted.append((obs_NX, greedy))
        count, spec = len(obs_NX), self.policy_spec
        numbers_N = np.arange(count).reshape(count, *(1 for _ in spec.action_shape))
        actions_NA = np.broadcast_to(numbers_N, (count, *spec.action_shape)).astype(spec.action_dtype)
        values_N = np.arange(count, dtype=np.float32) / 2
        return PolicyAnswer(
            actions_NA, np.zeros(count, np.float32), values_N if spec.has_values else None, policy_version=120
        )

    async def checkpoint(self) -> str:
        """Noted in ``done``."""
        self.done.append("checkpoint")
        return f"{self.data_dir}/checkpoints/last.safetensors"

    async def export(self) -> bytes:
        """Three pieces and a bit of 1 MiB."""
        return b"p2pdrl" * 600_000

    def config(self) -> dict[str, object]:
        """Two keys."""
        return {"task": {"env": {"id": "CartPole-v1"}}, "node": {"swarm_key_file": self.swarm_key_file}}


class ServedNode:
    """Context manager: the API of a `FakeNode` on a free loopback port, in a thread.

    Args:
        node: what is served.
    """

    def __init__(self, node: FakeNode) -> None:
        self.node = node
        self.address = ""
        self._ready = threading.Event()
        self._stop: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="served fake node")

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(10):
            raise RuntimeError("the fake node didn't start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._thread.join(10)

    def stop(self) -> None:
        """End the server from any thread."""
        self._stop()

    async def _run(self) -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        mount(app, self.node)
        runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.address = f"{host}:{port}"
        self._stop = lambda: None if loop.is_closed() else _call(loop, over.set)
        self._ready.set()
        await over.wait()
        await site.stop()
        await _settle()
        await runner.cleanup()
        await _settle()


async def _settle() -> None:
    """Let connections that were just accepted be made, and closed ones be gone, before the loop ends."""
    for _ in range(5):
        await asyncio.sleep(0.002)  # some of it goes by the selector, which a pause of zero may not wait for


def _call(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(act)


def _status(name: str, data_dir: str) -> dict[str, object]:
    return {
        "name": name,
        "id": "01" * 16,
        "swarm_id": "ab" * 8,
        "address": "127.0.0.1:7700",
        "pid": 4711,
        "version": "0.1.0",
        "mode": "gossip",
        "mode_epoch": 1,
        "mode_error": None,
        "strategy": {"name": "adpsgd", "options": {}},
        "lineage": "cd" * 8,
        "state": "training",
        "members": {"alive": 2, "suspect": 0, "dead": 0, "left": 0},
        "policy_version": 120,
        "env_steps": 120_000,
        "swarm_env_steps": 240_000,
        "steps_per_s": 3_000.0,
        "swarm_steps_per_s": 6_000.0,
        "speedup": {"times": 1.96, "nodes": 2, "rows": 256, "critical_rows": 1_300},
        "mean_return": 431.25,
        "episodes": 700,
        "episodes_in_window": 100,
        "updates": 120,
        "consensus_distance": 0.0123,
        "loop_lag_s": 0.004,
        "rss_bytes": 90_000_000,
        "bytes_in": 1_000_000,
        "bytes_out": 2_000_000,
        "exchanges": {"ok": 50, "busy": 1, "timeout": 0, "refused": 0, "failed": 0, "adopted": 1},
        "learner": {"pid": 4712, "state": "running", "restarts": 0, "device": "cpu"},
        "evaluation": {**_evaluation(name, 2), "best": _evaluation(name, 2), "count": 2},
        "stop": {"reached": False, "reason": None, "env_steps": 0, "mean_return": 475.0, "window": 100},
        "uptime_s": 75.0,
        "data_dir": data_dir,
        "last_checkpoint": {"path": f"{data_dir}/checkpoints/last.safetensors", "age_s": 12.0, "error": None},
    }


def _mode(name: str) -> dict[str, object]:
    member = {"state": "training", "epoch": 1, "protocol": "adpsgd", "role": "", "follows": True}
    return {
        "mode": "gossip",
        "protocol": "adpsgd",
        "options": {"weight": 0.3},
        "epoch": 1,
        "since": 1_700_000_000.0,
        "error": None,
        "facts": {},
        "record": {
            "epoch": 1,
            "proposer": "01" * 16,
            "proposer_name": name,
            "mode": "gossip",
            "protocol": "adpsgd",
            "options": {"weight": 0.3},
        },
        "members": [{"name": name, **member}, {"name": "node-2", **member}],
    }


def _round(number: int, outcome: str) -> dict[str, object]:
    merged = {"peer": "02" * 16, "name": "node-2", "weight": 0.5, "staleness": 3}
    return {
        "number": number,
        "time": 1_700_000_000.0 + number,
        "protocol": "adpsgd",
        "outcome": outcome,
        "merged": [merged] if outcome == "ok" else [],
        "missing": [] if outcome == "ok" else ["node-2"],
        "bytes_in": 20_000,
        "bytes_out": 20_000,
        "round_trips": 1,
        "seconds": 0.012,
        "waited_s": 0.0,
        "changed": 0.25,
        "distance": 0.5,
        "error": "" if outcome == "ok" else "no answer within 2 s",
    }


def _evaluation(name: str, number: int) -> dict[str, object]:
    return {
        "env_steps": 50_000 * number,
        "policy_version": 40 * number,
        "episodes": 30,
        "mean": 200.0 * number,
        "std": 31.5,
        "length": 200.0 * number,
        "seconds": 0.75,
        "node": "01" * 16,
        "name": name,
    }


def _peer(name: str, number: int, is_self: bool) -> dict[str, object]:
    return {
        "name": name,
        "id": f"{number:02x}" * 16,
        "address": f"127.0.0.1:{7699 + number}",
        "state": "alive",
        "state_reason": "",
        "incarnation": [1_700_000_000_000, 0],
        "rtt_s": 0.0021,
        "last_seen_s": 0.4,
        "policy_version": 121 - number,
        "env_steps": 120_000,
        "steps_per_s": 3_000.0,
        "mean_return": 431.25,
        "episodes_in_window": 100,
        "staleness": number - 1,
        "bytes_in": 1_000_000,
        "bytes_out": 2_000_000,
        "consensus_distance": 0.0123,
        "loop_lag_s": 0.004,
        "rss_bytes": 90_000_000,
        "healthy": True,
        "reasons": [],
        "device": "cpu",
        "report_age_s": 0.5,
        "trains": True,
        "collects": True,
        "self": is_self,
    }
