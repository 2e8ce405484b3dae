"""Who may meet whom: the candidate partners of one node, from the sorted list of members.

Pure functions of (my id, all ids); every node computes them from its own view, which may
differ from others' for a while: pairwise averaging keeps the mean whatever graph it runs on.

References: AD-PSGD (arXiv 1710.06952) section 3; exponential graph: SGP (arXiv 1811.10792),
section 3, "Communication topology".
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdrl.config.strategy import Partners

__all__ = ["candidates"]


def candidates(kind: Partners, me: str, others: Iterable[str]) -> list[str]:
    """Return the ids that ``me`` may begin an exchange with, sorted.

    Args:
        kind: ``random``: everybody; ``ring``: the two neighbours in id order; ``exponential``:
            those at distances 1, 2, 4, … up the ring, which is connected with log2 N partners.
        me: own id.
        others: ids of the living members; own id is ignored.
    """
    ring = sorted({*others, me})
    if kind == "random":
        distances: Iterable[int] = range(1, len(ring))
    elif kind == "ring":
        distances = (1, -1)
    else:
        distances = (1 << power for power in range((len(ring) - 1).bit_length()))
    at = ring.index(me)
    return sorted({ring[(at + distance) % len(ring)] for distance in distances} - {me})
