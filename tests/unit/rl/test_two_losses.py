"""An algorithm of two losses with a target copy, from its registration to its state in the sidecar."""

from __future__ import annotations

import numpy as np
import pytest

from p2pdrl.config.checks import task_problems
from p2pdrl.config.loader import resolve
from p2pdrl.config.task import EnvConfig, GradientsConfig, NetworkConfig, TaskConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.engines import EngineOptions
from p2pdrl.rl.registry import build_trainer

from .two_losses import OnActorCriticConfig, TwoLossConfig

SIZE = 4 * 2 + 2 + 4 + 1
ACTOR, CRITIC = slice(0, 10), slice(10, 15)


def make(seed=1, **options):
    task = TaskConfig(env=EnvConfig(num_envs=2, normalize_returns=False), algorithm=TwoLossConfig(**options))
    return build_trainer(task, seed, "cpu")


def run(trainer, updates):
    """As a replica does: the version counts updates."""
    for _ in range(updates):
        trainer.step()
        trainer.policy_version += 1


def target(trainer):
    return trainer.sidecar()["target.critic"]


def copied(trainer):
    return trainer.flat.copy(), {name: np.array(array) for name, array in trainer.sidecar().items()}


def test_each_loss_steps_its_own_span_as_often_as_it_should():
    trainer = make(actor_every=2)
    before = trainer.flat.copy()
    run(trainer, 1)
    assert (trainer.flat[ACTOR] == before[ACTOR]).all()
    assert (trainer.flat[CRITIC] != before[CRITIC]).all()
    run(trainer, 1)
    assert (trainer.flat[ACTOR] != before[ACTOR]).any()
    sidecar = trainer.sidecar()
    assert (sidecar["optimizer.actor.steps"], sidecar["optimizer.critic.steps"]) == (1, 2)


def test_a_losss_gradient_outside_of_its_span_moves_nothing():
    """The actor's loss reaches the critic's weights; only the critic's own optimizer moves those."""
    with_actor, without = make(actor_every=1), make(actor_every=10**9)
    run(with_actor, 1)
    run(without, 1)
    np.testing.assert_array_equal(with_actor.flat[CRITIC], without.flat[CRITIC])
    assert (with_actor.flat[ACTOR] != without.flat[ACTOR]).any()


def test_the_sidecar_names_what_belongs_to_whom():
    trainer = make()
    run(trainer, 3)
    trainer.sidecar_layout.check(trainer.sidecar())
    shapes = {item.name: item.shape for item in trainer.sidecar_layout.items}
    assert shapes == {
        "optimizer.actor.m": (10,),
        "optimizer.actor.v": (10,),
        "optimizer.actor.steps": (),
        "optimizer.critic.steps": (),
        "target.critic": (5,),
    }


def test_a_hard_target_is_copied_when_the_version_passes_a_multiple():
    trainer = make(copy_every=3)
    first = trainer.flat[CRITIC].copy()
    run(trainer, 3)
    np.testing.assert_array_equal(target(trainer), first)
    third = trainer.flat[CRITIC].copy()
    run(trainer, 1)
    np.testing.assert_array_equal(target(trainer), third)
    # an exchange with a peer lifts the version over several multiples at once
    trainer.policy_version = 11
    before = trainer.flat[CRITIC].copy()
    run(trainer, 1)
    np.testing.assert_array_equal(target(trainer), before)


def test_a_soft_target_follows_each_step():
    trainer = make(tau=0.25)
    expected = trainer.flat[CRITIC].copy()
    for _ in range(4):
        run(trainer, 1)
        expected += 0.25 * (trainer.flat[CRITIC] - expected)
        np.testing.assert_allclose(target(trainer), expected, rtol=1e-6)


def test_a_servers_answer_leaves_the_target_alone_and_a_state_brings_it_along():
    donor, newcomer = make(1), make(2)
    run(donor, 4)
    before = target(newcomer).copy()
    newcomer.set_state(donor.flat, None)
    np.testing.assert_array_equal(target(newcomer), before)
    newcomer.set_state(*copied(donor))
    np.testing.assert_array_equal(target(newcomer), target(donor))
    assert newcomer.sidecar()["optimizer.actor.steps"] == 2
    # the version that comes with the state is no reason to copy anew
    newcomer.policy_version = 5
    run(newcomer, 1)
    np.testing.assert_array_equal(target(newcomer), target(donor))


def test_a_shared_vector_moves_all_spans():
    trainer, twin = make(actor_every=1), make(actor_every=1)
    buffer = np.zeros(SIZE, np.float32)
    trainer.rebind(buffer, write=True)
    trainer.offload()
    trainer.reload()
    run(trainer, 4)
    run(twin, 4)
    np.testing.assert_array_equal(buffer, twin.flat)


def test_exploration_follows_the_swarms_steps():
    trainer = make()
    seen = []
    for steps in (0, 500, 5000):
        trainer.set_progress(0.0, steps)
        trainer.step()
        seen.append(trainer.policy.exploration)
    assert seen == pytest.approx([1.0, 0.55, 0.1])


def test_what_several_losses_cant_do_is_refused_in_words():
    trainer = make()
    for ask in (lambda: trainer.stepper, trainer.parts):
        with pytest.raises(ConfigError, match=r"several losses \(actor, critic\)"):
            ask()


@pytest.mark.parametrize(
    ("strategy", "fits"),
    [("adpsgd", True), ("param_average", True), ("grad_average", False), ("pipeline", False)],
)
def test_strategies_that_dont_fit_are_refused_when_the_task_is_read(strategy, fits):
    chosen = resolve(sets=[f"task.strategy.name={strategy}"]).config.task.strategy
    task = TaskConfig(algorithm=TwoLossConfig(), strategy=chosen)
    said = [problem.message for problem in task_problems(task)]
    assert said == [] if fits else "2 losses" in said[0]


@pytest.mark.parametrize(
    ("env", "network"),
    [
        ("CartPole-v1", NetworkConfig(hidden=(4,))),
        ("CartPole-v1", NetworkConfig(kind="transformer", layers=1, heads=1, width=4)),
    ],
)
def test_each_loss_steps_its_parts_of_the_packages_own_network(env, network):
    """Bodies before heads: actor and critic lie in two pieces each. A shared trunk is nobody's own."""
    config = OnActorCriticConfig(actor_every=2, tau=0.5)
    task = TaskConfig(env=EnvConfig(id=env, num_envs=2), algorithm=config, network=network)
    trainer = build_trainer(task, 1, "cpu")
    names = [entry.name for entry in trainer.layout.entries]

    def moved(updates):
        before = trainer.flat.copy()
        run(trainer, updates)
        views = [trainer.layout.views(vector) for vector in (trainer.flat, before)]
        return {name.partition(".")[0] for name in names if (views[0][name] != views[1][name]).any()}

    parts = {name.partition(".")[0] for name in names} - {"trunk"}
    critic = {part for part in parts if part in ("critic", "value_head")}
    assert moved(1) == critic
    assert moved(1) == parts
    sizes = {part: sum(e.size for e in trainer.layout.entries if e.name.startswith(part)) for part in parts}
    sidecar = trainer.sidecar()
    assert sidecar["optimizer.actor.m"].size == sum(sizes[part] for part in parts - critic)
    assert target(trainer).size == sum(sizes[part] for part in critic)
    twin = build_trainer(task, 1, "cpu")
    buffer = np.zeros(twin.layout.size, np.float32)
    twin.rebind(buffer, write=True)
    twin.offload()
    twin.reload()
    run(twin, 2)
    np.testing.assert_array_equal(buffer, trainer.flat)
    np.testing.assert_array_equal(target(twin), target(trainer))


def test_a_continuous_policys_deviations_belong_to_the_actor():
    env = EnvConfig(id="Pendulum-v1", num_envs=2)
    policy = build_trainer(TaskConfig(env=env), 1, "cpu").policy
    assert policy.actor_parts == ("log_std", "actor", "policy_head")
    assert policy.critic_parts == ("critic", "value_head")


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        (EngineOptions(checkpoint_activations=True), "float32"),
        (EngineOptions(microbatches=2), "float32"),
        (EngineOptions(microbatches=2, checkpoint_activations=True), "bf16"),
    ],
)
def test_a_network_of_ones_own_runs_in_every_way_of_computing_gradients(options, precision):
    task = TaskConfig(
        env=EnvConfig(num_envs=2),
        algorithm=TwoLossConfig(actor_every=1),
        gradients=GradientsConfig(precision=precision),
    )
    plain = build_trainer(task, 1, "cpu")
    trainer = build_trainer(task, 1, "cpu", engine=options)
    run(plain, 2)
    run(trainer, 2)
    np.testing.assert_allclose(trainer.flat, plain.flat, atol=1e-2 if precision == "bf16" else 1e-5)
