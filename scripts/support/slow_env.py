"""CartPole whose every step sleeps: an environment that takes time but no processor.

Importing this module registers it; nodes import it by the id ``support.slow_env:SlowCartPole-v0``.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

ID = "SlowCartPole-v0"


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


if ID not in gym.registry:
    gym.register(ID, entry_point=SlowCartPole, max_episode_steps=500)
