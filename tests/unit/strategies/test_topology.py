from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.strategies.topology import candidates

KINDS = ("random", "ring", "exponential")
members = st.sets(st.text("0123456789abcdef", min_size=4, max_size=4), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("random", "acdefgh"), ("ring", "ac"), ("exponential", "cdf")],
)
def test_the_partners_of_the_second_of_eight(kind, expected):
    assert candidates(kind, "b", "hgfedcba") == sorted(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_small_swarms(kind):
    assert candidates(kind, "a", []) == []
    assert candidates(kind, "a", ["a"]) == []
    assert candidates(kind, "a", ["b"]) == ["b"]
    assert candidates(kind, "a", ["b", "c"]) == ["b", "c"]


@given(members, st.sampled_from(KINDS))
def test_partners_are_others_sorted_and_known(ids, kind):
    for me in ids:
        found = candidates(kind, me, ids)
        assert found == sorted(set(found))
        assert me not in found
        assert set(found) <= ids
        assert len(ids) == 1 or found


@given(members, st.sampled_from(KINDS))
def test_the_graph_is_connected(ids, kind):
    edges = {me: set(candidates(kind, me, ids)) for me in ids}
    for me, found in list(edges.items()):
        for peer in found:
            edges[peer].add(me)
    reached, border = set(), [min(ids)]
    while border:
        me = border.pop()
        if me not in reached:
            reached.add(me)
            border += edges[me]
    assert reached == ids


@given(members)
def test_the_sets_of_partners_stay_small(ids):
    assert all(len(candidates("ring", me, ids)) <= 2 for me in ids)
    bound = (len(ids) - 1).bit_length()
    assert all(len(candidates("exponential", me, ids)) <= bound for me in ids)
