"""The policy that `bench_pipeline.py` learns with, one batch for it, and where it is cut.

Suffix: B rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from p2pdrl.config.fields import Precision
from p2pdrl.config.task import NetworkConfig
from p2pdrl.pipeline.layers import Layer, Peer
from p2pdrl.pipeline.partition import partition
from p2pdrl.pipeline.plan import PipelinePlan
from p2pdrl.pipeline.schedule import ScheduleName
from p2pdrl.rl.algorithms.ppo import PPOObjective
from p2pdrl.rl.distributions import PolicyOutputs
from p2pdrl.rl.envs import Discrete, EnvSpec
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Minibatch
from p2pdrl.rl.optimizers import Optimizer
from p2pdrl.rl.pipeline.parts import ModelParts, policy_parts
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.tensors.optimizers import Adam

__all__ = ["CHUNKS", "NETWORKS", "SIZES", "Model", "cuts_of", "make_model", "network_of", "plan_of"]

NETWORKS = ("mlp", "transformer", "impala_resnet")
SIZES = {"mlp": (33_600_000, 256), "transformer": (8_000_000, 64), "impala_resnet": (1_000_000, 64)}
"""Parameters and rows of a batch where nobody says."""
CHUNKS = 2
"""Stages of each rank when interleaved."""
ACTIONS = 4
VECTOR, PICTURE = (
    EnvSpec((64,), "float32", Discrete(ACTIONS)),
    EnvSpec((64, 64, 3), "uint8", Discrete(ACTIONS)),
)
LANDER = EnvSpec((8,), "float32", Discrete(ACTIONS))
OBJECTIVE = PPOObjective(clip=0.2, value_clip=None, value_coef=0.5, entropy_coef=0.01)
SEED = 7


class Model(NamedTuple):
    """What one process has.

    Attributes:
        flat: the policy's parameters and gradients.
        parts: of the policy, with an optimizer over them.
        batch: the same in every process.
    """

    flat: FlatModule
    parts: ModelParts[PolicyOutputs]
    batch: Minibatch

    @property
    def policy(self) -> ActorCritic:
        """The module."""
        module = self.flat.module
        assert isinstance(module, ActorCritic)  # noqa: S101 - made here
        return module


def network_of(kind: str, parameters: int) -> tuple[EnvSpec, NetworkConfig]:
    """Return a network of the kind with about so many parameters, and what it looks at."""
    low, high = 1, 2
    while _count(kind, high) < parameters:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _count(kind, middle) < parameters else (low, middle)
    return _network(kind, min((low, high), key=lambda scale: abs(_count(kind, scale) - parameters)))


def _network(kind: str, scale: int) -> tuple[EnvSpec, NetworkConfig]:
    """A network that grows with ``scale``."""
    if kind == "mlp":  # two towers, policy and value function
        return LANDER, NetworkConfig(kind="mlp", hidden=(16 * scale,) * 5)
    if kind == "transformer":  # eight tokens
        return VECTOR, NetworkConfig(kind="transformer", layers=6, heads=8, width=8 * scale, patch=8)
    return PICTURE, NetworkConfig(kind="impala_resnet", channels=(scale, 2 * scale, 2 * scale))


def _count(kind: str, scale: int) -> int:
    return sum(parameter.numel() for parameter in ActorCritic(*_network(kind, scale), None).parameters())


def make_model(kind: str, parameters: int, rows: int, device: torch.device, precision: Precision) -> Model:
    """Make policy, optimizer and batch; equal arguments give equal numbers.

    The weights are normal, not orthogonal as those of a policy that is to learn: that takes seconds.
    """
    spec, network = network_of(kind, parameters)
    policy = ActorCritic(spec, network, None).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.0 / math.sqrt(parameter[0].numel()), generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    flat = FlatModule(policy, device)
    batch = _batch(spec, rows, generator, device)
    parts = policy_parts(
        policy,
        OBJECTIVE,
        Optimizer(Adam(), flat),
        steps=1,
        most_rows=rows,
        precision=precision,
    )
    return Model(flat, parts, batch)


def _batch(spec: EnvSpec, rows: int, generator: torch.Generator, device: torch.device) -> Minibatch:
    def draw() -> Tensor:
        return torch.randn(rows, generator=generator).to(device)

    shape = (rows, *spec.obs_shape)
    if spec.is_image:
        obs = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    else:
        obs = torch.randn(shape, generator=generator)
    targets = {
        "actions": torch.randint(ACTIONS, (rows,), generator=generator).to(device),
        "log_probs": -math.log(ACTIONS) + 0.1 * draw(),
        "values": draw(),
        "advantages": draw(),
        "returns": draw(),
    }
    return Minibatch(obs.to(device), targets, rows)


def cuts_of(layers: Sequence[Layer], stages: int) -> tuple[int, ...]:
    """Cut a chain for ranks that are equally fast.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    return partition(layers, [Peer(str(stage)) for stage in range(stages)]).cuts


def plan_of(blocks: int, cuts: Sequence[int], schedule: ScheduleName, microbatches: int) -> PipelinePlan:
    """Return who holds what."""
    ranks = (len(cuts) + 1) // (CHUNKS if schedule == "interleaved" else 1)
    return PipelinePlan(blocks, tuple(cuts), schedule, microbatches, ranks)
