"""Environments: a batch of gymnasium copies behind one small interface.

``trainer`` and ``evaluate`` build them, ``rollout`` steps them. Autoreset is gymnasium's NEXT_STEP: the
step after an episode's end ignores its action, pays nothing and only returns the new episode's first
observation. So the observation that follows the last action of an episode is always the true final one,
and the caller must mask the step after it.

Shape suffixes: B environments, X the observation's own dimensions, A action dimensions.
"""

from __future__ import annotations

import difflib
import importlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from p2pdrl.config.task import EnvConfig
from p2pdrl.errors import ConfigError

__all__ = [
    "Action",
    "Continuous",
    "Discrete",
    "EnvSpec",
    "MultiBinary",
    "MultiDiscrete",
    "VectorEnv",
    "channels_last",
    "describe",
    "is_picture",
    "make_scalar_env",
    "make_vector_env",
    "pixels_of",
]

Array = npt.NDArray[Any]

VETTED_VECTOR_ENVS = frozenset({"CartPole-v1"})
"""Ids whose ``vector_entry_point`` gives the same transitions and ends as the scalar one (see the tests)."""

SMALLEST_SIDE = 3
"""Of an image of several channels, in pixels: the kernel of the smallest network for images."""

SMALLEST_PICTURE = 36
"""Sides of a grey image in pixels, the least that ``nature_cnn`` takes; smaller grids of bytes are boards."""

EXTRAS = {"Box2D": "box2d", "MuJoCo": "mujoco", "mujoco": "mujoco", "ale": "atari", "pygame": "video"}
"""Word in gymnasium's complaint about a missing package -> extra of this package that brings it."""


@dataclass(frozen=True)
class Discrete:
    """One of ``n`` actions, numbered from zero."""

    n: int
    dtype: ClassVar[str] = "int64"
    shape: ClassVar[tuple[int, ...]] = ()

    @property
    def outputs(self) -> int:
        """Numbers that a policy head gives for it: logits."""
        return self.n

    def __str__(self) -> str:
        return f"one of {self.n}"


@dataclass(frozen=True)
class MultiDiscrete:
    """Several choices at once, the i-th one of ``sizes[i]``, numbered from zero."""

    sizes: tuple[int, ...]
    dtype: ClassVar[str] = "int64"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one action."""
        return (len(self.sizes),)

    @property
    def outputs(self) -> int:
        """Numbers that a policy head gives for it: the logits of all choices, one choice after the other."""
        return sum(self.sizes)

    def __str__(self) -> str:
        return f"{len(self.sizes)} choices of {', '.join(map(str, self.sizes))}"


@dataclass(frozen=True)
class MultiBinary:
    """``n`` switches, each 0 or 1."""

    n: int
    dtype: ClassVar[str] = "int64"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one action."""
        return (self.n,)

    @property
    def outputs(self) -> int:
        """Numbers that a policy head gives for it: a logit of each."""
        return self.n

    def __str__(self) -> str:
        return f"{self.n} switches"


@dataclass(frozen=True, eq=False)
class Continuous:
    """A vector of ``dim`` numbers; ``low`` and ``high`` (float32, length ``dim``) may be infinite."""

    dim: int
    low: Array
    high: Array
    dtype: ClassVar[str] = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one action."""
        return (self.dim,)

    @property
    def outputs(self) -> int:
        """Numbers that a policy head gives for it: means."""
        return self.dim

    def __str__(self) -> str:
        return f"{self.dim} numbers"


Action = Discrete | MultiDiscrete | MultiBinary | Continuous
"""Each has the ``shape`` and ``dtype`` of one action as it is stored, and says how wide a head it wants."""


@dataclass(frozen=True)
class EnvSpec:
    """Shapes and types of one environment's observations and actions.

    Attributes:
        obs_dtype: ``float32``; ``uint8`` or ``bool`` for images of those; other bytes are scaled
            (`make_scalar_env`).
        obs_most: of images: the greatest value of a pixel, by which networks divide it; 1 leaves it alone.
    """

    obs_shape: tuple[int, ...]
    obs_dtype: str
    action: Action
    obs_most: float = 255.0

    @property
    def is_image(self) -> bool:
        """Whether observations are pictures: three dimensions, both sides of `SMALLEST_SIDE` or more."""
        return is_picture(self.obs_shape)


class VectorEnv:
    """A batch of environments that reset themselves.

    Args:
        env: gymnasium's vector environment, with autoreset mode NEXT_STEP.
        seed: every random stream of the batch follows from it.
        step_delay_s: seconds slept at each step, to emulate a slow environment.
    """

    def __init__(
        self,
        env: gym.vector.VectorEnv[Any, Any, Any],
        seed: int,
        *,
        step_delay_s: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.spec = describe(env)
        self.num_envs: int = env.num_envs
        self._env = env
        self._step_delay_s = step_delay_s
        self._sleep = sleep
        sequence = np.random.SeedSequence(seed)
        # given one integer, a SyncVectorEnv takes seed, seed + 1, …: nodes seeded alike would share episodes
        self._seeds: Any = [int(word) for word in sequence.generate_state(self.num_envs)]
        if not isinstance(env, SyncVectorEnv):
            self._seeds = self._seeds[0]
        space = env.single_action_space
        self._action_start: Any = None
        if isinstance(space, gym.spaces.Discrete) and space.start:
            self._action_start = int(space.start)
        elif isinstance(space, gym.spaces.MultiDiscrete) and space.start.any():
            self._action_start = space.start.reshape(-1).astype(np.int64)
        self._reshape = not isinstance(space, gym.spaces.Discrete)
        self._action_shape = (self.num_envs, *(space.shape or ()))
        self._action_dtype = space.dtype

    def reset(self) -> Array:
        """Start every episode anew from the seed and return the first observations, BX."""
        obs_BX, _ = self._env.reset(seed=self._seeds)
        return np.asarray(obs_BX)

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array]:
        """Take one step in every environment.

        Args:
            actions: B integers from zero, or B x A of them, or B x A floats, which are clipped to the bounds
                here and nowhere else.

        Returns:
            obs_BX, rewards_B, terminated_B, truncated_B; arrays may be overwritten by the next call.
        """
        if isinstance(self.spec.action, Continuous):
            actions = np.clip(actions, self.spec.action.low, self.spec.action.high)
            actions = actions.reshape(self._action_shape).astype(self._action_dtype, copy=False)
        else:
            if self._action_start is not None:
                actions = actions + self._action_start
            if self._reshape:
                actions = actions.reshape(self._action_shape).astype(self._action_dtype, copy=False)
        obs_BX, rewards_B, terminated_B, truncated_B, _ = self._env.step(actions)
        if self._step_delay_s > 0.0:
            self._sleep(self._step_delay_s)
        return obs_BX, rewards_B, terminated_B, truncated_B

    def close(self) -> None:
        """Close the environments."""
        self._env.close()


def make_vector_env(
    config: EnvConfig,
    seed: int,
    *,
    allow_import: bool = False,
    step_delay_s: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
) -> VectorEnv:
    """Build ``config.num_envs`` copies on the fastest path that gymnasium has; arguments as in ``VectorEnv``.

    ``allow_import`` permits ids like ``module:Name-v0``, which run code from ``module``.

    Raises:
        ConfigError: unknown id, bad constructor arguments, missing package, or spaces no policy here fits.
    """
    if config.id in VETTED_VECTOR_ENVS:
        env: Any = _guarded(config, lambda: _make_by_entry_point(config))
    else:
        copies: list[Callable[[], gym.Env[Any, Any]]] = [
            lambda: make_scalar_env(config, allow_import=allow_import) for _ in range(config.num_envs)
        ]
        # copy=False: observations are copied into the unroll at once
        env = SyncVectorEnv(copies, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)
    return VectorEnv(env, seed, step_delay_s=step_delay_s, sleep=sleep)


def make_scalar_env(
    config: EnvConfig, *, allow_import: bool = False, render_mode: str | None = None
) -> gym.Env[Any, Any]:
    """Build one environment whose observations are flat boxes of floats, or images (HWC or CHW).

    Raises:
        ConfigError: as in ``make_vector_env``.
    """
    if ":" in config.id and not allow_import:
        raise ConfigError(
            f"env.id {config.id!r} imports a Python module, which runs its code; "
            "start the node with --allow-import if you trust it"
        )
    if config.id.startswith("ALE/"):
        _register_atari()
    env: gym.Env[Any, Any] = _guarded(
        config,
        lambda: gym.make(
            config.id,
            max_episode_steps=config.max_episode_steps,
            disable_env_checker=True,  # checks every step: costs more than CartPole's physics
            **config.kwargs,
            **({} if render_mode is None else {"render_mode": render_mode}),
        ),
    )
    if not isinstance(env.observation_space, gym.spaces.Box):
        env = gym.wrappers.FlattenObservation(env)
    return _with_usable_bytes(env)


def _with_usable_bytes(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Bring observations of uint8 that aren't stacked or coloured images to what networks take.

    A grey image (two dimensions, both of `SMALLEST_PICTURE` or more) gets a channel of its own. Anything
    else, Atari's 128 bytes of RAM for one, becomes float32, each entry divided by the greatest value that
    it can take.
    """
    space = env.observation_space
    if not isinstance(space, gym.spaces.Box) or space.dtype != np.uint8 or is_picture(space.shape):
        return env
    if len(space.shape) == 2 and min(space.shape) >= SMALLEST_PICTURE:
        grey = gym.spaces.Box(space.low[..., None], space.high[..., None], dtype=np.uint8)
        return gym.wrappers.TransformObservation(env, lambda image: np.asarray(image)[..., None], grey)
    most = np.maximum(space.high, 1).astype(np.float32)
    scaled = gym.spaces.Box(space.low / most, space.high / most, dtype=np.float32)
    return gym.wrappers.TransformObservation(
        env, lambda entries: np.divide(entries, most, dtype=np.float32), scaled
    )


def describe(env: gym.vector.VectorEnv[Any, Any, Any]) -> EnvSpec:
    """Return the spaces of one of the batch's environments in this package's terms.

    Raises:
        ConfigError: actions or observations are of a space that can't be learned.
    """
    obs_space = env.single_observation_space
    action_space = env.single_action_space
    if not isinstance(obs_space, gym.spaces.Box):
        raise ConfigError(f"observations of {env} are a {obs_space}; only Box spaces can be learned from")
    shape, action = tuple(obs_space.shape), _action_of(action_space)
    if not is_picture(shape):
        return EnvSpec(shape, "float32", action)
    dtype, most = pixels_of(obs_space)
    return EnvSpec(shape, dtype, action, most)


def is_picture(shape: tuple[int, ...]) -> bool:
    """Whether an array of this shape is taken for an image: HWC or CHW, with sides of `SMALLEST_SIDE`."""
    if len(shape) != 3:
        return False
    sides = shape[:2] if channels_last(shape) else shape[1:]
    return min(sides) >= SMALLEST_SIDE


def channels_last(shape: tuple[int, ...]) -> bool:
    """Whether an image's channels are its last dimension: none is smaller. Else they are the first."""
    return shape[2] <= min(shape[:2])


def pixels_of(space: gym.spaces.Box) -> tuple[str, float]:
    """Return the type of an image's pixels, and their greatest value: 1 where they are to stay as they are.

    Pixels that aren't bytes or truth values become float32; bounded ones are scaled by their bounds.
    """
    if space.dtype == np.bool_:
        return "bool", 1.0
    most = float(np.abs(np.stack((space.low, space.high)).astype(np.float64)).max())
    if not math.isfinite(most) or most > 1e30:  # open, or as good as that
        most = 1.0
    return "uint8" if space.dtype == np.uint8 else "float32", most or 1.0


def _action_of(space: gym.Space[Any]) -> Action:
    """Return an action space in this package's terms.

    Raises:
        ConfigError: no policy here has actions like that.
    """
    match space:
        case gym.spaces.Discrete():
            return Discrete(int(space.n))
        case gym.spaces.MultiDiscrete():
            return MultiDiscrete(tuple(int(size) for size in space.nvec.reshape(-1)))
        case gym.spaces.MultiBinary():
            return MultiBinary(int(np.prod(space.shape)))
        case gym.spaces.Box() if np.issubdtype(space.dtype, np.floating) and np.prod(space.shape):
            low = np.asarray(space.low, dtype=np.float32).reshape(-1)
            high = np.asarray(space.high, dtype=np.float32).reshape(-1)
            return Continuous(low.size, low, high)
        case gym.spaces.Box():
            advice = "a Box of actions has numbers of a float type; make whole ones a MultiDiscrete"
        case gym.spaces.Dict() | gym.spaces.Tuple():
            advice = "several actions at once are one MultiDiscrete, MultiBinary or Box; wrap the environment"
        case _:
            advice = "wrap the environment"
    raise ConfigError(
        f"actions are a {space}, which no policy here can take; Discrete, MultiDiscrete, MultiBinary and Box "
        f"of floats can be learned: {advice}"
    )


def _make_by_entry_point(config: EnvConfig) -> Any:
    """Build gymnasium's own vectorised environment, with its time limit overridden where asked."""
    kwargs: dict[str, Any] = dict(config.kwargs)
    if config.max_episode_steps is not None:
        kwargs["max_episode_steps"] = config.max_episode_steps
    return gym.make_vec(config.id, config.num_envs, vectorization_mode="vector_entry_point", **kwargs)


def _guarded(config: EnvConfig, build: Callable[[], Any]) -> Any:
    """Run ``build``, mapping gymnasium's errors to ``ConfigError`` with a hint."""
    try:
        return build()
    except (gym.error.UnregisteredEnv, gym.error.DeprecatedEnv) as error:
        near = difflib.get_close_matches(config.id, list(gym.registry), n=3, cutoff=0.4)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise ConfigError(f"env.id {config.id!r} is not an environment of gymnasium{hint}") from error
    except (gym.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        extra = next((name for word, name in EXTRAS.items() if word in str(error)), None)
        hint = f"; try: pip install 'p2pdrl[{extra}]'" if extra else ""
        raise ConfigError(f"env.id {config.id!r} needs a missing package: {error}{hint}") from error
    except (TypeError, gym.error.Error) as error:
        raise ConfigError(f"env.kwargs of {config.id!r} were refused: {error}") from error


def _register_atari() -> None:
    """Make the ``ALE/`` ids known."""
    try:
        gym.register_envs(importlib.import_module("ale_py"))
    except ImportError as error:
        raise ConfigError("ALE/ environments need a package; try: pip install 'p2pdrl[atari]'") from error
