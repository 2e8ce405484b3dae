"""The methods of Mnih 2016 (arXiv 1602.01783) really learn CartPole: one learner, its preset's values.

What is judged is the greedy policy, over 20 episodes at each 5,000 steps. Q-learning comes and goes on
CartPole: that it was solved once within the budget is asserted, not that it stays so.
"""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from p2pdrl.config.loader import resolve
from p2pdrl.rl.evaluate import evaluate
from p2pdrl.rl.registry import build_trainer

pytestmark = pytest.mark.slow

CASES = {
    "n_step_q": ("n_step_q", [], 200_000),
    "one_step_q": ("n_step_q", ["task.algorithm.name=one_step_q"], 250_000),
    "one_step_sarsa": ("n_step_q", ["task.algorithm.name=one_step_sarsa"], 300_000),
    "a3c": ("a3c", [], 400_000),
}
"""By name: preset, what is changed of it, and environment steps until when it must be solved."""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [31, 32, 33])
def test_it_solves_cartpole(name, seed):
    preset, sets, budget = CASES[name]
    task = replace(resolve(files=[preset], sets=sets).config.task, seed=seed)
    trainer = build_trainer(task, seed, "cpu")
    steps, judged, best = 0, 0, 0.0
    while steps < budget and best < 475:
        trainer.set_progress(steps / task.stop.env_steps, steps)
        steps += trainer.step().env_steps
        trainer.policy_version += 1
        if steps >= judged + 5000:
            judged = steps
            best = max(best, evaluate(trainer.policy, task.env, 20, greedy=True, seed=seed).mean)
    trainer.close()
    print(f"{name}, seed {seed}: {best:.0f} after {steps} steps")
    assert best >= 475
