"""Several environments stepped one after the other: gymnasium's ``SyncVectorEnv`` without what nobody reads.

``envs`` uses it where observations are a ``Box``. To the bit the same transitions, in the same autoreset mode
(NEXT_STEP), but observations go straight into one array, and nothing is copied or gathered from infos. What
is saved matters where an environment's own step takes microseconds.

Shape suffixes: B environments, X the observation's own dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

__all__ = ["SerialVectorEnv"]

Array = npt.NDArray[Any]


class SerialVectorEnv(gym.vector.VectorEnv[Array, Array, Array]):
    """B copies of an environment; the arrays that ``step`` returns are overwritten by the next call.

    Args:
        makers: each makes one copy; all have the same spaces, and observations that are a ``Box``.

    Attributes:
        infos: of the last step or reset, one of each environment.
    """

    def __init__(self, makers: Sequence[Callable[[], gym.Env[Any, Any]]]) -> None:
        self.envs = [make() for make in makers]
        self.num_envs = B = len(self.envs)
        first = self.envs[0]
        self.metadata = {**first.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}
        self.render_mode = first.render_mode
        self.single_observation_space = first.observation_space
        self.single_action_space = first.action_space
        self.observation_space = batch_space(first.observation_space, B)
        self.action_space = batch_space(first.action_space, B)
        self.infos: list[dict[str, Any]] = [{}] * B
        space = first.observation_space
        self._obs_BX = np.zeros((B, *(space.shape or ())), dtype=space.dtype)
        self._rewards_B = np.zeros(B)
        self._terminated_B = np.zeros(B, dtype=np.bool_)
        self._truncated_B = np.zeros(B, dtype=np.bool_)
        self._over: list[bool] = [False] * B
        self._steps = [env.step for env in self.envs]

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Reset every environment.

        Args:
            seed: a list of one for each environment; None leaves their random streams as they are.
            options: for each environment's own ``reset``.
        """
        seeds: Sequence[int | None] = [None] * self.num_envs if seed is None else seed
        for number, (env, own_seed) in enumerate(zip(self.envs, seeds, strict=True)):
            self._obs_BX[number], self.infos[number] = env.reset(seed=own_seed, options=options)
            self._over[number] = False
        self._terminated_B[:] = self._truncated_B[:] = False
        return self._obs_BX, {}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Step every environment, or reset those whose episode has ended.

        Args:
            actions: of the first environments; those that have none stand still, and aren't returned.
        """
        n = len(actions)
        obs_BX, rewards_B, over = self._obs_BX, self._rewards_B, self._over
        for number, step in enumerate(self._steps[:n]):
            if over[number]:
                obs_BX[number], self.infos[number] = self.envs[number].reset()
                rewards_B[number] = 0.0
                self._terminated_B[number] = self._truncated_B[number] = over[number] = False
                continue
            obs_BX[number], rewards_B[number], terminated, truncated, self.infos[number] = step(
                actions[number]
            )
            if terminated or truncated:
                self._terminated_B[number], self._truncated_B[number] = terminated, truncated
                over[number] = True
        return obs_BX[:n], rewards_B[:n], self._terminated_B[:n], self._truncated_B[:n], {}

    def close_extras(self, **_: Any) -> None:
        """Close every environment."""
        for env in self.envs:
            env.close()
