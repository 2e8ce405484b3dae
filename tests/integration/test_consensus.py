"""Real nodes, started all at once, that only average: they come together, and their mean stays where it was.

The bound in theory: on the complete graph each exchange shrinks the expected squared distance by
1 − 1/(n−1), so 96 exchanges of 8 nodes leave (6/7)^48 = 6e-4 of the distance; 48 of 4 leave (2/3)^24 = 6e-5.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

from p2pdrl.config.task import TaskConfig
from p2pdrl.rl.registry import build_trainer

EXCHANGES = 12
DEVIATION = 1.0


def consensus(vectors_ND: np.ndarray) -> float:
    """sqrt(mean over nodes of ‖x_i − x̄‖²)."""
    return float(np.sqrt(((vectors_ND - vectors_ND.mean(0)) ** 2).sum(1).mean()))


def start_vectors(task_seed: int, node_seeds: list[int]) -> np.ndarray:
    """What each node starts from: the task's weights plus noise from its own seed."""
    task = msgspec.structs.replace(TaskConfig(), seed=task_seed)
    trainer = build_trainer(task, seed=0, device="cpu")
    first_D = trainer.flat.astype(np.float64)
    trainer.close()
    noise = [np.random.default_rng(seed).normal(0, DEVIATION, first_D.size) for seed in node_seeds]
    return first_D + np.array(noise, np.float32).astype(np.float64)


def unmoved(nodes) -> list[np.ndarray]:
    """Return everybody's parameters; nothing while they change."""
    before = [node.params() for node in nodes]
    time.sleep(2.0)  # the slowest publishes four times a second, of which a busy machine may miss some
    now = [node.params() for node in nodes]
    return now if np.array_equal(before, now) else []


def average(swarm, wait_until, seed: int, *, count: int, slow: bool = False) -> tuple[float, float]:
    """Return last consensus distance over the first, and how far the mean moved, relative to its norm."""
    common = {
        "task.seed": seed,
        "task.algorithm.learning_rate": 0,
        "task.env.num_envs": 1,
        "task.algorithm.unroll_steps": 16,
        "task.algorithm.epochs": 1,
        "task.algorithm.minibatches": 1,
        "task.strategy.name": "local",
        "node.debug.perturb_start": DEVIATION,
        "node.debug.max_exchanges": EXCHANGES,
        "node.checkpoint.every_s": 0,
    }
    seeds = [seed * 100 + index for index in range(count)]
    nodes = []
    for index, own in enumerate(seeds):
        rate = 4.0 if slow and index == 3 else 20.0
        options = common | {"node.seed": own, "node.learner.max_updates_per_s": rate}
        flags = [f"--set={key}={value}" for key, value in options.items()]
        nodes.append(swarm.start(f"s{seed}-n{index}", *flags, peers=nodes[0] if nodes else None))
    swarm.training(*nodes, timeout_s=120)
    options = ("compression=none", "every_s=0.2", "every_updates=0", "max_staleness=1000000")
    nodes[0].set_mode("gossip", *options)  # all begin at once, however long each has taken to start
    for node in nodes:
        wait_until(
            lambda node=node: node.status()["exchanges"].get("ok", 0) >= EXCHANGES,
            120,
            f"{node.name} initiated {EXCHANGES} exchanges: {node.status().get('exchanges')}",
        )
    last_ND = np.array(wait_until(lambda: unmoved(nodes), 30, "the last exchanges are in all parameters"))
    unsure = sum(node.status()["exchanges"].get("unsure", 0) for node in nodes)
    assert unsure == 0, "an exchange was applied by one side alone"
    for node in nodes:
        node.kill9()
    first_ND = start_vectors(seed, seeds)
    moved = np.linalg.norm(last_ND.mean(0) - first_ND.mean(0)) / np.linalg.norm(first_ND.mean(0))
    return consensus(last_ND) / consensus(first_ND), float(moved)


@pytest.mark.slow
def test_four_nodes_come_together(swarm, wait_until):
    ratio, moved = average(swarm, wait_until, 1, count=4)
    assert moved < 1e-5
    assert ratio < 0.03


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("slow", [False, True], ids=["equal", "one publishes 5 times slower"])
def test_five_seeds(swarm, wait_until, slow):
    ratios = []
    for seed in (1, 2, 3, 4, 5):
        ratio, moved = average(swarm, wait_until, seed, count=8, slow=slow)
        print(f"seed {seed}: consensus ratio {ratio:.2e}, mean moved {moved:.2e}")
        assert moved < 1e-5
        ratios.append(ratio)
    assert np.median(ratios) < 0.01
    assert max(ratios) < 0.03
