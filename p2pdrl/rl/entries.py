"""Which entries of a dictionary observation are used, and Minigrid's cells as one-hot planes.

``envs`` calls them when it builds an environment.

Shape suffixes: C planes, H height, W width.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from p2pdrl.errors import ConfigError

__all__ = ["one_hot_cells", "with_entries"]

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
