from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdrl.node.accounting.counters import LARGEST, CounterTable, Counts, CountsWire, NodeCounts

A, B = "a" * 32, "b" * 32

small = st.integers(0, 50)
counts = st.builds(Counts, small, small, small)
entries = st.builds(
    NodeCounts,
    node=st.sampled_from((A, B)),
    base=counts,
    folded_through=st.integers(0, 5),
    boots=st.dictionaries(st.integers(1, 6), counts, max_size=4).map(lambda boots: tuple(boots.items())),
)
wires = st.builds(CountsWire, st.lists(entries, max_size=4).map(tuple))


def table(*merged: CountsWire) -> CounterTable:
    made = CounterTable()
    for wire in merged:
        made.merge(wire)
    return made


def through_msgpack(value: object) -> CountsWire:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=CountsWire)


def not_below(greater: Counts, lesser: Counts) -> bool:
    return greater.at_least(lesser) == greater


def test_raise_to_keeps_the_greatest_of_each_field():
    made = CounterTable()
    made.raise_to(A, 1, Counts(10, 5, 1))
    made.raise_to(A, 1, Counts(7, 9, 0))
    made.raise_to(A, 2, Counts(1, 1, 1))
    made.raise_to(B, 1, Counts(100, 0, 0))
    assert made.of_node(A) == Counts(11, 10, 2)
    assert made.total() == Counts(111, 10, 2)
    assert made.of_node("c" * 32) == Counts()


def test_folding_keeps_the_sum_and_drops_the_boots():
    made = CounterTable(A, 3)
    for boot in (1, 2, 3):
        made.raise_to(A, boot, Counts(boot, boot, boot))
    made.fold_own()
    assert made.of_node(A) == Counts(6, 6, 6)
    (entry,) = made.to_wire().nodes
    assert (entry.base, entry.folded_through) == (Counts(3, 3, 3), 2)
    assert entry.boots == ((3, Counts(3, 3, 3)),)
    made.raise_to(A, 1, Counts(3, 3, 3))
    assert made.of_node(A) == Counts(6, 6, 6)
    assert len(made) == 2


def test_a_fold_reaches_the_others_and_counts_nothing_twice():
    owner, other = CounterTable(A, 2), CounterTable()
    owner.raise_to(A, 1, Counts(10, 0, 0))
    other.merge(owner.to_wire())
    owner.fold_own()
    owner.raise_to(A, 2, Counts(5, 0, 0))
    other.merge(owner.to_wire())
    other.merge(owner.to_wire())
    assert other.of_node(A) == Counts(15, 0, 0)
    assert other.to_wire() == owner.to_wire()


def test_a_fold_by_an_owner_who_forgot_lowers_nothing_anywhere():
    owner, other = CounterTable(A, 2), CounterTable()
    other.raise_to(A, 1, Counts(100, 1, 1))
    owner.raise_to(A, 1, Counts(90, 2, 1))
    owner.fold_own()
    other.merge(owner.to_wire())
    assert other.of_node(A) == Counts(100, 2, 1)
    owner.merge(other.to_wire())
    assert owner.of_node(A) == Counts(100, 2, 1)


@given(wires)
def test_merge_is_idempotent(wire):
    once = table(wire)
    assert not once.merge(once.to_wire())
    again = table(wire)
    again.merge(once.to_wire())
    assert again.to_wire() == once.to_wire()


@settings(max_examples=30)
@given(wires, wires)
def test_merge_is_commutative(first, second):
    ours, theirs = table(first), table(second)
    ours_wire, theirs_wire = ours.to_wire(), theirs.to_wire()
    ours.merge(theirs_wire)
    theirs.merge(ours_wire)
    assert ours.to_wire() == theirs.to_wire()


@settings(max_examples=30)
@given(st.lists(wires, max_size=5))
def test_no_figure_ever_goes_down(stream):
    made = CounterTable()
    for wire in stream:
        before = {node: made.of_node(node) for node in (A, B)}
        total = made.total()
        changed_from = made.to_wire()
        assert made.merge(wire) == (made.to_wire() != changed_from)
        assert all(not_below(made.of_node(node), before[node]) for node in (A, B))
        assert not_below(made.total(), total)
        assert len(made) == sum(1 + len(entry.boots) for entry in made.to_wire().nodes)


@settings(max_examples=30)
@given(st.lists(wires, min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_replicas_that_gossip_agree_whatever_the_order(starts, rng):
    replicas = [table(wire) for wire in starts]
    for _ in range(4):
        rng.shuffle(replicas)
        for i, replica in enumerate(replicas):
            replica.merge(replicas[i - 1].to_wire())
    for _ in range(2):
        for replica in replicas:
            for other in replicas:
                other.merge(replica.to_wire())
    assert all(replica.to_wire() == replicas[0].to_wire() for replica in replicas)


@settings(max_examples=50)
@given(st.integers(0, 10**6))
def test_figures_never_exceed_what_was_done(seed):
    """Owners step, crash back to an old checkpoint, restart and fold while tables wander about."""
    rng = random.Random(seed)
    done = {A: 0, B: 0}
    tables = {node: CounterTable(node, 1) for node in (A, B)}
    boots, in_boot = {A: 1, B: 1}, {A: 0, B: 0}
    saved = {node: CountsWire() for node in (A, B)}
    bystander = CounterTable()
    for _ in range(60):
        node = rng.choice((A, B))
        match rng.randrange(5):
            case 0 | 1:
                step = rng.randrange(1, 9)
                done[node] += step
                in_boot[node] += step
                tables[node].raise_to(node, boots[node], Counts(in_boot[node], 0, 0))
            case 2:
                bystander.merge(tables[node].to_wire())
                tables[node].merge(bystander.to_wire())
            case 3:
                saved[node] = tables[node].to_wire()
            case 4:
                boots[node] += 1
                in_boot[node] = 0
                tables[node] = CounterTable(node, boots[node])
                tables[node].merge(saved[node])
                if rng.random() < 0.5:
                    tables[node].fold_own()
        for one in (bystander, *tables.values()):
            assert all(one.of_node(name).env_steps <= done[name] for name in (A, B))


def test_nobody_else_speaks_for_the_owners_present_boot():
    made = CounterTable(A, 5)
    made.raise_to(A, 5, Counts(1, 1, 1))
    forged = CountsWire((NodeCounts(A, Counts(), 0, ((5, Counts(999, 0, 0)), (6, Counts(999, 0, 0)))),))
    assert not made.merge(forged)
    assert not made.merge(CountsWire((NodeCounts(A, Counts(999, 0, 0), 5, ()),)))
    assert made.merge(CountsWire((NodeCounts(A, Counts(), 0, ((4, Counts(2, 2, 2)),)),)))
    assert made.of_node(A) == Counts(3, 3, 3)


def test_boots_of_the_far_future_are_ignored():
    made = CounterTable()
    assert not made.merge(CountsWire((NodeCounts(A, Counts(1, 1, 1), 11, ()),)), latest_boot=10)
    made.merge(
        CountsWire((NodeCounts(A, Counts(), 0, ((10, Counts(1, 0, 0)), (11, Counts(1, 0, 0)))),)),
        latest_boot=10,
    )
    assert made.of_node(A) == Counts(1, 0, 0)


def test_a_full_table_refuses_others_but_never_its_owner():
    made = CounterTable(A, 3, max_entries=2)
    made.raise_to(B, 1, Counts(1, 0, 0))
    made.raise_to("c" * 32, 1, Counts(1, 0, 0))
    assert made.refused == 1
    assert len(made) == 2
    made.raise_to(B, 1, Counts(2, 0, 0))
    made.raise_to(A, 3, Counts(7, 0, 0))
    assert made.total() == Counts(9, 0, 0)


def test_counting_stops_at_the_bound_of_the_wire():
    made = CounterTable(A, 3)
    for boot in (1, 2):
        made.raise_to(A, boot, Counts(LARGEST, 0, 0))
    made.fold_own()
    assert through_msgpack(made.to_wire()) == made.to_wire()


@given(wires)
def test_wire_and_plain_forms_round_trip(wire):
    canonical = table(wire).to_wire()
    assert through_msgpack(canonical) == canonical
    plain = msgspec.json.decode(msgspec.json.encode(canonical))
    assert msgspec.convert(plain, CountsWire) == canonical


def test_to_wire_can_be_limited_to_some_nodes():
    made = CounterTable()
    made.raise_to(A, 1, Counts(1, 1, 1))
    made.raise_to(B, 1, Counts(1, 1, 1))
    assert [entry.node for entry in made.to_wire([B, "c" * 32]).nodes] == [B]


@pytest.mark.parametrize(
    "value",
    [
        None,
        [[["short", [0, 0, 0], 0, []]]],
        [[[A, [-1, 0, 0], 0, []]]],
        [[[A, [2**53, 0, 0], 0, []]]],
        [[[A, [0.5, 0, 0], 0, []]]],
        [[[A, [0, 0, 0], -1, []]]],
        [[[A, [0, 0, 0], 0, [[1]]]]],
        [[[A, [0, 0, 0], 0, []]] * 8193],
    ],
)
def test_bad_wire_is_refused(value):
    with pytest.raises(msgspec.ValidationError):
        through_msgpack(value)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(value, CountsWire)
