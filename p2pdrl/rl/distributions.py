"""A policy's outputs, and the action distributions that they stand for.

They replace ``torch.distributions``, whose argument checks cost more than the network of a small policy.
Randomness comes in as a tensor of noise, drawn for a whole unroll at once. ``PolicyOutputs`` has
tensors, which a pipeline can send, and what both of its ends know; the distribution is built where it is
needed.

A continuous action is kept as the Gaussian's own sample u, whatever the environment gets for it
(``ActionMap``): what tanh has squashed can't be brought back without loss.

An action of several parts (MultiDiscrete, MultiBinary) is drawn from independent distributions, one for each
part: log π(a) = Σ_k log π_k(a_k), and H[π] = Σ_k H[π_k] (Tavakoli 2018, arXiv 1711.08946, has such a policy).

Shape suffixes: … leading dimensions (N rows, or B environments and T steps), N choices, A actions or their
dimensions, K parts of an action, M choices of the part that has most, L logits of all parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import softplus

from p2pdrl.rl.envs import MultiBinary, MultiDiscrete

__all__ = [
    "ActionMap",
    "Bernoulli",
    "Categorical",
    "DiagonalGaussian",
    "Distribution",
    "MultiCategorical",
    "PolicyOutputs",
    "TransformedGaussian",
    "distribution",
]

NEVER = -1e9
"""Logit of a choice that isn't one: its probability is 0 exactly, and no gradient comes of it.

Minus infinity would be too, but for 0 · ∞ in the entropy, which isn't a number."""
LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


class Categorical:
    """One of N choices, with probabilities ``softmax(logits)``.

    Args:
        logits: unnormalised log-probabilities, …N.
    """

    __slots__ = ("logits",)

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    @staticmethod
    def noise(shape: tuple[int, ...], choices: int, generator: torch.Generator) -> Tensor:
        """Return standard Gumbel noise of shape (*shape, choices): −log of exponential draws."""
        draws = torch.empty((*shape, choices), device=generator.device)
        return draws.exponential_(generator=generator).log_().neg_()

    def sample(self, noise: Tensor) -> Tensor:
        """Return choices (int64, …) by the Gumbel-max trick: argmax(logits + Gumbel noise)."""
        return (self.logits + noise).argmax(-1)

    def mode(self) -> Tensor:
        """Return the likeliest choices (int64, …)."""
        return self.logits.argmax(-1)

    def log_prob(self, actions: Tensor) -> Tensor:
        """Return log-probabilities of ``actions`` (int64, …)."""
        log_probs = torch.log_softmax(self.logits, -1)
        return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def entropy(self, sample: Tensor | None = None) -> Tensor:
        """Return the entropies, in nats, …; no sample is needed."""
        del sample
        log_probs = torch.log_softmax(self.logits, -1)
        return -(log_probs.exp() * log_probs).sum(-1)


class MultiCategorical:
    """K independent choices, the k-th one of ``sizes[k]``.

    Args:
        logits: of all of them, one after the other: …L.
        sizes: K.
    """

    __slots__ = ("_each", "sizes")

    def __init__(self, logits: Tensor, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self._each = Categorical(_padded(logits, sizes))

    @staticmethod
    def noise(shape: tuple[int, ...], sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return standard Gumbel noise of shape (*shape, K, M)."""
        return Categorical.noise((*shape, len(sizes)), max(sizes), generator)

    def sample(self, noise: Tensor) -> Tensor:
        """Return choices (int64, …K)."""
        return self._each.sample(noise)

    def mode(self) -> Tensor:
        """Return the likeliest choices (int64, …K)."""
        return self._each.mode()

    def log_prob(self, actions: Tensor) -> Tensor:
        """Return log-probabilities of ``actions`` (int64, …K), summed over K."""
        return self._each.log_prob(actions).sum(-1)

    def entropy(self, sample: Tensor | None = None) -> Tensor:
        """Return the entropies, in nats, …; no sample is needed."""
        return self._each.entropy(sample).sum(-1)


def _padded(logits: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return logits …KM of logits …L: those of choices that a part doesn't have are `NEVER`."""
    if len(set(sizes)) == 1:
        return logits.view(*logits.shape[:-1], len(sizes), sizes[0])
    counts_K1 = torch.tensor(sizes, device=logits.device).unsqueeze(-1)
    there_KM = torch.arange(max(sizes), device=logits.device) < counts_K1
    padded = logits.new_full((*logits.shape[:-1], *there_KM.shape), NEVER)
    padded[..., there_KM] = logits
    return padded


class Bernoulli:
    """A independent switches, on with probability ``sigmoid(logits)``.

    Args:
        logits: log-odds, …A.
    """

    __slots__ = ("logits",)

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    @staticmethod
    def noise(shape: tuple[int, ...], switches: int, generator: torch.Generator) -> Tensor:
        """Return uniform noise of shape (*shape, switches)."""
        return torch.rand((*shape, switches), generator=generator, device=generator.device)

    def sample(self, noise: Tensor) -> Tensor:
        """Return switches (int64 0 or 1, …A)."""
        return (noise < torch.sigmoid(self.logits)).long()

    def mode(self) -> Tensor:
        """Return the likeliest switches (int64, …A)."""
        return (self.logits > 0.0).long()

    def log_prob(self, actions: Tensor) -> Tensor:
        """Return log-probabilities of ``actions`` (int64, …A), summed over A."""
        return -softplus((1 - 2 * actions) * self.logits).sum(-1)

    def entropy(self, sample: Tensor | None = None) -> Tensor:
        """Return the entropies, in nats, …; no sample is needed."""
        del sample
        # −p log p − (1 − p) log (1 − p) = log (1 + e^l) − p l
        return (softplus(self.logits) - torch.sigmoid(self.logits) * self.logits).sum(-1)


class DiagonalGaussian:
    """A normal distribution per action dimension, independent of each other.

    Args:
        mean: …A.
        log_std: A, the same in every state; or …A.
    """

    __slots__ = ("log_std", "mean")

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.mean = mean
        self.log_std = log_std

    @staticmethod
    def noise(shape: tuple[int, ...], dim: int, generator: torch.Generator) -> Tensor:
        """Return standard normal noise of shape (*shape, dim)."""
        return torch.randn((*shape, dim), generator=generator, device=generator.device)

    def sample(self, noise: Tensor) -> Tensor:
        """Return actions …A, not clipped: clipping belongs to the environment, or log_prob would lie."""
        return self.mean + self.log_std.exp() * noise

    def mode(self) -> Tensor:
        """Return the likeliest actions, …A."""
        return self.mean

    def log_prob(self, actions: Tensor) -> Tensor:
        """Return log-densities of ``actions`` …A, summed over A."""
        z = (actions - self.mean) * torch.exp(-self.log_std)
        return (-0.5 * z * z - self.log_std - LOG_SQRT_2PI).sum(-1)

    def entropy(self, sample: Tensor | None = None) -> Tensor:
        """Return the entropies, in nats, …; no sample is needed."""
        del sample
        return (self.log_std + (0.5 + LOG_SQRT_2PI)).sum(-1).expand(self.mean.shape[:-1])


@dataclass(frozen=True, eq=False)
class ActionMap:
    """What environments get for a sample u: a = center + scale · u, or center + scale · tanh(u).

    Attributes:
        center: A, middle of the bounds.
        scale: A, half of what lies between them.
        squash: whether tanh comes first.
    """

    center: npt.NDArray[np.float64]
    scale: npt.NDArray[np.float64]
    squash: bool

    @staticmethod
    def between(low_A: npt.NDArray[Any], high_A: npt.NDArray[Any], *, squash: bool) -> ActionMap:
        """Return the one that brings -1 … 1 to ``low_A`` … ``high_A``, which are finite."""
        low, high = low_A.astype(np.float64), high_A.astype(np.float64)
        return ActionMap(0.5 * (high + low), 0.5 * (high - low), squash)

    def __call__(self, samples: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return environments' actions …A of samples …A; without tanh they may be out of bounds."""
        inner = np.tanh(samples) if self.squash else samples
        return np.asarray(self.center + self.scale * inner, np.float32)

    @cached_property
    def log_scale(self) -> float:
        """Logarithm of the volume that a unit of volume becomes."""
        return float(np.log(self.scale).sum())

    def log_det(self, samples: Tensor) -> Tensor:
        """Return log |det ∂a/∂u| of samples …A, exactly: log(1 − tanh²u) = 2 (log 2 − u − softplus(−2u))."""
        if not self.squash:
            return samples.new_full(samples.shape[:-1], self.log_scale)
        return self.log_scale + 2.0 * (math.log(2.0) - samples - softplus(-2.0 * samples)).sum(-1)


class TransformedGaussian(DiagonalGaussian):
    """A diagonal Gaussian behind an ``ActionMap``: densities of what the environment gets (before its clip).

    Samples and modes are the Gaussian's: u, and its mean, which the map brings to the median.

    Args:
        mean: …A.
        log_std: A or …A.
        action_map: applied to samples by ``Policy.to_environment``.
    """

    __slots__ = ("action_map",)

    def __init__(self, mean: Tensor, log_std: Tensor, action_map: ActionMap) -> None:
        super().__init__(mean, log_std)
        self.action_map = action_map

    def log_prob(self, actions: Tensor) -> Tensor:
        """Return log π(a) of what the samples ``actions`` …A become: log N(u) − log |det ∂a/∂u|."""
        return super().log_prob(actions) - self.action_map.log_det(actions)

    def entropy(self, sample: Tensor | None = None) -> Tensor:
        """Return the entropies, in nats, …: H[N] + E[log |det ∂a/∂u|].

        With tanh the expectation is estimated by one sample, as u = μ + σ z with z held, so that its
        gradient is the expectation's too; without bias where ``sample`` is from this distribution.

        Args:
            sample: …A; of no use without tanh. None takes the mean, which estimates from above.
        """
        entropy = super().entropy()
        u = self.mean
        if self.action_map.squash and sample is not None:
            std = self.log_std.exp()
            z = ((sample - self.mean) / std).detach()
            u = self.mean + std * z
        return entropy + self.action_map.log_det(u)


Distribution = Categorical | MultiCategorical | Bernoulli | DiagonalGaussian


class PolicyOutputs(NamedTuple):
    """The heads' outputs, each row of them for one observation."""

    policy: Tensor
    """…A: logits of discrete actions (…L where they have several parts), or means of continuous ones."""
    values: Tensor
    """…: v(s)."""
    log_std: Tensor | None = None
    """A: a parameter, the same for every row; …A where it depends on the state; None where actions are
    discrete."""
    action_map: ActionMap | None = None
    """Of continuous actions that are squashed or rescaled: the same for all rows and all nodes."""
    parts: MultiDiscrete | MultiBinary | None = None
    """Of actions that have several parts; likewise."""

    def distribution(self, rows: tuple[slice, ...] = ()) -> Distribution:
        """Return π(·|s) of each row, or of those at an index into the leading dimensions."""
        log_std = self.log_std
        if log_std is not None and log_std.dim() > 1:
            log_std = log_std[rows]
        return distribution(self.policy[rows], log_std, self.action_map, self.parts)


def distribution(
    policy: Tensor,
    log_std: Tensor | None,
    action_map: ActionMap | None = None,
    parts: MultiDiscrete | MultiBinary | None = None,
) -> Distribution:
    """Return what a policy head's outputs stand for; see ``PolicyOutputs``."""
    if parts is not None:
        if isinstance(parts, MultiBinary):
            return Bernoulli(policy)
        return MultiCategorical(policy, parts.sizes)
    if log_std is None:
        return Categorical(policy)
    if action_map is None:
        return DiagonalGaussian(policy, log_std)
    return TransformedGaussian(policy, log_std, action_map)
