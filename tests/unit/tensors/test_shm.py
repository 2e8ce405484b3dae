from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from p2pdrl.errors import TensorError
from p2pdrl.tensors.shared_memory import SharedRegion, fence


def open_fds() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(params=["memfd", "file"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "file":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    elif not hasattr(os, "memfd_create"):
        pytest.skip("no memfd here")
    return str(request.param)


@pytest.mark.usefixtures("kind")
def test_two_mappings_of_one_region_share_their_bytes_and_leave_no_descriptor() -> None:
    before = open_fds()
    first = SharedRegion.create(4096, "test")
    second = SharedRegion.attach(os.dup(first.fd), 4096)
    assert bytes(first.buf) == bytes(4096)
    first.buf[10] = 7
    assert second.buf[10] == 7
    first.close()
    first.close()
    second.buf[11] = 8
    second.close()
    assert open_fds() == before


def test_an_array_outlives_the_close_and_its_end_unmaps() -> None:
    before = open_fds()
    region = SharedRegion.create(64, "test")
    array = np.frombuffer(region.buf, np.uint8)
    region.close()
    array[0] = 1
    assert array[0] == 1
    del array, region
    assert open_fds() == before


def test_a_region_too_small_or_no_region_is_refused() -> None:
    region = SharedRegion.create(100, "test")
    with pytest.raises(TensorError):
        SharedRegion.attach(region.fd, 101)
    region.close()
    with pytest.raises(TensorError):
        SharedRegion.attach(99_999, 1)
    with pytest.raises(TensorError):
        SharedRegion.create(0, "test")
    with pytest.raises(TensorError):
        SharedRegion.create(1 << 62, "test")


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only memfd can be sealed")
def test_nobody_can_shrink_it_under_a_readers_feet() -> None:
    region = SharedRegion.create(4096, "test")
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, 1)
    region.close()


def test_fence_can_be_called_again_and_again() -> None:
    for _ in range(3):
        fence()
