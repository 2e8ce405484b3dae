"""Atari: lives and frames over scripted games, and the emulator's two ways beside each other.

What needs the emulator is skipped without it: ``pip install 'p2pdrl[atari]'``.
"""

from __future__ import annotations

import importlib.util

import gymnasium as gym
import numpy as np
import pytest
import torch

from p2pdrl.config.task import AtariConfig, DQNConfig, EnvConfig, NetworkConfig, PPOConfig, TaskConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.atari import AtariGames
from p2pdrl.rl.envs import VectorEnv, make_scalar_env, make_vector_env
from p2pdrl.rl.evaluate import evaluate
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.registry import build_trainer
from p2pdrl.rl.rollout import Collector
from p2pdrl.rl.rollout_worker import RolloutWorker
from p2pdrl.rl.sources.replay import ReplayFeeder, TransitionScaler, replay_memory
from p2pdrl.rl.sources.unrolls import RewardClipper, UnrollPart, UnrollScaler, joined, pack, unroll_items
from p2pdrl.tensors.shared_policy import ActingPolicy
from p2pdrl.tensors.unroll_ring import UnrollSpec

emulated = pytest.mark.skipif(
    importlib.util.find_spec("ale_py") is None, reason="wants the emulator: pip install 'p2pdrl[atari]'"
)
wrapped = pytest.mark.skipif(
    importlib.util.find_spec("cv2") is None, reason="wants OpenCV: pip install 'p2pdrl[atari]'"
)
PLAIN = AtariConfig(noop_max=0)
SIDE = 36


class TwoLives(gym.Env):
    """A game of two lives, each of three steps, and pays 5 a step; its pictures are numbered from 1.

    Frames are stacked as the emulator does it: empty where a game begins, never where a life does.
    """

    observation_space = gym.spaces.Box(0, 255, (3, SIDE, SIDE), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        self.t, self.frames = 0, np.zeros((3, SIDE, SIDE), np.uint8)
        self.actions = []
        return self._shown(), {"lives": 2}

    def step(self, action):
        self.t += 1
        self.actions.append(int(action))
        lives = 2 if self.t < 3 else 1 if self.t < 7 else 0
        return self._shown(), 5.0, lives == 0, False, {"lives": lives}

    def _shown(self):
        self.frames = np.roll(self.frames, -1, axis=0)
        self.frames[-1] = self.t + 1
        return self.frames.copy()


def scripted(*, episodic_life: bool, first_action: int = 0) -> VectorEnv:
    games = gym.vector.SyncVectorEnv([TwoLives] * 2, copy=False)
    atari = AtariConfig(frame_stack=3, episodic_life=episodic_life)
    return VectorEnv(AtariGames(games, atari, first_action), seed=0)


def numbers(obs_BKHW):
    """The numbers of the first game's pictures."""
    return obs_BKHW[0, :, 0, 0].tolist()


def test_a_lost_life_ends_the_episode_and_the_next_begins_without_its_frames():
    env = scripted(episodic_life=True, first_action=2)
    assert numbers(env.reset()) == [0, 0, 1]
    seen = []
    for _ in range(9):
        obs, rewards, terminated, truncated = env.step(np.ones(2, np.int64))
        over = env.games_over(terminated | truncated)
        seen.append((numbers(obs), rewards[0], bool(terminated[0]), bool(over[0])))
    assert seen == [
        ([0, 1, 2], 5.0, False, False),
        ([1, 2, 3], 5.0, False, False),
        ([2, 3, 4], 5.0, True, False),  # the first life; its true final observation
        ([0, 0, 5], 5.0, False, False),  # the step that belongs to nobody
        ([0, 5, 6], 5.0, False, False),
        ([5, 6, 7], 5.0, False, False),
        ([6, 7, 8], 5.0, True, True),
        ([0, 0, 1], 0.0, False, False),
        ([0, 1, 2], 5.0, False, False),
    ]


def test_where_a_life_begins_the_policy_has_no_say():
    env = scripted(episodic_life=True, first_action=2)
    env.reset()
    for _ in range(6):
        env.step(np.ones(2, np.int64))
    assert env._env.env.envs[0].actions == [1, 1, 1, 2, 1, 1]


def test_without_episodic_life_a_lost_life_is_a_step_like_any_other():
    env = scripted(episodic_life=False)
    env.reset()
    ends = [env.step(np.zeros(2, np.int64))[2][0] for _ in range(8)]
    assert ends == [False] * 6 + [True, False]


def test_a_game_that_was_cut_with_lives_it_had_won_loses_none_by_the_next():
    class Won(TwoLives):
        def step(self, action):
            self.t += 1
            return self._shown(), 5.0, False, self.t == 2, {"lives": 4}

    games = gym.vector.SyncVectorEnv([Won] * 2, copy=False)
    env = VectorEnv(AtariGames(games, AtariConfig(frame_stack=3, episodic_life=True), 0), seed=0)
    env.reset()
    steps = [env.step(np.zeros(2, np.int64)) for _ in range(3)]
    assert [bool(truncated[0]) for *_, truncated in steps] == [False, True, False]
    assert [bool(terminated[0]) for _, _, terminated, _ in steps] == [False, False, False]


def unrolls(env: VectorEnv, steps: int):
    policy = ActorCritic(env.spec, NetworkConfig(kind="impala_resnet", channels=(2,), hidden=(4,)), seed=0)
    return Collector(env, policy, steps, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("episodic_life", [False, True])
def test_returns_are_of_whole_games_and_raw_while_rewards_are_clipped(episodic_life):
    raw = unrolls(scripted(episodic_life=episodic_life), 16).collect()
    # 7 steps of 5 each; the step that begins the second life is no decision, but pays
    assert raw.episodes == [(35.0, 6 if episodic_life else 7)] * 4
    unroll = RewardClipper(UnrollScaler(torch.device("cpu"))).read(raw)
    assert unroll.episodes == raw.episodes
    assert unroll.rewards_TB[unroll.valid_TB].tolist() == [1.0] * int(unroll.valid_TB.sum())
    assert not unroll.rewards_TB[~unroll.valid_TB].any()
    ends = 2 if episodic_life else 1
    assert int(unroll.terminated_TB.sum()) == 2 * 2 * ends


def test_clipping_keeps_signs_and_leaves_the_unroll_alone():
    raw = unrolls(scripted(episodic_life=False), 3).collect()
    raw.rewards_TB[:] = [[-7.0, 0.0], [0.25, 100.0], [0.0, -0.5]]
    clipped = RewardClipper(UnrollScaler(torch.device("cpu"))).read(raw).rewards_TB
    assert clipped.tolist() == [[-1.0, 0.0], [1.0, 1.0], [0.0, -1.0]]
    assert raw.rewards_TB[0, 0] == -7.0


@pytest.mark.parametrize("episodic_life", [False, True])
def test_replay_stores_single_frames_and_gives_back_the_stacks_that_were_seen(episodic_life):
    env = scripted(episodic_life=episodic_life)
    config = DQNConfig(buffer_size=200, learning_starts=1)
    memory = replay_memory(config, env.spec, streams=2)
    assert memory.layout.obs_shape == (SIDE, SIDE)
    assert memory.layout.sampled_shape == env.spec.obs_shape
    feeder = ReplayFeeder(memory, TransitionScaler(torch.device("cpu")), discount=0.9, seed=0)
    collector = unrolls(env, 5)
    after: dict[bytes, set[bytes]] = {}
    for _ in range(6):
        raw = collector.collect()
        feeder.read(raw)
        for t, b in zip(*np.nonzero(raw.valid_TB), strict=True):
            now, then = raw.obs_T1BX[t, b].tobytes(), raw.obs_T1BX[t + 1, b].tobytes()
            after.setdefault(now, set()).add(then)
    drawn = feeder.draw(300, 0.0)
    for obs, following in zip(drawn.obs_BX.numpy(), drawn.next_obs_BX.numpy(), strict=True):
        assert following.tobytes() in after[obs.tobytes()]
    assert {obs.numpy().tobytes() for obs in drawn.obs_BX} == set(after)


# with the emulator


def played(config: EnvConfig, steps: int, seed: int = 0):
    """Every array of so many steps with the same actions."""
    env = make_vector_env(config, seed)
    rng = np.random.default_rng(1)
    rows = [(env.reset().copy(),)]
    for _ in range(steps):
        step = env.step(rng.integers(env.spec.action.n, size=config.num_envs))
        rows.append(tuple(np.array(part) for part in step))
    env.close()
    return rows


def same(one, other) -> bool:
    return all(
        np.array_equal(left, right)
        for row, with_row in zip(one, other, strict=True)
        for left, right in zip(row, with_row, strict=True)
    )


@emulated
@wrapped
@pytest.mark.parametrize(
    ("env_id", "atari"),
    [
        ("BreakoutNoFrameskip-v4", PLAIN),
        ("BreakoutNoFrameskip-v4", AtariConfig(noop_max=0, episodic_life=True, fire_reset=True)),
        ("ALE/MsPacman-v5", AtariConfig(noop_max=0, repeat_action_probability=0.0, full_action_space=True)),
        ("ALE/SpaceInvaders-v5", AtariConfig(noop_max=0, repeat_action_probability=0.0, episodic_life=True)),
        (
            "BreakoutNoFrameskip-v4",
            AtariConfig(noop_max=0, screen_size=60, frame_skip=3, frame_stack=2, episodic_life=True),
        ),
    ],
)
def test_the_emulators_vector_environment_is_gymnasiums_wrappers(env_id, atari):
    """Without random numbers: no no-op starts, no sticky actions. ``mode=0`` is what both play.

    Not compared is the observation at a truncation, where the emulator leaves out the very last frame.
    """
    config = EnvConfig(id=env_id, num_envs=2, atari=atari, max_episode_steps=180)
    threads = played(config, 400)
    wrappers = played(EnvConfig(**{**_fields(config), "kwargs": {"mode": 0}}), 400)
    for rows in (threads, wrappers):
        for row in rows[1:]:
            row[0][row[3]] = 0
    assert same(threads, wrappers)
    assert any((row[2] | row[3]).any() for row in threads[1:])
    assert any(row[1].any() for row in threads[1:])


def _fields(config: EnvConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


@emulated
def test_atari_is_described():
    config = EnvConfig(id="ALE/Pong-v5", num_envs=2)
    spec = make_vector_env(config, 0).spec
    assert (spec.obs_shape, spec.obs_dtype, spec.frame_stack) == ((4, 84, 84), "uint8", 4)
    assert spec.is_image
    assert spec.action.n == 6
    everything = EnvConfig(id="ALE/Pong-v5", num_envs=1, atari=AtariConfig(full_action_space=True))
    assert make_vector_env(everything, 0).spec.action.n == 18


@emulated
def test_a_seed_repeats_a_game_whatever_the_threads():
    config = EnvConfig(id="ALE/Breakout-v5", num_envs=3)
    torch.set_num_threads(1)
    one, other = played(config, 60, seed=3), played(config, 60, seed=4)
    try:
        torch.set_num_threads(2)
        assert same(one, played(config, 60, seed=3))
    finally:
        torch.set_num_threads(1)
    assert not same(one, other)
    first = one[20][0]
    assert not np.array_equal(first[0], first[1])


@emulated
def test_sticky_actions_are_the_ids_unless_given():
    def pictures(env_id, **atari):
        return played(EnvConfig(id=env_id, num_envs=1, atari=AtariConfig(noop_max=0, **atari)), 120)

    without = pictures("PongNoFrameskip-v4")
    assert same(without, pictures("ALE/Pong-v5", repeat_action_probability=0.0))
    assert not same(without, pictures("ALE/Pong-v5"))
    assert same(pictures("ALE/Pong-v5"), pictures("PongNoFrameskip-v4", repeat_action_probability=0.25))


@emulated
def test_rewards_are_raw():
    rewards = [row[1].max() for row in played(EnvConfig(id="ALE/SpaceInvaders-v5", num_envs=2), 120)[1:]]
    assert max(rewards) >= 5


@emulated
def test_a_step_limit_is_in_steps():
    config = EnvConfig(id="ALE/Pong-v5", num_envs=1, max_episode_steps=7)
    rows = played(config, 15)[1:]
    assert [step for step, row in enumerate(rows, 1) if row[3].any()] == [7, 15]
    assert not any(row[2].any() for row in rows)


@emulated
def test_the_emulators_own_observations():
    config = EnvConfig(id="ALE/Pong-v5", atari=AtariConfig(preprocess=False), num_envs=1)
    assert make_vector_env(config, 0).spec.obs_shape == (210, 160, 3)
    memory = EnvConfig(
        id="ALE/Pong-v5", atari=AtariConfig(preprocess=False), num_envs=1, kwargs={"obs_type": "ram"}
    )
    spec = make_vector_env(memory, 0).spec
    assert (spec.obs_shape, spec.obs_dtype) == ((128,), "float32")


@emulated
def test_kinds_of_observation_are_for_unprocessed_games():
    config = EnvConfig(id="ALE/Pong-v5", kwargs={"obs_type": "ram"}, num_envs=1)
    with pytest.raises(ConfigError, match="preprocess"):
        make_vector_env(config, 0)


@emulated
def test_a_game_that_there_is_not_names_the_nearest():
    with pytest.raises(ConfigError, match="ALE/Pong-v5"):
        make_vector_env(EnvConfig(id="ALE/Pongg-v5"), 0)


@emulated
@wrapped
def test_a_single_game_can_be_drawn():
    env = make_scalar_env(EnvConfig(id="ALE/Pong-v5"), render_mode="rgb_array")
    assert env.reset(seed=0)[0].shape == (4, 84, 84)
    assert env.render().shape == (210, 160, 3)
    env.close()


TASK = TaskConfig(
    env=EnvConfig(
        id="BreakoutNoFrameskip-v4",
        num_envs=2,
        normalize_returns=False,
        clip_rewards=True,
        max_episode_steps=40,
        atari=AtariConfig(episodic_life=True, fire_reset=True),
    ),
    network=NetworkConfig(hidden=(16,)),
    algorithm=PPOConfig(unroll_steps=64, epochs=1, minibatches=2),
)


@emulated
def test_ppo_and_evaluation_and_actors_play():
    trainer = build_trainer(TASK, 0, "cpu")
    stats = trainer.step()
    assert stats.episodes
    result = evaluate(trainer.policy, TASK.env, 3, greedy=True, seed=0)
    assert max(result.lengths) <= 40
    worker = RolloutWorker(TASK, 0, 1)
    raw = worker.collect(ActingPolicy(1, 0.0, np.zeros(0), np.zeros(0)))
    assert raw.obs_T1BX.shape == (65, 1, 4, 84, 84)
    worker.close()


@emulated
def test_deep_q_learning_stores_single_frames():
    algorithm = DQNConfig(unroll_steps=32, learning_starts=32, batch_size=4, buffer_size=400)
    task = TaskConfig(env=TASK.env, network=TASK.network, algorithm=algorithm)
    trainer = build_trainer(task, 0, "cpu")
    metrics = [trainer.step().metrics for _ in range(3)][-1]
    assert np.isfinite(metrics["q_loss"])


@emulated
@pytest.mark.parametrize("episodic_life", [False, True])
def test_what_actors_send_has_each_frame_once_and_arrives_as_it_was_seen(episodic_life):
    atari = AtariConfig(episodic_life=episodic_life, fire_reset=True, screen_size=SIDE)
    config = EnvConfig(id="BreakoutNoFrameskip-v4", num_envs=4, atari=atari, max_episode_steps=50)
    env = make_vector_env(config, 3)
    policy = ActorCritic(env.spec, NetworkConfig(kind="nature_cnn", hidden=(8,)), 1)
    collector = Collector(env, policy, 20, torch.Generator().manual_seed(1))
    spec = UnrollSpec(unroll_items(policy, 20), (4,), 1)
    arrays = spec.views(memoryview(bytearray(spec.content_nbytes(4))), 4)
    assert arrays["frames"].shape == (24, 4, SIDE, SIDE)
    resets = 0
    for _ in range(8):
        raw = collector.collect()
        resets += int((~raw.valid_TB).sum())
        pack(raw, arrays)
        found = joined([UnrollPart(arrays, 0, range(4), restarted=False)], 4)
        np.testing.assert_array_equal(found.obs_T1BX, raw.obs_T1BX)
    collector.close()
    assert resets > 5
