"""The training side of a node over the in-memory network; most learners are left out."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from p2pdrl.config.node import ActorsConfig, DebugConfig, LearnerConfig, NodeConfig
from p2pdrl.config.strategy import AdpsgdConfig, GradAverageConfig, HogwildConfig, LocalConfig
from p2pdrl.config.task import A2CConfig, EnvConfig, NetworkConfig, PPOConfig, TaskConfig
from p2pdrl.errors import PeerRefusedError, WorkerError
from p2pdrl.node.state import state_transfer
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.transport.protocol import Refusal
from p2pdrl.workers.protocol import DataShare, Report

from .training_peers import GOSSIP, Peer


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


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("trusted", [True, False])
async def test_peers_are_bounded_where_there_is_a_key_whoever_holds_it(events, make_board, keyed, trusted):
    """A node that was invited names no key file."""
    peer = Peer(MemoryNetwork(), 1, events, NodeConfig(trusted_network=trusted), keyed=keyed)
    await peer.start(make_board(1.0))
    assert peer.training.context(0).bounded == (keyed and not trusted)
    await peer.training.stop()


async def test_before_it_is_built_there_is_nothing(events):
    bare = Peer(MemoryNetwork(), 1, events).training
    assert (bare.ready, bare.policy_version, bare.summary(), bare.outcomes) == (False, 0, None, {})
    for read in ("board", "spec"):
        with pytest.raises(WorkerError, match="isn't built"):
            getattr(bare, read)
    await bare.stop()


async def test_the_learner_computes_gradients_as_the_node_says(plan, events):
    learner = LearnerConfig(microbatches="auto", checkpoint_activations=True, activation_limit_bytes=77)
    peer = Peer(MemoryNetwork(random.Random(0)), 0, events, NodeConfig(learner=learner))
    plan("train")
    await peer.training.build()
    start = msgspec.json.decode(Path(os.environ["FAKE_LEARNER_PLAN"]).with_suffix(".start").read_bytes())
    told = start["microbatches"], start["checkpoint_activations"], start["activation_limit_bytes"]
    assert told == ("auto", True, 77)
    await peer.training.stop()


async def test_two_gossip_after_updates(pair, until):
    one, two = pair
    for peer in pair:
        await peer.training.mode.use(GOSSIP, 1)
    one.reports(1)
    await until(lambda: one.training.outcomes.get("ok"))
    await until(lambda: two.training.outcomes.get("answered"))
    assert one.now() == two.now() == [0.5] * 5
    assert "ok" in one.seen


async def test_a_smaller_lineage_is_adopted_from(pair, until, kinds):
    one, two = pair
    two.training.enter("bb" * 8)
    two.reports(1000)
    for peer in pair:
        await peer.training.mode.use(GOSSIP, 1)
    one.reports(1)
    await until(lambda: one.training.lineage == "bb" * 8)
    assert one.now() == [1.0] * 5
    assert one.training.outcomes["adopted"] == 1
    assert "adopted" in kinds()
    sidecar = one.training.board.sidecar()
    assert (int(sidecar["adam.step"]), float(sidecar["observations.count"])) == (7, 0.0)
    assert one.progress_tracker.steps("aa" * 8) == 10
    one.reports(3)
    assert one.progress_tracker.steps("bb" * 8) == 20
    assert one.progress_tracker.total().env_steps == 30


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
        await peer.training.mode.use(GOSSIP, 1)
    one.training.board.post_set(np.full(5, np.nan, np.float32), None, 7)
    assert not one.training.adoptions.under_way
    request = one.training.state_request()
    with pytest.raises(PeerRefusedError) as caught:
        await state_transfer.fetch(
            two.transport, one.id, one.address, request=request, spec=one.training.spec, max_abs=1e6
        )
    assert caught.value.status == 503
    one.reports(1)
    await until(lambda: one.training.outcomes.get("adopted"))
    assert one.now() == [1.0] * 5
    assert (two.training.swarm.quarantine.total, two.now()) == (0, [1.0] * 5)


async def test_a_bug_in_an_adoption_is_raised_by_who_watches_later(pair, until, monkeypatch):
    one, two = pair

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(one.training.board, "post_set", broken)
    one.training.swarm.adopt(two.id, two.training.lineage, "behind")
    await until(lambda: not one.training.adoptions.under_way)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(one.training.adoptions.watch(), 1)


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


async def test_what_the_learner_is_told(pair, kinds):
    one, _ = pair
    told: list[object] = []
    one.training.supervisor.tell = told.append
    one.training.share_moments()
    assert told == []
    one.training.supervisor.reported(Report(1, 1, 1, 0, [], {}, {"obs": b"\xc1"}))
    assert (told, kinds()) == ([], ["moments-failed"])
    one.training.pause(paused=True)
    one.training.progress(0.5, 100)
    assert [type(message).__name__ for message in told] == ["LearnerPace", "Progress"]
    assert one.training.paused


async def test_learners_that_average_share_out_an_update_while_they_do(pair):
    one, two = pair
    told: list[object] = []
    one.training.supervisor.tell = told.append
    rank = sorted([one.id, two.id]).index(one.id)
    for config, share in (
        (LocalConfig(), None),
        (AdpsgdConfig(), DataShare(rank, 2, rate_power=0.5, total_speed=2.0)),
        (GradAverageConfig(), DataShare(rank, 2, total_speed=2.0)),
        (LocalConfig(), DataShare(0, 1, total_speed=1.0)),
    ):
        told.clear()
        one.training.mode.config = config
        one.training.divide_data()
        assert told == ([] if share is None else [share])


async def test_a_slower_learner_has_less_of_an_update(pair):
    one, two = pair
    told: list[object] = []
    one.training.supervisor.tell = told.append
    rank = sorted([one.id, two.id]).index(one.id)
    one.training.mode.config = AdpsgdConfig()
    one.speeds[two.id] = 1000.0
    one.training.supervisor.reported(Report(1, 1, 1, 0, [], {}, busy_steps_per_s=240.0))
    assert told == [DataShare(rank, 2, 0.5, speed=0.25, total_speed=1.25)]
    one.training.divide_data()
    assert len(told) == 1, "it is told what is new"


async def test_the_learner_begins_with_the_others_moments(pair, monkeypatch):
    one, _ = pair
    told: list[str] = []

    async def begin(*, restore: bool) -> None:
        told.append("begin")

    one.training.supervisor.tell = lambda message: told.append(type(message).__name__)
    monkeypatch.setattr(one.training.supervisor, "begin", begin)
    parts = (("count", ()), ("mean", (2,)), ("m2", (2,)))
    items = tuple(SidecarItem(f"obs.{part}", shape, "float64", "moments") for part, shape in parts)
    one.progress_tracker.open_streams(SidecarLayout(items))
    await one.training.begin(None, "cc" * 8)
    assert told == ["Others", "LearnerPace", "begin"]


async def test_another_strategy_changes_the_work_of_a_live_learner(plan, events, until):
    plan("train")
    peer = Peer(MemoryNetwork(random.Random(0)), 1, events)
    training = peer.training
    steps = lambda: peer.progress_tracker.steps("cc" * 8)  # noqa: E731
    try:
        await training.build()
        await training.begin(None, "cc" * 8)
        pid = training.supervisor.pid
        await training.mode.use(HogwildConfig(learners=3), 1)
        assert training.supervisor.requests.learner_mode.learners == 3
        await until(lambda: steps() > 10 * training.supervisor.totals.updates)
        assert steps() == training.learners.totals.env_steps
        await training.mode.use(GOSSIP, 2)
        assert (training.supervisor.requests.learner_mode.learners, training.learners.pids) == (1, ())
        assert training.swarm.steps_since() == training.learners.totals.env_steps
        assert training.supervisor.pid == pid
    finally:
        await training.stop()
        training.supervisor.close()
        await peer.transport.close()


async def test_the_learning_rate_follows_the_progress(pair):
    one = pair[0].training
    one.supervisor.tell = lambda message: None
    one.task = TaskConfig(algorithm=PPOConfig(learning_rate=0.5, anneal="linear"))
    learner = one.context(1).learner
    one.progress(0.25, 0)
    assert learner.learning_rate == 0.375


@pytest.mark.parametrize(
    ("core", "algorithm", "expected"),
    [
        ("none", PPOConfig(epochs=3, minibatches=4, unroll_steps=10), (12, 4, 20)),
        ("lstm", PPOConfig(epochs=3, minibatches=4, unroll_steps=10), (12, 4, 2)),
        ("none", A2CConfig(unroll_steps=5), (1, 1, 40)),
    ],
)
async def test_the_strategy_is_told_what_an_update_is_made_of(pair, core, algorithm, expected):
    one = pair[0].training
    one.task = TaskConfig(env=EnvConfig(num_envs=8), network=NetworkConfig(core=core), algorithm=algorithm)
    context = one.context(1)
    assert (context.minibatches, context.batches, context.rows) == expected


OTHER, STRANGER = f"{2:032x}", f"{3:032x}"


@pytest.mark.parametrize(
    ("node", "ranks", "sender", "status"),
    [
        (NodeConfig(actors=ActorsConfig(count=1)), "us, other", OTHER, 400),
        (NodeConfig(actors=ActorsConfig(count=1)), "us, other", STRANGER, 503),
        (NodeConfig(actors=ActorsConfig(count=1)), "other, us", OTHER, 503),
        (NodeConfig(actors=ActorsConfig(count=1)), "", OTHER, 503),
        (NodeConfig(roles=("learner", "actor")), "", STRANGER, 400),
        (NodeConfig(), "us, other", OTHER, 503),
    ],
)
async def test_whose_unrolls_are_taken(events, node, ranks, sender, status):
    """Of its pipeline's other ranks, where it is the first; of all where roles say so. 400: it was heard."""
    peer = Peer(MemoryNetwork(random.Random(0)), 1, events, node)
    names = {"us": peer.id, "other": OTHER}
    members = tuple(names[name] for name in ranks.split(", ") if name)
    peer.training.mode.strategy = SimpleNamespace(members=members)
    with pytest.raises(Refusal) as refused:
        await peer.training.take_unroll(SimpleNamespace(sender=sender, meta=b""))
    assert refused.value.status == status


async def test_whoever_acts_for_another_rank_takes_no_unrolls(events):
    peer = Peer(MemoryNetwork(random.Random(0)), 1, events, NodeConfig(roles=("learner", "actor")))
    peer.training.lent_actors.away = True
    with pytest.raises(Refusal, match="later rank"):
        await peer.training.take_unroll(SimpleNamespace(sender=OTHER, meta=b""))


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
        await training.mode.use(LocalConfig(), 1)
        await until(lambda: training.supervisor.totals.updates >= 2)
        assert training.ready
        assert peer.progress_tracker.steps("cc" * 8) == 10 * training.supervisor.totals.updates
        await training.stop()
        assert bool(np.std(peer.now()) > 0.05) is (noise > 0)
    finally:
        await training.stop()
        training.supervisor.close()
        await peer.transport.close()
