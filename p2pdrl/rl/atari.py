"""Atari 2600 games: the Arcade Learning Environment with DQN's preprocessing, as one vector environment.

``envs`` builds it. Frames are made by ``ale_py``'s own vector environment, which emulates, resizes and
stacks in C++ threads; what it can't do (game modes, difficulties, drawing) gymnasium's wrappers do, one
environment after the other. Both give the same pictures and rewards for the same actions (see the tests);
only their random numbers differ: no-op starts and sticky actions. Episodes that end with a life are made
here, for both: ``ale_py``'s own ``episodic_life`` begins a new game at each lost life.

Preprocessing: Mnih 2015 (doi 10.1038/nature14236), Methods; sticky actions: Machado 2018 (arXiv 1709.06009),
section 5.2; lost lives that end episodes are discussed in its section 4.1.

Shape suffixes: B environments, K stacked frames, H height, W width.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from p2pdrl.config.task import AtariConfig, EnvConfig
from p2pdrl.errors import ConfigError

__all__ = ["AtariGames", "make_atari_env", "make_atari_vector", "make_plain_atari", "register_atari"]

Array = npt.NDArray[Any]

NOOP = 0
"""The first action of every game's set that has lives."""
MAX_FRAMES = 108_000
"""Of an episode: 30 minutes of play (Machado 2018, section 3.1)."""


def register_atari() -> None:
    """Make the ids known, and the emulator quiet.

    Raises:
        ImportError: ``ale_py`` isn't there.
    """
    ale_py = importlib.import_module("ale_py")
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gym.register_envs(ale_py)


class AtariGames(gym.vector.VectorWrapper):
    """Games whose observations are stacked frames, and which may end episodes with lost lives.

    Behind a lost life the episode begins as others do here (see ``envs``): the next step ignores its action,
    takes no action or FIRE instead, and returns an observation without frames of the life before. What that
    step pays counts in the game's return, but belongs to nobody's action.

    Args:
        games: step, with lives among their infos.
        atari: how they are played.
        first_action: taken where an episode begins in a running game.

    Attributes:
        frame_stack: K.
        lives_lost_B: of the last step's ends, those of a life in a game that goes on.
    """

    def __init__(
        self, games: gym.vector.VectorEnv[Any, Any, Any], atari: AtariConfig, first_action: int
    ) -> None:
        super().__init__(games)
        self.frame_stack = atari.frame_stack
        self.lives_lost_B = np.zeros(games.num_envs, dtype=np.bool_)
        self._episodic_life = atari.episodic_life
        self._first_action = first_action
        self._lives_B: Array = np.zeros(games.num_envs, dtype=np.int64)
        self._over_B = np.zeros(games.num_envs, dtype=np.bool_)
        self._ages_B = np.full(games.num_envs, atari.frame_stack)
        """Steps since a life was lost; at least K - 1 where no frame of an earlier one can be seen."""

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin every game anew.

        Args:
            seed: a list of one for each game, below 2**31.
            options: handed on.
        """
        if seed is not None and not isinstance(self.env, SyncVectorEnv):
            seed = np.array(seed, dtype=np.int64)
        obs_BKHW, info = self.env.reset(seed=seed, options=options)
        self.lives_lost_B[:] = False
        self._over_B[:] = False
        self._ages_B[:] = self.frame_stack
        if self._episodic_life:
            self._lives_B = info["lives"]
        return obs_BKHW, info

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Take one step in every game."""
        if not self._episodic_life:
            return self.env.step(actions)
        begins_B = self.lives_lost_B
        if begins_B.any():
            actions = np.where(begins_B, self._first_action, actions)
        obs_BKHW, rewards_B, terminated_B, truncated_B, info = self.env.step(actions)
        lives_B = info["lives"]
        resets_B, self._over_B = self._over_B, terminated_B | truncated_B
        # a new game has fewer lives than one that was cut with lives it had won: none is lost there
        lost_B = (lives_B < self._lives_B) & (lives_B > 0) & ~(self._over_B | resets_B)
        self._ages_B = np.where(begins_B, 0, self._ages_B + 1)
        self._ages_B[resets_B] = self.frame_stack  # the emulator's own stack has been emptied
        for number in np.flatnonzero(self._ages_B < self.frame_stack - 1).tolist():
            obs_BKHW[number, : self.frame_stack - 1 - self._ages_B[number]] = 0
        self._lives_B, self.lives_lost_B = lives_B, lost_B
        return obs_BKHW, rewards_B, terminated_B | lost_B, truncated_B, info


def make_atari_vector(config: EnvConfig, threads: int) -> AtariGames:
    """Build ``config.num_envs`` preprocessed games; observations are uint8 KHW, rewards raw.

    Args:
        threads: that emulate; results don't depend on it.

    Raises:
        ConfigError: an argument of the emulator's that preprocessing sets, or no OpenCV for one it hands on.
    """
    if config.kwargs:
        copies: list[Callable[[], gym.Env[Any, Any]]] = [
            lambda: make_atari_env(config) for _ in range(config.num_envs)
        ]
        games: Any = SyncVectorEnv(copies, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)
        actions = games.envs[0].unwrapped.get_action_meanings()
    else:
        games = _in_threads(config, threads)
        actions = [action.name for action in games.ale.get_action_set()]
    fires = config.atari.fire_reset and "FIRE" in actions
    return AtariGames(games, config.atari, actions.index("FIRE") if fires else NOOP)


def _in_threads(config: EnvConfig, threads: int) -> Any:
    atari, usual = config.atari, gym.spec(config.id).kwargs
    vector = importlib.import_module("ale_py.vector_env")
    return vector.AtariVectorEnv(
        usual["game"],
        config.num_envs,
        num_threads=max(1, min(threads, config.num_envs)),
        max_num_frames_per_episode=_most_steps(config) * atari.frame_skip,
        repeat_action_probability=_stickiness(config),
        full_action_space=atari.full_action_space,
        autoreset_mode=AutoresetMode.NEXT_STEP,
        img_height=atari.screen_size,
        img_width=atari.screen_size,
        stack_num=atari.frame_stack,
        frameskip=atari.frame_skip,
        maxpool=atari.frame_skip > 1,
        noop_max=atari.noop_max,
        episodic_life=False,  # it would begin a new game at each lost life
        reward_clipping=False,
        use_fire_reset=atari.fire_reset,
    )


def make_atari_env(config: EnvConfig, render_mode: str | None = None) -> gym.Env[Any, Any]:
    """Build one preprocessed game from gymnasium's wrappers; its episodes are whole games.

    Raises:
        ConfigError: OpenCV is missing.
    """
    atari = config.atari
    if "obs_type" in config.kwargs:
        raise ConfigError("env.kwargs.obs_type is for unprocessed games: set env.atari.preprocess = false")
    given: dict[str, Any] = dict(config.kwargs)
    if render_mode is not None:
        given["render_mode"] = render_mode
    env: gym.Env[Any, Any] = gym.make(
        config.id,
        disable_env_checker=True,
        frameskip=1,
        repeat_action_probability=_stickiness(config),
        full_action_space=atari.full_action_space,
        max_num_frames_per_episode=0,  # unlimited: it would count the frames before the first observation
        **given,
    )
    unwrapped: Any = env.unwrapped
    meanings: list[str] = unwrapped.get_action_meanings()
    if atari.fire_reset and "FIRE" in meanings:
        env = _FireReset(env, meanings.index("FIRE"))
    try:
        env = gym.wrappers.AtariPreprocessing(
            env, noop_max=atari.noop_max, frame_skip=atari.frame_skip, screen_size=atari.screen_size
        )
    except gym.error.DependencyNotInstalled as error:
        raise ConfigError(f"env.id {config.id!r} needs OpenCV; try: pip install 'p2pdrl[atari]'") from error
    env = gym.wrappers.FrameStackObservation(env, atari.frame_stack, padding_type="zero")
    return gym.wrappers.TimeLimit(env, _most_steps(config))


def make_plain_atari(config: EnvConfig, render_mode: str | None = None) -> gym.Env[Any, Any]:
    """Build one game as the emulator gives it."""
    given: dict[str, Any] = dict(config.kwargs)
    if render_mode is not None:
        given["render_mode"] = render_mode
    return gym.make(
        config.id,
        disable_env_checker=True,
        max_episode_steps=config.max_episode_steps,
        repeat_action_probability=_stickiness(config),
        full_action_space=config.atari.full_action_space,
        **given,
    )


def _most_steps(config: EnvConfig) -> int:
    """Steps after which an episode is truncated."""
    return config.max_episode_steps or MAX_FRAMES // config.atari.frame_skip


def _stickiness(config: EnvConfig) -> float:
    given = config.atari.repeat_action_probability
    return float(gym.spec(config.id).kwargs["repeat_action_probability"] if given is None else given)


class _FireReset(gym.Wrapper[Any, Any, Any, Any]):
    """Presses FIRE for one frame after a reset, as ``ale_py``'s vector environment does."""

    def __init__(self, env: gym.Env[Any, Any], fire: int) -> None:
        super().__init__(env)
        self._fire = fire

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        self.env.reset(seed=seed, options=options)
        obs, _, _, _, info = self.env.step(self._fire)
        return obs, info
