from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.errors import LayoutMismatchError, WireError
from p2pdrl.tensors.moments import Moments


def of(samples: np.ndarray) -> Moments:
    moments = Moments.zeros(samples.shape[1:])
    moments.update(samples)
    return moments


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_batches_of_any_size_give_the_moments_of_their_union(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    batches = [rng.normal(1e3, 2.0, (size, 2, 3)) for size in sizes]
    together = np.concatenate(batches)
    one_by_one = Moments.zeros((2, 3))
    for batch in batches:
        one_by_one.update(batch)
    merged = Moments.merge(of(batch) for batch in batches)
    for moments in (one_by_one, merged):
        assert moments.count == len(together)
        if len(together):
            np.testing.assert_allclose(moments.mean, together.mean(axis=0), rtol=1e-12)
            np.testing.assert_allclose(moments.var, together.var(axis=0), rtol=1e-8, atol=1e-12)


def test_float32_samples_are_summed_in_float64() -> None:
    samples = np.full((100_000, 1), 1e4, np.float32) + np.array([[0], [1]] * 50_000, np.float32)
    np.testing.assert_allclose(of(samples).var, 0.25, rtol=1e-9)


def test_scalar_streams_have_shape_nothing() -> None:
    moments = of(np.array([1.0, 3.0]))
    assert moments.mean.shape == ()
    assert (float(moments.mean), float(moments.var)) == (2.0, 1.0)


def test_variance_before_the_first_sample_is_one() -> None:
    assert Moments.zeros((2,)).var.tolist() == [1.0, 1.0]


def test_merge_leaves_its_parts_alone() -> None:
    a, b = of(np.ones((2, 1))), of(np.zeros((2, 1)))
    Moments.merge([a, b])
    assert (a.count, a.mean.tolist(), b.mean.tolist()) == (2, [1.0], [0.0])


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(LayoutMismatchError):
        Moments.merge([Moments.zeros((2,)), Moments.zeros((3,))])
    with pytest.raises(LayoutMismatchError):
        Moments.zeros((2,)).update(np.zeros((5, 3)))
    with pytest.raises(ValueError, match="no moments"):
        Moments.merge([])


def test_wire_round_trip_is_exact() -> None:
    moments = of(np.random.default_rng(0).normal(size=(7, 2, 2)))
    back = Moments.from_wire(moments.to_wire())
    assert back.count == 7
    np.testing.assert_array_equal(back.mean, moments.mean)
    np.testing.assert_array_equal(back.m2, moments.m2)
    back.update(np.zeros((1, 2, 2)))  # it owns its memory


F8 = np.dtype("<f8")


@pytest.mark.parametrize(
    "obj",
    [
        None,
        [1.0, [1], bytes(8)],
        [-1.0, [1], bytes(8), bytes(8)],
        [float("nan"), [1], bytes(8), bytes(8)],
        [float("inf"), [1], bytes(8), bytes(8)],
        [True, [1], bytes(8), bytes(8)],
        ["1", [1], bytes(8), bytes(8)],
        [1.0, [2], bytes(8), bytes(8)],
        [1.0, [0], b"", b""],
        [1.0, [1 << 30, 1 << 30], b"", b""],
        [1.0, [1], "x" * 8, bytes(8)],
        [1.0, [1], np.array([np.nan], F8).tobytes(), bytes(8)],
        [1.0, [1], np.array([1e101], F8).tobytes(), bytes(8)],
        [1.0, [1], bytes(8), np.array([-1.0], F8).tobytes()],
        [1.0, [1], bytes(8), np.array([np.nan], F8).tobytes()],
        [1.0, [1], bytes(8), np.array([np.inf], F8).tobytes()],
    ],
)
def test_malformed_wire_objects_are_refused(obj: object) -> None:
    with pytest.raises(WireError):
        Moments.from_wire(obj)


def test_the_largest_admitted_moments_merge_to_finite_ones() -> None:
    top = [2.0**53, [1], np.array([1e100], F8).tobytes(), np.array([1e250], F8).tobytes()]
    low = [2.0**53, [1], np.array([-1e100], F8).tobytes(), np.array([1e250], F8).tobytes()]
    merged = Moments.merge([Moments.from_wire(top), Moments.from_wire(low)] * 8)
    assert np.isfinite(merged.mean).all()
    assert np.isfinite(merged.m2).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_samples_that_arent_finite_are_left_out(bad: float) -> None:
    moments = Moments.zeros((2,))
    moments.update(np.array([[1.0, 2.0], [bad, 5.0], [3.0, 4.0]]))
    assert (moments.count, moments.mean.tolist()) == (2.0, [2.0, 3.0])
    moments.update(np.full((3, 2), bad))
    assert moments.count == 2.0
    scalar = Moments.zeros(())
    scalar.update(np.array([bad, 7.0]))
    assert (scalar.count, float(scalar.mean)) == (1.0, 7.0)


@pytest.mark.parametrize(
    ("mean", "deviation", "plausible"),
    [(0.0, 0.0, True), (-1e6, 1e6, True), (-1.1e6, 0.0, False), (0.0, 1.1e6, False)],
)
def test_plausible_moments(mean: float, deviation: float, plausible: bool) -> None:
    one = Moments(10.0, np.array([0.0, mean]), np.array([0.0, 10.0 * deviation**2]))
    assert one.plausible is plausible
