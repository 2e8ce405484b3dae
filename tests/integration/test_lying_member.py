"""A swarm with a key learns, although one of its four processes sends every vector with the sign flipped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from p2pdrl.api.keyfile import write_swarm_key

from .conftest import RealNode, free_port

LYING_NODE = Path(__file__).with_name("lying_node.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2])
def test_three_honest_nodes_solve_cartpole_beside_a_liar(swarm, tmp_path, seed):
    key = tmp_path / "swarm.key"
    write_swarm_key(key)
    options = ["--config", "cartpole", "--swarm-key-file", str(key), "--set=task.strategy.compression=none"]
    first = swarm.start("first", *options, f"--set=node.seed={seed}")
    folder, port, log = tmp_path / "liar", free_port(), tmp_path / "liar.log"
    command = [sys.executable, str(LYING_NODE), "node", "--data-dir", str(folder), "--name", "liar"]
    command += ["--listen", f"127.0.0.1:{port}", "--peers", first.api, *options]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, f"--set=node.seed={seed + 30}"], stdout=out, stderr=out)
    swarm.nodes.append(RealNode("liar", port, folder, process, log))
    others = [
        swarm.start(f"n{number}", *options, f"--set=node.seed={seed + 10 * number}", peers=first)
        for number in (1, 2)
    ]
    for node in (first, *others):
        assert node.wait(400) == 0, node.text()[-3000:]
        assert "Traceback" not in node.text()
        summary = node.summary()
        assert "mean_return" in json.dumps(summary), summary
    told = [event for node in (first, *others) for event in node.told()]
    struck = [event for event in told if event["kind"] in ("strike", "quarantine", "far")]
    assert any("liar" in str(event) for event in struck), {event["kind"] for event in told}
