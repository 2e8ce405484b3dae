"""The script that trains with every strategy leaves none out, and all of them can be configured."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from p2pdrl.config.loader import resolve
from p2pdrl.config.mode import PROTOCOLS, protocol_of

SCRIPTS = str(Path(__file__).parents[3] / "scripts")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    yield importlib.import_module("compare_strategies")
    for name in [one for one in sys.modules if one.partition(".")[0] in {"compare_strategies", "support"}]:
        sys.modules.pop(name)


def test_every_strategy_takes_part(script):
    words = [script.arguments_of(name, 0.01) for name in script.STRATEGIES]
    sets = [[word.removeprefix("--set=") for word in each] for each in words]
    found = {protocol_of(resolve(sets=each).config.task.strategy) for each in sets}
    assert found == {name for names in PROTOCOLS.values() for name in names}
