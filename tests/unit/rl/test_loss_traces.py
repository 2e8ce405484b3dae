"""Learners compute what they computed when `loss_traces.json` was recorded.

A change that is meant to alter numbers records them anew, and says so:

    python scripts/loss_traces.py --updates 20 --golden tests/unit/rl/loss_traces.json

Processors differ in the last bits, so numbers are compared to 1e-5 of the largest in their row, and a policy
loss, whose terms are of size 1 and nearly cancel, to 1e-5. `scripts/compare_traces.py` compares two commits
on one machine to the bit.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

SCRIPTS = str(Path(__file__).parents[3] / "scripts")
GOLDEN = json.loads(Path(__file__).with_suffix("").with_name("loss_traces.json").read_text())
UPDATES = 20
SLOW = {  # of their like others run by default
    "ppo-split-checkpointed",
    "ppo-pipeline-1f1b",
    "ppo-pipeline-interleaved",
    "ppo-lstm-accumulated",
    "ppo-lstm-split",
    "ppo-lstm-pipeline-1f1b",
    "ppo-squash-pipeline-1f1b",
    "ppo-sde-lstm",
    "ppo-sde-pipeline-1f1b",
    "ppo-impala-resnet",
    "ppo-entries-masks-checkpointed",
    "ppo-choices-gru",
    "ppo-choices-pipeline-1f1b",
    "a2c-checkpointed",
    "a2c-split",
    "a2c-split-checkpointed",
    "a2c-pipeline-gpipe",
    "a2c-pipeline-interleaved",
    "a2c-lstm-accumulated",
    "a2c-lstm-split",
    "a2c-nature-cnn",
    "dqn-noisy-accumulated",
    "sac-discrete-pictures",
    "classifier-checkpointed",
    "classifier-split-checkpointed",
    "classifier-pipeline-gpipe",
    "classifier-pipeline-interleaved",
}
TOLERANCE = {"float32": 1e-5, "bf16": 1e-2}  # bfloat16 has 8 bits of mantissa


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        module = importlib.import_module("loss_traces")
        before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        module.be_deterministic()
        yield module
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
        sys.modules.pop("loss_traces")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in GOLDEN]
)
def test_numbers_are_those_recorded(script, case):
    found = script.golden(script.trace(case, UPDATES))
    assert found.keys() == GOLDEN[case].keys()
    tolerance = TOLERANCE["bf16" if case.endswith("bf16") else "float32"]
    for name, expected in GOLDEN[case].items():
        recorded, now = (np.array(row, float) for row in (expected, found[name]))  # None is NaN
        largest = 1.0 if name == "policy_loss" else np.nanmax(np.abs(recorded))
        np.testing.assert_allclose(now, recorded, rtol=0, atol=tolerance * largest, err_msg=name)


def test_every_case_is_recorded(script):
    assert list(script.CASES) == list(GOLDEN)
    assert set(GOLDEN) >= SLOW


def test_some_cases_are_recorded_anew_and_the_others_stay(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "DIGITS", 3)
    file = tmp_path / "golden.json"
    script.main(["--updates", "1", "--cases", "regression-adam", "regression", "--golden", str(file)])
    first = json.loads(file.read_text())
    assert list(first) == ["regression", "regression-adam"]  # in the order of all cases
    script.main(["--updates", "2", "--cases", "regression", "a2c", "--golden", str(file)])
    second = json.loads(file.read_text())
    assert list(second) == ["a2c", "regression", "regression-adam"]
    assert second["regression-adam"] == first["regression-adam"]
    assert [len(row) for row in second["regression"].values()] == [2] * len(first["regression"])


def test_a_metric_may_be_missing_in_some_updates(script, tmp_path, monkeypatch, capsys):
    """As that of a loss that isn't stepped with each time."""
    build = script.build_trainer

    def every_other(*arguments, **options):
        trainer = build(*arguments, **options)
        step, updates = trainer.step, iter(range(10))

        def without():
            stats = step()
            if next(updates) % 2 == 0:
                del stats.metrics["loss"]
            return stats

        trainer.step = without
        return trainer

    monkeypatch.setattr(script, "build_trainer", every_other)
    file = tmp_path / "golden.json"
    words = ["--updates", "3", "--cases", "regression"]
    script.main([*words, "--golden", str(file)])
    kept = json.loads(file.read_text())["regression"]["loss"]
    assert [kept[0], kept[2]] == [None, None]
    assert kept[1] > 0
    script.main(words)
    printed = json.loads(capsys.readouterr().out)["metrics"]["loss"]
    assert [one is None for one in printed] == [True, False, True]
