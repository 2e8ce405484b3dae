from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.errors import LayoutMismatchError, WireError
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout

items = st.builds(
    SidecarItem,
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
    st.lists(st.integers(1, 4), max_size=3).map(tuple),
    st.sampled_from(["float32", "float64", "int64"]),
)
sidecars = st.lists(items, max_size=8, unique_by=lambda item: item.name).map(
    lambda x: SidecarLayout(tuple(x))
)


@given(sidecars)
def test_wire_round_trip_through_json_keeps_layout_and_hash(sidecar: SidecarLayout) -> None:
    back = SidecarLayout.from_wire(json.loads(json.dumps(sidecar.to_wire())))
    assert back == sidecar
    assert back.hash == sidecar.hash


@given(sidecars)
def test_what_is_written_into_the_views_is_read_back(sidecar: SidecarLayout) -> None:
    buffer = bytearray(sidecar.nbytes)
    values = {item.name: np.full(item.shape, n + 1, item.dtype) for n, item in enumerate(sidecar.items)}
    sidecar.write(values, sidecar.views(buffer))
    for name, view in sidecar.views(bytes(buffer)).items():
        np.testing.assert_array_equal(view, values[name])
    assert all(offset % 8 == 0 for offset in sidecar.offsets)


def test_hash_covers_dtype_and_rule() -> None:
    different = [
        SidecarItem("a", (2,), "float64"),
        SidecarItem("a", (2,), "float64", "moments"),
        SidecarItem("a", (2,), "int64"),
    ]
    assert len({SidecarLayout((item,)).hash for item in different}) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        (SidecarItem("a", (1,)), SidecarItem("a", (1,))),
        (SidecarItem("a", (1,), "float16"),),  # type: ignore[arg-type]
        (SidecarItem("a", (1,), "float64", "sum"),),  # type: ignore[arg-type]
        (SidecarItem("a", (1,), "float32", "moments"),),
        (SidecarItem("a", (1 << 31, 1 << 31)),),
    ],
)
def test_out_of_bounds_sidecars_are_refused(wrong: tuple[SidecarItem, ...]) -> None:
    with pytest.raises(LayoutMismatchError):
        SidecarLayout(wrong)


@pytest.mark.parametrize(
    "obj", [None, [["a", [1], "float32"]], [["a", [1], 3, "copy"]], [["a", "1", "int64", "copy"]]]
)
def test_malformed_wire_objects_are_refused(obj: object) -> None:
    with pytest.raises(WireError):
        SidecarLayout.from_wire(obj)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"a": np.zeros(2), "b": np.zeros(1)},
        {"a": np.zeros(1)},
        {"a": np.zeros(2, np.float32)},
    ],
)
def test_values_of_another_form_are_refused_before_anything_is_written(values: dict[str, np.ndarray]) -> None:
    sidecar = SidecarLayout((SidecarItem("a", (2,), "float64"),))
    buffer = bytearray(b"\xff" * sidecar.nbytes)
    with pytest.raises(LayoutMismatchError):
        sidecar.write(values, sidecar.views(buffer))
    assert buffer == b"\xff" * sidecar.nbytes


def test_a_buffer_of_another_length_is_refused() -> None:
    with pytest.raises(LayoutMismatchError):
        SidecarLayout((SidecarItem("a", (2,)),)).views(bytearray(16))
