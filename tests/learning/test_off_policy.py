"""Off-policy actor-critics alone really learn: the presets' values, one node, no actor processes.

What is judged is the greedy policy, over many episodes, at the end of a fixed budget of steps and not at the
best of its moments. On Pendulum −150 is as good as it gets, and random actions get −1,200.
"""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from p2pdrl.config.loader import resolve
from p2pdrl.rl.evaluate import evaluate
from p2pdrl.rl.registry import build_trainer

pytestmark = pytest.mark.slow

SEEDS = [31, 32, 33]
SMALL = ["task.network.hidden=[64, 64]", "task.algorithm.learning_rate=1e-3"]
PENDULUM = {
    "pendulum": (["pendulum"], []),
    "sac": (["sac"], SMALL),
    "td3": (["td3"], SMALL),
    "ddpg": (["ddpg"], SMALL),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def trained(files, sets, seed, budget):
    task = replace(resolve(files=files, sets=sets).config.task, seed=seed)
    trainer = build_trainer(task, seed, "cpu")
    steps = 0
    while steps < budget:
        trainer.set_progress(steps / budget, steps)
        steps += trainer.step().env_steps
        trainer.policy_version += 1
    return trainer, task


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PENDULUM)
def test_pendulum_is_swung_up_and_held(name, seed):
    files, sets = PENDULUM[name]
    trainer, task = trained(files, sets, seed, 20_000)
    env = replace(task.env, num_envs=25)
    found = evaluate(trainer.policy, env, 50, greedy=True, seed=1000 + seed).mean
    trainer.close()
    print(f"{name}, seed {seed}: {found:.0f}")
    assert found >= -170
