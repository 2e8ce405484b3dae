"""p2pdrl as a library against real nodes: the scripts, and every example of docs/api.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOAL = {
    "P2PDRL_TASK__STOP__MEAN_RETURN": "30",
    "P2PDRL_TASK__EVALUATION__EVERY": "1000",
    "P2PDRL_TASK__EVALUATION__EPISODES": "4",
}
"""A goal that CartPole reaches within seconds: variables count over files and presets."""


def run(arguments: list[str], folder: Path, env: dict[str, str]) -> str:
    """Run Python in a folder of its own; return what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)} | env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert not [path.name for path in folder.iterdir() if path.name.startswith("p2pdrl-run-")]
    return done.stdout


def test_a_notebook_trains_to_its_goal_acts_and_keeps_the_curve(tmp_path):
    printed = run([str(ROOT / "scripts" / "notebook.py")], tmp_path, GOAL)
    assert re.search(r"steps, mean return [1-9]", printed)
    assert re.search(r"<TrainedPolicy CartPole-v1, ppo, [\d,]+ steps> does [01]", printed)
    curve = [line.split(",") for line in (tmp_path / "curve.csv").read_text().splitlines()]
    assert [float(mean) >= 30 for _, mean in curve][-2:] == [True, True], (
        "the goal is two evaluations in a row"
    )
    assert float(curve[0][0]) < float(curve[-1][0])


def test_a_script_drives_a_live_swarm(swarm, small_updates, tmp_path, no_orphans):
    options = [f"--set={key}={value}" for key, value in small_updates.items()]
    first = swarm.found("n0", *options)
    second = swarm.start("n1", *options, peers=first)
    swarm.training(first, second)
    arguments = [str(ROOT / "scripts" / "drive_swarm.py"), first.api, "policy.safetensors"]
    printed = run(arguments, tmp_path, {})
    assert "'n0': 'alive', 'n1': 'alive'" in printed
    assert re.search(r"acts: [01]\n", printed)
    assert "agrees by param_average {'n0': True, 'n1': True}" in printed
    assert (tmp_path / "policy.safetensors").stat().st_size > 10_000
    assert first.wait(10) == 0
    second.post("/v1/leave")
    assert second.wait(30) == 0


@pytest.mark.slow
def test_the_examples_of_the_document_run(tmp_path):
    """In a thread where a loop runs, as in a notebook; three nodes, one after the other."""
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 8
    code = "\n".join(blocks)
    (tmp_path / "cells.py").write_text(
        "import asyncio\n\n\nasync def cells():\n    exec(compile(CODE, 'docs/api.md', 'exec'), {})\n\n\n"
        f"CODE = {code!r}\nasyncio.run(cells())\n"
    )
    printed = run(["cells.py"], tmp_path, {"P2PDRL_TASK__STOP__ENV_STEPS": "3000"})
    assert printed.splitlines()[-1] == "[0 1]", "the hill is climbed on the right side"
    assert (tmp_path / "now.safetensors").exists()
    assert "torchscript" in (tmp_path / "cartpole.pt.json").read_text()
