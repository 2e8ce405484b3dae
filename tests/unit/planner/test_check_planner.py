"""What the script that compares predictions with real nodes makes of its figures."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from p2pdrl.config.mode import protocol_of
from p2pdrl.planner.parsing import ALL_STRATEGIES, strategy_of

SCRIPTS = str(Path(__file__).parents[3] / "scripts")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    yield importlib.import_module("check_planner")
    for name in [one for one in sys.modules if one.partition(".")[0] in {"check_planner", "support"}]:
        sys.modules.pop(name)


def test_all_strategies_that_exchange_anything_are_compared(script):
    compared = {protocol_of(strategy_of(text)) for text in script.STRATEGIES}
    assert compared == {protocol_of(one) for one in ALL_STRATEGIES} - {"local"}
    assert {protocol_of(strategy_of(text)) for text in script.GATHER.values()} == set(script.GATHER)


@pytest.mark.parametrize(
    ("measured", "predicted", "claimed", "verdict"),
    [
        (1.29, 1.0, True, "ok"),
        (0.71, 1.0, True, "ok"),
        (1.31, 1.0, True, "outside"),
        (0.69, 1.0, True, "outside"),
        (None, 1.0, True, "outside"),
        (1.0, 0.0, True, "outside"),
        (9.0, 1.0, False, "not claimed"),
    ],
)
def test_a_ratio_is_claimed_to_be_within_thirty_per_cent(script, measured, predicted, claimed, verdict):
    row = script.Row(4, "sgp", "rounds/s", measured, 0.0, predicted, 0.3, claimed)
    assert row.verdict == verdict


def test_crossings_lie_between_two_looks_by_the_logarithm(script):
    crossing = importlib.import_module("support.agreeing_nodes").crossing
    assert crossing([(0.0, 1.0), (10.0, 0.1), (30.0, 0.001)]) == pytest.approx(20.5)
    assert crossing([(0.0, 1.0), (10.0, 0.1), (12.0, 1e-12)]) == pytest.approx(11.0), "one exchange did it"
    assert crossing([(0.0, 1.0), (10.0, 0.011), (11.0, 0.009)]) == pytest.approx(11.0)
    assert crossing([(0.0, 1.0), (10.0, 0.1)]) is None
