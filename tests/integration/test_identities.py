"""What strategies are in theory, with real processes: one big batch, serial descent, equal replicas.

A regression on rows taken in sequence; every gradient that a node posts can be computed again, in float64,
from its seed and its place in the sequence, which travels with its checkpoints.
"""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from msgspec.structs import asdict

from p2pdrl.config.task import RegressionConfig
from p2pdrl.rl.sources.rows import make_rows, sequence_batch

RATE = 0.02
UPDATE_S = 0.08
UPDATES = 50
LONGEST_S = 30
WITHIN = 1e-5
HOGWILD = {"name": "hogwild", "learners": 4, "between_nodes": "false"}


def regression(**options):
    return RegressionConfig(features=24, rows=1200, learning_rate=RATE, min_update_s=UPDATE_S, **options)


def problem(workers, **options):
    return regression(batch_size=8, sample="sequence", workers=workers, **options)


def sharded(shards):
    return regression(batch_size=1200, sample="shards", shards=shards)


def arguments(config, strategy, seed, nodes):
    task = {
        "task.algorithm.name": "regression",
        "node.seed": seed,
        "node.debug.start_at_members": nodes,
        "node.checkpoint.every_s": 0,
        "node.trusted_network": "true",  # torch.distributed asks for it
    }
    usual = asdict(RegressionConfig())
    task |= {f"task.algorithm.{key}": value for key, value in asdict(config).items() if value != usual[key]}
    task |= {f"task.strategy.{key}": value for key, value in ({"compression": "none"} | strategy).items()}
    return [f"--set={key}={value}" for key, value in task.items()]


class Serial:
    """The same rows in float64, by one worker or by several as one."""

    def __init__(self, config):
        self.config = config
        rows, _ = make_rows(config, 0)
        self.inputs_RF = rows.inputs_RF.astype(np.float64)
        self.targets_R = rows.targets_R.astype(np.float64)

    def step(self, x_F, batches):
        """One step on all ``batches``, given as (seed, place in the sequence)."""
        if self.config.sample == "shards":
            rows = np.arange(self.config.rows)
        else:
            rows = np.concatenate([sequence_batch(self.config, seed, place) for seed, place in batches])
        residual_B = self.inputs_RF[rows] @ x_F - self.targets_R[rows]
        return x_F - RATE * self.inputs_RF[rows].T @ residual_B / len(rows)


class Film:
    """Snapshots of all nodes: policy version, place in the sequence, parameters."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.shots = {node.name: {} for node in nodes}  # by version: the parameters
        self.ahead = {node.name: Counter() for node in nodes}  # place in the sequence minus version

    def shoot(self, seconds):
        """For so long; on a busy machine longer, until each node has been seen at updates enough."""
        began = time.monotonic()
        while (took := time.monotonic() - began) < seconds or (self.seen < UPDATES + 20 and took < LONGEST_S):
            for node in self.nodes:
                checkpoint = node.checkpoint()
                version = checkpoint.meta["policy_version"]
                self.shots[node.name].setdefault(version, set()).add(checkpoint.params.tobytes())
                self.ahead[node.name][int(checkpoint.sidecar["regression.updates"]) - version] += 1

    @property
    def seen(self):
        """Versions between the first and the last shot of each node, at least."""
        return min(max(shots) - min(shots) for shots in self.shots.values())

    def align(self):
        """Count every node's versions as the first does.

        A member that adopted the state with which a mode began may count an update more for it, for good.
        """
        mine = self.shots[self.nodes[0].name]
        for name in self.shots:
            theirs = self.shots[name]
            lags = Counter(
                {lag: sum(len(mine[v] & theirs.get(v + lag, set())) for v in mine) for lag in range(-4, 5)}
            )
            ((lag, _),) = lags.most_common(1)
            self.shots[name] = {version - lag: shots for version, shots in theirs.items()}
            self.ahead[name] = Counter({ahead + lag: count for ahead, count in self.ahead[name].items()})

    def agreed(self):
        """Parameters by version where all nodes that were seen there had the same bits, two at least."""
        versions = {}
        for version in sorted(set().union(*self.shots.values())):
            seen = [self.shots[node.name].get(version, set()) for node in self.nodes]
            seen = [shots for shots in seen if shots]
            if len(seen) >= min(2, len(self.nodes)) and set.union(*seen) == set.intersection(*seen):
                versions[version] = np.frombuffer(next(iter(seen[0])), np.float32)
        return versions


def begin(swarm, wait_until, count, config, **strategy):
    nodes = []
    for seed in range(count):
        own = arguments(config, strategy, seed, count)
        nodes.append(swarm.start(f"n{seed}", *own, peers=nodes[0] if nodes else None))
    swarm.training(*nodes, timeout_s=90)
    for node in nodes:
        wait_until(
            lambda node=node: node.rounds_in(strategy["name"]) > 5, 40, f"rounds:\n{node.text()[-2000:]}"
        )
    return nodes


def check(film, config):
    film.align()
    versions = film.agreed()
    first, last = min(versions), max(versions)
    assert last - first >= UPDATES, f"only {sorted(versions)}"
    places = [counter.most_common(1)[0][0] for counter in film.ahead.values()]
    print({name: counter.most_common(3) for name, counter in film.ahead.items()})
    serial, worst = Serial(config), {}
    for shift in (0, 1, -1):
        x_F, worst[shift] = versions[first].astype(np.float64), 0.0
        for version in range(first, last):
            x_F = serial.step(x_F, [(seed, version + at + shift) for seed, at in enumerate(places)])
            if version + 1 in versions:
                off = np.linalg.norm(versions[version + 1] - x_F) / np.linalg.norm(x_F)
                worst[shift] = max(worst[shift], float(off))
    print(f"{last - first} updates, {len(versions)} seen, off by {worst}", flush=True)
    return min(worst.values())


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "server_sync", "optimizer": "sgd", "servers": 2},
        {"name": "grad_average"},
        {"name": "grad_average", "backend": "torch"},
        {"name": "param_average", "every_updates": 1},
    ],
    ids=["server_sync", "grad_average", "ddp", "param_average"],
)
def test_three_workers_are_one_big_batch(swarm, wait_until, strategy):
    config = problem(3)
    nodes = begin(swarm, wait_until, 3, config, **strategy)
    if "backend" in strategy:
        assert all("gloo" in str(node.events("torch")) for node in nodes)
    film = Film(nodes)
    film.shoot(5)
    assert check(film, config) < WITHIN


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_one_downpour_worker_is_serial(swarm, wait_until):
    config = problem(1)
    strategy = {"name": "server_async", "optimizer": "sgd", "push_every": 1, "fetch_every": 1, "ahead": 0}
    film = Film(begin(swarm, wait_until, 1, config, **strategy))
    film.shoot(8)
    assert check(film, config) < WITHIN


@pytest.mark.timeout(240)
@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [{"name": "server_sync", "optimizer": "sgd"}, {"name": "grad_average"}],
    ids=["server_sync", "grad_average"],
)
def test_three_workers_of_four_shards_descend_on_the_whole_data_set_and_so_do_the_two_left(
    swarm, wait_until, strategy
):
    config = sharded(4)
    nodes = begin(swarm, wait_until, 3, config, **strategy)

    def shares(nodes):
        metrics = [(node.status().get("learner") or {}).get("metrics", {}) for node in nodes]
        return sorted(one.get("shards", -1) for one in metrics)

    wait_until(lambda: shares(nodes) == [1, 1, 2], 30, "shares of three")
    film = Film(nodes)
    film.shoot(5)
    assert check(film, config) < WITHIN
    left = nodes[:2]
    nodes[2].kill9()
    wait_until(lambda: shares(left) == [2, 2], 60, "shares of two")
    before = left[0].rounds_in(strategy["name"])
    wait_until(lambda: left[0].rounds_in(strategy["name"]) > before + 5, 40, "rounds of two")
    film = Film(left)
    film.shoot(5)
    assert check(film, config) < WITHIN


def learners_of(node, count):
    """Its learner processes, once they are so many."""
    found = [child for child in node.children() if "p2pdrl.workers.learner" in child.cmdline()]
    return found if len(found) == count else None


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_four_processes_without_locks_converge_on_a_sparse_problem(swarm, wait_until):
    config = RegressionConfig(
        features=200, density=0.05, noise=0.0, batch_size=4, learning_rate=0.2, min_update_s=0.002
    )
    node = swarm.start("n0", *arguments(config, HOGWILD, 0, 1))
    swarm.training(node)
    learners = wait_until(lambda: learners_of(node, HOGWILD["learners"]), 30, "all learners are there")
    for learner in learners:
        learner.suspend()

    def steps(more):
        """Wait until so many more updates were made."""
        before = node.status()["updates"]
        wait_until(lambda: node.status()["updates"] >= before + more, 60, "they step", every_s=0.02)

    for learner in learners:  # each moves the vector also by itself
        learner.resume()
        steps(10)
        learner.suspend()
    assert node.status()["updates"] < 800  # which one process needs to come to 3e-5
    for learner in learners:
        learner.resume()
    steps(2000)
    _, evaluation = make_rows(config, 0)
    errors = evaluation.inputs_RF @ node.params() - evaluation.targets_R
    assert 0.5 * np.mean(np.square(errors)) < 1e-9
