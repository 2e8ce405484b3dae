from __future__ import annotations

import os

import numpy as np
import pytest

from p2pdrl.errors import LayoutMismatchError
from p2pdrl.tensors.shared_memory import SharedRegion, SharedVector


def test_all_see_one_vector_and_when_it_is_there():
    region = SharedRegion.create(SharedVector.nbytes_of(5), "vector")
    other = SharedRegion.attach(os.dup(region.fd), region.nbytes)
    first, helper = SharedVector(region, 5), SharedVector(other, 5)
    assert not helper.filled
    first.vector[:] = np.arange(5)
    first.fill()
    assert helper.filled
    helper.vector[4] += 1
    assert first.vector.tolist() == [0.0, 1.0, 2.0, 3.0, 5.0]
    region.close()
    other.close()


@pytest.mark.parametrize("size", [0, 6, 10**9])
def test_a_region_that_doesnt_fit(size):
    region = SharedRegion.create(SharedVector.nbytes_of(5), "vector")
    with pytest.raises(LayoutMismatchError, match="don't fit"):
        SharedVector(region, size)
    region.close()
