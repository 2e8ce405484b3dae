"""What a run with clipped and noised updates gives away: (ε, δ) of the subsampled Gaussian mechanism.

Called by the ``federated`` strategy, which reports ε. Each round every member takes part with chance q
(independently), the sum of their updates of length at most S carries Gaussian noise of deviation z·S; two
swarms are neighbours when one has one member more. Rényi differential privacy of each order α adds up over
rounds, and the best order's is turned into (ε, δ) at the end.

References: Mironov 2017 (arXiv 1702.07476), proposition 1 and corollary 3; Mironov, Talwar and Zhang 2019
(arXiv 1908.10530), section 3.3, for integer α; Canonne, Kamath and Steinke 2020 (arXiv 2004.00010),
proposition 12, for the conversion.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

__all__ = ["ORDERS", "PrivacyAccountant", "epsilon_of", "renyi_divergence"]

ORDERS = (*range(2, 65), 72, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
"""α tried. Any order gives a true bound; the best of these is near the best of all."""


class PrivacyAccountant:
    """Counts rounds, and says what they gave away.

    Args:
        noise_multiplier: z: deviation of the noise over S, the bound on one member's update; 0 hides nothing.
        sampling_rate: q: chance of each member to take part in a round, in [0, 1].
        delta: δ in (0, 1): chance that ε is exceeded, to be well below one over the number of members.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> accountant = PrivacyAccountant(4.0, 0.01, 1e-5)
        >>> accountant.step(10_000)
        >>> round(accountant.epsilon, 3)
        1.035
    """

    def __init__(self, noise_multiplier: float, sampling_rate: float, delta: float) -> None:
        if not 0 <= noise_multiplier < math.inf:
            raise ValueError(f"a noise multiplier is zero or more, not {noise_multiplier}")
        if not 0 <= sampling_rate <= 1:
            raise ValueError(f"a sampling rate is between 0 and 1, not {sampling_rate}")
        if not 0 < delta < 1:
            raise ValueError(f"delta is above 0 and below 1, not {delta}")
        self._noise_multiplier = noise_multiplier
        self._sampling_rate = sampling_rate
        self._delta = delta
        self._rounds: Counter[float] = Counter()
        """How many rounds had which noise multiplier."""

    @property
    def steps(self) -> int:
        """Rounds counted."""
        return self._rounds.total()

    @property
    def delta(self) -> float:
        """δ that ε belongs to."""
        return self._delta

    @property
    def epsilon(self) -> float:
        """ε after the rounds counted, at δ; 0 before the first, infinite without noise."""
        return _compose(self._rounds, self._sampling_rate, self._delta)

    def step(self, n: int = 1, *, share: float = 1.0) -> None:
        """Count ``n`` rounds.

        Args:
            n: how many.
            share: of the noise's variance that was really there, above 0: members who fail bring none.

        Raises:
            ValueError: ``n`` is negative: what was given away can't be taken back; or there is no such share.
        """
        if n < 0:
            raise ValueError(f"rounds can't be taken back: {n}")
        if not 0 < share <= 1:
            raise ValueError(f"a share of the noise is above 0 and at most 1, not {share}")
        self._rounds[self._noise_multiplier * math.sqrt(share)] += n


def epsilon_of(noise_multiplier: float, sampling_rate: float, steps: int, delta: float) -> float:
    """Return ε of ``steps`` rounds at ``delta``; arguments in the ranges of `PrivacyAccountant`.

    ε = min over α of steps·ε_α + log(1 − 1/α) − (log δ + log α) / (α − 1), and not below 0.
    """
    return _compose({noise_multiplier: steps}, sampling_rate, delta)


def _compose(rounds: Mapping[float, int], sampling_rate: float, delta: float) -> float:
    """`epsilon_of` rounds of several noise multipliers: at each order their divergences add up."""
    curves = [(steps, _curve(noise, sampling_rate)) for noise, steps in rounds.items() if steps]
    if not curves or sampling_rate == 0:
        return 0.0
    bounds: list[float] = [
        math.fsum(steps * curve[at][1] for steps, curve in curves)
        + math.log1p(-1 / alpha)
        - (math.log(delta) + math.log(alpha)) / (alpha - 1)
        for at, alpha in enumerate(ORDERS)
    ]
    return max(0.0, min(bounds))


def renyi_divergence(noise_multiplier: float, sampling_rate: float, alpha: int) -> float:
    """Return ε_α of one round: log(A_α) / (α − 1) for an integer α of 2 or more.

    A_α = Σ_k C(α, k) (1 − q)^(α−k) q^k exp(k (k − 1) / (2 z²)), and 1 is taken off before anything is
    rounded: without the exponentials the sum is 1. Terms are added up as logarithms, for a single one
    may be beyond what a float holds. With q = 1 this is α / (2 z²).
    """
    q, z = sampling_rate, noise_multiplier
    if q == 0:
        return 0.0
    if z == 0:
        return math.inf
    if q == 1:
        return alpha / (2 * z) / z
    terms = [
        _log_choose(alpha, k)
        + (alpha - k) * math.log1p(-q)
        + k * math.log(q)
        + _log_expm1(k * (k - 1) / (2 * z) / z)
        for k in range(2, alpha + 1)
    ]
    most = max(terms)
    if math.isinf(most):
        return max(0.0, most)
    above_one = most + math.log(math.fsum(math.exp(term - most) for term in terms))
    return (math.log1p(math.exp(above_one)) if above_one < 500 else above_one) / (alpha - 1)


@lru_cache(maxsize=256)
def _curve(noise_multiplier: float, sampling_rate: float) -> tuple[tuple[int, float], ...]:
    """(α, ε_α) of one round, which many rounds share."""
    return tuple((alpha, renyi_divergence(noise_multiplier, sampling_rate, alpha)) for alpha in ORDERS)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _log_expm1(x: float) -> float:
    """Log of exp(x) − 1; minus infinity at 0."""
    if x > 40:
        return x
    return math.log(math.expm1(x)) if x > 0 else -math.inf
