"""Off-policy actor-critics alone really learn Pendulum: one node, no actor processes, the presets' values.

What is judged is the greedy policy over 200 starts, after a number of steps that is given for each. −150 is
as good as it gets, give or take 6; random actions get −1,200. All three may lose some starts again later, SAC
with this small network most: it is judged early.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from p2pdrl.config.loader import resolve
from p2pdrl.rl.evaluate import evaluate
from p2pdrl.rl.registry import build_trainer

pytestmark = pytest.mark.slow

SMALL = ["task.network.hidden=[64, 64]", "task.algorithm.learning_rate=1e-3"]
CASES = [
    # the preset's rate would fall to zero within these few steps
    *(("sac", [*SMALL, "task.algorithm.anneal=none"], 5_000, seed) for seed in (31, 32, 33)),
    *(("pendulum", [], 15_000, seed) for seed in (31, 32, 33)),  # TD3
    ("ddpg", SMALL, 5_000, 31),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("preset", "sets", "budget", "seed"), CASES)
def test_pendulum_is_swung_up_and_held(preset, sets, budget, seed):
    task = replace(resolve(files=[preset], sets=sets).config.task, seed=seed)
    trainer = build_trainer(task, seed, "cpu")
    steps = 0
    while steps < budget:
        trainer.set_progress(steps / budget, steps)
        steps += trainer.step().env_steps
        trainer.policy_version += 1
    found = evaluate(trainer.policy, replace(task.env, num_envs=25), 200, greedy=True, seed=seed).mean
    trainer.close()
    print(f"{preset}, seed {seed}: {found:.0f} after {steps} steps")
    assert found >= -200  # −170 but for a start or two
