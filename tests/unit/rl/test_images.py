"""Images of other types than bytes, and small ones: how they are described, stored and learned from."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium as gym
import numpy as np
import pytest
import torch

from p2pdrl.config.task import DQNConfig, EnvConfig, GradientsConfig, NetworkConfig, PPOConfig, TaskConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.envs import make_vector_env
from p2pdrl.rl.evaluate import evaluate
from p2pdrl.rl.networks.minatar_cnn import MinAtarCNN
from p2pdrl.rl.registry import build_trainer


class Corner(gym.Env):
    """A dot in one of two corners, each on a channel of its own; the action says in which.

    Args:
        high: 0 stands for no bounds.
    """

    action_space = gym.spaces.Discrete(2)

    def __init__(self, dtype: str = "bool", high: float = 1.0, low: float = 0.0, channels: int = 4) -> None:
        self.high = high
        bounds = (low, high) if high else (-np.inf, np.inf)
        kind = np.dtype(dtype).type
        self.observation_space = gym.spaces.Box(*bounds, (10, 10, channels), kind)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._seen(), {}

    def _seen(self):
        picture = np.zeros(self.observation_space.shape, self.observation_space.dtype)
        self.where = int(self.np_random.integers(2))
        picture[-self.where, 0, self.where] = self.high or 1.0
        return picture

    def step(self, action):
        reward = float(action == self.where)
        self.steps += 1
        return self._seen(), reward, self.steps == 8, False, {}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    gym.register("Corner-v0", Corner)
    yield
    del gym.registry["Corner-v0"]


KINDS = [
    ({"dtype": "bool"}, ("bool", 1.0)),
    ({"dtype": "bool", "channels": 10}, ("bool", 1.0)),
    ({"dtype": "uint8", "high": 255}, ("uint8", 255.0)),
    ({"dtype": "uint8", "high": 3}, ("uint8", 3.0)),
    ({"dtype": "float32"}, ("float32", 1.0)),
    ({"dtype": "float64", "high": 40.0, "low": -20.0}, ("float32", 40.0)),
    ({"dtype": "float32", "high": 0}, ("float32", 1.0)),
    ({"dtype": "int32", "high": 10}, ("float32", 10.0)),
]


@pytest.mark.parametrize(("kwargs", "expected"), KINDS)
def test_pixels_keep_their_type_and_are_scaled_by_their_bounds(kwargs, expected):
    env = make_vector_env(EnvConfig(id="Corner-v0", num_envs=2, kwargs=kwargs), seed=0)
    spec = env.spec
    assert spec.is_image
    assert (spec.obs_dtype, spec.obs_most) == expected
    env.close()


@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param(kwargs, marks=[pytest.mark.slow] * (number % 3 != 0))
        for number, (kwargs, _) in enumerate(KINDS)
    ],
)
@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_small_images_are_learned_from_with_minatars_network(kwargs, algorithm):
    env = EnvConfig(id="Corner-v0", num_envs=8, kwargs=kwargs, normalize_returns=False)
    options = (
        PPOConfig(unroll_steps=32, gae_lambda=0.0, learning_rate=5e-3)
        if algorithm == "ppo"
        else DQNConfig(learning_starts=64, gradient_steps=8, exploration_steps=1, learning_rate=2e-3)
    )
    task = TaskConfig(env=env, network=NetworkConfig(hidden=(16,)), algorithm=options)
    trainer = build_trainer(task, 1, "cpu")
    assert isinstance(trainer.policy.trunk, MinAtarCNN)
    for _ in range(12 if algorithm == "ppo" else 20):
        trainer.step()
    assert evaluate(trainer.policy, env, 8, greedy=True, seed=2).mean == 8.0
    trainer.close()


@pytest.mark.parametrize("env_id", ["Corner-v0", "CartPole-v1"])
def test_shared_layers_act_in_the_precision_that_is_asked_for(env_id):
    values, wanted = {}, {}
    for precision in ("float32", "bf16"):
        task = TaskConfig(
            env=EnvConfig(id=env_id, num_envs=8),
            algorithm=PPOConfig(unroll_steps=4),
            gradients=GradientsConfig(precision=precision),
        )
        trainer = build_trainer(task, 1, "cpu")
        unroll = trainer.source.next()
        assert unroll.values_T1B.dtype == unroll.log_probs_TB.dtype == torch.float32
        with torch.no_grad():
            values[precision] = unroll.values_T1B
            wanted[precision] = trainer.policy.values(unroll.obs_T1BX)  # float32
        trainer.close()
    torch.testing.assert_close(values["float32"], wanted["float32"])
    off = (values["bf16"] - wanted["bf16"]).abs().max()
    if env_id == "CartPole-v1":  # nothing is shared
        torch.testing.assert_close(values["bf16"], wanted["bf16"])
    else:
        assert 0.0 < off < 0.02 * wanted["bf16"].abs().max()


def test_scaled_images_are_not_normalised_as_well():
    def build(**kwargs):
        env = EnvConfig(id="Corner-v0", num_envs=2, kwargs=kwargs, normalize_observations=True)
        return build_trainer(TaskConfig(env=env, algorithm=PPOConfig(unroll_steps=8)), 1, "cpu")

    with pytest.raises(ConfigError, match="images are scaled"):
        build(dtype="float32", high=40.0)
    trainer = build(dtype="float32", high=0)
    assert np.isfinite(trainer.step().metrics["value_loss"])
    trainer.close()
