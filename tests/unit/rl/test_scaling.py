"""Learners that share out an update: shorter batches, higher rates, and what peers did meanwhile."""

from __future__ import annotations

import math

import numpy as np
import pytest

from p2pdrl.config.task import (
    A2CConfig,
    EnvConfig,
    ImpalaConfig,
    NetworkConfig,
    PPOConfig,
    RegressionConfig,
    TaskConfig,
)
from p2pdrl.rl.registry import build_trainer

SEED = 3
ENVIRONMENTS = 2


def trainer(algorithm):
    env = EnvConfig(num_envs=ENVIRONMENTS)
    task = TaskConfig(env=env, network=NetworkConfig(hidden=(8,)), algorithm=algorithm)
    return build_trainer(task, SEED, "cpu")


def ppo(steps, **options):
    return PPOConfig(unroll_steps=steps, epochs=2, minibatches=2, **options)


@pytest.mark.parametrize(
    "make",
    [ppo, lambda steps: A2CConfig(unroll_steps=steps), lambda steps: ImpalaConfig(unroll_steps=steps)],
    ids=["ppo", "a2c", "impala"],
)
def test_a_quarter_of_an_update_is_one_of_a_quarter_of_its_steps(make):
    shared, short = trainer(make(64)), trainer(make(16))
    shared.share(1, 4)
    for _ in range(3):
        found, wanted = shared.step(), short.step()
        assert found.env_steps == wanted.env_steps
        assert found.metrics == {**wanted.metrics, "batch_share": 0.25}
    np.testing.assert_array_equal(shared.flat, short.flat)


@pytest.mark.parametrize(
    ("steps", "learners", "each"),
    [(64, 3, 21), (64, 5, 13), (64, 8, 8), (64, 100, 8), (20, 2, 10), (5, 4, 5)],
)
def test_no_share_is_shorter_than_returns_need(steps, learners, each):
    learner = trainer(ppo(steps))
    learner.share(0, learners, 0.5)
    stats = learner.step()
    assert ENVIRONMENTS * each * 0.8 < stats.env_steps <= ENVIRONMENTS * each
    rate = PPOConfig().learning_rate
    assert stats.metrics["learning_rate"] == pytest.approx(rate * math.sqrt(steps / each))


def test_long_shares_are_cut_further_where_parameters_are_averaged():
    shared, short = (
        trainer(PPOConfig(unroll_steps=steps, epochs=2, minibatches=count, learning_rate=rate))
        for steps, count, rate in ((256, 16, 1e-3), (32, 8, 2e-3))
    )
    shared.share(0, 4, 0.5)
    for _ in range(2):
        found, wanted = shared.step().metrics, short.step().metrics
        assert found == {**wanted, "batch_share": 1 / 8}
    np.testing.assert_array_equal(shared.flat, short.flat)
    shared.share(0, 4, 0.0)
    assert shared.step().metrics["gradient_steps"] == 2 * 16, "averaged gradients keep replicas together"


def shared_among(env_id, learners, power, *, reset=False, **speeds):
    env = EnvConfig(id=env_id, num_envs=32, max_episode_steps=1000)
    algorithm = PPOConfig(
        unroll_steps=128, epochs=1, minibatches=32 if reset else 16, learning_rate=1e-3, reset_optimizer=reset
    )
    learner = build_trainer(
        TaskConfig(env=env, network=NetworkConfig(hidden=(8,)), algorithm=algorithm), SEED, "cpu"
    )
    learner.share(0, learners, power, **speeds)
    return learner.step()


@pytest.mark.parametrize(
    ("learners", "power", "steps", "environments", "minibatches", "rate"),
    [
        (1, 0.5, 128, 32, 16, 1e-3),
        (2, 0.5, 32, 32, 8, math.sqrt(2) * 1e-3),
        (3, 0.5, 21, 22, 5, math.sqrt(4096 / (21 * 22 * 3)) * 1e-3),
        (4, 0.5, 16, 16, 4, 2e-3),
        (8, 0.5, 16, 8, 4, math.sqrt(8) * 1e-3),
        (16, 0.5, 16, 8, 8, 4e-3),
        (32, 0.5, 16, 8, 16, math.sqrt(32) * 1e-3),
        (100, 0.5, 8, 8, 16, 8e-3),
        (8, 0.0, 32, 16, 16, 1e-3),
        (64, 0.0, 8, 8, 16, 1e-3),
    ],
)
def test_a_share_of_few_steps_is_of_fewer_environments(
    learners, power, steps, environments, minibatches, rate
):
    stats = shared_among("Acrobot-v1", learners, power)
    assert stats.env_steps == steps * environments
    assert stats.metrics.get("batch_share", 1.0) == steps * environments / (128 * 32)
    assert stats.metrics["gradient_steps"] == minibatches
    assert stats.metrics["learning_rate"] == pytest.approx(rate)


def test_a_share_that_cant_be_shorter_keeps_its_minibatches():
    task = TaskConfig(
        env=EnvConfig(id="Acrobot-v1", num_envs=64),
        network=NetworkConfig(hidden=(8,)),
        algorithm=PPOConfig(unroll_steps=16, epochs=1, minibatches=16),
    )
    learner = build_trainer(task, SEED, "cpu")
    learner.share(0, 4, 0.5)
    stats = learner.step()
    assert stats.env_steps == 16 * 64 / 4
    assert stats.metrics["gradient_steps"] == 16, "for each step of the swarm as many as one learner makes"


@pytest.mark.parametrize(("learners", "power", "minibatches"), [(2, 0.5, 16), (4, 0.5, 16), (4, 0.0, 32)])
def test_an_update_that_optimizers_begin_anew_with_has_more_minibatches(learners, power, minibatches):
    stats = shared_among("Acrobot-v1", learners, power, reset=True)
    assert stats.env_steps == 128 * 32 / learners * minibatches / 32
    assert stats.metrics["gradient_steps"] == minibatches


@pytest.mark.parametrize(("learners", "power", "steps"), [(4, 0.5, 32), (8, 0.5, 16), (8, 0.0, 16)])
def test_environments_that_only_step_together_all_do(learners, power, steps):
    stats = shared_among("CartPole-v1", learners, power)
    assert 0.8 * steps * 32 < stats.env_steps <= steps * 32
    assert stats.metrics["gradient_steps"] == 16


def test_the_share_of_a_learner_without_a_part_is_not_cut_further():
    stats = shared_among("Acrobot-v1", 4, 0.5, speed=0.0, total_speed=3.0)
    assert stats.env_steps == 8 * 21, "an eighth of a third of 128 steps of 32 environments, in the fewest"
    assert stats.metrics["gradient_steps"] == 2
    assert stats.metrics["learning_rate"] == 0.0


def test_a_slow_learners_share_is_shorter_and_has_fewer_minibatches_of_the_same_rows():
    slow, short = (
        trainer(PPOConfig(unroll_steps=steps, epochs=2, minibatches=count, learning_rate=rate))
        for steps, count, rate in ((512, 16, 1e-3), (32, 4, 2e-3))
    )
    slow.share(3, 4, 0.5, 0.25, 4.0)  # of 3.75 at the speed of 1, say, and itself
    for _ in range(2):
        found, wanted = slow.step().metrics, short.step().metrics
        assert found == {**wanted, "batch_share": 1 / 16}
    np.testing.assert_array_equal(slow.flat, short.flat)


def test_a_slow_learner_whose_gradients_are_averaged_makes_as_many_of_fewer_rows():
    slow, short = trainer(ppo(128)), trainer(ppo(8))
    slow.share(3, 4, 0.0, 0.25, 4.0)
    assert slow.step().metrics == {**short.step().metrics, "batch_share": 1 / 16}
    np.testing.assert_array_equal(slow.flat, short.flat)


def test_each_of_several_learners_may_have_the_whole_of_each_update():
    several, alone = trainer(ppo(64)), trainer(ppo(64))
    several.share(1, 2, total_speed=1.0)
    assert several.step().metrics == alone.step().metrics


def test_learners_come_and_go():
    learner = trainer(ppo(64, anneal="linear"))
    rate = PPOConfig().learning_rate
    learner.set_progress(0.5)
    rates, steps = [], []
    for learners, power in ((1, 0.0), (4, 0.5), (2, 0.5), (2, 0.0), (1, 0.5)):
        learner.share(0, learners, power)
        stats = learner.step()
        rates.append(stats.metrics["learning_rate"])
        steps.append(stats.env_steps)
    assert rates == pytest.approx([rate / 2 * factor for factor in (1, 2, math.sqrt(2), 1, 1)])
    for made, whole in zip(steps, (64, 16, 32, 32, 64), strict=True):
        assert ENVIRONMENTS * whole * 0.8 < made <= ENVIRONMENTS * whole


def test_an_update_begins_with_what_peers_changed_while_its_batch_was_collected():
    config = RegressionConfig(features=4, rows=64, batch_size=8)
    late, early = (build_trainer(TaskConfig(algorithm=config), SEED, "cpu") for _ in range(2))
    delta = np.arange(4, dtype=np.float32)
    order = []

    def collected():
        order.append("collected")
        late.add_delta(delta)

    draw = late.source.next

    def draws():
        order.append("drawn")
        return draw()

    late.source.next = draws
    late.collected = collected
    late.step()
    early.add_delta(delta)
    early.step()
    assert order == ["drawn", "collected"]
    np.testing.assert_array_equal(late.flat, early.flat)


@pytest.mark.parametrize(
    ("asked", "shares", "begins_anew"),
    [
        (True, ((0, 4, 0.5), (0, 4, 0.5)), True),
        (True, ((0, 1, 0.5), (0, 1, 0.5)), False),
        (True, ((0, 4, 0.0), (0, 4, 0.0)), False),
        (True, ((0, 4, 0.5), (0, 1, 0.5)), False),
        (True, ((0, 1, 0.5), (0, 4, 0.5)), True),
        (False, ((0, 4, 0.5), (0, 4, 0.5)), False),
    ],
)
@pytest.mark.parametrize("told", ["changes", "parameters"])
def test_optimizers_begin_anew_with_each_update_whose_result_is_averaged_if_asked(
    asked, shares, begins_anew, told
):
    learner, made = trainer(ppo(64, reset_optimizer=asked)), []
    for share in shares:
        learner.share(*share)
        if told == "changes":
            learner.add_delta(np.zeros_like(learner.flat))
        else:
            learner.set_state(learner.flat.copy(), None)
        made.append(learner.step().metrics["gradient_steps"])
    steps = int(learner.sidecar()["optimizer.steps"])
    assert steps == (made[-1] if begins_anew else sum(made))
    alone = learner.step().metrics["gradient_steps"]
    assert int(learner.sidecar()["optimizer.steps"]) == steps + alone, "nobody changed anything"


def test_a_learner_without_a_part_stays_where_it_is_and_goes_on_when_it_has_one():
    learner = trainer(ppo(64))
    learner.share(3, 4, 0.5, 0.0, 3.0)
    before = learner.flat.copy()
    stats = learner.step()
    assert 0 < stats.env_steps <= ENVIRONMENTS * 8
    np.testing.assert_array_equal(learner.flat, before)
    learner.share(3, 4, 0.5, 1.0, 4.0)
    learner.step()
    assert (learner.flat != before).any()
