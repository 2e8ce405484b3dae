"""The inference process' answers against the policy itself, through shared memory."""

from __future__ import annotations

import select
import socket
import threading

import numpy as np
import pytest
import torch

from p2pdrl.config.task import (
    DDPGConfig,
    DQNConfig,
    EnvConfig,
    GradientsConfig,
    ImpalaConfig,
    NetworkConfig,
    OneStepQConfig,
    PPOConfig,
    RegressionConfig,
    SACConfig,
    TaskConfig,
)
from p2pdrl.errors import ConfigError, LayoutMismatchError, WorkerError
from p2pdrl.rl.inference import PolicyInference
from p2pdrl.rl.registry import build_trainer
from p2pdrl.rl.rollout_worker import RolloutWorker
from p2pdrl.rl.sources.unrolls import step_spec
from p2pdrl.tensors.inference_slots import InferenceSlots, StepItem, StepLanes, StepSpec
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.shared_memory import Doorbell, SharedRegion
from p2pdrl.tensors.shared_policy import ActingPolicy, SharedPolicy
from p2pdrl.workers.actor import StepAsker
from p2pdrl.workers.inference import ActorBatches, InferenceWorker, StepBatcher
from p2pdrl.workers.protocol import Infer, Inferred

from ..rl.toys import registered

ROWS = 4096


class Bench:
    """A worker, the daemon's end of its memory, and the policy that it should act like."""

    def __init__(self, task: TaskConfig, seed: int = 3) -> None:
        self.trainer = build_trainer(task, 1, "cpu")
        with torch.no_grad():  # far from uniform, so that actions differ
            generator = torch.Generator().manual_seed(5)
            for parameter in self.trainer.policy.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        self.inference = PolicyInference(task, seed)
        shape = self.inference.obs_shape
        self.vector = np.concatenate(
            [one.detach().numpy().reshape(-1) for one in self.trainer.policy.parameters()]
        )
        self.region = SharedRegion.create(SharedPolicy.nbytes_of(len(self.vector), shape), "policy")
        self.shared = SharedPolicy(self.region, len(self.vector), shape)
        self.worker = InferenceWorker(self.inference, self.region, len(self.vector))
        spec = self.inference.spec
        slots_region = SharedRegion.create(InferenceSlots.nbytes_of(spec, ROWS, 2), "slots")
        self.slots = InferenceSlots(slots_region, spec, ROWS, 2)
        self.worker.use_slots(slots_region, ROWS, 2)

    def publish(self, version: int = 7, mean=None, scale=None) -> None:
        shape = self.inference.obs_shape
        mean = np.zeros(shape) if mean is None else mean
        scale = np.ones(shape) if scale is None else scale
        self.shared.write(self.vector, ActingPolicy(version, 0.5, mean, scale))

    def ask(self, obs, greedy: int, slot: int = 0):
        count = len(obs)
        self.slots[slot].obs_NX[:count] = obs
        assert self.worker.infer(Infer(slot, count, greedy)) == Inferred(slot, 7)
        found = self.slots[slot]
        return (
            found.actions_NA[:count].copy(),
            found.log_probs_N[:count].copy(),
            found.values_N[:count].copy(),
        )


def some(count, size=4, seed=0):
    return np.random.default_rng(seed).normal(size=(count, size)).astype(np.float32)


def test_greedy_actions_log_probs_and_values_are_the_policys():
    bench = Bench(TaskConfig())
    bench.publish()
    obs = some(64)
    actions, log_probs, values = bench.ask(obs, greedy=64)
    with torch.inference_mode():
        outputs = bench.trainer.policy.outputs(torch.from_numpy(obs))
        logits = outputs.policy.numpy().astype(np.float64)
    assert actions.tolist() == logits.argmax(1).tolist()
    assert len(set(actions.tolist())) == 2
    expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    np.testing.assert_allclose(log_probs, expected[np.arange(64), actions], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values, outputs.values.numpy(), rtol=1e-6)


def test_sampled_actions_have_the_policys_distribution():
    bench = Bench(TaskConfig())
    bench.publish()
    obs = some(1)
    actions, log_probs, _ = bench.ask(np.repeat(obs, ROWS, 0), greedy=0)
    with torch.inference_mode():
        logits = bench.trainer.policy.outputs(torch.from_numpy(obs)).policy[0].double().numpy()
    p = np.exp(logits) / np.exp(logits).sum()
    assert abs((actions == 1).mean() - p[1]) < 4 * np.sqrt(p[0] * p[1] / ROWS)
    np.testing.assert_allclose(np.exp(log_probs), p[actions], rtol=1e-4)


def test_a_batch_may_hold_both_kinds():
    bench = Bench(TaskConfig())
    bench.publish()
    obs = np.repeat(some(1), 600, 0)
    actions, _, _ = bench.ask(obs, greedy=200, slot=1)
    assert len(set(actions[:200].tolist())) == 1
    assert len(set(actions[200:].tolist())) == 2


def test_observations_are_normalised_by_the_moments_given():
    bench = Bench(TaskConfig(env=EnvConfig(normalize_observations=True)))
    own, others = Moments.zeros((4,)), Moments.zeros((4,))
    own.update(some(50, seed=1) * 3 + 1)
    others.update(some(70, seed=2) * 5 - 2)
    merged = np.concatenate([some(50, seed=1) * 3 + 1, some(70, seed=2) * 5 - 2]).astype(np.float64)
    mean, scale = Moments.merge([own, others]).standardization
    bench.publish(mean=mean, scale=scale)
    obs = some(32) * 20
    actions, _, values = bench.ask(obs, greedy=32)
    seen = np.clip((obs - merged.mean(0)) / np.sqrt(merged.var(0) + 1e-8), -10, 10).astype(np.float32)
    with torch.inference_mode():
        outputs = bench.trainer.policy.outputs(torch.from_numpy(seen))
    assert actions.tolist() == outputs.policy.argmax(1).tolist()
    np.testing.assert_allclose(values, outputs.values.numpy(), rtol=1e-4, atol=1e-5)


def test_continuous_actions_are_within_the_environments_bounds():
    bench = Bench(TaskConfig(env=EnvConfig(id="Pendulum-v1")))
    bench.publish()
    spec = bench.inference.spec
    assert (spec.action_shape, spec.action_dtype) == ((1,), "float32")
    obs = some(200, 3) * 10
    actions, _, _ = bench.ask(obs, greedy=0)
    assert np.abs(actions).max() <= 2.0
    with torch.inference_mode():
        means = bench.trainer.policy.outputs(torch.from_numpy(obs)).policy.numpy()
    greedy, _, _ = bench.ask(obs, greedy=200)
    np.testing.assert_allclose(greedy, means.clip(-2, 2), rtol=1e-5, atol=1e-6)


def test_newer_parameters_are_used_from_the_next_batch_on():
    bench = Bench(TaskConfig())
    bench.publish()
    obs = some(8)
    _, _, before = bench.ask(obs, greedy=8)
    bench.vector = bench.vector * 0
    bench.shared.write(bench.vector, ActingPolicy(9, 0.0, np.zeros(0), np.zeros(0)))
    assert bench.worker.infer(Infer(0, 8, 8)) == Inferred(0, 9)
    assert not np.array_equal(bench.slots[0].values_N[:8], before)
    assert not bench.slots[0].values_N[:8].any()


def test_what_cant_work_is_refused():
    assert "memory" in PolicyInference(TaskConfig(network=NetworkConfig(core="lstm")), 1).refusal
    with pytest.raises(ConfigError, match="regression"):
        PolicyInference(TaskConfig(algorithm=RegressionConfig()), 1)
    bench = Bench(TaskConfig())
    with pytest.raises(LayoutMismatchError, match="parameters"):
        InferenceWorker(bench.inference, bench.region, 3)
    with pytest.raises(WorkerError, match="no policy"):
        bench.worker.infer(Infer(0, 1, 1))
    fresh = InferenceWorker(bench.inference, bench.region, len(bench.vector))
    with pytest.raises(WorkerError, match="before the memory"):
        fresh.infer(Infer(0, 1, 1))


# --- for the node's actors -----------------------------------------------------------------------

LANES = StepSpec(
    asked=(StepItem("obs", "float32", (2,)),), answered=(StepItem("values", "float32", ()),), shares=(2, 1, 1)
)


def lanes_of(spec=LANES):
    return StepLanes(SharedRegion.create(spec.nbytes, "steps"), spec)


def test_a_batch_closes_once_all_who_act_have_asked():
    lanes, batcher = lanes_of(), StepBatcher(LANES.shares, 100, wait_s=0.5)
    lanes.lanes[0].acting = lanes.lanes[2].acting = True
    batcher.look(lanes, 1.0)
    assert batcher.due_in_s(1.0) is None
    lanes.lanes[0].ask()
    batcher.look(lanes, 1.0)
    batcher.look(lanes, 1.25)
    assert batcher.due_in_s(1.25) == 0.25  # lane 1 doesn't act, lane 2 does
    lanes.lanes[2].ask()
    batcher.look(lanes, 1.3)
    assert batcher.due_in_s(1.3) == 0.0
    assert batcher.take() == ([0, 2], [1, 1], 1.0)
    assert batcher.due_in_s(1.3) is None


def test_nobody_waits_longer_than_asked_for_and_a_dead_actor_not_at_all():
    lanes, batcher = lanes_of(), StepBatcher(LANES.shares, 100, wait_s=0.5)
    for lane in lanes.lanes:
        lane.acting = True
    lanes.lanes[1].ask()
    batcher.look(lanes, 1.0)
    assert batcher.due_in_s(1.6) == 0.0
    lanes.lanes[0].acting = lanes.lanes[2].acting = False  # the daemon says so
    batcher.look(lanes, 1.1)
    assert batcher.due_in_s(1.1) == 0.0


def test_a_batch_has_so_many_rows_at_most_the_oldest_first():
    lanes, batcher = lanes_of(), StepBatcher(LANES.shares, 2, wait_s=9.0)
    lanes.lanes[2].acting = True
    lanes.lanes[1].ask()
    batcher.look(lanes, 1.0)
    lanes.lanes[0].ask()
    batcher.look(lanes, 2.0)
    assert batcher.due_in_s(2.0) == 0.0
    assert batcher.take().lanes == [1]  # lane 0 has two rows
    assert batcher.take() == ([0], [1], 2.0)


def test_an_answer_to_a_dead_actors_question_is_none_to_its_successors():
    lanes = lanes_of()
    first = lanes.lanes[0]
    first.ask()
    (question, _, _) = lanes.questions
    first.ask()  # its successor, before that is answered
    lanes.answer(0, question, version=5)
    assert first.waits
    lanes.answer(0, lanes.questions[0], version=6)
    assert (first.waits, first.version) == (False, 6)
    assert lanes.questions == [0, 0, 0]


class Actors:
    """Actors that ask, each in a thread, and the process that answers, in this one."""

    def __init__(self, task, shares, policy_bench):
        self.bench = policy_bench
        trainer = policy_bench.trainer
        self.spec = step_spec(fresh_policy(task, trainer), shares)
        self.lanes = lanes_of(self.spec)
        self.asked = Doorbell.create()
        self.answered = tuple(Doorbell.create() for _ in shares)
        batcher = StepBatcher(shares, 100, wait_s=30.0)
        self.batches = ActorBatches(
            policy_bench.worker, self.lanes, self.asked, self.answered, batcher=batcher
        )
        self.sockets = socket.socketpair()
        self.askers = [
            StepAsker(lane, self.asked, bell, self.sockets[0])
            for lane, bell in zip(self.lanes.lanes, self.answered, strict=True)
        ]

    def collect(self, workers):
        """Let each make an unroll; return them and the versions that acted."""
        found = {}
        for asker in self.askers:
            asker.begin()

        def act(number):
            raw = workers[number].collect()
            found[number] = raw, self.askers[number].end()

        threads = [threading.Thread(target=act, args=(number,)) for number in range(len(workers))]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            due_s = self.batches.serve()
            if due_s != 0.0:
                select.select([self.asked.waiter], [], [], 0.05)
        return [found[number] for number in range(len(workers))]

    def close(self):
        for bell in (self.asked, *self.answered):
            bell.close()
        for sock in self.sockets:
            sock.close()


def fresh_policy(task, trainer):
    from p2pdrl.rl.algorithms.registry import entry_of

    return entry_of(task.algorithm).policy(trainer.policy.spec, task, drawn=False)


POLE = EnvConfig(num_envs=3, max_episode_steps=12)
PENDULUM = EnvConfig(id="Pendulum-v1", num_envs=3, max_episode_steps=12)
TASKS = {
    "mlp": TaskConfig(env=POLE, algorithm=PPOConfig(unroll_steps=20)),
    "lstm": TaskConfig(
        env=POLE, algorithm=ImpalaConfig(unroll_steps=20), network=NetworkConfig(core="lstm", core_size=8)
    ),
    "gru, bf16": TaskConfig(
        env=POLE,
        algorithm=PPOConfig(unroll_steps=20),
        network=NetworkConfig(core="gru", core_size=8),
        gradients=GradientsConfig(precision="bf16"),
    ),
    "normalised": TaskConfig(
        env=EnvConfig(num_envs=3, normalize_observations=True), algorithm=PPOConfig(unroll_steps=20)
    ),
    "masks, entries": TaskConfig(
        env=EnvConfig(id="Cards-v0", num_envs=3, kwargs={"masks": "info", "nested": True}),
        algorithm=PPOConfig(unroll_steps=20),
    ),
    "masks, multi": TaskConfig(
        env=EnvConfig(id="Cards-v0", num_envs=3, kwargs={"masks": "info", "actions": "multi"}),
        algorithm=PPOConfig(unroll_steps=20),
    ),
    "gaussian": TaskConfig(env=PENDULUM, algorithm=PPOConfig(unroll_steps=20)),
    "gsde": TaskConfig(
        env=PENDULUM,
        algorithm=PPOConfig(unroll_steps=20),
        network=NetworkConfig(exploration_noise="sde", sde_sample_freq=4),
    ),
    "dqn": TaskConfig(env=POLE, algorithm=DQNConfig(unroll_steps=20)),
    "dqn, ladder, priorities": TaskConfig(
        env=POLE,
        algorithm=DQNConfig(unroll_steps=20, prioritized=True, actor_priorities=True, exploration="ladder"),
    ),
    "dqn, noisy": TaskConfig(
        env=POLE, algorithm=DQNConfig(unroll_steps=20), network=NetworkConfig(noisy=True)
    ),
    "q, spread": TaskConfig(env=POLE, algorithm=OneStepQConfig(unroll_steps=20)),
    "ddpg, priorities": TaskConfig(
        env=PENDULUM, algorithm=DDPGConfig(unroll_steps=20, prioritized=True, actor_priorities=True)
    ),
    "sac": TaskConfig(env=PENDULUM, algorithm=SACConfig(unroll_steps=20)),
}


SAME = ("obs_T1BX", "actions", "terminated_TB", "truncated_TB", "valid_TB")


@pytest.mark.parametrize("exploration", [0.0, 0.5])
@pytest.mark.parametrize("name", TASKS)
def test_unrolls_are_those_that_actors_make_by_themselves(name, exploration):
    """Two actors, of two environments and one, over two unrolls: the second begins in mid-episode."""
    task, shares = TASKS[name], (2, 1)
    with registered():
        bench = Bench(task)
        shape = bench.inference.obs_shape
        mean, scale = np.full(shape, 0.01), np.full(shape, 2.0)
        acting = ActingPolicy(7, exploration, mean, scale)
        bench.shared.write(bench.vector, acting)
        actors = Actors(task, shares, bench)
        options = [
            {"environments": share, "first": first, "total": 3}
            for share, first in zip(shares, (0, 2), strict=True)
        ]
        alone = [RolloutWorker(task, 11 + number, **one) for number, one in enumerate(options)]
        asking = [
            RolloutWorker(task, 11 + number, asked=actors.askers[number], **one)
            for number, one in enumerate(options)
        ]
        tolerance = 2e-2 if task.gradients.precision == "bf16" else 1e-4
        for _ in range(2):
            for worker, (found, version) in zip(alone, actors.collect(asking), strict=True):
                worker.parameters_D[:] = bench.vector
                expected = worker.collect(acting)
                assert version == 7
                for field in (*SAME, "rewards_TB"):
                    one, other = np.asarray(getattr(found, field)), np.asarray(getattr(expected, field))
                    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=field)
                assert len(found.episodes) == len(expected.episodes)
                np.testing.assert_allclose(found.episodes, expected.episodes, rtol=1e-4)
                for field in ("log_probs_TB", "values_T1B", "taken_TB", "state_BS"):
                    one, other = getattr(found, field), getattr(expected, field)
                    assert (one is None) == (other is None), field
                    if one is not None:
                        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        for worker in (*alone, *asking):
            worker.close()
        actors.close()


def test_an_unroll_has_the_oldest_version_that_acted_in_it():
    bench = Bench(TASKS["mlp"])
    bench.publish(version=7)
    actors = Actors(TASKS["mlp"], (3,), bench)
    worker = RolloutWorker(TASKS["mlp"], 1, 3, asked=actors.askers[0])
    serve, served = actors.batches.serve, []

    def published():
        served.append(1)
        if len(served) > 5:
            bench.shared.write(bench.vector, ActingPolicy(8 + len(served), 0.0, np.zeros(0), np.zeros(0)))
        return serve()

    actors.batches.serve = published
    assert actors.collect([worker])[0][1] == 7
    assert actors.collect([worker])[0][1] > 8
    worker.close()
    actors.close()


def test_what_was_done_for_actors_is_told_each_second():
    now_s = 0.0
    bench = Bench(TASKS["mlp"])
    bench.publish()
    spec = step_spec(fresh_policy(TASKS["mlp"], bench.trainer), (2, 1))
    lanes, bells = lanes_of(spec), [Doorbell.create() for _ in range(3)]
    batcher = StepBatcher(spec.shares, 100, wait_s=0.25)
    batches = ActorBatches(
        bench.worker, lanes, bells[0], tuple(bells[1:]), batcher=batcher, clock=lambda: now_s
    )
    lanes.lanes[0].acting = lanes.lanes[1].acting = True
    lanes.lanes[0].ask()
    assert batches.serve() == 0.25
    now_s = 0.25
    assert batches.serve() is None
    assert not lanes.lanes[0].waits
    assert (bells[1].hush(), bells[2].hush()) == (True, False)
    assert batches.news() is None  # not yet
    now_s = 1.0
    told = batches.news()
    assert (told.environments, told.seconds) == ([2], [0.25])
    now_s = 9.0
    assert batches.news() is None
    for bell in bells:
        bell.close()
