"""Federated averaging with differential privacy: clipped differences, noise, and (ε, δ) told.

Each round every member takes part with chance q; each part is shortened to the norm S, and the m who take
part add noise N(0, z²S²/m) each, so that their sum carries N(0, z²S²) (McMahan 2018, arXiv 1710.06963).
Where only m' of them come, it carries m'/m of that, and ε counts the round so.
Who takes part follows from mode epoch, round and node id, so everybody knows without a message; the noise
comes from a cryptographic generator (`noise`). In rounds of fewer than ``min_members`` members nobody takes
part: the fewer bring noise, the more each one's training suffers, and alone it hides nothing from anybody.
With noise all parts count the same: weights by samples would let one member move the sum by more than S.

**What it protects.** The averaged vectors, and whatever is made of them. Not against the owner of a piece,
who sees parts one by one with their own noise alone, nor the parameters with which the mode began.
``epsilon`` holds against those who don't know who took part (sampling hides members: Mironov 2019, arXiv
1908.10530); ``epsilon_known`` against those who do, which every member can: it counts our own
rounds, with no help from sampling.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from p2pdrl.config.strategy import FederatedConfig
from p2pdrl.strategies.averaging.noise import SecretNoise
from p2pdrl.strategies.averaging.privacy import PrivacyAccountant
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.mix import norm

__all__ = ["Privacy", "participants"]


def participants(epoch: int, number: int, members: Sequence[str], chance: float) -> tuple[str, ...]:
    """Who takes part in round ``number``, each with ``chance``; the same at all members."""
    bound = chance * 2.0**64

    def drawn(member: str) -> int:
        digest = blake2b(f"{epoch} {number} {member}".encode(), digest_size=8, person=b"participants")
        return int.from_bytes(digest.digest(), "big")

    return tuple(member for member in members if drawn(member) < bound)


class Privacy:
    """`Shaping` of one member's differences.

    Args:
        config: the strategy's options.
        epoch: mode epoch.
        me: own node id.
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
        """Clip to S and add our share of the noise; see `Shaping`.

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
        """Count the round, with less noise where members who were to take part gave nothing."""
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
