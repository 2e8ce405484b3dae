"""The order that all nodes work out alike."""

from __future__ import annotations

from collections import Counter

import pytest

from p2pdrl.group.rendezvous import ranked, weight

IDS = [f"{number:032x}" for number in range(40)]


def test_the_order_is_that_of_every_release():
    """Golden: nodes of two releases that order differently would never agree on a proposer."""
    assert ranked("group 1", "abcdef") == ["d", "b", "c", "f", "e", "a"]
    assert ranked("group 2", "abcdef") == ["d", "a", "e", "c", "f", "b"]


@pytest.mark.parametrize("seed", ["", "a", "group 7"])
def test_neither_the_order_given_nor_repeats_matter(seed):
    assert ranked(seed, IDS) == ranked(seed, reversed(IDS)) == ranked(seed, [*IDS, *IDS])


@pytest.mark.parametrize("gone", IDS[:8])
def test_who_leaves_changes_nobody_else_s_place(gone):
    before = ranked("s", IDS)
    assert ranked("s", [one for one in IDS if one != gone]) == [one for one in before if one != gone]


def test_everybody_comes_first_equally_often():
    firsts = Counter(ranked(str(seed), IDS[:8])[0] for seed in range(4000))
    assert set(firsts) == set(IDS[:8])
    expected = 4000 / 8
    assert sum((count - expected) ** 2 / expected for count in firsts.values()) < 24.3  # chi², 7 d.f., 0.1 %


def test_the_weight_is_64_bits_and_the_id():
    heavy, member = weight("s", "x")
    assert 0 <= heavy < 2**64
    assert member == "x"
    assert ranked("s", []) == []
