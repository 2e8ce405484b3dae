"""What a policy must have to act and be trained, and the one that there is: actor and critic in one module.

``registry`` builds it, ``rollout`` and ``evaluate`` let it act, ``gradients`` differentiates through
``outputs``, ``sequential`` cuts an ``ActorCritic`` into blocks. Vector observations get two separate
networks; images, and whatever has a transformer or a memory, one shared trunk (as in Mnih 2016).

A recurrent policy takes observations of whole unrolls, environments first: BTX, and a ``RecurrentContext``
that says where episodes begin and what it remembered before. All others take any leading dimensions.

Shape suffixes: … leading dimensions (B batch, or B environments and T steps), X the observation's own
dimensions, A actions, F features, S state.
"""

# ruff: noqa: N815 (fields carry shape suffixes)
from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor, nn

from p2pdrl.config.task import AlgorithmOptions, NetworkConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.distributions import (
    ActionMap,
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    Distribution,
    MultiCategorical,
    PolicyOutputs,
    distribution,
)
from p2pdrl.rl.envs import Continuous, Discrete, EnvSpec, MultiBinary, MultiDiscrete
from p2pdrl.rl.gsde import held_noise, perturbation, state_log_std
from p2pdrl.rl.networks.entries import allowed_actions, masked
from p2pdrl.rl.networks.gru import GRU
from p2pdrl.rl.networks.layers import Dense, initialise, mlp
from p2pdrl.rl.networks.lstm import LSTM, NO_CONTEXT, RecurrentContext, RecurrentCore
from p2pdrl.rl.networks.registry import make_front, make_trunk, resolve_kind, seen_spec

__all__ = ["Acted", "ActorCritic", "Policy"]

MOST_NOISE = 1e8
"""Of Gumbel noise: less than what keeps an action from being taken, more than is ever drawn but infinity."""


class Acted(NamedTuple):
    """What a policy does at one step of B environments, and what it says of that.

    Args:
        actions: as `Policy.act` returns them.
        log_probs_B: of these actions.
        values_B: v(s); of the best action where the policy judges its actions.
        taken_B: Q(s, a) where it does; else None.
    """

    actions: Tensor
    log_probs_B: Tensor
    values_B: Tensor
    taken_B: Tensor | None = None


class Policy(nn.Module, ABC):
    """A network that acts in environments; an algorithm names its own in ``AlgorithmEntry``.

    Collectors and evaluation call all but ``outputs``, gradient engines call that. All parameters are float32
    and get a gradient; they, and nothing else of the module, travel between nodes. Pipelines and
    ``split_devices`` want an ``ActorCritic``; ``checkpoint_activations`` has no effect on others, which are
    one block.

    Attributes:
        spec: observations and actions of the environment.
        exploration: ε of an ε-greedy policy, set from its algorithm's; else without effect.
        noisy: whether it explores by noise in its weights, which evaluations do without.
        judges: whether `judge` tells anything.
    """

    spec: EnvSpec
    exploration: float = 0.0
    noisy: bool = False
    judges: bool = False

    def configure(self, options: AlgorithmOptions) -> None:
        """Take over what acting depends on in the algorithm's options; called once, before anything else."""

    def act_as(self, first: int, count: int, total: int) -> None:
        """Tell which of all actors' environments it acts in, where that makes a difference.

        Args:
            first: number of the first one, of ``count`` in a row.
            total: environments of all actors.
        """

    def judge(self, obs_T1BX: Tensor, actions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return Q(s, a) of T actions and V(s) of T+1 observations, TB and T1B, for first priorities.

        None where the algorithm's options ask for none. There may be T observations as well.
        """
        del obs_T1BX, actions
        return None

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
            int64 B or B x A, or float32 B x A as sampled: what `to_environment` makes of them the
                environment gets.
        """

    def step(
        self,
        obs_BX: Tensor,
        noise: Tensor | None = None,
        state_BS: Tensor | None = None,
        *,
        narrow: bool = False,
    ) -> Acted:
        """Return what ``act`` does, with all that is computed of a whole unroll otherwise.

        Each row is computed by itself: rows of several collectors make one batch.

        Args:
            obs_BX: as in ``act``, like ``noise`` and ``state_BS``.
            narrow: as in ``ActorCritic.lasting_features``; else without effect.
        """
        del narrow
        actions = self.act(obs_BX, noise, state_BS)
        judged = self.judge(obs_BX.unsqueeze(0), actions.unsqueeze(0))
        if judged is None:
            return Acted(actions, *self.evaluate(obs_BX, actions))
        taken_1B, values_1B = judged
        return Acted(actions, torch.zeros_like(taken_1B[0]), values_1B[0], taken_1B[0])

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
        front: brings observations to the form that the trunk takes, without parameters; None where they have
            it.
        trunk: shared by policy and value function; the identity where they share nothing.
        actor: the policy's own layers; the identity where all are shared.
        critic: the value function's own.
        core: the recurrent core behind the trunk, or None.
        policy_head: the last layer: logits or means.
        log_std: A, where actions are continuous: logarithms of the deviations, the same in every state;
            F x A with ``sde``: of the noise's weights.
        shares_features: whether trunk or core have parameters, so that acting already does what evaluating
            needs.
        mask: where in observations it is said which actions are allowed; None where all are.
        action_map: from samples to environments' actions; None where they are the same.

    Raises:
        ConfigError: the network doesn't fit the observations, or its options not the actions.
    """

    def __init__(self, spec: EnvSpec, config: NetworkConfig, seed: int | None) -> None:
        super().__init__()
        self.spec = spec
        self._obs_dims = len(spec.obs_shape)
        outputs = spec.action.outputs
        self.front = make_front(config, spec)
        self.trunk: nn.Module
        self.actor: nn.Module
        self.critic: nn.Module
        if resolve_kind(config, spec) == "mlp" and config.core == "none":
            widths = (math.prod(seen_spec(config, spec).obs_shape), *config.hidden)
            flat = self._obs_dims == 1 or self.front is not None
            self.trunk = nn.Identity() if flat else nn.Flatten()
            self.actor = mlp(widths, config.activation)
            self.critic = mlp(widths, config.activation)
            features = widths[-1]
        else:
            trunk = make_trunk(config, spec)
            self.trunk, features = trunk, trunk.features
            self.actor, self.critic = nn.Identity(), nn.Identity()
        self.core: RecurrentCore | None = None
        if config.core != "none":
            core = LSTM if config.core == "lstm" else GRU
            self.core, features = core(features, config.core_size), config.core_size
        # a small last layer makes the first policy near uniform (Andrychowicz 2021, arXiv 2006.05990)
        self.policy_head = Dense(features, outputs, 0.01)
        self.value_head = Dense(features, 1, 1.0)
        self.action_map = _action_map(spec, config)
        self.state_dependent = config.exploration_noise == "sde"
        self._config = config
        self.mask = None if spec.layout is None else spec.layout.mask
        self._parts = spec.action if isinstance(spec.action, MultiDiscrete | MultiBinary) else None
        if isinstance(spec.action, Continuous):
            shape = (features, outputs) if self.state_dependent else (outputs,)
            self.log_std = nn.Parameter(torch.empty(shape, device="meta"))
        self.shares_features = bool(self.trunk_parts)
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
        match self.spec.action:
            case Discrete(n):
                noise = Categorical.noise(shape, n, generator)
                # the logarithm of an exponential draw may be infinite, and that would beat any mask
                return noise if self.mask is None else noise.clamp_(max=MOST_NOISE)
            case MultiDiscrete(sizes):
                return MultiCategorical.noise(shape, sizes, generator).clamp_(max=MOST_NOISE)
            case MultiBinary(n):
                return Bernoulli.noise(shape, n, generator)
        dim = self.spec.action.dim
        if self.state_dependent:
            hold = self._config.sde_sample_freq
            return held_noise(shape, self.policy_head.in_features, dim, hold, generator)
        return DiagonalGaussian.noise(shape, dim, generator)

    def act(self, obs_BX: Tensor, noise: Tensor | None = None, state_BS: Tensor | None = None) -> Tensor:
        """See ``Policy.act``."""
        return self.act_on(self.features(obs_BX, state_BS), obs_BX, noise)

    def features(self, obs_BX: Tensor, state_BS: Tensor | None = None) -> Tensor:
        """Return what actor and critic see of one step, BF; arguments as in ``Policy.act``.

        With a core it is a view of ``state_BS``.
        """
        features = self._trunk_of(obs_BX)
        if self.core is not None:
            state = self.initial_state(len(features)) if state_BS is None else state_BS
            assert state is not None  # noqa: S101 - there is a core
            state.copy_(self.core.step(features, state))
            features = self.core.output(state)
        return features

    def lasting_features(
        self, obs_BX: Tensor, state_BS: Tensor | None = None, *, narrow: bool = False
    ) -> Tensor:
        """Return what ``features`` does, float32 and no view of anything.

        Args:
            narrow: compute in bfloat16 what policy and value function share.
        """
        with torch.autocast(obs_BX.device.type, torch.bfloat16, enabled=narrow):
            features = self.features(obs_BX, state_BS)
        return features.to(torch.float32, copy=True)

    def act_on(self, features_BF: Tensor, obs_BX: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return actions as ``act`` does, from what ``features`` returned for ``obs_BX``."""
        features = self.actor(features_BF)
        return self._chosen(self._distribution(features, obs_BX), features, noise)

    def step(
        self,
        obs_BX: Tensor,
        noise: Tensor | None = None,
        state_BS: Tensor | None = None,
        *,
        narrow: bool = False,
    ) -> Acted:
        """See ``Policy.step``."""
        if narrow and self.shares_features:
            features = self.lasting_features(obs_BX, state_BS, narrow=True)
        else:
            features = self.features(obs_BX, state_BS)
        outputs = self.outputs_on(features, obs_BX)
        policy = outputs.distribution()
        for_policy = self.actor(features) if self.state_dependent else features
        actions = self._chosen(policy, for_policy, noise)
        return Acted(actions, policy.log_prob(actions), outputs.values)

    def _chosen(self, policy: Distribution, features_BF: Tensor, noise: Tensor | None) -> Tensor:
        """Return actions from a distribution and the policy's own features."""
        if noise is None:
            return policy.mode()
        if self.state_dependent:
            return policy.mode() + perturbation(features_BF, self.log_std, noise)
        return policy.sample(noise)

    def to_environment(self, actions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """See ``Policy.to_environment``."""
        return actions if self.action_map is None else self.action_map(actions)

    def outputs(self, obs: Tensor, context: RecurrentContext = NO_CONTEXT) -> PolicyOutputs:
        """Return what the heads say about ``obs``; see ``Policy.outputs``."""
        return self.outputs_on(self._features(obs, context), obs)

    def outputs_on(self, features: Tensor, obs: Tensor) -> PolicyOutputs:
        """Return what ``outputs`` does, from the features of ``obs``: NF, all leading dimensions made one."""
        for_policy = self.actor(features)
        policy = self.policy_head(for_policy)
        if self.mask is not None:
            policy = self.allowed(policy, obs.reshape(-1, obs.shape[-1]))
        values = self.value_head(self.critic(features))
        leading = obs.shape[: obs.dim() - self._obs_dims]
        log_std = self._log_std_of(for_policy)
        if self.state_dependent and log_std is not None:
            log_std = log_std.view(*leading, log_std.shape[-1])
        return PolicyOutputs(
            policy.view(*leading, policy.shape[-1]),
            values.view(leading),
            log_std,
            self.action_map,
            self._parts,
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
        features = self._trunk_of(obs.reshape(-1, *self.spec.obs_shape))
        if self.core is None:
            return features
        batch, steps = obs.shape[: obs.dim() - self._obs_dims]
        remembered: Tensor = self.core(features.view(batch, steps, -1), context)
        return remembered.flatten(0, 1)

    def _trunk_of(self, obs_NX: Tensor) -> Tensor:
        features: Tensor = self.trunk(obs_NX if self.front is None else self.front(obs_NX))
        return features

    def _log_std_of(self, features_NF: Tensor) -> Tensor | None:
        """Return A, or N x A where it depends on the state; None where actions aren't continuous."""
        if not isinstance(self.spec.action, Continuous):
            return None
        return state_log_std(features_NF, self.log_std) if self.state_dependent else self.log_std

    def allowed(self, logits: Tensor, obs: Tensor) -> Tensor:
        """Return logits …A in which actions that ``obs`` …X doesn't allow can't be taken."""
        if self.mask is None:
            return logits
        sizes = self._parts.sizes if isinstance(self._parts, MultiDiscrete) else ()
        return masked(logits, allowed_actions(obs, self.mask, sizes))

    def _distribution(self, features_BF: Tensor, obs_BX: Tensor) -> Distribution:
        policy = self.policy_head(features_BF)
        if self.mask is not None:
            policy = self.allowed(policy, obs_BX)
        return distribution(policy, self._log_std_of(features_BF), self.action_map, self._parts)


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
    if not isinstance(action, Continuous):
        raise ConfigError(
            f"{options[-1]} is for continuous actions, this environment's is {action}; "
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
