"""Who comes first, the same on every node and without a word said: highest random weight.

Each id gets a weight from the seed and itself; the greatest comes first. When one id leaves, the
order of all others stays, so nobody else's place changes hands (Thaler and Ravishankar 1998,
"Using name-based mappings to increase hit rates"). Groups choose their proposer, and servers their
shards, by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

__all__ = ["ranked", "weight"]


def weight(seed: str, member: str) -> tuple[int, str]:
    """The weight of ``agreement``: 64 bits of BLAKE2b; the id itself decides the improbable tie."""
    digest = blake2b(member.encode(), digest_size=8, key=blake2b(seed.encode(), digest_size=32).digest())
    return int.from_bytes(digest.digest(), "big"), member


def ranked(seed: str, ids: Iterable[str]) -> list[str]:
    """Put ``ids`` in order, the first first; each id once.

    Args:
        seed: what the order is for (``"group 3"``); another seed gives another order.
    """
    return sorted(set(ids), key=lambda member: weight(seed, member), reverse=True)
