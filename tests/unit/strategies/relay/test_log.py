"""Each message is added exactly once: losses, repetitions, any order, newcomers, bounds, partitions.

The model: a message is a number, a node's parameters are the sum of all that it added, bases included.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdrl.strategies.relay.log import GapError, History, MessageRun, StromLog, UpdateOrigin


@dataclass
class Model:
    """A node: its log, the sum that it holds, and runs under way to it."""

    log: StromLog
    total: int = 0
    boots: int = 0
    mail: list[tuple[str, list[MessageRun]]] = field(default_factory=list)


def value(message: bytes) -> int:
    return int.from_bytes(message, "big")


class World:
    """Nodes, and a network that loses, repeats and reorders."""

    def __init__(self, count: int, window_bytes: int = 10**9, *, relay: bool = False) -> None:
        self.nodes = {
            f"n{number}": Model(StromLog(f"n{number}", "b0", window_bytes)) for number in range(count)
        }
        self.sent = 0
        self.relay = relay
        self.settling = False
        for node in self.nodes.values():
            node.log.history = History(1, "n0")

    def ring(self, name: str) -> list[str]:
        names = sorted(self.nodes)
        if not self.relay:
            return [other for other in names if other != name]
        at = names.index(name)
        return [names[(at + 1) % len(names)], names[at - 1]]

    def make(self, name: str, number: int) -> None:
        node = self.nodes[name]
        node.total += number
        self.sent += number
        node.log.append(number.to_bytes(4, "big"))

    def push(self, name: str, peer: str, most: int = 3) -> None:
        log = self.nodes[name].log
        runs = log.runs_for(peer, relay=self.relay, most_bytes=10**6, most=most)
        self.nodes[peer].mail.append((name, runs))
        if log.has_for(peer, relay=self.relay) and not runs:
            self.answer(peer, name)  # whoever is asked says first what it has

    def answer(self, peer: str, name: str) -> None:
        log = self.nodes[name].log
        log.known(peer, self.nodes[peer].log.covers(log.origins(relay=self.relay)))

    def deliver(self, peer: str, at: int, *, keep: bool, reply: bool) -> None:
        node = self.nodes[peer]
        name, runs = node.mail[at] if keep else node.mail.pop(at)
        for run in runs:
            try:
                new = node.log.new_in(run)
            except GapError:
                if not self.settling:
                    continue  # somebody else may have it
                self.sync(peer, name)
                return
            for message in new:
                node.total += value(message)
            node.log.added(run, relay=self.relay)
        if reply:
            self.answer(peer, name)

    def settle(self) -> None:
        for node in self.nodes.values():
            node.mail.clear()
        for turn in range(6 * len(self.nodes)):
            self.settling = turn >= 3 * len(self.nodes)
            for name in self.nodes:
                for peer in self.ring(name):
                    self.answer(peer, name)
                    self.push(name, peer, 10**6)
                    self.deliver(peer, 0, keep=False, reply=True)

    def sync(self, name: str, giver: str) -> None:
        """Take the giver's base."""
        node, other = self.nodes[name], self.nodes[giver]
        node.boots += 1
        again = node.log.take(other.log.history, dict(other.log.have), f"b{node.boots}")
        node.total = other.total + sum(value(message) for message in again)

    def totals(self) -> set[int]:
        return {node.total for node in self.nodes.values()}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["make", "push", "deliver", "deliver", "repeat", "lose", "mute", "join"]),
        st.integers(0, 5),
        st.integers(0, 5),
        st.integers(1, 1000),
    ),
    max_size=120,
)


@pytest.mark.parametrize("relay", [pytest.param(False, marks=pytest.mark.slow), True])
@settings(max_examples=300, deadline=None)
@given(steps=STEPS)
def test_everybody_adds_every_message_once(relay, steps):
    world = World(4, relay=relay)
    for what, a, b, number in steps:
        names = sorted(world.nodes)
        one, two = names[a % len(names)], names[b % len(names)]
        mail = world.nodes[one].mail
        if what == "make":
            world.make(one, number)
        elif what == "push" and two in world.ring(one):
            world.push(one, two)
        elif what in ("deliver", "repeat", "mute") and mail:
            world.deliver(one, number % len(mail), keep=what == "repeat", reply=what != "mute")
        elif what == "lose" and mail:
            mail.pop(number % len(mail))
        elif what == "join" and len(names) < 7:
            # A newcomer comes with what a member has at any moment; a member may also begin anew so.
            name = f"n{len(names)}"
            world.nodes[name] = Model(StromLog(name, "b0", 10**9))
            world.sync(name, one)
        elif what == "join" and one != two:
            world.sync(one, two)
    world.settle()
    assert world.totals() == {world.sent}


def test_a_loss_of_a_fifth_with_repetitions_and_any_order():
    """10,000 events with seed 0."""
    rng = random.Random(0)
    world = World(5)
    for _ in range(10_000):
        one, two = rng.sample(sorted(world.nodes), 2)
        event = rng.random()
        if event < 0.2:
            world.make(one, rng.randrange(1000))
        elif event < 0.6:
            world.push(one, two)
        elif world.nodes[one].mail:
            at = rng.randrange(len(world.nodes[one].mail))
            if rng.random() < 0.2:
                world.nodes[one].mail.pop(at)
            else:
                world.deliver(one, at, keep=rng.random() < 0.1, reply=rng.random() > 0.2)
    world.settle()
    assert world.totals() == {world.sent}


def test_who_was_away_for_too_long_takes_a_base():
    world = World(3, window_bytes=40)
    for number in range(30):
        world.make("n0", number)
    world.answer("n1", "n0")
    world.push("n0", "n1", 100)
    ((_, (run,)),) = world.nodes["n1"].mail
    with pytest.raises(GapError):
        world.nodes["n1"].log.new_in(run)
    world.make("n1", 5000)
    log = world.nodes["n1"].log
    giver = world.nodes["n0"].log
    assert giver.contains(log.history, log.have, log.own, log.oldest_own)
    world.sync("n1", "n0")
    world.sync("n2", "n0")
    world.settle()
    assert world.totals() == {sum(range(30)) + 5000}
    assert world.nodes["n1"].log.own == UpdateOrigin("n1", "b0")


def test_what_both_sides_of_a_partition_lost_calls_for_a_greater_history():
    world = World(2, window_bytes=40)
    for number in range(30):
        world.make("n0", number)
        world.make("n1", 100 + number)
    one, two = world.nodes["n0"].log, world.nodes["n1"].log
    assert not one.contains(two.history, two.have, two.own, two.oldest_own)
    one.found(era=2)
    assert one.history > two.history
    world.sync("n1", "n0")
    assert two.own == UpdateOrigin("n1", "b1")  # what it had sent is gone; it counts anew
    world.make("n1", 7)
    world.settle()
    assert world.totals() == {sum(range(30)) + 7}


def test_what_waits_for_others_is_no_conflict():
    world = World(3)
    world.make("n2", 1)
    world.answer("n0", "n2")
    world.push("n2", "n0")
    world.deliver("n0", 0, keep=False, reply=True)
    one, two = world.nodes["n0"].log, world.nodes["n1"].log
    assert not two.contains(one.history, one.have, one.own, one.oldest_own)  # until it comes
    assert two.contains(History(0, "n9"), one.have, one.own, one.oldest_own)
    assert one.contains(two.history, two.have, two.own, two.oldest_own)


def test_messages_are_kept_up_to_a_bound():
    log = StromLog("n0", "b0", 100)
    for _ in range(50):
        log.append(bytes(10))
    assert (log.kept_bytes, log.oldest_own) == (100, 41)
    log.append(bytes(1000))
    assert (log.kept_bytes, log.oldest_own) == (1000, 51)
    log.known("n1", {log.own: 0})
    (run,) = log.runs_for("n1", relay=False, most_bytes=10, most=5)
    assert (run.first, run.oldest, len(run.messages)) == (51, 51, 1)
