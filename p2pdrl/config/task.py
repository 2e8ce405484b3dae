"""The swarm's half of the configuration: what is trained, how, until when.

Every member of a swarm runs the same task. The fields under ``env``, ``network`` and
``algorithm`` are fixed at founding and hashed: a node whose hash differs isn't let in. The
fields under ``strategy`` and ``stop`` travel as swarm records and may change on a live swarm.

Durations are in seconds (``_s``).
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = [
    "A2CConfig",
    "AdpsgdConfig",
    "AlgorithmConfig",
    "EnvConfig",
    "LocalConfig",
    "NetworkConfig",
    "PPOConfig",
    "StopConfig",
    "StrategyConfig",
    "TaskConfig",
]

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
PositiveSeconds = Annotated[float, Meta(gt=0, le=1e6)]


class _Travelling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A section that travels between nodes: whatever it holds, it holds no infinity and no NaN."""

    def __post_init__(self) -> None:
        """Check what was decoded, converted or built.

        Raises:
            ValueError: a number isn't finite; msgspec turns it into its own ValidationError.
        """
        for name in self.__struct_fields__:
            value = getattr(self, name)
            for number in value.values() if isinstance(value, dict) else (value,):
                if isinstance(number, float) and not math.isfinite(number):
                    raise ValueError(f"{name} must be a finite number")


class EnvConfig(_Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where experience comes from."""

    id: str = "CartPole-v1"
    """Name in gymnasium's registry; ``module:Name-v0`` imports a module and wants ``--allow-import``."""
    kwargs: dict[str, bool | int | float | str] = {}
    """Arguments handed to the environment's constructor."""
    num_envs: Annotated[int, Meta(ge=1, le=4096)] = 8
    """Copies stepped together by one learner. More give larger batches and better use of the
    processor, but staler data: each update waits for num_envs × unroll_steps steps."""
    max_episode_steps: Annotated[int, Meta(ge=1)] | None = None
    """Overrides the environment's own time limit, in steps; none keeps it."""
    normalize_observations: bool = False
    """Shift and scale observations by the swarm's running mean and deviation. Helps with raw
    physical units (MuJoCo), needless for images."""
    normalize_returns: bool = True
    """Divide rewards by the running deviation of the discounted return; reported returns stay raw.
    Without it large returns (CartPole's reach 100) can saturate a tanh value function, which then
    predicts one constant and lets a good policy decay."""


class NetworkConfig(_Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The shape of policy and value function."""

    kind: Literal["auto", "mlp", "nature_cnn"] = "auto"
    """``auto`` takes the Nature CNN (Mnih 2015) for images and an MLP for everything else."""
    hidden: tuple[Count, ...] = (64, 64)
    """Widths of the hidden layers of the MLP; of the dense layers behind the CNN."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Non-linearity of the MLP; the CNN always uses relu."""


class PPOConfig(
    _Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="ppo"
):
    """Proximal policy optimization (Schulman 2017, arXiv 1707.06347)."""

    learning_rate: NonNegative = 1e-3
    """Step of Adam. Zero leaves parameters alone (for experiments on consensus)."""
    anneal: Literal["none", "linear"] = "none"
    """``linear`` lowers the learning rate to zero as the swarm nears ``stop.env_steps``."""
    unroll_steps: Count = 128
    """Steps per environment between updates (T). Longer: less bias, staler data."""
    epochs: Count = 4
    """Passes over each batch. More squeeze the data harder and drift further from the behaviour policy."""
    minibatches: Count = 4
    """Parts that each pass is cut into; num_envs × unroll_steps must be at least this."""
    discount: Fraction = 0.99
    """γ: weight of the next step's return."""
    gae_lambda: Fraction = 0.95
    """λ of generalized advantage estimation (Schulman 2016): 0 trusts the value function, 1 the returns."""
    clip: Positive = 0.2
    """ε: how far the probability ratio may move before its gradient is cut."""
    value_clip: Positive | None = None
    """Bound on the value's move per update; none leaves it free."""
    value_coef: NonNegative = 0.5
    """Weight of the value loss."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus: higher explores longer and ends less sharp."""
    max_grad_norm: Positive = 0.5
    """Global gradient norm is clipped to this."""
    normalize_advantages: bool = True
    """Shift and scale advantages to zero mean, unit deviation over the full batch."""
    target_kl: Positive | None = None
    """Stop the passes early once the approximate KL divergence exceeds this; none never stops."""


class A2CConfig(
    _Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="a2c"
):
    """Advantage actor-critic, the synchronous form of A3C (Mnih 2016, arXiv 1602.01783)."""

    learning_rate: NonNegative = 7e-4
    """Step of the optimizer."""
    anneal: Literal["none", "linear"] = "none"
    """``linear`` lowers the learning rate to zero as the swarm nears ``stop.env_steps``."""
    unroll_steps: Count = 5
    """Steps per environment between updates (T); also the n of the n-step return."""
    discount: Fraction = 0.99
    """γ: weight of the next step's return."""
    gae_lambda: Fraction = 1.0
    """λ of the advantage; 1 is the plain n-step return."""
    value_coef: NonNegative = 0.5
    """Weight of the value loss."""
    entropy_coef: NonNegative = 0.01
    """Weight of the entropy bonus."""
    max_grad_norm: Positive = 0.5
    """Global gradient norm is clipped to this."""
    normalize_advantages: bool = False
    """Shift and scale advantages over the batch."""
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    """The paper's RMSProp, or Adam, which wants less tuning."""
    rmsprop_alpha: Fraction = 0.99
    """Decay of RMSProp's squared-gradient average."""
    rmsprop_eps: Positive = 1e-5
    """Added to RMSProp's (and Adam's) denominator."""


AlgorithmConfig = PPOConfig | A2CConfig


class AdpsgdConfig(
    _Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="adpsgd"
):
    """Asynchronous pairwise parameter averaging (AD-PSGD, Lian 2018, arXiv 1710.06952)."""

    partners: Literal["random", "ring", "exponential"] = "random"
    """Whom to meet: anyone; the two neighbours in id order; neighbours at distances 1, 2, 4, … .
    Random mixes fastest; ring and exponential keep each node's set of peers small."""
    every_updates: Annotated[int, Meta(ge=0)] = 1
    """An exchange begins after this many updates of the learner; 0 leaves it to ``every_s``."""
    every_s: Seconds = 0.0
    """… or after this many seconds, whichever comes first; 0 leaves it to ``every_updates``."""
    min_interval_s: Seconds = 0.05
    """Exchanges are never begun closer together. Lower mixes faster and costs more processor time."""
    deadline_s: PositiveSeconds = 2.0
    """An exchange that hasn't ended by then is given up; that costs the one round and nothing else."""
    weight: Annotated[float, Meta(gt=0, le=0.5)] = 0.5
    """How far each side moves towards the other: ½ is the average."""
    wire: Literal["float32", "bf16"] = "bf16"
    """Number format on the wire: bf16 halves the bytes; both sides mix the same rounded values."""
    max_staleness: Count = 1000
    """A node this many policy versions behind its peer adopts the peer's state instead of averaging."""
    max_distance: Annotated[float, Meta(gt=0, le=1e12)] = 1e3
    """A node whose distance from its peer, relative to the peer's norm, exceeds this adopts or is refused."""


class LocalConfig(
    _Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="local"
):
    """No averaging: each node trains alone. The reference that others are measured against."""


StrategyConfig = AdpsgdConfig | LocalConfig


class StopConfig(_Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When the swarm is done; the condition that is met first ends it, zero or none never does."""

    env_steps: Annotated[int, Meta(ge=0)] = 0
    """Environment steps of the whole swarm, all nodes and boots together."""
    time_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Seconds since the swarm was founded."""
    mean_return: float | None = None
    """Each living node's mean return over its last ``window`` sampled training episodes has reached this."""
    window: Annotated[int, Meta(ge=1, le=1_000_000)] = 100
    """Episodes that a mean return is taken over."""


class TaskConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole task."""

    seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Seed of the initial weights, the same on every node; environments are seeded per node."""
    env: EnvConfig = EnvConfig()
    network: NetworkConfig = NetworkConfig()
    algorithm: AlgorithmConfig = PPOConfig()
    strategy: StrategyConfig = AdpsgdConfig()
    stop: StopConfig = StopConfig()
