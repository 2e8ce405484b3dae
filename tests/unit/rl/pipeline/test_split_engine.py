"""A learner whose network is cut over devices learns what it learns on one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from p2pdrl.config.loader import resolve
from p2pdrl.config.task import A2CConfig, EnvConfig, NetworkConfig, PPOConfig, RegressionConfig, TaskConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.engines import EngineOptions
from p2pdrl.rl.pipeline.model_split import ModelSplit
from p2pdrl.rl.registry import build_trainer

ENV = EnvConfig(num_envs=4)
PPO = PPOConfig(unroll_steps=32, epochs=2, minibatches=2)
TWO = ("cpu", "cpu")
TASKS = {
    "ppo": TaskConfig(env=ENV, algorithm=PPO),
    "a2c": TaskConfig(env=ENV, algorithm=A2CConfig()),
    "lstm": TaskConfig(
        env=ENV, network=NetworkConfig(hidden=(8, 8), core="lstm", core_size=8), algorithm=PPO
    ),
    "classifier": TaskConfig(algorithm=RegressionConfig(kind="classifier", hidden=(16, 8))),
}


def train(task, updates=5, between=None, **options):
    trainer = build_trainer(task, 3, "cpu", engine=EngineOptions(**options))
    try:
        for update in range(updates):
            metrics = trainer.step().metrics
            if between is not None:
                between(trainer, update)
    finally:
        trainer.close()
    return trainer.flat.copy(), trainer.sidecar(), metrics


def assert_same(one, other, atol=1e-6):
    np.testing.assert_allclose(one[0], other[0], rtol=0, atol=atol)
    for key, array in one[1].items():
        np.testing.assert_allclose(other[1][key], array, rtol=1e-4, atol=1e-6, err_msg=key)


def test_cartpole_learns_what_it_learns_on_one_device():
    """The task of the preset; only sums over actor and critic are rounded in another order."""
    task = resolve(files=["model_split"]).config.task
    assert task.env.id == "CartPole-v1"
    whole = train(task, 1, microbatches=4)
    split = train(task, 1, microbatches=4, split_devices=TWO)
    assert_same(whole, split)
    assert (split[2]["stages"], split[2]["microbatches"]) == (2, 4)
    for name in ("policy_loss", "value_loss", "entropy"):
        assert split[2][name] == pytest.approx(whole[2][name], rel=1e-5, abs=1e-6)


def test_where_nothing_is_summed_in_another_order_it_is_the_same_to_the_bit():
    whole = train(TASKS["classifier"], 20)
    split = train(TASKS["classifier"], 20, split_devices=TWO, split_cuts=(1,))
    np.testing.assert_array_equal(whole[0], split[0])


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("ppo", ()),
        ("a2c", (2,)),
        ("lstm", (1,)),
        ("classifier", (2,)),
        *[
            pytest.param(name, cuts, marks=pytest.mark.slow)
            for name, cuts in itertools.product(TASKS, [(), (1,), (2,)])
        ],
    ],
)
def test_it_learns_what_one_device_learns_with_as_many_microbatches(name, cuts):
    whole = train(TASKS[name], 3, microbatches=2)
    assert_same(whole, train(TASKS[name], 3, microbatches=2, split_devices=TWO, split_cuts=cuts))


def test_a_device_for_each_block():
    whole = train(TASKS["ppo"], 3)
    three = ("cpu",) * 3
    assert_same(whole, train(TASKS["ppo"], 3, split_devices=three), atol=1e-5)
    assert_same(
        whole, train(TASKS["ppo"], 3, split_devices=three, microbatches=4, checkpoint_activations=True), 1e-4
    )


def test_what_comes_from_others_between_updates_counts():
    """Deltas and whole states change what the devices go on with."""

    def between(trainer, update):
        if update == 1:
            trainer.add_delta(np.full_like(trainer.flat, 0.01))
        if update == 2:
            state = {name: np.array(array) for name, array in trainer.sidecar().items()}
            trainer.set_state(trainer.flat * 0.5, state)

    whole = train(TASKS["ppo"], between=between)
    assert_same(whole, train(TASKS["ppo"], between=between, split_devices=TWO))
    assert np.abs(whole[0] - train(TASKS["ppo"])[0]).max() > 1e-3


def test_memory_that_was_moved_counts():
    def between(trainer, update):
        if update == 1:
            trainer.rebind(np.empty_like(trainer.flat), write=True)

    assert_same(train(TASKS["ppo"]), train(TASKS["ppo"], between=between, split_devices=TWO))


def test_auto_tries_numbers_of_microbatches():
    said = []
    _, _, metrics = train(
        TASKS["ppo"], 12, split_devices=TWO, split_cuts=(1,), microbatches="auto", say=said.append
    )
    assert metrics["microbatches"] in (1, 2, 4, 8)
    assert said[0] == "the model's 3 blocks are cut before 1 for 2 devices"
    assert "is the fastest" in said[-1]


def test_balanced_cuts_follow_measured_times(monkeypatch):
    """Blocks of 3, 1, 1 and 1 second: the first alone, the others together."""
    from p2pdrl.pipeline.layers import Layer
    from p2pdrl.rl.pipeline import parts

    def measured(blocks, inputs, context, **_):
        assert inputs.shape[0] == 64  # half of the longest batch
        return [Layer(str(n), 3.0 if n == 0 else 1.0, 0.0, 1.0, 1.0) for n in range(len(blocks))]

    monkeypatch.setattr(parts, "measure_blocks", measured)
    said = []
    task = TaskConfig(env=ENV, algorithm=PPO, network=NetworkConfig(hidden=(8, 8, 8)))
    train(task, 1, split_devices=TWO, microbatches=2, say=said.append)
    assert said == ["the model's 4 blocks are cut before 1 for 2 devices"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split_devices": ("cpu",) * 4}, "4 devices are more than the 3 blocks"),
        ({"split_devices": TWO, "split_cuts": (3,)}, "1 numbers that rise from 1 to at most 2"),
        ({"split_devices": TWO, "split_cuts": (1, 2)}, "1 numbers"),
        ({"split_devices": ("cpu",) * 3, "split_cuts": (2, 2)}, "2 numbers"),
        ({"split_devices": ("cpu", "nonsense")}, "no device is called 'nonsense'"),
    ],
)
def test_what_can_not_be_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        build_trainer(TASKS["ppo"], 3, "cpu", engine=EngineOptions(**options))


def test_an_error_on_a_device_is_told(monkeypatch):
    trainer = build_trainer(TASKS["ppo"], 3, "cpu", engine=EngineOptions(split_devices=TWO, split_cuts=(1,)))
    (engine,) = [trainer.engine]
    assert isinstance(engine._split, ModelSplit)

    def fails(*_, **__):
        raise ValueError("no such thing")

    monkeypatch.setattr(engine._split.shares[1], "forward", fails)
    with pytest.raises(ValueError, match="no such thing"):
        trainer.step()
    trainer.close()


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="there is no GPU")
def test_on_gpus():
    """Two of them where there are two; else one that does the work of both."""
    devices = tuple(f"cuda:{rank % torch.cuda.device_count()}" for rank in range(2))
    task = TASKS["classifier"]
    flats = []
    for options in ({}, {"split_devices": devices, "split_cuts": (1,), "microbatches": 4}):
        trainer = build_trainer(task, 3, devices[0], engine=EngineOptions(**options))
        for _ in range(5):
            trainer.step()
        flats.append(trainer.flat.copy())
        trainer.close()
    np.testing.assert_allclose(*flats, rtol=0, atol=1e-4)
