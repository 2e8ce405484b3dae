"""Environments with each kind of space, tasks that are played in them, and checkpoints of their policies."""

from __future__ import annotations

import base64
from typing import Any

import gymnasium as gym
import msgspec
import numpy as np

from p2pdrl.config.task import (
    A2CConfig,
    DiscreteSACConfig,
    DQNConfig,
    EnvConfig,
    NetworkConfig,
    PPOConfig,
    SACConfig,
    TaskConfig,
    TD3Config,
)
from p2pdrl.rl.inference import PolicyInference
from p2pdrl.tensors.checkpoint import Checkpoint
from p2pdrl.tensors.moments import Moments

BOX = gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)
IMAGE = gym.spaces.Box(0, 255, (3, 36, 36), np.uint8)
BOARD = gym.spaces.Box(0, 1, (6, 6, 4), np.bool_)
DICT = gym.spaces.Dict(
    {
        "joints": gym.spaces.Box(-np.inf, np.inf, (3,), np.float32),
        "tool": gym.spaces.Discrete(5, start=2),
        "gears": gym.spaces.MultiDiscrete([2, 3]),
        "switches": gym.spaces.MultiBinary(4),
        "bytes": gym.spaces.Box(0, 255, (2,), np.uint8),
    }
)
SEEN = gym.spaces.Dict({"camera": gym.spaces.Box(0, 255, (36, 36, 3), np.uint8), **DICT.spaces})
TUPLE = gym.spaces.Tuple((gym.spaces.Box(-1.0, 1.0, (2, 2), np.float32), gym.spaces.Discrete(3)))
ASKED = gym.spaces.Dict({**DICT.spaces, "action_mask": gym.spaces.MultiBinary(4)})
BOUNDED = gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 5.0], np.float32))


class Still(gym.Env[Any, Any]):
    """An environment in which nothing happens, of any spaces."""

    def __init__(self, observation: gym.Space[Any], action: gym.Space[Any], *, masks: int = 0) -> None:
        self.observation_space = observation
        self.action_space = action
        self._info = {"action_mask": np.ones(masks, np.int8)} if masks else {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(0 if seed is None else seed)
        return self.observation_space.sample(), self._info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        return self.observation_space.sample(), 0.0, False, False, self._info


ACTIONS: dict[str, gym.Space[Any]] = {
    "discrete": gym.spaces.Discrete(4, start=1),
    "multi_discrete": gym.spaces.MultiDiscrete([2, 3], start=[1, 0]),
    "multi_binary": gym.spaces.MultiBinary(3),
    "box": BOUNDED,
}
SPACES = {
    "vector": BOX, "image": IMAGE, "board": BOARD, "dict": DICT, "seen": SEEN, "tuple": TUPLE, "asked": ASKED,
}  # fmt: skip


def _make(observation: str, action: str, masks: int = 0) -> gym.Env[Any, Any]:
    return Still(SPACES[observation], ACTIONS[action], masks=masks)


gym.register("Still-v0", _make)


def task(observation: str, action: str = "discrete", *, masks: int = 0, **options: Any) -> TaskConfig:
    """A task in such an environment; a network of few weights."""
    normalizes = options.pop("normalizes", observation not in ("image", "board"))
    kwargs = {"observation": observation, "action": action, "masks": masks}
    network = {"hidden": (8, 8), **options.pop("network", {})}
    return TaskConfig(
        env=EnvConfig(id="Still-v0", kwargs=kwargs, num_envs=1, normalize_observations=normalizes),
        network=NetworkConfig(**network),
        algorithm=options.pop("algorithm", PPOConfig(epochs=1, minibatches=1)),
        **options,
    )


TASKS = {
    "vector": task("vector"),
    "vector-masked": task("vector", masks=4),
    "image": task("image"),
    "image-masked": task("image", masks=4),
    "board": task("board"),
    "dict": task("dict"),
    "dict-image": task("seen"),
    "dict-masked": task("asked"),
    "tuple": task("tuple"),
    "multi_discrete": task("vector", "multi_discrete"),
    "multi_discrete-masked": task("dict", "multi_discrete", masks=5),
    "multi_binary": task("vector", "multi_binary"),
    "box": task("vector", "box"),
    "box-tanh": task("dict", "box", network={"squash": "tanh"}),
    "box-sde": task("vector", "box", network={"exploration_noise": "sde", "rescale_actions": True}),
    "lstm": task("vector", network={"core": "lstm", "core_size": 6}),
    "gru-masked": task("asked", network={"core": "gru", "core_size": 6}, algorithm=A2CConfig()),
    "transformer": task("vector", network={"kind": "transformer", "width": 8, "heads": 2, "layers": 1}),
    "resnet": task("image", network={"kind": "impala_resnet", "channels": (4, 4)}),
    "dqn": task("vector", masks=4, network={"dueling": True, "noisy": True}, algorithm=DQNConfig()),
    "sac": task("dict", "box", algorithm=SACConfig()),
    "sac_discrete": task("vector", algorithm=DiscreteSACConfig()),
    "td3": task("vector", "box", algorithm=TD3Config()),
}
"""What is loaded and exported."""


def checkpoint(task: TaskConfig, seed: int = 0) -> Checkpoint:
    """A checkpoint of a policy whose weights are random, not as small as those of new ones."""
    drawn = PolicyInference(task, 0, allow_import=True)
    rng = np.random.default_rng(seed)
    params = np.concatenate([_moved(p.detach().numpy(), rng) for p in drawn.policy.parameters()])
    sidecar, meta = {}, {}
    layout = _layout(drawn)
    if drawn.normalizer is not None:
        shape = drawn.normalizer.shape
        moments = Moments.zeros(shape)
        moments.update(rng.normal(3.0, 2.0, (100, *shape)))
        sidecar = {
            "observations.count": np.array(moments.count),
            "observations.mean": moments.mean,
            "observations.m2": moments.m2,
        }
        items = [[name, list(a.shape), "float64", "moments"] for name, a in sidecar.items()]
        other = Moments.zeros(shape)
        other.update(rng.normal(-1.0, 1.0, (50, *shape)))
        packed = msgspec.msgpack.encode({"observations": msgspec.msgpack.encode(other.to_wire())})
        meta = {"sidecar_layout": items, "others_moments": base64.b64encode(packed).decode()}
    document = {"layout": layout, "task": msgspec.to_builtins(task), "env_steps": 1234, "policy_version": 7}
    return Checkpoint(params, sidecar, {**document, "mean_return": 9.5, **meta})


def _moved(weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Weights with noise that leaves what they make of unit size."""
    fan_in = weights[0].size if weights.ndim > 1 else 25
    return (weights + rng.normal(0.0, 1.0 / np.sqrt(fan_in), weights.shape)).astype(np.float32).reshape(-1)


def _layout(drawn: PolicyInference) -> list[Any]:
    from p2pdrl.tensors.layout import Layout, TensorEntry

    named = drawn.policy.named_parameters()
    return Layout(tuple(TensorEntry(name, tuple(p.shape), "float32") for name, p in named)).to_wire()


def observations(task: TaskConfig, count: int, seed: int = 0) -> tuple[Any, Any]:
    """A batch of observations, and of masks where they come beside them (else None)."""
    kwargs = task.env.kwargs
    rng = np.random.default_rng(seed)
    found = _batch(SPACES[str(kwargs["observation"])], count, rng)
    masks = int(kwargs["masks"])
    if not masks:
        return found, None
    return found, _allowing(rng, count, masks)


def _allowing(rng: np.random.Generator, count: int, actions: int) -> np.ndarray:
    allowed = rng.random((count, actions)) < 0.5
    allowed[np.arange(count), rng.integers(0, actions, count)] = True
    return allowed


def _batch(space: gym.Space[Any], count: int, rng: np.random.Generator) -> Any:
    match space:
        case gym.spaces.Dict():
            return {
                key: _allowing(rng, count, 4).astype(np.int8)
                if key == "action_mask"
                else _batch(inner, count, rng)
                for key, inner in space.spaces.items()
            }
        case gym.spaces.Tuple():
            return tuple(_batch(inner, count, rng) for inner in space.spaces)
        case gym.spaces.Discrete():
            return rng.integers(space.start, space.start + space.n, count)
        case gym.spaces.MultiDiscrete():
            return rng.integers(0, space.nvec, (count, len(space.nvec)))
        case gym.spaces.MultiBinary():
            return rng.integers(0, 2, (count, space.n)).astype(np.int8)
    assert isinstance(space, gym.spaces.Box)
    if space.dtype == np.uint8:
        return rng.integers(0, 256, (count, *space.shape)).astype(np.uint8)
    if space.dtype == np.bool_:
        return rng.random((count, *space.shape)) < 0.5
    return rng.normal(2.0, 3.0, (count, *space.shape)).astype(np.float32)


def one(batch: Any, index: int) -> Any:
    """One element of a batch."""
    if isinstance(batch, dict):
        return {key: one(value, index) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(one(value, index) for value in batch)
    return batch[index]
