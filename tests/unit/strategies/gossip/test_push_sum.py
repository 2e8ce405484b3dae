"""Σw and Σw·z over nodes and messages, in float64, whatever the network does."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdrl.strategies.gossip.sgp import FLOOR, NUMBERS, Arrival, PushSum

D = 3


class Node:
    def __init__(self, me: str, z_D: np.ndarray) -> None:
        self.me, self.z_D, self.sum = me, z_D.copy(), PushSum()
        self.open: dict[int, tuple[str, float, np.ndarray]] = {}
        """What we wait for: peer, mass, vector."""
        self.tried: dict[int, int] = {}


class Network:
    """Nodes, the copies of messages that are under way, and every fault."""

    def __init__(self, count: int, seed: int) -> None:
        self.rng = random.Random(seed)
        start_ND = np.random.default_rng(seed).standard_normal((count, D))
        self.nodes = {f"n{i}": Node(f"n{i}", z_D) for i, z_D in enumerate(start_ND)}
        self.copies: list[tuple[str, str, int, float, np.ndarray]] = []
        self.answers: list[tuple[str, int, str]] = []

    def push(self, sender: str, peer: str, share: float) -> None:
        node = self.nodes[sender]
        parcel = node.sum.send(peer, share)
        if parcel is None:
            return
        node.open[parcel.number] = (peer, parcel.mass, node.z_D.copy())
        self.transmit(sender, parcel.number)

    def transmit(self, sender: str, number: int) -> None:
        peer, mass, z_D = self.nodes[sender].open[number]
        self.nodes[sender].tried[number] = self.nodes[sender].tried.get(number, 0) + 1
        self.copies.append((sender, peer, number, mass, z_D))

    def arrive(self, at: int, *, refuse: bool, lose_answer: bool, duplicate: bool) -> None:
        sender, peer, number, mass, z_D = self.copies[at] if duplicate else self.copies.pop(at)
        node, arrival = self.nodes[peer], Arrival(sender, "boot", number)
        if refuse:
            node.sum.refuse(arrival)
        elif node.sum.result(arrival) == "new":
            node.z_D += node.sum.take(arrival, mass) * (z_D - node.z_D)
        if not lose_answer:
            self.answers.append((sender, number, node.sum.result(arrival)))

    def hear(self, at: int) -> None:
        sender, number, result = self.answers.pop(at)
        node = self.nodes[sender]
        opened = node.open.pop(number, None)
        if opened is None:
            return
        if result == "taken":
            node.sum.gone(number)
        else:
            node.z_D += node.sum.returned(number) * (opened[2] - node.z_D)

    def totals(self) -> tuple[float, np.ndarray]:
        """Σw and Σw·z of the nodes and of what is set aside and wasn't taken."""
        weight = sum(node.sum.weight for node in self.nodes.values())
        stands_D = sum((node.sum.weight * node.z_D for node in self.nodes.values()), np.zeros(D))
        for node in self.nodes.values():
            for number, (peer, mass, z_D) in node.open.items():
                if self.nodes[peer].sum.result(Arrival(node.me, "boot", number)) != "taken":
                    weight += mass
                    stands_D = stands_D + mass * z_D
        return weight, stands_D

    def settle(self) -> None:
        """Send everything again until all is known; nothing is lost any more."""
        while any(node.open for node in self.nodes.values()):
            for node in self.nodes.values():
                for number in list(node.open):
                    self.transmit(node.me, number)
            while self.copies:
                self.arrive(0, refuse=False, lose_answer=False, duplicate=False)
            while self.answers:
                self.hear(0)


steps = st.lists(
    st.tuples(st.sampled_from(["push", "again", "arrive", "refuse", "drop", "hear"]), st.integers(0, 2**16)),
    max_size=120,
)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**16), count=st.integers(2, 5), steps=steps)
def test_weight_and_what_it_stands_for_are_kept(seed, count, steps):
    network = Network(count, seed)
    weight, stands_D = network.totals()
    for what, draw in steps:
        rng = random.Random(draw)
        names = sorted(network.nodes)
        if what == "push":
            sender, peer = rng.sample(names, 2)
            network.push(sender, peer, rng.uniform(0.1, 0.9))
        elif what == "again":
            waiting = [(node.me, number) for node in network.nodes.values() for number in node.open]
            if waiting:
                network.transmit(*rng.choice(waiting))
        elif what in ("arrive", "refuse") and network.copies:
            network.arrive(
                rng.randrange(len(network.copies)),
                refuse=what == "refuse",
                lose_answer=rng.random() < 0.3,
                duplicate=rng.random() < 0.3,
            )
        elif what == "drop" and network.copies:
            network.copies.pop(rng.randrange(len(network.copies)))
        elif what == "hear" and network.answers:
            network.hear(rng.randrange(len(network.answers)))
        now, now_D = network.totals()
        assert now == pytest.approx(weight, rel=1e-12)
        assert np.allclose(now_D, stands_D, rtol=0, atol=1e-12)
    network.settle()
    assert sum(node.sum.weight for node in network.nodes.values()) == pytest.approx(count, rel=1e-12)


@pytest.mark.parametrize("loss", [0.0, 0.3])
@pytest.mark.parametrize("graph", ["ring", "random", "star"])
def test_directed_graphs_come_to_the_mean(graph, loss):
    count = 6
    network = Network(count, 7)
    rng, names = random.Random(3), sorted(network.nodes)
    mean_D = np.mean([node.z_D for node in network.nodes.values()], axis=0)
    for turn in range(4000):
        if turn == 2000:  # what was unknown by then is told; the rest of the run is without loss
            network.settle()
            loss = 0.0
        at = rng.randrange(count)
        to = {
            "ring": (at + 1) % count,
            "random": rng.choice([i for i in range(count) if i != at]),
            "star": rng.randrange(1, count) if at == 0 else 0,
        }[graph]
        network.push(names[at], names[to], 0.5)
        while network.copies:
            lost = rng.random() < loss
            network.arrive(0, refuse=rng.random() < loss / 2, lose_answer=lost, duplicate=False)
        while network.answers:
            network.hear(0)
    for node in network.nodes.values():
        assert np.allclose(node.z_D, mean_D, atol=1e-10)


def test_a_node_that_only_gives_keeps_the_least():
    one, sent = PushSum(), 0.0
    for _ in range(100):
        parcel = one.send("b", 0.9)
        sent += 0.0 if parcel is None else parcel.mass
        assert one.weight >= FLOOR
    assert one.send("b", 0.9) is None
    assert one.weight + sent == pytest.approx(1.0, rel=1e-12)
    assert one.under_way == pytest.approx(sent)


@pytest.mark.parametrize("mass", [0.0, -1.0, float("nan"), float("inf"), 1e30])
def test_absurd_masses_arent_taken(mass):
    one = PushSum()
    assert not one.acceptable(mass)
    with pytest.raises(ValueError, match="can't be taken"):
        one.take(Arrival("a", "boot", 1), mass)
    assert one.weight == 1.0


def test_what_is_remembered_is_bounded_and_the_forgotten_stay_void():
    one = PushSum()
    for number in range(1, NUMBERS + 10):
        one.take(Arrival("a", "boot", number), 1e-6)
    assert one.result(Arrival("a", "boot", 1)) == "void"
    assert one.result(Arrival("a", "boot", NUMBERS)) == "taken"
    assert one.result(Arrival("a", "other boot", 1)) == "new"
    for sender in range(2000):
        one.refuse(Arrival(f"{sender}", "boot", 1))
    assert one.result(Arrival("1999", "boot", 1)) == "void"
    assert one.result(Arrival(f"{1999 - 1024}", "boot", 1)) == "new"


def test_another_vector_begins_anew():
    one = PushSum()
    parcel = one.send("b", 0.5)
    one.restart()
    assert (one.weight, one.under_way) == (1.0, 0.0)
    assert one.returned(parcel.number) == 0.0
    assert one.weight == 1.0
