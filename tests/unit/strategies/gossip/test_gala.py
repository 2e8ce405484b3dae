"""Gossiping actor-learners over the in-memory network: nobody waits, and all stay near each other."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from p2pdrl.config.strategy import GalaConfig
from p2pdrl.errors import PeerRefusedError
from p2pdrl.strategies.protocol import Merged
from p2pdrl.testing.virtual_swarm import SimNode, SimSwarm

from .pushers import LONG, D, push, quiet, silence, start, vectors

pytestmark = pytest.mark.looptime

PERIOD_S = 0.05


def config(**options) -> GalaConfig:
    return GalaConfig(**({"compression": "none", "min_interval_s": 0.05} | options))


@pytest.fixture
def make(make_swarm):
    def made(count: int, options: GalaConfig | None = None, *, rate: float = 0.05, **network) -> SimSwarm:
        swarm = make_swarm(count, options or config(), {"learning_rate": rate}, **network)
        for number, node in enumerate(swarm.nodes):
            size = node.learner.x.size
            node.target = np.random.default_rng(100 + number).standard_normal(size).astype(np.float32)
            node.learner.gradient = lambda x, target=node.target: x - target
        return swarm

    return made


def spread(nodes: list[SimNode]) -> float:
    xs = vectors(nodes)
    return float(np.linalg.norm(xs - xs.mean(axis=0), axis=1).max())


def apart(nodes: list[SimNode]) -> float:
    """How far the nodes' own minima lie from their mean at most: where they would be alone."""
    targets = np.array([node.target for node in nodes])
    return float(np.linalg.norm(targets - targets.mean(axis=0), axis=1).max())


@pytest.mark.parametrize(
    "partners", ["random", *(pytest.param(slow, marks=pytest.mark.slow) for slow in ("ring", "exponential"))]
)
async def test_learners_that_train_stay_within_a_bounded_distance(make, partners):
    swarm = make(8, config(partners=partners))
    await start(swarm)
    worst = 0.0
    await asyncio.sleep(5)
    for _ in range(10):
        await asyncio.sleep(1)
        worst = max(worst, spread(swarm.nodes))
    assert worst < (0.6 if partners == "ring" else 0.3) * apart(swarm.nodes)
    targets = np.array([node.target for node in swarm.nodes])
    assert np.linalg.norm(vectors(swarm.nodes).mean(axis=0) - targets.mean(axis=0)) < 0.25 * apart(
        swarm.nodes
    )


def ranges(nodes: list[SimNode]) -> np.ndarray:
    """Of each entry, over the learners."""
    xs = vectors(nodes)
    return xs.max(axis=0) - xs.min(axis=0)


@pytest.mark.parametrize("mixing", ["mean", "clipped", "trimmed"])
async def test_averages_never_spread_learners_whatever_is_lost_or_left_out(make, mixing):
    """Every entry stays between the least and the greatest that there were: losses, silence, a τ of 1."""
    options = config(partners="random", mixing=mixing, max_lag=1)
    swarm = make(6, options, rate=0.0, loss=0.2, duplicate=0.2)
    for number, node in enumerate(swarm.nodes):
        node.learner.period_s = PERIOD_S * (1 + number)  # some fall behind by more than τ
    first = vectors(swarm.nodes)
    await start(swarm)
    swarm.network.freeze(swarm.nodes[2].id)
    for _ in range(20):
        await asyncio.sleep(0.5)
        now = vectors(swarm.nodes)
        assert (now >= first.min(axis=0) - 1e-5).all()
        assert (now <= first.max(axis=0) + 1e-5).all()
    assert sum(node.strategy.outcomes.get("stale", 0) for node in swarm.nodes) > 0
    assert ranges(swarm.nodes).max() < 0.9 * (first.max(axis=0) - first.min(axis=0)).max()


@pytest.mark.parametrize("cut_off", [False, True])
async def test_the_distance_is_bounded_only_while_pushes_lead_from_one_to_all(make, cut_off):
    """Two learners step apart by 0.2 an update in each entry: together they stay near, cut off they don't."""
    swarm = make(2, rate=0.1)
    for node, way in zip(swarm.nodes, (1.0, -1.0), strict=True):
        node.learner.gradient = lambda x, way=way: np.full_like(x, way)
    if cut_off:
        swarm.network.cut(swarm.nodes[0].id, swarm.nodes[1].id)
    before, moved = ranges(swarm.nodes), 0
    await start(swarm)
    worst = []
    for _ in range(2):
        seen = []
        for _ in range(20):
            await asyncio.sleep(0.5)
            seen.append(ranges(swarm.nodes).max())
        worst.append(max(seen))
    moved = sum(node.learner.updates for node in swarm.nodes) * 0.1
    assert (ranges(swarm.nodes) <= before + moved + 1e-3).all()
    if cut_off:
        assert worst[1] > 1.8 * worst[0] > 20
    else:
        assert worst[1] < 2.0


@pytest.mark.slow
async def test_equal_pace_and_no_training_comes_to_one_point(make):
    swarm = make(8, config(partners="exponential"), rate=0.0)
    first = spread(swarm.nodes)
    await start(swarm)
    await asyncio.sleep(10)
    assert spread(swarm.nodes) < 1e-2 * first


async def test_nothing_that_happens_to_others_makes_a_learner_wait(make):
    swarm = make(8, config(partners="exponential"), loss=0.2, duplicate=0.2)
    await start(swarm)
    await asyncio.sleep(3)
    swarm.network.freeze(swarm.nodes[2].id)
    await swarm.kill(swarm.nodes[5])
    await asyncio.sleep(10)
    others = [node for node in swarm.living if node is not swarm.nodes[2]]
    assert spread(others) < 0.5 * apart(others)
    swarm.network.thaw(swarm.nodes[2].id)
    joiner = swarm.add(
        config(partners="exponential"), np.full(D, 3.0, np.float32), learning_rate=0.05, period_s=PERIOD_S
    )
    joiner.target = np.zeros(D, np.float32)
    swarm.introduce()
    await joiner.start()
    await asyncio.sleep(10)
    assert spread(swarm.living) < 0.6 * apart(swarm.living)
    for node in swarm.living[:-1]:
        assert node.learner.updates >= 23 / PERIOD_S - 10
        assert node.strategy.outcomes["ok"] > 100


async def test_the_average_has_equal_weights_and_uses_each_once(make):
    a, b, c = await quiet(make(3))
    expected = vectors([a, b, c]).mean(axis=0)
    for number, sender in enumerate((b, b, c)):
        assert (await push(sender, a, number)).result == "taken"
    before = a.learner.now()
    await asyncio.sleep(1)
    assert np.array_equal(a.learner.now(), before)  # its learner has made no update yet
    a.strategy.updated(1)
    await asyncio.sleep(0.1)
    assert np.allclose(a.learner.now(), expected, atol=1e-6)
    (report,) = a.swarm.rounds
    third = pytest.approx(1 / 3)
    assert report.merged == (Merged(a.id, third), Merged(b.id, third), Merged(c.id, third))
    assert report.changed == pytest.approx(np.linalg.norm(expected - before), rel=1e-4)
    assert report.bytes_in == 2 * 4 * D
    await push(b, a, 1)  # a copy of what was used
    a.strategy.updated(1)
    await asyncio.sleep(0.5)
    assert a.strategy.outcomes == {"ok": 1}


async def test_what_is_older_than_tau_is_left_out(make):
    a, b, c = await quiet(make(3, config(max_lag=5)))
    a.learner.version = 20
    a.learner.publish()
    await push(b, a, policy_version=14)
    a.strategy.updated(1)
    await asyncio.sleep(0.1)
    assert a.strategy.outcomes == {"stale": 1}
    await push(b, a, 2, policy_version=14)
    await push(c, a, policy_version=15)
    expected = vectors([a, c]).mean(axis=0)
    a.strategy.updated(1)
    await asyncio.sleep(0.1)
    assert np.allclose(a.learner.now(), expected, atol=1e-6)
    assert a.swarm.rounds[-1].missing == (b.id,)
    assert a.swarm.rounds[-1].merged[1].staleness == 5


@pytest.mark.parametrize("mixing", ["clipped", "trimmed"])
async def test_robust_mixing_bounds_what_one_in_peer_does(make, mixing):
    a, b, c, d = await quiet(make(4, config(mixing=mixing, clip_distance=1.0)))
    before = a.learner.now()
    await push(b, a, vector=np.full(D, 1000.0, np.float32))
    await push(c, a)
    await push(d, a)
    a.strategy.updated(1)
    await asyncio.sleep(0.1)
    moved = np.linalg.norm(a.learner.now() - before)
    if mixing == "clipped":
        assert moved <= 0.75 * 0.1 * np.linalg.norm(before) * (1 + 1e-5)
    else:
        good = np.array([before, c.learner.now(), d.learner.now()])
        assert (a.learner.now() <= good.max(axis=0) + 1e-6).all()
        assert (a.learner.now() >= good.min(axis=0) - 1e-6).all()
    assert moved > 0


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        ({"mode_epoch": 2}, 409),
        ({"layout_hash": "x"}, 409),
        ({"wire": "bf16"}, 422),
        ({"content": "gradients"}, 409),
        ({"vector": np.full(D, np.inf, np.float32)}, 422),
        ({"vector": np.zeros(D + 1, np.float32)}, 422),
        ({"vector": np.zeros(3, np.float32)}, 400),
    ],
)
async def test_bad_pushes_are_refused(make, bad, status):
    a, b = await quiet(make(2))
    with pytest.raises(PeerRefusedError) as caught:
        await push(a, b, **bad)
    assert caught.value.status == status
    b.strategy.updated(1)
    await asyncio.sleep(0.3)
    assert b.strategy.outcomes == {}
    assert b.swarm.strikes == ([a.id] if "vector" in bad and bad["vector"].size == D else [])
    await push(a, b, 2)
    b.strategy.updated(1)
    await asyncio.sleep(0.3)
    assert b.strategy.outcomes == {"ok": 1}


async def test_other_routes_quarantine_and_no_state_are_refused(make):
    a, b = await quiet(make(2))
    with pytest.raises(PeerRefusedError, match="409"):
        await a.transport.call(b.address, b.id, "exchange", b"", deadline_s=1.0)
    b.swarm.held.add(a.id)
    with pytest.raises(PeerRefusedError, match="403"):
        await push(a, b)
    b.swarm.held.clear()
    b.swarm.says = None
    with pytest.raises(PeerRefusedError, match="503"):
        await push(a, b)


@pytest.mark.parametrize("elder", ["sender", "receiver"])
async def test_one_of_two_lineages_is_adopted(make, elder):
    swarm = make(2, config(partners="ring"))
    a, b = swarm.nodes
    silence(b)
    steps = 500 if elder == "sender" else 5
    a.swarm.says = msgspec.structs.replace(a.swarm.says, lineage="bb", lineage_steps=steps)
    await start(swarm, train=False)
    a.strategy.updated(1)
    await asyncio.sleep(0.1)
    assert a.strategy.outcomes == {"ahead" if elder == "sender" else "behind": 1}
    adopter, donor = (b, a) if elder == "sender" else (a, b)
    assert adopter.swarm.adoptions[0][0] == donor.id


async def test_after_an_adoption_nothing_older_is_used(make):
    a, b = await quiet(make(2))
    await push(b, a)
    new = np.full(D, 7.0, np.float32)
    a.learner.board.post_set(new, None, 3)
    a.strategy.updated(1)
    await asyncio.sleep(0.5)
    assert np.array_equal(a.learner.now(), new)
    assert a.strategy.outcomes == {}


async def test_our_own_poison_is_kept_to_ourselves_and_healed(make):
    swarm = make(2)
    a, b = swarm.nodes
    silence(b)
    await start(swarm, train=False)
    a.learner.x = np.full(D, np.nan, np.float32)
    a.learner.publish()
    a.strategy.updated(1)
    await asyncio.sleep(0.3)
    assert a.swarm.heals
    assert set(a.strategy.outcomes) == {"failed"}
    assert (b.swarm.strikes, b.strategy.outcomes) == ([], {})


@pytest.mark.parametrize(
    "compression",
    ["none", "topk", *(pytest.param(slow, marks=pytest.mark.slow) for slow in ("int8", "threshold"))],
)
async def test_gradients_are_averaged_and_the_learner_never_waits(make, compression):
    options = config(
        partners="exponential", exchanges="gradients", compression=compression, keep=0.5, threshold=0.2
    )
    swarm = make(6, options, loss=0.1)
    await start(swarm)
    swarm.network.freeze(swarm.nodes[1].id)
    await asyncio.sleep(15)
    others = [node for node in swarm.nodes if node is not swarm.nodes[1]]
    assert all(node.learner.updates >= 15 / PERIOD_S - 2 for node in swarm.nodes)
    assert spread(others) < 0.7 * apart(others)
    assert all(node.strategy.consensus_distance is not None for node in others)  # parameters went as well
    assert all(node.strategy.outcomes["ok"] > 50 for node in others)


async def test_gradient_by_hand(make):
    a, b, c = await quiet(make(3, config(exchanges="gradients")))
    answers = []
    a.learner.answer = lambda post, kind: answers.append((kind, post.vector.copy()))
    given = np.arange(D, dtype=np.float32)
    a.learner.make_request("gradients", given.copy())
    await asyncio.sleep(0.1)
    await push(b, a, content="gradients", vector=np.full(D, 3.0, np.float32))
    await push(c, a, content="gradients", vector=np.full(D, 6.0, np.float32))
    a.learner.make_request("gradients", given.copy())
    a.learner.make_request("gradients", np.full(D, np.nan, np.float32))
    await asyncio.sleep(0.1)
    assert [kind for kind, _ in answers] == ["none", "add", "none"]
    assert np.allclose(answers[1][1], (given + 3 + 6) / 3 - given, atol=1e-5)
    assert a.swarm.heals == []


async def test_stop_leaves_nothing(make):
    swarm = make(3, config(exchanges="gradients"))
    await start(swarm)
    await asyncio.sleep(2.01)
    for node in swarm.nodes:
        await node.strategy.stop(1.0)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("strategy")]
    with pytest.raises(PeerRefusedError, match="503"):
        await push(swarm.nodes[0], swarm.nodes[1], 77)


@pytest.mark.looptime(False)
async def test_pushes_in_threads(make):
    swarm = make(3, config(compression="bf16"), rate=0.0, delay_s=(0.0, 0.001), size=LONG)
    first = spread(swarm.nodes)
    await start(swarm)
    async with asyncio.timeout(60):
        while spread(swarm.nodes) > 0.1 * first:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
