from __future__ import annotations

import os

import numpy as np
import pytest

from p2pdrl.errors import LayoutMismatchError, TensorError
from p2pdrl.tensors.shared_memory import GradientRing, SharedRegion


@pytest.mark.parametrize(("slots", "size"), [(1, 1), (3, 16), (4, 17), (2, 100_003)])
def test_both_ends_see_the_same_slots_and_none_touches_another(slots, size):
    region = SharedRegion.create(GradientRing.nbytes_of(slots, size), "ring")
    other = SharedRegion.attach(os.dup(region.fd), region.nbytes)
    learner, daemon = GradientRing(region, slots, size), GradientRing(other, slots, size)
    assert len(daemon) == slots
    for number in range(slots):
        learner.slot(number)[:] = np.arange(size) + 1000 * number
    for number in range(slots):
        assert daemon.slot(number).shape == (size,)
        assert daemon.slot(number).ctypes.data % 64 == 0
        np.testing.assert_array_equal(daemon.slot(number), np.float32(np.arange(size) + 1000 * number))
    daemon.slot(slots - 1)[:] = -1
    assert learner.slot(slots - 1).max() == -1
    region.close()
    other.close()


def test_a_slot_that_there_isnt():
    region = SharedRegion.create(GradientRing.nbytes_of(2, 5), "ring")
    ring = GradientRing(region, 2, 5)
    for number in (-1, 2, 10**9):
        with pytest.raises(TensorError, match="slots 0 to 1"):
            ring.slot(number)
    region.close()


def test_a_region_that_is_too_small():
    region = SharedRegion.create(GradientRing.nbytes_of(2, 16) - 1, "ring")
    with pytest.raises(LayoutMismatchError, match="take 192 bytes, the region has 191"):
        GradientRing(region, 2, 16)
    region.close()


@pytest.mark.parametrize(("slots", "size"), [(0, 5), (-1, 5), (1, 0)])
def test_nothing_at_all_cant_be_made(slots, size):
    with pytest.raises(TensorError, match="can't be made"):
        GradientRing.nbytes_of(slots, size)


def test_a_slot_outlives_the_ring():
    """A strategy's thread that still writes into a slot does no harm once the memory is given up."""
    region = SharedRegion.create(GradientRing.nbytes_of(1, 8), "ring")
    slot = GradientRing(region, 1, 8).slot(0)
    region.close()
    slot[:] = 1.0
    assert slot.sum() == 8.0
