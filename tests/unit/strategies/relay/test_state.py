"""Own progress, what is sent of it, and what stays; against sums in float64."""

from __future__ import annotations

import numpy as np
import pytest

from p2pdrl.errors import PoisonedVectorError, WireError
from p2pdrl.strategies.relay.state import StromState
from p2pdrl.tensors.compression import add_message
from p2pdrl.testing.fake_learner import FakeLearner

D, TAU = 5000, 2e-3


@pytest.fixture
def learner():
    made = FakeLearner(np.random.default_rng(0).standard_normal(D))
    yield made
    made.close()


def state_of(learner: FakeLearner) -> StromState:
    state = StromState(learner.board, D, TAU, max_abs=1e6, max_distance=1e3)
    assert not state.look()  # the first look is where counting begins
    return state


def step(learner: FakeLearner, rng: np.random.Generator, size: float = 1e-3) -> np.ndarray:
    """The learner takes what is there and steps; returns how far it went, exactly."""
    learner.absorb()
    before = learner.x.astype(np.float64)
    learner.x = learner.x + (size * rng.standard_normal(D)).astype(np.float32)
    learner.publish()
    return learner.x - before


def test_sent_and_residual_are_all_progress(learner):
    state, rng = state_of(learner), np.random.default_rng(1)
    progress, sent = np.zeros(D), np.zeros(D, np.float32)
    counted = 0
    for _ in range(200):
        progress += step(learner, rng)
        assert state.look()
        message, _ = state.contribute()
        counted += state.entries
        if message:
            add_message(memoryview(message), state.tau, sent)
    assert counted > D
    exact = np.round(sent / state.tau) * state.tau  # what was sent, without float32's rounding of the sum
    assert np.abs(exact + state.residual - progress).max() < 2e-8


def test_what_comes_from_others_is_no_progress(learner):
    state, rng = state_of(learner), np.random.default_rng(2)
    other = StromState(learner.board, D, TAU, max_abs=1e6, max_distance=1e3)
    progress = np.zeros(D)
    for number in range(200):
        other.residual[:] = 5e-3 * rng.standard_normal(D)
        message, _ = other.contribute()
        assert state.absorb([message], 10)
        if number % 3 == 0:
            progress += step(learner, rng)
        state.look()
    # The learner's own float32 additions round: that is its progress too, so replicas don't drift apart.
    assert np.abs(state.residual - progress).max() < 200 * 2.0**-23
    total = state.base().astype(np.float64) + state.residual
    assert np.abs(total - learner.now()).max() < 1e-6


def test_entries_of_several_taus_take_several_messages(learner):
    state = state_of(learner)
    learner.x[7] += 3.5 * TAU
    learner.publish()
    state.look()
    more = [state.contribute()[1] for _ in range(3)]
    assert more == [True, True, False]
    assert state.contribute() == (b"", False)
    assert 0 < state.residual[7] < TAU


def test_a_set_ends_what_was_counted(learner):
    state = state_of(learner)
    learner.x[0] += 1
    learner.publish()
    assert state.look()
    learner.board.post_set(np.ones(D, np.float32), None, 5)
    assert not state.absorb([], 5)
    assert not state.look()
    assert not state.residual.any()
    assert state.look()
    assert not state.residual.any()


def test_another_base_keeps_our_residual(learner):
    state = state_of(learner)
    learner.x[:3] += 0.5
    learner.publish()
    state.look()
    message, _ = state.contribute()
    base = np.random.default_rng(3).standard_normal(D).astype(np.float32)
    expected = base.astype(np.float64) + state.residual
    expected[:3] += TAU
    assert state.rebase(base.copy(), [message], 12)
    assert np.abs(learner.now() - expected).max() < 1e-6
    state.look()
    assert np.abs(state.base() - base - np.where(np.arange(D) < 3, TAU, 0)).max() < 1e-6


def test_bad_numbers_are_refused(learner):
    state = state_of(learner)
    with pytest.raises(WireError):
        state.absorb([b"rubbish that is long enough"], 1)
    assert np.array_equal(learner.now(), learner.x)
    with pytest.raises(PoisonedVectorError):
        state.check(np.full(D, np.nan, np.float32))
    with pytest.raises(PoisonedVectorError):
        state.check(np.full(D, 1e5, np.float32))
    learner.x[0] = np.inf
    learner.publish()
    with pytest.raises(PoisonedVectorError):
        state.look()
