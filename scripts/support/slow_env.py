"""Environments at a pace: CartPole whose steps sleep, and pictures that cost nothing.

Importing this module registers them; nodes import them by the ids ``support.slow_env:SlowCartPole-v0`` and
``support.slow_env:SlowPictures-v0``.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

ID, PICTURES = "SlowCartPole-v0", "SlowPictures-v0"


class SlowCartPole(CartPoleEnv):
    """CartPole at a pace.

    Args:
        step_s: seconds slept at each step of this one environment.
    """

    def __init__(self, step_s: float = 0.002, **options: Any) -> None:
        super().__init__(**options)
        self._step_s = step_s

    def step(self, action: Any) -> Any:
        """Sleep, then step."""
        time.sleep(self._step_s)
        return super().step(action)


class SlowPictures(gym.Env[Any, Any]):
    """Stacks of four pictures of 84 x 84, as Atari's, of which none means anything; episodes of 500 steps.

    Args:
        step_s: seconds slept at each step.
    """

    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gym.spaces.Discrete(6)

    def __init__(self, step_s: float = 0.0) -> None:
        self._step_s = step_s
        self._pictures = np.random.default_rng(0).integers(0, 256, (8, 4, 84, 84), np.uint8)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin with the first picture."""
        super().reset(seed=seed, options=options)
        self._steps = 0
        return self._pictures[0], {}

    def step(self, action: Any) -> Any:
        """Sleep, then show the next picture; pays 1 for every other action."""
        if self._step_s:
            time.sleep(self._step_s)
        self._steps += 1
        return self._pictures[self._steps % 8], float(action % 2), False, self._steps >= 500, {}


if ID not in gym.registry:
    gym.register(ID, entry_point=SlowCartPole, max_episode_steps=500)
    gym.register(PICTURES, entry_point=SlowPictures)
