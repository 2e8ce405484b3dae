"""Entries of dictionary observations; MinAtar and Minigrid where they are installed."""

from __future__ import annotations

import copy
import importlib.util

import gymnasium as gym
import numpy as np
import pytest

from p2pdrl.config.task import EnvConfig, MinigridConfig, NetworkConfig, PPOConfig, TaskConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.entries import with_entries
from p2pdrl.rl.envs import make_scalar_env, make_vector_env
from p2pdrl.rl.registry import build_trainer

minatar = pytest.mark.skipif(
    importlib.util.find_spec("minatar") is None, reason="wants MinAtar: pip install 'p2pdrl[minatar]'"
)
minigrid = pytest.mark.skipif(
    importlib.util.find_spec("minigrid") is None, reason="wants Minigrid: pip install 'p2pdrl[minigrid]'"
)
EMPTY = "MiniGrid-Empty-5x5-v0"


class Told(gym.Env):
    observation_space = gym.spaces.Dict(
        a=gym.spaces.Box(0, 1, (2,)), b=gym.spaces.Discrete(3), text=gym.spaces.Text(9)
    )
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return {"a": np.zeros(2, np.float32), "b": 1, "text": "go"}, {}

    def step(self, action):
        return {"a": np.ones(2, np.float32), "b": 2, "text": "on"}, 0.0, False, False, {}


def test_texts_are_left_out():
    env = with_entries(Told(), ())
    assert set(env.observation_space.spaces) == {"a", "b"}
    assert set(env.reset()[0]) == {"a", "b"}


def test_a_single_entry_stands_for_itself():
    env = with_entries(Told(), ("a",))
    assert env.observation_space == Told.observation_space["a"]
    assert env.reset()[0].tolist() == [0.0, 0.0]
    assert env.step(0)[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("keys", [("c",), ("a", "c")])
def test_an_entry_that_there_is_not_is_told_with_those_that_there_are(keys):
    with pytest.raises(ConfigError, match=r"no entry c; there are a, b, text"):
        with_entries(Told(), keys)


def test_entries_are_for_dictionaries():
    with pytest.raises(ConfigError, match="observation_keys"):
        make_scalar_env(EnvConfig(observation_keys=("a",)))


@minatar
@pytest.mark.parametrize("game", ["Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders"])
def test_minatar_is_what_its_package_shows(game):
    config = EnvConfig(id=f"MinAtar/{game}-v1", num_envs=2)
    env = make_vector_env(config, seed=2**32 - 1)
    native = gym.make(config.id).unwrapped
    obs = env.reset()
    assert obs.shape[1:] == native.observation_space.shape
    assert set(np.unique(obs)) <= {0, 1}
    native.reset(seed=env._seeds[0])
    for action in (0, 1, 2, 0, 1) * 4:
        expected, reward, ended, *_ = native.step(action)
        obs, rewards, terminated, _ = env.step(np.full(2, action))
        np.testing.assert_array_equal(obs[0], expected)
        assert (rewards[0], terminated[0]) == (reward, ended)
        if ended:
            break
    assert all(seed < 2**31 for seed in env._seeds)


@minigrid
def test_minigrids_cells_are_planes_of_which_each_number_names_one():
    env = make_scalar_env(EnvConfig(id=EMPTY, observation_keys=("image",)))
    assert env.observation_space.shape == (21, 7, 7)
    planes = env.reset(seed=3)[0]
    native = gym.make(EMPTY)
    cells = native.reset(seed=3)[0]["image"]
    for (row, column), _ in np.ndenumerate(cells[..., 0]):
        kind, colour, state = cells[row, column]
        assert np.flatnonzero(planes[:, row, column]).tolist() == [kind, 11 + colour, 17 + state]


@minigrid
def test_minigrid_is_played_without_its_text():
    config = EnvConfig(id=EMPTY, num_envs=2)
    task = TaskConfig(env=config, network=NetworkConfig(hidden=(16,)), algorithm=PPOConfig(unroll_steps=16))
    trainer = build_trainer(task, 0, "cpu")
    assert trainer.step().env_steps > 0


def _state(world):
    carried = world.carrying
    return world.grid.encode().tolist(), tuple(world.agent_pos), world.agent_dir, carried and carried.encode()


@minigrid
@pytest.mark.parametrize("world", ["DoorKey-6x6", "UnlockPickup", "LavaGapS5"])
def test_what_minigrid_masks_would_have_done_nothing(world):
    config = EnvConfig(id=f"MiniGrid-{world}-v0", minigrid=MinigridConfig(mask_idle=True))
    env = make_scalar_env(config)
    rng = np.random.default_rng(0)
    idle, useful = 0, set()
    for episode in range(3):
        _, info = env.reset(seed=episode)
        for _ in range(100):
            mask, before = info["action_mask"], _state(env.unwrapped)
            for action in range(2, 6):
                tried = copy.deepcopy(env)
                tried.step(action)
                changed = _state(tried.unwrapped) != before
                assert mask[action] or not changed
                idle += not mask[action]
                if mask[action] and action > 2:
                    assert changed
                    useful.add(action)
            assert not mask[6]
            assert mask[:3].all()
            *_, ended, _, info = env.step(rng.choice(np.flatnonzero(mask)))
            if ended:
                break
    assert idle > 100
    assert useful == (set() if world == "LavaGapS5" else {3, 4, 5})


@minigrid
def test_done_is_left_where_a_mission_asks_for_it():
    config = EnvConfig(id="MiniGrid-GoToDoor-5x5-v0", minigrid=MinigridConfig(mask_idle=True))
    assert make_scalar_env(config).reset(seed=0)[1]["action_mask"][6]


@minigrid
def test_minigrids_masks_reach_the_policy():
    env = EnvConfig(id="MiniGrid-DoorKey-5x5-v0", num_envs=2, minigrid=MinigridConfig(mask_idle=True))
    assert make_vector_env(env, 0).spec.layout.mask is not None
