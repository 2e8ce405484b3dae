from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2pdrl.node.accounting.counters import (
    LARGEST,
    MAX_BOOTS,
    MAX_ROWS,
    CounterTable,
    Counts,
    CountsRow,
    NodeCounts,
)
from p2pdrl.node.accounting.facts import SignedFact

A, B = "a" * 32, "b" * 32

small = st.integers(0, 50)
counts = st.builds(Counts, small, small, small)
sayings = st.builds(
    NodeCounts,
    base=counts,
    folded_through=st.integers(0, 5),
    boots=st.dictionaries(st.integers(1, 6), counts, max_size=4).map(lambda boots: tuple(boots.items())),
)


def row(said: NodeCounts) -> CountsRow:
    return CountsRow(said, SignedFact(bytes(32), msgspec.msgpack.encode(said), b""))


def table(*said: NodeCounts) -> CounterTable:
    made = CounterTable()
    for one in said:
        made.put(A, row(one))
    return made


def told(owner: CounterTable) -> CountsRow:
    """What an owner says of itself, as others hear it."""
    said = owner.own()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=NodeCounts) == said
    return row(said)


def boots(**counts: int) -> NodeCounts:
    return NodeCounts(boots=tuple((int(boot[1:]), Counts(steps)) for boot, steps in counts.items()))


def not_below(greater: Counts, lesser: Counts) -> bool:
    return greater.at_least(lesser) == greater


def test_an_owner_keeps_the_greatest_of_each_field():
    made = CounterTable(A, 2)
    made.recall_own(NodeCounts(boots=((1, Counts(10, 5, 1)),)))
    made.recall_own(NodeCounts(boots=((1, Counts(7, 9, 0)),)))
    made.raise_own(Counts(1, 1, 1))
    made.raise_own(Counts(1, 0, 1))
    made.put(B, row(boots(b1=100)))
    assert made.of_node(A) == Counts(11, 10, 2)
    assert made.total() == Counts(111, 10, 2)
    assert made.of_node("c" * 32) == Counts()


def test_folding_keeps_the_sum_and_drops_the_boots():
    made = CounterTable(A, 3)
    made.recall_own(boots(b1=1, b2=2))
    made.raise_own(Counts(3))
    made.fold_own()
    assert made.own() == NodeCounts(Counts(3), 2, ((3, Counts(3)),))
    made.recall_own(boots(b1=1))
    assert made.of_node(A) == Counts(6)


def test_a_fold_reaches_the_others_and_counts_nothing_twice():
    owner, other = CounterTable(A, 2), CounterTable()
    owner.recall_own(boots(b1=10))
    assert other.put(A, told(owner))
    owner.fold_own()
    owner.raise_own(Counts(5))
    assert other.put(A, told(owner))
    assert not other.put(A, told(owner))
    assert other.of_node(A) == Counts(15)
    assert other.facts() == {A: [told(owner).fact]}


def test_an_owner_that_forgot_hears_it_from_the_others_and_nothing_is_lowered_meanwhile():
    owner, other = CounterTable(A, 2), CounterTable()
    before = row(boots(b1=100))
    other.put(A, before)
    owner.recall_own(boots(b1=90))
    owner.raise_own(Counts(3))
    owner.fold_own()
    assert other.put(A, told(owner))
    assert other.of_node(A) == Counts(103)
    assert len(other.facts()[A]) == 2
    assert owner.recall_own(before.counts)
    assert other.put(A, told(owner))
    assert owner.of_node(A) == other.of_node(A) == Counts(103)
    assert other.facts() == {A: [told(owner).fact]}


@example(
    [
        NodeCounts(),
        NodeCounts(Counts(0, 1, 0)),
        NodeCounts(Counts(0, 1, 0), 1),
        NodeCounts(boots=((1, Counts(0, 1, 1)),)),
    ],
    random.Random(0),
)
@given(st.lists(sayings, max_size=MAX_ROWS), st.randoms(use_true_random=False))
def test_rows_come_in_any_order_any_number_of_times(said, rng):
    first = table(*said)
    shuffled = [*said, *said]
    rng.shuffle(shuffled)
    assert not_below(first.of_node(A), Counts())
    other = table(*shuffled)
    # A row may say alone what took several of those that are held; each time that leaves fewer.
    taken = [sum(other.put(A, row(one)) for one in said) for _ in range(MAX_ROWS)]
    assert sum(taken) < MAX_ROWS
    assert taken[-1] == 0
    # A row that tells boots apart which a further folded one doesn't counts only while both are held.
    for rows in (first.facts(), other.facts()):
        for fact in rows.get(A, ()):
            again = CountsRow(msgspec.msgpack.decode(fact.body, type=NodeCounts), fact)
            first.put(A, again)
            other.put(A, again)
    assert first.of_node(A) == other.of_node(A)


@settings(max_examples=60)
@given(st.lists(sayings, max_size=8))
def test_no_figure_ever_goes_down(stream):
    made = CounterTable()
    for said in stream:
        before, rows = made.of_node(A), made.facts()
        gain = made.gain(A, said)
        changed = made.put(A, row(said))
        assert changed == (made.facts() != rows)
        assert not_below(made.of_node(A), before)
        if changed:
            assert gain is not None
            assert made.of_node(A) - before == gain
        assert len(made.facts().get(A, ())) <= MAX_ROWS
        held = [msgspec.msgpack.decode(fact.body, type=NodeCounts) for fact in made.facts().get(A, ())]
        assert len(made) == sum(1 + len(one.boots) for one in held)


@settings(max_examples=50)
@given(st.integers(0, 10**6))
def test_figures_never_exceed_what_was_done_and_all_agree_in_the_end(seed):
    """Owners step, crash back to an old checkpoint, restart, and fold once they have heard the others."""
    rng = random.Random(seed)
    done = {A: 0, B: 0}
    tables = {node: CounterTable(node, 1) for node in (A, B)}
    boot, in_boot = {A: 1, B: 1}, {A: 0, B: 0}
    saved = {node: NodeCounts() for node in (A, B)}
    bystander = CounterTable()

    def meet(node: str) -> None:
        bystander.put(node, told(tables[node]))
        other = B if node == A else A
        for fact in bystander.facts().get(other, ()):
            said = msgspec.msgpack.decode(fact.body, type=NodeCounts)
            tables[node].put(other, CountsRow(said, fact))
        for fact in bystander.facts().get(node, ()):
            tables[node].recall_own(msgspec.msgpack.decode(fact.body, type=NodeCounts))

    for _ in range(60):
        node = rng.choice((A, B))
        match rng.randrange(5):
            case 0 | 1:
                step = rng.randrange(1, 9)
                done[node] += step
                in_boot[node] += step
                tables[node].raise_own(Counts(in_boot[node]))
            case 2:
                meet(node)
            case 3:
                saved[node] = tables[node].own()
            case 4:
                meet(node)  # what it told before it died isn't lost, whatever its disk knows
                boot[node] += 1
                in_boot[node] = 0
                tables[node] = CounterTable(node, boot[node])
                tables[node].recall_own(saved[node])
                if rng.random() < 0.5:
                    meet(node)
                    tables[node].fold_own()
        for one in (bystander, *tables.values()):
            assert all(one.of_node(name).env_steps <= done[name] for name in (A, B))
    for node in (A, B, A, B):
        meet(node)
    assert {name: bystander.of_node(name).env_steps for name in done} == done
    assert all(one.total().env_steps == sum(done.values()) for one in (bystander, *tables.values()))
    assert all(len(facts) == 1 for facts in bystander.facts().values())


def test_nobody_speaks_for_the_owners_present_boot():
    made = CounterTable(A, 5)
    made.raise_own(Counts(1, 1, 1))
    assert not made.recall_own(boots(b5=999, b6=999))
    assert not made.recall_own(NodeCounts(Counts(999), 5))
    assert made.recall_own(NodeCounts(boots=((4, Counts(2, 2, 2)),)))
    assert made.of_node(A) == Counts(3, 3, 3)
    assert not made.put(A, row(boots(b9=1)))


def test_a_full_table_refuses_others_but_never_its_owner():
    made = CounterTable(A, 3, max_entries=2)
    made.put(B, row(boots(b1=1)))
    assert not made.put("c" * 32, row(boots(b1=1)))
    assert made.refused == 1
    assert len(made) == 2
    made.put(B, row(boots(b1=2)))
    made.raise_own(Counts(7))
    assert made.total() == Counts(9)


def test_a_node_that_tells_many_stories_is_heard_of_few():
    made = CounterTable()
    for boot in range(1, 10):
        made.put(A, row(boots(**{f"b{boot}": 5})))
    assert made.of_node(A).env_steps == 5 * MAX_ROWS
    assert made.refused == 9 - MAX_ROWS


def test_a_row_tells_so_many_boots_apart_and_folds_the_oldest():
    made = CounterTable(A, 10**6)
    for boot in range(1, 3 * MAX_BOOTS):
        made.recall_own(NodeCounts(boots=((boot, Counts(1)),)))
    said = told(made).counts
    assert (len(said.boots), said.folded_through) == (MAX_BOOTS, 2 * MAX_BOOTS - 1)
    assert made.of_node(A) == Counts(3 * MAX_BOOTS - 1)


def test_counting_stops_at_the_bound_of_the_wire():
    made = CounterTable(A, 3)
    made.recall_own(boots(b1=LARGEST, b2=LARGEST))
    made.fold_own()
    assert told(made).counts.base == Counts(LARGEST)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [[-1, 0, 0], 0, []],
        [[2**53, 0, 0], 0, []],
        [[0.5, 0, 0], 0, []],
        [[0, 0, 0], -1, []],
        [[0, 0, 0], 0, [[1]]],
        [[0, 0, 0], 0, [[1, [1, 1, 1]]] * (MAX_BOOTS + 1)],
    ],
)
def test_a_bad_row_is_refused(value):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=NodeCounts)
