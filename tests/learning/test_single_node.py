"""One trainer alone really learns: PPO and A2C on CartPole, PPO on Pendulum.

Environment steps until the mean of the last 100 sampled returns reached 475, one node, one thread:

- PPO, seeds 1-4, 11-14 and 21-28: 62,000 to 108,000; none of them fell below 475 in the 400,000 steps after.
- A2C, seeds 1-8 (the settings were chosen on these): 155,000 to 224,000. Seeds 21-28 (not used for choosing):
  139,000 to 391,000, and one of the eight fell to 134 for a while afterwards. So its bound is wide, and
  nothing is asserted about staying there.

Pendulum, 120,000 steps, mean of 50 greedy episodes: -187 to -266 for seeds 1-3, 21-23 and 25, but
-414 for seed 24, which is therefore among those tested.
"""

from __future__ import annotations

import statistics
from collections import deque

import numpy as np
import pytest

from p2pdrl.config.task import A2CConfig, EnvConfig, PPOConfig, TaskConfig
from p2pdrl.rl.evaluate import evaluate
from p2pdrl.rl.registry import build_trainer
from p2pdrl.rl.trainer import Trainer

pytestmark = pytest.mark.slow


def train(task: TaskConfig, seed: int, env_steps: int) -> tuple[Trainer, list[tuple[int, float]]]:
    """Return the trainer and, per update, (environment steps, mean of the last 100 sampled returns)."""
    trainer = build_trainer(task, seed, "cpu")
    last: deque[float] = deque(maxlen=100)
    curve, steps = [], 0
    while steps < env_steps:
        stats = trainer.step()
        steps += stats.env_steps
        last.extend(value for value, _ in stats.episodes)
        if len(last) == 100:
            curve.append((steps, float(np.mean(last))))
    return trainer, curve


def solved_at(curve: list[tuple[int, float]], threshold: float) -> int:
    return next((steps for steps, mean in curve if mean >= threshold), 10**9)


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_ppo_solves_cartpole_and_stays_there(seed):
    task = TaskConfig(seed=seed, env=EnvConfig(num_envs=8, normalize_returns=True), algorithm=PPOConfig())
    trainer, curve = train(task, seed, 400_000)
    solved = solved_at(curve, 475)
    assert solved <= 200_000
    assert min(mean for steps, mean in curve if steps >= solved) >= 450
    assert evaluate(trainer.policy, task.env, 100, greedy=False, seed=seed).mean >= 475


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_a2c_solves_cartpole(seed):
    task = TaskConfig(
        seed=seed,
        env=EnvConfig(num_envs=16, normalize_returns=True),
        algorithm=A2CConfig(
            optimizer="adam", learning_rate=2e-3, unroll_steps=16, gae_lambda=0.95, entropy_coef=0.0
        ),
    )
    _, curve = train(task, seed, 500_000)
    assert solved_at(curve, 475) <= 500_000


def test_ppo_swings_the_pendulum_up():
    """In the median of three seeds: PPO may lose starts again, by chance."""
    found = []
    for seed in (1, 2, 24):
        task = TaskConfig(
            seed=seed,
            env=EnvConfig(id="Pendulum-v1", num_envs=16, normalize_observations=True, normalize_returns=True),
            algorithm=PPOConfig(unroll_steps=128, epochs=10, minibatches=16, discount=0.9),
        )
        trainer, _ = train(task, seed, 120_000)
        normalizer = trainer.observation_normalizer
        result = evaluate(trainer.policy, task.env, 50, greedy=True, seed=seed, normalizer=normalizer)
        found.append(result.mean)
    assert statistics.median(found) >= -500, found  # the untrained policy gets about -1,200
    assert min(found) >= -800, found
