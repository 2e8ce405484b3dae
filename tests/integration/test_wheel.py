"""The wheel alone is enough: it installs into an empty environment and runs a node there."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wheel_installs_and_runs_a_node(tmp_path, wait_until):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    wheel = next(tmp_path.glob("*.whl"))
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip(f"the package index isn't there: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    log = tmp_path / "node.log"
    command = [python.parent / "p2pdrl", "node", "--config", "cartpole", "--listen", "127.0.0.1:0"]
    with log.open("wb") as out:
        node = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            cwd=tmp_path,
            env=os.environ | {"P2PDRL_DATA_ROOT": str(tmp_path)},
        )
    try:
        wait_until(lambda: "the swarm is done" in log.read_text(), 120, "it trains CartPole to its goal")
        assert node.wait(20) == 0
    finally:
        node.kill()
        node.wait()
