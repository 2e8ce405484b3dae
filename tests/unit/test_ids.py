"""Whom people mean by a name, or by the first digits of an id."""

from __future__ import annotations

import pytest

from p2pdrl.ids import find_called

KNOWN = [
    ("alice", "1a2b" * 8),
    ("bob", "1a2c" * 8),
    ("1a2c", "ffff" * 8),
    (None, "eeee" * 8),
    ("", "dddd" * 8),
]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("alice", [0]), ("1a2b", [0]), ("1a2b1a2b", [0]), ("1a2c", [2]), ("1a2c1", [1]), ("eeee", [3]),
        ("", []), ("1", []), ("1a2", []), ("carol", []), ("1A2B", []),
    ],
)  # fmt: skip
def test_a_name_counts_before_the_digits_of_an_id(text, found):
    assert find_called(text, KNOWN, lambda one: one) == [KNOWN[index] for index in found]


def test_several_may_be_called_so():
    twice = [("bob", "1a2b3"), ("bob", "1a2b4"), ("eve", "1a2b5")]
    assert find_called("bob", twice, lambda one: one) == twice[:2]
    assert find_called("1a2b", twice, lambda one: one) == twice
