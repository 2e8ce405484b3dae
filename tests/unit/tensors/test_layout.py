from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.errors import LayoutMismatchError, WireError
from p2pdrl.tensors.layout import MAX_ENTRIES, Layout, TensorEntry

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200)
shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)
layouts = st.lists(
    st.builds(TensorEntry, names, shapes), min_size=1, max_size=8, unique_by=lambda e: e.name
).map(lambda entries: Layout(tuple(entries)))


@given(layouts)
def test_wire_round_trip_through_json_keeps_layout_and_hash(layout: Layout) -> None:
    back = Layout.from_wire(json.loads(json.dumps(layout.to_wire())))
    assert back == layout
    assert back.hash == layout.hash
    assert len(layout.hash) == 32


@given(layouts)
def test_views_cover_the_vector_in_order_without_copies(layout: Layout) -> None:
    flat = np.arange(layout.size, dtype=np.float32)
    views = layout.views(flat)
    assert [views[e.name].shape for e in layout.entries] == [e.shape for e in layout.entries]
    np.testing.assert_array_equal(np.concatenate([views[e.name].ravel() for e in layout.entries]), flat)
    for view in views.values():
        view[...] = -1
    assert (flat == -1).all()


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=20))
def test_any_plain_object_gives_a_layout_or_one_of_two_errors(obj: object) -> None:
    try:
        Layout.from_wire(obj)
    except (WireError, LayoutMismatchError):
        pass


def test_hash_tells_names_shapes_and_order_apart() -> None:
    a, b = TensorEntry("a", (2, 3)), TensorEntry("b", (6,))
    different = [(a, b), (b, a), (a,), (TensorEntry("a", (3, 2)), b), (TensorEntry("A", (2, 3)), b)]
    assert len({Layout(entries).hash for entries in different}) == len(different)


def test_hash_is_stable_across_releases() -> None:
    assert Layout((TensorEntry("w", (2, 3)), TensorEntry("b", ()))).hash == "8b0cdab226b4b5800e77b253f64b9cfb"


@pytest.mark.parametrize(
    "entries",
    [
        (),
        (TensorEntry("a", (1,)), TensorEntry("a", (2,))),
        (TensorEntry("", (1,)),),
        (TensorEntry("x" * 201, (1,)),),
        (TensorEntry("a", (0,)),),
        (TensorEntry("a", (-1, -1)),),
        (TensorEntry("a", (1,) * 9),),
        (TensorEntry("a", (1 << 16, 1 << 16)),),
        (TensorEntry("a", (1 << 31,)), TensorEntry("b", (1,))),
        (TensorEntry("a", (1,), "float16"),),
        tuple(TensorEntry(str(n), (1,)) for n in range(MAX_ENTRIES + 1)),
    ],
)
def test_out_of_bounds_layouts_are_refused(entries: tuple[TensorEntry, ...]) -> None:
    with pytest.raises(LayoutMismatchError):
        Layout(entries)


@pytest.mark.parametrize(
    "obj",
    [
        None,
        {},
        "layout",
        [["a", [1]]],
        [["a", [True], "float32"]],
        [["a", [1.0], "float32"]],
        [[1, [1], "float32"]],
        [["\ud800", [1], "float32"]],
        [["a", [1] * 9, "float32"]],
        [["a", [1], "float32"]] * (MAX_ENTRIES + 1),
    ],
)
def test_malformed_wire_objects_are_refused(obj: object) -> None:
    with pytest.raises(WireError):
        Layout.from_wire(obj)


@pytest.mark.parametrize(
    "vector",
    [np.zeros(2, np.float32), np.zeros(3), np.zeros((3, 1), np.float32), np.zeros(6, np.float32)[::2]],
)
def test_views_refuse_another_vector(vector: np.ndarray) -> None:
    with pytest.raises(LayoutMismatchError):
        Layout((TensorEntry("a", (3,)),)).views(vector)
