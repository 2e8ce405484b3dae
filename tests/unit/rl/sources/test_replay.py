"""Replay through a trainer: what is drawn is what happened, scaled as it is drawn."""

from __future__ import annotations

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch

from p2pdrl.config.task import DDPGConfig, DQNConfig, EnvConfig, NetworkConfig, TaskConfig
from p2pdrl.rl.actor_critic_q import beside
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.normalize import RewardScaler
from p2pdrl.rl.q_network import QNetwork
from p2pdrl.rl.registry import build_trainer
from p2pdrl.rl.sources.replay import ReplayBatch, ReplayFeeder, Transitions, TransitionScaler
from p2pdrl.tensors.moments import Moments


def task(**changes) -> TaskConfig:
    algorithm = {
        "unroll_steps": 32,
        "learning_starts": 100_000,
        "exploration_steps": 10,
        "exploration_end": 1.0,
    }
    env = {"num_envs": 4, "normalize_returns": False} | changes.pop("env", {})
    return TaskConfig(
        env=EnvConfig(**env), network=NetworkConfig(hidden=(8,)), algorithm=DQNConfig(**algorithm | changes)
    )


def collect(task: TaskConfig, unrolls: int = 12) -> ReplayBatch:
    trainer = build_trainer(task, seed=1, device="cpu")
    for _ in range(unrolls):
        batch = trainer.source.next()
    trainer.close()
    return batch


def follow(env: gym.Env, state: np.ndarray, action: int) -> tuple[np.ndarray, bool]:
    env.reset()
    env.unwrapped.state = state.astype(np.float64)
    env.unwrapped.steps_beyond_terminated = None
    after, _, terminated, *_ = env.step(action)
    return after, terminated


def rows_of(drawn: Transitions):
    return zip(
        drawn.obs_BX.numpy(),
        drawn.actions_B.numpy(),
        drawn.returns_B.numpy(),
        drawn.discounts_B.numpy(),
        drawn.next_obs_BX.numpy(),
        strict=True,
    )


def test_transitions_obey_the_environment():
    batch = collect(task())
    assert batch.stored > 1000
    drawn = batch.draw(300)
    env = gym.make("CartPole-v1").unwrapped
    ends = 0
    for obs, action, reward, discount, after in rows_of(drawn):
        true_after, terminated = follow(env, obs, int(action))
        np.testing.assert_allclose(after, true_after, rtol=1e-4, atol=1e-5)
        assert reward == 1.0
        assert discount == (0.0 if terminated else np.float32(0.99))
        ends += terminated
    assert ends > 3
    assert drawn.weights_B.unique().tolist() == [1.0]


def test_a_full_memory_is_enough_though_resets_take_places_in_it():
    trainer = build_trainer(task(buffer_size=256, learning_starts=256), seed=1, device="cpu")
    learned = [trainer.step().metrics["gradient_steps"] for _ in range(4)]
    trainer.close()
    assert learned == [0.0, 1.0, 1.0, 1.0]  # 64 rows a stream: two unrolls


def test_n_steps_end_with_the_episode():
    drawn = collect(task(n_step=3)).draw(300)
    returns_B, discounts_B = drawn.returns_B.numpy(), drawn.discounts_B.numpy()
    went_on_B = discounts_B > 0
    sums = [sum(0.99**step for step in range(steps)) for steps in (1, 2, 3)]
    np.testing.assert_allclose(discounts_B[went_on_B], 0.99**3, rtol=1e-6)
    np.testing.assert_allclose(returns_B[went_on_B], sums[-1], rtol=1e-6)
    apart_NB = np.abs(returns_B[~went_on_B] - np.array(sums)[:, None])
    assert (apart_NB.min(axis=0) < 1e-5).all()
    assert set(apart_NB.argmin(axis=0)) == {0, 1, 2}, "episodes end after one, two and three of the steps"


def test_observations_are_stored_raw_and_scaled_when_drawn():
    batch = collect(task(env={"normalize_observations": True}))
    drawn = batch.draw(500)
    assert drawn.obs_BX.mean(0).abs().max() < 0.5
    assert float(drawn.obs_BX.std(0).min()) > 0.6
    assert float(drawn.obs_BX.std(0).max()) < 1.5


def test_rewards_are_scaled_when_drawn():
    drawn = collect(task(env={"normalize_returns": True})).draw(50)
    values = drawn.returns_B.unique()
    assert len(values) == 1
    assert 0.0 < float(values) < 0.3


@pytest.mark.parametrize("n_step", [1, 3])
def test_returns_are_cut_where_each_of_their_rewards_would_be(n_step):
    scaler = RewardScaler(1, 0.99)
    scaler.statistics.set_own(Moments(1000.0, np.zeros(()), np.array(1.0)))  # a deviation of 0.03
    raw = np.array([0.001, 0.3, 5.0, -5.0], np.float32)
    scaled = TransitionScaler(torch.device("cpu"), None, scaler, n_step).scaled(raw)
    factor = float(scaler.statistics.in_use[1])
    assert 30 < factor < 33
    wanted = [0.001 * factor, 0.3 * factor, 10.0 * n_step, -10.0 * n_step]
    np.testing.assert_allclose(scaled, wanted, rtol=1e-6)
    assert raw[2] == 5.0
    np.testing.assert_array_equal(TransitionScaler(torch.device("cpu")).scaled(raw), raw)


def test_a_row_whose_error_is_not_finite_is_hardly_drawn_again():
    batch = collect(task(prioritized=True, alpha=1.0))
    drawn = batch.draw(64)
    errors = torch.full((64,), 10.0)
    errors[:8] = torch.tensor([float("nan"), float("inf"), -float("inf")] * 3)[:8]
    batch.update_priorities(drawn, errors)
    broken = drawn.indices_B[:8]
    assert not np.isin(batch.draw(500).indices_B, broken).any()
    batch.update_priorities(batch.draw(64), torch.full((64,), float("nan")))


def test_priorities_change_what_is_drawn():
    batch = collect(task(prioritized=True, alpha=1.0))
    drawn = batch.draw(64)
    batch.update_priorities(drawn, torch.zeros(64))
    chosen = batch.draw(1)
    batch.update_priorities(chosen, torch.tensor([1e6]))
    again = batch.draw(100)
    assert (again.indices_B == chosen.indices_B[0]).mean() > 0.9
    uniform = collect(task())
    uniform.update_priorities(uniform.draw(4), torch.ones(4))  # has no effect


@pytest.mark.parametrize("options", [{}, {"prioritized": True, "n_step": 3}], ids=["uniform", "prioritized"])
def test_a_seed_gives_the_same_curve(options):
    curves = []
    for _ in range(2):
        trainer = build_trainer(task(learning_starts=64, gradient_steps=4, **options), seed=2, device="cpu")
        curves.append([trainer.step().metrics["q_loss"] for _ in range(6)])
        trainer.close()
    assert curves[0] == curves[1]
    assert curves[0][-1] > 0


@pytest.mark.parametrize("prioritized", [False, True])
def test_several_draws_are_those_of_as_many_calls(prioritized):
    one, other = (collect(task(prioritized=prioritized)) for _ in range(2))
    at_once = list(one.draws(50, 7, beta=0.5))
    assert len(at_once) == 7
    assert list(one.draws(50, 0)) == []
    for drawn in at_once:
        alone = other.draw(50, beta=0.5)
        for name in ("obs_BX", "actions_B", "returns_B", "discounts_B", "next_obs_BX", "weights_B"):
            assert (getattr(drawn, name) == getattr(alone, name)).all(), name
        assert (drawn.indices_B == alone.indices_B).all()
        assert (drawn.serials_B == alone.serials_B).all()


def test_a_memory_in_a_buffer_is_taken_up_by_the_next_trainer_and_another_layout_s_is_wiped():
    first = build_trainer(task(), seed=1, device="cpu")
    buffer = memoryview(bytearray(first.replay_nbytes))
    assert first.keep_replay(buffer)
    stored = [first.source.next().stored for _ in range(4)]
    assert stored[-1] > stored[0] > 0
    second = build_trainer(task(), seed=2, device="cpu")
    assert second.keep_replay(buffer)
    batch = second.source.next()
    assert batch.stored >= stored[-1] + stored[0] - 4  # what it cut counts too
    other = build_trainer(task(env={"id": "Acrobot-v1"}), seed=1, device="cpu")
    assert not other.keep_replay(memoryview(bytearray(buffer) + bytearray(other.replay_nbytes)))
    assert 0 < other.source.next().stored <= 4 * 32
    for trainer in (first, second, other):
        trainer.close()


@pytest.mark.parametrize("n_step", [1, 3])
def test_rows_that_were_learned_from_have_their_errors_as_priorities(n_step):
    """|δ| is that of the parameters before each step, computed here from what was drawn, row by row."""
    trainer = build_trainer(
        task(
            prioritized=True, n_step=n_step, learning_starts=200, gradient_steps=2, double=False, discount=0.9
        ),
        seed=1,
        device="cpu",
    )
    for _ in range(3):
        trainer.step()
    batch = trainer.source.next()
    expected = {}
    blocks = batch.replay.blocks

    def noting(*arguments):
        for drawn in blocks(*arguments):
            with torch.no_grad():
                values = trainer.policy(drawn.obs_BX).gather(1, drawn.actions_B[:, None])[:, 0]
                next_values = frozen(drawn.next_obs_BX).max(1).values
                errors = drawn.returns_B + drawn.discounts_B * next_values - values
            expected.update(zip(drawn.indices_B.tolist(), errors.abs().tolist(), strict=True))
            yield drawn

    frozen = QNetwork(trainer.policy.spec, NetworkConfig(hidden=(8,)), seed=0)
    FlatModule(frozen, torch.device("cpu")).set_(trainer.sidecar()["target.q"].copy())
    batch.replay.blocks = noting
    trainer.algorithm.update(batch)
    memory = batch.replay.memory
    assert len(expected) > 60
    again = memory.sample(2000, np.random.default_rng(0), discount=0.9, beta=0.0)
    masses = dict(zip(again.indices_N.tolist(), again.masses_N.tolist(), strict=True))
    both = expected.keys() & masses.keys()
    assert len(both) > 30
    for index in both:
        assert masses[index] == pytest.approx((expected[index] + 1e-6) ** 0.6, rel=1e-4)
    trainer.close()


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
        ),
    ],
)
def test_transitions_reach_any_device_as_they_were_drawn(device):
    memory = collect(task()).replay.memory
    here, there = (
        ReplayFeeder(memory, TransitionScaler(torch.device(name)), discount=0.99, seed=1)
        for name in ("cpu", device)
    )
    for _ in range(8):  # the next is drawn while a copy may still be under way
        wanted, found = here.draw(300, 0.0), there.draw(300, 0.0)
        assert found.obs_BX.device.type == device
        for name in ("obs_BX", "actions_B", "returns_B", "discounts_B", "next_obs_BX"):
            assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), name


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("name", ["dqn", "ddpg"])
def test_first_priorities_are_the_learners_own_errors_at_equal_parameters(name, n_step):
    if name == "dqn":
        asked = task(prioritized=True, actor_priorities=True, n_step=n_step, discount=0.9)
    else:
        options = {"prioritized": True, "actor_priorities": True, "n_step": n_step, "discount": 0.9}
        asked = TaskConfig(
            env=EnvConfig(id="Pendulum-v1", num_envs=3, normalize_returns=False),
            network=NetworkConfig(hidden=(8,)),
            algorithm=DDPGConfig(unroll_steps=7, **options),
        )
    batch = collect(asked, unrolls=30)
    trainer = build_trainer(asked, seed=1, device="cpu")
    policy = trainer.policy  # as it is drawn: nobody has learned, and targets are copies
    memory = batch.replay.memory
    found = memory.sample(4000, np.random.default_rng(0), discount=0.9, beta=0.0)
    obs, next_obs = torch.from_numpy(found.obs_NX), torch.from_numpy(found.next_obs_NX)
    actions = torch.from_numpy(found.actions)
    with torch.no_grad():
        if name == "dqn":
            taken = policy(obs).gather(1, actions[:, None])[:, 0]
            after = policy(next_obs).max(1).values
        else:
            taken = policy.q_values(beside(obs, actions))[0].view(-1)
            after = policy.q_values(beside(next_obs, policy.act(next_obs)))[0].view(-1)
    errors = torch.from_numpy(found.returns_N) + torch.from_numpy(found.discounts_N) * after - taken
    expected = (errors.abs().numpy().astype(np.float64) + 1e-6) ** 0.6
    np.testing.assert_allclose(found.masses_N, expected, rtol=1e-3, atol=1e-3)
    assert len(np.unique(found.indices_N)) > 0.2 * memory.count
    trainer.close()


def test_a_stream_with_a_gap_keeps_the_greatest_priority_at_it():
    asked = task(prioritized=True, actor_priorities=True, n_step=3)
    trainer = build_trainer(asked, seed=1, device="cpu")
    raws = []
    feeder = trainer.replay
    read, feeder.read = feeder.read, raws.append
    for _ in range(3):
        trainer.source.next()
        raws[-1] = replace(
            raws[-1],
            obs_T1BX=raws[-1].obs_T1BX.copy(),
            actions=raws[-1].actions.clone(),
            **{
                name: getattr(raws[-1], name).copy()
                for name in ("rewards_TB", "terminated_TB", "truncated_TB", "valid_TB")
            },
        )
    read(raws[0])
    read(replace(raws[2], restarts_B=np.ones(4, bool)))
    memory = feeder.memory
    found = memory.sample(8000, np.random.default_rng(0), discount=0.99)
    masses = dict(zip(found.indices_N.tolist(), found.masses_N.tolist(), strict=True))
    greatest = [index for index, mass in masses.items() if mass == 1.0]  # as the first rows of all had
    assert 4 <= len(greatest) <= 8  # the last two of the first unroll, but for resets
    assert {index % (memory.places // 4) for index in greatest} <= {30, 31}
    trainer.close()
