"""Observations of several entries with action masks are learned from.

The toy deals cards: what pays follows from a picture, a gauge and a choice together, and three or two of its
four hands are forbidden at each step (`tests.unit.rl.toys.Cards`, which raises if one of those is taken). Six
steps pay 6 at most; taking any allowed hand pays 3 on average. Environment steps until the greedy policy got
5.7 (masks as entries, seed 1): PPO 31,600, A2C 70,400, DQN 10,000.
"""

from __future__ import annotations

import pytest
import torch

from p2pdrl.config.task import (
    A2CConfig,
    DQNConfig,
    EnvConfig,
    NetworkConfig,
    PPOConfig,
    TaskConfig,
)
from p2pdrl.rl.evaluate import evaluate
from p2pdrl.rl.registry import build_trainer
from tests.unit.rl import toys

pytestmark = pytest.mark.slow

ALGORITHMS = {
    "ppo": (PPOConfig(unroll_steps=64, learning_rate=2e-3, gae_lambda=0.0, discount=0.0), 16, 100_000),
    "a2c": (A2CConfig(optimizer="adam", learning_rate=2e-3, gae_lambda=0.0, discount=0.0), 16, 160_000),
    "dqn": (DQNConfig(learning_rate=1e-3, gradient_steps=4, exploration_steps=5000, discount=0.0), 8, 50_000),
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    torch.set_num_threads(1)
    with toys.registered():
        yield


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("masks", ["entry", "info"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_hands_are_told_by_all_entries(name, masks, seed):
    algorithm, num_envs, budget = ALGORITHMS[name]
    env = EnvConfig(
        id="Cards-v0",
        num_envs=num_envs,
        kwargs={"masks": masks},
        normalize_observations=True,
        normalize_returns=False,
    )
    network = NetworkConfig(hidden=(64,))
    trainer = build_trainer(TaskConfig(seed=seed, env=env, network=network, algorithm=algorithm), seed, "cpu")
    steps, best = 0, 0.0
    judged = 0
    while steps < budget and best < 5.7:
        trainer.set_progress(0.0, steps)
        steps += trainer.step().env_steps
        trainer.policy_version += 1
        if steps >= judged + 5000:
            judged = steps
            normalizer = trainer.observation_normalizer
            best = max(
                best,
                evaluate(trainer.policy, env, 64, greedy=True, seed=seed, normalizer=normalizer).mean,
            )
    trainer.close()
    print(f"{name}, masks as {masks}, seed {seed}: {best:.2f} of 6 after {steps} steps")
    assert best >= 5.7
