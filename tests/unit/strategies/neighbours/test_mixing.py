"""The arithmetic of a round, against matrices, in float64 and float32."""

from __future__ import annotations

import numpy as np
import pytest

from p2pdrl.clock import ManualClock
from p2pdrl.errors import PoisonedVectorError
from p2pdrl.strategies.clipping_radius import ClippingRadius
from p2pdrl.strategies.gossip.pair_average import Bounds
from p2pdrl.strategies.neighbours.mixing import measure, round_delta
from p2pdrl.strategies.topology import matrix, metropolis

TOPOLOGIES = ["ring", "torus", "exponential", "random_regular", "complete"]
IDS = [f"{number:02x}" for number in range(9)]


def rounds(x_ND: np.ndarray, topology: str, count: int, lost: frozenset[frozenset[str]] = frozenset()):
    """What all nodes hold after ``count`` rounds without the ``lost`` edges."""
    weights = metropolis(topology, IDS)
    for _ in range(count):
        out_ND = np.empty_like(x_ND)
        for i, me in enumerate(IDS):
            others = [
                (x_ND[IDS.index(peer)], weight)
                for peer, weight in weights[me].items()
                if peer != me and frozenset((me, peer)) not in lost
            ]
            round_delta(x_ND[i], others, out=out_ND[i])
        x_ND = x_ND + out_ND
    return x_ND


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_round_is_the_mixing_matrix(topology):
    x_ND = np.random.default_rng(1).standard_normal((9, 70_000))
    assert np.abs(rounds(x_ND, topology, 1) - matrix(topology, IDS) @ x_ND).max() < 1e-14


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_mean_is_kept_in_float64_with_edges_left_out(topology):
    x_ND = np.random.default_rng(2).standard_normal((9, 50))
    lost = frozenset({frozenset((IDS[0], IDS[1])), frozenset((IDS[3], IDS[4]))})
    after_ND = rounds(x_ND, topology, 50, lost)
    assert np.abs(after_ND.mean(axis=0) - x_ND.mean(axis=0)).max() < 1e-12


def test_both_ends_of_an_edge_move_by_opposite_bits():
    a_D, b_D = np.random.default_rng(3).standard_normal((2, 1000)).astype(np.float32)
    mine_D, theirs_D = np.empty((2, 1000), np.float32)
    round_delta(a_D, [(b_D, 1 / 3)], out=mine_D)
    round_delta(b_D, [(a_D, 1 / 3)], out=theirs_D)
    assert np.array_equal(mine_D, -theirs_D)


def test_what_is_far_is_shortened_to_the_radius():
    a_D = np.array([3.0, 4.0], np.float32)
    b_D = np.array([-30.0, -40.0], np.float32)
    radius = ClippingRadius(2.0, ManualClock())
    radius.read(a_D)
    far = measure(a_D, 5.0, b_D, 0.5, Bounds(1e6, 1e3, radius), peer="b")
    assert far.weight * far.distance == pytest.approx(0.5 * radius.radius)
    assert radius.radius == pytest.approx(2.0 * 0.1 * 5.0)  # a tenth of ours, at first
    assert far.distance == pytest.approx(55.0)
    assert measure(a_D, 5.0, b_D, 0.5, Bounds(1e6, 1e3), peer="b").weight == 0.5


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e7, 9e3])
def test_poison_is_refused(bad):
    a_D = np.array([3.0, 4.0], np.float32)
    with pytest.raises(PoisonedVectorError):
        measure(a_D, 5.0, np.array([bad, 0.0], np.float32), 0.5, Bounds(1e6, 1e3), peer="b")
