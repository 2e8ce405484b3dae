"""Evaluation: episodes with a fixed policy.

The command line's ``eval`` and the monitors call ``evaluate``; ``record_video`` films one episode.

Shape suffixes: B environments, X the observation's own dimensions.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import msgspec
import numpy as np
import numpy.typing as npt
import torch
from gymnasium.wrappers import RecordVideo

from p2pdrl.config.environments import install_hint
from p2pdrl.config.task import EnvConfig
from p2pdrl.errors import UsageError
from p2pdrl.rl.envs import VectorEnv, make_scalar_env, make_vector_env
from p2pdrl.rl.normalize import RunningNormalizer
from p2pdrl.rl.policy import Policy

__all__ = ["EvalResult", "evaluate", "record_video", "require_video"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class EvalResult:
    """Returns (raw rewards, undiscounted) and lengths (steps) of the episodes played.

    Attributes:
        mean: of the returns; ``std`` (population), ``median``, ``min`` and ``max`` likewise.
        lengths: in the order of ``returns``.
    """

    mean: float
    std: float
    median: float
    min: float
    max: float
    lengths: tuple[int, ...]
    returns: tuple[float, ...]


@torch.inference_mode()
def evaluate(
    policy: Policy,
    env_config: EnvConfig,
    episodes: int,
    *,
    greedy: bool,
    seed: int,
    normalizer: RunningNormalizer | None = None,
    allow_import: bool = False,
    told: Callable[[int, int], None] | None = None,
) -> EvalResult:
    """Play ``episodes`` episodes and summarise them.

    Each environment plays a number of episodes fixed beforehand: stopping at the first ``episodes`` that end
    would favour the short ones.

    Args:
        policy: acts, on the device where its parameters are.
        env_config: the task's environment; ``num_envs`` bounds how many copies play together.
        episodes: at least 1.
        greedy: take the likeliest action; otherwise sample, as in training (but noise that training holds for
            several steps is drawn at each).
        seed: of environments and actions.
        normalizer: what the policy's observations were normalised with; it isn't updated.
        allow_import: permit environment ids that import a module.
        told: called with each step: how many episodes are done, and of how many.

    Raises:
        UsageError: ``episodes`` is below 1.
        ConfigError: the environment can't be made.
    """
    if episodes < 1:
        raise UsageError(f"evaluation wants at least 1 episode, not {episodes}")
    num_envs = min(episodes, env_config.num_envs)
    env_seed, action_seed = (int(word) for word in np.random.SeedSequence(seed).generate_state(2))
    config = msgspec.structs.replace(env_config, num_envs=num_envs)
    env = make_vector_env(config, env_seed, allow_import=allow_import)
    actor = _Actor(policy, action_seed, greedy, normalizer)
    quota_B = episodes // num_envs + (np.arange(num_envs) < episodes % num_envs)
    try:
        played = _play(env, actor, quota_B, told)
    finally:
        env.close()
    returns = np.array([value for value, _ in played])
    return EvalResult(
        mean=float(returns.mean()),
        std=float(returns.std()),
        median=float(np.median(returns)),
        min=float(returns.min()),
        max=float(returns.max()),
        lengths=tuple(length for _, length in played),
        returns=tuple(returns.tolist()),
    )


@torch.inference_mode()
def record_video(
    policy: Policy,
    env_config: EnvConfig,
    path: Path,
    *,
    greedy: bool,
    seed: int,
    normalizer: RunningNormalizer | None = None,
    allow_import: bool = False,
) -> float:
    """Film one episode to ``path`` (.mp4) and return its return; other arguments as in ``evaluate``.

    Raises:
        UsageError: the path doesn't end in .mp4, or the packages that draw and encode are missing.
        ConfigError: the environment can't be made.
    """
    require_mp4(path)
    env_seed, action_seed = (int(word) for word in np.random.SeedSequence(seed).generate_state(2))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:

        def filmed() -> gym.Env[Any, Any]:
            scalar = make_scalar_env(env_config, allow_import=allow_import, render_mode="rgb_array")
            return RecordVideo(scalar, f"{folder}/film", episode_trigger=lambda index: index == 0)

        try:
            layout = policy.spec.layout
            env = VectorEnv(
                gym.vector.SyncVectorEnv([filmed]),
                env_seed,
                action_mask=env_config.action_mask,
                info_mask=layout is not None and layout.info_mask,
            )
            actor = _Actor(policy, action_seed, greedy, normalizer)
            try:
                played = _play(env, actor, quota_B=np.array([1]))
            finally:
                env.close()  # writes the film
        except gym.error.DependencyNotInstalled as error:
            raise _no_video() from error
        Path(f"{folder}/film/rl-video-episode-0.mp4").replace(path)
    return played[0][0]


def require_video(env_config: EnvConfig, path: Path, *, allow_import: bool = False) -> None:
    """See that an environment draws itself here, and that a film can be made, before anything is played.

    Raises:
        UsageError: the path doesn't end in .mp4, or the packages that draw and encode are missing.
        ConfigError: the environment can't be made.
    """
    require_mp4(path)
    if any(importlib.util.find_spec(name) is None for name in ("moviepy", "imageio_ffmpeg")):
        raise _no_video()
    env = make_scalar_env(env_config, allow_import=allow_import, render_mode="rgb_array")
    try:
        env.reset(seed=0)
        env.render()
    except gym.error.DependencyNotInstalled as error:
        raise _no_video() from error
    finally:
        env.close()


def require_mp4(path: Path) -> None:
    """See that a film has the ending of one.

    Raises:
        UsageError: it hasn't.
    """
    if path.suffix != ".mp4":
        raise UsageError(f"a video is written as .mp4, not {path.name!r}")


def _no_video() -> UsageError:
    return UsageError(f"making a video needs packages that aren't installed; run: {install_hint('video')}")


class _Actor:
    """The policy from arrays to arrays: normalises, remembers, acts, brings the actions back."""

    def __init__(self, policy: Policy, seed: int, greedy: bool, normalizer: RunningNormalizer | None) -> None:
        self._policy = policy
        self._device = next(policy.parameters()).device
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._greedy = greedy or policy.noisy
        self._normalizer = normalizer
        self._dtype = np.dtype(policy.spec.obs_dtype)
        self._state_BS: torch.Tensor | None = None

    def __call__(self, obs_BX: Array, starts_B: Array) -> Array:
        """Return actions; ``starts_B`` tells which observations begin an episode, in the first call all."""
        if self._normalizer is not None:
            obs_BX = self._normalizer.normalize(obs_BX)
        # a copy: the environment may overwrite its observations
        inputs = torch.from_numpy(obs_BX.astype(self._dtype)).to(self._device)
        noise = None if self._greedy else self._policy.noise((len(obs_BX),), self._generator)
        if self._state_BS is None:
            self._state_BS = self._policy.initial_state(len(obs_BX))
        if self._state_BS is not None:
            self._state_BS[torch.from_numpy(starts_B).to(self._device)] = 0.0
        actions: Array = self._policy.act(inputs, noise, self._state_BS).cpu().numpy()
        return self._policy.to_environment(actions)


def _play(
    env: VectorEnv, actor: _Actor, quota_B: Array, told: Callable[[int, int], None] | None = None
) -> list[tuple[float, int]]:
    """Return (return, length) of the first ``quota_B`` episodes of each environment."""
    total = int(quota_B.sum())
    left_B = quota_B.copy()
    returns_B = np.zeros(env.num_envs)
    lengths_B = np.zeros(env.num_envs, dtype=np.int64)
    running_B = np.ones(env.num_envs, dtype=np.bool_)
    starts_B = np.ones(env.num_envs, dtype=np.bool_)
    played: list[tuple[float, int]] = []
    obs_BX = env.reset()
    while left_B.any():
        obs_BX, rewards_B, terminated_B, truncated_B = env.step(actor(obs_BX, starts_B))
        returns_B += rewards_B
        lengths_B += running_B  # the step after an end only resets
        ends_B = terminated_B | truncated_B
        over_B = env.games_over(ends_B)
        counted_B = over_B & (left_B > 0)
        played.extend(zip(returns_B[counted_B].tolist(), lengths_B[counted_B].tolist(), strict=True))
        left_B -= counted_B
        if told is not None:
            told(len(played), total)
        returns_B[over_B] = 0.0
        lengths_B[over_B] = 0
        starts_B = ~running_B  # that step was a reset
        running_B = ~ends_B
    return played
