"""A sweep over real nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.slow
@pytest.mark.skipif(find_spec("optuna") is None, reason="wants p2pdrl[sweep]")
def test_trials_train_and_the_best_settings_are_a_configuration(swarm, tmp_path, no_orphans):
    words = ["cartpole", "--set", "task.algorithm.learning_rate=loguniform(1e-5, 1e-2)", "--steps", "6000"]
    words += ["--trials", "2", "--jobs", "2", "--folder", "study", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "p2pdrl", "sweep", *words],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(swarm.temporary)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["state"] for row in found["trials"]] == ["done", "done"]
    assert all(row["value"] > 5 for row in found["trials"])
    node = swarm.start("best", "--config", str(tmp_path / "study" / "best.toml"))
    swarm.training(node)
    config = node.json("/v1/config")
    assert str(config["task"]["algorithm"]["learning_rate"]) == str(
        float(found["best"]["params"]["task.algorithm.learning_rate"])
    )
    node.post("/v1/leave")
    assert node.wait(20) == 0
