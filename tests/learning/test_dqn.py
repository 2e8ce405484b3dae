"""Deep Q-learning alone really learns CartPole: the preset's values, one node, no actor processes.

What is judged is the greedy policy, over 20 episodes at each 5,000 steps. Q-learning comes and goes on
CartPole: that it was solved once within the budget is asserted, not that it stays so.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from p2pdrl.config.loader import resolve
from p2pdrl.rl.evaluate import evaluate
from p2pdrl.rl.registry import build_trainer

pytestmark = pytest.mark.slow

BUDGET = 100_000


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [31, 32, 33])
def test_dqn_solves_cartpole(seed):
    task = replace(resolve(files=["dqn"]).config.task, seed=seed)
    trainer = build_trainer(task, seed, "cpu")
    steps, judged, best = 0, 0, 0.0
    while steps < BUDGET and best < 475:
        trainer.set_progress(steps / BUDGET, steps)
        steps += trainer.step().env_steps
        trainer.policy_version += 1
        if steps >= judged + 5000:
            judged = steps
            best = max(best, evaluate(trainer.policy, task.env, 20, greedy=True, seed=seed).mean)
    trainer.close()
    print(f"seed {seed}: {best:.0f} after {steps} steps")
    assert best >= 475
