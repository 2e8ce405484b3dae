"""The policy and value function: one module that acts and judges.

``trainer`` builds it, ``rollout`` and ``evaluate`` let it act, ``algorithms`` differentiate through
``evaluate``. Vector observations get two separate networks, images one shared trunk (as in Mnih 2016).

Shape suffixes: … leading dimensions (T unroll, B batch), X the observation's own dimensions, A actions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from p2pdrl.config.task import NetworkConfig
from p2pdrl.rl.distributions import Categorical, DiagonalGaussian, Distribution
from p2pdrl.rl.envs import Discrete, EnvSpec
from p2pdrl.rl.networks import NatureCNN, linear, mlp, resolve_kind
from p2pdrl.rl.outputs import PolicyOutputs, distribution

__all__ = ["ActorCritic"]


class ActorCritic(nn.Module):
    """A stochastic policy π(a|s) and its value function v(s).

    Args:
        spec: observations and actions of the environment.
        config: shape of the networks.
        seed: of the initial weights: the same seed gives the same weights on every node.
    """

    def __init__(self, spec: EnvSpec, config: NetworkConfig, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.spec = spec
        self._obs_dims = len(spec.obs_shape)
        outputs = spec.action.n if isinstance(spec.action, Discrete) else spec.action.dim
        self.trunk: nn.Module
        self.actor: nn.Module
        self.critic: nn.Module
        if resolve_kind(config, spec) == "nature_cnn":
            # (64, 64) is the default for vectors; the paper's dense layer stands in for it
            hidden = config.hidden if config.hidden != NetworkConfig().hidden else (512,)
            self.trunk = NatureCNN(spec.obs_shape, hidden, generator)
            self.actor, self.critic = nn.Identity(), nn.Identity()
            features = hidden[-1]
        else:
            widths = (math.prod(spec.obs_shape), *config.hidden)
            self.trunk = nn.Identity() if self._obs_dims == 1 else nn.Flatten()
            self.actor = mlp(widths, config.activation, generator)
            self.critic = mlp(widths, config.activation, generator)
            features = widths[-1]
        # a small last layer makes the first policy near uniform (Andrychowicz 2021, arXiv 2006.05990)
        self.policy_head = linear(features, outputs, 0.01, generator)
        self.value_head = linear(features, 1, 1.0, generator)
        if not isinstance(spec.action, Discrete):
            self.log_std = nn.Parameter(torch.zeros(outputs))

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return the randomness that ``act`` needs for ``shape`` actions."""
        if isinstance(self.spec.action, Discrete):
            return Categorical.noise(shape, self.spec.action.n, generator)
        return DiagonalGaussian.noise(shape, self.spec.action.dim, generator)

    def act(self, obs_BX: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return actions: sampled with ``noise``, or the likeliest when there is none.

        Returns:
            int64 B, or float32 B x A (not clipped to the bounds).
        """
        policy = self._distribution(self.actor(self.trunk(obs_BX)))
        return policy.mode() if noise is None else policy.sample(noise)

    def outputs(self, obs: Tensor) -> PolicyOutputs:
        """Return what the heads say about ``obs`` (…X), each of the leading shape."""
        features = self.trunk(self._one_batch(obs))
        policy = self.policy_head(self.actor(features))
        values = self.value_head(self.critic(features))
        leading = obs.shape[: obs.dim() - self._obs_dims]
        return PolicyOutputs(policy.view(*leading, policy.shape[-1]), values.view(leading), self._log_std)

    def evaluate(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities of ``actions``, entropies and values, each of the leading shape.

        Args:
            obs: …X.
            actions: … (discrete) or …A.
        """
        outputs = self.outputs(obs)
        policy = outputs.distribution()
        return policy.log_prob(actions), policy.entropy(), outputs.values

    def values(self, obs: Tensor) -> Tensor:
        """Return v(s) of the leading shape of ``obs`` (…X)."""
        values: Tensor = self.value_head(self.critic(self.trunk(self._one_batch(obs))))
        return values.view(obs.shape[: obs.dim() - self._obs_dims])

    def _one_batch(self, obs: Tensor) -> Tensor:
        return obs.reshape(-1, *self.spec.obs_shape)

    @property
    def _log_std(self) -> Tensor | None:
        return None if isinstance(self.spec.action, Discrete) else self.log_std

    def _distribution(self, features_BF: Tensor) -> Distribution:
        return distribution(self.policy_head(features_BF), self._log_std)
