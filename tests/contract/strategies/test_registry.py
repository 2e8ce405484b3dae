"""Every strategy that a task may name can be built, and is held to the contract."""

from __future__ import annotations

from typing import get_args

import pytest

from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.strategies.registry import STRATEGIES

from .promises import ALL


@pytest.mark.parametrize("struct", get_args(StrategyConfig))
def test_every_strategy_is_built_and_tried(struct: type) -> None:
    assert struct in STRATEGIES
    assert struct in {type(case.config) for case in ALL.values()}, "the contract suite has no case of it"
