"""Which entries of a dictionary observation are used; Minigrid's cells as planes, and its idle actions.

``envs`` calls them when it builds an environment.

Shape suffixes: C planes, H height, W width.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from p2pdrl.errors import ConfigError

__all__ = ["IdleActionMask", "one_hot_cells", "with_entries"]

Array = npt.NDArray[Any]

CELL_VALUES = (11, 6, 4)
"""Kinds of object, colours and states (of doors; of agents their directions) in Minigrid's encoding."""


def with_entries(env: gym.Env[Any, Any], keys: tuple[str, ...]) -> gym.Env[Any, Any]:
    """Return an environment that shows some entries of its dictionary; of a single one, just that.

    Args:
        env: of any observations; those that aren't a ``Dict`` stay as they are.
        keys: names of the entries; none are all but texts.

    Raises:
        ConfigError: there is no such entry, or nothing is left.
    """
    space = env.observation_space
    if not isinstance(space, gym.spaces.Dict):
        if keys:
            raise ConfigError(f"env.observation_keys are for dictionaries, observations are {space}")
        return env
    if not space.spaces:
        return env
    unknown = [key for key in keys if key not in space.spaces]
    names = keys or tuple(key for key, entry in space.spaces.items() if not _is_text(entry))
    if unknown or not names:
        raise ConfigError(
            f"observations have no entry {', '.join(unknown) or 'but texts'}; there are "
            f"{', '.join(space.spaces)}"
        )
    if not keys and len(names) == len(space.spaces):
        return env
    if len(names) == 1:
        only = names[0]
        return gym.wrappers.TransformObservation(env, lambda obs: obs[only], space[only])
    if len(names) == len(space.spaces):
        return env
    left = gym.spaces.Dict({name: space[name] for name in names})
    return gym.wrappers.TransformObservation(env, lambda obs: {name: obs[name] for name in names}, left)


def _is_text(space: gym.Space[Any]) -> bool:
    """Whether it holds strings, as Minigrid's missions, whose space is of a class of their own."""
    return isinstance(space, gym.spaces.Text) or (space.dtype is not None and space.dtype.kind == "U")


def one_hot_cells(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Return a Minigrid whose ``image`` (HW3 of numbers of kind, colour and state) is a bool CHW of planes.

    As numbers they would say that a ball is more than a key; most of what is published has them one-hot or
    embedded (Chevalier-Boisvert 2023, arXiv 2306.13831, feeds them raw).
    """
    space: Any = env.observation_space
    if not isinstance(space, gym.spaces.Dict) or not isinstance(space.get("image"), gym.spaces.Box):
        return env
    image: Any = space["image"]
    height, width = image.shape[:2]
    dtype: Any = np.bool_
    planes = gym.spaces.Box(0, 1, (sum(CELL_VALUES), height, width), dtype=dtype)
    shown = gym.spaces.Dict({**space.spaces, "image": planes})
    return gym.wrappers.TransformObservation(env, lambda obs: {**obs, "image": _planes(obs["image"])}, shown)


def _planes(cells_HW3: Array) -> npt.NDArray[np.bool_]:
    """Return one plane for each value of each of the three numbers, CHW."""
    return np.concatenate(
        [
            np.arange(values)[:, None, None] == cells_HW3[None, ..., number]
            for number, values in enumerate(CELL_VALUES)
        ]
    )


class IdleActionMask(gym.Wrapper[Any, Any, Any, Any]):
    """Tells with each observation of a Minigrid which actions can do something: ``info[key]``, int8, 7.

    Args:
        env: a Minigrid, wrapped or not.
        key: name of the mask.
        done: whether the mission may ask for ``done``.
    """

    def __init__(self, env: gym.Env[Any, Any], key: str, *, done: bool) -> None:
        super().__init__(env)
        self._world: Any = env.unwrapped
        self._key = key
        self._done = done

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """See ``gymnasium.Env``."""
        obs, info = self.env.reset(**options)
        return obs, {**info, self._key: self._mask()}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """See ``gymnasium.Env``."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated, truncated, {**info, self._key: self._mask()}

    def _mask(self) -> npt.NDArray[np.int8]:
        ahead = self._world.grid.get(*self._world.front_pos)
        carried, actions = self._world.carrying, self._world.actions
        mask = np.ones(len(actions), np.int8)
        mask[actions.pickup] = carried is None and ahead is not None and ahead.can_pickup()
        mask[actions.drop] = carried is not None and ahead is None
        mask[actions.toggle] = ahead is not None and self._opens(ahead, carried)
        mask[actions.done] = self._done
        return mask

    @staticmethod
    def _opens(thing: Any, carried: Any) -> bool:
        """Whether to toggle a thing changes it: a box, or a door that isn't locked or whose key is held."""
        if thing.type != "door":
            return bool(thing.type == "box")
        has_key = carried is not None and (carried.type, carried.color) == ("key", thing.color)
        return has_key or not thing.is_locked
