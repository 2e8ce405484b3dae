from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.strategies.gossip.adpsgd import Freshness, fresh_weight

sides = st.builds(Freshness, st.integers(0, 2**53 - 1), st.integers(0, 10**9))


@given(a=sides, b=sides, weight=st.floats(0.01, 0.5))
def test_both_weights_add_up_to_twice_the_weight(a, b, weight):
    to_a, to_b = fresh_weight(weight, a, b), fresh_weight(weight, b, a)
    assert to_a + to_b == pytest.approx(2 * weight, rel=1e-12)
    assert 0.2 * weight <= to_a * (1 + 1e-12)
    assert to_a <= 1.8 * weight * (1 + 1e-12)


def test_the_fresher_side_moves_less():
    assert fresh_weight(0.5, Freshness(99, 10), Freshness(299, 10)) == pytest.approx(0.75)
    assert fresh_weight(0.5, Freshness(299, 10), Freshness(99, 10)) == pytest.approx(0.25)


def test_a_lag_of_a_hundred_versions_halves_the_trust():
    assert fresh_weight(0.5, Freshness(9, 0), Freshness(9, 100)) == pytest.approx(2 / 3)


def test_equally_fresh_sides_move_alike():
    assert fresh_weight(0.3, Freshness(5, 7), Freshness(5, 7)) == pytest.approx(0.3)


def test_no_claim_makes_us_give_up_everything():
    assert fresh_weight(0.5, Freshness(0, 0), Freshness(2**53 - 1, 10**9)) == pytest.approx(0.9)
