"""The critical batch of gradients whose signal and noise are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p2pdrl.config.task import EnvConfig, PPOConfig, TaskConfig
from p2pdrl.rl.noise_scale import EVERY, GRADIENTS, NoiseScale
from p2pdrl.rl.registry import build_trainer

SIZE = 1000


def watched(signal: float, noise: float, rows: int, windows: int = 200) -> NoiseScale:
    """After gradients of mean norm ``signal`` whose rows deviate by ``noise`` in each of `SIZE` entries."""
    rng = np.random.default_rng(3)
    true_D = np.full(SIZE, signal / np.sqrt(SIZE))
    scale = NoiseScale()
    for _ in range(windows * GRADIENTS * EVERY):
        gradient = true_D + rng.normal(size=SIZE) * noise / np.sqrt(rows)
        halves = torch.from_numpy(gradient).split(SIZE // 2)
        scale.note(halves, rows)
    return scale


@pytest.mark.parametrize(("signal", "noise"), [(1.0, 1.0), (3.0, 1.0), (1.0, 0.3)])
@pytest.mark.parametrize("rows", [8, 64])
def test_it_is_the_covariances_trace_over_the_signals_square(signal, noise, rows):
    wanted = SIZE * noise**2 / signal**2
    assert watched(signal, noise, rows, windows=20).rows == pytest.approx(wanted, rel=0.15)


def test_gradients_without_noise_or_signal_have_none():
    scale = NoiseScale()
    for _ in range(GRADIENTS):
        scale.note([torch.ones(SIZE)], 10)
    assert scale.rows is None
    for _ in range(GRADIENTS * EVERY * 3):
        scale.note([torch.zeros(SIZE)], 10)
    assert scale.rows is None


def test_a_gradient_that_isnt_finite_spoils_one_window_only():
    scale = watched(1.0, 1.0, 32, windows=20)
    before = scale.rows
    for number in range(GRADIENTS * EVERY):
        scale.note([torch.full((SIZE,), np.nan if number == 3 else 1.0)], 32)
    assert scale.rows == before


def test_empty_batches_dont_count():
    scale = NoiseScale()
    for _ in range(GRADIENTS * EVERY):
        scale.note([torch.zeros(SIZE)], 0)
    assert scale.rows is None


def test_a_learner_tells_it():
    task = TaskConfig(env=EnvConfig(num_envs=4), algorithm=PPOConfig(unroll_steps=32))
    trainer = build_trainer(task, 1, "cpu")
    found = [trainer.step().metrics.get("gradient_noise_scale") for _ in range(20)]
    assert found[-1] is None or found[-1] > 0
    assert any(found)
