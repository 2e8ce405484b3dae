"""Actors with critics Q(s, a): what off-policy actor-critics act with and learn.

| policy | actor | critics | for |
|---|---|---|---|
| ``DeterministicActorCritic`` | a = tanh(f(s)) | Q_i(s, a) | DDPG, TD3 |
| ``SquashedGaussianActorCritic`` | a = tanh(u), u ~ N(μ(s), σ(s)²) | Q_i(s, a) | SAC |
| ``CategoricalActorCritic`` | softmax(f(s)) | Q_i(s, ·) | discrete SAC |

Actor and critics share nothing, so each is one piece of the flat vector. All critics of a policy are computed
at once, as batched matrix products: for small networks that takes two thirds of the time. Continuous actions
are -1 … 1 wherever they are stored or learned from; ``to_environment`` brings them to the space's bounds.

A gradient engine hands a model one tensor, so the second input of a critic (an action, or the noise of one)
lies behind the observation in the same row: ``beside`` puts it there.

Shape suffixes: T steps, B batch, X the observation's own dimensions, A actions or their dimensions, F
features, M critics, I inputs (an observation with what lies beside it), O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from p2pdrl.config.task import AlgorithmOptions, NetworkConfig, NoiseOptions, TemperatureOptions
from p2pdrl.errors import ConfigError
from p2pdrl.rl.distributions import LOG_SQRT_2PI, ActionMap, Categorical
from p2pdrl.rl.envs import Continuous, Discrete, EnvSpec
from p2pdrl.rl.gsde import held_noise, perturbation, state_log_std
from p2pdrl.rl.networks.layers import RELU_GAIN, Dense, initialise
from p2pdrl.rl.networks.lstm import NO_CONTEXT, RecurrentContext
from p2pdrl.rl.networks.registry import make_front, make_trunk, resolve_kind, seen_spec
from p2pdrl.rl.policy import Policy

__all__ = [
    "CategoricalActorCritic",
    "Critics",
    "DenseEnsemble",
    "DeterministicActorCritic",
    "SquashedGaussianActorCritic",
    "beside",
    "frozen",
]

SMALLEST_LOG_STD, LARGEST_LOG_STD = -20.0, 2.0
"""Between which log σ of a squashed Gaussian is held, as in the code of Haarnoja 2018."""
TANH = ActionMap.between(*torch.tensor([[-1.0], [1.0]]).numpy(), squash=True)
"""From u to -1 … 1, for its log-determinant: the same in each dimension."""


def beside(obs_BX: Tensor, more_BA: Tensor) -> Tensor:
    """Return rows of an observation, flattened, with numbers behind it: B x I."""
    return torch.cat((obs_BX.flatten(1).to(more_BA.dtype), more_BA), 1)


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Let gradients go through what the module computes in here, and none to its parameters."""
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


class DenseEnsemble(nn.Module):
    """A dense layer of M networks that know nothing of each other, orthogonal each, with zero biases.

    Args:
        gain: scales the weights.
    """

    def __init__(self, members: int, inputs: int, outputs: int, gain: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs, device="meta"))
        self.bias = nn.Parameter(torch.empty(members, 1, outputs, device="meta"))
        self._gain = gain

    def draw(self, generator: torch.Generator) -> None:
        """Set weights and biases, one member after the other."""
        for weight in self.weight.detach():
            nn.init.orthogonal_(weight, self._gain, generator=generator)
        nn.init.zeros_(self.bias)

    def forward(self, inputs_MBI: Tensor) -> Tensor:
        """Return M x B x O; with fewer members in the inputs than there are, those of the first ones."""
        members = len(inputs_MBI)
        bias: Tensor = self.bias
        weight: Tensor = self.weight
        if members < len(weight):  # not for all: even then the gradient of a slice is a copy
            bias, weight = bias[:members], weight[:members]
        if weight.shape[2] == 1:  # a third of the time of a matrix product with one column
            return (inputs_MBI * weight.transpose(1, 2)).sum(-1, keepdim=True) + bias
        return torch.baddbmm(bias, inputs_MBI, weight)


class Critics(nn.Module):
    """M action values at once: Q_i(s, a) of one action, or Q_i(s, ·) of all.

    Vectors: each critic is an MLP of its own on (s, a). Otherwise one trunk sees the observation for all
    critics, and each has dense layers of its own on (features, a).

    Args:
        action_dim: A numbers of a continuous action beside each observation; 0 for none.
        outputs: 1, or one for each discrete action.

    Attributes:
        trunk: what observations go through first; None for vectors.
        hidden: the critics' own layers.
        activation: behind each of them; works in place.
        head: the last layer.
    """

    def __init__(
        self, spec: EnvSpec, config: NetworkConfig, *, members: int, action_dim: int, outputs: int
    ) -> None:
        super().__init__()
        self.members = members
        self._obs_shape = spec.obs_shape
        self.activation = torch.tanh_ if config.activation == "tanh" else torch.relu_
        self.trunk: nn.Module | None = _front(config, spec)
        inputs = math.prod(seen_spec(config, spec).obs_shape)
        hidden: Sequence[int] = config.hidden
        if resolve_kind(config, spec) != "mlp":
            self.trunk, inputs = _trunk(config, spec)
            # an action has to meet the features in a layer; without one they lead to values at once
            hidden = (inputs,) if action_dim else ()
        widths = (inputs + action_dim, *hidden)
        self.hidden = nn.ModuleList(DenseEnsemble(members, *pair, RELU_GAIN) for pair in pairwise(widths))
        self.head = DenseEnsemble(members, widths[-1], outputs, 1.0)

    def forward(self, inputs_BI: Tensor, members: int | None = None) -> Tensor:
        """Return M x B x O of observations, flattened, with an action beside each if there is one.

        Args:
            members: how many of the critics, the first ones; None for all.
        """
        x = inputs_BI
        if self.trunk is not None:
            size = math.prod(self._obs_shape)
            features = self.trunk(inputs_BI[:, :size].view(-1, *self._obs_shape))
            x = torch.cat((features, inputs_BI[:, size:]), 1)
        x = x.expand(self.members if members is None else members, *x.shape)
        for layer in self.hidden:
            x = self.activation(layer(x))
        values: Tensor = self.head(x)
        return values


class _Bytes(nn.Module):
    """Makes rows of entries of what they are as numbers ``beside`` others: bytes again, exactly."""

    def forward(self, rows_BX: Tensor) -> Tensor:
        """Return uint8."""
        return rows_BX.to(torch.uint8)


def _front(config: NetworkConfig, spec: EnvSpec) -> nn.Module | None:
    """Return what comes before a trunk; None where nothing has to."""
    front = make_front(config, spec)
    if spec.layout is None:
        return front
    return _Bytes() if front is None else nn.Sequential(_Bytes(), front)


def _trunk(config: NetworkConfig, spec: EnvSpec) -> tuple[nn.Module, int]:
    """Return a trunk with what comes before it, and its features."""
    trunk, front = make_trunk(config, spec), _front(config, spec)
    return trunk if front is None else nn.Sequential(front, trunk), trunk.features


class _WithCritics(Policy):
    """What the policies here have in common; learners of action values ask no policy for v(s)."""

    def __init__(self, spec: EnvSpec, config: NetworkConfig) -> None:
        super().__init__()
        if config.core != "none":
            raise ConfigError("network.core: transitions from a replay memory have no past; leave it at none")
        if spec.layout is not None and spec.layout.mask is not None:
            raise ConfigError(
                "sac_discrete knows no action masks, and this environment has them; take dqn, ppo, a2c or "
                'impala, or set task.env.action_mask = ""'
            )
        self.spec = spec
        self._obs_dims = len(spec.obs_shape)
        self._obs_size = math.prod(spec.obs_shape)

    def evaluate(
        self, obs: Tensor, actions: Tensor, context: RecurrentContext = NO_CONTEXT
    ) -> tuple[Tensor, Tensor]:
        """Return zeros: neither is asked for, so they aren't computed."""
        nothing = self.values(obs, context)
        return nothing, nothing

    def values(self, obs: Tensor, context: RecurrentContext = NO_CONTEXT) -> Tensor:
        """Return zeros; see ``evaluate``."""
        del context
        return torch.zeros(obs.shape[: obs.dim() - self._obs_dims], device=obs.device)

    def apart(self, inputs_BI: Tensor) -> tuple[Tensor, Tensor]:
        """Return observations and what lies beside them; see ``beside``."""
        obs_BX = inputs_BI[:, : self._obs_size].reshape(-1, *self.spec.obs_shape)
        return obs_BX, inputs_BI[:, self._obs_size :]


class _ContinuousWithCritics(_WithCritics):
    """Actions of A numbers, -1 … 1; uniform ones while ``exploration`` is above zero.

    Attributes:
        action_map: from -1 … 1 to the bounds.
        dim: A.
    """

    def __init__(self, spec: EnvSpec, config: NetworkConfig, *, critics: int) -> None:
        super().__init__(spec, config)
        self.action_map, self.dim = _bounds(spec)
        self.critics = Critics(spec, config, members=critics, action_dim=self.dim, outputs=1)

    def to_environment(self, actions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Bring -1 … 1 to the bounds."""
        return self.action_map(actions)

    def q_values(self, inputs_BI: Tensor, members: int | None = None) -> Tensor:
        """Return Q_i(s, a), M x B, of actions ``beside`` observations."""
        values: Tensor = self.critics(inputs_BI, members).squeeze(-1)
        return values

    def _uniform(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        uniform = torch.rand((*shape, 1, self.dim), generator=generator, device=generator.device)
        return uniform.mul_(2.0).sub_(1.0)


class DeterministicActorCritic(_ContinuousWithCritics):
    """a = tanh(f(s)), with noise added where it explores, and M critics.

    Args:
        spec: observations and actions of the environment.
        config: shape of the networks.
        seed: of the initial weights; None leaves all parameters on the meta device.
        critics: M.

    Attributes:
        actor: μ(s), B x A, of observations.

    Raises:
        ConfigError: actions aren't numbers between finite bounds, or the network doesn't fit.
    """

    def __init__(self, spec: EnvSpec, config: NetworkConfig, seed: int | None, *, critics: int) -> None:
        super().__init__(spec, config, critics=critics)
        trunk, features = _trunk(config, spec)
        # a small last layer begins in the middle of the bounds, where tanh isn't flat
        self.actor = nn.Sequential(trunk, Dense(features, self.dim, 0.01), nn.Tanh())
        self._noise = NoiseOptions()
        self._state_BA: Tensor | None = None
        if seed is not None:
            initialise(self, torch.Generator().manual_seed(seed))

    def configure(self, options: AlgorithmOptions) -> None:
        """Take over how actions are perturbed, and whether they are judged."""
        if isinstance(options, NoiseOptions):
            self._noise = options
            self.judges = options.actor_priorities

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return a perturbation and, behind it, a uniform action: (*shape, 2, A).

        An Ornstein-Uhlenbeck process goes on from one unroll to the next, and doesn't know of episodes.
        """
        normal = torch.randn((*shape, 1, self.dim), generator=generator, device=generator.device)
        options = self._noise
        if options.noise == "ornstein_uhlenbeck":
            self._correlate(normal, stationary=len(shape) == 1)
        return torch.cat((normal.mul_(options.noise_std), self._uniform(shape, generator)), -2)

    def _correlate(self, normal: Tensor, *, stationary: bool) -> None:
        """Make x ← (1 − θ) x + z of the normal z, in place (Lillicrap 2016, with a time step of 1).

        Its first value is drawn from where it comes to rest: deviation 1 / √(1 − (1 − θ)²).
        """
        keep = 1.0 - self._noise.noise_theta
        spread = 1.0 / math.sqrt(1.0 - keep * keep)
        if stationary:
            normal.mul_(spread)
            return
        if self._state_BA is None or self._state_BA.shape != normal[0].shape:
            normal[0].mul_(spread)
        else:
            normal[0].add_(self._state_BA, alpha=keep)
        for step in range(1, len(normal)):
            normal[step].add_(normal[step - 1], alpha=keep)
        self._state_BA = normal[-1].clone()

    def judge(self, obs_T1BX: Tensor, actions: Tensor) -> tuple[Tensor, Tensor] | None:
        """See ``Policy.judge``: V is the value of the actor's action, both by the mean of the critics."""
        if not self.judges:
            return None
        T, B = actions.shape[:2]
        obs_NX = obs_T1BX.flatten(0, 1)
        own_NA = self.act(obs_NX)
        values_T1B = self.q_values(beside(obs_NX, own_NA)).mean(0).view(obs_T1BX.shape[:2])
        taken = self.q_values(beside(obs_T1BX[:T].flatten(0, 1), actions.flatten(0, 1)))
        return taken.mean(0).view(T, B), values_T1B

    def act(self, obs_BX: Tensor, noise: Tensor | None = None, state_BS: Tensor | None = None) -> Tensor:
        """Return μ(s); with ``noise`` perturbed and clipped to -1 … 1, or uniform while it explores."""
        if noise is not None and self.exploration > 0.0:
            return noise[..., 1, :]
        actions_BA: Tensor = self.actor(obs_BX)
        return actions_BA if noise is None else (actions_BA + noise[..., 0, :]).clamp_(-1.0, 1.0)

    def outputs(self, obs: Tensor, context: RecurrentContext = NO_CONTEXT) -> Tensor:
        """Return μ(s), …A."""
        del context
        leading = obs.shape[: obs.dim() - self._obs_dims]
        actions: Tensor = self.actor(obs.reshape(-1, *self.spec.obs_shape))
        return actions.view(*leading, self.dim)

    def q_of_own_actions(self, obs: Tensor) -> Tensor:
        """Return Q_1(s, μ(s)), B: gradients go through the critic to the actor alone."""
        with frozen(self.critics):
            return self.q_values(beside(obs, self.actor(obs)), members=1)[0]

    def q_values_and_own(self, inputs_BI: Tensor) -> tuple[Tensor, Tensor]:
        """Return Q_i(s, a) of actions ``beside`` observations, M x B, and ``q_of_own_actions``, B."""
        obs, _ = self.apart(inputs_BI)
        return self.q_values(inputs_BI), self.q_of_own_actions(obs)


class SquashedGaussianActorCritic(_ContinuousWithCritics):
    """a = tanh(u), u ~ N(μ(s), σ(s)²), two critics and the logarithm of the temperature α.

    σ is a second output of the actor's last layer, or, with ``network.exploration_noise = sde``, that of
    generalised state-dependent exploration (``gsde``).

    Args:
        spec: observations and actions of the environment.
        config: shape of the networks.
        seed: of the initial weights; None leaves all parameters on the meta device.

    Raises:
        ConfigError: actions aren't numbers between finite bounds, or the network doesn't fit.
    """

    def __init__(self, spec: EnvSpec, config: NetworkConfig, seed: int | None) -> None:
        super().__init__(spec, config, critics=2)
        self._config = config
        self._sde = config.exploration_noise == "sde"
        self.actor_trunk, features = _trunk(config, spec)
        self._features = features
        self.log_alpha = nn.Parameter(torch.empty(1, device="meta"))
        self.actor_head = _GaussianHead(features, self.dim, None if self._sde else config.log_std_init)
        self.log_std: nn.Parameter | None = None
        if self._sde:
            self.log_std = nn.Parameter(torch.empty(features, self.dim, device="meta"))
        if seed is not None:
            initialise(self, torch.Generator().manual_seed(seed))

    @property
    def actor_parts(self) -> tuple[str, ...]:
        """Names of what the actor has; see ``FlatModule.span``."""
        own = ("actor_trunk", "actor_head", *(("log_std",) if self._sde else ()))
        return own if next(self.actor_trunk.parameters(), None) is not None else own[1:]

    def draw(self, generator: torch.Generator) -> None:
        """Set the own parameters to initial values; draws nothing."""
        del generator
        nn.init.zeros_(self.log_alpha)
        if self.log_std is not None:
            nn.init.constant_(self.log_std, self._config.log_std_init)

    def configure(self, options: AlgorithmOptions) -> None:
        """Begin with the temperature of ``options``."""
        _set_temperature(self.log_alpha, options)

    def distribution(self, obs_BX: Tensor) -> tuple[Tensor, Tensor]:
        """Return μ and log σ of u, B x A each."""
        mean, log_std, _ = self._heads(obs_BX)
        return mean, log_std

    def _heads(self, obs_BX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.actor_trunk(obs_BX)
        head = self.actor_head(features)
        if self.log_std is not None:
            return head, state_log_std(features, self.log_std), features
        mean, log_std = head.split(self.dim, -1)
        return mean, log_std.clamp(SMALLEST_LOG_STD, LARGEST_LOG_STD), features

    def sample(self, obs_BX: Tensor, normal_BA: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions a = tanh(μ + σ z), B x A, and log π(a|s), B.

        log π(a|s) = Σ_j log N(u_j; μ_j, σ_j²) − log(1 − tanh² u_j)   (Haarnoja 2018, appendix C)

        Args:
            normal_BA: z.
        """
        mean, log_std, _ = self._heads(obs_BX)
        u = mean + log_std.exp() * normal_BA
        log_probs = (-0.5 * normal_BA.square() - log_std).sum(-1) - self.dim * LOG_SQRT_2PI
        return torch.tanh(u), log_probs - TANH.log_det(u)

    def normal(self, rows: int, generator: torch.Generator) -> Tensor:
        """Return z for ``sample``, rows x A."""
        return torch.randn((rows, self.dim), generator=generator, device=generator.device)

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return what perturbs actions and, behind it, a uniform one.

        (*shape, 2, A), or with sde (*shape, F + 1, A).
        """
        if self._sde:
            hold = self._config.sde_sample_freq
            noise = held_noise(shape, self._features, self.dim, hold, generator)
        else:
            noise = torch.randn((*shape, 1, self.dim), generator=generator, device=generator.device)
        return torch.cat((noise, self._uniform(shape, generator)), -2)

    def act(self, obs_BX: Tensor, noise: Tensor | None = None, state_BS: Tensor | None = None) -> Tensor:
        """Return tanh(μ); with ``noise`` a sample, or a uniform action while it explores."""
        if noise is not None and self.exploration > 0.0:
            return noise[..., -1, :]
        mean, log_std, features = self._heads(obs_BX)
        if noise is None:
            return torch.tanh(mean)
        if self.log_std is not None:
            return torch.tanh(mean + perturbation(features, self.log_std, noise[..., :-1, :]))
        return torch.tanh(mean + log_std.exp() * noise[..., 0, :])

    def outputs(self, obs: Tensor, context: RecurrentContext = NO_CONTEXT) -> tuple[Tensor, Tensor]:
        """Return μ and log σ of u, …A each."""
        del context
        leading = obs.shape[: obs.dim() - self._obs_dims]
        mean, log_std = self.distribution(obs.reshape(-1, *self.spec.obs_shape))
        return mean.view(*leading, self.dim), log_std.view(*leading, self.dim)

    def q_of_own_actions(self, inputs_BI: Tensor) -> tuple[Tensor, Tensor]:
        """Return min_i Q_i(s, a) and log π(a|s), B each, of actions sampled with the noise z ``beside`` s.

        Gradients go through the critics to the actor alone.
        """
        obs, normal = self.apart(inputs_BI)
        actions, log_probs = self.sample(obs, normal)
        with frozen(self.critics):
            return self.q_values(beside(obs, actions)).amin(0), log_probs


class CategoricalActorCritic(_WithCritics):
    """π(·|s) = softmax(f(s)), two critics Q_i(s, ·) and the logarithm of the temperature α.

    Args:
        spec: observations and actions of the environment.
        config: shape of the networks.
        seed: of the initial weights; None leaves all parameters on the meta device.

    Attributes:
        choices: A.

    Raises:
        ConfigError: actions aren't discrete, or the network doesn't fit.
    """

    def __init__(self, spec: EnvSpec, config: NetworkConfig, seed: int | None) -> None:
        super().__init__(spec, config)
        if not isinstance(spec.action, Discrete):
            raise ConfigError(
                f"sac_discrete sums over Discrete actions, this environment's are {spec.action}; "
                + ("take sac" if isinstance(spec.action, Continuous) else "take ppo, a2c or impala")
            )
        self.choices = spec.action.n
        self.log_alpha = nn.Parameter(torch.empty(1, device="meta"))
        trunk, features = _trunk(config, spec)
        self.actor = nn.Sequential(trunk, Dense(features, self.choices, 0.01))
        self.critics = Critics(spec, config, members=2, action_dim=0, outputs=self.choices)
        if seed is not None:
            initialise(self, torch.Generator().manual_seed(seed))

    def draw(self, generator: torch.Generator) -> None:
        """Set the own parameters to initial values; draws nothing."""
        del generator
        nn.init.zeros_(self.log_alpha)

    def configure(self, options: AlgorithmOptions) -> None:
        """Begin with the temperature of ``options``."""
        _set_temperature(self.log_alpha, options)

    def log_probs(self, obs_BX: Tensor) -> Tensor:
        """Return log π(·|s), B x A."""
        return torch.log_softmax(self.actor(obs_BX), -1)

    def q_values(self, obs_BX: Tensor) -> Tensor:
        """Return Q_i(s, ·), M x B x A."""
        values: Tensor = self.critics(obs_BX.flatten(1).float())
        return values

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return Gumbel noise for each action."""
        return Categorical.noise(shape, self.choices, generator)

    def act(self, obs_BX: Tensor, noise: Tensor | None = None, state_BS: Tensor | None = None) -> Tensor:
        """Return the likeliest actions; with ``noise`` sampled ones, or uniform ones while it explores."""
        if noise is not None and self.exploration > 0.0:
            return noise.argmax(-1)
        logits: Tensor = self.actor(obs_BX)
        return (logits if noise is None else logits + noise).argmax(-1)

    def outputs(self, obs: Tensor, context: RecurrentContext = NO_CONTEXT) -> Tensor:
        """Return log π(·|s), …A."""
        del context
        leading = obs.shape[: obs.dim() - self._obs_dims]
        return self.log_probs(obs.reshape(-1, *self.spec.obs_shape)).view(*leading, self.choices)


class _GaussianHead(Dense):
    """The last layer of a Gaussian: means, and behind them log σ unless ``log_std`` is None."""

    def __init__(self, features: int, dim: int, log_std: float | None) -> None:
        super().__init__(features, dim if log_std is None else 2 * dim, 0.01)
        self._dim = dim
        self._log_std = log_std

    def draw(self, generator: torch.Generator) -> None:
        """Set weight and bias: deviations begin as configured."""
        super().draw(generator)
        if self._log_std is not None:
            nn.init.constant_(self.bias[self._dim :], self._log_std)


def _set_temperature(log_alpha: nn.Parameter, options: AlgorithmOptions) -> None:
    if isinstance(options, TemperatureOptions):
        first = options.temperature_init if options.temperature == "auto" else options.temperature
        nn.init.constant_(log_alpha, math.log(first))


def _bounds(spec: EnvSpec) -> tuple[ActionMap, int]:
    """Return the map from -1 … 1 to the bounds of the actions, and their dimension.

    Raises:
        ConfigError: they have none.
    """
    action = spec.action
    if not isinstance(action, Continuous):
        others = "sac_discrete, dqn or ppo" if isinstance(action, Discrete) else "ppo, a2c or impala"
        raise ConfigError(
            f"sac, td3 and ddpg are for continuous actions, this environment's is {action}; take {others}"
        )
    for dim, (low, high) in enumerate(zip(action.low.tolist(), action.high.tolist(), strict=True)):
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigError(
                f"sac, td3 and ddpg bring actions to between their bounds, which must be finite; this "
                f"environment's action {dim} goes from {low:g} to {high:g}; take ppo or a2c"
            )
    return ActionMap.between(action.low, action.high, squash=False), action.dim
