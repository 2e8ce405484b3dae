"""The trainer: one object that steps, publishes and takes over state."""

from __future__ import annotations

import numpy as np
import pytest

from p2pdrl.config.task import A2CConfig, EnvConfig, NetworkConfig, PPOConfig, RegressionConfig, TaskConfig
from p2pdrl.errors import ConfigError, LayoutMismatchError
from p2pdrl.rl.registry import build_trainer
from p2pdrl.tensors.moments import Moments

SMALL = NetworkConfig(hidden=(8,))
ENV = EnvConfig(num_envs=2)
PPO = PPOConfig(unroll_steps=16, epochs=2, minibatches=2)
NORMALIZED = EnvConfig(id="Pendulum-v1", num_envs=2, normalize_observations=True, normalize_returns=True)


def make(seed=1, *, env=ENV, algorithm=PPO, task_seed=0):
    return build_trainer(TaskConfig(seed=task_seed, env=env, network=SMALL, algorithm=algorithm), seed, "cpu")


def copied(arrays):
    return {name: np.array(array) for name, array in arrays.items()}


@pytest.mark.parametrize(
    "algorithm", [PPO, A2CConfig(), A2CConfig(optimizer="adam", normalize_advantages=True)]
)
@pytest.mark.parametrize("env", [ENV, NORMALIZED])
def test_a_step_moves_the_parameters_and_counts(algorithm, env):
    trainer = make(env=env, algorithm=algorithm)
    before = trainer.flat.copy()
    stats = [trainer.step() for _ in range(3)]
    assert not np.array_equal(before, trainer.flat)
    assert np.isfinite(trainer.flat).all()
    assert all(0 < s.env_steps <= algorithm.unroll_steps * 2 for s in stats)
    assert all(np.isfinite(value) for s in stats for value in s.metrics.values())


def test_it_tells_what_observations_and_actions_are():
    assert make().spaces == {"observation": "4 of float32", "action": "one of 2"}
    assert make(env=NORMALIZED).spaces == {"observation": "3 of float32", "action": "1 numbers"}


def test_nodes_begin_alike_and_then_differ():
    one, two, other_task = make(1), make(2), make(1, task_seed=5)
    np.testing.assert_array_equal(one.flat, two.flat)
    assert not np.array_equal(one.flat, other_task.flat)
    one.step()
    two.step()
    assert not np.array_equal(one.flat, two.flat)


def test_a_seed_repeats_a_run():
    one, two = make(3), make(3)
    for _ in range(5):
        first, second = one.step(), two.step()
        assert (first.env_steps, first.episodes, first.metrics) == (
            second.env_steps,
            second.episodes,
            second.metrics,
        )
    np.testing.assert_array_equal(one.flat, two.flat)


def test_zero_learning_rate_leaves_the_parameters_alone():
    trainer = make(algorithm=PPOConfig(unroll_steps=16, learning_rate=0.0))
    before = trainer.flat.copy()
    trainer.step()
    np.testing.assert_array_equal(before, trainer.flat)


def test_annealing_follows_the_swarms_progress():
    trainer = make(algorithm=PPOConfig(unroll_steps=16, learning_rate=0.01, anneal="linear"))
    rates = []
    for fraction in (0.0, 0.25, 1.0, 1.7):
        trainer.set_progress(fraction)
        rates.append(trainer.step().metrics["learning_rate"])
    assert rates == pytest.approx([0.01, 0.0075, 0.0, 0.0])


def test_seconds_come_from_the_clock_given():
    ticks = iter((10.0, 12.5))
    trainer = build_trainer(
        TaskConfig(env=ENV, network=SMALL, algorithm=PPO), 1, "cpu", clock=lambda: next(ticks)
    )
    assert trainer.step().seconds == 2.5


def test_sidecar_is_as_its_layout_says():
    trainer = make(env=NORMALIZED)
    trainer.step()
    trainer.sidecar_layout.check(trainer.sidecar())
    rules = {item.name: item.rule for item in trainer.sidecar_layout.items}
    assert rules["optimizer.m"] == "copy"
    assert rules["observations.mean"] == rules["returns.count"] == "moments"


def test_a_restart_goes_on_where_it_stopped():
    trainer = make(env=NORMALIZED)
    for _ in range(3):
        trainer.step()
    vector, sidecar = trainer.flat.copy(), copied(trainer.sidecar())
    restarted = make(seed=9, env=NORMALIZED)
    restarted.set_state(vector, sidecar, own=True)
    np.testing.assert_array_equal(restarted.flat, vector)
    for name, array in restarted.sidecar().items():
        np.testing.assert_array_equal(array, sidecar[name])


def test_another_nodes_state_brings_no_counters_of_its_own():
    donor, newcomer = make(1, env=NORMALIZED), make(2, env=NORMALIZED)
    donor.step()
    newcomer.set_state(donor.flat, donor.sidecar())
    np.testing.assert_array_equal(newcomer.flat, donor.flat)
    np.testing.assert_array_equal(newcomer.sidecar()["optimizer.v"], donor.sidecar()["optimizer.v"])
    assert newcomer.own_moments()["observations"].count == 0


def test_other_nodes_counters_change_what_the_policy_sees_but_not_the_own():
    trainer = make(env=NORMALIZED)
    trainer.step()
    own = trainer.own_moments()["observations"].count
    assert trainer.observation_normalizer is not None
    x = np.array([1.0, 2.0, 3.0])
    before = trainer.observation_normalizer.normalize(x)
    others = Moments(1e6, np.full(3, 100.0), np.full(3, 1e6))
    trainer.set_other_moments({"observations": others, "unknown": others})
    assert not np.allclose(before, trainer.observation_normalizer.normalize(x))
    assert trainer.own_moments()["observations"].count == own


def test_a_delta_is_added():
    trainer = make()
    before = trainer.flat.copy()
    trainer.add_delta(np.full_like(before, 0.5))
    np.testing.assert_allclose(trainer.flat, before + 0.5)


@pytest.mark.parametrize("algorithm", [PPO, A2CConfig(), RegressionConfig(optimizer="adam")])
def test_offloaded_it_can_be_read_and_replaced_and_then_goes_on_as_before(algorithm):
    task = TaskConfig(env=ENV, network=SMALL, algorithm=algorithm)
    trainer, twin = build_trainer(task, 1, "cpu"), build_trainer(task, 1, "cpu")
    for _ in range(2):
        trainer.step()
        twin.step()
        trainer.offload()
        with pytest.raises(RuntimeError):
            trainer.step()
        state = trainer.flat.copy(), copied(trainer.sidecar())
        trainer.set_state(np.zeros_like(state[0]), {name: np.zeros_like(x) for name, x in state[1].items()})
        trainer.set_state(*state, own=True)
        trainer.reload()
        trainer.set_state(twin.flat.copy(), copied(twin.sidecar()), own=True)
        np.testing.assert_array_equal(trainer.flat, twin.flat)
    for name, array in twin.sidecar().items():
        np.testing.assert_array_equal(trainer.sidecar()[name], array)


def test_foreign_vectors_are_refused():
    trainer = make()
    with pytest.raises(LayoutMismatchError):
        trainer.add_delta(np.zeros(3, dtype=np.float32))
    with pytest.raises(LayoutMismatchError, match="optimizer"):
        trainer.set_state(trainer.flat.copy(), {})


def test_unknown_devices_are_refused():
    with pytest.raises(ConfigError, match="nonsense"):
        build_trainer(TaskConfig(), 1, "nonsense")
