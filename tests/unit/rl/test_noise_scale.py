"""The critical batch of gradients whose signal and noise are known."""

from __future__ import annotations

import numpy as np
import pytest

from p2pdrl.config.task import EnvConfig, PPOConfig, TaskConfig
from p2pdrl.rl.noise_scale import EVERY, PARTS, NoiseScale
from p2pdrl.rl.registry import build_trainer

SIZE = 1000


def expected(signal: float, noise: float, rows: float) -> float:
    """The squared norm to be expected of a mean over ``rows``, each of `SIZE` entries off by ``noise``."""
    return signal**2 + SIZE * noise**2 / rows


@pytest.mark.parametrize(("signal", "noise"), [(1.0, 1.0), (3.0, 1.0), (1.0, 0.3)])
@pytest.mark.parametrize("rows", [32, 256])
def test_it_is_the_covariances_trace_over_the_signals_square(signal, noise, rows):
    scale = NoiseScale()
    part = rows / PARTS
    for _ in range(3):
        scale.note([(expected(signal, noise, part), part)] * PARTS, expected(signal, noise, rows))
    assert scale.rows == pytest.approx(SIZE * noise**2 / signal**2)


def test_looks_at_drawn_gradients_come_near_it():
    rng = np.random.default_rng(3)
    scale, found = NoiseScale(), []
    for _ in range(200):
        parts = [0.1 + rng.normal(size=SIZE) / np.sqrt(128 / PARTS) for _ in range(PARTS)]
        whole = np.mean(parts, axis=0)
        scale.note([(float(part @ part), 128 / PARTS) for part in parts], float(whole @ whole))
        found.append(scale.rows)
    assert np.median(found) == pytest.approx(SIZE / (0.1**2 * SIZE), rel=0.1)


def test_one_gradient_of_many_is_looked_at():
    scale = NoiseScale()
    assert [scale.due() for _ in range(2 * EVERY)].count(True) == 2


def test_gradients_without_noise_or_signal_have_none():
    scale = NoiseScale()
    scale.note([(1.0, 10.0)] * 4, 1.0)
    assert scale.rows is None
    scale.note([(0.0, 10.0)] * 4, 0.0)
    assert scale.rows is None


def test_a_gradient_that_isnt_finite_doesnt_count():
    scale = NoiseScale()
    scale.note([(expected(1.0, 1.0, 8), 8.0)] * 2, expected(1.0, 1.0, 16))
    before = scale.rows
    for bad in (float("nan"), float("inf")):
        scale.note([(bad, 8.0), (1.0, 8.0)], bad)
    assert scale.rows == before


@pytest.mark.parametrize("parts", [[], [(1.0, 8.0)], [(1.0, 0.0)] * 4])
def test_what_cant_be_cut_doesnt_count(parts):
    scale = NoiseScale()
    scale.note(parts, 1.0)
    assert scale.rows is None


def test_a_learner_tells_it():
    task = TaskConfig(env=EnvConfig(num_envs=4), algorithm=PPOConfig(unroll_steps=32))
    trainer = build_trainer(task, 1, "cpu")
    found = [trainer.step().metrics.get("gradient_noise_scale") for _ in range(80)]
    assert any(found)
    assert all(rows is None or rows > 0 for rows in found)


def test_looking_changes_nothing_that_is_learned(monkeypatch):
    """To the bit: replicas that look at other times must stay alike."""
    task = TaskConfig(env=EnvConfig(num_envs=4), algorithm=PPOConfig(unroll_steps=32))

    def trained(every):
        monkeypatch.setattr("p2pdrl.rl.noise_scale.EVERY", every)
        trainer = build_trainer(task, 1, "cpu")
        for _ in range(3):
            trainer.step()
        return trainer.flat.copy()

    assert np.array_equal(trained(1), trained(10**9))
