"""The training side of a node over the in-memory network; most learners are left out."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from p2pdrl.clock import SystemClock
from p2pdrl.config.node import DebugConfig, LearnerConfig, LimitsConfig, NodeConfig
from p2pdrl.config.strategy import AdpsgdConfig, GradAverageConfig, HogwildConfig, LocalConfig, StrategyConfig
from p2pdrl.config.task import PPOConfig, StopConfig, TaskConfig
from p2pdrl.errors import ConfigError, PeerRefusedError, WorkerError
from p2pdrl.node import settings, state_transfer
from p2pdrl.node.giving import Giving
from p2pdrl.node.ledger import Ledger
from p2pdrl.node.training import Training
from p2pdrl.strategies.pairwise import gossip
from p2pdrl.strategies.pairwise.gossip import GossipStrategy
from p2pdrl.strategies.protocol import RoundReport
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout
from p2pdrl.transport.memory import MemoryNetwork
from p2pdrl.transport.protocol import Address
from p2pdrl.workers.protocol import Report

GOSSIP = AdpsgdConfig(compression="none", min_interval_s=0.0, deadline_s=1.0)
CONFIG = NodeConfig(
    learner=LearnerConfig(restart_min_s=0.01), limits=LimitsConfig(strikes=2, quarantine_s=60.0)
)


class Peer:
    """A node's training, on a board of its own."""

    def __init__(self, network, number, events, config=CONFIG) -> None:
        self.id = f"{number:032x}"
        self.address = Address("10.0.0.1", 7000 + number)
        self.transport = network.join(self.id, self.address)
        self.peers: dict[str, Address] = {}
        self.seen: list[str] = []
        self.ledger = Ledger(self.id, 1)
        self.training = Training(
            me=self.id,
            task=TaskConfig(strategy=GOSSIP, stop=StopConfig(window=5)),
            config=config,
            seed=number,
            transport=self.transport,
            clock=SystemClock(),
            events=events,
            ledger=self.ledger,
            rng=random.Random(number),
            alive=lambda: self.peers,
            donors=lambda: list(self.peers.items()),
            observed=lambda outcome, seconds: self.seen.append(outcome),
        )

    async def start(self, board=None, lineage="aa" * 8) -> None:
        if board is not None:
            self.training.supervisor.board = board
            self.training.supervisor.spec = board._memory.spec
            self.training._enter(lineage)
        giving = Giving(self.training, self.ledger, self.training._events)
        await self.transport.start()
        self.transport.serve(state_transfer.ROUTE, giving.answer)
        self.transport.serve(gossip.ROUTE, self.training.answer, max_vector_bytes=1 << 20)

    def now(self) -> list[float]:
        out = np.empty(self.training.spec.layout.size, np.float32)
        self.training.board.now(out)
        return out.tolist()

    def reports(self, updates: int) -> None:
        self.training.supervisor._report(Report(0, updates, 10 * updates, updates, [], {}))


@pytest.fixture
async def pair(events, make_board):
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


async def test_what_it_says_of_itself(pair):
    one = pair[0].training
    pair[0].reports(3)
    said = one.summary()
    assert (said.node_id, said.lineage, said.lineage_steps, said.policy_version) == (
        pair[0].id,
        "aa" * 8,
        30,
        7,
    )
    assert (one.ready, one.paused, one.policy_version, one.adoptions.seconds) == (True, False, 7, 0.0)


async def test_before_it_is_built_there_is_nothing(events):
    bare = Peer(MemoryNetwork(), 1, events).training
    assert (bare.ready, bare.policy_version, bare.summary(), bare.outcomes) == (False, 0, None, {})
    for read in ("board", "spec"):
        with pytest.raises(WorkerError, match="isn't built"):
            getattr(bare, read)
    await bare.stop()


async def test_two_gossip_after_updates(pair, until):
    one, two = pair
    for peer in pair:
        await peer.training.use(GOSSIP, 1)
    one.reports(1)
    await until(lambda: one.training.outcomes.get("ok"))
    await until(lambda: two.training.outcomes.get("answered"))
    assert one.now() == two.now() == [0.5] * 5
    assert "ok" in one.seen


async def test_the_mode_changes_and_outcomes_stay(pair, until):
    one, two = pair
    for peer in pair:
        await peer.training.use(GOSSIP, 1)
    one.reports(1)
    await until(lambda: one.training.outcomes.get("ok"))
    ok = one.training.outcomes["ok"]
    await two.training.use(LocalConfig(), 2)
    assert (two.training.strategy.mode, two.training.mode_epoch) == ("local", 2)
    meta = b"whatever"
    with pytest.raises(PeerRefusedError) as caught:
        await one.transport.call(two.address, two.id, gossip.ROUTE, meta, deadline_s=1.0)
    assert caught.value.status == 409
    await one.training.use(GOSSIP, 2)
    assert one.training.outcomes["ok"] >= ok


async def test_a_smaller_lineage_is_adopted_from(pair, until, kinds):
    one, two = pair
    two.training._enter("bb" * 8)
    two.reports(1000)
    for peer in pair:
        await peer.training.use(GOSSIP, 1)
    one.reports(1)
    await until(lambda: one.training.lineage == "bb" * 8)
    assert one.now() == [1.0] * 5
    assert one.training.outcomes["adopted"] == 1
    assert "adopted" in kinds()
    sidecar = one.training.board.sidecar()
    assert (int(sidecar["adam.step"]), float(sidecar["observations.count"])) == (7, 0.0)
    assert one.ledger.steps("aa" * 8) == 10
    one.reports(3)
    assert one.ledger.steps("bb" * 8) == 20
    assert one.ledger.total().env_steps == 30


async def test_while_it_adopts_it_says_nothing(pair, until):
    one, two = pair
    gone = one.peers.pop(two.id)
    one.training.swarm.adopt(two.id, two.training.lineage, "behind")
    assert one.training.summary() is None
    one.training.swarm.adopt(two.id, two.training.lineage, "once at a time")
    await until(lambda: one.training.summary() is not None)
    assert one.now() == [0.0] * 5
    one.peers[two.id] = gone
    one.training.swarm.adopt(two.id, two.training.lineage, "behind")
    await until(lambda: one.now() == [1.0] * 5)


async def test_a_node_that_went_nan_heals(pair, until, kinds):
    one, two = pair
    for peer in pair:
        await peer.training.use(GOSSIP, 1)
    one.training.board.post_set(np.full(5, np.nan, np.float32), None, 7)
    assert not one.training.adoptions.under_way
    request = one.training._request()
    with pytest.raises(PeerRefusedError) as caught:
        await state_transfer.fetch(
            two.transport, one.id, one.address, request=request, spec=one.training.spec, max_abs=1e6
        )
    assert caught.value.status == 503
    one.reports(1)
    await until(lambda: one.now() == [1.0] * 5)
    assert one.training.outcomes["adopted"] == 1
    assert (two.training.swarm.quarantine.total, two.now()) == (0, [1.0] * 5)


async def test_the_poisoner_is_left_alone_for_a_while(pair, kinds):
    one, two = pair
    one.training.swarm.strike(two.id, "NaN")
    assert not one.training.swarm.quarantined(two.id)
    assert one.training.swarm.alive() == one.peers
    one.training.swarm.strike(two.id, "NaN")
    assert one.training.swarm.quarantined(two.id)
    assert one.training.swarm.alive() == {}
    assert (one.training.swarm.quarantine.held(0.0), one.training.swarm.quarantine.total) == ((two.id,), 2)
    assert kinds() == ["strike", "strike"]


async def test_a_bug_in_a_strategy_is_told(pair, monkeypatch):
    one = pair[0].training
    watch = asyncio.create_task(one.watch_strategy())
    await one.use(GOSSIP, 1)
    await one.use(LocalConfig(), 2)
    await asyncio.sleep(0)
    assert not watch.done()

    def broken(self):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(GossipStrategy, "_next_partner", broken)
    await one.use(GOSSIP, 3)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(watch, 5)


async def test_a_bug_is_told_after_modes_that_follow_closely(pair, monkeypatch):
    one = pair[0].training
    watch = asyncio.create_task(one.watch_strategy())
    await asyncio.sleep(0)
    change = one.crew.change

    async def dismiss_helpers_first(regime, epoch):
        await asyncio.sleep(0.01)
        await change(regime, epoch)

    await one.use(LocalConfig(), 1)
    monkeypatch.setattr(one.crew, "change", dismiss_helpers_first)
    await one.use(GOSSIP, 2)  # before it is watched what came before
    await asyncio.sleep(0.01)

    def broken(self):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(GossipStrategy, "_next_partner", broken)
    await one.use(GOSSIP, 3)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(watch, 5)


async def test_what_the_learner_is_told(pair, kinds):
    one, _ = pair
    told: list[object] = []
    one.training.supervisor.tell = told.append
    one.training.share_moments()
    assert told == []
    one.training.supervisor._report(Report(1, 1, 1, 0, [], {}, {"obs": b"\xc1"}))
    assert (told, kinds()) == ([], ["moments-failed"])
    one.training.pause(paused=True)
    one.training.progress(0.5)
    assert [type(message).__name__ for message in told] == ["Pace", "Progress"]
    assert one.training.paused


async def test_the_learner_begins_with_the_others_moments(pair, monkeypatch):
    one, _ = pair
    told: list[str] = []

    async def begin(*, restore: bool) -> None:
        told.append("begin")

    one.training.supervisor.tell = lambda message: told.append(type(message).__name__)
    monkeypatch.setattr(one.training.supervisor, "begin", begin)
    parts = (("count", ()), ("mean", (2,)), ("m2", (2,)))
    items = tuple(SidecarItem(f"obs.{part}", shape, "float64", "moments") for part, shape in parts)
    one.ledger.open_streams(SidecarLayout(items))
    await one.training.begin(None, "cc" * 8)
    assert told == ["Others", "Pace", "begin"]


async def test_another_strategy_changes_the_work_of_a_live_learner(plan, events, until):
    plan("train")
    peer = Peer(MemoryNetwork(random.Random(0)), 1, events)
    training = peer.training
    steps = lambda: peer.ledger.steps("cc" * 8)  # noqa: E731
    try:
        await training.build()
        await training.begin(None, "cc" * 8)
        pid = training.supervisor.pid
        await training.use(HogwildConfig(learners=3), 1)
        assert training.supervisor.workplace.regime.learners == 3
        await until(lambda: steps() > 10 * training.supervisor.totals.updates)
        assert steps() == training.crew.totals.env_steps
        await training.use(GOSSIP, 2)
        assert (training.supervisor.workplace.regime.learners, training.crew.pids) == (1, ())
        assert training.swarm.steps_since() == training.crew.totals.env_steps
        assert training.supervisor.pid == pid
    finally:
        await training.stop()
        training.supervisor.close()
        await peer.transport.close()


async def test_the_learning_rate_follows_the_progress(pair):
    one = pair[0].training
    one.supervisor.tell = lambda message: None
    one.task = TaskConfig(algorithm=PPOConfig(learning_rate=0.5, anneal="linear"))
    learner = one._context(1).learner
    one.progress(0.25)
    assert learner.learning_rate == 0.375


@pytest.mark.parametrize("noise", [0.0, 0.5])
async def test_a_life_with_a_learner(plan, events, until, noise):
    plan("train")
    config = NodeConfig(debug=DebugConfig(perturb_start=noise))
    peer = Peer(MemoryNetwork(random.Random(0)), 1, events, config)
    training = peer.training
    try:
        await training.build()
        assert not training.ready
        await training.begin(None, "cc" * 8)
        await training.use(LocalConfig(), 1)
        await until(lambda: training.supervisor.totals.updates >= 2)
        assert training.ready
        assert peer.ledger.steps("cc" * 8) == 10 * training.supervisor.totals.updates
        await training.stop()
        assert bool(np.std(peer.now()) > 0.05) is (noise > 0)
    finally:
        await training.stop()
        training.supervisor.close()
        await peer.transport.close()


async def test_rounds_are_counted_for_the_strategy_in_force(pair):
    one = pair[0].training
    await one.use(GOSSIP, settings.stamp(1, one.swarm.node_id))
    one.swarm.round(RoundReport("ok", bytes_in=5))
    await one.use(LocalConfig(), settings.stamp(2, one.swarm.node_id))
    documents = one.accounting.document(one.swarm.name_of)
    assert documents["adpsgd"]["rounds"]["ok"] >= 1
    assert [(step["epoch"], step["protocol"]) for step in one.accounting.walk()] == [
        (1, "adpsgd"), (2, "local")
    ]  # fmt: skip


class Unwilling(GossipStrategy):
    """Finds out as it starts that it can't run here."""

    stopped = 0

    async def start(self) -> None:
        await super().start()
        raise ConfigError("its port is taken")

    async def stop(self, timeout_s: float) -> None:
        Unwilling.stopped += 1
        await super().stop(timeout_s)


@pytest.mark.parametrize("when", ["built", "started"])
async def test_a_strategy_that_cant_run_here_leaves_the_node_alone(pair, monkeypatch, when):
    one = pair[0].training
    await one.use(GOSSIP, 1)
    wanted: StrategyConfig = GradAverageConfig(backend="torch")
    if when == "started":
        wanted = GOSSIP
        monkeypatch.setattr("p2pdrl.node.training.build", Unwilling)
    with pytest.raises(ConfigError):
        await one.use(wanted, 2)
    assert (one.strategy.mode, one.strategy_config, one.mode_epoch) == ("local", LocalConfig(), 2)
    assert Unwilling.stopped == (when == "started")
    monkeypatch.undo()
    await one.use(GOSSIP, 3)
    assert one.strategy.mode == "gossip"
    assert one.outcomes.get("ok", 0) + one.outcomes.get("answered", 0) < 50, "no exchange counts twice"
