"""Asynchronous servers: one worker is serial training; staleness; faults."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import msgspec
import numpy as np
import pytest

from p2pdrl.clock import LoopClock
from p2pdrl.config.strategy import ServerAsyncConfig
from p2pdrl.errors import PeerRefusedError
from p2pdrl.node.accounting.exchanges import Accounting
from p2pdrl.strategies.servers.messages import GradientPush, ServerAnswer
from p2pdrl.strategies.servers.server_async import bucket_of, weight_of
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.testing.virtual_swarm import SimSwarm

from .swarms import COMMON, SIZE, grow, progress, pulled, servers_of

pytestmark = pytest.mark.looptime

LR = 0.05


def config(**options) -> ServerAsyncConfig:
    return ServerAsyncConfig(**COMMON | {"learning_rate": LR, "ahead": 0} | options)


def spread(nodes) -> float:
    vectors = np.array([node.learner.now() for node in nodes], np.float64)
    return float(np.abs(vectors - vectors.mean(axis=0)).max())


async def pause(nodes) -> None:
    for node in nodes:
        await node.pause()


class Serial:
    """Least squares by one node: SGD and DistBelief's Adagrad in float64."""

    def __init__(self) -> None:
        rng = np.random.default_rng(11)
        self.features, self.targets = rng.normal(size=(30, SIZE)), rng.normal(size=30)
        self.start = rng.normal(size=SIZE).astype(np.float32)

    def gradient(self, x: np.ndarray) -> np.ndarray:
        return self.features.T @ (self.features @ x - self.targets) / 30

    def run(self, optimizer: str, steps: int) -> np.ndarray:
        x, squares = self.start.astype(np.float64), np.zeros(SIZE)
        for _ in range(steps):
            g = self.gradient(x)
            squares += g**2
            x -= LR * (g if optimizer == "sgd" else g / (np.sqrt(squares) + 1e-5))
        return x


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("apart", [False, True])
async def test_one_worker_is_serial_training(sim, optimizer, apart):
    """Alone, or with its server on another node whose learner is paused."""
    problem = Serial()
    ids = [f"{number:032x}" for number in range(2)]
    options = config(optimizer=optimizer, servers=1, pinned=(ids[1],) if apart else ())
    worker = sim.add(options, problem.start, gradient=lambda x: problem.gradient(x.astype(np.float64)))
    worker.learner.keep_history = True
    if apart:
        server = sim.add(options, problem.start)
        sim.introduce()
        await server.start(train=False)
    await worker.start(60)
    await worker.trained()
    steps = worker.strategy.facts["version"] - 10
    assert steps >= 50
    expected = problem.run(optimizer, int(steps))
    assert np.abs(worker.learner.x - expected).max() <= 1e-6 * np.abs(expected).max()
    facts = (server if apart else worker).strategy.facts
    assert facts["staleness_0"] == steps
    assert facts["role"] == "server and worker"
    if apart:
        assert worker.strategy.facts["role"] == "worker"
        report = worker.swarm.rounds[-1]
        assert (report.bytes_out, report.bytes_in, report.round_trips) == (4 * SIZE, 4 * SIZE, 1)


@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
async def test_shards_do_not_change_a_lone_workers_result(optimizer):
    results = []
    for servers in (1, 4):
        sim = SimSwarm(MemoryNetwork(random.Random(1), delay_s=(0.001, 0.001)))
        problem = Serial()
        options = config(servers=servers, optimizer=optimizer)
        nodes = [
            sim.add(options, problem.start, gradient=lambda x, p=problem: p.gradient(x.astype(np.float64)))
            for _ in range(4)
        ]
        sim.introduce()
        for node in nodes:
            await node.start(train=False)
        await asyncio.sleep(1.0)
        await nodes[0].learner.run(30)
        results.append(nodes[0].learner.x.tobytes())
        await sim.close()
    assert results[0] == results[1]


@pytest.mark.parametrize("servers", [1, 4])
async def test_pushing_and_fetching_each_fourth_step_is_serial_training(sim, servers):
    """DistBelief with n_push = n_fetch = 4, its own steps between, and SGD; also over several shards."""
    problem = Serial()
    options = config(servers=servers, push_every=4, fetch_every=1, local_steps=True)
    nodes = [
        sim.add(
            options,
            problem.start,
            gradient=lambda x: problem.gradient(x.astype(np.float64)),
            learning_rate=LR,
        )
        for _ in range(servers)
    ]
    sim.introduce()
    for node in nodes:
        await node.start(train=False)
    await asyncio.sleep(1.0)
    worker = nodes[0]
    await worker.learner.run(40)
    assert worker.strategy.outcomes == {"ok": 10}
    expected = problem.run("sgd", 40)
    assert np.abs(worker.learner.x - expected).max() <= 1e-6 * np.abs(expected).max()


async def test_the_fetch_comes_each_so_many_pushes(sim):
    node = sim.add(config(fetch_every=4), np.ones(SIZE))
    node.learner.keep_history = True
    await node.start(41)
    await node.trained()
    moved = [
        not np.array_equal(a, b) for a, b in zip(node.learner.history, node.learner.history[1:], strict=False)
    ]
    assert sum(moved) in (9, 10)
    assert node.strategy.facts["steps"] == node.strategy.outcomes["ok"] >= 40


async def test_many_workers_learn_and_stay_together(sim):
    nodes = await grow(sim, 5, config(ahead=1))
    await asyncio.sleep(8.0)
    assert max(float(np.abs(node.learner.now()).max()) for node in nodes) < 1e-3
    facts = servers_of(nodes)[0][0].strategy.facts
    assert facts["staleness_0"] + facts.get("staleness_1", 0) > 0
    assert sum(value for name, value in facts.items() if name.startswith("staleness")) == facts["steps"]


async def test_several_pushes_at_a_time(sim, network):
    network.delay_s = (0.1, 0.2)
    nodes = await grow(sim, 2, config(ahead=1, servers=1))
    slow = (await progress(nodes, 5.0))[1]
    await sim.close()
    other = SimSwarm(MemoryNetwork(random.Random(1), delay_s=(0.1, 0.2)))
    nodes = await grow(other, 2, config(ahead=4, servers=1))
    workers = servers_of(nodes)[1]
    quick = (await progress(workers, 5.0))[0]
    assert quick > 2 * slow or slow > 50
    await other.close()
    sim.nodes.clear()


@pytest.mark.parametrize("compression", ["none", "bf16", "int8", "topk", "threshold"])
async def test_a_learning_rate_of_zero_keeps_the_mean_of_all(sim, compression):
    nodes = await grow(sim, 4, config(compression=compression, learning_rate=0.0, optimizer="adam"))
    rng = np.random.default_rng(5)
    mean = np.mean([rng.normal(size=SIZE).astype(np.float32).astype(np.float64) for _ in nodes], axis=0)
    for node in nodes:
        assert np.array_equal(node.learner.now(), mean.astype(np.float32))


async def test_local_steps_between_fetches(sim):
    nodes = await grow(sim, 3, config(local_steps=True, fetch_every=5), learning_rate=LR)
    await asyncio.sleep(6.0)
    assert max(float(np.abs(node.learner.now()).max()) for node in nodes) < 1e-2


async def push(caller, server, version: int, gradient: np.ndarray):
    head = GradientPush(server.group.view.key, 0, "step", version, weight=1.0, wants=False)
    return await caller.transport.call(
        server.address,
        server.id,
        "push",
        msgspec.msgpack.encode(head),
        vector=memoryview(gradient.astype(np.float32)).cast("B"),
        deadline_s=3.0,
    )


@pytest.mark.parametrize(
    ("stale", "most", "counted"),
    [("drop", 9, (1.0, 0.0)), ("scale", 9, (1.0, 10 / 13)), ("scale", 0, (1 / 8, 1 / 13))],
)
async def test_stale_gradients(sim, stale, most, counted):
    nodes = await grow(sim, 2, config(servers=1, stale=stale, max_staleness=most))
    (server,), (worker,) = servers_of(nodes)
    await pause(nodes)
    await asyncio.sleep(0.5)
    seen = server.strategy.facts
    for staleness, factor in zip((7, 12), counted, strict=True):
        _, version, before, *_ = await pulled(server, worker)
        answer = await push(worker, server, version - staleness, np.ones(SIZE))
        given = msgspec.msgpack.decode(answer.meta, type=ServerAnswer)
        after = await pulled(server, worker)
        assert np.allclose(before - after.parameters, LR * factor, rtol=1e-4, atol=1e-7)
        assert after.version == version + (factor > 0)
        assert given.outcome == ("ok" if factor else "stale")
        assert given.staleness == staleness
        assert given.merged == (((worker.id, pytest.approx(factor)),) if factor else ())
    facts = server.strategy.facts
    more = {name: facts[name] - seen.get(name, 0) for name in facts if "stale" in name or name == "scaled"}
    assert (more["staleness_4-7"], more["staleness_8-15"]) == (1, 1)
    assert more.get("stale", 0) == counted.count(0.0)
    assert more["scaled"] == sum(0 < factor < 1 for factor in counted)


def test_what_a_stale_gradient_counts_for():
    """Whole up to the bound, then as one step's worth of age in so many, without a jump."""
    scaled = [weight_of(s, config(stale="scale", max_staleness=4)) for s in (0, 4, 5, 9, 99)]
    assert scaled == pytest.approx([1.0, 1.0, 5 / 6, 5 / 10, 5 / 100])
    assert [weight_of(s, config(stale="drop", max_staleness=4)) for s in (0, 4, 5, 99)] == [
        1.0,
        1.0,
        0.0,
        0.0,
    ]
    assert [weight_of(s, config(stale="scale", max_staleness=0)) for s in (0, 1, 3)] == [1.0, 0.5, 0.25]


def staleness_in(node, protocol: str = "server_async") -> tuple[dict[str, int], dict[str, object]]:
    """What the node's accounting would show of the rounds that its strategy told."""
    accounting = Accounting(node.id, LoopClock())
    accounting.entered(node.config, 1)
    for report in node.swarm.rounds:
        accounting.round(report)
    account = accounting.document(str)[protocol]
    return account["staleness"], account


async def test_a_workers_staleness_is_accounted(sim):
    """Four equal workers: each push is some steps old, and the worker that made it says so."""
    nodes = await grow(sim, 4, config(servers=1, ahead=1))
    await asyncio.sleep(3.0)
    await pause(nodes)
    await asyncio.sleep(0.5)
    (server,), _ = servers_of(nodes)
    told: Counter[str] = Counter()
    for node in nodes:
        staleness, account = staleness_in(node)
        assert sum(staleness.values()) == account["rounds"]["ok"]
        told["0"] += staleness["0"]
        told["1"] += staleness["1"]
        told["2-3"] += staleness["2"] + sum(
            1 for r in node.swarm.rounds for m in r.merged if m.staleness == 3
        )
    facts = server.strategy.facts
    assert sum(told.values()) > 100
    for bucket in ("0", "1", "2-3"):
        assert told[bucket] == facts.get(f"staleness_{bucket}", 0)


async def add_a_slow_one(sim, **options):
    """Three workers, and one that is 20 times slower than each of them."""
    quick = list(await grow(sim, 3, config(servers=1, **options)))
    slow = sim.add(quick[0].config, np.ones(SIZE), period_s=1.0)
    sim.introduce()
    await slow.start()
    await asyncio.sleep(30.0)
    return quick, slow


async def test_a_slow_workers_gradients_are_scaled_and_it_is_told(sim):
    quick, slow = await add_a_slow_one(sim, max_staleness=20)
    staleness, account = staleness_in(slow)
    assert account["rounds"].get("stale", 0) == 0
    assert account["rounds"]["ok"] >= 20
    assert sum(count for bound, count in staleness.items() if bound in ("32", "64", "128")) >= 15
    last = slow.swarm.rounds[-1].merged[0]
    assert last.peer == slow.id
    assert last.weight == pytest.approx(21 / (1 + last.staleness))
    assert slow.strategy.facts["own_scaled"] >= 15
    heard = [message for kind, message in slow.swarm.told if "count for less" in message]
    assert [message.split()[0] for message in heard] == ["1", "10"]
    assert not any("count for less" in message for node in quick for _, message in node.swarm.told)


@pytest.mark.slow
async def test_a_slow_workers_refused_gradients_are_counted_and_told(sim):
    _, slow = await add_a_slow_one(sim, max_staleness=20, stale="drop")
    staleness, account = staleness_in(slow)
    refused = account["rounds"]["stale"]
    assert refused >= 15
    assert account["failed"] >= refused
    assert sum(staleness.values()) == account["rounds"].get("ok", 0)
    assert slow.strategy.facts["own_stale"] == refused
    report = next(report for report in slow.swarm.rounds if report.outcome == "stale")
    assert report.error.startswith("refused: ")
    heard = [message for _, message in slow.swarm.told if "were refused" in message]
    assert [message.split()[0] for message in heard] == ["1", "10"]
    assert "set stale = scale" in heard[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e7])
async def test_poisoned_gradients_are_refused(sim, bad):
    nodes = await grow(sim, 2, config(servers=1))
    (server,), (worker,) = servers_of(nodes)
    await pause(nodes)
    await asyncio.sleep(0.5)
    _, version, before, *_ = await pulled(server, worker)
    gradient = np.ones(SIZE)
    gradient[3] = bad
    with pytest.raises(PeerRefusedError) as refused:
        await push(worker, server, version, gradient)
    assert refused.value.status == 422
    with pytest.raises(PeerRefusedError) as refused:
        await push(worker, server, version, np.ones(SIZE + 1))
    assert refused.value.status == 422
    assert server.swarm.strikes == [worker.id] * 2
    after = await pulled(server, worker)
    assert np.array_equal(after.parameters, before)
    assert after.version == version
    server.swarm.held.add(worker.id)
    with pytest.raises(PeerRefusedError) as refused:
        await push(worker, server, version, np.ones(SIZE))
    assert refused.value.status == 403


async def test_a_gradient_over_no_samples_is_none(sim):
    """Learners post zeros for a gradient that isn't finite, so that nobody waits in vain."""
    nodes = await grow(sim, 2, config(optimizer="adam", servers=1), samples=0)
    assert min(await progress(nodes, 1.0)) > 10
    assert sum(node.strategy.facts.get("steps", 0) for node in nodes) == 0


async def test_a_nan_of_our_own_is_told_to_nobody(sim):
    nodes = await grow(sim, 2, config(servers=1))
    nodes[0].learner.gradient = lambda x: np.full_like(x, np.nan)
    nodes[1].learner.gradient = lambda x: np.full_like(x, np.nan)
    assert min(await progress(nodes, 1.0)) > 10
    assert [node.swarm.strikes for node in nodes] == [[], []]
    assert all(node.strategy.outcomes["poisoned"] > 5 for node in nodes)
    assert all(np.isfinite(node.learner.now()).all() for node in nodes)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
async def test_a_killed_server_is_replaced(sim, optimizer):
    nodes = await grow(sim, 4, config(optimizer=optimizer, learning_rate=0.01))
    await asyncio.sleep(3.0)
    (dead, other), _ = servers_of(nodes)
    before = np.abs(nodes[0].learner.now())
    version = other.strategy.facts["version"]
    await sim.kill(dead)
    left = sim.living
    assert min(await progress(left, sim.detect_s + 3.0)) > 20
    assert left[0].strategy.facts["version"] > version
    assert other.id in str(left[0].strategy.facts["servers"])
    worst = 0.3 if optimizer == "adam" else before.max()
    assert all(np.abs(node.learner.now()).max() <= worst for node in left)
    took = next(node for node in left if node.strategy.facts.get("takeovers"))
    assert any("with momenta" in message for _, message in took.swarm.told)


async def test_a_frozen_server_blocks_nobody_beyond_the_patience(sim, network):
    nodes = await grow(sim, 4, config())
    (frozen, _), _ = servers_of(nodes)
    others = [node for node in nodes if node is not frozen]
    network.freeze(frozen.id)
    for node in others:
        network.cut(frozen.id, node.id, one_way=True)
    assert min(await progress(others, 6.0)) > 40
    lost = [report for node in others for report in node.swarm.rounds if report.outcome == "lost"]
    assert all(report.seconds <= 2.1 for report in lost)
    network.heal()
    network.thaw(frozen.id)
    await asyncio.sleep(10.0)
    assert min(await progress(nodes, 1.0)) > 10
    await pause(nodes)
    assert spread(nodes) < 0.05


async def test_lossy_networks_cost_pushes_only(sim, network):
    nodes = await grow(sim, 3, config(deadline_s=1.0))
    network.loss = 0.05
    assert min(await progress(nodes, 10.0)) > 40
    assert sum(node.strategy.outcomes.get("lost", 0) for node in nodes) > 0
    network.loss = 0.0
    await asyncio.sleep(12.0)
    assert min(await progress(nodes, 1.0)) > 10


async def test_a_newcomer_takes_the_servers_parameters(sim):
    nodes = await grow(sim, 3, config(learning_rate=1e-4))
    late = sim.add(config(learning_rate=1e-4), np.full(SIZE, 50.0), period_s=0.04)
    sim.introduce()
    await late.start()
    await asyncio.sleep(2.0)
    assert min(await progress([*nodes, late], 1.0)) > 10
    await pause([*nodes, late])
    assert spread([*nodes, late]) < 0.01
    assert float(np.abs(late.learner.now()).max()) < 5.0


async def test_a_server_that_leaves_hands_over_its_last_step(sim):
    nodes = await grow(sim, 3, config(servers=1, optimizer="adam"))
    (leaver,), others = servers_of(nodes)
    await pause(nodes)
    await asyncio.sleep(0.5)
    before = await pulled(leaver, others[0])
    await leaver.strategy.stop(3.0)
    leaver.dead = True
    sim.introduce()
    await asyncio.sleep(3.0)
    took = next(node for node in others if node.strategy.facts.get("takeovers"))
    got = await pulled(took, next(node for node in others if node is not took))
    assert np.array_equal(got.parameters, before.parameters)
    assert got.scalars["steps"] == before.scalars["steps"] > 0


async def test_stop_ends_everything(sim):
    nodes = await grow(sim, 3, config(ahead=3))
    await asyncio.gather(*(node.strategy.stop(1.0) for node in nodes))
    await asyncio.gather(*(node.strategy.watch() for node in nodes))
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert not names & {"served", "worker", "keeper", "server", "view", "stop", "post", "arithmetic"}


def test_buckets_of_the_histogram():
    assert [bucket_of(s).removeprefix("staleness_") for s in (0, 1, 2, 3, 4, 7, 8, 100)] == [
        "0",
        "1",
        "2-3",
        "2-3",
        "4-7",
        "4-7",
        "8-15",
        "64-127",
    ]
