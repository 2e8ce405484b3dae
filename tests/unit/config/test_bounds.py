"""No number that travels between nodes is infinite, and none is large enough to hold a node up."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import pytest

from p2pdrl.config.loader import resolve
from p2pdrl.config.schema import allowed, fields
from p2pdrl.config.strategy import AdpsgdConfig, StrategyConfig
from p2pdrl.config.task import A2CConfig, EnvConfig, PPOConfig, RegressionConfig, StopConfig
from p2pdrl.errors import ConfigError

NUMBERS = [
    (struct, field.name)
    for struct in (AdpsgdConfig, StopConfig, PPOConfig, A2CConfig, RegressionConfig)
    for field in fields(struct).values()
    if "a number" in allowed(field.annotation)
]


def decoded(kind: Any, **values: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(values), type=kind)


def is_taken(struct: Any, **values: Any) -> bool:
    tag = {} if struct is StopConfig else {"name": struct.__struct_config__.tag}
    try:
        decoded(struct, **tag, **values)
    except msgspec.ValidationError:
        return False
    return True


def test_a_record_holds_finite_numbers_only() -> None:
    assert all(is_taken(struct) for struct, _ in NUMBERS)
    cases = itertools.product(NUMBERS, (math.inf, -math.inf, math.nan))
    taken = [(struct, name, value) for (struct, name), value in cases if is_taken(struct, **{name: value})]
    assert taken == []


def test_all_numbers_were_found() -> None:
    assert {
        (AdpsgdConfig, "deadline_s"),
        (PPOConfig, "clip"),
        (PPOConfig, "target_kl"),
        (StopConfig, "mean_return"),
    } <= set(NUMBERS)


def test_arguments_of_an_environment_are_finite() -> None:
    with pytest.raises(msgspec.ValidationError, match="kwargs must be a finite number"):
        decoded(EnvConfig, kwargs={"gravity": math.inf})


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (StrategyConfig, {"name": "adpsgd", "deadline_s": 1.1e6}),
        (StrategyConfig, {"name": "adpsgd", "every_s": 1.1e6}),
        (StrategyConfig, {"name": "adpsgd", "min_interval_s": 1.1e6}),
        (StrategyConfig, {"name": "adpsgd", "max_distance": 1.1e12}),
        (StopConfig, {"window": 1_000_001}),
        (StopConfig, {"time_s": 1.1e9}),
    ],
)
def test_what_would_hold_a_node_up_is_refused(kind: Any, values: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        decoded(kind, **values)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("task.strategy.deadline_s=2e6", "a number > 0 and ≤ 1e+06"),
        ("task.strategy.max_distance=1e13", "a number > 0 and ≤ 1e+12"),
        ("task.stop.window=2000000", "an integer ≥ 1 and ≤ 1000000"),
        ("node.limits.quarantine_s=2e6", "a number > 0 and ≤ 1e+06"),
        ("node.limits.max_abs_parameter=1e31", "a number > 0 and ≤ 1e+30"),
        ("task.strategy.deadline_s=inf", "finite"),
    ],
)
def test_the_message_names_the_bound(setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=setting.partition("=")[0]) as caught:
        resolve(sets=[setting])
    assert words in str(caught.value)
