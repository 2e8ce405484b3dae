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
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from p2pdrl.config.environments import family_of, install_hint, is_atari, successor_of
from p2pdrl.config.task import EnvConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.atari import AtariGames, make_atari_env, make_atari_vector, make_plain_atari, register_atari
from p2pdrl.rl.entries import IdleActionMask, one_hot_cells, with_entries
from p2pdrl.rl.imports import load_named
from p2pdrl.rl.observations import (
    SMALLEST_PICTURE,
    ObservationLayout,
    ObservationPacker,
    check_observations,
    is_picture,
    layout_of,
    pixels_of,
)
from p2pdrl.rl.serial_env import SerialVectorEnv

__all__ = [
    "Action",
    "Continuous",
    "Discrete",
    "EnvSpec",
    "MultiBinary",
    "MultiDiscrete",
    "VectorEnv",
    "describe",
    "make_scalar_env",
    "make_vector_env",
]

Array = npt.NDArray[Any]

VETTED_VECTOR_ENVS = frozenset({"CartPole-v1"})
"""Ids whose ``vector_entry_point`` gives the same transitions and ends as the scalar one (see the tests)."""

MASKABLE = gym.spaces.Discrete | gym.spaces.MultiDiscrete
"""Action spaces that masks can be of."""

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

    @property
    def choices(self) -> int:
        """How many values each number of an action has, at most; 0 where it isn't a whole number."""
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

    @property
    def choices(self) -> int:
        """As of `Discrete`."""
        return max(self.sizes)

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

    @property
    def choices(self) -> int:
        """As of `Discrete`."""
        return 2

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

    @property
    def choices(self) -> int:
        """As of `Discrete`."""
        return 0

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
        layout: of observations of several entries, or with action masks: what lies where in their rows, which
            are bytes then (uint8 X); else None.
        frame_stack: so many pictures of successive steps make an observation, along its first dimension, the
            newest last; those before an episode's first are zero. 1: it is what the environment shows.
    """

    obs_shape: tuple[int, ...]
    obs_dtype: str
    action: Action
    obs_most: float = 255.0
    layout: ObservationLayout | None = None
    frame_stack: int = 1

    @property
    def is_image(self) -> bool:
        """Whether observations are pictures: three dimensions, both sides of `SMALLEST_SIDE` or more."""
        return is_picture(self.obs_shape)


class VectorEnv:
    """A batch of environments that reset themselves.

    Args:
        env: gymnasium's vector environment, with autoreset mode NEXT_STEP.
        seed: every random stream of the batch follows from it.
        action_mask: key of masks; see ``EnvConfig.action_mask``.
        info_mask: whether masks come with the environments' ``info``.
        step_delay_s: seconds slept at each step of all, to emulate a slow environment.
        seed_bits: that each environment's own seed has: gymnasium's take 32, not everybody's.

    Attributes:
        action_shape: of one action, as the environments' own space has it.
        action_dtype: likewise.
    """

    def __init__(
        self,
        env: gym.vector.VectorEnv[Any, Any, Any],
        seed: int,
        *,
        action_mask: str = "action_mask",
        info_mask: bool = False,
        seed_bits: Literal[31, 32] = 32,
        step_delay_s: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.spec = describe(env, action_mask=action_mask, info_mask=info_mask)
        self.num_envs: int = env.num_envs
        layout = self.spec.layout
        self._packer = None if layout is None else ObservationPacker(layout, self.num_envs, action_mask)
        self._env = env
        self._step_delay_s = step_delay_s
        self._sleep = sleep
        words = np.random.SeedSequence(seed).generate_state(self.num_envs) >> (32 - seed_bits)
        # given one integer, a SyncVectorEnv takes seed, seed + 1, …: nodes seeded alike would share episodes
        self._seeds: Any = [int(word) for word in words]
        if not isinstance(env, SyncVectorEnv | SerialVectorEnv | AtariGames):
            self._seeds = self._seeds[0]
        space = env.single_action_space
        self._action_start: Any = None
        if isinstance(space, gym.spaces.Discrete) and space.start:
            self._action_start = int(space.start)
        elif isinstance(space, gym.spaces.MultiDiscrete) and space.start.any():
            self._action_start = space.start.reshape(-1).astype(np.int64)
        self._reshape = not isinstance(space, gym.spaces.Discrete)
        self.action_shape: tuple[int, ...] = tuple(space.shape or ())
        self.action_dtype: np.dtype[Any] = np.dtype(space.dtype)

    def reset(self) -> Array:
        """Start every episode anew from the seed and return the first observations, BX."""
        obs_BX, infos = self._env.reset(seed=self._seeds)
        return np.asarray(obs_BX) if self._packer is None else self._packer.pack(obs_BX, infos)

    @property
    def steps_some(self) -> bool:
        """Whether `step` can leave environments where they are."""
        return isinstance(self._env, SerialVectorEnv)

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array]:
        """Take one step in every environment, or, where `steps_some`, in as many as there are actions.

        Args:
            actions: B integers from zero, or B x A of them, or B x A floats, which are clipped to the bounds
                here and nowhere else. B may be less than all: the first ones.

        Returns:
            obs_BX, rewards_B, terminated_B, truncated_B; arrays may be overwritten by the next call.
        """
        actions = self.to_space(actions)
        obs_BX, rewards_B, terminated_B, truncated_B, infos = self._env.step(actions)
        if self._packer is not None:
            obs_BX = self._packer.pack(obs_BX, infos)
        if self._step_delay_s > 0.0:
            self._sleep(self._step_delay_s * len(rewards_B) / self.num_envs)
        return obs_BX, rewards_B, terminated_B, truncated_B

    def to_space(self, actions: Array) -> Array:
        """Return any number of actions, as `step` takes them, as elements of the environment's space."""
        if isinstance(self.spec.action, Continuous):
            actions = np.clip(actions, self.spec.action.low, self.spec.action.high)
            return actions.reshape(len(actions), *self.action_shape).astype(self.action_dtype, copy=False)
        if self._action_start is not None:
            actions = actions + self._action_start
        if self._reshape:
            actions = actions.reshape(len(actions), *self.action_shape)
            actions = actions.astype(self.action_dtype, copy=False)
        return actions

    def games_over(self, ends_B: Array) -> Array:
        """Return which of the last step's ends returns are reported of: all but those of a life only."""
        if isinstance(self._env, AtariGames):
            return ends_B & ~self._env.lives_lost_B
        return ends_B

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

    ``allow_import`` permits ids like ``module:name``, which run code from ``module``.

    Raises:
        ConfigError: unknown id, bad constructor arguments, missing package, or spaces no policy here fits.
    """
    _prepare(config, allow_import=allow_import)
    family = family_of(config.id)
    foreign = ":" in config.id or (family is not None and family.extra in REGISTER)
    if is_atari(config.id) and config.atari.preprocess:
        env: Any = _guarded(config, lambda: make_atari_vector(config, torch.get_num_threads()))
    elif config.id in VETTED_VECTOR_ENVS:
        env = _guarded(config, lambda: _make_by_entry_point(config))
    else:
        copies: list[Callable[[], gym.Env[Any, Any]]] = [
            lambda: make_scalar_env(config, allow_import=allow_import) for _ in range(config.num_envs)
        ]
        env = _one_after_another(config, copies)
    return VectorEnv(
        env,
        seed,
        action_mask=config.action_mask,
        info_mask=_has_info_mask(env, config),
        seed_bits=31 if foreign else 32,
        step_delay_s=step_delay_s,
        sleep=sleep,
    )


def _one_after_another(
    config: EnvConfig, copies: list[Callable[[], gym.Env[Any, Any]]]
) -> gym.vector.VectorEnv[Any, Any, Any]:
    """Step copies in turn: by gymnasium where infos are read or observations have entries."""
    first = copies[0]()
    made = [lambda: first, *copies[1:]]
    _action_of(first.action_space)
    plain = isinstance(first.observation_space, gym.spaces.Box)
    if plain and config.action_mask and isinstance(first.action_space, MASKABLE):
        plain = config.action_mask not in first.reset(seed=0)[1]
    if plain:
        return SerialVectorEnv(made)
    # copy=False: observations are copied into the unroll at once
    return SyncVectorEnv(made, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)


def _has_info_mask(env: gym.vector.VectorEnv[Any, Any, Any], config: EnvConfig) -> bool:
    """Whether environments say with their observations which actions are allowed; one is asked, by a reset.

    Raises:
        ConfigError: a key was given that is in neither info nor observations, or masks have another size.
    """
    key, space = config.action_mask, env.single_observation_space
    actions = env.single_action_space
    can_mask = isinstance(actions, MASKABLE)
    in_entry = isinstance(space, gym.spaces.Dict) and key in space.spaces
    if not key or in_entry:
        return False
    found = None
    if can_mask and isinstance(env, SyncVectorEnv):
        _, info = env.envs[0].reset(seed=0)
        found = info.get(key)
    if found is not None:
        wanted = _action_of(actions).outputs
        if np.size(found) != wanted:
            raise ConfigError(
                f"info[{key!r}] of {config.id} has {np.size(found)} numbers, a mask of its actions {wanted}; "
                "if it isn't a mask, set task.env.action_mask to another name, or to nothing"
            )
        return True
    if key != EnvConfig().action_mask:
        raise ConfigError(
            f"task.env.action_mask = {key!r} is neither in the info of {config.id} nor an entry of its "
            "observations, or its actions are of a kind that has no masks; leave that key out"
        )
    return False


def make_scalar_env(
    config: EnvConfig, *, allow_import: bool = False, render_mode: str | None = None
) -> gym.Env[Any, Any]:
    """Build one environment whose observations are boxes of floats, images (HWC or CHW), or Dict or Tuple.

    Raises:
        ConfigError: as in ``make_vector_env``.
    """
    _prepare(config, allow_import=allow_import)
    drawn = {} if render_mode is None else {"render_mode": render_mode}
    if is_atari(config.id):
        make = make_atari_env if config.atari.preprocess else make_plain_atari
        return _with_usable_bytes(_guarded(config, lambda: make(config, render_mode)))
    if _is_own_class(config):
        return _finished(_make_own(config, drawn), config)
    env: gym.Env[Any, Any] = _guarded(
        config,
        lambda: gym.make(
            config.id,
            max_episode_steps=config.max_episode_steps,
            disable_env_checker=True,  # checks every step: costs more than CartPole's physics
            **config.kwargs,
            **drawn,
        ),
    )
    return _finished(env, config)


def _is_own_class(config: EnvConfig) -> bool:
    """Whether the id names what is in a module, not what the module registers."""
    if ":" not in config.id:
        return False
    module, _, name = config.id.partition(":")
    try:
        importlib.import_module(module)  # may register the name
    except ImportError as error:
        raise ConfigError(
            f"task.env.id {config.id!r} can't be imported: {error}; is its folder on PYTHONPATH everywhere?"
        ) from error
    return name not in gym.registry


def _make_own(config: EnvConfig, drawn: dict[str, str]) -> gym.Env[Any, Any]:
    """Make a user's environment from its class, or whatever else makes one."""
    try:
        env = load_named(config.id)(**config.kwargs, **drawn)
    except TypeError as error:
        raise ConfigError(f"task.env.kwargs of {config.id!r} were refused: {error}") from error
    if not isinstance(env, gym.Env):
        raise ConfigError(
            f"task.env.id {config.id!r} makes a {type(env).__name__}, which is no gymnasium.Env"
        )
    if config.max_episode_steps is None:
        return env
    return gym.wrappers.TimeLimit(env, config.max_episode_steps)


def _finished(env: gym.Env[Any, Any], config: EnvConfig) -> gym.Env[Any, Any]:
    """Bring an environment's observations to what networks take."""
    family = family_of(config.id)
    if family is not None and family.extra == "minigrid":
        if config.minigrid.mask_idle:
            done = any(word in config.id for word in ("GoTo", "BabyAI"))
            env = IdleActionMask(env, config.action_mask, done=done)
        env = one_hot_cells(env)
    env = with_entries(env, config.observation_keys)
    check_observations(env.observation_space)
    if not isinstance(env.observation_space, gym.spaces.Box | gym.spaces.Dict | gym.spaces.Tuple):
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


def describe(
    env: gym.vector.VectorEnv[Any, Any, Any], *, action_mask: str = "", info_mask: bool = False
) -> EnvSpec:
    """Return the spaces of one of the batch's environments in this package's terms.

    Args:
        action_mask: key of the action mask among a Dict's entries, if it is there.
        info_mask: whether masks come with ``info``.

    Raises:
        ConfigError: actions or observations are of a space that can't be learned.
    """
    space = env.single_observation_space
    action = _action_of(env.single_action_space)
    mask_size = action.outputs if isinstance(action, Discrete | MultiDiscrete) else 0
    if not isinstance(space, gym.spaces.Box) or (info_mask and mask_size):
        layout = layout_of(space, mask_key=action_mask, info_mask=info_mask, mask_size=mask_size)
        return EnvSpec((layout.nbytes,), "uint8", action, layout=layout)
    check_observations(space)
    shape = tuple(space.shape)
    if not is_picture(shape):
        return EnvSpec(shape, "float32", action)
    dtype, most = pixels_of(space)
    frame_stack = env.frame_stack if isinstance(env, AtariGames) else 1
    return EnvSpec(shape, dtype, action, obs_most=most, frame_stack=frame_stack)


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


def _prepare(config: EnvConfig, *, allow_import: bool) -> None:
    """Make the id known to gymnasium, and refuse one that runs code which nobody here has allowed.

    Raises:
        ConfigError: it isn't allowed, or its package is missing.
    """
    if ":" in config.id and not allow_import:
        raise ConfigError(
            f"task.env.id {config.id!r} imports a Python module, which runs its code; "
            "if you trust it give --allow-import, from Python allow_import=True"
        )
    successor = successor_of(config.id)
    if successor is not None:
        raise ConfigError(
            f"task.env.id {config.id!r} is not in this release of gymnasium; take {successor!r}"
        )
    family = family_of(config.id)
    register = None if family is None else REGISTER.get(family.extra)
    if family is None or register is None:
        return
    try:
        register()
    except ImportError as error:
        raise ConfigError(
            f"task.env.id {config.id!r} needs a missing package ({error}); try: {install_hint(family.extra)}"
        ) from error


def _register_minatar() -> None:
    if "MinAtar/Breakout-v1" not in gym.registry:
        importlib.import_module("minatar.gym").register_envs()


def _register_minigrid() -> None:
    gym.register_envs(importlib.import_module("minigrid"))


REGISTER: dict[str, Callable[[], None]] = {
    "atari": register_atari,
    "minatar": _register_minatar,
    "minigrid": _register_minigrid,
}
"""Extras whose packages gymnasium doesn't know by itself."""


def _guarded(config: EnvConfig, build: Callable[[], Any]) -> Any:
    """Run ``build``, mapping gymnasium's errors to ``ConfigError`` with a hint."""
    try:
        return build()
    except ConfigError:
        raise
    except (gym.error.UnregisteredEnv, gym.error.DeprecatedEnv) as error:
        near = difflib.get_close_matches(config.id, list(gym.registry), n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ": of your own, write module:name"
        raise ConfigError(f"task.env.id = {config.id!r} is no environment of gymnasium{hint}") from error
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        extra = next((name for word, name in EXTRAS.items() if word in str(error)), None)
        hint = f"; try: {install_hint(extra)}" if extra else ""
        raise ConfigError(
            f"task.env.id = {config.id!r} needs a package that is missing: {error}{hint}"
        ) from error
    except (TypeError, gym.error.Error) as error:
        argument = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if argument is not None:
            raise ConfigError(f"task.env.kwargs.{argument[1]}: {config.id} takes no such argument") from error
        raise ConfigError(f"task.env.kwargs of {config.id!r} were refused: {error}") from error
