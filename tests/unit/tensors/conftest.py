"""Small boards for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.layout import Entry, Layout
from p2pdrl.tensors.shm import SharedRegion
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout


@pytest.fixture
def spec() -> BoardSpec:
    return BoardSpec(
        Layout((Entry("w", (2,)), Entry("b", ()))),
        SidecarLayout((SidecarItem("m", (3,)), SidecarItem("step", (), "int64"))),
    )


@pytest.fixture
def region(spec: BoardSpec) -> Iterator[SharedRegion]:
    region = SharedRegion.create(spec.nbytes, "test-board")
    yield region
    region.close()
