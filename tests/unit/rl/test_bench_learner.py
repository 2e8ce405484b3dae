"""The script that measures learners runs, alone and against a checkout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TINY = ("task.algorithm.unroll_steps=8", "task.algorithm.epochs=1", "task.algorithm.minibatches=2")


@pytest.mark.slow
def test_a_preset_against_a_checkout():
    words = ["--presets", "cartpole", "--turns", "2", "--updates", "1", "--against", str(ROOT), "--json"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench_learner.py"), *words, "--set", *TINY],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    here, other = json.loads(done.stdout)
    assert here["preset"] == other["preset"] == "cartpole"
    assert here["checkout"] == other["checkout"] == str(ROOT)
    assert other["ratio"] == 1.0
    assert here["ratio"] > 0
    # 8 environments, 8 steps, of which some only reset; two minibatches
    for row in (here, other):
        assert 24 < row["env_steps_per_cpu_s"] / row["gradient_steps_per_cpu_s"] <= 32
