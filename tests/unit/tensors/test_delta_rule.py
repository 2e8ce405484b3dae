"""Why an exchange posts ``mixed - now``: gossip between 8 nodes, one of which publishes rarely."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from p2pdrl.tensors import mix
from p2pdrl.tensors.board import BoardSpec, DaemonBoard, LearnerBoard
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.shared_memory import SharedRegion

NODES, SIZE, SWEEPS, SLOW_EVERY = 8, 16, 400, 5
SPEC = BoardSpec(Layout((TensorEntry("x", (SIZE,)),)))


class Node:
    """A learner that only absorbs what its daemon posts."""

    def __init__(self, start: np.ndarray) -> None:
        self.region = SharedRegion.create(SPEC.nbytes, "delta-rule")
        self.learner, self.daemon = LearnerBoard(self.region, SPEC), DaemonBoard(self.region, SPEC)
        self.x = start.copy()
        self.learner.publish(self.x, None, 0)

    def turn(self) -> None:
        taken = self.learner.take()
        if taken is not None:
            self.x += taken.vector
        self.learner.publish(self.x, None, 0)
        self.daemon.flush()

    def read(self, rule: str) -> np.ndarray:
        out = np.empty(SIZE, np.float32)
        (self.daemon.now if rule == "now" else self.daemon.published)(out)
        return out


def consensus(nodes: list[Node]) -> float:
    """Consensus distance: sqrt(mean over nodes of |x - mean|²)."""
    xs = np.array([node.read("now") for node in nodes], np.float64)
    return float(np.sqrt(np.square(xs - xs.mean(axis=0)).sum(axis=1).mean()))


def sweep(nodes: list[Node], rule: str, number: int, rng: np.random.Generator) -> None:
    """Each node makes two exchanges, then publishes; the slow node only in every fifth sweep."""
    for _ in range(2):
        order = rng.permutation(NODES)
        for i, j in order.reshape(-1, 2):
            xi, xj = nodes[i].read(rule), nodes[j].read(rule)
            to_i, to_j = np.empty_like(xi), np.empty_like(xj)
            mix.pair_delta(xi, xj, out=to_i)
            mix.pair_delta(xj, xi, out=to_j)
            nodes[i].daemon.post_delta(to_i, 0)
            nodes[j].daemon.post_delta(to_j, 0)
    for n, node in enumerate(nodes):
        if n > 0 or number % SLOW_EVERY == 0:
            node.turn()


def ratios(rule: str, nodes: list[Node]) -> Iterator[float]:
    """Consensus distance after each sweep, as a share of the first."""
    rng, first = np.random.default_rng(1), consensus(nodes)
    for number in range(1, SWEEPS + 1):
        sweep(nodes, rule, number, rng)
        yield consensus(nodes) / first


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    starts = np.random.default_rng(0).standard_normal((NODES, SIZE), dtype=np.float32)
    nodes = [Node(start) for start in starts]
    yield nodes
    for node in nodes:
        node.region.close()


@pytest.mark.parametrize("rule", ["now", "published"])
def test_delta_rule_converges_where_mixed_minus_published_diverges(rule: str, nodes: list[Node]) -> None:
    mean = np.mean([node.x for node in nodes], axis=0, dtype=np.float64)
    if rule == "published":
        assert any(ratio > 1e6 for ratio in ratios(rule, nodes))
        return
    *_, last = ratios(rule, nodes)
    assert last < 1e-2
    for node in nodes:
        np.testing.assert_allclose(node.read("now"), mean, atol=1e-5)
