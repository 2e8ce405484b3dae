"""Action values: one network Q(s, ·), acting greedily, ε-greedily, or greedily with noise in its weights.

``registry`` builds it for algorithms that learn action values, ``rollout`` and ``evaluate`` let it act,
``gradients`` differentiates through ``outputs``.

Shape suffixes: … leading dimensions, B batch, X the observation's own dimensions, A actions, F features, P
noise of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from p2pdrl.config.task import AlgorithmOptions, DQNConfig, NetworkConfig, OnlineQOptions
from p2pdrl.errors import ConfigError
from p2pdrl.rl.envs import Discrete, EnvSpec
from p2pdrl.rl.networks.entries import allowed_actions, masked
from p2pdrl.rl.networks.layers import Dense, initialise
from p2pdrl.rl.networks.lstm import NO_CONTEXT, RecurrentContext
from p2pdrl.rl.networks.noisy import factorised_noise, make_noisy, noise_size, using_noise
from p2pdrl.rl.networks.registry import make_front, make_trunk
from p2pdrl.rl.policy import Policy

__all__ = ["ExplorationSpread", "QNetwork", "ladder"]


def ladder(base: float, exponent: float, total: int) -> list[float]:
    """Return ε of each of N actors, ε_i = ε^(1 + α i / (N − 1)) (Horgan 2018, arXiv 1803.00933, section 4.1).

    Args:
        base: ε of the first.
        exponent: α.
        total: N; a single one has ε.
    """
    return [base ** (1.0 + exponent * number / max(total - 1, 1)) for number in range(total)]


@dataclass(frozen=True)
class ExplorationSpread:
    """Different ε for different environments (Mnih 2016, arXiv 1602.01783, section 5.1).

    Each falls from ``start`` to an end of its own, all on the same line of time: the share of the way that is
    behind them is told by the mean ε.

    Attributes:
        ends: ε at last.
        shares: the probability of each end.
    """

    start: float
    ends: tuple[float, ...]
    shares: tuple[float, ...]

    @classmethod
    def of(cls, config: OnlineQOptions) -> ExplorationSpread:
        """As a task's options ask for."""
        return cls(config.exploration_start, config.exploration_ends, config.exploration_shares)

    @property
    def mean_end(self) -> float:
        """Mean of ε at last."""
        return sum(end * share for end, share in zip(self.ends, self.shares, strict=True))

    def draw(self, uniform_B: Tensor) -> Tensor:
        """Return the ends of B environments, for numbers between 0 and 1."""
        bounds = torch.tensor(self.shares, device=uniform_B.device).cumsum(0)[:-1]
        return torch.tensor(self.ends, device=uniform_B.device)[torch.bucketize(uniform_B, bounds)]

    def epsilon(self, mean: float, ends_B: Tensor) -> Tensor:
        """Return ε of B environments, whose ends were drawn, when its mean is ``mean``."""
        way = self.start - self.mean_end
        left = (mean - self.mean_end) / way if way else 0.0
        return ends_B + (self.start - ends_B) * left


class QNetwork(Policy):
    """Q(s, a) of every action at once, on any trunk (Mnih 2015, Nature 518).

    With ``task.network.dueling`` (Wang 2016, arXiv 1511.06581, equation 9): Q = V + A − mean over actions
    of A. With ``task.network.noisy`` all dense layers are noisy ones (``networks.noisy``).

    Args:
        spec: observations and actions of the environment.
        config: shape of the network.
        seed: of the initial weights; None leaves all parameters on the meta device.

    Attributes:
        spread: of ε over environments, whose mean is ``exploration`` then; None where all have the same.
        noisy: whether it explores by noise in its weights; ε has no effect then.

    Raises:
        ConfigError: actions aren't discrete, or the network doesn't fit the observations.
    """

    spread: ExplorationSpread | None = None
    _ladder: DQNConfig | None = None
    _rungs: Tensor | None = None

    def __init__(self, spec: EnvSpec, config: NetworkConfig, seed: int | None) -> None:
        super().__init__()
        if not isinstance(spec.action, Discrete):
            raise ConfigError(
                "action values want Discrete actions, each one a number of its own; this environment's are "
                f"{spec.action}; take ppo, a2c or impala, or number all combinations of them in a wrapper"
            )
        if config.core != "none":
            raise ConfigError("network.core: action values from replay have no memory; leave it at none")
        self.spec = spec
        self.actions = spec.action.n
        self._obs_dims = len(spec.obs_shape)
        self.mask = None if spec.layout is None else spec.layout.mask
        self.front = make_front(config, spec)
        self.trunk = make_trunk(config, spec)
        # small last layers make all actions worth about nothing at first
        self.advantage_head = Dense(self.trunk.features, self.actions, 0.01)
        self.value_head = Dense(self.trunk.features, 1, 0.01) if config.dueling else None
        self.noisy = config.noisy
        self._noisy_layers = make_noisy(self, config.noisy_sigma) if config.noisy else []
        self._weight_noise: Tensor | None = None
        if seed is not None:
            initialise(self, torch.Generator().manual_seed(seed))

    def forward(self, obs: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return Q(s, ·), …A, of ``obs`` …X; that of an action that isn't allowed is `NEVER`.

        So neither a greedy action nor the greatest value of a next observation is one of those.

        Args:
            noise: of noisy weights, P for all observations or BP for B of them; None takes the mean weights.
        """
        obs_NX = obs.reshape(-1, *self.spec.obs_shape)
        if noise is None:
            q = self._values(obs_NX)
        else:
            with using_noise(self._noisy_layers, noise):
                q = self._values(obs_NX)
        leading = obs.shape[: obs.dim() - self._obs_dims]
        if self.mask is not None:
            q = masked(q, allowed_actions(obs_NX, self.mask))
        values: Tensor = q.view(*leading, self.actions)
        return values

    def configure(self, options: AlgorithmOptions) -> None:
        """Let environments explore each with an ε of their own, where the algorithm does so."""
        if isinstance(options, OnlineQOptions):
            self.spread = ExplorationSpread.of(options)
        if isinstance(options, DQNConfig):
            self.judges = options.actor_priorities
            self._ladder = options if options.exploration == "ladder" else None

    def act_as(self, first: int, count: int, total: int) -> None:
        """See ``Policy.act_as``: a rung of the ladder for each environment, where the algorithm has one."""
        options = self._ladder
        if options is not None:
            rungs = ladder(options.exploration_base, options.exploration_exponent, total)
            self._rungs = torch.tensor(rungs[first : first + count])

    def judge(self, obs_T1BX: Tensor, actions: Tensor) -> tuple[Tensor, Tensor] | None:
        """See ``Policy.judge``: V is the value of the best action."""
        if not self.judges:
            return None
        values_T1BA = self.forward(obs_T1BX)
        taken_TB = values_T1BA[: len(actions)].gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        return taken_TB, values_T1BA.amax(-1)

    def _values(self, obs_BX: Tensor) -> Tensor:
        """Return Q(s, ·), BA, with the weights as they are now."""
        features = self.trunk(obs_BX if self.front is None else self.front(obs_BX))
        q: Tensor = self.advantage_head(features)
        if self.value_head is not None:
            q = self.value_head(features) + q - q.mean(-1, keepdim=True)
        return q

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return uniform numbers for each action: whether to explore, and where; or noise of the weights.

        With a ``spread`` there is a third, to what ε falls in that environment during this unroll; with a
        ladder, its rung.
        """
        if self.noisy:
            return factorised_noise((*shape, noise_size(self._noisy_layers)), generator)
        noise = torch.rand((*shape, 2), generator=generator, device=generator.device)
        if self._ladder is not None:
            rungs_B = self._rungs
            if rungs_B is None:  # nobody said which environments these are: all have the mean
                rungs_B = torch.full(shape[-1:], self.exploration)
            return torch.cat((noise, rungs_B.to(noise).expand(shape).unsqueeze(-1)), -1)
        if self.spread is None:
            return noise
        ends_B = self.spread.draw(torch.rand(shape[-1:], generator=generator, device=generator.device))
        return torch.cat((noise, ends_B.expand(shape).unsqueeze(-1)), -1)

    def act(self, obs_BX: Tensor, noise: Tensor | None = None, state_BS: Tensor | None = None) -> Tensor:
        """Return greedy actions (int64, B); with ``noise``, any that is allowed, with p = ``exploration``.

        Of noisy weights, those that are greedy under the noise.
        """
        if self.noisy:
            return self.forward(obs_BX, noise).argmax(-1)
        greedy_B = self.forward(obs_BX).argmax(-1)
        if noise is None or self.exploration <= 0.0:
            return greedy_B
        epsilon: Tensor | float = self.exploration
        if self._ladder is not None:
            epsilon = noise[..., 2]
        elif self.spread is not None:
            epsilon = self.spread.epsilon(self.exploration, noise[..., 2])
        return torch.where(noise[..., 0] < epsilon, self._any(obs_BX, noise[..., 1]), greedy_B)

    def _any(self, obs_BX: Tensor, uniform_B: Tensor) -> Tensor:
        """Return any action that is allowed, for numbers between 0 and 1."""
        if self.mask is None:
            return (uniform_B * self.actions).long().clamp_(max=self.actions - 1)
        allowed_BA = allowed_actions(obs_BX, self.mask)
        count_B = allowed_BA.sum(-1)
        number_B = torch.minimum((uniform_B * count_B).long(), count_B - 1)
        # the first action with more than so many allowed ones up to itself
        return (allowed_BA.cumsum(-1) > number_B.unsqueeze(-1)).int().argmax(-1)

    def outputs(self, obs: Tensor, context: RecurrentContext = NO_CONTEXT) -> Tensor:
        """Return Q(s, ·), …A, with the noise that was last drawn for learning."""
        del context
        return self.forward(obs, self._weight_noise)

    def draw_weight_noise(self, generator: torch.Generator) -> None:
        """Draw the noise of the weights for what is learned next; no effect where there is none."""
        if self.noisy:
            self._weight_noise = factorised_noise((noise_size(self._noisy_layers),), generator)

    def evaluate(
        self, obs: Tensor, actions: Tensor, context: RecurrentContext = NO_CONTEXT
    ) -> tuple[Tensor, Tensor]:
        """Return zeros: who learns action values asks for neither, so they aren't computed."""
        del context
        leading = obs.shape[: obs.dim() - self._obs_dims]
        nothing = torch.zeros(leading, device=obs.device)
        return nothing, nothing

    def values(self, obs: Tensor, context: RecurrentContext = NO_CONTEXT) -> Tensor:
        """Return zeros; see ``evaluate``."""
        del context
        return torch.zeros(obs.shape[: obs.dim() - self._obs_dims], device=obs.device)
