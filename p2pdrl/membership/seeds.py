"""Which seeds to try when: every seed and every address behind it, for ever.

A seed is at rest while each address behind it is a living member or ourselves. Any other is tried
with a back-off of 1 to 30 s, so two islands that were started from the same seeds become one. Names
are resolved anew at each try. The service does the dialling.
"""

from __future__ import annotations

import ipaddress
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from p2pdrl.transport.protocol import Address

__all__ = ["Seed", "SeedBook"]

BACKOFF_MIN_S = 1.0
BACKOFF_MAX_S = 30.0
RECHECK_S = 1.0
RESOLVE_AGAIN_S = 30.0


@dataclass(slots=True)
class Seed:
    """One entry of ``--peers``, or an address remembered from the last run.

    Attributes:
        hint: remembered; dropped once the swarm was met.
        failures: tries in a row that failed.
        next_at: monotonic time of the next try.
        answered: who answered at each address, by node id.
        refusal: what the last refusal said.
        trouble: why the last try failed, in a few words; empty when it didn't.
    """

    address: Address
    hint: bool = False
    failures: int = 0
    next_at: float = 0.0
    answered: dict[Address, str] = field(default_factory=dict)
    refusal: str | None = None
    trouble: str = ""

    @property
    def is_name(self) -> bool:
        """True when it has to be resolved."""
        try:
            ipaddress.ip_address(self.address.host)
        except ValueError:
            return True
        return False


class SeedBook:
    """All seeds of a node.

    Args:
        seeds: as given by the person.
        hints: addresses remembered from the last run.
        rng: spreads the tries of many nodes.
    """

    def __init__(self, seeds: Iterable[Address], hints: Iterable[Address], rng: random.Random) -> None:
        given = dict.fromkeys(seeds)
        self._seeds = [Seed(address) for address in given]
        self._seeds += [Seed(address, hint=True) for address in dict.fromkeys(hints) if address not in given]
        self._rng = rng
        self._heard_of = 0

    def __len__(self) -> int:
        return len(self._seeds)

    @property
    def all(self) -> list[Seed]:
        """Every seed."""
        return list(self._seeds)

    def hear_of(self, address: Address, at_most: int) -> None:
        """Take ``address`` in as if it had been remembered, unless it is known or there are many."""
        if all(seed.address != address for seed in self._seeds) and self._heard_of < at_most:
            self._heard_of += 1
            self._seeds.append(Seed(address, hint=True))

    def due(self, now: float) -> list[Seed]:
        """Seeds whose time has come."""
        return [seed for seed in self._seeds if seed.next_at <= now]

    def wait_s(self, now: float) -> float:
        """Seconds until some seed is due, at most `RECHECK_S`."""
        if not self._seeds:
            return RECHECK_S
        return min(RECHECK_S, max(0.01, min(seed.next_at for seed in self._seeds) - now))

    def todo(
        self,
        seed: Seed,
        addresses: Iterable[Address],
        own_id: str,
        at_rest: Callable[[Address, str | None], bool],
    ) -> list[Address]:
        """The addresses behind ``seed`` that have to be tried.

        Args:
            seed: one of ours.
            addresses: what it resolves to now.
            own_id: our node id: where we answered ourselves, there is nothing to try.
            at_rest: tells whether a living member has that address or that id.
        """
        current = list(dict.fromkeys(addresses))
        seed.answered = {address: who for address, who in seed.answered.items() if address in current}
        return [
            address
            for address in current
            if seed.answered.get(address) != own_id and not at_rest(address, seed.answered.get(address))
        ]

    def succeeded(self, seed: Seed, now: float) -> None:
        """Everything behind ``seed`` is a living member or ourselves."""
        seed.failures = 0
        seed.refusal = None
        seed.trouble = ""
        seed.next_at = now + (RESOLVE_AGAIN_S if seed.is_name else RECHECK_S)

    def failed(self, seed: Seed, now: float) -> None:
        """Something behind ``seed`` didn't answer: back off."""
        backoff_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0 ** min(seed.failures, 10))
        seed.failures += 1
        seed.next_at = now + backoff_s * self._rng.uniform(0.8, 1.0)

    def soon(self, seed: Seed, now: float) -> None:
        """Whoever is there is only just starting: ask again without a back-off."""
        seed.failures = 0
        seed.next_at = now + RECHECK_S * self._rng.uniform(0.5, 0.7)

    def refused(self, seed: Seed, reason: str, now: float) -> bool:
        """It said no: try again slowly; True when the reason is news."""
        news = seed.refusal != reason
        seed.refusal = reason
        seed.next_at = now + BACKOFF_MAX_S * self._rng.uniform(0.8, 1.0)
        return news

    def drop_hints(self) -> None:
        """The swarm was met: what we remembered has served."""
        self._seeds = [seed for seed in self._seeds if not seed.hint]
