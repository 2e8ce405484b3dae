"""A real GPU, which all nodes of a swarm here share; skipped where torch finds none.

Algorithms, precisions, strategies and pipelines learn on it as they do on a processor; Pong with learner and
inference on it and 16 actor processes is printed beside the same node on the CPU.
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
import statistics
import subprocess
import time
from typing import NamedTuple

import pytest
import torch

from .pipelines import SMALL, ranks, whole

DEVICE = "cuda"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU on this machine"),
]

SMALL_NET = ("task.network.hidden=[64, 64]", "task.algorithm.learning_rate=1e-3")
CARTPOLE = ("150", "5000", "sampled")
PENDULUM = ("-700", "2000", "greedy")
"""Goal, environment steps between evaluations, and how actions are chosen in them."""
SWARMS = {
    "ppo": ("ppo", (), CARTPOLE, 300_000),
    "ppo bf16": ("ppo", ("task.gradients.precision=bf16",), CARTPOLE, 300_000),
    "ppo fp16": ("ppo", ("task.gradients.precision=fp16",), CARTPOLE, 300_000),
    "ppo compiled": ("ppo", ("node.learner.compile=true",), CARTPOLE, 300_000),
    "impala": ("impala", (), CARTPOLE, 400_000),
    "dqn": ("dqn", ("task.network.hidden=[64, 64]",), ("150", "5000", "greedy"), 100_000),
    "sac": ("sac", SMALL_NET, PENDULUM, 30_000),
    "gradients": ("ppo", ("task.strategy.name=grad_average",), CARTPOLE, 300_000),
    "parameters": ("ppo", ("task.strategy.name=param_average",), CARTPOLE, 300_000),
    "a server": ("gorila", (), ("150", "5000", "greedy"), 300_000),
}
"""By name: preset, what is changed of it, how it is judged, and the swarm's last environment step."""

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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SWARMS)
def test_two_nodes_learn_together(swarm, name, no_orphans):
    preset, sets, (goal, every, mode), last = SWARMS[name]
    settings = [
        f"node.learner.device={DEVICE}",
        *(() if preset == "gorila" else ("task.strategy.name=adpsgd",)),
        *sets,
        f"task.evaluation.every={every}",
        f"task.evaluation.mode={mode}",
        "task.evaluation.episodes=10",
        f"task.stop.mean_return={goal}",
        f"task.stop.env_steps={last}",
    ]
    options = ["--config", preset, *(word for text in settings for word in ("--set", text))]
    first = swarm.found("first", *options)
    second = swarm.start("second", *options, peers=first)
    assert [node.wait(800) for node in (first, second)] == [0, 0], first.text()[-3000:]
    for node in (first, second):
        summary = node.summary()
        assert f"{goal} is reached" in summary["reason"], summary["reason"]
        assert "Traceback" not in node.text()
        print(name, summary["status"]["env_steps"], summary["status"]["accounting"], flush=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["stream", "torch"])
def test_two_nodes_are_a_pipeline_on_it(swarm, wait_until, backend, no_orphans):
    options = {**SMALL, "node.learner.device": DEVICE, "node.trusted_network": "true"}
    nodes = swarm.start_team(2, options)
    wait_until(lambda: all(node.rounds_in("adpsgd") > 0 for node in nodes), 60, "they gossip")
    nodes[0].set_mode("pipeline", "stages=2", f"backend={backend}")
    wait_until(lambda: whole(nodes, 2), 60, f"a pipeline by {backend}:\n{nodes[0].text()[-3000:]}")
    before = max(node.status()["updates"] for node in nodes)
    wait_until(
        lambda: max(node.status()["updates"] for node in nodes) > before + 5, 60, "the pipeline learns"
    )
    print(backend, ranks(nodes), nodes[0].status()["pipeline"], flush=True)
    nodes[0].set_mode("gossip", "compression=none")
    wait_until(lambda: not whole(nodes, 2), 60, "they gossip again")
    for node in nodes:
        assert node.status()["healthy"], node.status()["reasons"]
        node.signal(signal.SIGTERM)
    assert [node.wait(30) for node in nodes] == [0, 0]
    assert not [node.name for node in nodes if "Traceback" in node.text()]


@pytest.mark.timeout(300)
def test_a_node_cuts_its_network_over_two_devices(swarm, no_orphans):
    node = swarm.found(
        "cut",
        "--config=ppo",
        f'--set=node.learner.split_devices=["{DEVICE}", "cpu"]',
        "--set=node.learner.microbatches=4",
        "--set=task.stop.mean_return=150",
        "--set=task.stop.env_steps=300000",
        "--set=task.evaluation.every=5000",
        "--set=task.evaluation.mode=sampled",
    )
    assert node.wait(280) == 0, node.text()[-3000:]
    assert "150 is reached" in node.summary()["reason"]


@pytest.mark.timeout(300)
def test_a_gpu_learns_beside_a_processor(swarm, no_orphans):
    settings = ["task.evaluation.every=5000", "task.evaluation.mode=sampled", "task.stop.mean_return=150"]
    options = ["--config=ppo", *(f"--set={text}" for text in settings), "--set=task.stop.env_steps=300000"]
    first = swarm.found("gpu", *options, f"--set=node.learner.device={DEVICE}")
    second = swarm.start("cpu", *options, "--set=node.learner.device=cpu", peers=first)
    assert [node.wait(280) for node in (first, second)] == [0, 0], first.text()[-3000:]
    for node in (first, second):
        assert "150 is reached" in node.summary()["reason"]
        print(node.name, node.summary()["status"]["env_steps"], flush=True)


@pytest.mark.skipif(
    importlib.util.find_spec("ale_py") is None, reason="wants Atari: pip install 'p2pdrl[environments]'"
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
