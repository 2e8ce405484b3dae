"""`p2pdrl sweep` as it is typed: what it refuses, prints and ends with; trainings are the test's."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from p2pdrl.cli.main import cli, run_command
from p2pdrl.library.sweep import CurvePoint

needs_optuna = pytest.mark.skipif(find_spec("optuna") is None, reason="wants p2pdrl[sweep]")
RANGE = "task.algorithm.learning_rate=loguniform(1e-5, 1e-1)"


@pytest.fixture
def sweep(monkeypatch, tmp_path):
    """Runs the command over trainings of ten steps that come to their trial's number."""

    def train_node(plan, folder, *, allow_import=False):
        def train(number, seed, sets):
            yield CurvePoint(10, float(number))

        return train

    monkeypatch.setattr("p2pdrl.library.sweep.train_node", train_node)
    monkeypatch.chdir(tmp_path)
    return lambda *words: run_command(cli, "p2pdrl", ["sweep", *words])


@needs_optuna
def test_the_result_is_json_on_standard_output(sweep, capsys, tmp_path):
    assert sweep("cartpole", "--set", RANGE, "--steps", "10", "--trials", "3", "--json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["best"]["number"] == 2
    assert found["best"]["file"] == "sweep-cartpole/best.toml"
    assert [row["state"] for row in found["trials"]] == ["done"] * 3
    assert "trial 2: done 2 in 0:00:00 (learning_rate=" in err
    assert (tmp_path / "sweep-cartpole" / "best.toml").exists()


@needs_optuna
def test_people_get_a_table_of_80_columns_and_the_next_command(sweep, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert sweep("cartpole", "--set", RANGE, "--steps", "10", "--trials", "2", "--folder", "f") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["trial", "state", "return", "done", "time", "learning_rate"]
    assert max(map(len, out.splitlines())) <= 80
    assert out.endswith("its settings: p2pdrl node --config f/best.toml\n")


def test_a_missing_extra_is_told_before_any_work(sweep, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert sweep("cartpole", "--set", RANGE, "--steps", "10") == 2
    assert "pip install 'p2pdrl[sweep]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@needs_optuna
def test_a_bad_range_is_a_usage_error(sweep, capsys, tmp_path):
    assert sweep("cartpole", "--set", "task.algorithm.discount=uniform(0.9, 1.5)", "--steps", "10") == 2
    assert "task.algorithm.discount = '1.5' in --set" in capsys.readouterr().err
    assert sweep("cartpole", "--steps", "10") == 2
    assert not list(tmp_path.iterdir())
