"""One policy of each kind, and observations for it."""

from __future__ import annotations

import numpy as np
import torch

from p2pdrl.config.task import NetworkConfig
from p2pdrl.rl.envs import Continuous, Discrete, EnvSpec, MultiBinary, MultiDiscrete
from p2pdrl.rl.networks.lstm import RecurrentContext
from p2pdrl.rl.policy import ActorCritic

VECTOR = EnvSpec((5,), "float32", Discrete(3))
MATRIX = EnvSpec((2, 5), "float32", Discrete(3))
CONTROL = EnvSpec((5,), "float32", Continuous(2, np.full(2, -1.0), np.full(2, 1.0)))
FRAMES = EnvSpec((4, 36, 40), "uint8", Discrete(6))
PICTURE = EnvSpec((40, 36, 3), "uint8", Discrete(6))

TRANSFORMER = NetworkConfig(kind="transformer", width=16, heads=2, layers=2)
BOARD = EnvSpec((7, 8, 5), "bool", Discrete(4), 1.0)
LSTM = NetworkConfig(hidden=(8, 7), core="lstm", core_size=6)
GRU = NetworkConfig(hidden=(8, 7), core="gru", core_size=6)
CHOICES = EnvSpec((5,), "float32", MultiDiscrete((2, 4, 3)))
SWITCHES = EnvSpec((5,), "float32", MultiBinary(3))
RESNET = NetworkConfig(kind="impala_resnet", channels=(4, 6), hidden=(9,))

POLICIES: dict[str, tuple[EnvSpec, NetworkConfig]] = {
    "mlp": (VECTOR, NetworkConfig(hidden=(8, 7, 6))),
    "mlp of a matrix": (MATRIX, NetworkConfig()),
    "mlp for control": (CONTROL, NetworkConfig(hidden=(8,))),
    "squashed": (CONTROL, NetworkConfig(hidden=(8,), squash="tanh")),
    "state-dependent noise": (CONTROL, NetworkConfig(hidden=(8,), exploration_noise="sde")),
    "no hidden layer": (MATRIX, NetworkConfig(hidden=())),
    "nature cnn": (FRAMES, NetworkConfig(hidden=(16,))),
    "nature cnn, channels last": (PICTURE, NetworkConfig(kind="nature_cnn", hidden=())),
    "impala resnet": (PICTURE, RESNET),
    "transformer": (CONTROL, TRANSFORMER),
    "transformer of groups": (MATRIX, NetworkConfig(kind="transformer", width=8, heads=4, patch=4)),
    "minatar cnn": (BOARD, NetworkConfig(hidden=(6,))),
    "minatar cnn without dense layers": (BOARD, NetworkConfig(kind="minatar_cnn", hidden=())),
    "mlp of a picture": (BOARD, NetworkConfig(kind="mlp", hidden=(8, 7))),
    "choices": (CHOICES, NetworkConfig(hidden=(8,))),
    "switches": (SWITCHES, NetworkConfig(hidden=(8,))),
    "vision transformer": (FRAMES, TRANSFORMER),
    "lstm": (VECTOR, LSTM),
    "gru": (VECTOR, GRU),
    "gru of choices on a minatar cnn": (
        EnvSpec((7, 8, 5), "bool", MultiDiscrete((2, 3)), 1.0),
        NetworkConfig(hidden=(6,), core="gru", core_size=5),
    ),
    "lstm on nothing": (MATRIX, NetworkConfig(hidden=(), core="lstm", core_size=5)),
    "lstm on a resnet": (
        FRAMES,
        NetworkConfig(kind="impala_resnet", channels=(3,), core="lstm", core_size=6),
    ),
    "lstm on a transformer": (
        CONTROL,
        NetworkConfig(kind="transformer", width=8, heads=2, layers=1, core="lstm", core_size=6),
    ),
    "lstm with all for control": (
        CONTROL,
        NetworkConfig(hidden=(7,), core="lstm", core_size=5, squash="tanh", exploration_noise="sde"),
    ),
}
"""By name: observations and actions, and the network."""


def make_policy(name: str, seed: int | None = 0, *, log_std: float = -0.5) -> ActorCritic:
    """Return a policy whose heads say something: as they begin, they are near zero."""
    spec, network = POLICIES[name]
    policy = ActorCritic(spec, network, seed)
    if seed is not None:
        with torch.no_grad():
            policy.policy_head.weight.mul_(100.0)
            if isinstance(spec.action, Continuous):
                policy.log_std.fill_(log_std)
    return policy


def make_inputs(
    name: str, rows: int = 4, *, seed: int = 0, steps: int = 5
) -> tuple[torch.Tensor, RecurrentContext]:
    """Return float64 observations (rows, or rows x steps) and their context, in which episodes end."""
    spec, network = POLICIES[name]
    generator = torch.Generator().manual_seed(seed)
    recurrent = network.core != "none"
    leading = (rows, steps) if recurrent else (rows,)
    obs = torch.randn((*leading, *spec.obs_shape), generator=generator, dtype=torch.float64)
    if spec.obs_dtype == "bool":
        obs = (obs > 0.0).double()
    elif spec.is_image:
        obs = obs.mul(80.0).add(128.0).clamp(0.0, 255.0).floor()
    if not recurrent:
        return obs, RecurrentContext()
    starts_BT = torch.rand((rows, steps), generator=generator) < 0.3
    parts = 2 if network.core == "lstm" else 1
    state_BS = torch.randn((rows, parts * network.core_size), generator=generator, dtype=torch.float64).tanh()
    return obs, RecurrentContext(starts_BT, state_BS)
