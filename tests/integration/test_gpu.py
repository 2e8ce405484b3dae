"""A real GPU: Pong with learner and inference on it, and 16 actor processes, beside the same node on the CPU.

Prints agent steps a second, and what the driver says of the GPU meanwhile; skipped where torch finds none.
"""

from __future__ import annotations

import importlib.util
import shutil
import statistics
import subprocess
import time
from typing import NamedTuple

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU on this machine"),
    pytest.mark.skipif(
        importlib.util.find_spec("ale_py") is None, reason="wants Atari: pip install 'p2pdrl[environments]'"
    ),
]

ACTORS = 16
START_S = 300.0
MEASURED_S = 40.0
QUERY = ("nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits")


class Rate(NamedTuple):
    """Agent steps and updates of a node in a second; medians of the GPU's use in % and of MiB held on it."""

    steps: float
    updates: float
    busy: float
    held: float


def gpu_use() -> tuple[float, float]:
    """Return the first GPU's use in % and the MiB that are held on it; zeros where there is none to ask."""
    if shutil.which(QUERY[0]) is None:
        return 0.0, 0.0
    said = subprocess.run(QUERY, capture_output=True, text=True, timeout=20, check=True).stdout
    busy, held = said.splitlines()[0].split(",")
    return float(busy), float(held)


def measure(swarm, wait_until, device: str) -> Rate:
    """Run a node with its learner and its actors' inference on a device; it has left on return."""
    node = swarm.found(
        f"on-{device}",
        "--config=pong",
        f"--set=node.actors.count={ACTORS}",
        "--set=node.actors.inference=batched",
        f"--set=node.inference.device={device}",
        f"--set=node.learner.device={device}",
        f"--set=task.env.num_envs={4 * ACTORS}",
        "--set=task.algorithm.unroll_steps=32",
        "--set=task.evaluation.every=0",
    )

    def at_work() -> bool:
        status = node.status()
        acting = sum(row["running"] for row in status.get("actors") or [])
        return acting == ACTORS and status.get("updates", 0) >= 3

    wait_until(at_work, START_S, f"{ACTORS} actors act and the learner learns:\n{node.text()[-3000:]}")
    uses = []
    before, began_s = node.status(), time.monotonic()
    while time.monotonic() < began_s + MEASURED_S:
        uses.append(gpu_use())
        time.sleep(0.5)
    after, seconds = node.status(), time.monotonic() - began_s
    node.post("/v1/leave")
    assert node.wait(60) == 0
    return Rate(
        (after["env_steps"] - before["env_steps"]) / seconds,
        (after["updates"] - before["updates"]) / seconds,
        *(statistics.median(column) for column in zip(*uses, strict=True)),
    )


@pytest.mark.timeout(1200)
def test_pong_learns_on_a_gpu_that_acts_for_sixteen_actors(swarm, wait_until, no_orphans):
    rates = {device: measure(swarm, wait_until, device) for device in ("cpu", "cuda")}
    for device, rate in rates.items():
        print(
            f"{device}: {rate.steps:.0f} agent steps/s, {rate.updates:.2f} updates/s; "
            f"GPU {rate.busy:.0f} % busy, {rate.held:.0f} MiB held",
            flush=True,
        )
    assert rates["cuda"].updates > 0
    assert rates["cuda"].held > rates["cpu"].held
