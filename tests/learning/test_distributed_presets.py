"""Presets of asynchronous and distributed systems really learn: one learner's part of each, alone.

What servers and averages do with the gradients of several is tested with the strategies; here it is the
values that presets give an algorithm. What is judged is the policy as the preset's evaluations do it, over
20 episodes at each 5,000 steps: that it was solved once within the budget is asserted, not that it stays so.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from p2pdrl.config.loader import resolve
from p2pdrl.rl.evaluate import evaluate
from p2pdrl.rl.registry import build_trainer

pytestmark = pytest.mark.slow

CASES = {
    "n_step_q": (200_000, 475),
    "one_step_q": (400_000, 475),
    "one_step_sarsa": (400_000, 475),
    "a3c": (400_000, 475),
    "rapid": (600_000, 475),
    "ddppo": (400_000, 475),
    "gossip_gradients": (600_000, 475),
    "rlx_compose": (200_000, 475),
    "apex_dqn": (100_000, 475),
    "apex_ddpg": (30_000, -200),
}
"""By preset: environment steps until when it must be solved, and the return that this is."""
ALGORITHMS = ("one_step_q", "one_step_sarsa")
"""Cases that are an algorithm of that name with the values of the preset `n_step_q`."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [31, 32, 33])
def test_it_solves_its_task(name, seed):
    most, goal = CASES[name]
    preset, sets = ("n_step_q", [f"task.algorithm.name={name}"]) if name in ALGORITHMS else (name, [])
    task = replace(resolve(files=[preset], sets=sets).config.task, seed=seed)
    greedy = task.evaluation.mode == "greedy"
    trainer = build_trainer(task, seed, "cpu")
    steps, judged, best = 0, 0, float("-inf")
    while steps < most and best < goal:
        trainer.set_progress(steps / task.stop.env_steps, steps)
        steps += trainer.step().env_steps
        trainer.policy_version += 1
        if steps >= judged + 5000:
            judged = steps
            best = max(best, evaluate(trainer.policy, task.env, 20, greedy=greedy, seed=seed).mean)
    trainer.close()
    print(f"{name}, seed {seed}: {best:.0f} after {steps} steps")
    assert best >= goal
