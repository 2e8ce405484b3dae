"""The seam between a gradient and what becomes of it.

`naive_ppo` and `naive_a2c` are the updates written out with everything in one place: losses as means
over rows, the clip, the formula of the optimizer, the skip. The algorithms must give the same numbers to the
last bit.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from p2pdrl.config.task import A2CConfig, EnvConfig, NetworkConfig, PPOConfig, TaskConfig
from p2pdrl.rl.envs import Discrete, EnvSpec
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.optimizers import SGD
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.returns import gae
from p2pdrl.rl.stepping import OwnStepper
from p2pdrl.rl.trainer import Trainer

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

    def step(self, flat, optimizer, **options):
        self.calls.append((flat.gradients_D.clone(), options))
        return self._own.step(flat, optimizer, **options)


class Nothing:
    """Drops every gradient."""

    ends_update = False

    def step(self, flat, optimizer, **options):
        return math.inf


def make_trainer(algorithm):
    task = TaskConfig(env=EnvConfig(num_envs=2), network=NetworkConfig(hidden=(8,)), algorithm=algorithm)
    return Trainer(task, 1, "cpu")


def tiny():
    flat = FlatModule(torch.nn.Linear(2, 1, bias=False), CPU)
    flat.set_(np.array([1.0, 2.0], np.float32))
    return flat, SGD(flat.parameters_D, flat.gradients_D)


def test_the_own_stepper_clips_then_steps():
    flat, optimizer = tiny()
    flat.gradients_D.copy_(torch.tensor([3.0, 4.0]))
    norm = OwnStepper().step(flat, optimizer, learning_rate=0.5, max_grad_norm=1.0, samples=7, left=0)
    assert norm == 5.0
    assert flat.numpy() == pytest.approx([1.0 - 0.5 * 0.6, 2.0 - 0.5 * 0.8])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_dropped(bad):
    flat, optimizer = tiny()
    flat.gradients_D.copy_(torch.tensor([bad, 1.0]))
    norm = OwnStepper().step(flat, optimizer, learning_rate=0.5, max_grad_norm=1.0, samples=7, left=0)
    assert not math.isfinite(norm)
    assert flat.numpy().tolist() == [1.0, 2.0]
    assert optimizer.state()["optimizer.steps"] == 0


def adam(parameters, gradients, state, rate, eps):
    m, v, steps = state
    m.lerp_(gradients, 1.0 - 0.9)
    v.mul_(0.999).addcmul_(gradients, gradients, value=1.0 - 0.999)
    denominator = v.sqrt().div_(math.sqrt(1.0 - 0.999**steps)).add_(eps)
    parameters.addcdiv_(m, denominator, value=-rate / (1.0 - 0.9**steps))


def rmsprop(parameters, gradients, state, rate, eps):
    v = state[1]
    v.mul_(0.99).addcmul_(gradients, gradients, value=1.0 - 0.99)
    parameters.addcdiv_(gradients, v.sqrt().add_(eps), value=-rate)


def naive_step(flat, loss, state, config, formula, eps):
    flat.gradients_D.zero_()
    loss.backward()
    norm = float(torch.linalg.vector_norm(flat.gradients_D))
    if norm > config.max_grad_norm and math.isfinite(norm):
        flat.gradients_D.mul_(config.max_grad_norm / norm)
    if math.isfinite(norm):
        state[2] += 1
        formula(flat.parameters_D, flat.gradients_D, state, config.learning_rate, eps)


def advantages_of(unroll, config):
    return gae(
        unroll.rewards_TB,
        unroll.values_T1B,
        config.discount * (~unroll.terminated_TB),
        config.gae_lambda,
        continues_TB=(~unroll.ends_TB).to(torch.float32),
    )[unroll.valid_TB]


def ppo_loss(policy, rows, config):
    log_probs, entropy, values = policy.evaluate(rows["obs"], rows["actions"])
    ratio = (log_probs - rows["log_probs"]).exp()
    clipped = ratio.clamp(1.0 - config.clip, 1.0 + config.clip)
    policy_loss = -torch.minimum(ratio * rows["advantages"], clipped * rows["advantages"]).mean()
    errors = (values - rows["returns"]).square()
    if config.value_clip is not None:
        moved = (values - rows["values"]).clamp(-config.value_clip, config.value_clip)
        errors = torch.maximum(errors, (rows["values"] + moved - rows["returns"]).square())
    return policy_loss + config.value_coef * (0.5 * errors.mean()) - config.entropy_coef * entropy.mean()


def a2c_loss(policy, rows, config):
    log_probs, entropy, values = policy.evaluate(rows["obs"], rows["actions"])
    loss = -(rows["advantages"] * log_probs).mean()
    loss = loss + config.value_coef * (0.5 * (values - rows["returns"]).square().mean())
    return loss - config.entropy_coef * entropy.mean()


def naive_ppo(policy, flat, unroll, state, config, generator):
    valid = unroll.valid_TB
    values = unroll.values_T1B[:-1][valid]
    advantages = advantages_of(unroll, config)
    returns = advantages + values
    batch = {
        "obs": unroll.obs_T1BX[:-1][valid],
        "actions": unroll.actions[valid],
        "log_probs": unroll.log_probs_TB[valid],
        "values": values,
        "advantages": (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8),
        "returns": returns,
    }
    for _ in range(config.epochs):
        order = torch.randperm(len(values), generator=generator)
        for indices in torch.split(order, math.ceil(len(values) / config.minibatches)):
            rows = {name: array[indices] for name, array in batch.items()}
            naive_step(flat, ppo_loss(policy, rows, config), state, config, adam, 1e-5)


def naive_a2c(policy, flat, unroll, state, config, generator):
    valid = unroll.valid_TB
    advantages = advantages_of(unroll, config)
    rows = {
        "obs": unroll.obs_T1BX[:-1][valid],
        "actions": unroll.actions[valid],
        "advantages": advantages,
        "returns": advantages + unroll.values_T1B[:-1][valid],
    }
    naive_step(flat, a2c_loss(policy, rows, config), state, config, rmsprop, config.rmsprop_eps)


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
        unroll = twin._collector.collect()
        naive(twin.policy, flat, unroll, state, config, twin._collector._generator)
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


# --- n workers are one big batch -----------------------------------------------------------------
#
# What holds: with parameters, advantages and returns equal, the mean gradients of parts of a batch, each
# weighted by its rows, average to the gradient of the mean loss on the whole. Advantages must have been
# normalised (or not) over the whole batch: normalised part by part they are other numbers, and the
# identity is lost. Whatever comes after the mean (clipping, the optimizer) must be done once, on the mean.

PARTS = [5, 1, 18, 8]  # workers rarely have as much as each other
N = sum(PARTS)


def double(config):
    """A policy and rows for it in float64."""
    policy = ActorCritic(EnvSpec((3,), "float32", Discrete(2)), NetworkConfig(hidden=(8,)), 0).double()
    generator = torch.Generator().manual_seed(5)
    rows = {
        "obs": torch.randn(N, 3, generator=generator, dtype=torch.float64),
        "actions": torch.randint(2, (N,), generator=generator),
        "advantages": torch.randn(N, generator=generator, dtype=torch.float64) * 3,
        "returns": torch.randn(N, generator=generator, dtype=torch.float64),
    }
    with torch.no_grad():
        log_probs, _, values = policy.evaluate(rows["obs"], rows["actions"])
    # the policy has moved since it acted: some ratios are beyond the clip
    rows["log_probs"] = log_probs + torch.randn(N, generator=generator, dtype=torch.float64) * 0.3
    rows["values"] = values + torch.randn(N, generator=generator, dtype=torch.float64) * 0.3
    return policy, rows


def normalised(advantages):
    return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)


def gradient_of(policy, loss):
    grads = torch.autograd.grad(loss, list(policy.parameters()))
    return torch.cat([grad.reshape(-1) for grad in grads])


def ppo_gradient(policy, rows, config):
    return gradient_of(policy, ppo_loss(policy, rows, config))


def a2c_gradient(policy, rows, config):
    return gradient_of(policy, a2c_loss(policy, rows, config))


def weighted_mean(policy, rows, gradient, config, *, normalise_parts=False):
    mean, begin = 0.0, 0
    for size in PARTS:
        part = {name: array[begin : begin + size] for name, array in rows.items()}
        if normalise_parts:
            part["advantages"] = normalised(part["advantages"])
        mean = mean + gradient(policy, part, config) * (size / N)
        begin += size
    return mean


@pytest.mark.parametrize(
    ("gradient", "config"),
    [
        (ppo_gradient, PPOConfig(entropy_coef=0.01)),
        (ppo_gradient, PPOConfig(value_clip=0.2)),
        (a2c_gradient, A2CConfig()),
    ],
)
def test_workers_weighted_by_their_rows_are_one_big_batch(gradient, config):
    policy, rows = double(config)
    rows["advantages"] = normalised(rows["advantages"])
    whole = gradient(policy, rows, config)
    torch.testing.assert_close(weighted_mean(policy, rows, gradient, config), whole, rtol=1e-11, atol=1e-13)


def test_advantages_normalised_part_by_part_are_not_one_big_batch():
    config = PPOConfig()
    policy, rows = double(config)
    parts = weighted_mean(policy, rows, ppo_gradient, config, normalise_parts=True)
    rows["advantages"] = normalised(rows["advantages"])
    whole = ppo_gradient(policy, rows, config)
    assert float((parts - whole).norm() / whole.norm()) > 0.05
