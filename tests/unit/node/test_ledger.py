from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdrl.errors import WireError
from p2pdrl.node import ledger as ledger_module
from p2pdrl.node.counters import Counts, CountsWire
from p2pdrl.node.ledger import Ledger
from p2pdrl.tensors.moments import Moments

A, B = "a" * 32, "b" * 32
NODES = [f"{number:032x}" for number in range(3)]
who = st.integers(0, 2)
operations = st.one_of(
    st.tuples(st.just("work"), who, st.integers(1, 50)),
    st.tuples(st.just("follow"), who, st.integers(0, 3)),
    st.tuples(st.just("tell"), who, who),
    st.tuples(st.just("restart"), who, st.booleans()),
    st.tuples(st.just("fold"), who, st.none()),
)


class World:
    """Three nodes, and what they really did."""

    def __init__(self) -> None:
        self.boots = [10, 10, 10]
        self.ledgers = [Ledger(node, 10) for node in NODES]
        self.this_boot = [0, 0, 0]
        self.done = [0, 0, 0]
        self.lineages = ["l0", "l0", "l0"]
        for ledger in self.ledgers:
            ledger.follow("l0")

    def do(self, what: str, node: int, value) -> None:
        ledger = self.ledgers[node]
        if what == "work":
            self.this_boot[node] += value
            self.done[node] += value
            ledger.credit(Counts(self.this_boot[node], 2 * self.this_boot[node], self.this_boot[node]))
        elif what == "follow":
            self.lineages[node] = f"l{value}"
            ledger.follow(self.lineages[node])
        elif what == "tell":
            self.ledgers[value].merge_counts(over_the_wire(ledger))
        elif what == "fold":
            ledger.fold_own()
        else:
            self.restart(node, twice=value)

    def restart(self, node: int, *, twice: bool) -> None:
        """A daemon comes back on its checkpoint, and is told the same again by it."""
        saved = over_the_wire(self.ledgers[node])
        self.boots[node] += 1
        self.this_boot[node] = 0
        self.ledgers[node] = Ledger(NODES[node], self.boots[node])
        for _ in range(2 if twice else 1):
            self.ledgers[node].merge_counts(saved)
        self.ledgers[node].follow(self.lineages[node])


def over_the_wire(ledger: Ledger) -> dict[str, CountsWire]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(ledger.counts()), type=dict[str, CountsWire])


@settings(max_examples=120, deadline=None)
@given(st.lists(operations, max_size=25))
def test_no_step_is_lost_or_counted_twice(steps):
    world = World()
    for step in steps:
        world.do(*step)
        for number, ledger in enumerate(world.ledgers):
            assert ledger.of_node(NODES[number]).env_steps == world.done[number]
            assert ledger.total().env_steps <= sum(world.done)
            lineages = sum(ledger.steps(f"l{lineage}") for lineage in range(4))
            assert lineages == ledger.total().env_steps
    for ledger in world.ledgers:
        for other in world.ledgers:
            ledger.merge_counts(over_the_wire(other))
    totals = {ledger.total() for ledger in world.ledgers}
    assert totals == {Counts(sum(world.done), 2 * sum(world.done), sum(world.done))}


def test_back_to_an_earlier_lineage():
    ledger = Ledger(A, 1)
    ledger.follow("l0")
    ledger.credit(Counts(100))
    ledger.follow("l1")
    ledger.credit(Counts(150))
    ledger.follow("l0")
    ledger.credit(Counts(200))
    assert (ledger.steps("l0"), ledger.steps("l1")) == (150, 50)
    ledger.follow("l0")
    ledger.credit(Counts(201))
    assert ledger.total() == Counts(201)


def test_unknown_lineages_have_no_steps():
    ledger = Ledger(A, 1)
    assert ledger.steps("l7") == 0
    assert ledger.total() == ledger.of_node(A) == Counts()


def test_lineages_are_bounded():
    ledger = Ledger(A, 1)
    ledger.follow("mine")
    ledger.credit(Counts(5))
    other = Ledger(B, 1)
    for number in range(ledger_module.MAX_LINEAGES + 20):
        other.follow(f"{number}")
        other.credit(Counts(number + 1))
    ledger.merge_counts(other.counts())
    assert len(ledger.counts()) == ledger_module.MAX_LINEAGES
    assert ledger.steps("mine") == 5


def test_counts_of_the_far_future_arent_taken_in():
    ledger, other = Ledger(A, 1), Ledger(B, 5000)
    other.follow("l0")
    other.credit(Counts(9))
    ledger.merge_counts(other.counts(), latest_boot=4999)
    assert ledger.total().env_steps == 0
    ledger.merge_counts(other.counts(), latest_boot=5000)
    assert ledger.total().env_steps == 9


def test_what_others_say_of_this_boot_is_ignored():
    ledger, liar = Ledger(A, 3), Ledger(A, 3)
    ledger.follow("l0")
    ledger.credit(Counts(10))
    liar.follow("l0")
    liar.credit(Counts(10**9))
    ledger.merge_counts(liar.counts())
    assert ledger.total().env_steps == 10


def moments(count: float, mean: float = 0.0, size: int = 2) -> Moments:
    return Moments(count, np.full(size, mean), np.ones(size))


def packed(one: Moments) -> bytes:
    return msgspec.msgpack.encode(one.to_wire())


def swap(asks: Ledger, gives: Ledger) -> int:
    """What a round of rumours does about moments."""
    digest = msgspec.msgpack.decode(msgspec.msgpack.encode(asks.moments_digest()))
    entries = msgspec.msgpack.decode(msgspec.msgpack.encode(gives.moments_since(digest)))
    return asks.merge_moments(entries)


def test_moments_of_the_others():
    one, two = Ledger(A, 1), Ledger(B, 1)
    one.put_moments({"obs": packed(moments(10, 1.0))})
    two.put_moments({"obs": packed(moments(30, 5.0))})
    assert swap(one, two) == 1
    assert swap(one, two) == 0
    others = Moments.from_wire(msgspec.msgpack.decode(one.others_moments()["obs"]))
    assert (others.count, others.mean.tolist()) == (30.0, [5.0, 5.0])
    two.put_moments({"obs": packed(moments(40, 5.0))})
    assert swap(one, two) == 1
    others = Moments.from_wire(msgspec.msgpack.decode(one.others_moments()["obs"]))
    assert others.count == 40.0


def test_streams_that_this_node_doesnt_have_are_passed_over():
    one, two = Ledger(A, 1), Ledger(B, 1)
    two.put_moments({"obs": packed(moments(3))})
    assert swap(one, two) == 0
    assert one.moments_digest() == {}


def test_moments_come_back_from_a_checkpoint():
    one = Ledger(A, 1)
    one.put_moments({"obs": packed(moments(10, 1.0)), "returns": packed(moments(4, size=1))})
    heir = Ledger(A, 2)
    heir.restore_moments(msgspec.msgpack.decode(msgspec.msgpack.encode(one.moments_since({}))))
    others = Moments.from_wire(msgspec.msgpack.decode(heir.others_moments()["obs"]))
    assert others.count == 10.0
    assert set(heir.moments_digest()) == {"obs", "returns"}


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode([1, 2])])
def test_unreadable_moments_are_a_wire_error(data):
    with pytest.raises(WireError):
        Ledger(A, 1).put_moments({"obs": data})


@pytest.mark.parametrize("rows", [[[A, 1]], [7], [[A, 1, "moments"]]])
def test_unreadable_moments_of_a_checkpoint_are_a_wire_error(rows):
    with pytest.raises(WireError):
        Ledger(A, 1).restore_moments({"obs": rows})


def test_streams_are_bounded():
    ledger = Ledger(A, 1)
    many = {f"s{number}": packed(moments(1)) for number in range(ledger_module.MAX_STREAMS)}
    ledger.put_moments(many)
    with pytest.raises(WireError, match="streams"):
        ledger.put_moments({"one more": packed(moments(1))})
