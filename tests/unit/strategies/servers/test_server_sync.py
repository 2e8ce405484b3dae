"""Synchronous servers: n workers are one big batch, whatever the optimizer, the shards and the reduction."""

from __future__ import annotations

import random

import numpy as np
import pytest

from p2pdrl.config.strategy import ServerSyncConfig
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.testing.virtual_swarm import SimSwarm

from .swarms import COMMON

pytestmark = pytest.mark.looptime

SIZE = 12
ROWS = (8, 16, 4, 12)
"""Samples of each worker."""
LR = 0.05
FIRST = 10
"""Policy version with which learners begin: a shard's version is this plus its steps."""


class Problem:
    """Least squares, its rows dealt to the workers; all in float64 but for what learners hand out."""

    def __init__(self, seed: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.parts = [(rng.normal(size=(rows, SIZE)), rng.normal(size=rows)) for rows in ROWS]
        self.starts = [rng.normal(size=SIZE).astype(np.float32) for _ in ROWS]

    def gradient(self, worker: int, x: np.ndarray) -> np.ndarray:
        """Mean over the worker's rows."""
        features, targets = self.parts[worker]
        return features.T @ (features @ x - targets) / len(targets)

    def reduced(self, x: np.ndarray, reduce: str) -> np.ndarray:
        gradients = [self.gradient(worker, x) for worker in range(len(ROWS))]
        if reduce == "sum":
            return np.sum(gradients, axis=0)
        if reduce == "mean":
            return np.mean(gradients, axis=0)
        features = np.concatenate([part[0] for part in self.parts])
        targets = np.concatenate([part[1] for part in self.parts])
        return features.T @ (features @ x - targets) / len(targets)


def serial(problem: Problem, optimizer: str, steps: int, reduce: str = "count") -> np.ndarray:
    """The same training by one node on one big batch, written out from the papers, in float64."""
    x = np.mean([start.astype(np.float64) for start in problem.starts], axis=0)
    m, v = np.zeros(SIZE), np.zeros(SIZE)
    for step in range(1, steps + 1):
        g = problem.reduced(x, reduce)
        if optimizer == "sgd":
            x = x - LR * g
        elif optimizer == "momentum":
            m = 0.9 * m + g
            x = x - LR * m
        elif optimizer == "rmsprop":
            v = 0.999 * v + 0.001 * g**2
            x = x - LR * g / (np.sqrt(v) + 1e-5)
        elif optimizer == "adagrad":
            v = v + g**2
            x = x - LR * g / (np.sqrt(v) + 1e-5)
        else:
            m = 0.9 * m + 0.1 * g
            v = 0.999 * v + 0.001 * g**2
            x = x - LR * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-5)
    return x


def config(**options) -> ServerSyncConfig:
    return ServerSyncConfig(**COMMON | {"learning_rate": LR} | options)


def grow(sim: SimSwarm, problem: Problem, options: ServerSyncConfig, **learner):
    for worker, start in enumerate(problem.starts):
        sim.add(
            options,
            start,
            gradient=lambda x, worker=worker: problem.gradient(worker, x.astype(np.float64)),
            samples=ROWS[worker],
            **learner,
        )
    sim.introduce()
    return sim.nodes


async def train(nodes, updates: int) -> int:
    """Let all learners make ``updates``; return the steps that the servers made."""
    for node in nodes:
        node.learner.keep_history = True
        await node.start(updates)
    for node in nodes:
        await node.trained()
    assert len({node.learner.x.tobytes() for node in nodes}) == 1
    return int(nodes[0].strategy.facts["version"]) - FIRST


def after(node, steps: int) -> np.ndarray:
    """The vector after so many steps of the servers: the first updates may have come before the seed."""
    made = int(node.strategy.facts["version"]) - FIRST
    return node.learner.history[steps - made - 1]


@pytest.mark.parametrize(
    ("optimizer", "tolerance"),
    [("sgd", 1e-6), ("momentum", 1e-6), ("adagrad", 1e-5), ("rmsprop", 1e-5), ("adam", 1e-5)],
)
async def test_workers_are_one_big_batch(sim, optimizer, tolerance):
    problem = Problem()
    nodes = grow(sim, problem, config(optimizer=optimizer))
    steps = await train(nodes, 51)
    assert steps >= 50
    expected = serial(problem, optimizer, steps)
    assert np.abs(nodes[0].learner.x - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("reduce", ["mean", "sum", "count"])
async def test_reductions(sim, reduce):
    problem = Problem()
    nodes = grow(sim, problem, config(reduce=reduce, servers=3))
    steps = await train(nodes, 21)
    expected = serial(problem, "sgd", steps, reduce)
    assert np.allclose(nodes[0].learner.x, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "rmsprop", "adagrad", "adam"])
@pytest.mark.parametrize("mixing", ["mean", "trimmed"])
async def test_any_number_of_shards_is_one_shard_bit_for_bit(network_of, optimizer, mixing):
    results = []
    for servers in (1, 3, 4, 9):
        sim = network_of()
        nodes = grow(sim, Problem(), config(optimizer=optimizer, servers=servers, mixing=mixing))
        await train(nodes, 12)
        results.append(after(nodes[0], 10).tobytes())
        await sim.close()
    assert len(set(results)) == 1


@pytest.fixture
def network_of():
    """Make swarms one after the other."""
    return lambda: SimSwarm(MemoryNetwork(random.Random(1), delay_s=(0.0005, 0.002)))


@pytest.mark.parametrize("compression", ["none", "bf16", "int8", "topk", "threshold"])
async def test_a_learning_rate_of_zero_keeps_the_mean_of_all(sim, compression):
    problem = Problem()
    nodes = grow(sim, problem, config(compression=compression, learning_rate=0.0, optimizer="adam"))
    await train(nodes, 8)
    mean = np.mean([start.astype(np.float64) for start in problem.starts], axis=0)
    assert np.array_equal(nodes[0].learner.x, mean.astype(np.float32))


@pytest.mark.parametrize(("compression", "tolerance"), [("bf16", 5e-3), ("int8", 2e-2)])
async def test_compressed_rounds_follow_the_exact_ones(sim, compression, tolerance):
    problem = Problem()
    nodes = grow(sim, problem, config(compression=compression))
    steps = await train(nodes, 51)
    expected = serial(problem, "sgd", steps)
    assert np.abs(nodes[0].learner.x - expected).max() <= tolerance * np.abs(expected).max()


async def test_the_learners_rate_is_followed(sim):
    problem = Problem()
    nodes = grow(sim, problem, config(learning_rate=None, servers=1), learning_rate=LR)
    steps = await train(nodes, 11)
    assert np.allclose(nodes[0].learner.x, serial(problem, "sgd", steps), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("reduce", "weights"),
    [("count", [rows / sum(ROWS) for rows in ROWS]), ("mean", [1 / 4] * 4), ("sum", [1 / 4] * 4)],
)
async def test_who_counted_for_how_much_is_reported(sim, reduce, weights):
    nodes = grow(sim, Problem(), config(reduce=reduce, servers=1))
    await train(nodes, 6)
    merged = nodes[0].swarm.rounds[-1].merged
    assert {one.peer: one.weight for one in merged} == {
        node.id: pytest.approx(weight) for node, weight in zip(nodes, weights, strict=True)
    }


async def test_what_is_reported(sim):
    nodes = grow(sim, Problem(), config(servers=1))
    await train(nodes, 6)
    server = next(node for node in nodes if node.strategy.facts["role"] == "server and worker")
    worker = next(node for node in nodes if node is not server)
    report = worker.swarm.rounds[-1]
    assert report.outcome == "ok"
    assert report.missing == ()
    assert {merged.peer: merged.weight for merged in report.merged} == {
        node.id: pytest.approx(rows / sum(ROWS)) for node, rows in zip(nodes, ROWS, strict=True)
    }
    assert (report.bytes_out, report.bytes_in, report.round_trips) == (4 * SIZE, 4 * SIZE, 1)
    assert report.changed > 0
    assert report.seconds == report.waited_s > 0
    assert server.swarm.rounds[-1].round_trips == 0
    facts = server.strategy.facts
    assert facts["shard"] == f"0 to {SIZE - 1}"
    assert facts["servers"] == server.id
    assert facts["gradients"] == 4 * facts["steps"]
    assert worker.strategy.facts["role"] == "worker"
    assert worker.strategy.outcomes["ok"] == facts["steps"] >= 5
    assert worker.strategy.consensus_distance == 0.0
    assert worker.strategy.mode == "server-sync"


async def test_bf16_halves_the_bytes_both_ways(sim):
    nodes = grow(sim, Problem(), config(servers=1, compression="bf16"))
    await train(nodes, 6)
    worker = next(node for node in nodes if node.strategy.facts["role"] == "worker")
    report = worker.swarm.rounds[-1]
    assert (report.bytes_out, report.bytes_in) == (2 * SIZE, 2 * SIZE)


async def test_pinned_nodes_serve(sim):
    problem = Problem()
    ids = [f"{number:032x}" for number in range(len(ROWS))]
    nodes = grow(sim, problem, config(servers=2, pinned=(ids[2], ids[0])))
    await train(nodes, 3)
    assert nodes[1].strategy.facts["servers"] == f"{ids[2]}, {ids[0]}"


async def test_one_node_alone_is_serial_training(sim):
    node = sim.add(config(servers=4, optimizer="momentum"), np.ones(SIZE, np.float32))
    await train([node], 12)
    x, m = np.ones(SIZE), np.zeros(SIZE)
    for _ in range(10):
        m = 0.9 * m + x
        x = x - LR * m
    assert np.allclose(after(node, 10), x, rtol=1e-5)
