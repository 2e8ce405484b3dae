"""The sum tree: masses, sums and where points fall, beside plain running sums."""

from __future__ import annotations

import numpy as np
import pytest

from p2pdrl.errors import TensorError
from p2pdrl.replay.sum_tree import SumTree

SIZES = [1, 5, 16, 17, 1024, 1025, 20_000, 300_000]


@pytest.mark.parametrize("size", SIZES)
def test_points_fall_where_running_sums_say(size):
    rng = np.random.default_rng(size)
    tree, masses = SumTree(size), np.zeros(size)
    for _ in range(5):
        leaves = rng.integers(size, size=300)
        values = rng.integers(0, 9, size=300).astype(float)
        masses[leaves] = values
        tree.set(leaves, values)
        assert tree.total == masses.sum()
        assert (tree.masses(leaves) == masses[leaves]).all()
        if tree.total:
            points = rng.random(1000) * tree.total
            assert (tree.find(points) == np.cumsum(masses).searchsorted(points, side="right")).all()


@pytest.mark.parametrize("size", SIZES)
def test_a_filled_tree_equals_one_that_was_set(size):
    masses = np.random.default_rng(1).random(size)
    filled, was_set = SumTree(size), SumTree(size)
    filled.fill(masses)
    was_set.set(np.arange(size), masses)
    points = np.linspace(0.0, filled.total, 1000, endpoint=False)
    assert filled.total == was_set.total == pytest.approx(masses.sum(), rel=1e-12)
    assert (filled.find(points) == was_set.find(points)).all()


def test_leaves_without_mass_are_never_found():
    """Also where sums of very different masses are rounded, and at the very end."""
    rng = np.random.default_rng(2)
    tree = SumTree(5000)
    masses = 10.0 ** rng.uniform(-18, 3, 5000) * (rng.random(5000) < 0.3)
    tree.set(np.arange(5000), masses)
    points = np.concatenate((rng.random(50_000) * tree.total, [0.0, np.nextafter(tree.total, 0), tree.total]))
    assert (masses[tree.find(points)] > 0).all()


def test_a_tree_without_mass_finds_nothing():
    with pytest.raises(TensorError, match="no mass"):
        SumTree(3).find(np.zeros(1))
    with pytest.raises(TensorError, match="0 leaves"):
        SumTree(0)
