"""The fastest number of microbatches, from made-up times."""

from __future__ import annotations

import pytest

from p2pdrl.rl.tuned_gradients import REPEATS, WARM_UP, Tuner


def run(tuner, seconds):
    """Measure until done; ``seconds`` gives the time of a number, or None where it doesn't fit."""
    tried = []
    while not tuner.done:
        tried.append(tuner.microbatches)
        time_s = seconds(tuner.microbatches, tried.count(tuner.microbatches))
        if time_s is None:
            assert tuner.did_not_fit()
        else:
            tuner.took(time_s)
    return tried


@pytest.mark.parametrize("fastest", [1, 2, 4, 8])
def test_it_picks_the_fastest(fastest):
    tuner = Tuner(1000)
    tried = run(tuner, lambda n, _: abs(n - fastest) + 1.0)
    assert tuner.microbatches == fastest
    assert tried == [1, 2, 4, 8] * (WARM_UP + REPEATS)


def test_the_first_time_is_forgotten_and_outliers_have_no_say():
    def seconds(n, times):
        slow = times == 1 if n == 2 else times in {3, 5}
        return 100.0 if slow else {1: 3.0, 2: 1.0, 4: 2.0, 8: 4.0}[n]

    tuner = Tuner(1000)
    run(tuner, seconds)
    assert tuner.medians_s == {1: 3.0, 2: 1.0, 4: 2.0, 8: 4.0}
    assert tuner.microbatches == 2


def test_equals_go_to_the_fewest():
    tuner = Tuner(1000)
    run(tuner, lambda *_: 1.0)
    assert tuner.microbatches == 1


@pytest.mark.parametrize(("most", "tried"), [(1, {1}), (3, {1, 2}), (7, {1, 2, 4}), (0, {1})])
def test_there_are_no_more_microbatches_than_rows(most, tried):
    assert set(run(Tuner(most), lambda *_: 1.0)) == tried


def test_what_does_not_fit_is_passed_over():
    tuner = Tuner(1000)
    tried = run(tuner, lambda n, _: None if n < 4 else 1.0 / n)
    assert tried == [1, 2] + [4, 8] * (WARM_UP + REPEATS)
    assert tuner.microbatches == 8


def test_where_none_fits_it_goes_on_doubling():
    tuner = Tuner(100)
    tried = run(tuner, lambda n, _: None if n < 50 else 1.0)
    assert tried == [1, 2, 4, 8, 16, 32] + [64] * (WARM_UP + REPEATS)
    assert tuner.microbatches == 64


def test_the_last_try_is_row_by_row():
    tuner = Tuner(10)
    for expected in (1, 2, 4, 8, 10):
        assert tuner.microbatches == expected
        assert tuner.did_not_fit() == (expected < 10)


def test_a_choice_that_fails_later_is_replaced():
    tuner = Tuner(1000)
    run(tuner, lambda n, _: float(n))
    assert tuner.microbatches == 1
    assert tuner.did_not_fit()
    assert not tuner.done or tuner.microbatches == 2
    run(tuner, lambda n, _: float(n))
    assert tuner.microbatches == 2


def test_only_the_first_measurement_of_each_is_a_warm_up():
    tuner = Tuner(2)
    seen = []
    while not tuner.done:
        seen.append((tuner.microbatches, tuner.warming))
        tuner.took(1.0)
    assert seen[:4] == [(1, True), (2, True), (1, False), (2, False)]
    tuner.took(0.0)  # no longer asked
    assert tuner.medians_s == {1: 1.0, 2: 1.0}
