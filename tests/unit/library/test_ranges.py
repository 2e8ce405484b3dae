"""Ranges as people write them, in our words, Optuna's and Hydra's."""

from __future__ import annotations

import pytest

from p2pdrl.errors import ConfigError, UsageError
from p2pdrl.library.ranges import SearchRange, read_settings


@pytest.mark.parametrize(
    ("text", "kind", "low", "high", "step", "log"),
    [
        ("uniform(0.8, 0.999)", "float", 0.8, 0.999, None, False),
        ("interval(-5.5,5)", "float", -5.5, 5.0, None, False),
        ("loguniform(1e-4, 1e-2)", "float", 1e-4, 1e-2, None, True),
        ("tag(log, interval(1e-4, 1e-2))", "float", 1e-4, 1e-2, None, True),
        ("int(1, 8)", "int", 1, 8, None, False),
        ("int(32, 260, 32)", "int", 32, 256, 32, False),
        ("logint(8, 1024)", "int", 8, 1024, None, True),
        ("range(1, 4)", "int", 1, 3, 1, False),
        ("range(0, 10, 3)", "int", 0, 9, 3, False),
        ("range(0.0, 1.0, 0.25)", "float", 0.0, 0.75, 0.25, False),
    ],
)
def test_numbers(text, kind, low, high, step, log):
    found = SearchRange.parse(text)
    assert (found.kind, found.low, found.high, found.step, found.log) == (kind, low, high, step, log)


def test_choices_are_split_outside_of_brackets_and_quotes():
    found = SearchRange.parse("choice(adam, [64, 64], [128, 128], 'a, b', {x = 1, y = 2})")
    assert found.choices == ("adam", "[64, 64]", "[128, 128]", "'a, b'", "{x = 1, y = 2}")
    assert found.ends == found.choices


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("loguniform(0, 1)", "above 0"),
        ("tag(log, interval(-1, 1))", "above 0"),
        ("uniform(2, 1)", "below the second"),
        ("uniform(1)", "two numbers"),
        ("int(1, 2.5)", "no whole number"),
        ("int(1, 9, 0)", "step must be above 0"),
        ("uniform(a, 1)", "'a' is no number"),
        ("uniform(nan, 1)", "no finite number"),
        ("choice(1)", "several values"),
        ("choice(1, 1)", "each once"),
        ("tag(linear, interval(0, 1))", r"tag\(log"),
        ("range(3, 3)", "below the second"),
    ],
)
def test_what_is_wrong_is_said(text, says):
    with pytest.raises(UsageError, match=says):
        SearchRange.parse(text)


def test_values_are_written_as_set_takes_them():
    assert SearchRange.parse("int(1, 8)").write(3) == "3"
    assert SearchRange.parse("uniform(0, 1)").write(1e-05) == "1e-05"
    assert SearchRange.parse("choice(a, b)").write("a") == "a"


def test_settings_are_told_apart_and_later_ones_count():
    fixed, ranges = read_settings(
        ["task.env.id=CartPole-v1", "a=uniform(0, 1)", "b=uniform(0, 1)", "a=0.5", "task.env.kwargs={x = 1}"]
    )
    assert fixed == ["task.env.id=CartPole-v1", "a=0.5", "task.env.kwargs={x = 1}"]
    assert list(ranges) == ["b"]
    with pytest.raises(UsageError, match=r"--set a=uniform\(2, 1\)"):
        read_settings(["a=uniform(2, 1)"])
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        read_settings(["uniform(2, 1)"])
