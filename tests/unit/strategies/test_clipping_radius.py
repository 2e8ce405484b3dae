"""How far one peer may pull, whatever it sends: by arithmetic alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdrl.clock import ManualClock
from p2pdrl.strategies.clipping_radius import STRIKE, BeyondCounts, ClippingRadius, UsualLengths
from p2pdrl.tensors.mix import PairFigures

D = 40
STEP = 0.1
"""How far one exchange's training moves a node."""
PEERS = ("a", "b", "c")


class Node:
    """One honest node that trains, and knows its radius."""

    def __init__(
        self, clip_distance: float = 2.0, *, seed: int = 0, size: int = D, step: float = STEP
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.x = self.rng.standard_normal(size).astype(np.float32)
        self.clock = ManualClock()
        self.radius = ClippingRadius(clip_distance, self.clock)
        self.step, self.sets, self.way = step, 0, 0.0
        self.radius.read(self.x, self.sets)

    def train(self) -> None:
        way = self.rng.standard_normal(self.x.size)
        self.clock.advance(1.0)
        self.x += (self.step * way / np.linalg.norm(way)).astype(np.float32)
        self.way += self.step

    def meet(
        self, peer: str, vector: np.ndarray | float, weight: float = 0.5, way: np.ndarray | None = None
    ) -> tuple[float, str]:
        """Train, then mix with what a peer sent; how far that moved us, and why it is struck.

        Args:
            vector: or how far it is from ours, along ``way`` or at random.
        """
        self.train()
        self.radius.read(self.x, self.sets)
        if not isinstance(vector, np.ndarray):
            way = self.rng.standard_normal(self.x.size) if way is None else way
            vector = self.x + vector * way / np.linalg.norm(way)
        return self.mix(peer, vector, weight)

    def mix(self, peer: str, vector: np.ndarray, weight: float = 0.5) -> tuple[float, str]:
        apart = vector.astype(np.float64) - self.x
        distance = float(np.linalg.norm(apart))
        figures = PairFigures(float(np.linalg.norm(self.x)), float(np.linalg.norm(vector)), distance)
        clip = self.radius.clip(peer, self.x, vector.astype(np.float32), figures)
        delta = (weight * clip.factor * apart).astype(np.float32)
        self.x += delta
        self.radius.added(delta)
        moved = float(np.linalg.norm(delta))
        assert moved <= weight * clip.radius * (1 + 1e-4)
        return moved, clip.strike

    def settle(self, exchanges: int = 30, distance: float = 0.2) -> None:
        """Meet honest peers in turn, each so far away."""
        for turn in range(exchanges):
            assert self.meet(PEERS[turn % 3], distance)[1] == ""


def test_the_radius_is_a_multiple_of_the_median_of_the_peers_usual_distances():
    """By hand: a distance moves a peer's usual one half way; the lower median of three is the middle one."""
    node = Node(1.5)
    distances = {"a": [0.3, 0.1], "b": [0.2, 0.4], "c": [0.25, 0.25]}
    for turn in range(2):
        for peer, found in distances.items():
            node.meet(peer, found[turn])
    assert node.radius.radius == pytest.approx(1.5 * sorted([0.2, 0.3, 0.25])[1])


def test_before_anything_is_known_one_vector_counts_up_to_a_tenth_of_ours():
    node = Node()
    norm = np.linalg.norm(node.x)
    moved, strike = node.meet("a", 1e3)
    assert moved == pytest.approx(0.5 * 2.0 * 0.1 * norm, rel=0.05)
    assert strike == ""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=5, max_size=60))
def test_one_of_three_cannot_raise_the_radius_whatever_it_sends(sent: list[float]):
    node = Node()
    node.settle()
    for turn, distance in enumerate(sent):
        moved, _ = node.meet("c", distance)
        assert moved <= 0.5 * 2.0 * 0.2 * 1.01
        node.meet(PEERS[turn % 2], 0.2)
    assert node.radius.radius <= 2.0 * 0.2 * 1.01


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=5, max_size=60))
def test_an_only_peer_that_lies_moves_us_by_no_more_than_our_own_training_bounds(sent: list[float]):
    """There is no majority: the radius is at most 2 · (16 + 4) steps, however many vectors come."""
    node = Node()
    for _ in range(20):
        node.meet("a", 0.2)
    for distance in sent:
        moved, _ = node.meet("a", distance)
        assert moved <= 0.5 * 2.0 * (16 + 4) * STEP * 1.01


def test_who_stays_far_pulls_a_bounded_way_in_all():
    node = Node()
    node.settle()
    pulled = 0.0
    for turn in range(300):
        pulled += node.meet("c", 0.6)[0]
        node.meet(PEERS[turn % 2], 0.2)
    assert 0.4 < pulled < 0.5 * 2.0 * 0.2 * 4.1  # two whole ones, then half, a quarter, …


def test_who_stays_within_the_radius_and_pulls_one_way_is_bounded_in_sum():
    """Others' pulls differ in direction: over 32 vectors each comes to about √32 / 2 of them, on average."""
    node = Node()
    node.settle(60)
    way, pulled = np.ones(D), 0.0
    for turn in range(300):
        moved, _ = node.meet("c", 0.35, way=way)
        pulled += moved if turn >= 100 else 0.0
        node.meet(PEERS[turn % 2], 0.2)
    # A sum of 2 · 4 usual distances loses 1/32 with each vector: so much more may come.
    assert pulled / 200 < 1.3 * 0.5 * 2.0 * 4 * 0.2 / 32
    assert pulled / 200 < 0.5 * 0.35 / 4


def test_the_radius_falls_as_nodes_agree():
    node = Node()
    node.settle(distance=0.2)
    wide = node.radius.radius
    node.settle(distance=0.02)
    assert node.radius.radius == pytest.approx(wide / 10, rel=0.05)


def test_a_vector_far_off_is_a_strike_each_time():
    node = Node()
    node.settle()
    strikes = [node.meet("c", -node.x)[1] for _ in range(4)]
    assert strikes[0] == ""  # the first may have its reasons
    assert all("times what is let through" in strike for strike in strikes[1:])


def test_a_peer_within_several_radii_is_never_struck():
    node = Node()
    node.settle()
    for turn in range(40):
        assert node.meet("c", 0.9 * STRIKE * 0.4)[1] == ""
        assert node.meet(PEERS[turn % 2], 0.2)[1] == ""


def swarm_of(count: int, *, seed: int = 0, steps: list[float] | None = None) -> list[Node]:
    """Nodes that begin with the same vector."""
    nodes = [Node(seed=seed + number, step=(steps or [STEP] * count)[number]) for number in range(count)]
    for node in nodes:
        node.x[:] = nodes[0].x
        node.radius.read(node.x, 1)
        node.sets = 1
    return nodes


def exchange(nodes: list[Node], one: int, other: int) -> list[str]:
    """Both sides of an exchange with the vectors that each has before; the strikes."""
    mine, theirs = nodes[one].x.copy(), nodes[other].x.copy()
    return [
        strike
        for strike in (
            nodes[one].meet(str(other), theirs)[1] and f"{one} of {other}",
            nodes[other].meet(str(one), mine)[1] and f"{other} of {one}",
        )
        if strike
    ]


def gossip(nodes: list[Node], among: list[int], rounds: int, rng: np.random.Generator) -> list[str]:
    found = []
    for _ in range(rounds):
        one, other = rng.choice(among, 2, replace=False)
        found += exchange(nodes, int(one), int(other))
    return found


def alone(node: Node, way: float = 1.0) -> None:
    """One step of training, always the same way."""
    node.clock.advance(1.0)
    node.x += np.float32(way * STEP / np.sqrt(D))
    node.radius.read(node.x, 1)


def spread(nodes: list[Node]) -> float:
    xs = np.array([node.x for node in nodes], np.float64)
    return float(np.sqrt(((xs - xs.mean(axis=0)) ** 2).sum(axis=1).mean()))


@pytest.mark.parametrize("halves", [([0, 1], [2, 3]), ([0], [1, 2, 3]), ([0, 1, 2, 3], [4, 5, 6, 7])])
def test_a_healed_partition_grows_together_again_without_strikes(halves: tuple[list[int], list[int]]):
    rng = np.random.default_rng(1)
    nodes = swarm_of(len(halves[0]) + len(halves[1]))
    everybody = list(range(len(nodes)))
    gossip(nodes, everybody, 60, rng)
    together = spread(nodes)
    for half, way in zip(halves, (1.0, -1.0), strict=True):
        for _ in range(100):  # each half goes its own way
            for number in half:
                alone(nodes[number], way)
            if len(half) > 1:
                gossip(nodes, half, 1, rng)
    assert spread(nodes) > 10 * together
    strikes = gossip(nodes, everybody, 40 * len(nodes), rng)
    assert spread(nodes) < 3 * together
    assert max(Counter(strikes).values(), default=0) < 3  # nobody is put into quarantine


def test_a_node_that_slept_is_pulled_in_and_not_struck():
    rng = np.random.default_rng(2)
    nodes = swarm_of(4)
    gossip(nodes, [0, 1, 2, 3], 60, rng)
    together = spread(nodes)
    for _ in range(200):
        for number in (1, 2, 3):
            alone(nodes[number])
        nodes[0].clock.advance(1.0)
        gossip(nodes, [1, 2, 3], 1, rng)
    strikes = gossip(nodes, [0, 1, 2, 3], 60, rng)
    assert max(Counter(strikes).values(), default=0) < 3
    assert spread(nodes) < 3 * together


def test_a_newcomer_that_adopted_mixes_at_once():
    rng = np.random.default_rng(3)
    nodes = swarm_of(4)
    gossip(nodes, [0, 1, 2], 80, rng)
    nodes[3].x[:] = nodes[0].x
    nodes[3].sets += 1
    assert gossip(nodes, [0, 1, 2, 3], 60, rng) == []
    assert spread(nodes) < 10 * STEP


def test_a_node_ten_times_as_fast_is_neither_struck_nor_left_out():
    rng = np.random.default_rng(4)
    nodes = swarm_of(4, steps=[STEP, STEP, STEP, 10 * STEP])
    assert gossip(nodes, [0, 1, 2, 3], 400, rng) == []
    assert spread(nodes) < 20 * STEP


def test_honest_nodes_hardly_ever_shorten():
    rng = np.random.default_rng(5)
    nodes = swarm_of(4)
    gossip(nodes, [0, 1, 2, 3], 100, rng)
    mean = np.mean([node.x for node in nodes], axis=0, dtype=np.float64)
    drift = 0.0
    for _ in range(200):
        one, other = (int(number) for number in rng.choice(4, 2, replace=False))
        for number in (one, other):
            nodes[number].train()
            nodes[number].radius.read(nodes[number].x, 1)
        mean = np.mean([node.x for node in nodes], axis=0, dtype=np.float64)
        for number in (one, other):
            nodes[number].step = 0.0
        exchange(nodes, one, other)
        for number in (one, other):
            nodes[number].step = STEP
        drift += float(np.linalg.norm(np.mean([node.x for node in nodes], axis=0, dtype=np.float64) - mean))
    assert drift < 0.02 * 200 * STEP


def test_a_paused_learner_follows_the_others_and_strikes_nobody():
    rng = np.random.default_rng(6)
    nodes = swarm_of(4)
    gossip(nodes, [0, 1, 2, 3], 60, rng)
    together = spread(nodes)
    nodes[0].step = 0.0
    assert gossip(nodes, [0, 1, 2, 3], 400, rng) == []
    assert spread(nodes) < 3 * together


def test_gradients_are_bounded_by_our_own():
    radius = ClippingRadius(2.0, ManualClock(), gradients=True)
    mine = np.ones(D, np.float32)
    radius.read(mine)
    norm = float(np.linalg.norm(mine))
    for _ in range(10):
        clip = radius.clip("a", mine, mine, PairFigures(norm, 1e6, 1e6))
        assert clip.factor * 1e6 <= 2.0 * 4.0 * norm * (1 + 1e-9)


def test_our_way_is_estimated_from_a_part_of_a_long_vector():
    node, short = Node(size=100_000, seed=7), Node(seed=7)
    for one in (node, short):
        for _ in range(40):
            one.meet("a", 1e6)
    assert node.radius.radius == pytest.approx(short.radius.radius, rel=0.1)


def test_usual_lengths_forget_those_met_longest_ago():
    lengths = UsualLengths()
    for number in range(1000):
        lengths.note(str(number), float(number))
    assert len(lengths) == 64
    assert lengths.of("999") == 999.0
    assert lengths.of("5") is None


def test_counts_halve_after_two_and_forgive_one_by_one():
    counts = BeyondCounts()
    assert [counts.share("a", beyond=True) for _ in range(5)] == [1.0, 1.0, 0.5, 0.25, 0.125]
    assert counts.share("a", beyond=False) == 1.0
    assert counts.share("a", beyond=True) == 0.125
    assert counts.share("b", beyond=True) == 1.0


def test_who_is_always_beyond_is_told_of_once_until_all_is_forgiven():
    told: list[str] = []
    counts = BeyondCounts(told.append)
    for _ in range(29):
        counts.share("a", beyond=True)
    assert told == []
    for _ in range(40):
        counts.share("a", beyond=True)
    for _ in range(20):
        counts.share("a", beyond=False)
    for _ in range(40):
        counts.share("a", beyond=True)
    assert told == ["a"]
    for _ in range(30):
        counts.share("a", beyond=False)
    for _ in range(30):
        counts.share("a", beyond=True)
    assert told == ["a", "a"]


def test_who_is_beyond_by_chance_is_not_told_of():
    told: list[str] = []
    counts, rng = BeyondCounts(told.append), np.random.default_rng(0)
    for beyond in rng.random(100_000) < 0.3:
        counts.share("a", beyond=bool(beyond))
    assert told == []
