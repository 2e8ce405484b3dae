from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdrl.strategies.allreduce.federated import ORDERS, PrivacyAccountant, epsilon_of, renyi_divergence

noises = st.floats(0.3, 30)
rates = st.floats(1e-4, 1)


def integrated(noise: float, rate: float, alpha: float) -> float:
    """ε_α by its definition, integrated on a grid: E over N(0, z²) of (density ratio)^α, for any α."""
    x = np.linspace(-40 * noise, 40 * noise + alpha, 400_001)
    log_density = -(x**2) / (2 * noise**2) - math.log(noise * math.sqrt(2 * math.pi))
    log_ratio = np.logaddexp(
        math.log1p(-rate) if rate < 1 else -np.inf, math.log(rate) + (2 * x - 1) / (2 * noise**2)
    )
    log_values = log_density + alpha * log_ratio
    top = log_values.max()
    return float(top + math.log(np.sum(np.exp(log_values - top)) * (x[1] - x[0]))) / (alpha - 1)


@pytest.mark.parametrize("alpha", [1.025, 1.5, 1.63, 2, 2.7, 3, 7, 10.9, 32, 100])
@pytest.mark.parametrize(("noise", "rate"), [(0.6, 0.3), (1.0, 0.01), (1.1, 0.5), (4.0, 0.01), (8.0, 0.9)])
def test_a_rounds_divergence_is_that_of_the_definition(noise: float, rate: float, alpha: int) -> None:
    golden = integrated(noise, rate, alpha)
    assert renyi_divergence(noise, rate, alpha) == pytest.approx(golden, rel=1e-7, abs=1e-9)


def test_without_sampling_it_is_the_gaussian_mechanisms() -> None:
    """Mironov 2017, corollary 3; and the sum tends to it."""
    golden = {alpha: alpha / (2 * 1.7**2) for alpha in ORDERS}
    assert {alpha: renyi_divergence(1.7, 1.0, alpha) for alpha in ORDERS} == pytest.approx(golden, rel=1e-15)
    nearly = {alpha: renyi_divergence(1.7, 1 - 1e-12, alpha) for alpha in ORDERS}
    assert nearly == pytest.approx(golden, rel=1e-6)


def test_rare_sampling_and_much_noise_lose_no_digits() -> None:
    """To second order in q it is q² α (exp(1 / z²) − 1) / 2 (Mironov 2019, section 3.3)."""
    for rate, noise in ((1e-7, 1.0), (1e-9, 50.0)):
        golden = rate**2 * 2 / 2 * math.expm1(noise**-2)
        assert renyi_divergence(noise, rate, 2) == pytest.approx(golden, rel=1e-5)
        assert renyi_divergence(noise, rate, 1024) > 0


@pytest.mark.parametrize(
    ("members", "batch", "noise", "epochs", "delta", "epsilon"),
    [
        (60_000, 150, 1.3, 15, 1e-5, 0.7242234026109595),
        (100_000, 100, 1.0, 30, 1e-7, 1.4154988495444845),
    ],
)
def test_published_values_of_tensorflow_privacy(
    members: int, batch: int, noise: float, epochs: int, delta: float, epsilon: float
) -> None:
    """Its compute_dp_sgd_privacy_test; both are reached at integer orders, 19 and 13."""
    rounds = math.ceil(epochs * members / batch)
    assert epsilon_of(noise, batch / members, rounds, delta) == pytest.approx(epsilon, rel=1e-10)


def test_the_published_value_of_opacus_is_an_upper_bound_and_near() -> None:
    """Its accountants_test: 7.32911, by the series of the paper without the signs of its terms."""
    found = epsilon_of(1.5, 0.04, int(90 / 0.04), 1e-5)
    assert 7.32911117143 * 0.999 <= found <= 7.32911117143 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("noise", "rate", "rounds", "delta", "tight", "series"),
    [
        (0.5, 0.1, 200, 1e-5, 45.37121354159919, 59.13163761607534),
        (0.5, 0.01, 1000, 1e-5, 13.36098106512938, 15.4721334181956),
        (1.0, 0.01, 10_000, 1e-5, 6.190975825699608, 6.712756664482653),
        (1.1, 0.5, 30, 1e-5, 16.447831880454462, 17.97136413118997),
        (0.8, 0.25, 100, 1e-6, 30.389736416215527, 33.277915400161575),
        (2.0, 0.7, 50, 1e-5, 13.785358825706176, 14.866010179003048),
        (0.3, 0.05, 20, 1e-5, 33.56909451033427, 39.31516955105226),
        (3.0, 1.0, 24, 1e-5, 7.808882908905354, 8.39625801648616),
    ],
)
def test_epsilon_lies_between_the_tight_one_and_that_of_a_coarser_accountant(
    noise: float, rate: float, rounds: int, delta: float, tight: float, series: float
) -> None:
    """Golden values of Google's dp-accounting 0.6.0.

    ``tight``: its PLDAccountant (privacy loss distributions, discretised in steps of 1e-3), which no account
    by Rényi divergences undercuts. ``series``: its RdpAccountant with its own orders, which bounds A_α at
    fractional orders from above and leaves out those at which its series doesn't converge.
    """
    found = epsilon_of(noise, rate, rounds, delta)
    assert tight * 0.999 <= found <= series * (1 + 1e-9)
    assert found <= 1.18 * tight


def test_a_fractional_order_is_the_best_where_much_is_given_away() -> None:
    """With noise 0.5, rate 0.1, 200 rounds, integer orders alone make ε 1.9 times as great as it need be."""
    noise, rate, rounds, delta = 0.5, 0.1, 200, 1e-5

    def bound(alpha: float) -> float:
        divergence = rounds * renyi_divergence(noise, rate, alpha)
        return divergence + math.log1p(-1 / alpha) - math.log(delta * alpha) / (alpha - 1)

    integers = min(bound(alpha) for alpha in range(2, 65))
    found = epsilon_of(noise, rate, rounds, delta)
    assert integers == pytest.approx(95.9605, abs=1e-3)
    assert found == pytest.approx(min(bound(1 + n / 200) for n in range(1, 400)), rel=2e-3)


@pytest.mark.parametrize(
    ("noise", "rate", "alpha", "series"),
    [(1.0, 0.01, 4.1, 0.0003733651690811502), (0.7, 0.001, 5.8, 2.3837118558956945e-05)],
)
def test_fractional_orders_agree_with_the_series_where_that_is_good(
    noise: float, rate: float, alpha: float, series: float
) -> None:
    """dp-accounting 0.6.0 at the same orders: an upper bound that is nearly met."""
    assert series * (1 - 1e-5) <= renyi_divergence(noise, rate, alpha) <= series


def test_the_value_of_the_moments_accountant() -> None:
    """Abadi 2016 (arXiv 1607.00133), figure 2: 1.26, which Mironov's older conversion gives; ours is less."""
    rounds, delta = 10_000, 1e-5
    older = min(rounds * renyi_divergence(4.0, 0.01, a) + math.log(1 / delta) / (a - 1) for a in ORDERS)
    assert older == pytest.approx(1.26, abs=0.005)
    assert epsilon_of(4.0, 0.01, rounds, delta) == pytest.approx(1.0355, abs=1e-4)


@pytest.mark.parametrize("noise", [0.7, 1.0, 3.0, 20.0])
def test_one_gaussian_round_is_bounded_from_above_and_not_by_far(noise: float) -> None:
    """The exact ε of one Gaussian mechanism: Balle and Wang 2018 (arXiv 1805.06530), theorem 8."""

    def delta_of(epsilon: float) -> float:
        def normal_cdf(x: float) -> float:
            return 0.5 * math.erfc(-x / math.sqrt(2))

        first = normal_cdf(1 / (2 * noise) - epsilon * noise)
        return first - math.exp(epsilon) * normal_cdf(-1 / (2 * noise) - epsilon * noise)

    low, high = 0.0, 30.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > 1e-5 else (low, middle)
    assert high <= epsilon_of(noise, 1.0, 1, 1e-5) <= 1.25 * high


@settings(max_examples=30)
@given(noises, rates, st.integers(1, 2000), st.floats(1e-9, 0.1))
def test_more_noise_fewer_rounds_and_rarer_sampling_give_away_less(
    noise: float, rate: float, rounds: int, delta: float
) -> None:
    epsilon = epsilon_of(noise, rate, rounds, delta)
    assert 0 <= epsilon < math.inf
    slack = epsilon * (1 + 1e-9) + 1e-12
    assert epsilon_of(noise * 1.1, rate, rounds, delta) <= slack
    assert epsilon_of(noise, rate * 0.9, rounds, delta) <= slack
    assert epsilon_of(noise, rate, rounds - 1, delta) <= slack
    assert epsilon_of(noise, rate, rounds, min(0.5, delta * 1.1)) <= slack


@given(noises, rates, st.lists(st.integers(0, 50), max_size=5))
def test_rounds_add_up_however_they_are_counted(noise: float, rate: float, parts: list[int]) -> None:
    accountant = PrivacyAccountant(noise, rate, 1e-5)
    for part in parts:
        accountant.step(part)
    assert accountant.steps == sum(parts)
    assert accountant.epsilon == epsilon_of(noise, rate, sum(parts), 1e-5)


def test_the_ends_of_the_ranges() -> None:
    accountant = PrivacyAccountant(0.0, 0.5, 1e-5)
    assert accountant.epsilon == 0
    accountant.step()
    assert accountant.epsilon == math.inf
    assert epsilon_of(1e-200, 0.5, 1, 1e-5) == math.inf
    assert epsilon_of(1e-3, 0.5, 1, 1e-5) > 1e5
    assert epsilon_of(1e200, 0.5, 1, 1e-5) < 0.01
    assert PrivacyAccountant(0.0, 0.0, 1e-5).epsilon == 0
    assert epsilon_of(0.0, 0.0, 9, 1e-5) == 0


def test_bad_arguments_are_refused() -> None:
    nan = math.nan
    for args in ((-1, 0.5, 0.1), (nan, 0.5, 0.1), (math.inf, 0.5, 0.1), (1, -0.1, 0.1), (1, 1.1, 0.1)):
        with pytest.raises(ValueError, match="not"):
            PrivacyAccountant(*args)
    for delta in (0, 1, nan):
        with pytest.raises(ValueError, match="delta"):
            PrivacyAccountant(1, 0.5, delta)
    with pytest.raises(ValueError, match="taken back"):
        PrivacyAccountant(1, 0.5, 0.1).step(-1)
