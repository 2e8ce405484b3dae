"""Unrolls as batches: heaps of steps, or whole environments for a policy that remembers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from p2pdrl.config.task import A2CConfig, EnvConfig, NetworkConfig, PPOConfig, TaskConfig
from p2pdrl.rl.algorithms.batches import full_batch, minibatch, normalized
from p2pdrl.rl.registry import build_trainer

LSTM = NetworkConfig(hidden=(8,), core="lstm", core_size=6)
T, B = 40, 5
PPO = PPOConfig(unroll_steps=T, epochs=2, minibatches=2)


def make(algorithm=PPO, network=LSTM, env="CartPole-v1", seed=1):
    return build_trainer(
        TaskConfig(env=EnvConfig(id=env, num_envs=B), network=network, algorithm=algorithm), seed, "cpu"
    )


class Recorder:
    """Remembers the batches that it passes on."""

    def __init__(self, engine):
        self.batches, self.terms = [], []
        self._engine = engine

    def gradients(self, batch, objective):
        self.batches.append(batch)
        self.terms.append(self._engine.gradients(batch, objective))
        return self.terms[-1]

    def metrics(self):
        return {}


def record(trainer):
    trainer.engine = recorder = Recorder(trainer.engine)
    return recorder


def test_a_heap_of_valid_steps_without_memory():
    unroll = make(network=NetworkConfig(hidden=(8,))).source.next()
    valid = unroll.valid_TB
    assert not valid.all()
    batch = full_batch(unroll, {"rewards": unroll.rewards_TB})
    assert batch.rows == len(batch.inputs) == unroll.env_steps
    assert torch.equal(batch.inputs, unroll.obs_T1BX[:-1][valid])
    assert torch.equal(batch.targets["rewards"], unroll.rewards_TB[valid])
    part = minibatch(batch, torch.tensor([3, 0]))
    assert part.rows == 2
    assert torch.equal(part.inputs, batch.inputs[[3, 0]])


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_whole_environments_with_memory(env):
    trainer = make(env=env)
    trainer.step()
    unroll = trainer.source.next()
    unroll.valid_TB[2, 1] = False
    batch = full_batch(unroll, {"actions": unroll.actions, "rewards": unroll.rewards_TB})
    assert batch.inputs.shape[:2] == (B, T)
    assert torch.equal(batch.inputs[3], unroll.obs_T1BX[:-1, 3])
    assert torch.equal(batch.targets["valid"], unroll.valid_TB.T)
    for name, whole in (("actions", unroll.actions), ("rewards", unroll.rewards_TB)):
        assert not batch.targets[name][~unroll.valid_TB.T].any()
        assert torch.equal(batch.targets[name][1, :2], whole[:2, 1])
    part = minibatch(batch, torch.tensor([4, 1]))
    assert part.rows == int(unroll.valid_TB[:, [4, 1]].sum())
    assert torch.equal(part.context.state_BS, unroll.state_BS[[4, 1]])
    assert torch.equal(part.context.starts_BT, unroll.starts_T1B[:-1].T[[4, 1]])


def test_normalisation_is_over_the_steps_that_count():
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(T, B, generator=generator) * 3 + 1
    valid = torch.rand(T, B, generator=generator) > 0.3
    advantages[~valid] = 1e6
    found = normalized(advantages, valid)[valid]
    assert float(found.mean()) == pytest.approx(0, abs=1e-6)
    assert float(found.std(correction=0)) == pytest.approx(1, abs=1e-5)


def test_every_environment_is_in_one_minibatch_of_each_pass():
    trainer = make()
    recorder = record(trainer)
    steps = trainer.step().env_steps
    assert [len(batch.inputs) for batch in recorder.batches] == [3, 2, 3, 2]
    assert sum(batch.rows for batch in recorder.batches) == 2 * steps
    firsts = torch.cat([batch.inputs[:, 0] for batch in recorder.batches[:2]])
    again = torch.cat([batch.inputs[:, 0] for batch in recorder.batches[2:]])
    assert len(firsts.unique(dim=0)) == B
    assert torch.equal(firsts.unique(dim=0), again.unique(dim=0))


def test_the_first_ratios_are_one():
    """Training computes what acting computed: memory carried over unrolls, forgotten where episodes end."""
    trainer = make(PPOConfig(unroll_steps=T, epochs=1, minibatches=1))
    recorder = record(trainer)
    ends = 0
    for _ in range(4):
        ends += len(trainer.step().episodes)
    assert ends > 0
    for terms in recorder.terms:
        assert abs(float(terms[3])) < 1e-7  # KL
        assert float(terms[4]) == 0.0  # clipped


@pytest.mark.parametrize("algorithm", [PPO, A2CConfig(unroll_steps=T, normalize_advantages=True)])
def test_masked_steps_have_no_part_in_the_update(algorithm):
    results = []
    for garbage in (0.0, 1e3):
        trainer = make(algorithm)
        unroll = trainer.source.next()
        masked = ~unroll.valid_TB
        assert masked.any()
        unroll = replace(
            unroll,
            rewards_TB=unroll.rewards_TB.masked_fill(masked, garbage),
            log_probs_TB=unroll.log_probs_TB.masked_fill(masked, -garbage),
            actions=unroll.actions.masked_fill(masked, int(garbage > 0)),
        )
        metrics = trainer.algorithm.update(unroll)
        assert metrics["skipped_steps"] == 0
        results.append((trainer.flat.copy(), metrics))
    assert (results[0][0] == results[1][0]).all()
    assert results[0][1] == results[1][1]
