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


class Cards(gym.Env):
    """A card is to be laid among four hands, of which some are forbidden; what pays is told by all entries.

    The best hand is (suit + 2 · lamp + sign) mod 4, where ``sign`` is 1 if the first gauge is above zero and
    the lamp is the half of the picture that is lit. It is always allowed, two others never are, and what
    is forbidden ends the episode with a loss. An end is a truncation or a termination, in turn.

    Args:
        masks: ``entry`` or ``info`` has them, or ``none``.
        dtype: of the masks.
        picture: whether there is one; its side in pixels.
        actions: ``discrete``, or ``multi``: the hand, and one of three whose last is forbidden.
        nested: some entries in a Tuple in the Dict.
    """

    HANDS = 4

    def __init__(
        self,
        masks: str = "entry",
        dtype: str = "int8",
        picture: int = 6,
        actions: str = "discrete",
        nested: bool = False,
        key: str = "action_mask",
    ) -> None:
        self.masks, self.dtype, self.picture, self.nested, self.key = masks, dtype, picture, nested, key
        self.multi = actions == "multi"
        self.forbidden = 0
        self.ends = 0
        self.action_space = gym.spaces.MultiDiscrete([4, 3]) if self.multi else gym.spaces.Discrete(4)
        size = 7 if self.multi else 4
        entries: dict[str, gym.Space[Any]] = {
            "gauges": gym.spaces.Box(-50.0, 50.0, (2,), np.float64),
            "suit": gym.spaces.Discrete(4, start=-7),
            "dials": gym.spaces.MultiDiscrete([3, 5], start=[1, 0]),
            "switches": gym.spaces.MultiBinary(3),
            "level": gym.spaces.Box(0, 200, (2,), np.uint8),
        }
        if picture:
            entries["camera"] = gym.spaces.Box(0, 255, (picture, picture, 1), np.uint8)
        if nested:
            entries = {
                "pair": gym.spaces.Tuple([entries.pop("gauges"), entries.pop("suit")]),
                **entries,
            }
        if masks == "entry":
            entries[key] = gym.spaces.Box(0, 1, (size,), np.dtype(dtype).type)
        self.observation_space = gym.spaces.Dict(entries)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._deal()

    def _deal(self):
        rng = self.np_random
        suit, lamp, sign = int(rng.integers(4)), int(rng.integers(2)), int(rng.integers(2))
        lamp = lamp if self.picture else 0
        self.best = (suit + 2 * lamp + sign) % 4
        allowed = np.zeros(4, self.dtype)
        allowed[[self.best, (self.best + 1 + int(rng.integers(3))) % 4]] = 1
        self.allowed = allowed
        gauges = np.array([(2 * sign - 1) * rng.uniform(5.0, 50.0), rng.uniform(-50.0, 50.0)])
        obs: dict[str, Any] = {
            "gauges": gauges,
            "suit": suit - 7,
            "dials": np.array([1 + rng.integers(3), rng.integers(5)]),
            "switches": rng.integers(0, 2, 3).astype(np.int8),
            "level": rng.integers(0, 201, 2).astype(np.uint8),
        }
        if self.picture:
            obs["camera"] = np.zeros((self.picture, self.picture, 1), np.uint8)
            half = self.picture // 2
            obs["camera"][half * lamp : half * (lamp + 1)] = 255
        if self.nested:
            obs["pair"] = (obs.pop("gauges"), obs.pop("suit"))
        mask = np.concatenate((allowed, np.array([1, 1, 0], self.dtype))) if self.multi else allowed
        if self.masks == "entry":
            obs[self.key] = mask
        return obs, {self.key: mask} if self.masks == "info" else {}

    def step(self, action):
        hand, second = (int(part) for part in action) if self.multi else (int(action), 0)
        bad = not self.allowed[hand] or second == 2
        if bad and self.masks != "none":
            raise AssertionError(f"hand {hand}, {second} is not allowed: {self.allowed}")
        reward = float(hand == self.best) - float(bad)
        self.count += 1
        ended = bad or self.count == STEPS
        self.ends += ended
        obs, info = self._deal()
        terminated = ended and self.ends % 2 == 0
        if terminated and self.masks == "entry":
            obs[self.key][:] = 0  # nothing can be done any more
        return obs, reward, terminated, ended and not terminated, info


IDS: dict[str, Any] = {
    "GuessChoices-v0": lambda: Guess(gym.spaces.MultiDiscrete([2, 3, 5])),
    "GuessShifted-v0": lambda: Guess(gym.spaces.MultiDiscrete([[3, 3], [3, 3]], start=[[0, 1], [7, -5]])),
    "GuessSwitches-v0": lambda: Guess(gym.spaces.MultiBinary(3)),
    "Cards-v0": Cards,
}


@contextmanager
def registered() -> Iterator[None]:
    for name, maker in IDS.items():
        gym.register(name, maker)
    yield
    for name in IDS:
        del gym.registry[name]
