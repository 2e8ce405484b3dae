"""The seam between a gradient and what becomes of it.

The algorithms must give the same numbers as the naive updates, to the last bit.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from p2pdrl.config.task import A2CConfig, EnvConfig, NetworkConfig, PPOConfig, TaskConfig
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import OwnStepper
from p2pdrl.rl.optimizers import Optimizer
from p2pdrl.rl.registry import build_trainer
from p2pdrl.tensors.optimizers import SGD

from .naive_updates import naive_a2c, naive_ppo

CPU = torch.device("cpu")


class Recorder:
    """Steps as OwnStepper does and remembers what it was given; ends an update at one of the calls."""

    def __init__(self, ends_with=math.inf):
        self.calls = []
        self._ends_with = ends_with
        self._own = OwnStepper()

    @property
    def ends_update(self):
        return len(self.calls) == self._ends_with

    def step(self, optimizer, **options):
        self.calls.append((optimizer.span.gradients_D.clone(), options))
        return self._own.step(optimizer, **options)


class Nothing:
    """Drops every gradient."""

    ends_update = False

    def step(self, optimizer, **options):
        return math.inf


def make_trainer(algorithm):
    task = TaskConfig(env=EnvConfig(num_envs=2), network=NetworkConfig(hidden=(8,)), algorithm=algorithm)
    return build_trainer(task, 1, "cpu")


def tiny():
    flat = FlatModule(torch.nn.Linear(2, 1, bias=False), CPU)
    flat.set_(np.array([1.0, 2.0], np.float32))
    return flat, Optimizer(SGD(), flat)


def test_the_own_stepper_clips_then_steps():
    flat, optimizer = tiny()
    flat.gradients_D.copy_(torch.tensor([3.0, 4.0]))
    norm = OwnStepper().step(optimizer, learning_rate=0.5, max_grad_norm=1.0, samples=7, left=0)
    assert norm == 5.0
    assert flat.numpy() == pytest.approx([1.0 - 0.5 * 0.6, 2.0 - 0.5 * 0.8])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_dropped(bad):
    flat, optimizer = tiny()
    flat.gradients_D.copy_(torch.tensor([bad, 1.0]))
    norm = OwnStepper().step(optimizer, learning_rate=0.5, max_grad_norm=1.0, samples=7, left=0)
    assert not math.isfinite(norm)
    assert flat.numpy().tolist() == [1.0, 2.0]
    assert optimizer.state()["optimizer.steps"] == 0


@pytest.mark.parametrize(
    ("config", "naive"),
    [
        (PPOConfig(unroll_steps=40, epochs=2, minibatches=3, max_grad_norm=0.02), naive_ppo),
        (PPOConfig(unroll_steps=40, epochs=1, minibatches=1, max_grad_norm=1e9), naive_ppo),
        (PPOConfig(unroll_steps=37, entropy_coef=0.01, value_clip=0.1, value_coef=0.3), naive_ppo),
        (A2CConfig(max_grad_norm=0.02), naive_a2c),
        (A2CConfig(), naive_a2c),
    ],
)
def test_the_default_is_clip_and_step_to_the_last_bit(config, naive):
    """Both go the same way: the naive update takes the trainer's own unrolls and random numbers."""
    trainer = make_trainer(config)
    twin = make_trainer(config)
    flat = twin._flat
    state = [torch.zeros_like(flat.parameters_D), torch.zeros_like(flat.parameters_D), 0]
    for _ in range(6):
        trainer.step()
        unroll = twin.source.next()
        naive(twin.policy, flat, unroll, state, config, twin.source._collector._generator)
        assert trainer.flat.tobytes() == flat.numpy().tobytes()


@pytest.mark.parametrize(
    ("config", "gradients"),
    [(PPOConfig(unroll_steps=40, epochs=2, minibatches=3, max_grad_norm=0.25), 6), (A2CConfig(), 1)],
)
def test_a_stepper_gets_every_gradient_unclipped_with_its_rows(config, gradients):
    trainer, twin = make_trainer(config), make_trainer(config)
    trainer.stepper = recorder = Recorder()
    assert trainer.stepper is recorder
    steps = trainer.step().env_steps
    twin.step()
    assert trainer.flat.tobytes() == twin.flat.tobytes()
    assert len(recorder.calls) == gradients
    assert sum(options["samples"] for _, options in recorder.calls) == steps * getattr(config, "epochs", 1)
    for _, options in recorder.calls:
        assert options["max_grad_norm"] == config.max_grad_norm
        assert options["learning_rate"] == config.learning_rate
    assert any(float(gradient.norm()) > config.max_grad_norm for gradient, _ in recorder.calls)


def lefts(recorder):
    return [options["left"] for _, options in recorder.calls]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (PPOConfig(unroll_steps=40, epochs=2, minibatches=3), [5, 4, 3, 2, 1, 0]),
        # 10 rows: 4 minibatches of at most 3, or 5 of 2 where 6 were asked for
        (PPOConfig(unroll_steps=5, epochs=1, minibatches=4), [3, 2, 1, 0]),
        (PPOConfig(unroll_steps=5, epochs=1, minibatches=6), [4, 3, 2, 1, 0]),
        (A2CConfig(), [0]),
    ],
)
def test_a_stepper_hears_how_many_gradients_are_left(config, expected):
    trainer = make_trainer(config)
    trainer.stepper = recorder = Recorder()
    trainer.step()
    assert lefts(recorder) == expected


def test_an_update_that_goes_too_far_says_that_its_last_gradient_is_the_last():
    trainer = make_trainer(PPOConfig(unroll_steps=40, epochs=4, minibatches=3, target_kl=1e-9))
    trainer.stepper = recorder = Recorder()
    trainer.step()
    assert lefts(recorder)[-1] == 0
    assert len(recorder.calls) % 3 == 0
    assert 0 < len(recorder.calls) < 12
    assert lefts(recorder)[:-1] == [11 - at for at in range(len(recorder.calls) - 1)]


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_stepper_may_end_the_update(at):
    """After as many gradients, all the same to the last bit as those of an update that isn't ended."""
    config = PPOConfig(unroll_steps=40, epochs=2, minibatches=3)
    trainer, twin = make_trainer(config), make_trainer(config)
    trainer.stepper, twin.stepper = recorder, whole = Recorder(ends_with=at), Recorder()
    metrics = trainer.step().metrics
    twin.step()
    assert len(recorder.calls) == at
    assert metrics["gradient_steps"] == at
    assert all(math.isfinite(figure) for figure in metrics.values())
    for (mine, _), (other, _) in zip(recorder.calls, whole.calls, strict=False):
        assert torch.equal(mine, other)
    trainer.step()  # and the next one is whole
    assert len(recorder.calls) == at + 6


def test_samples_are_the_valid_steps_only():
    trainer = make_trainer(A2CConfig(unroll_steps=64))
    trainer.stepper = recorder = Recorder()
    steps = trainer.step().env_steps
    assert steps < 128  # episodes ended, so some rows were resets
    assert recorder.calls[0][1]["samples"] == steps


@pytest.mark.parametrize("config", [PPOConfig(unroll_steps=16), A2CConfig()])
def test_a_stepper_that_skips_is_counted(config):
    trainer = make_trainer(config)
    before = trainer.flat.copy()
    trainer.stepper = Nothing()
    metrics = trainer.step().metrics
    assert metrics["gradient_steps"] == metrics["gradient_norm"] == 0
    assert metrics["skipped_steps"] == (16 if isinstance(config, PPOConfig) else 1)
    assert trainer.flat.tobytes() == before.tobytes()
