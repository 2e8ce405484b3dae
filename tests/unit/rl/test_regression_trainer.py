"""A regression behind the trainer's interface, against formulas and serial gradient descent."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from p2pdrl.config.task import A2CConfig, EnvConfig, NetworkConfig, RegressionConfig, TaskConfig
from p2pdrl.errors import ConfigError, LayoutMismatchError
from p2pdrl.rl.registry import build_trainer
from p2pdrl.rl.sources.rows import RowSource, make_rows, sequence_batch
from p2pdrl.rl.sources.unrolls import InlineSource


def make(seed=0, *, task_seed=0, sleep=None, clock=None, step_delay_s=0.0, **options):
    task = TaskConfig(seed=task_seed, algorithm=RegressionConfig(**options))
    extra = {} if sleep is None else {"sleep": sleep, "clock": clock}
    return build_trainer(task, seed, "cpu", step_delay_s=step_delay_s, **extra)


class Keeper:
    """Keeps each gradient and steps with none."""

    def __init__(self):
        self.gradients, self.samples = [], []

    def step(self, optimizer, *, samples, **options):
        self.gradients.append(optimizer.span.gradients_D.numpy().copy())
        self.samples.append(samples)
        return float(optimizer.span.gradients_D.norm())


# --- what it is ----------------------------------------------------------------------------------


def test_the_registry_builds_what_the_task_asks_for():
    trainer = build_trainer(TaskConfig(algorithm=RegressionConfig()), 1, "cpu")
    assert isinstance(trainer.source, RowSource)
    with pytest.raises(ConfigError, match="neither environment nor policy"):
        trainer.policy  # noqa: B018
    small = TaskConfig(env=EnvConfig(num_envs=1), network=NetworkConfig(hidden=(4,)), algorithm=A2CConfig())
    assert isinstance(build_trainer(small, 1, "cpu").source, InlineSource)


@pytest.mark.parametrize("algorithm", [RegressionConfig(), A2CConfig()])
def test_a_slow_machine_is_slow_in_whatever_it_trains(algorithm):
    slept = []
    task = TaskConfig(env=EnvConfig(num_envs=2), network=NetworkConfig(hidden=(4,)), algorithm=algorithm)
    trainer = build_trainer(task, 1, "cpu", step_delay_s=0.25, sleep=slept.append)
    trainer.step()
    assert slept == [0.25] * (1 if isinstance(algorithm, RegressionConfig) else 5)
    trainer.close()


def test_the_environment_is_not_looked_at():
    task = TaskConfig(env=EnvConfig(id="Nothing-v0"), algorithm=RegressionConfig())
    assert build_trainer(task, 1, "cpu").step().env_steps == 32


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "rmsprop", "adagrad", "adam"])
def test_gradients_follow_the_formula_and_the_optimizer_torchs(optimizer):
    """w ← w − lr · optimizer(Xᵀ(Xw − y)/B), with torch.optim in float64 on a model written out here."""
    options = {"features": 6, "rows": 40, "batch_size": 8, "sample": "sequence", "optimizer": optimizer}
    trainer = make(seed=2, learning_rate=0.05, **options)
    config = RegressionConfig(**options)
    train, _ = make_rows(config, 0)
    inputs, targets = train.inputs_RF.astype(np.float64), train.targets_R.astype(np.float64)
    w = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    reference = {
        "sgd": lambda: torch.optim.SGD([w], 0.05),
        "momentum": lambda: torch.optim.SGD([w], 0.05, momentum=0.9),
        "rmsprop": lambda: torch.optim.RMSprop([w], 0.05, alpha=0.99, eps=1e-8),
        "adagrad": lambda: torch.optim.Adagrad([w], 0.05, eps=1e-8),
        "adam": lambda: torch.optim.Adam([w], 0.05, eps=1e-8),
    }[optimizer]()
    for update in range(25):
        rows = sequence_batch(config, 2, update)
        errors = inputs[rows] @ w.detach().numpy() - targets[rows]
        loss = trainer.step().metrics["loss"]
        assert loss == pytest.approx(0.5 * np.mean(errors**2), rel=1e-4)
        w.grad = torch.from_numpy(inputs[rows].T @ errors / 8)
        reference.step()
    np.testing.assert_allclose(trainer.flat, w.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_classifiers_gradient_is_that_of_softmax_regression():
    trainer = make(kind="classifier", features=5, classes=3, rows=12, batch_size=12, sample="sequence")
    views = trainer.layout.views(trainer.flat)
    weight, bias = (np.array(view, np.float64) for view in views.values())
    train, _ = make_rows(
        RegressionConfig(kind="classifier", features=5, classes=3, rows=12, batch_size=12), 0
    )
    logits = train.inputs_RF @ weight.T + bias
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    errors = (shares - np.eye(3)[train.targets_R]) / 12
    trainer.stepper = keeper = Keeper()
    loss = trainer.step().metrics["loss"]
    assert loss == pytest.approx(-np.mean(np.log(shares[np.arange(12), train.targets_R])), rel=1e-5)
    expected = np.concatenate([(errors.T @ train.inputs_RF).ravel(), errors.sum(axis=0)])
    np.testing.assert_allclose(keeper.gradients[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"noise": 0.0, "batch_size": 8}, 1e-9),
        ({"noise": 0.0, "batch_size": 8, "optimizer": "adam", "learning_rate": 0.05}, 1e-2),
        ({"noise": 0.5, "batch_size": 8}, 0.1),
        ({"noise": 0.0, "features": 200, "density": 0.05, "learning_rate": 0.2, "batch_size": 4}, 1e-7),
    ],
)
def test_least_squares_converges(options, most):
    trainer = make(seed=1, **options)
    for _ in range(1500):
        stats = trainer.step()
    assert stats.metrics["evaluation_loss"] < most


@pytest.mark.parametrize("hidden", [(), (16,)])
def test_the_classifier_learns(hidden):
    trainer = make(seed=1, kind="classifier", hidden=hidden, noise=0.2, learning_rate=0.5)
    first = trainer.step().metrics
    for _ in range(600):
        last = trainer.step().metrics
    assert first["accuracy"] < 0.3
    assert last["accuracy"] > 0.9
    assert last["evaluation_loss"] < 0.5 * first["evaluation_loss"]


# --- the trainer's interface ---------------------------------------------------------------------


def test_rows_are_steps_and_evaluations_are_episodes():
    trainer = make(batch_size=7, evaluate_every=4)
    stats = [trainer.step() for _ in range(9)]
    assert [s.env_steps for s in stats] == [7] * 9
    assert [len(s.episodes) for s in stats] == [0, 0, 0, 1, 0, 0, 0, 1, 0]
    (episode_return, length) = stats[3].episodes[0]
    assert length == 28
    assert episode_return == -stats[3].metrics["evaluation_loss"]
    _, evaluation = make_rows(RegressionConfig(), 0)
    twin = make(batch_size=7)
    for _ in range(4):
        twin.step()
    expected = 0.5 * np.mean((evaluation.inputs_RF @ twin.flat - evaluation.targets_R) ** 2)
    assert episode_return == pytest.approx(-expected, rel=1e-5)


def test_nodes_begin_alike_and_draw_their_own_rows():
    one, two, again = make(1), make(2), make(1)
    np.testing.assert_array_equal(one.flat, two.flat)
    for trainer in (one, two, again):
        trainer.step()
    assert not np.array_equal(one.flat, two.flat)
    np.testing.assert_array_equal(one.flat, again.flat)


def test_initial_weights_of_a_network_come_from_the_tasks_seed():
    options = {"kind": "classifier", "hidden": (8,)}
    one, two, other = make(1, **options), make(2, **options), make(1, task_seed=1, **options)
    np.testing.assert_array_equal(one.flat, two.flat)
    assert not np.array_equal(one.flat, other.flat)


def test_annealing_and_a_rate_of_zero():
    trainer = make(anneal="linear", learning_rate=0.2)
    rates = []
    for fraction in (0.0, 0.25, 1.0, 7.0):
        trainer.set_progress(fraction)
        rates.append(trainer.step().metrics["learning_rate"])
    assert rates == pytest.approx([0.2, 0.15, 0.0, 0.0])
    still = make(learning_rate=0.0)
    still.step()
    assert not still.flat.any()


def test_clipping_and_bad_gradients_are_the_steppers():
    trainer = make(max_grad_norm=0.01, learning_rate=1.0)
    trainer.step()
    assert np.linalg.norm(trainer.flat) == pytest.approx(0.01, rel=1e-4)
    trainer.add_delta(np.full(32, np.inf, np.float32))
    metrics = trainer.step().metrics
    assert (metrics["gradient_steps"], metrics["skipped_steps"], metrics["gradient_norm"]) == (0, 1, 0)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_restart_goes_on_where_it_stopped(optimizer):
    options = {"optimizer": optimizer, "sample": "sequence", "workers": 3, "rows": 100}
    trainer, straight = make(1, **options), make(1, **options)
    for _ in range(5):
        trainer.step()
    trainer.sidecar_layout.check(trainer.sidecar())
    restarted = make(1, **options)
    sidecar = {name: np.array(array) for name, array in trainer.sidecar().items()}
    restarted.set_state(trainer.flat.copy(), sidecar, own=True)
    for _ in range(5):
        restarted.step()
    for _ in range(10):
        straight.step()
    np.testing.assert_array_equal(restarted.flat, straight.flat)


def test_foreign_state_is_refused_or_made_harmless():
    trainer = make(sample="sequence")
    with pytest.raises(LayoutMismatchError, match=r"regression\.updates"):
        trainer.set_state(trainer.flat.copy(), {"optimizer.steps": np.array(1)})
    with pytest.raises(LayoutMismatchError, match="optimizer"):
        trainer.set_state(trainer.flat.copy(), {"regression.updates": np.array(1)})
    with pytest.raises(LayoutMismatchError):
        trainer.add_delta(np.zeros(3, np.float32))
    for count in (-5, 2**63 - 1):
        state = {"optimizer.steps": np.array(count), "regression.updates": np.array(count)}
        trainer.set_state(trainer.flat.copy(), state)
        trainer.step()
        trainer.sidecar()


def test_there_are_no_moments():
    trainer = make()
    trainer.set_other_moments({})
    assert trainer.own_moments() == {}
    trainer.close()


def test_the_pace_is_made_up_to_what_was_asked_for():
    now, slept = [0.0], []

    def clock():
        now[0] += 0.0625  # each look at the clock takes a sixteenth of a second
        return now[0]

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    trainer = make(min_update_s=1.0, sleep=sleep, clock=clock)
    seconds = trainer.step().seconds
    assert slept == [0.9375]
    assert seconds == 1.125  # the trainer's own looks included
    slow = make(min_update_s=1.0, step_delay_s=0.5, sleep=sleep, clock=clock)
    slow.step()
    assert slept[1:] == [1.4375]
    late = make(min_update_s=0.03125, sleep=sleep, clock=clock)
    late.step()
    assert len(slept) == 2


# --- n workers are one big batch -----------------------------------------------------------------


def whole_numbers(trainer):
    """Make data and parameters small whole numbers: sums of them are exact in float32, in any order."""
    trainer.source.inputs_RF.mul_(2).round_()
    trainer.source.targets_R.mul_(4).round_()
    start = np.random.default_rng(0).integers(-3, 4, trainer.layout.size).astype(np.float32)
    trainer.set_state(start, None)


def test_workers_gradients_average_to_the_big_batchs_to_the_last_bit():
    workers, batch = 4, 16
    options = {"rows": 256, "sample": "sequence"}
    big = make(batch_size=workers * batch, **options)
    small = [make(seed, batch_size=batch, workers=workers, **options) for seed in range(workers)]
    keepers = []
    for trainer in (big, *small):
        whole_numbers(trainer)
        trainer.stepper = keeper = Keeper()
        keepers.append(keeper)
        for _ in range(3):
            trainer.step()
    for update in range(3):
        whole, *parts = (keeper.gradients[update] for keeper in keepers)
        total = sum(keeper.samples[update] for keeper in keepers[1:])
        assert total == keepers[0].samples[update] == 64
        mean = sum(part * np.float32(batch / total) for part in parts)
        assert mean.tobytes() == whole.tobytes()


@pytest.mark.parametrize(
    "kind", [{}, {"kind": "classifier", "hidden": (16,)}], ids=["least_squares", "classifier"]
)
def test_workers_that_average_their_gradients_train_as_one_with_the_big_batch(kind):
    """The same over 200 steps of SGD on real numbers: what a synchronous swarm must reach."""
    workers, batch = 3, 8
    options = {"rows": 240, "sample": "sequence", "noise": 0.3, **kind}
    big = make(batch_size=workers * batch, **options)
    small = [make(seed, batch_size=batch, workers=workers, **options) for seed in range(workers)]
    shared = start = big.flat.copy()
    for trainer in small:
        trainer.stepper = Keeper()
    for _ in range(200):
        big.step()
        for trainer in small:
            trainer.set_state(shared, None)
            trainer.step()
        mean = sum(trainer.stepper.gradients[-1] / np.float32(workers) for trainer in small)
        shared = shared - np.float32(0.1) * mean
    np.testing.assert_allclose(shared, big.flat, rtol=1e-4, atol=1e-6)
    assert np.abs(big.flat - start).max() > 0.1


# --- Hogwild -------------------------------------------------------------------------------------

SPARSE = {"features": 200, "density": 0.05, "noise": 0.0, "batch_size": 4, "learning_rate": 0.2}


def test_one_learner_on_a_shared_vector_is_serial_gradient_descent():
    alone, bound = make(1, **SPARSE), make(1, **SPARSE)
    buffer = np.full(200, 9.0, np.float32)
    bound.rebind(buffer, write=True)
    for _ in range(100):
        alone.step()
        bound.step()
    assert buffer.tobytes() == alone.flat.tobytes()


def test_learners_without_locks_converge_on_a_sparse_problem():
    """Threads here, processes in the node: torch lets go of the interpreter only within its kernels."""
    buffer = np.zeros(200, np.float32)
    trainers = [make(seed, **SPARSE) for seed in range(4)]
    for trainer in trainers:
        trainer.rebind(buffer, write=False)

    def work(trainer):
        for _ in range(700):
            trainer.step()

    threads = [threading.Thread(target=work, args=(trainer,)) for trainer in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # measured five times: 1e-14, as serial descent over the same 2800 steps; 800 of them alone reach 3e-5
    _, evaluation = make_rows(RegressionConfig(**SPARSE), 0)
    errors = evaluation.inputs_RF @ buffer - evaluation.targets_R
    assert 0.5 * np.mean(np.square(errors)) < 1e-9
