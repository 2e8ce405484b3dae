"""Observations of bytes that aren't colour images: vectors, grey images, boards."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium as gym
import numpy as np
import pytest
import torch

from p2pdrl.config.task import EnvConfig, NetworkConfig, PPOConfig, TaskConfig
from p2pdrl.rl.envs import make_scalar_env, make_vector_env
from p2pdrl.rl.evaluate import evaluate
from p2pdrl.rl.networks.entries import VectorEntries
from p2pdrl.rl.registry import build_trainer


class Bytes(gym.Env):
    """Shows bytes at random, whatever is done; an episode has eight steps."""

    action_space = gym.spaces.Discrete(3)

    def __init__(self, shape: tuple[int, ...], most: int = 255) -> None:
        self.observation_space = gym.spaces.Box(0, most, shape, np.uint8)
        self.most, self.steps = most, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._seen(), {}

    def step(self, action):
        self.steps += 1
        return self._seen(), 1.0, self.steps == 8, False, {}

    def _seen(self):
        return self.np_random.integers(0, self.most + 1, self.observation_space.shape, np.uint8)


class SeveralBytes(Bytes):
    """Two of them, each an entry of its own."""

    def __init__(self) -> None:
        super().__init__((4,))
        each = self.observation_space
        self.observation_space = gym.spaces.Dict(a=each, b=gym.spaces.Box(0, 1, (2,), np.uint8))

    def _seen(self):
        return {"a": np.full(4, 255, np.uint8), "b": np.ones(2, np.uint8)}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    gym.register("Bytes-v0", Bytes)
    gym.register("SeveralBytes-v0", SeveralBytes)
    yield
    del gym.registry["Bytes-v0"], gym.registry["SeveralBytes-v0"]


def bytes_of(shape: tuple[int, ...], **kwargs: int) -> EnvConfig:
    return EnvConfig(id="Bytes-v0", num_envs=2, kwargs={"shape": shape, **kwargs})


@pytest.mark.parametrize("shape", [(128,), (10, 10), (2, 3, 4, 5)])
def test_vectors_and_boards_are_scaled_to_one(shape):
    env = make_vector_env(bytes_of(shape), seed=0)
    obs_BX = env.reset()
    assert (env.spec.obs_shape, env.spec.obs_dtype, env.spec.is_image) == (shape, "float32", False)
    raw = gym.make("Bytes-v0", shape=shape)
    (seen, _), (scaled, _) = raw.reset(seed=5), make_scalar_env(bytes_of(shape)).reset(seed=5)
    assert (scaled.dtype, obs_BX.shape) == (np.float32, (2, *shape))
    np.testing.assert_array_equal(scaled, (seen.astype(np.float64) / 255).astype(np.float32))


def test_flags_of_bytes_stay_nought_and_one():
    env = make_vector_env(bytes_of((100,), most=1), seed=0)
    assert np.unique(env.reset()).tolist() == [0.0, 1.0]


def test_several_entries_of_bytes_are_scaled_each_by_its_own_bound():
    env = make_vector_env(EnvConfig(id="SeveralBytes-v0", num_envs=1), seed=0)
    rows_BX = torch.from_numpy(env.reset())
    assert rows_BX.dtype == torch.uint8
    assert VectorEntries(env.spec.layout.inputs)(rows_BX).tolist() == [[1.0] * 6]


def test_a_grey_image_has_one_channel_of_bytes():
    env = make_vector_env(bytes_of((40, 50)), seed=0)
    obs_BX = env.reset()
    assert (env.spec.obs_shape, env.spec.obs_dtype, env.spec.is_image) == ((40, 50, 1), "uint8", True)
    assert (obs_BX.shape, obs_BX.dtype) == ((2, 40, 50, 1), np.uint8)


@pytest.mark.parametrize("shape", [(40, 50, 3), (4, 40, 50)])
def test_colour_and_stacked_images_stay_as_they_are(shape):
    env = make_vector_env(bytes_of(shape), seed=0)
    assert (env.spec.obs_shape, env.spec.obs_dtype) == (shape, "uint8")


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize(
    ("shape", "kinds"),
    [
        ((128,), ("auto", "transformer")),
        ((6, 7), ("auto",)),
        ((40, 48), ("auto", "impala_resnet", "transformer")),
    ],
)
def test_a_trainer_learns_from_them_and_is_evaluated(shape, kinds, core):
    for kind in kinds:
        network = NetworkConfig(
            kind=kind, core=core, core_size=8, hidden=(16,), channels=(4,), layers=1, width=16, heads=2
        )
        algorithm = PPOConfig(unroll_steps=4, epochs=1, minibatches=1)
        task = TaskConfig(env=bytes_of(shape), network=network, algorithm=algorithm)
        trainer = build_trainer(task, 0, "cpu")
        before = trainer.flat.copy()
        trainer.step()
        assert np.isfinite(trainer.flat).all()
        assert (trainer.flat != before).any()
        evaluate(trainer.policy, task.env, episodes=2, greedy=True, seed=1)
