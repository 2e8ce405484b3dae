from __future__ import annotations

import itertools
import tracemalloc
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from p2pdrl.config.strategy import Mixing
from p2pdrl.errors import LayoutMismatchError, PoisonedVectorError
from p2pdrl.tensors.robust import combine

RULES = get_args(Mixing)
LONG = (1 << 16) + 7
values = st.floats(-1000, 1000, width=32)
stacks = st.tuples(st.integers(1, 7), st.integers(1, 9)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=values)
)


def combined(vectors: np.ndarray, weights: list[float] | None = None, **options: object) -> np.ndarray:
    out = np.full(vectors.shape[1], np.nan, np.float32)
    combine(list(vectors), weights or [1.0] * len(vectors), out=out, **options)  # type: ignore[arg-type]
    return out


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@given(stacks, st.data())
def test_the_mean_is_the_mean(vectors: np.ndarray, data: st.DataObject) -> None:
    weights = data.draw(
        st.lists(st.floats(0.01, 1e6), min_size=len(vectors), max_size=len(vectors)), label="weights"
    )
    golden = np.average(vectors.astype(float), axis=0, weights=weights)
    np.testing.assert_allclose(combined(vectors, weights), golden, rtol=1e-6, atol=1e-4)


@given(stacks, st.floats(0.01, 0.49))
def test_trimmed_is_the_mean_of_the_middle(vectors: np.ndarray, trim: float) -> None:
    """The definition by sorting, in float64."""
    count = len(vectors)
    ends = max(1, int(trim * count)) if count > 2 else 0
    golden = np.sort(vectors.astype(float), axis=0)[ends : count - ends].mean(axis=0)
    np.testing.assert_allclose(combined(vectors, mixing="trimmed", trim=trim), golden, rtol=1e-6, atol=1e-6)


@given(stacks, st.floats(0.01, 3))
def test_clipped_is_the_papers_formula(vectors: np.ndarray, clip: float) -> None:
    doubles = vectors.astype(float)
    reference = doubles[0]
    distances = np.linalg.norm(doubles - reference, axis=1)
    most = clip * (np.linalg.norm(reference) or np.median(distances))
    scale = np.minimum(1, np.divide(most, distances, out=np.ones_like(distances), where=distances > 0))
    golden = reference + ((doubles - reference) * scale[:, None]).mean(axis=0)
    got = combined(vectors, mixing="clipped", clip_distance=clip, reference=vectors[0])
    np.testing.assert_allclose(got, golden, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("bad", [1e4, -1e30, 3e38])
@pytest.mark.parametrize("at", range(5))
def test_one_bad_node_moves_the_trimmed_mean_no_further_than_good_ones(bad: float, at: int) -> None:
    vectors = normal(5, LONG)
    good = np.delete(vectors, at, axis=0)
    vectors[at] = bad
    got = combined(vectors, [1, 1, 1, 1, 1], mixing="trimmed", trim=0.2)
    assert (got >= good.min(axis=0)).all()
    assert (got <= good.max(axis=0)).all()


def test_two_bad_nodes_of_seven_are_trimmed_when_so_many_are_left_out() -> None:
    vectors = normal(7, 500)
    good = vectors[2:].copy()
    vectors[0], vectors[1] = 1e20, -1e20
    got = combined(vectors, mixing="trimmed", trim=0.3)
    assert (got >= good.min(axis=0)).all()
    assert (got <= good.max(axis=0)).all()


@pytest.mark.parametrize("bad", [1e3, -1e12, 3e30])
def test_one_bad_node_moves_the_clipped_mean_by_its_weight_times_the_clip_distance(bad: float) -> None:
    vectors, weights = normal(4, LONG), [3.0, 1.0, 2.0, 2.0]
    reference = vectors[0].copy()
    options = {"mixing": "clipped", "clip_distance": 0.5, "reference": reference}
    vectors[3] = reference
    without = combined(vectors, weights, **options)
    vectors[3] = bad
    moved = np.linalg.norm(combined(vectors, weights, **options).astype(float) - without)
    assert moved == pytest.approx(0.25 * 0.5 * np.linalg.norm(reference.astype(float)), rel=1e-4)


def test_one_bad_node_ruins_the_mean() -> None:
    vectors = normal(4, 10)
    vectors[3] = 1e12
    assert (combined(vectors) > 1e11).all()


def test_trimmed_ignores_the_weights_but_for_zero() -> None:
    vectors = normal(5, 50)
    equal = combined(vectors[:4], mixing="trimmed")
    np.testing.assert_array_equal(combined(vectors, [1e9, 1, 2, 3, 0], mixing="trimmed"), equal)


def test_two_vectors_cannot_be_trimmed() -> None:
    vectors = normal(2, 50)
    np.testing.assert_array_equal(combined(vectors, mixing="trimmed"), combined(vectors))


def test_a_reference_of_zero_still_lets_something_through() -> None:
    """The first round of differences: nothing is known yet, so the median distance is the scale."""
    vectors = np.array([[1, 0], [0, 1], [1e6, 0]], np.float32)
    got = combined(vectors, mixing="clipped", reference=np.zeros(2, np.float32))
    np.testing.assert_allclose(got, [2 / 3, 1 / 3], rtol=1e-6)


@pytest.mark.parametrize("mixing", RULES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [(0, 0), (2, LONG - 1)])
def test_poison_is_refused_and_changes_nothing(mixing: Mixing, bad: float, where: tuple[int, int]) -> None:
    vectors = normal(3, LONG)
    reference, out = normal(LONG, seed=1), np.full(LONG, 7, np.float32)
    vectors[where] = bad
    with pytest.raises(PoisonedVectorError, match=f"vector {where[0]} of 3"):
        combine(list(vectors), [1, 1, 1], mixing=mixing, reference=reference, out=out)
    assert (out == 7).all()
    if mixing == "clipped":
        reference[0] = bad
        with pytest.raises(PoisonedVectorError, match="reference"):
            combine([out], [1], mixing=mixing, reference=reference, out=out)


@pytest.mark.parametrize("mixing", RULES)
def test_the_output_may_be_an_input(mixing: Mixing) -> None:
    vectors, reference = normal(4, LONG), normal(LONG, seed=1)
    golden = combined(vectors, [1, 2, 3, 4], mixing=mixing, reference=reference)
    copies = [v.copy() for v in vectors]
    combine(copies, [1, 2, 3, 4], mixing=mixing, reference=reference, out=copies[2])
    np.testing.assert_array_equal(copies[2], golden)
    combine(list(vectors), [1, 2, 3, 4], mixing=mixing, reference=reference, out=reference)
    np.testing.assert_array_equal(reference, golden)


@pytest.mark.parametrize("mixing", RULES)
def test_order_changes_the_last_bit_at_most(mixing: Mixing) -> None:
    vectors, weights = normal(4, 300), [1.0, 2.0, 3.0, 5.0]
    options = {"mixing": mixing, "reference": normal(300, seed=1)}
    golden = combined(vectors, weights, **options)
    for order in itertools.permutations(range(4)):
        got = combined(vectors[list(order)], [weights[i] for i in order], **options)
        np.testing.assert_array_max_ulp(got, golden, 1)


@pytest.mark.parametrize("mixing", RULES)
def test_one_vector_comes_to_itself(mixing: Mixing) -> None:
    vectors = normal(1, 300)
    np.testing.assert_array_equal(combined(vectors, mixing=mixing, reference=vectors[0]), vectors[0])


@pytest.mark.parametrize("mixing", RULES)
def test_nothing_of_the_vectors_length_is_allocated(mixing: Mixing) -> None:
    vectors = normal(4, 1 << 21)
    out = np.empty(1 << 21, np.float32)
    combine(list(vectors), [1, 1, 1, 1], mixing=mixing, reference=vectors[0], out=out)
    tracemalloc.start()
    try:
        combine(list(vectors), [1, 1, 1, 1], mixing=mixing, reference=vectors[0], out=out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_bad_arguments_are_refused() -> None:
    vectors, out = list(normal(2, 3)), np.zeros(3, np.float32)
    for weights in ([1.0], [1.0, -1.0], [0.0, 0.0], [1.0, np.nan], [1.0, np.inf]):
        with pytest.raises(ValueError, match="weights"):
            combine(vectors, weights, out=out)
    with pytest.raises(ValueError, match="weights"):
        combine([], [], out=out)
    with pytest.raises(ValueError, match="trim"):
        combine(vectors, [1, 1], mixing="trimmed", trim=0.5, out=out)
    with pytest.raises(ValueError, match="reference"):
        combine(vectors, [1, 1], mixing="clipped", out=out)
    with pytest.raises(LayoutMismatchError):
        combine(vectors, [1, 1], out=np.zeros(4, np.float32))
    with pytest.raises(LayoutMismatchError):
        combine(vectors, [1, 1], mixing="clipped", reference=np.zeros(2, np.float32), out=out)
