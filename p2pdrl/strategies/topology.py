"""Who may meet whom: candidate partners, undirected graphs over the members, and their mixing weights.

Pure functions of the members' ids; every node computes them from its own view. `candidates` serves
pairwise strategies, whose views may differ for a while: pairwise averaging keeps the mean whatever
graph it runs on. The graphs and weights below serve strategies whose members have agreed on a view.

References: AD-PSGD (arXiv 1710.06952) section 3; exponential graph: SGP (arXiv 1811.10792), section 3,
"Communication topology"; weights: Xiao and Boyd 2004, "Fast linear iterations for distributed
averaging", section 4 (Metropolis-Hastings); D-PSGD (arXiv 1705.09056) for what the spectral gap means.

Shapes: N members, sorted by id; ``W_NN`` holds the weight of member j in member i's average.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from p2pdrl.config.strategy import Partners, Topology

__all__ = ["candidates", "matrix", "metropolis", "neighbours", "spectral_gap"]

Edges = frozenset[tuple[int, int]]
"""Pairs of places in the sorted members, the lower first."""


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


def neighbours(
    topology: Topology, me: str, members: Iterable[str], *, degree: int = 3, seed: str = ""
) -> tuple[str, ...]:
    """Return the ids that ``me`` shares an edge with, sorted; nobody when it is alone.

    Args:
        topology: ``ring``: two neighbours; ``torus``: four, on a grid as square as N allows, or on a ring
            with chords of about √N where it allows none; ``exponential``: those at distances 1, 2, 4, …
            both ways; ``random_regular``: ``degree`` at random, one more where N and ``degree`` are both
            odd; ``complete``: everybody.
        me: own id; one of the members.
        members: all ids of the view, in any order.
        degree: of ``random_regular``; with as many or more others there are, the graph is complete.
        seed: of ``random_regular``: what all members of the view share, and another view doesn't.

    Raises:
        ValueError: ``me`` isn't a member, or ``degree`` is below 2.
    """
    ring = sorted(set(members))
    if me not in ring:
        raise ValueError(f"{me} isn't one of the {len(ring)} members of the view")
    at = ring.index(me)
    edges = _edges(topology, len(ring), degree, seed)
    return tuple(sorted(ring[i + j - at] for i, j in edges if at in (i, j)))


def metropolis(
    topology: Topology, members: Iterable[str], *, degree: int = 3, seed: str = ""
) -> dict[str, dict[str, float]]:
    """Return W as ``{id: {id of a neighbour or itself: weight}}``; arguments as for `neighbours`.

    W_ij = 1 / (1 + max(d_i, d_j)) along edges, where d counts neighbours, and W_ii is what is left to 1. So
    W is symmetric and doubly stochastic: each average keeps the members' mean.
    """
    ring = sorted(set(members))
    around = _adjacent(len(ring), _edges(topology, len(ring), degree, seed))
    weights: dict[str, dict[str, float]] = {}
    for i, me in enumerate(ring):
        row = {ring[j]: 1.0 / (1 + max(len(around[i]), len(around[j]))) for j in sorted(around[i])}
        row[me] = max(0.0, 1.0 - math.fsum(row.values()))
        weights[me] = row
    return weights


def matrix(
    topology: Topology, members: Iterable[str], *, degree: int = 3, seed: str = ""
) -> npt.NDArray[np.float64]:
    """Return W_NN of `metropolis` in the order of the sorted members."""
    weights = metropolis(topology, members, degree=degree, seed=seed)
    W_NN = np.zeros((len(weights), len(weights)))
    place = {member: at for at, member in enumerate(weights)}
    for me, row in weights.items():
        for other, weight in row.items():
            W_NN[place[me], place[other]] = weight
    return W_NN


def spectral_gap(W_NN: npt.NDArray[np.float64]) -> float:
    """Return 1 − |λ₂|: each round shrinks the distance to the mean by |λ₂| or more; 1 when alone.

    |λ₂| is the second largest magnitude of an eigenvalue.

    Raises:
        ValueError: W isn't symmetric.
    """
    if W_NN.ndim != 2 or not np.array_equal(W_NN, W_NN.T):
        raise ValueError("the spectral gap is that of a symmetric matrix")
    magnitudes = np.sort(np.abs(np.linalg.eigvalsh(W_NN)))
    return float(1.0 - magnitudes[-2]) if len(magnitudes) > 1 else 1.0


@lru_cache(maxsize=64)
def _edges(topology: Topology, size: int, degree: int, seed: str) -> Edges:
    if topology == "ring":
        return _circulant(size, (1,))
    if topology == "torus":
        return _torus(size)
    if topology == "exponential":
        return _circulant(size, (1 << power for power in range((size - 1).bit_length())))
    if topology == "complete":
        return _circulant(size, range(1, size))
    return _random_regular(size, degree, seed)


def _circulant(size: int, distances: Iterable[int]) -> Edges:
    """Everybody tied to those at these distances around the ring."""
    return _undirected((i, (i + distance) % size) for distance in distances for i in range(size))


def _torus(size: int) -> Edges:
    rows = next((n for n in range(math.isqrt(size), 0, -1) if size % n == 0), 1)
    columns = size // rows if size else 0
    if columns > 2 * rows:  # a prime would give a bare ring: chords of about √N mix nearly as a torus does
        return _circulant(size, (1, math.isqrt(size)))
    right = ((i, i - i % columns + (i + 1) % columns) for i in range(size))
    down = ((i, (i + columns) % size) for i in range(size))
    return _undirected([*right, *down])


def _random_regular(size: int, degree: int, seed: str) -> Edges:
    """A connected graph in which all have ``degree`` neighbours, by random swaps of a circulant's edges.

    A swap turns (a, b), (c, d) into (a, d), (c, b), which keeps all degrees; swaps until the graph is well
    mixed, then on while it isn't connected. Any degree and N have an answer, unlike with random pairing.
    """
    if degree < 2:
        raise ValueError(f"a connected graph needs a degree of 2 or more, not {degree}")
    degree += degree % 2 * size % 2  # the ends of all edges are N · degree, and even
    if degree >= size - 1:
        return _circulant(size, range(1, size))
    half = [size // 2] if degree % 2 else []
    edges = _circulant(size, [*range(1, degree // 2 + 1), *half])
    # Only random() gives the same numbers in every version of Python, and members may run different ones.
    digest = hashlib.blake2b(f"{size} {degree} {seed}".encode(), digest_size=16).digest()
    draw = random.Random(int.from_bytes(digest, "big")).random
    listed = sorted(edges)
    present = set(listed)
    while True:
        for _ in range(10 * len(listed)):
            first, second = int(draw() * len(listed)), int(draw() * len(listed))
            (a, b), (c, d) = listed[first], listed[second]
            if draw() < 0.5:
                c, d = d, c
            one, two = (min(a, d), max(a, d)), (min(c, b), max(c, b))
            if a == d or c == b or one in present or two in present:
                continue
            present -= {listed[first], listed[second]}
            present |= {one, two}
            listed[first], listed[second] = one, two
        if _connected(size, present):
            return frozenset(present)


def _adjacent(size: int, edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Whom each shares an edge with."""
    around: list[list[int]] = [[] for _ in range(size)]
    for i, j in edges:
        around[i].append(j)
        around[j].append(i)
    return around


def _connected(size: int, edges: Iterable[tuple[int, int]]) -> bool:
    around = _adjacent(size, edges)
    reached, border = {0}, [0]
    while border:
        new = set(around[border.pop()]) - reached
        reached |= new
        border += new
    return len(reached) == size


def _undirected(pairs: Iterable[tuple[int, int]]) -> Edges:
    return frozenset((min(i, j), max(i, j)) for i, j in pairs if i != j)
