"""What a policy must have to act and be trained, and the one that there is: actor and critic in one module.

``registry`` builds it, ``rollout`` and ``evaluate`` let it act, ``gradients`` differentiates through
``outputs``, ``sequential`` cuts an ``ActorCritic`` into blocks. Vector observations get two separate
networks; images, and whatever has a transformer or a memory, one shared trunk (as in Mnih 2016).

A recurrent policy takes observations of whole unrolls, environments first: BTX, and a ``RecurrentContext``
that says where episodes begin and what it remembered before. All others take any leading dimensions.

Shape suffixes: … leading dimensions (B batch, or B environments and T steps), X the observation's own
dimensions, A actions, F features, S state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from p2pdrl.config.task import AlgorithmOptions, NetworkConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.distributions import (
    ActionMap,
    Categorical,
    DiagonalGaussian,
    Distribution,
    PolicyOutputs,
    distribution,
)
from p2pdrl.rl.envs import Discrete, EnvSpec
from p2pdrl.rl.gsde import held_noise, perturbation, state_log_std
from p2pdrl.rl.networks.layers import Dense, initialise, mlp
from p2pdrl.rl.networks.lstm import LSTM, NO_CONTEXT, RecurrentContext
from p2pdrl.rl.networks.registry import make_trunk, resolve_kind

__all__ = ["ActorCritic", "Policy"]


class Policy(nn.Module, ABC):
    """A network that acts in environments; an algorithm names its own in ``AlgorithmEntry``.

    Collectors and evaluation call all but ``outputs``, gradient engines call that. All parameters are float32
    and get a gradient; they, and nothing else of the module, travel between nodes. Pipelines and
    ``split_devices`` want an ``ActorCritic``; ``checkpoint_activations`` has no effect on others, which are
    one block.

    Attributes:
        spec: observations and actions of the environment.
        exploration: ε of an ε-greedy policy, set from its algorithm's; else without effect.
    """

    spec: EnvSpec
    exploration: float = 0.0

    def configure(self, options: AlgorithmOptions) -> None:
        """Take over what acting depends on in the algorithm's options; called once, before anything else."""

    def initial_state(self, batch: int) -> Tensor | None:
        """Return the state before an episode's first step, B x S zeros; None for policies without memory."""
        del batch
        return None

    @abstractmethod
    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return the randomness that ``act`` needs for ``shape`` actions, on the generator's device.

        Args:
            shape: B environments at one step, or T, B: a whole unroll, whose steps may share some of it.
        """

    @abstractmethod
    def act(self, obs_BX: Tensor, noise: Tensor | None = None, state_BS: Tensor | None = None) -> Tensor:
        """Return actions: sampled with ``noise``, or the likeliest when there is none.

        Args:
            obs_BX: one observation of each environment.
            noise: from ``noise``.
            state_BS: of a recurrent policy: what ``initial_state`` gave for the first step of an
                episode; overwritten by the state after this one. None stands for a first step.

        Returns:
            int64 B, or float32 B x A as sampled: what `to_environment` makes of them the environment gets.
        """

    def to_environment(self, actions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return what environments get for actions from ``act``; not clipped to their bounds yet."""
        return actions

    @abstractmethod
    def outputs(self, obs: Tensor, context: RecurrentContext = NO_CONTEXT) -> Any:
        """Return what objectives get: a tensor or a tuple of them, each of the leading shape of ``obs``.

        Args:
            obs: …X; BTX where the policy is recurrent, whose outputs are ``PolicyOutputs``.
            context: for a recurrent policy; others ignore it.
        """

    @abstractmethod
    def evaluate(
        self, obs: Tensor, actions: Tensor, context: RecurrentContext = NO_CONTEXT
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of ``actions``, and values, each of the leading shape."""

    @abstractmethod
    def values(self, obs: Tensor, context: RecurrentContext = NO_CONTEXT) -> Tensor:
        """Return v(s) of the leading shape of ``obs``; arguments as in ``outputs``."""


class ActorCritic(Policy):
    """A stochastic policy π(a|s) and its value function v(s).

    Args:
        spec: observations and actions of the environment.
        config: shape of the networks.
        seed: of the initial weights: the same seed gives the same weights on every node. None leaves all
            parameters on the meta device, without memory: enough to know names and shapes.

    Attributes:
        trunk: shared by policy and value function; the identity where they share nothing.
        actor: the policy's own layers; the identity where all are shared.
        critic: the value function's own.
        core: the recurrent core behind the trunk, or None.
        policy_head: the last layer: logits or means.
        log_std: A, where actions are continuous: logarithms of the deviations, the same in every state;
            F x A with ``sde``: of the noise's weights.
        action_map: from samples to environments' actions; None where they are the same.

    Raises:
        ConfigError: the network doesn't fit the observations, or its options not the actions.
    """

    def __init__(self, spec: EnvSpec, config: NetworkConfig, seed: int | None) -> None:
        super().__init__()
        self.spec = spec
        self._obs_dims = len(spec.obs_shape)
        outputs = spec.action.n if isinstance(spec.action, Discrete) else spec.action.dim
        self.trunk: nn.Module
        self.actor: nn.Module
        self.critic: nn.Module
        if resolve_kind(config, spec) == "mlp" and config.core == "none":
            widths = (math.prod(spec.obs_shape), *config.hidden)
            self.trunk = nn.Identity() if self._obs_dims == 1 else nn.Flatten()
            self.actor = mlp(widths, config.activation)
            self.critic = mlp(widths, config.activation)
            features = widths[-1]
        else:
            trunk = make_trunk(config, spec)
            self.trunk, features = trunk, trunk.features
            self.actor, self.critic = nn.Identity(), nn.Identity()
        self.core: LSTM | None = None
        if config.core == "lstm":
            self.core, features = LSTM(features, config.core_size), config.core_size
        # a small last layer makes the first policy near uniform (Andrychowicz 2021, arXiv 2006.05990)
        self.policy_head = Dense(features, outputs, 0.01)
        self.value_head = Dense(features, 1, 1.0)
        self.action_map = _action_map(spec, config)
        self.state_dependent = config.exploration_noise == "sde"
        self._config = config
        if not isinstance(spec.action, Discrete):
            shape = (features, outputs) if self.state_dependent else (outputs,)
            self.log_std = nn.Parameter(torch.empty(shape, device="meta"))
        if seed is not None:
            initialise(self, torch.Generator().manual_seed(seed))

    @property
    def actor_parts(self) -> tuple[str, ...]:
        """Names of what the policy has for itself, not in a shared trunk; see ``FlatModule.span``."""
        return self._with_parameters("log_std", "actor", "policy_head")

    @property
    def critic_parts(self) -> tuple[str, ...]:
        """Names of what the value function has for itself; see ``actor_parts``."""
        return self._with_parameters("critic", "value_head")

    @property
    def trunk_parts(self) -> tuple[str, ...]:
        """Names of what both share: a loss of one's own has to step it, or it stays as it was drawn."""
        return self._with_parameters("trunk", "core")

    def _with_parameters(self, *parts: str) -> tuple[str, ...]:
        owners = {name.partition(".")[0] for name, _ in self.named_parameters()}
        return tuple(part for part in parts if part in owners)

    def draw(self, generator: torch.Generator) -> None:
        """Set the own parameters to initial values: deviations as configured; draws nothing."""
        del generator
        nn.init.constant_(self.log_std, self._config.log_std_init)

    def initial_state(self, batch: int) -> Tensor | None:
        """See ``Policy.initial_state``."""
        if self.core is None:
            return None
        like = self.policy_head.weight
        return torch.zeros(batch, self.core.state_size, dtype=like.dtype, device=like.device)

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """See ``Policy.noise``."""
        if isinstance(self.spec.action, Discrete):
            return Categorical.noise(shape, self.spec.action.n, generator)
        if self.state_dependent:
            hold = self._config.sde_sample_freq
            return held_noise(shape, self.policy_head.in_features, self.spec.action.dim, hold, generator)
        return DiagonalGaussian.noise(shape, self.spec.action.dim, generator)

    def act(self, obs_BX: Tensor, noise: Tensor | None = None, state_BS: Tensor | None = None) -> Tensor:
        """See ``Policy.act``."""
        features = self.trunk(obs_BX)
        if self.core is not None:
            state = self.initial_state(len(features)) if state_BS is None else state_BS
            assert state is not None  # noqa: S101 - there is a core
            state.copy_(self.core.step(features, state))
            features = self.core.output(state)
        features = self.actor(features)
        policy = self._distribution(features)
        if noise is None:
            return policy.mode()
        if self.state_dependent:
            return policy.mode() + perturbation(features, self.log_std, noise)
        return policy.sample(noise)

    def to_environment(self, actions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """See ``Policy.to_environment``."""
        return actions if self.action_map is None else self.action_map(actions)

    def outputs(self, obs: Tensor, context: RecurrentContext = NO_CONTEXT) -> PolicyOutputs:
        """Return what the heads say about ``obs``; see ``Policy.outputs``."""
        features = self._features(obs, context)
        for_policy = self.actor(features)
        policy = self.policy_head(for_policy)
        values = self.value_head(self.critic(features))
        leading = obs.shape[: obs.dim() - self._obs_dims]
        log_std = self._log_std_of(for_policy)
        if self.state_dependent and log_std is not None:
            log_std = log_std.view(*leading, log_std.shape[-1])
        return PolicyOutputs(
            policy.view(*leading, policy.shape[-1]), values.view(leading), log_std, self.action_map
        )

    def evaluate(
        self, obs: Tensor, actions: Tensor, context: RecurrentContext = NO_CONTEXT
    ) -> tuple[Tensor, Tensor]:
        """See ``Policy.evaluate``."""
        outputs = self.outputs(obs, context)
        return outputs.distribution().log_prob(actions), outputs.values

    def values(self, obs: Tensor, context: RecurrentContext = NO_CONTEXT) -> Tensor:
        """See ``Policy.values``."""
        values: Tensor = self.value_head(self.critic(self._features(obs, context)))
        return values.view(obs.shape[: obs.dim() - self._obs_dims])

    def _features(self, obs: Tensor, context: RecurrentContext) -> Tensor:
        """Return what actor and critic see, all leading dimensions made one."""
        features: Tensor = self.trunk(obs.reshape(-1, *self.spec.obs_shape))
        if self.core is None:
            return features
        batch, steps = obs.shape[: obs.dim() - self._obs_dims]
        remembered: Tensor = self.core(features.view(batch, steps, -1), context)
        return remembered.flatten(0, 1)

    def _log_std_of(self, features_NF: Tensor) -> Tensor | None:
        """Return A, or N x A where it depends on the state; None where actions are discrete."""
        if isinstance(self.spec.action, Discrete):
            return None
        return state_log_std(features_NF, self.log_std) if self.state_dependent else self.log_std

    def _distribution(self, features_BF: Tensor) -> Distribution:
        return distribution(self.policy_head(features_BF), self._log_std_of(features_BF), self.action_map)


def _action_map(spec: EnvSpec, config: NetworkConfig) -> ActionMap | None:
    """Return the map that options ask for; None where the environment gets samples as they are.

    Raises:
        ConfigError: an option has no meaning for these actions.
    """
    chosen = {
        "exploration_noise = sde": config.exploration_noise == "sde",
        "rescale_actions = true": config.rescale_actions,
        "squash = tanh": config.squash == "tanh",
    }
    options = [f"network.{option}" for option, is_set in chosen.items() if is_set]
    if not options:
        return None
    action = spec.action
    if isinstance(action, Discrete):
        raise ConfigError(
            f"{options[-1]} is for continuous actions, this environment's is one of {action.n}; "
            "leave that key at its default"
        )
    if not config.rescale_actions and config.squash == "none":
        return None
    for dim, (low, high) in enumerate(zip(action.low.tolist(), action.high.tolist(), strict=True)):
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigError(
                f"{options[-1]} brings actions to between their bounds, which must be finite; this "
                f"environment's action {dim} goes from {low:g} to {high:g}; leave that key at its default"
            )
    return ActionMap.between(action.low, action.high, squash=config.squash == "tanh")
