"""Action values: one network Q(s, ·), acting greedily or ε-greedily.

``registry`` builds it for algorithms that learn action values, ``rollout`` and ``evaluate`` let it act,
``gradients`` differentiates through ``outputs``.

Shape suffixes: … leading dimensions, B batch, X the observation's own dimensions, A actions, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from p2pdrl.config.task import NetworkConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.envs import Discrete, EnvSpec
from p2pdrl.rl.networks.entries import allowed_actions, masked
from p2pdrl.rl.networks.layers import Dense, initialise
from p2pdrl.rl.networks.lstm import NO_CONTEXT, RecurrentContext
from p2pdrl.rl.networks.registry import make_front, make_trunk
from p2pdrl.rl.policy import Policy

__all__ = ["QNetwork"]


class QNetwork(Policy):
    """Q(s, a) of every action at once, on any trunk (Mnih 2015, Nature 518).

    With ``task.network.dueling`` (Wang 2016, arXiv 1511.06581, equation 9): Q = V + A − mean over actions
    of A.

    Args:
        spec: observations and actions of the environment.
        config: shape of the network.
        seed: of the initial weights; None leaves all parameters on the meta device.

    Raises:
        ConfigError: actions aren't discrete, or the network doesn't fit the observations.
    """

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
        if seed is not None:
            initialise(self, torch.Generator().manual_seed(seed))

    def forward(self, obs: Tensor) -> Tensor:
        """Return Q(s, ·), …A, of ``obs`` …X; that of an action that isn't allowed is `NEVER`.

        So neither a greedy action nor the greatest value of a next observation is one of those.
        """
        obs_NX = obs.reshape(-1, *self.spec.obs_shape)
        features = self.trunk(obs_NX if self.front is None else self.front(obs_NX))
        q = self.advantage_head(features)
        if self.value_head is not None:
            q = self.value_head(features) + q - q.mean(-1, keepdim=True)
        leading = obs.shape[: obs.dim() - self._obs_dims]
        if self.mask is not None:
            q = masked(q, allowed_actions(obs_NX, self.mask))
        values: Tensor = q.view(*leading, self.actions)
        return values

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return two uniform numbers for each action: whether to explore, and where."""
        return torch.rand((*shape, 2), generator=generator, device=generator.device)

    def act(self, obs_BX: Tensor, noise: Tensor | None = None, state_BS: Tensor | None = None) -> Tensor:
        """Return greedy actions (int64, B); with ``noise``, any that is allowed, with p = ``exploration``."""
        greedy_B = self.forward(obs_BX).argmax(-1)
        if noise is None or self.exploration <= 0.0:
            return greedy_B
        if self.mask is None:
            any_B = (noise[..., 1] * self.actions).long().clamp_(max=self.actions - 1)
        else:
            allowed_BA = allowed_actions(obs_BX, self.mask)
            count_B = allowed_BA.sum(-1)
            number_B = torch.minimum((noise[..., 1] * count_B).long(), count_B - 1)
            # the first action with more than so many allowed ones up to itself
            any_B = (allowed_BA.cumsum(-1) > number_B.unsqueeze(-1)).int().argmax(-1)
        return torch.where(noise[..., 0] < self.exploration, any_B, greedy_B)

    def outputs(self, obs: Tensor, context: RecurrentContext = NO_CONTEXT) -> Tensor:
        """Return Q(s, ·), …A."""
        del context
        return self.forward(obs)

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
