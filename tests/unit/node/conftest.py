"""Fakes of what surrounds the modules of the node."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pdrl.clock import ManualClock
from p2pdrl.config.learner_mode import FREE
from p2pdrl.config.node import LearnerConfig
from p2pdrl.config.root import Config
from p2pdrl.config.strategy import AdpsgdConfig
from p2pdrl.config.task import StopConfig, TaskConfig, task_hash
from p2pdrl.errors import ConfigError
from p2pdrl.membership.events import MemberView
from p2pdrl.membership.identity import Identity, verify
from p2pdrl.membership.operators import Operator
from p2pdrl.membership.records import Incarnation, Verifier
from p2pdrl.membership.swarm_records import SwarmRecords
from p2pdrl.node.accounting.exchanges import Accounting
from p2pdrl.node.accounting.facts import FactSigner
from p2pdrl.node.accounting.metrics_gossip import MetricsGossip
from p2pdrl.node.accounting.progress_tracker import ProgressTracker
from p2pdrl.node.children.restarts import RestartPolicy
from p2pdrl.node.context import NodeContext
from p2pdrl.node.drift import DriftWatch
from p2pdrl.node.events import EventLog
from p2pdrl.node.record_follower import RecordFollower
from p2pdrl.telemetry.rate import RateMeter
from p2pdrl.tensors.board import BoardSpec, DaemonBoard
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout
from p2pdrl.testing.membership_simulator import trust
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.transport.protocol import Address, TrafficCounters
from p2pdrl.versions import SPOKEN

from .follower_fakes import FakeFigures
from .supervised import QUICK, Supervised
from .training_peers import Peer

SPEC = BoardSpec(
    Layout((TensorEntry("w", (5,)),)),
    SidecarLayout(
        (
            SidecarItem("adam.m", (5,)),
            SidecarItem("adam.step", (), "int64"),
            SidecarItem("observations.count", (), "float64", "moments"),
        )
    ),
)


def sidecar(step: int) -> dict[str, np.ndarray]:
    """Optimizer state of a node that made ``step`` updates."""
    return {
        "adam.m": np.full(5, step, np.float32),
        "adam.step": np.array(step, np.int64),
        "observations.count": np.array(float(step)),
    }


class FakeMembership:
    """Members as the test says, and the swarm's real records."""

    def __init__(self, seed: int = 1, roots: Iterable[Operator] = ()) -> None:
        self.identity = Identity(bytes([seed]) * 32)
        self.public_key = self.identity.public_key
        self.records = SwarmRecords(Verifier("swarm", verify), roots)
        self.views = [self.view(self.identity.node_id, "me", is_self=True)]
        self.on_record: Callable[[Any], None] = lambda record: None
        self.asked: list[str] = []
        self.core = SimpleNamespace(refused_records=0)
        self.messages = 0

    @staticmethod
    def view(node: str, name: str, state: str = "alive", **fields: Any) -> MemberView:
        given: dict[str, Any] = {
            "address": f"10.0.0.1:{7700 + int(node[:2], 16)}",
            "state_reason": "answered 0.1 s ago",
            "incarnation": Incarnation(1, 2),
            "rtt_s": 0.002,
            "last_seen_s": 0.1,
            "tags": {},
            "suspected_by": (),
            "spoken": SPOKEN,
            "public_key": bytes(32),
        }
        return MemberView(id=node, name=name, state=state, **(given | fields))  # type: ignore[arg-type]

    def members(self) -> list[MemberView]:
        return self.views

    def catch_up(self, node: str) -> None:
        self.asked.append(node)

    def follow(self, lineage: str) -> None:
        self.records.follow(lineage)

    def recall(self, record: Any) -> None:
        if self.records.merge(record, trusted=True):
            self.on_record(record)

    def submit(self, record: Any) -> None:
        if self.records.merge(record):
            self.on_record(record)

    def propose(self, key: str, value: Any) -> Any:
        record = self.records.compose(key, value, self.identity)
        self.submit(record)
        return record


class FakeTraining:
    """What figures, follower and checkpointer ask of `Training`, and what they told it."""

    def __init__(self, board: DaemonBoard | None = None) -> None:
        self.task = TaskConfig(stop=StopConfig(env_steps=1000, window=3))
        self.task_hash = task_hash(self.task)
        self.stop_config = self.task.stop
        self.actors = None
        self.learns = True
        self.receiver = self.sender = self.sampler = self.replay_server = self.lent_actors = None
        self.holds_replay = False
        self.lineage = "ab" * 8
        self.paused = False
        self.used: list[tuple[Any, int]] = []
        self.fractions: list[float] = []
        self.shared = 0
        self.spec = SPEC
        self.board = board
        self.policy_version = 42
        self.outcomes = {"ok": 3, "busy": 1, "answered": 7}
        quarantine = SimpleNamespace(
            total=0, held=lambda now_s: self.held, holds=lambda node, now_s: node in self.held
        )
        self.swarm = SimpleNamespace(quarantine=quarantine, drift=DriftWatch(), trust=lambda node: 1.0)
        self.held: tuple[str, ...] = ()
        self.adoptions = SimpleNamespace(seconds=0.0)
        self.windows: list[int] = []
        strategy = SimpleNamespace(mode="gossip", consensus_distance=0.25, facts={"role": "worker"})
        self.mode = SimpleNamespace(
            strategy=strategy, config=AdpsgdConfig(weight=0.3), epoch=0, use=self._use
        )
        self.accounting = Accounting("", ManualClock())
        self.accounting.entered(self.mode.config, 1)
        self.cannot: tuple[type, ...] = ()
        self.supervisor = SimpleNamespace(
            pid=None,
            returns=[],
            down_s=None,
            failures=0,
            restart_policy=RestartPolicy(LearnerConfig()),
            starting_s=None,
            stopped_s=0.0,
            reported_s=None,
            device="cpu",
            spaces={"observation": "4 of float32", "action": "one of 2"},
            speed=RateMeter(10.0),
            restarts=0,
            busy_steps_per_s=0.0,
            metrics={"loss": 0.5},
            requests=SimpleNamespace(learner_mode=FREE),
            stages=SimpleNamespace(order=None),
            set_window=self.windows.append,
        )

    @property
    def ready(self) -> bool:
        return self.board is not None and self.board.published_once

    @property
    def sender_at_work(self) -> Any:
        return self.sender

    async def _use(self, strategy: Any, epoch: int) -> None:
        self.mode.epoch = epoch
        if isinstance(strategy, self.cannot):
            raise ConfigError("it wants what isn't here")
        self.mode.config = strategy
        self.used.append((strategy, epoch))

    def pause(self, *, paused: bool) -> None:
        self.paused = paused

    def progress(self, fraction: float, env_steps: int) -> None:
        self.fractions.append(fraction)

    def share_moments(self) -> None:
        self.shared += 1


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(monotonic_s=100.0)


@pytest.fixture
def events(clock: ManualClock) -> EventLog:
    return EventLog(500, clock)


@pytest.fixture
def kinds(events: EventLog) -> Callable[[], list[object]]:
    """The kinds of all events so far."""
    return lambda: [event["kind"] for event in events.since(0)]


@pytest.fixture
def membership() -> FakeMembership:
    return FakeMembership()


@pytest.fixture
def make_membership() -> type[FakeMembership]:
    return FakeMembership


@pytest.fixture
def make_board() -> Iterator[Callable[..., DaemonBoard]]:
    """Makes boards; with a value, a state of it is on the board."""
    regions: list[SharedRegion] = []

    def make(value: float | None = None, version: int = 7, spec: BoardSpec = SPEC) -> DaemonBoard:
        regions.append(SharedRegion.create(spec.nbytes, "node"))
        board = DaemonBoard(regions[-1], spec)
        if value is not None:
            with_sidecar = sidecar(version) if spec is SPEC else None
            board.seed(np.full(spec.layout.size, value, np.float32), with_sidecar, version)
        return board

    yield make
    for region in regions:
        region.close()


@pytest.fixture
def training(make_board: Callable[..., DaemonBoard]) -> FakeTraining:
    return FakeTraining(make_board(1.5))


@pytest.fixture
def context(clock: ManualClock, events: EventLog, membership: FakeMembership, tmp_path: Path) -> NodeContext:
    me = membership.identity.node_id
    return NodeContext(
        config=Config(),
        name="me",
        node_id=me,
        swarm_id="swarm",
        boot=5,
        data_dir=str(tmp_path),
        address=Address("127.0.0.1", 7700),
        clock=clock,
        events=events,
        transport=SimpleNamespace(  # type: ignore[arg-type]
            counters=TrafficCounters(), roles_of=lambda node_id: None
        ),
        membership=membership,  # type: ignore[arg-type]
        reachability=SimpleNamespace(reach="direct", figures=dict),  # type: ignore[arg-type]
        progress_tracker=ProgressTracker(FactSigner(membership.identity, "swarm", trust), 5),
        began_s=clock.monotonic(),
    )


@pytest.fixture
def talking(context: NodeContext) -> NodeContext:
    """A node that holds reports of others; it sends none by itself."""
    context.gossip = MetricsGossip(
        transport=context.transport,
        progress_tracker=context.progress_tracker,
        clock=context.clock,
        rng=random.Random(0),
        alive=context.alive,
        make_report=lambda: None,  # type: ignore[arg-type,return-value]
        on_round=lambda: None,
    )
    return context


@pytest.fixture
async def pair(events: EventLog, make_board: Callable[..., DaemonBoard]) -> AsyncIterator[list[Peer]]:
    """Two that know each other, with states on their boards and no learner."""
    network = MemoryNetwork(random.Random(0))
    made = [Peer(network, number, events) for number in (1, 2)]
    for peer, other in (made, made[::-1]):
        peer.peers = {other.id: other.address}
    for number, peer in enumerate(made):
        await peer.start(make_board(float(number)))
    yield made
    for peer in made:
        await peer.training.stop()
        await peer.transport.close()


@pytest.fixture
async def until() -> AsyncIterator[Callable[..., Any]]:
    """Waits, in real time, for something that tells nobody."""

    async def wait(condition: Callable[[], Any], limit_s: float = 20.0) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.002)

    return wait


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says what the learners do, one word per life; see ``fake_learner.py``."""
    python, script = sys.executable, Path(__file__).with_name("fake_learner.py")
    starter = tmp_path / "python"
    starter.write_text(f'#!/bin/sh\nexec "{python}" "{script}" "$@"\n')
    starter.chmod(0o700)
    written = tmp_path / "plan"
    monkeypatch.setattr(sys, "executable", str(starter))
    monkeypatch.setenv("FAKE_LEARNER_PLAN", str(written))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]), prepend=os.pathsep)

    def write(*words: str) -> None:
        written.write_text(" ".join(words))

    return write


@pytest.fixture
async def supervise(events: EventLog) -> AsyncIterator[Callable[..., Supervised]]:
    """Makes supervisors, and ends them."""
    made: list[Supervised] = []

    def make(config: LearnerConfig = QUICK) -> Supervised:
        made.append(Supervised(events, config))
        return made[-1]

    yield make
    for each in made:
        await each.one.stop()
        each.one.close()


@pytest.fixture
def figures() -> FakeFigures:
    return FakeFigures()


@pytest.fixture
def follower(context, figures, membership, training) -> RecordFollower:
    context.training = training
    context.state = "training"
    context.checkpointer = SimpleNamespace(stop_setting=None)
    context.progress_tracker.follow(training.lineage)
    made = RecordFollower(context, figures)
    membership.on_record = lambda record: made.record_changed()
    return made
