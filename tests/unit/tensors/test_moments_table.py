from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.errors import WireError
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.moments_table import MomentsTable

NODES = [f"{n:032x}" for n in range(4)]


def seen(*samples: float) -> Moments:
    moments = Moments.zeros((1,))
    moments.update(np.array(samples)[:, None])
    return moments


def pull(into: MomentsTable, from_: MomentsTable) -> int:
    return into.merge(from_.delta_since(into.digest()))


def test_a_repeated_merge_never_counts_twice() -> None:
    a, b = MomentsTable((1,)), MomentsTable((1,))
    a.put(NODES[0], 1, seen(1.0, 3.0))
    b.put(NODES[1], 1, seen(5.0))
    answer = a.delta_since([])
    assert [b.merge(answer), b.merge(answer), pull(b, a)] == [1, 0, 0]
    assert b.total().count == 3
    assert b.total().mean.tolist() == [3.0]


def test_growing_counters_replace_the_older_ones_and_a_late_old_one_is_ignored() -> None:
    table, counter = MomentsTable((1,)), seen(1.0)
    late = counter.copy()
    table.put(NODES[0], 1, counter)
    counter.update(np.array([[2.0]]))
    assert table.total().count == 1, "the table keeps its own copy"
    assert table.put(NODES[0], 1, counter)
    assert not table.put(NODES[0], 1, late)
    assert table.total().count == 2


def test_a_new_boot_is_another_counter() -> None:
    table = MomentsTable((1,))
    table.put(NODES[0], 1, seen(1.0, 1.0))
    table.put(NODES[0], 2, seen(4.0))
    assert table.total().count == 3
    assert table.others(NODES[0], 2).count == 2
    assert table.others(NODES[3], 9).count == 3


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=12),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=20),
)
def test_any_order_of_exchanges_ends_in_the_same_bits(
    puts: list[tuple[int, int]], exchanges: list[tuple[int, int]]
) -> None:
    tables = [MomentsTable((1,)) for _ in range(3)]
    counters = [Moments.zeros((1,)) for _ in NODES]
    for (node, samples), (into, from_) in zip(puts, [*exchanges, *[(0, 0)] * len(puts)], strict=False):
        counters[node].update(np.arange(samples, dtype=float)[:, None] * 0.1)
        tables[node % 3].put(NODES[node], 1, counters[node])
        pull(tables[into], tables[from_])
    for _ in range(2):
        for into in tables:
            for from_ in tables:
                pull(into, from_)
    totals = [table.total() for table in tables]
    assert {t.count for t in totals} == {sum(c.count for c in counters)}
    assert len({t.mean.tobytes() + t.m2.tobytes() for t in totals}) == 1


def test_beyond_capacity_the_one_that_changed_longest_ago_goes() -> None:
    table = MomentsTable((1,), capacity=2)
    table.put(NODES[0], 1, seen(1.0))
    table.put(NODES[1], 1, seen(1.0))
    table.put(NODES[0], 1, seen(1.0, 1.0))
    table.put(NODES[2], 1, seen(1.0))
    assert len(table) == 2
    assert sorted(row[0] for row in table.digest()) == [NODES[0], NODES[2]]


def test_a_broken_answer_changes_nothing() -> None:
    table, other = MomentsTable((1,)), MomentsTable((2,))
    good = [NODES[0], 1, seen(1.0).to_wire()]
    other.put(NODES[1], 1, Moments(1.0, np.zeros(2), np.zeros(2)))
    for broken in (
        [good, other.delta_since([])[0]],
        [good, ["x", 1, good[2]]],
        [good, [NODES[1], -1, good[2]]],
        3,
    ):
        with pytest.raises(WireError):
            table.merge(broken)
    assert len(table) == 0
    with pytest.raises(WireError):
        table.put(NODES[0], 1, Moments.zeros((2,)))


@pytest.mark.parametrize(
    "digest", [None, [[NODES[0], 1]], [[NODES[0], 1, "2"]], [[NODES[0], True, 2]], [[1, 1, 2]]]
)
def test_a_broken_digest_is_refused(digest: object) -> None:
    with pytest.raises(WireError):
        MomentsTable((1,)).delta_since(digest)
