"""A policy with a memory solves what can't be solved without one: CartPole that doesn't show its velocities.

Environment steps until the mean of the last 100 sampled returns reached 475, one node, one thread, the
defaults but for the network, seeds 1-4, 11 and 12: 97,000, 131,000, 130,000, 87,000, 106,000 and 253,000.
The same hidden layers without memory never reached 60 in 100,000 steps (seeds 1-3): from positions alone
nobody can tell whether the pole is falling or rising.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv

from p2pdrl.config.task import EnvConfig, NetworkConfig, TaskConfig
from p2pdrl.rl.evaluate import evaluate
from p2pdrl.rl.registry import build_trainer
from p2pdrl.rl.trainer import Trainer

pytestmark = pytest.mark.slow

ENV_ID = "CartPolePositions-v0"


class Positions(gym.ObservationWrapper):
    """Shows the cart's position and the pole's angle, but not how fast they change."""

    def __init__(self, **options: Any) -> None:
        super().__init__(CartPoleEnv(**options))
        space = self.env.observation_space
        self.observation_space = gym.spaces.Box(space.low[::2], space.high[::2])

    def observation(self, observation):
        return observation[::2]


@pytest.fixture(scope="module", autouse=True)
def registered():
    torch.set_num_threads(1)
    gym.register(ENV_ID, entry_point=Positions, max_episode_steps=500)
    yield
    gym.registry.pop(ENV_ID)


def train(core: str, seed: int, env_steps: int) -> tuple[Trainer, TaskConfig, list[float]]:
    """Return the trainer, its task, and after each update the mean of the last 100 sampled returns."""
    task = TaskConfig(
        seed=seed,
        env=EnvConfig(id=ENV_ID, normalize_observations=True),
        network=NetworkConfig(hidden=(64,), core=core, core_size=64),
    )
    trainer = build_trainer(task, seed, "cpu")
    last: deque[float] = deque(maxlen=100)
    curve, steps = [], 0
    while steps < env_steps and not (curve and curve[-1] >= 475):
        stats = trainer.step()
        steps += stats.env_steps
        last.extend(value for value, _ in stats.episodes)
        if len(last) == 100:
            curve.append(float(np.mean(last)))
    return trainer, task, curve


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ppo_with_a_memory_balances_what_it_sees_half_of(seed, core):
    trainer, task, curve = train(core, seed, 300_000)
    assert curve[-1] >= 475
    # Of the likeliest actions: training stopped where sampled returns were at their luckiest, and 50 more
    # of them may be below 450 by luck alone (GRU, seed 1: 450 to 463 over five times as many, 479 greedily).
    result = evaluate(
        trainer.policy, task.env, 100, greedy=True, seed=seed, normalizer=trainer.observation_normalizer
    )
    assert result.mean >= 450


def test_without_a_memory_it_can_not():
    _, _, curve = train("none", 1, 100_000)
    assert max(curve) < 100
