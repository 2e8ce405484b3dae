"""The collector on scripted episodes: what is masked, what is bootstrapped, what is counted."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from p2pdrl.config.task import EnvConfig, NetworkConfig
from p2pdrl.rl.envs import VectorEnv, make_vector_env
from p2pdrl.rl.normalize import RewardScaler, RunningNormalizer
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.rollout import Collector
from p2pdrl.rl.serial_env import SerialVectorEnv
from p2pdrl.rl.sources.unrolls import InlineSource, UnrollScaler

from .policies import POLICIES, make_policy


class Counter(gym.Env):
    """The observation is (episode, step); pays step²; ends after ``length`` steps in the way asked for."""

    observation_space = gym.spaces.Box(-1e6, 1e6, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int, truncates: bool) -> None:
        self.length, self.truncates, self.episode = length, truncates, -1

    def reset(self, *, seed=None, options=None):
        self.episode, self.t = self.episode + 1, 0
        return np.array([self.episode, 0], np.float32), {}

    def step(self, action):
        self.t += 1
        end = self.t == self.length
        obs = np.array([self.episode, self.t], np.float32)
        return obs, float(self.t**2), end and not self.truncates, end and self.truncates, {}


def counters():
    makers = [lambda: Counter(2, truncates=False), lambda: Counter(3, truncates=True)]
    return VectorEnv(gym.vector.SyncVectorEnv(makers, copy=False), seed=0)


FORGETFUL = NetworkConfig(hidden=(8,))
RECURRENT = NetworkConfig(hidden=(8,), core="lstm", core_size=4)


def collector(env, unroll_steps, seed=0, network=FORGETFUL, normalizer=None, reward_scaler=None):
    policy = ActorCritic(env.spec, network, seed=0)
    with torch.no_grad():
        policy.policy_head.weight.mul_(100.0)  # opinions: policies begin near uniform
    generator = torch.Generator().manual_seed(seed)
    collects = Collector(env, policy, unroll_steps, generator, normalizer=normalizer)
    scaler = UnrollScaler(torch.device("cpu"), normalizer=normalizer, reward_scaler=reward_scaler)
    return policy, InlineSource(collects, scaler)


def test_rows_of_scripted_episodes():
    policy, collect = collector(counters(), 7)
    unroll = collect.next()
    # one environment: steps 1 2, then a reset, and so on; the other: steps 1 2 3, then a reset
    assert unroll.obs_T1BX[:, 0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1]]
    assert unroll.obs_T1BX[:, 1].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [1, 2], [1, 3]]
    assert unroll.valid_TB.T.tolist() == [
        [True, True, False, True, True, False, True],
        [True] * 3 + [False] + [True] * 3,
    ]
    assert unroll.rewards_TB.T.tolist() == [[1, 4, 0, 1, 4, 0, 1], [1, 4, 9, 0, 1, 4, 9]]
    assert unroll.terminated_TB[:, 0].nonzero().flatten().tolist() == [1, 4]
    assert unroll.truncated_TB[:, 1].nonzero().flatten().tolist() == [2, 6]
    assert not unroll.truncated_TB[:, 0].any()
    assert not unroll.terminated_TB[:, 1].any()
    assert unroll.env_steps == 11
    assert unroll.episodes == [(5.0, 2), (14.0, 3), (5.0, 2), (14.0, 3)]
    # the row after a truncation holds the true final observation, so its value is the bootstrap
    final = policy.values(torch.tensor([0.0, 3.0]))
    torch.testing.assert_close(unroll.values_T1B[3, 1], final)


def test_episodes_run_on_across_unrolls():
    _, long = collector(counters(), 12)
    _, short = collector(counters(), 3)
    whole = long.next()
    pieces = []
    for _ in range(4):
        piece = short.next()
        pieces.append((piece.obs_T1BX[:-1].clone(), piece.valid_TB.clone(), piece.episodes, piece.env_steps))
    assert torch.equal(torch.cat([p[0] for p in pieces]), whole.obs_T1BX[:-1])
    assert torch.equal(torch.cat([p[1] for p in pieces]), whole.valid_TB)
    assert [e for p in pieces for e in p[2]] == whole.episodes
    assert sum(p[3] for p in pieces) == whole.env_steps


def many_counters(count):
    makers = [lambda k=k: Counter(2 + k % 5, truncates=k % 2 == 0) for k in range(count)]
    return VectorEnv(SerialVectorEnv(makers), seed=0)


@pytest.mark.parametrize("network", [FORGETFUL, RECURRENT], ids=["forgetful", "recurrent"])
def test_environments_of_a_short_share_run_on_while_others_stand_still(network):
    whole = collector(many_counters(17), 128)[1].next()
    policy, source = collector(many_counters(17), 128, network=network)
    begun = np.zeros(17, int)
    for learners, steps, environments in ((16, 17, 8), (8, 34, 8), (2, 64, 17), (16, 17, 8), (4, 32, 17)):
        source.share(0, learners, 1 / learners)
        unroll = source.next()
        assert unroll.actions.shape == (steps, environments)
        for number, t in enumerate(begun[:environments]):
            obs = whole.obs_T1BX[t : t + steps + 1, number]
            assert torch.equal(unroll.obs_T1BX[: len(obs), number], obs)
            for name in ("rewards_TB", "valid_TB", "terminated_TB", "truncated_TB"):
                rows = getattr(whole, name)[t : t + steps, number]
                assert torch.equal(getattr(unroll, name)[: len(rows), number], rows)
        begun[:environments] += steps
        assert unroll.env_steps == int(unroll.valid_TB.sum())
        assert len(unroll.episodes) == int(unroll.ends_TB.sum())
        if network is RECURRENT:
            with torch.no_grad():
                log_probs, values = columns_by_hand(policy, unroll)
        else:
            log_probs, values = policy.evaluate(unroll.obs_T1BX[:-1], unroll.actions)
            values = torch.cat((values, policy.values(unroll.obs_T1BX[-1:])))
        torch.testing.assert_close(unroll.log_probs_TB, log_probs.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(unroll.values_T1B, values.detach(), rtol=1e-5, atol=1e-6)


def test_log_probabilities_belong_to_the_actions():
    env = make_vector_env(EnvConfig(num_envs=4), seed=0)
    policy, collect = collector(env, 16)
    unroll = collect.next()
    log_probs, values = policy.evaluate(unroll.obs_T1BX[:-1], unroll.actions)
    torch.testing.assert_close(unroll.log_probs_TB, log_probs.detach())
    torch.testing.assert_close(unroll.values_T1B[:-1], values.detach())
    assert set(unroll.actions.flatten().tolist()) == {0, 1}


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_seed_repeats_everything(env_id):
    def run(seed):
        env = make_vector_env(EnvConfig(id=env_id, num_envs=2), seed=seed)
        unroll = collector(env, 20, seed)[1].next()
        return unroll.obs_T1BX.clone(), unroll.actions.clone()

    (obs, actions), (obs_again, actions_again), (obs_other, _) = run(1), run(1), run(2)
    assert torch.equal(obs, obs_again)
    assert torch.equal(actions, actions_again)
    assert not torch.equal(obs, obs_other)


def test_normalizers_count_valid_steps_only_and_statistics_stay_raw():
    normalizer, scaler = RunningNormalizer((2,)), RewardScaler(2, 0.9)
    _, collect = collector(counters(), 7, normalizer=normalizer, reward_scaler=scaler)
    first = collect.next()
    assert normalizer.own.count == scaler.statistics.own.count == first.env_steps == 11
    assert first.obs_T1BX.max() == 3  # nothing counted yet while it ran
    assert first.episodes[0] == (5.0, 2)
    assert first.rewards_TB.max() < 9
    mean, deviation = normalizer.own.mean.copy(), np.sqrt(normalizer.own.var)
    second = collect.next()
    raw = collect._collector._raw_obs_T1BX[0]
    np.testing.assert_allclose(second.obs_T1BX[0], (raw - mean) / deviation, rtol=1e-4)


def columns_by_hand(policy, unroll):
    """Log-probabilities and values of one environment after the other, one row after the other."""
    assert unroll.state_BS is not None
    T, B = unroll.actions.shape[:2]
    log_probs, values = torch.zeros(T, B), torch.zeros(T + 1, B)
    for b in range(B):
        state = unroll.state_BS[b : b + 1].clone()
        for t in range(T + 1):
            if t > 0 and not unroll.valid_TB[t - 1, b]:  # the row before was a reset
                state.zero_()
            state = policy.core.step(policy.trunk(unroll.obs_T1BX[t, b : b + 1]), state)
            h = state[:, : policy.core.size]
            values[t, b] = policy.value_head(h)
            if t < T:
                logits = policy.policy_head(h)[0]
                log_probs[t, b] = torch.log_softmax(logits, 0)[unroll.actions[t, b]]
    return log_probs, values


@pytest.mark.parametrize("unroll_steps", [1, 2, 3, 7, 8])
def test_a_memory_runs_on_across_unrolls_and_forgets_between_episodes(unroll_steps):
    policy, collect = collector(counters(), unroll_steps, network=RECURRENT)
    begins_anew = 0
    for number in range(12):
        unroll = collect.next()
        assert unroll.state_BS is not None
        with torch.no_grad():
            log_probs, values = columns_by_hand(policy, unroll)
        torch.testing.assert_close(unroll.log_probs_TB, log_probs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(unroll.values_T1B, values, rtol=1e-5, atol=1e-6)
        # the state that the unroll begins with is empty exactly where an episode does: at step 0
        begins = unroll.obs_T1BX[0, :, 1] == 0
        empty = (unroll.state_BS == 0).all(1)
        # (in episode 0 all is zero after the first step too, for its observation is)
        running = unroll.valid_TB[0] & ~begins & (unroll.obs_T1BX[0, :, 0] > 0)
        assert empty[begins & unroll.valid_TB[0]].all()
        assert not empty[running].any()
        begins_anew += int(begins.sum()) if number else 0
    assert begins_anew > 0


@pytest.mark.parametrize(
    ("env_id", "trunk"), [("CartPole-v1", {}), ("Pendulum-v1", {"kind": "transformer", "width": 8})]
)
def test_training_sees_what_the_collector_saw(env_id, trunk):
    env = make_vector_env(EnvConfig(id=env_id, num_envs=3, max_episode_steps=9), seed=0)
    network = NetworkConfig(hidden=(8,), core="lstm", core_size=5, **trunk)
    policy, collect = collector(env, 16, network=network)
    for _ in range(3):
        unroll = collect.next()
        assert not unroll.valid_TB.all()
        log_probs, values = policy.evaluate(
            unroll.obs_T1BX[:-1].transpose(0, 1), unroll.actions.transpose(0, 1), unroll.context
        )
        torch.testing.assert_close(log_probs.T, unroll.log_probs_TB, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values.T, unroll.values_T1B[:-1], rtol=1e-5, atol=1e-5)
        half = slice(0, 2)  # environments don't depend on who else is in the batch
        context = type(unroll.context)(*(tensor[half] for tensor in unroll.context))
        some, _ = policy.evaluate(
            unroll.obs_T1BX[:-1, half].transpose(0, 1), unroll.actions[:, half].transpose(0, 1), context
        )
        torch.testing.assert_close(some, log_probs[half], rtol=1e-5, atol=1e-5)


def test_the_state_kept_while_acting_is_the_one_that_training_computes():
    env = make_vector_env(EnvConfig(num_envs=3, max_episode_steps=9), seed=0)
    policy, collect = collector(env, 12, network=RECURRENT)
    first = collect.next()
    obs, valid, state_BS = first.obs_T1BX.clone(), first.valid_TB.clone(), first.state_BS
    assert policy.core is not None
    with torch.no_grad():
        for t in range(12):
            state_BS = policy.core.step(policy.trunk(obs[t]), state_BS)
            state_BS[~valid[t]] = 0.0
    torch.testing.assert_close(collect.next().state_BS, state_BS, rtol=1e-5, atol=1e-6)


def test_without_a_memory_there_is_no_state():
    _, collect = collector(counters(), 3)
    assert collect.next().state_BS is None


class Noise:
    """Environments of any kind: observations and ends are drawn, whatever is done."""

    num_envs = 3

    def __init__(self, spec):
        self.spec = spec
        self._rng = np.random.default_rng(0)

    def reset(self):
        obs = self._rng.random((self.num_envs, *self.spec.obs_shape)) * (255 if self.spec.is_image else 1)
        return (obs > 0.5) if self.spec.obs_dtype == "bool" else obs.astype(self.spec.obs_dtype)

    def step(self, actions):
        ends = self._rng.random((2, self.num_envs)) < 0.2
        return self.reset(), np.zeros(self.num_envs), ends[0], ends[1] & ~ends[0]

    def games_over(self, ends_B):
        return ends_B


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_kept_from_acting_is_what_evaluating_gives(name):
    policy = make_policy(name)
    runs = []
    policy.trunk.register_forward_hook(lambda _, inputs, __: runs.append(len(inputs[0])))
    collect = Collector(Noise(policy.spec), policy, 6, torch.Generator().manual_seed(0))
    for _ in range(2):
        runs.clear()
        unroll = UnrollScaler(torch.device("cpu")).read(collect.collect())
        if policy.shares_features:
            assert runs == [Noise.num_envs] * 7  # one step at a time, and never again
        obs, actions = unroll.obs_T1BX, unroll.actions
        with torch.no_grad():
            if unroll.state_BS is None:
                log_probs, _ = policy.evaluate(obs[:-1], actions)
                values = policy.values(obs)
            else:
                whole = type(unroll.context)(unroll.starts_T1B.T, unroll.state_BS)
                values = policy.values(obs.transpose(0, 1), whole).T
                log_probs = policy.evaluate(
                    obs[:-1].transpose(0, 1), actions.transpose(0, 1), unroll.context
                )[0].T
        torch.testing.assert_close(unroll.log_probs_TB, log_probs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(unroll.values_T1B, values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("network", [FORGETFUL, RECURRENT], ids=["mlp", "lstm"])
def test_a_preempted_unroll_has_the_first_steps_and_the_next_one_goes_on_behind_them(network):
    whole = collector(counters(), 7, network=network)[1].next()
    _, collect = collector(counters(), 7, network=network)
    asked = iter([False, False, True])
    collect.preempted = lambda: next(asked)
    short = collect.next()
    assert short.env_steps == int(whole.valid_TB[:3].sum())
    for name in ("actions", "log_probs_TB", "rewards_TB", "terminated_TB", "truncated_TB", "valid_TB"):
        torch.testing.assert_close(getattr(short, name), getattr(whole, name)[:3])
    torch.testing.assert_close(short.obs_T1BX, whole.obs_T1BX[:4])
    torch.testing.assert_close(short.values_T1B, whole.values_T1B[:4])

    collect.preempted = None
    behind = collect.next()
    assert len(behind.rewards_TB) == 7
    torch.testing.assert_close(behind.obs_T1BX[:5], whole.obs_T1BX[3:])


def test_a_preempted_unroll_has_a_step_that_counts():
    _, collect = collector(counters(), 7)
    collect.preempted = lambda: True
    shapes = [len(collect.next().rewards_TB) for _ in range(4)]
    assert shapes == [1, 1, 1, 1]
    collector_of_one = collector(
        VectorEnv(gym.vector.SyncVectorEnv([lambda: Counter(2, truncates=False)], copy=False), seed=0), 7
    )[1]
    collector_of_one.preempted = lambda: True
    assert [collector_of_one.next().valid_TB.flatten().tolist() for _ in range(3)] == [
        [True],
        [True],
        [False, True],
    ]
