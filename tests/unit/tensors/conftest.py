"""Small boards for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout


@pytest.fixture
def spec() -> BoardSpec:
    return BoardSpec(
        Layout((TensorEntry("w", (2,)), TensorEntry("b", ()))),
        SidecarLayout((SidecarItem("m", (3,)), SidecarItem("step", (), "int64"))),
    )


@pytest.fixture
def region(spec: BoardSpec) -> Iterator[SharedRegion]:
    region = SharedRegion.create(spec.nbytes, "test-board")
    yield region
    region.close()
