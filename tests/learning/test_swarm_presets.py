"""Presets in a swarm of real nodes on this machine: `p2pdrl swarm up` ends as its policy reaches the goal.

The swarm stops by its own condition: two evaluations in a row, by different nodes, have a mean return of at
least the goal. A seed is that of the initial weights; environments are seeded by the nodes' ids and nobody
waits for anybody, so no two runs are alike. To add a preset, add a line to `CASES`; one may
come again with another task, its name first.
"""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from typing import NamedTuple

import pytest

from tests.integration.conftest import free_port

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("real processes")]

LEAVE_S = 60.0


class Case(NamedTuple):
    """How a preset is run, and what it has to reach.

    Attributes:
        goal: the preset's `task.stop.mean_return`.
        budget: environment steps of the whole swarm within which it is to be reached.
        limit_s: in which the swarm is to have stopped.
        nodes: their number.
        roles: options of ``swarm up`` that say who does what; by default each node does everything.
        sets: ``KEY=VALUE`` over the preset: of those that train on to the end of their steps, the goal.
        wants: a package that the environment is from.
    """

    goal: float
    budget: int
    limit_s: float
    nodes: int = 3
    roles: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    wants: str = ""


GOAL = ("task.stop.mean_return=475",)
BREAKOUT = (
    "task.env.id=MinAtar/Breakout-v1",
    "task.network.hidden=[128]",
    "task.stop.mean_return=10",
    "task.evaluation.every=20000",
)
BREAKOUT_DQN = (
    *BREAKOUT,
    "task.network.kind=minatar_cnn",
    "task.algorithm.learning_rate=2.5e-4",
    "task.stop.env_steps=1000000",
)

CASES = {
    "cartpole": Case(475, 600_000, 900),
    "adpsgd": Case(475, 500_000, 900, sets=GOAL),
    "sgp": Case(475, 600_000, 900),
    "gala": Case(475, 2_000_000, 900),
    "dsgd": Case(475, 600_000, 900),
    "gossip_gradients": Case(475, 1_000_000, 900),
    "strom": Case(475, 1_000_000, 900),
    "rlx_compose": Case(475, 200_000, 900),
    "accumulate": Case(475, 2_000_000, 900),
    "model_split": Case(475, 2_000_000, 900),
    "mapreduce_sync": Case(475, 600_000, 900),
    "mapreduce_shards": Case(-0.15, 30_000_000, 300),
    "downpour": Case(475, 2_000_000, 900),
    "grad_average": Case(475, 600_000, 900),
    "ddp": Case(475, 600_000, 900),
    "ddppo": Case(475, 600_000, 900),
    "param_average": Case(475, 600_000, 900),
    "federated": Case(475, 2_000_000, 900, nodes=8),
    "hogwild": Case(475, 1_000_000, 900),
    "a3c": Case(475, 2_000_000, 900),
    "impala": Case(475, 600_000, 900, roles=("--learners", "1"), sets=(*GOAL, "task.stop.env_steps=600000")),
    "rapid": Case(475, 600_000, 900, nodes=4, roles=("--learners", "2")),
    "apex_dqn": Case(475, 400_000, 900, nodes=5, roles=("--learners", "1", "--replays", "2")),
    "apex_ddpg": Case(
        -200,
        60_000,
        900,
        nodes=4,
        roles=("--learners", "1", "--replays", "1"),
        sets=("task.stop.mean_return=-200", "task.stop.env_steps=60000"),
    ),
    "gorila": Case(475, 200_000, 900),
    "async_double_q": Case(475, 200_000, 900),
    "async_q": Case(475, 800_000, 900),
    "async_sarsa": Case(475, 400_000, 900),
    "async_nstep_q": Case(475, 1_500_000, 900),
    "amb_pp_ddpg": Case(
        -200, 30_000, 900, nodes=2, sets=("task.stop.mean_return=-200", "node.actors.count=1")
    ),
    "amb_pp_impala": Case(475, 300_000, 900, nodes=2, sets=(*GOAL, "node.actors.count=1")),
    "amb_pp": Case(475, 600_000, 900, nodes=2, sets=(*GOAL, "task.stop.env_steps=600000")),
    "impala breakout": Case(
        10,
        3_000_000,
        1500,
        roles=("--learners", "1"),
        sets=(
            *BREAKOUT,
            "task.env.num_envs=16",
            "task.algorithm.learning_rate=4e-3",
            "task.algorithm.entropy_coef=0.02",
            "task.stop.env_steps=3000000",
        ),
        wants="minatar",
    ),
    "rapid breakout": Case(
        10,
        3_000_000,
        1500,
        nodes=4,
        roles=("--learners", "2"),
        sets=(
            *BREAKOUT,
            "task.network.kind=minatar_cnn",
            "task.network.core_size=128",
            "task.env.num_envs=32",
            "task.algorithm.entropy_coef=0.01",
            "task.stop.env_steps=3000000",
        ),
        wants="minatar",
    ),
    "gorila breakout": Case(
        10,
        1_000_000,
        1500,
        sets=(
            *BREAKOUT_DQN,
            "task.algorithm.exploration_steps=100000",
            "task.algorithm.exploration_end=0.02",
        ),
        wants="minatar",
    ),
    "apex_dqn breakout": Case(
        10,
        1_000_000,
        1500,
        nodes=5,
        roles=("--learners", "1", "--replays", "2"),
        sets=(
            *BREAKOUT_DQN,
            "task.algorithm.batch_size=64",
            "task.algorithm.unroll_steps=8",
            "task.algorithm.buffer_size=100000",
            "task.algorithm.target_tau=0.005",
        ),
        wants="minatar",
    ),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [31, 32, 33])
@pytest.mark.parametrize("preset", CASES)
def test_a_swarm_reaches_the_goal(preset, seed, tmp_path):
    case = CASES[preset]
    if case.wants and importlib.util.find_spec(case.wants) is None:
        pytest.skip(f"wants {case.wants}: pip install 'p2pdrl[environments]'")
    command = [sys.executable, "-m", "p2pdrl", "swarm", "up", str(case.nodes), *case.roles]
    command += ["--config", preset.split()[0], "--set", f"task.seed={seed}"]
    command += [word for one in case.sets for word in ("--set", one)]
    command += ["--data-root", str(tmp_path), "--base-port", str(free_port()), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=case.limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=LEAVE_S)
        finally:
            process.kill()  # nodes don't outlive it
    last = err[-3000:]
    assert out, f"it said nothing:\n{last}"
    result = json.loads(out)
    swarm = result["swarm"]
    assert swarm, f"no node ever answered:\n{last}"
    steps, reason = swarm["swarm_env_steps"], swarm["stop"]["reason"]
    print(f"{preset}, seed {seed}: {steps:,} steps in {result['seconds']:.0f} s: {reason}", flush=True)
    assert swarm["stop"]["reached"], f"it didn't stop in time:\n{last}"
    assert re.match(rf"mean return {case.goal:g} (over .*)?is reached", reason), reason
    assert steps <= case.budget
    assert process.returncode == 0, last
