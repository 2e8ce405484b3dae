"""Undirected graphs and their mixing matrices, for every swarm of 1 to 64 members."""

from __future__ import annotations

from math import cos, pi, sqrt
from typing import get_args

import numpy as np
import pytest

from p2pdrl.config.strategy import Topology
from p2pdrl.strategies.topology import matrix, metropolis, neighbours, spectral_gap

TOPOLOGIES = get_args(Topology)
every = pytest.mark.parametrize("topology", TOPOLOGIES)


def ids(size: int) -> list[str]:
    """Ids in another order than their sorted one."""
    return [f"{37 * n % 101:03d}" for n in range(size)]


@every
def test_weights_are_symmetric_doubly_stochastic_and_metropolis(topology: Topology) -> None:
    for size in range(1, 65):
        W = matrix(topology, ids(size), seed="view")
        np.testing.assert_array_equal(W, W.T)
        assert (W >= 0).all()
        np.testing.assert_allclose(W.sum(axis=1), 1, atol=1e-15)
        edge = (W > 0) & ~np.eye(size, dtype=bool)
        degrees = edge.sum(axis=1)
        golden = np.where(edge, 1 / (1 + np.maximum.outer(degrees, degrees)), 0)
        np.testing.assert_array_equal(np.where(edge, W, 0), golden)


@every
def test_graphs_are_connected_and_contract_by_lambda_2(topology: Topology) -> None:
    """From λ₂'s own eigenvector every round shrinks the distance to the mean by |λ₂| exactly."""
    for size in range(2, 65):
        W = matrix(topology, ids(size), seed="view")
        gap = spectral_gap(W)
        assert gap > 1e-4, (topology, size)
        values, vectors = np.linalg.eigh(W)
        order = np.argsort(np.abs(values))
        x = vectors[:, order[-2]] + 3.0
        before = np.linalg.norm(x - x.mean())
        after = W @ x
        assert np.linalg.norm(after - after.mean()) == pytest.approx(before * (1 - gap), abs=1e-12)
        assert after.mean() == pytest.approx(x.mean(), rel=1e-12)


@every
def test_random_starts_contract_at_least_so_fast_and_keep_their_mean(topology: Topology) -> None:
    rng = np.random.default_rng(0)
    for size in (2, 3, 5, 8, 13, 16, 31, 64):
        W = matrix(topology, ids(size), seed="view")
        x = rng.standard_normal((size, 5))
        start, mean = np.linalg.norm(x - x.mean(0)), x.mean(0)
        for _ in range(20):
            x = W @ x
        assert np.linalg.norm(x - mean) <= start * (1 - spectral_gap(W)) ** 20 + 1e-12
        np.testing.assert_allclose(x.mean(0), mean, atol=1e-12)


@every
def test_neighbours_are_mutual_sorted_and_those_of_the_matrix(topology: Topology) -> None:
    for size in (1, 2, 3, 4, 7, 12, 33):
        members = ids(size)
        weights = metropolis(topology, members, seed="view")
        for me in members:
            found = neighbours(topology, me, reversed(members), seed="view")
            assert list(found) == sorted(set(found))
            assert {*found, me} == weights[me].keys()
            assert all(me in neighbours(topology, peer, members, seed="view") for peer in found)


def test_the_ring_of_eight() -> None:
    W = matrix("ring", ids(8))
    assert set(np.round(W[W > 0], 12)) == {round(1 / 3, 12)}
    assert (1 - spectral_gap(W)) ** 2 == pytest.approx(0.647603, abs=5e-7)


def test_closed_forms() -> None:
    for size in (3, 5, 8, 20, 64):
        assert spectral_gap(matrix("complete", ids(size))) == pytest.approx(1, abs=1e-12)
        ring = 1 / 3 + 2 / 3 * cos(2 * pi / size)
        assert spectral_gap(matrix("ring", ids(size))) == pytest.approx(1 - abs(ring), abs=1e-12)
    assert spectral_gap(matrix("ring", ["one"])) == 1
    # A torus of 4 × 4 at 1/5: λ = (1 + 2 cos θ + 2 cos φ) / 5, second where one angle is a right one.
    assert spectral_gap(matrix("torus", ids(16))) == pytest.approx(1 - 3 / 5, abs=1e-12)


@pytest.mark.parametrize(
    ("size", "degree"), [(1, 0), (2, 1), (4, 2), (6, 3), (9, 4), (12, 4), (16, 4), (36, 4), (11, 4), (37, 4)]
)
def test_the_degree_of_a_torus(size: int, degree: int) -> None:
    members = ids(size)
    assert {len(neighbours("torus", me, members)) for me in members} == {degree}


def test_a_torus_of_a_prime_mixes_nearly_as_well_as_its_neighbour() -> None:
    prime, square, ring = (matrix(t, ids(n)) for t, n in (("torus", 37), ("torus", 36), ("ring", 37)))
    assert spectral_gap(prime) > 0.5 * spectral_gap(square) > 5 * spectral_gap(ring)


def test_exponential_ties_both_ways() -> None:
    members = [f"{n:02d}" for n in range(16)]
    assert neighbours("exponential", "00", members) == tuple(f"{n:02d}" for n in (1, 2, 4, 8, 12, 14, 15))


@pytest.mark.parametrize("degree", [2, 3, 4, 5, 8])
def test_the_degree_of_a_random_regular_graph(degree: int) -> None:
    for size in range(1, 65):
        members = ids(size)
        expected = min(size - 1, degree + (degree % 2) * (size % 2))
        assert {len(neighbours("random_regular", me, members, degree=degree)) for me in members} == {expected}


def test_a_random_graph_is_the_seeds_and_no_other() -> None:
    members = ids(30)
    graphs = [matrix("random_regular", members, degree=3, seed=f"view {n}") > 0 for n in range(6)]
    again = matrix("random_regular", members[::-1], degree=3, seed="view 0") > 0
    np.testing.assert_array_equal(graphs[0], again)
    assert all((graphs[0] != other).any() for other in graphs[1:])
    # All members of one view compute this from its text, whatever their version of Python.
    assert neighbours("random_regular", "a", "abcdefgh", degree=3, seed="golden") == ("b", "f", "g")


def test_random_graphs_mix_like_random_graphs() -> None:
    """Friedman 2003: a random d-regular graph's λ₂ is near 2 √(d − 1), over d + 1 with the self weight."""
    gaps = [spectral_gap(matrix("random_regular", ids(64), degree=4, seed=str(n))) for n in range(20)]
    assert np.median(gaps) > 0.8 * (1 - (1 + 2 * sqrt(3)) / 5)


def test_bad_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="isn't one"):
        neighbours("ring", "z", "abc")
    with pytest.raises(ValueError, match="degree"):
        neighbours("random_regular", "a", "abcdef", degree=1)
    with pytest.raises(ValueError, match="symmetric"):
        spectral_gap(np.array([[0.5, 0.5], [0.4, 0.6]]))
