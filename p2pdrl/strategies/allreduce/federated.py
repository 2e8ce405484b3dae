"""Federated averaging with differential privacy: clipped differences, noise, and (ε, δ) as accounted.

Each round every member takes part with chance q; each part is shortened to the norm S, and the m who take
part add noise N(0, z²S²/m) each, so that their sum carries N(0, z²S²) (McMahan 2018, arXiv 1710.06963).
Where only m' of them come, it carries m'/m of that, and ε counts the round so. Who takes part follows from
mode epoch, round and node id, so everybody knows without a message. In rounds of fewer than ``min_members``
members nobody takes part: the fewer bring noise, the more each one's training suffers, and alone it hides
nothing from anybody. With noise all parts count the same: weights by samples would let one member move the
sum by more than S.

**What it protects.** The averaged vectors, and whatever is made of them. Not against the owner of a piece,
who sees parts one by one with their own noise alone, nor the parameters with which the mode began.
``epsilon`` holds against those who don't know who took part (sampling hides members); ``epsilon_known``
against those who do, which every member can: it counts our own rounds, with no help from sampling.

**Accounting.** Two swarms are neighbours when one has one member more. Rényi differential privacy of each
order α adds up over rounds, and the best order's is turned into (ε, δ). References: Mironov 2017 (arXiv
1702.07476), proposition 1 and corollary 3; Mironov, Talwar and Zhang 2019 (arXiv 1908.10530), theorem 5 (the
divergence is that of the mixture from N(0, z²), for every α) and section 3.3 (its closed form for integer α);
Canonne, Kamath and Steinke 2020 (arXiv 2004.00010), proposition 12, for the conversion. Between integers the
definition is integrated: the alternating series of section 3.3, with the signs of its terms dropped as
accountants commonly do, is up to some percent greater, and where z is small and α near 1, just where the best
α lies for a large ε, it doesn't converge.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from p2pdrl.config.strategy import FederatedConfig
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.mix import norm
from p2pdrl.tensors.wire import WALK, spans

__all__ = [
    "KEY_BYTES",
    "ORDERS",
    "Privacy",
    "PrivacyAccountant",
    "SecretNoise",
    "epsilon_of",
    "participants",
    "renyi_divergence",
]

FRACTIONS = tuple(round(1 + n / 40, 3) for n in range(1, 80)) + tuple(round(3 + n / 10, 1) for n in range(90))
INTEGERS = (*range(12, 65), 72, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
ORDERS: tuple[float, ...] = (*FRACTIONS, *INTEGERS)
"""α tried: each tenth up to 11.9, closer below 3. Any order gives a true bound; the best of these is near the
best of all. Large ε have theirs near 1: with noise 0.5, q = 0.1 and 200 rounds integers alone make ε 96, not
50."""
REACH = 13.0
"""So many deviations of the noise beyond its centres nothing is left to integrate (e^-84)."""
LEAST_NOISE = 0.1
"""With less noise than this only integers are tried: ε is in the hundreds anyway."""


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
    def epsilon(self) -> float:
        """ε after the rounds counted, at δ; 0 before the first, infinite without noise."""
        return _compose(self._rounds, self._sampling_rate, self._delta)

    def step(self, n: int = 1, *, share: float = 1.0) -> None:
        """Count ``n`` rounds.

        Args:
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


def renyi_divergence(noise_multiplier: float, sampling_rate: float, alpha: float) -> float:
    """Return ε_α of one round: log(A_α) / (α − 1), for α above 1.

    A_α is the mean over x of N(0, z²) of r(x)^α, where r(x) = 1 − q + q exp((2x − 1) / (2z²)) is the ratio of
    the densities with and without the member. For an integer α that is
    Σ_k C(α, k) (1 − q)^(α−k) q^k exp(k (k − 1) / (2 z²)), and 1 is taken off before anything is rounded:
    without the exponentials the sum is 1. Terms are added up as logarithms, for a single one may be beyond
    what a float holds. With q = 1 this is α / (2 z²).
    """
    q, z = sampling_rate, noise_multiplier
    if q == 0:
        return 0.0
    if z == 0:
        return math.inf
    if q == 1:
        return alpha / (2 * z) / z
    if alpha != int(alpha):
        return _integrated(z, q, alpha) if z >= LEAST_NOISE else math.inf
    n = int(alpha)
    terms = [
        _log_choose(n, k) + (n - k) * math.log1p(-q) + k * math.log(q) + _log_expm1(k * (k - 1) / (2 * z) / z)
        for k in range(2, n + 1)
    ]
    return _divergence_of(terms, alpha)


def _divergence_of(terms: Iterable[float], alpha: float) -> float:
    """ε_α from the logarithms of what A_α − 1 is the sum of."""
    logs = list(terms)
    most = max(logs)
    if math.isinf(most):
        return max(0.0, most)
    above_one = most + math.log(math.fsum(math.exp(term - most) for term in logs))
    return (math.log1p(math.exp(above_one)) if above_one < 500 else above_one) / (alpha - 1)


def _integrated(noise_multiplier: float, sampling_rate: float, alpha: float) -> float:
    """`renyi_divergence` by its definition, for any α and 0 < q < 1.

    With u = r − 1, whose mean is 0, A_α − 1 is the mean of (1 + u)^α − 1 − αu, which is nowhere negative: so
    nothing cancels, and the trapezoidal rule adds up logarithms. Its error falls exponentially with the step:
    what is integrated is analytic up to the zeros of r, πz² off the axis, and falls off like a Gaussian.
    """
    q, z = sampling_rate, noise_multiplier
    step = min(z / 4, z * z / 2)
    x = np.arange(-REACH * z, max(alpha, 2.0) + REACH * z, step)
    exponent = (2 * x - 1) / (2 * z) / z
    with np.errstate(all="ignore"):  # what overflows, or is zero, isn't chosen below
        u = q * np.expm1(exponent)
        log_ratio = np.where(exponent < 500, np.log1p(u), math.log(q) + exponent)
        power = alpha * log_ratio
        series = 1 + (alpha - 2) / 3 * u * (1 + (alpha - 3) / 4 * u * (1 + (alpha - 4) / 5 * u))
        log_excess = np.select(
            [np.abs(u) < 1e-3, power < 1],
            [
                2 * np.log(np.abs(u)) + np.log(alpha * (alpha - 1) / 2 * series),
                np.log(np.expm1(power) - alpha * u),
            ],
            power + np.log1p((alpha - 1) * np.exp(-power) - alpha * np.exp(log_ratio - power)),
        )
    log_density = -0.5 * (x / z) ** 2 - math.log(z * math.sqrt(2 * math.pi))
    return _divergence_of((log_density + log_excess + math.log(step)).tolist(), alpha)


@lru_cache(maxsize=256)
def _curve(noise_multiplier: float, sampling_rate: float) -> tuple[tuple[float, float], ...]:
    """(α, ε_α) of one round, which many rounds share."""
    return tuple((alpha, renyi_divergence(noise_multiplier, sampling_rate, alpha)) for alpha in ORDERS)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _log_expm1(x: float) -> float:
    """Log of exp(x) − 1; minus infinity at 0."""
    if x > 40:
        return x
    return math.log(math.expm1(x)) if x > 0 else -math.inf


KEY_BYTES = 32
GRID_BITS = 16
"""The grid is so many halvings finer than the deviation."""


class SecretNoise:
    """One stream of Gaussian noise from a cryptographic generator, on a fixed grid.

    A statistical generator won't do: PCG's state can be computed from what it gave out (Bouillaguet 2020,
    "Practical seed-recovery for the PCG pseudo-random number generator"), and who knows a member's noise of
    one round could subtract that of all its others.

    **Bits**: the keystream of AES-256 in counter mode, under a key from the operating system that leaves the
    process nowhere; nothing of it repeats before 2^128 blocks. **Gaussians**: Box and Muller (1958), in
    float64, 64 bits for the radius and 64 for the angle; the tails end at 9.5 deviations, beyond which the
    chance is 3e-21. **Grid**: floating-point Gaussians have gaps, and which numbers ``value + noise`` can be
    says something about ``value`` (Mironov 2012, "On significance of the least significant bits"; Jin 2022,
    arXiv 2112.05307). So the sum, made in float64, is rounded to multiples of 2^-16 of the deviation, or a
    little less, the same whatever the value: to round is post-processing.

    What isn't claimed: no proof bounds the distance from the ideal sum (discrete mechanisms have one: Canonne
    2020); far out in the tails points have fewer sums; time and memory accesses depend on the values; and
    whoever reads this process's memory has the key.

    Args:
        key: `KEY_BYTES` of secret, never used for another stream; None draws one. Give one in tests only.
    """

    def __init__(self, key: bytes | None = None) -> None:
        key = secrets.token_bytes(KEY_BYTES) if key is None else key
        self._stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
        self._zeros = bytes(8 * WALK)
        self._bits: npt.NDArray[np.uint64] = np.empty(WALK + 2, np.uint64)  # the cipher wants room to spare

    def add_to(self, vector: Float32Array, deviation: float) -> None:
        """Add independent Gaussians of mean 0 to all entries, and round to the grid; in place."""
        grid = grid_of(deviation)
        for span in spans(vector.size, WALK):
            piece = vector[span]
            total = self._gaussians(piece.size)
            total *= deviation
            total += piece
            total /= grid  # a power of two, so exact
            np.rint(total, out=total)
            total *= grid
            piece[:] = total

    def _gaussians(self, count: int) -> npt.NDArray[np.float64]:
        """At most `WALK` of mean 0 and deviation 1."""
        pairs = (count + 1) // 2
        self._stream.update_into(memoryview(self._zeros)[: 16 * pairs], self._bits.data.cast("B"))
        # In (0, 1): never 0, and down to 2^-65 for the radius.
        uniform = self._bits[: 2 * pairs].astype(np.float64)
        uniform += 0.5
        uniform *= 2.0**-64
        radius, angle = uniform[:pairs], uniform[pairs:]
        np.log(radius, out=radius)
        radius *= -2.0
        np.sqrt(radius, out=radius)
        angle *= 2 * math.pi
        sine = np.sin(angle)
        np.cos(angle, out=angle)
        angle *= radius
        sine *= radius
        return np.concatenate((angle, sine))[:count]


def grid_of(deviation: float) -> float:
    """Distance between neighbouring points of the grid: a power of two."""
    return 2.0 ** (math.floor(math.log2(deviation)) - GRID_BITS)


def participants(epoch: int, number: int, members: Sequence[str], chance: float) -> tuple[str, ...]:
    """Who takes part in round ``number``, each with ``chance``; the same at all members."""
    bound = chance * 2.0**64

    def drawn(member: str) -> int:
        digest = blake2b(f"{epoch} {number} {member}".encode(), digest_size=8, person=b"participants")
        return int.from_bytes(digest.digest(), "big")

    return tuple(member for member in members if drawn(member) < bound)


class Privacy:
    """What becomes of one member's differences before anybody gets them: clipped, noised, accounted.

    Args:
        noise: what hides our differences; None makes one with a secret key of its own.
    """

    def __init__(
        self, config: FederatedConfig, epoch: int, me: str, noise: SecretNoise | None = None
    ) -> None:
        self._config, self._epoch, self._me = config, epoch, me
        self._noise = SecretNoise() if noise is None else noise
        z, delta = config.noise_multiplier, config.delta
        self._sampled = PrivacyAccountant(z, config.participation, delta)
        self._known = PrivacyAccountant(z, 1.0, delta)
        self._took_part = False
        self._shaped, self._chosen = -1, 0
        """The round that was shaped last, and how many were to take part in it."""
        self._members = 0
        """Of that round."""

    @property
    def equal(self) -> bool:
        """With noise, all parts count the same: see the module."""
        return self._config.noise_multiplier > 0

    @property
    def facts(self) -> dict[str, float | str]:
        """ε by who asks, δ, and the rounds counted; without noise ε is infinite and isn't told."""
        facts: dict[str, float | str] = {"delta": self._config.delta, "private_rounds": self._sampled.steps}
        if self._config.noise_multiplier:
            facts["epsilon"] = self._sampled.epsilon
            facts["epsilon_known"] = self._known.epsilon
        else:
            facts["epsilon"] = "none: no noise is added"
        if self._shaped >= 0 and self._too_few:
            facts["waits"] = f"for {self._config.min_members} members, rounds have {self._members}"
        return facts

    def shape(self, difference: Float32Array, number: int, members: Sequence[str]) -> bool:
        """Clip to S and add our share of the noise, in place; False when we take no part in round ``number``.

        A round that is done again, because the group changed, takes noise anew: owners of pieces may have
        seen both, so both are counted.
        """
        if self._took_part:
            self._count()
        self._members = len(members)
        chosen = (
            () if self._too_few else participants(self._epoch, number, members, self._config.participation)
        )
        self._took_part = self._me in chosen
        self._shaped, self._chosen = number, len(chosen)
        if not self._took_part:
            return False
        length = norm(difference)
        if length > self._config.clip_norm:
            # A hair less than S: float32 rounding may not lead beyond it.
            difference *= np.float32(self._config.clip_norm / length * (1 - 1e-6))
        deviation = self._config.noise_multiplier * self._config.clip_norm / math.sqrt(len(chosen))
        if deviation:
            self._noise.add_to(difference, deviation)
        return True

    def ended(self, number: int, givers: int) -> None:
        """Count round ``number``, with less noise where members who were to take part gave nothing."""
        chosen = self._chosen if number == self._shaped else 0
        if self._too_few and number == self._shaped and not givers:
            return  # nobody was to take part, whoever was drawn: the round says nothing of anybody
        if givers or not chosen:
            self._count(min(1.0, givers / chosen) if chosen else 1.0)
        self._took_part = False

    @property
    def _too_few(self) -> bool:
        return self._members < self._config.min_members

    def _count(self, share: float = 1.0) -> None:
        self._sampled.step(share=share)
        if self._took_part:
            self._known.step(share=share)
