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
from p2pdrl.tensors.robust import clipping_of, combine

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


def naive_clipped(vectors: np.ndarray, weights: list[float], clip: float) -> np.ndarray:
    """The definition, in float64, without inner products."""
    doubles, count = vectors.astype(float), len(vectors)
    most = sorted(weights)[(count - 1) // 2]
    shares = np.minimum(weights, most)
    shares /= shares.sum()
    if count < 3:
        reference = np.zeros(vectors.shape[1])
        distances = np.linalg.norm(doubles, axis=1)
        longest = clip * distances.min()
        if count == 1:
            return doubles[0]
    else:
        apart = np.linalg.norm(doubles[:, None] - doubles[None, :], axis=2)
        middles = [sorted(np.delete(apart[at], at))[(count - 2) // 2] for at in range(count)]
        at = int(np.argmin(middles))
        noisier = np.sqrt(np.maximum(1.0, most / np.asarray(weights)))
        reference, distances, longest = doubles[at], apart[at], clip * middles[at] * noisier
    scale = np.minimum(1, np.divide(longest, distances, out=np.ones(count), where=distances > 0))
    return reference + ((doubles - reference) * (scale * shares)[:, None]).sum(axis=0)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("size", [1, 40, LONG])
@pytest.mark.parametrize("liar", [1.0, -1.0, 100.0])
def test_clipped_is_centered_clipping_around_the_middle_vector(count: int, size: int, liar: float) -> None:
    vectors = 3.0 + normal(count, size, seed=count)
    vectors[-1] *= liar
    weights = [2.0**number for number in range(count)]
    weights = weights if liar > 0 else weights[::-1]
    got = combined(vectors, weights, mixing="clipped", clip_distance=1.5)
    np.testing.assert_allclose(got, naive_clipped(vectors, weights, 1.5), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [[8, 256, 256], [2048, 8, 2048, 2048], [8, 16, 128, 256, 2048]])
def test_an_honest_mean_of_few_rows_is_not_far(rows: list[int]) -> None:
    gradient = 0.1 * normal(1, 5000, seed=7)[0]
    noise = normal(len(rows), 5000, seed=8)
    vectors = gradient + noise / np.sqrt(np.asarray(rows, np.float32))[:, None]
    assert clipping_of(vectors, rows, 2.0).whole


@given(st.floats(1e-12, 1e12), st.floats(1e-3, 1e12))
def test_no_weight_pulls_farther_than_the_others_do(weight: float, length: float) -> None:
    vectors = normal(4, 50)
    vectors[3] = vectors[0] + np.float32(length)
    clipping = clipping_of(vectors, [1.0, 1.0, 1.0, weight], 2.0)
    reference = vectors[clipping.reference].astype(float)
    distances = sorted(np.linalg.norm(vectors[:3] - reference, axis=1))
    pull = clipping.weights[3] * clipping.factors[3] * np.linalg.norm(vectors[3] - reference)
    assert pull <= 2.0 * distances[-1] * 1.01


def test_clipped_is_the_mean_where_nobody_is_far() -> None:
    vectors = 3.0 + normal(4, LONG)
    np.testing.assert_array_equal(combined(vectors, mixing="clipped"), combined(vectors))


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
@pytest.mark.parametrize("weight", [1.0, 1e9])
def test_one_bad_node_moves_the_clipped_mean_by_no_more_than_a_bounded_weight_times_the_radius(
    bad: float, weight: float
) -> None:
    vectors = normal(4, LONG)
    without = combined(vectors[:3]).astype(float)
    vectors[3] = bad
    moved = np.linalg.norm(combined(vectors, [1, 1, 1, weight], mixing="clipped").astype(float) - without)
    apart = np.linalg.norm(vectors[0].astype(float) - vectors[1])  # as all pairs of honest ones, nearly
    share = min(weight, 1.0) / (3.0 + min(weight, 1.0))
    assert moved <= share * (2.0 + 1.0) * apart * 1.01


@pytest.mark.parametrize("factor", [1e2, 1e6])
def test_of_two_the_longer_is_shortened_to_a_multiple_of_the_shorter(factor: float) -> None:
    vectors = normal(2, 300)
    short = vectors[0].astype(float)
    vectors[1] *= factor
    direction = vectors[1] / np.linalg.norm(vectors[1].astype(float))
    golden = 0.5 * (short + 2.0 * np.linalg.norm(short) * direction)
    np.testing.assert_allclose(combined(vectors, mixing="clipped"), golden, rtol=1e-4, atol=1e-5)


def test_a_minority_that_agrees_is_no_middle() -> None:
    vectors = np.concatenate([normal(5, 200), np.full((3, 200), 50, np.float32)])
    got = combined(vectors, mixing="clipped")
    assert np.linalg.norm(got) < 3 / 8 * 3.0 * np.linalg.norm(vectors[0] - vectors[1])


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


@pytest.mark.parametrize("mixing", RULES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [(0, 0), (2, LONG - 1)])
def test_poison_is_refused_and_changes_nothing(mixing: Mixing, bad: float, where: tuple[int, int]) -> None:
    vectors = normal(3, LONG)
    out = np.full(LONG, 7, np.float32)
    vectors[where] = bad
    with pytest.raises(PoisonedVectorError, match=f"vector {where[0]} of 3"):
        combine(list(vectors), [1, 1, 1], mixing=mixing, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("mixing", RULES)
def test_the_output_may_be_an_input(mixing: Mixing) -> None:
    vectors = normal(4, LONG)
    golden = combined(vectors, [1, 2, 3, 4], mixing=mixing)
    copies = [v.copy() for v in vectors]
    combine(copies, [1, 2, 3, 4], mixing=mixing, out=copies[2])
    np.testing.assert_array_equal(copies[2], golden)


@pytest.mark.parametrize("mixing", RULES)
def test_order_changes_the_last_bit_at_most(mixing: Mixing) -> None:
    vectors, weights = normal(4, 300), [1.0, 2.0, 3.0, 5.0]
    options = {"mixing": mixing}
    golden = combined(vectors, weights, **options)
    for order in itertools.permutations(range(4)):
        got = combined(vectors[list(order)], [weights[i] for i in order], **options)
        np.testing.assert_array_max_ulp(got, golden, 1)


@pytest.mark.parametrize("mixing", RULES)
def test_one_vector_comes_to_itself(mixing: Mixing) -> None:
    vectors = normal(1, 300)
    np.testing.assert_array_equal(combined(vectors, mixing=mixing), vectors[0])


@pytest.mark.parametrize("mixing", RULES)
def test_nothing_of_the_vectors_length_is_allocated(mixing: Mixing) -> None:
    vectors = normal(4, 1 << 21)
    out = np.empty(1 << 21, np.float32)
    combine(list(vectors), [1, 1, 1, 1], mixing=mixing, out=out)
    tracemalloc.start()
    try:
        combine(list(vectors), [1, 1, 1, 1], mixing=mixing, out=out)
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
    with pytest.raises(ValueError, match="clip_distance"):
        combine(vectors, [1, 1], mixing="clipped", clip_distance=0.0, out=out)
    with pytest.raises(LayoutMismatchError):
        combine(vectors, [1, 1], out=np.zeros(4, np.float32))
