"""Small environments of all sorts of spaces, solved by looking at what they show.

``registered`` makes their ids known for as long as a module's tests run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np

STEPS = 6
"""Of an episode."""


class Guess(gym.Env):
    """Pays the share of an action's parts that are what the observation asks for."""

    def __init__(self, action_space: gym.Space[Any]) -> None:
        self.action_space = action_space
        self._size = int(np.prod(action_space.shape))
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (self._size,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._count = 0
        return self._ask(), {}

    def _ask(self):
        low, sizes = 0, 2
        if isinstance(self.action_space, gym.spaces.MultiDiscrete):
            low, sizes = self.action_space.start, self.action_space.nvec
        self._wanted = low + self.np_random.integers(0, sizes, self.action_space.shape)
        shown = 2.0 * (self._wanted - low) / (np.asarray(sizes) - 1) - 1.0
        return shown.reshape(-1).astype(np.float32)

    def step(self, action):
        assert self.action_space.contains(action), action
        reward = float((action == self._wanted).mean())
        self._count += 1
        return self._ask(), reward, self._count == STEPS, False, {}


IDS: dict[str, Any] = {
    "GuessChoices-v0": lambda: Guess(gym.spaces.MultiDiscrete([2, 3, 5])),
    "GuessShifted-v0": lambda: Guess(gym.spaces.MultiDiscrete([[3, 3], [3, 3]], start=[[0, 1], [7, -5]])),
    "GuessSwitches-v0": lambda: Guess(gym.spaces.MultiBinary(3)),
}


@contextmanager
def registered() -> Iterator[None]:
    for name, maker in IDS.items():
        gym.register(name, maker)
    yield
    for name in IDS:
        del gym.registry[name]
