from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.errors import WireError
from p2pdrl.tensors.moments import Moments, MomentsTable

NODES = [f"{n:032x}" for n in range(4)]


def seen(*samples: float) -> Moments:
    moments = Moments.zeros((1,))
    moments.update(np.array(samples)[:, None])
    return moments


def pull(into: MomentsTable, from_: MomentsTable) -> int:
    from_.tell_own(lambda body: b"proof")
    return into.merge(from_.delta_since(into.digest()))


def row(node: str, boot: int, moments: Moments) -> list[object]:
    return [node, boot, moments.to_wire(), b"proof"]


def test_a_repeated_merge_never_counts_twice() -> None:
    a, b = MomentsTable((1,), NODES[0], 1), MomentsTable((1,), NODES[1], 1)
    a.put_own(seen(1.0, 3.0))
    b.put_own(seen(5.0))
    a.tell_own(lambda body: b"proof")
    answer = a.delta_since([])
    assert [b.merge(answer), b.merge(answer), pull(b, a)] == [1, 0, 0]
    assert b.total().count == 3
    assert b.total().mean.tolist() == [3.0]
    assert b.others().count == 2


def test_growing_counters_replace_the_older_ones_and_a_late_old_one_is_ignored() -> None:
    table, counter = MomentsTable((1,), NODES[0], 1), seen(1.0)
    late = counter.copy()
    table.put_own(counter)
    counter.update(np.array([[2.0]]))
    assert table.total().count == 1, "the table keeps its own copy"
    assert table.put_own(counter)
    assert not table.put_own(late)
    assert table.total().count == 2


def test_a_node_that_starts_again_goes_on_from_its_earlier_boots() -> None:
    peer = MomentsTable((1,), NODES[1], 1)
    for boot in range(1, 6):
        table = MomentsTable((1,), NODES[0], boot)
        pull(table, peer)
        assert table.others().count == boot - 1
        table.put_own(seen(float(boot)))
        assert table.others().count == boot - 1
        assert pull(peer, table) == 1
    assert len(peer) == len(table) == 1
    assert (peer.total().count, peer.total().mean.tolist()) == (5.0, [3.0])


def test_what_peers_heard_of_earlier_boots_stays_until_the_node_has_passed_it() -> None:
    peer, table = MomentsTable((1,), NODES[1], 1), MomentsTable((1,), NODES[0], 2)
    peer.merge([row(NODES[0], 1, seen(*range(10)))])
    table.put_own(seen(1.0))
    assert pull(peer, table) == 0
    assert pull(table, peer) == 1
    assert pull(peer, table) == 1
    assert table.total().count == peer.total().count == 11


def test_what_others_say_of_the_owners_boot_is_ignored() -> None:
    table = MomentsTable((1,), NODES[0], 3)
    table.put_own(seen(1.0))
    assert table.merge([row(NODES[0], boot, seen(*range(50))) for boot in (3, 4)]) == 0
    assert (table.total().count, table.others().count) == (1, 0)


def test_only_what_is_admitted_comes_in() -> None:
    table = MomentsTable((1,))
    rows = [row(node, 1, seen(1.0)) for node in NODES]
    assert table.merge(rows, lambda node, boot, moments, body, proof: node == NODES[2]) == 1
    assert [entry[0] for entry in table.digest()] == [NODES[2]]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=12),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=20),
)
def test_any_order_of_exchanges_ends_in_the_same_bits(
    puts: list[tuple[int, int]], exchanges: list[tuple[int, int]]
) -> None:
    tables = [MomentsTable((1,), NODES[number], 1) for number in range(3)]
    counters = [Moments.zeros((1,)) for _ in tables]
    for (node, samples), (into, from_) in zip(puts, [*exchanges, *[(0, 0)] * len(puts)], strict=False):
        counters[node].update(np.arange(samples, dtype=float)[:, None] * 0.1)
        tables[node].put_own(counters[node])
        pull(tables[into], tables[from_])
    for _ in range(2):
        for into in tables:
            for from_ in tables:
                pull(into, from_)
    totals = [table.total() for table in tables]
    assert {t.count for t in totals} == {sum(c.count for c in counters)}
    assert len({t.mean.tobytes() + t.m2.tobytes() for t in totals}) == 1


def test_of_its_owner_a_table_tells_what_was_proven_last_and_passes_proofs_on() -> None:
    a, b, c = (MomentsTable((1,), NODES[number], 1) for number in range(3))
    a.put_own(seen(1.0))
    assert a.digest() == a.delta_since([]) == []
    bodies: list[bytes] = []

    def prove(body: bytes) -> bytes:
        bodies.append(body)
        return b"proof %d" % len(bodies)

    a.tell_own(prove)
    a.tell_own(prove)
    a.put_own(seen(1.0, 2.0))
    assert [entry[2] for entry in a.digest()] == [1.0]
    assert a.total().count == 2
    admitted: list[tuple[bytes, bytes]] = []

    def admit(node: str, boot: int, moments: Moments, body: bytes, proof: bytes) -> bool:
        admitted.append((body, proof))
        return True

    b.merge(a.delta_since([]), admit)
    b.merge(a.delta_since([]), admit)
    c.merge(b.delta_since([]), admit)
    assert admitted == [(bodies[0], b"proof 1")] * 2
    assert len(bodies) == 1


def test_beyond_capacity_the_one_that_changed_longest_ago_goes() -> None:
    table = MomentsTable((1,), NODES[3], 2, capacity=3)
    table.merge([row(NODES[3], 1, seen(1.0))])
    for node, samples in ((0, [1.0]), (1, [1.0]), (0, [1.0, 1.0]), (2, [1.0])):
        table.merge([row(NODES[node], 1, seen(*samples))])
    table.tell_own(lambda body: b"proof")
    assert sorted(entry[0] for entry in table.digest()) == [NODES[0], NODES[2], NODES[3]]


def test_a_full_table_can_be_told_to_a_full_table() -> None:
    tables = [MomentsTable((1,), NODES[number], 1, capacity=2) for number in (0, 1)]
    for table in tables:
        table.put_own(seen(1.0))
        table.merge([row(NODES[number], 1, seen(2.0)) for number in (2, 3)])
        assert len(table) == 3
    assert pull(tables[0], tables[1]) == 1


def test_a_broken_answer_changes_nothing() -> None:
    table = MomentsTable((1,))
    good = row(NODES[0], 1, seen(1.0))
    for broken in (
        [good, row(NODES[1], 1, Moments(1.0, np.zeros(2), np.zeros(2)))],
        [good, ["x", 1, good[2], b""]],
        [good, [NODES[1], -1, good[2], b""]],
        [good, [NODES[1], 1, good[2], "proof"]],
        [good, [NODES[1], 1, good[2], bytes(129)]],
        [good, [NODES[1], 1, good[2]]],
        3,
    ):
        with pytest.raises(WireError):
            table.merge(broken)
    assert len(table) == 0
    with pytest.raises(WireError):
        table.put_own(Moments.zeros((2,)))


@pytest.mark.parametrize(
    "digest", [None, [[NODES[0], 1]], [[NODES[0], 1, "2"]], [[NODES[0], True, 2]], [[1, 1, 2]]]
)
def test_a_broken_digest_is_refused(digest: object) -> None:
    with pytest.raises(WireError):
        MomentsTable((1,)).delta_since(digest)
