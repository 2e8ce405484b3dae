"""`scripts/reproduce.py`: its estimators, its table, and that it goes on where it was."""

from __future__ import annotations

import csv
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from p2pdrl.config.loader import resolve

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture
def reproduce(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    yield importlib.import_module("reproduce")
    for name in [one for one in sys.modules if one.partition(".")[0] in {"reproduce", "support"}]:
        sys.modules.pop(name)


def test_the_interquartile_mean_leaves_a_quarter_out_at_either_end(reproduce):
    # scipy.stats.trim_mean(x, 0.25), which arXiv 2108.13264's authors use, cuts int(0.25 n) at each end.
    assert reproduce.interquartile_mean(np.array([9.0, 1.0, 2.0, 3.0, -50.0])) == 2.0
    assert reproduce.interquartile_mean(np.array([1.0, 2.0, 9.0])) == 4.0
    assert reproduce.interquartile_mean(np.arange(8.0)) == np.mean([2, 3, 4, 5])
    low, high = reproduce.interval(np.array([10.0] * 5))
    assert (low, high) == (10.0, 10.0)
    low, high = reproduce.interval(np.arange(20.0))
    assert 4.0 < low < 9.5 < high < 15.0


@pytest.mark.parametrize(
    ("means", "steps"),
    [([1, 9, 9, 9, 1], 40), ([9, 9, 1, 9, 9, 9], 60), ([9, 9, 1, 9, 9], np.inf), ([9, 9], np.inf)],
)
def test_a_goal_counts_as_reached_by_three_evaluations_in_a_row(reproduce, means, steps):
    curve = [(10 * number, mean) for number, mean in enumerate(means, 1)]
    assert reproduce.steps_to_goal({"curve": json.dumps(curve)}, 9.0) == steps


def test_every_case_is_of_a_preset_whose_values_hold_together(reproduce):
    for suite in reproduce.SUITES.values():
        for case in suite.values():
            sets = (*case.sets, f"task.stop.env_steps={case.steps}")
            task = resolve(files=[case.preset], sets=sets).config.task
            assert task.stop.env_steps == case.steps


@pytest.mark.slow
def test_a_suite_is_run_once_and_then_read(tmp_path):
    command = [sys.executable, SCRIPTS / "reproduce.py", "--suite", "tiny", "--out", tmp_path]
    command += ["--library", "ours", "--seeds", "2", "--episodes", "3", "--curve-episodes", "1"]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=100,
            env=os.environ | {"PYTHONPATH": str(SCRIPTS.parent)},
        )  # fmt: skip

    first = run()
    assert first.stderr.count("cartpole-ppo ours seed 100") == 2
    with (tmp_path / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["seed"] for row in rows] == ["1001", "1002"]
    assert all(9.0 <= float(row["mean"]) <= 500.0 for row in rows)
    assert all(2048 <= int(row["steps"]) <= 3072 for row in rows)
    assert "| cartpole-ppo | ours | 2 | 2,048 |" in first.stdout
    assert (tmp_path / "table.md").read_text() == first.stdout
    assert (tmp_path / "curves.png").stat().st_size > 5000
    again = run()
    assert again.stdout == first.stdout
    assert "seed" not in again.stderr
