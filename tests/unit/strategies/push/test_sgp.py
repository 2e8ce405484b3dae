"""Stochastic gradient push over the in-memory network: weights are kept, nodes come to the mean."""

from __future__ import annotations

import asyncio
import random

import msgspec
import numpy as np
import pytest

from p2pdrl.config.strategy import SgpConfig
from p2pdrl.errors import PeerRefusedError, WireError
from p2pdrl.strategies import heavy
from p2pdrl.strategies.push.messages import PushAnswer, PushHead
from p2pdrl.strategies.push.outbox import ABSENT_S
from p2pdrl.strategies.push.sgp import ROUTE
from p2pdrl.strategies.testing.simulator import SimNode, SimSwarm
from p2pdrl.transport.memory import MemoryNetwork
from p2pdrl.transport.protocol import Incoming, Refusal

pytestmark = pytest.mark.looptime

D = 24


def config(**options) -> SgpConfig:
    return SgpConfig(
        **({"compression": "none", "every_updates": 0, "every_s": 0.1, "min_interval_s": 0.1} | options)
    )


@pytest.fixture
async def make():
    swarms = []

    def made(count: int, options: SgpConfig | None = None, **network) -> SimSwarm:
        delay_s = network.pop("delay_s", (0.005, 0.02))
        swarm = SimSwarm(MemoryNetwork(random.Random(1), delay_s=delay_s, **network))
        rng = np.random.default_rng(0)
        for _ in range(count):
            start = rng.standard_normal(D, dtype=np.float32)
            swarm.add(options or config(), start, learning_rate=0.0, period_s=0.05)
        swarm.introduce()
        swarms.append(swarm)
        return swarm

    yield made
    for swarm in swarms:
        await swarm.close()


async def start(swarm: SimSwarm, **options) -> None:
    for node in swarm.nodes:
        if not node.dead:
            await node.start(**options)


def totals(nodes: list[SimNode]) -> tuple[float, np.ndarray]:
    """Σw with what is under way, and Σw·z without."""
    weight = sum(node.strategy.weight + node.strategy.under_way for node in nodes)
    stands = sum(node.strategy.weight * node.learner.now().astype(np.float64) for node in nodes)
    return weight, stands


def vectors(nodes: list[SimNode]) -> np.ndarray:
    return np.array([node.learner.now() for node in nodes], np.float64)


def spread(nodes: list[SimNode]) -> float:
    xs = vectors(nodes)
    return float(np.sqrt(np.square(xs - xs.mean(axis=0)).sum(axis=1).mean()))


async def settle(swarm: SimSwarm) -> None:
    """Begin nothing new, and wait until everybody knows what became of its pushes."""
    for node in swarm.living:
        node.strategy._core.due = lambda _now_s: False
    for _ in range(400):
        await asyncio.sleep(0.1)
        if not any(node.strategy.under_way for node in swarm.living):
            return
    raise AssertionError("something is under way for ever")


@pytest.mark.parametrize("partners", ["ring", "exponential", "random"])
async def test_eight_nodes_come_to_their_mean(make, partners):
    swarm = make(8, config(partners=partners))
    mean, first = vectors(swarm.nodes).mean(axis=0), spread(swarm.nodes)
    await start(swarm, train=False)
    await asyncio.sleep(40 if partners == "ring" else 15)
    await settle(swarm)
    assert np.allclose(vectors(swarm.nodes), mean, atol=1e-4)
    assert spread(swarm.nodes) < 1e-4 * first
    weight, stands = totals(swarm.nodes)
    assert weight == pytest.approx(8.0, rel=1e-12)
    assert np.allclose(stands, 8 * mean, rtol=1e-5, atol=1e-5)


async def test_learners_that_publish_in_between_disturb_nothing(make):
    """Learners of rate 0 absorb and publish at their own pace: the mean stays, deltas count once."""
    swarm = make(8, config(partners="exponential"))
    mean = vectors(swarm.nodes).mean(axis=0)
    for number, node in enumerate(swarm.nodes):
        node.learner.period_s = 0.03 * (1 + 4 * number)
    await start(swarm)
    await asyncio.sleep(25)
    await settle(swarm)
    assert np.allclose(vectors(swarm.nodes), mean, atol=1e-4)


async def test_loss_and_doubled_messages_lose_no_weight(make):
    swarm = make(8, config(partners="random"), loss=0.2, duplicate=0.2)
    mean = vectors(swarm.nodes).mean(axis=0)
    await start(swarm, train=False)
    await asyncio.sleep(40)
    swarm.network.loss = 0.0
    await asyncio.sleep(10)
    await settle(swarm)
    weight, stands = totals(swarm.nodes)
    assert weight == pytest.approx(8.0, rel=1e-12)
    assert np.allclose(stands, 8 * mean, rtol=1e-5, atol=2e-5)
    assert np.allclose(vectors(swarm.nodes), mean, atol=1e-3)
    assert sum(node.strategy.outcomes.get("timeout", 0) for node in swarm.nodes) > 10


async def test_bf16_keeps_the_sum(make):
    swarm = make(4, config(compression="bf16", partners="ring"))
    mean, first = vectors(swarm.nodes).mean(axis=0), spread(swarm.nodes)
    await start(swarm, train=False)
    await asyncio.sleep(30)
    await settle(swarm)
    weight, stands = totals(swarm.nodes)
    assert weight == pytest.approx(4.0, rel=1e-12)
    assert np.allclose(stands, 4 * mean, rtol=1e-4, atol=1e-4)
    assert spread(swarm.nodes) < 0.02 * first


async def test_a_frozen_node_blocks_nobody_and_comes_back(make):
    swarm = make(8, config(partners="random"))
    mean, first = vectors(swarm.nodes).mean(axis=0), spread(swarm.nodes)
    await start(swarm, train=False)
    swarm.network.freeze(swarm.nodes[3].id)
    await asyncio.sleep(30)
    others = [node for node in swarm.nodes if node is not swarm.nodes[3]]
    assert spread(others) < 0.05 * first
    swarm.network.thaw(swarm.nodes[3].id)
    await asyncio.sleep(30)
    await settle(swarm)
    weight, stands = totals(swarm.nodes)
    assert weight == pytest.approx(8.0, rel=1e-12)
    assert np.allclose(stands, 8 * mean, rtol=1e-5, atol=2e-5)
    assert np.allclose(vectors(swarm.nodes), mean, atol=1e-3)


async def test_a_killed_node_takes_its_part_along_and_a_joiner_brings_its_own(make):
    swarm = make(8, config(partners="random"))
    await start(swarm, train=False)
    await asyncio.sleep(1)
    await swarm.kill(swarm.nodes[5])
    await asyncio.sleep(ABSENT_S + 10)
    await settle(swarm)
    assert spread(swarm.living) < 1e-3
    assert all(node.strategy.under_way == 0 for node in swarm.living)
    for node in swarm.living:
        del node.strategy._core.due
    joiner = swarm.add(config(partners="random"), np.full(D, 5.0, np.float32), learning_rate=0.0)
    swarm.introduce()
    weight, stands = totals(swarm.living)
    await joiner.start(train=False)
    await asyncio.sleep(20)
    await settle(swarm)
    assert np.allclose(vectors(swarm.living), stands / weight, atol=1e-3)
    assert totals(swarm.living)[0] == pytest.approx(weight, rel=1e-12)


class LostAnswers:
    """A transport that loses the first answers after they were written."""

    def __init__(self, transport, losses: int) -> None:
        self._transport, self.losses, self.metas = transport, losses, []

    async def call(self, *arguments, **options):
        self.metas.append(arguments[3])
        answer = await self._transport.call(*arguments, **options)
        if self.losses:
            self.losses -= 1
            raise WireError("cut off")
        return answer


async def test_a_push_whose_answer_was_lost_is_sent_again_and_taken_once(make):
    swarm = make(2)
    a, b = swarm.nodes
    weight, stands = totals(swarm.nodes)
    b.strategy._core.due = lambda _now_s: False
    await start(swarm, train=False)
    a.strategy._transport = LostAnswers(a.transport, 3)
    await asyncio.sleep(0.05)
    a.strategy._core.due = lambda _now_s: False
    assert (a.strategy.weight, b.strategy.weight) == (0.5, 1.5)
    assert a.strategy.under_way == 0.5
    await asyncio.sleep(5)
    heads = [msgspec.msgpack.decode(meta, type=PushHead) for meta in a.strategy._transport.metas]
    assert len(heads) == 4
    assert len({(head.boot, head.number, head.mass) for head in heads}) == 1
    assert (a.strategy.outcomes, b.strategy.outcomes) == ({"unsure": 3, "pushed": 1}, {"ok": 1})
    assert totals(swarm.nodes)[0] == pytest.approx(weight, rel=1e-12)
    assert np.allclose(totals(swarm.nodes)[1], stands, atol=1e-5)


@pytest.mark.parametrize("why", ["nobody listens", "refused"])
async def test_a_push_that_never_arrived_is_taken_back(make, why):
    swarm = make(2)
    a, b = swarm.nodes
    before = a.learner.now()
    if why == "refused":

        async def refuse(_incoming: Incoming):
            raise Refusal(503, "not now")

        b.strategy.answer = refuse
        b.strategy._core.due = lambda _now_s: False
        await b.start(train=False)
    await a.start(train=False)
    await asyncio.sleep(0.3)
    assert a.strategy.weight == pytest.approx(1.0, rel=1e-12)
    assert a.strategy.under_way == 0
    assert np.allclose(a.learner.now(), before, atol=1e-6)
    assert set(a.strategy.outcomes) == {"failed" if why == "nobody listens" else why}


async def test_what_is_under_way_to_the_dead_is_lost(make):
    swarm = make(2)
    a, b = swarm.nodes
    await start(swarm, train=False)
    swarm.network.freeze(b.id)
    b.strategy._core.due = lambda _now_s: False
    await asyncio.sleep(3)
    assert a.strategy.under_way > 0
    await swarm.kill(b)
    await asyncio.sleep(ABSENT_S + 2)
    assert a.strategy.under_way == 0
    assert a.strategy.outcomes["lost"] == 1
    swarm.network.thaw(b.id)


async def test_an_adopted_state_begins_anew(make):
    swarm = make(2)
    a, b = swarm.nodes
    swarm.network.freeze(b.id)
    b.strategy._core.due = lambda _now_s: False
    await start(swarm, train=False)
    await asyncio.sleep(1)
    assert a.strategy.weight < 1
    new = np.full(D, 7.0, np.float32)
    a.learner.board.post_set(new, None, 3)
    await asyncio.sleep(2.5)
    assert a.strategy.weight + a.strategy.under_way == pytest.approx(1.0)
    assert np.array_equal(a.learner.now(), new)
    swarm.network.thaw(b.id)


async def push(sender: SimNode, target: SimNode, number: int = 1, vector=None, **changes) -> PushAnswer:
    """Push by hand."""
    head_of = {key: changes.pop(key) for key in ("mass", "wire", "content") if key in changes}
    summary = msgspec.structs.replace(sender.swarm.says, **changes)
    head = PushHead("boot", number, **({"wire": "float32", "summary": summary, "mass": 0.5} | head_of))
    vector = sender.learner.now() if vector is None else vector
    answer = await sender.transport.call(
        target.address,
        target.id,
        ROUTE,
        msgspec.msgpack.encode(head),
        vector=vector.data.cast("B"),
        deadline_s=1.0,
        lane="bulk",
    )
    return msgspec.msgpack.decode(answer.meta, type=PushAnswer)


async def quiet(swarm: SimSwarm) -> list[SimNode]:
    for node in swarm.nodes:
        node.strategy._core.due = lambda _now_s: False
    await start(swarm, train=False)
    return swarm.nodes


async def test_a_push_is_taken_once_by_number(make):
    a, b = await quiet(make(2))
    expected = b.learner.now() + (a.learner.now() - b.learner.now()) / 3
    for _ in range(3):
        assert (await push(a, b)).result == "taken"
    assert b.strategy.weight == 1.5
    assert np.allclose(b.learner.now(), expected, atol=1e-6)
    (report,) = b.swarm.rounds
    assert report.outcome == "ok"
    assert [one.weight for one in report.merged] == pytest.approx([2 / 3, 1 / 3])
    assert report.changed == pytest.approx(report.distance / 3)


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        ({"mode_epoch": 2}, 409),
        ({"task_hash": "x"}, 409),
        ({"mass": 0.0}, 422),
        ({"mass": 1e30}, 422),
        ({"wire": "bf16"}, 422),
        ({"content": "gradients"}, 422),
        ({"vector": np.full(D, np.nan, np.float32)}, 422),
        ({"vector": np.zeros(3, np.float32)}, 422),
    ],
)
async def test_what_was_refused_is_void_for_ever(make, bad, status):
    a, b = await quiet(make(2))
    with pytest.raises(PeerRefusedError) as caught:
        await push(a, b, **bad)
    assert caught.value.status == status
    assert (await push(a, b)).result == "void"
    assert (await push(a, b, 2)).result == "taken"
    assert b.swarm.strikes == ([a.id] if "vector" in bad and bad["vector"].size == D else [])
    assert b.strategy.weight == 1.5


async def test_other_routes_and_nonsense_are_refused(make):
    a, b = await quiet(make(2))
    for route, status in (("exchange", 409), (ROUTE, 400)):
        with pytest.raises(PeerRefusedError) as caught:
            await a.transport.call(b.address, b.id, route, b"\xc1", deadline_s=1.0)
        assert caught.value.status == status
    b.swarm.held.add(a.id)
    with pytest.raises(PeerRefusedError, match="403"):
        await push(a, b)


@pytest.mark.parametrize("older", ["sender", "receiver"])
async def test_one_of_two_lineages_is_adopted(make, older):
    swarm = make(2)
    a, b = swarm.nodes
    b.strategy._core.due = lambda _now_s: False
    steps = 500 if older == "sender" else 5
    a.swarm.says = msgspec.structs.replace(a.swarm.says, lineage="bb", lineage_steps=steps)
    await start(swarm, train=False)
    await asyncio.sleep(0.08)
    assert a.strategy.outcomes == {"ahead" if older == "sender" else "behind": 1}
    adopter, donor = (b, a) if older == "sender" else (a, b)
    assert adopter.swarm.adoptions[0][0] == donor.id
    assert (a.strategy.weight, b.strategy.weight) == (1.0, 1.0)


async def test_our_own_poison_is_kept_to_ourselves_and_healed(make):
    swarm = make(2)
    a, b = swarm.nodes
    b.strategy._core.due = lambda _now_s: False
    a.learner.x = np.full(D, np.nan, np.float32)
    a.learner.publish()
    await start(swarm, train=False)
    await asyncio.sleep(0.3)
    assert a.swarm.heals
    assert (b.swarm.strikes, b.strategy.outcomes, a.strategy.weight) == ([], {}, 1.0)
    with pytest.raises(PeerRefusedError, match="503"):
        await push(b, a)


async def test_clipping_bounds_what_one_push_does(make):
    a, b = await quiet(make(2, config(mixing="clipped", clip_distance=0.1)))
    await push(a, b, vector=a.learner.now() * 100)
    report = b.swarm.rounds[0]
    before = vectors([b])[0]
    assert report.changed <= 0.1 * np.linalg.norm(before) / 3 * 1.1
    assert b.strategy.weight == 1.5


async def test_training_nodes_stay_near_the_common_minimum(make):
    swarm = make(8, config(partners="exponential", every_updates=1))
    rng = np.random.default_rng(5)
    targets = rng.standard_normal((8, D)).astype(np.float32)
    for node, target in zip(swarm.nodes, targets, strict=True):
        node.learner.gradient = lambda x, target=target: x - target
        node.learner.learning_rate = 0.03
    await start(swarm)
    await asyncio.sleep(15)
    xs, alone = vectors(swarm.nodes), np.linalg.norm(targets - targets.mean(axis=0), axis=1).mean()
    assert np.linalg.norm(xs - targets.mean(axis=0), axis=1).max() < 0.35 * alone


async def test_stop_leaves_nothing(make):
    swarm = make(3)
    await start(swarm)
    await asyncio.sleep(1.015)
    for node in swarm.nodes:
        await node.strategy.stop(1.0)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("strategy")]
    before = vectors(swarm.nodes)
    with pytest.raises(PeerRefusedError, match="503"):
        await push(swarm.nodes[0], swarm.nodes[1], 77)
    await asyncio.sleep(1)
    assert np.allclose(vectors(swarm.nodes), before, atol=1e-6)


@pytest.mark.looptime(False)
async def test_pushes_in_threads(make, monkeypatch):
    monkeypatch.setattr(heavy, "INLINE_BYTES", 0)
    swarm = make(3, config(every_s=0.02, compression="bf16"), delay_s=(0.0, 0.001))
    first = spread(swarm.nodes)
    await start(swarm, train=False)
    async with asyncio.timeout(5):
        while spread(swarm.nodes) > 0.1 * first:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
