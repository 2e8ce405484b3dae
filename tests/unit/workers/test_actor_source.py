"""A learner whose environments are with others: to the last bit what it would have learned by itself.

Learner and actors take turns in one process here; only the memory between them is real.
"""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import pytest
import torch

from p2pdrl.config.task import (
    A2CConfig,
    DQNConfig,
    EnvConfig,
    ImpalaConfig,
    NetworkConfig,
    PPOConfig,
    TaskConfig,
)
from p2pdrl.rl.envs import make_vector_env
from p2pdrl.rl.registry import build_trainer
from p2pdrl.rl.rollout import Collector
from p2pdrl.rl.rollout_worker import RolloutWorker
from p2pdrl.rl.sources.unrolls import InlineSource
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.shared_policy import SharedPolicy
from p2pdrl.tensors.unroll_ring import Assignment, UnrollRing, UnrollSpec
from p2pdrl.workers.actor import AssignedWorker, make_unroll
from p2pdrl.workers.actor_source import LATE_S, ActorSource
from p2pdrl.workers.protocol import actor_seed
from tests.unit.rl import toys

SEED = 5
A2C = A2CConfig(unroll_steps=7)
PPO = PPOConfig(unroll_steps=24, epochs=2, minibatches=2)
CARTPOLE = EnvConfig(num_envs=3)
PENDULUM = EnvConfig(
    id="Pendulum-v1", num_envs=3, max_episode_steps=20, normalize_observations=True, normalize_returns=True
)
LSTM = NetworkConfig(hidden=(8,), core="lstm", core_size=4)
GRU = NetworkConfig(hidden=(8,), core="gru", core_size=4)
MLP = NetworkConfig(hidden=(8,))
CARDS = EnvConfig(id="Cards-v0", num_envs=3, normalize_observations=True)
"""Entries of several types, and a mask."""
CHOICES = EnvConfig(id="GuessChoices-v0", num_envs=3)


@pytest.fixture(scope="module", autouse=True)
def ids():
    with toys.registered():
        yield


class Pool:
    """What daemon and actor processes are to a learner."""

    def __init__(self, task, actors=1, ahead=0, remote=0, **options):
        self.now_s = 0.0
        counts = {"actors": actors, "ahead": ahead, "remote": remote}
        maker = partial(ActorSource, **counts, clock=lambda: self.now_s, **options)
        own = task.env.num_envs
        self.trainer = build_trainer(task, SEED, "cpu", source=maker, streams=own * (bool(actors) + remote))
        self.source = self.trainer.source
        spec = self.source.spec
        self.ring = SharedRegion.create(spec.nbytes, "unrolls")
        self.policy = SharedRegion.create(self.source.policy_nbytes, "policy")
        dups = [SharedRegion.attach(os.dup(r.fd), r.nbytes) for r in (self.ring, self.policy)]
        self.source.attach(*dups)
        self.task = task
        self.lanes = UnrollRing(self.ring, spec).lanes
        self.performers = [self.performer(number) for number in range(actors)]

    def performer(self, number, life=0):
        lane = self.lanes[number]
        lane.started()
        lane.running = True
        lane.enter()
        return RolloutWorker(self.task, actor_seed(SEED, number, life), lane.environments)

    def act(self, *numbers):
        """Let actors make an unroll each; return which did."""
        memory = SharedPolicy(self.policy, self.trainer.layout.size, self.performers[0].obs_shape)
        asked = numbers or range(len(self.lanes))
        return [n for n in asked if make_unroll(self.performers[n], self.lanes[n], memory)]

    def step(self):
        stats = self.trainer.step()
        self.trainer.policy_version += 1
        self.trainer.publish()
        return stats

    def close(self):
        self.trainer.close()
        for performer in self.performers:
            performer.close()
        for region in (self.ring, self.policy):
            region.close()


@pytest.fixture
def pools():
    made = []

    def make(*args, **options):
        made.append(Pool(*args, **options))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def inline(task):
    """A learner with its environments in its own process, whose actions have a generator of their own.

    By default actions and shuffles of minibatches come from one generator, which two processes can't share.
    """
    env_seed, action_seed = (int(word) for word in np.random.SeedSequence(SEED).generate_state(2))

    def source(acting):
        env = make_vector_env(task.env, env_seed)
        generator = torch.Generator().manual_seed(action_seed)
        steps = task.algorithm.unroll_steps
        collector = Collector(env, acting.policy, steps, generator, normalizer=acting.normalizer)
        return InlineSource(collector, acting.reader)

    return build_trainer(task, SEED, "cpu", source=source)


def same(stats, other):
    one, two = ((it.env_steps, it.episodes, algorithms(it.metrics)) for it in (stats, other))
    assert one == two


def algorithms(metrics):
    """What the algorithm says, without what only actors have."""
    return {name: value for name, value in metrics.items() if not name.startswith("actor")}


@pytest.mark.parametrize("network", [MLP, LSTM, pytest.param(GRU, marks=pytest.mark.slow)])
@pytest.mark.parametrize("env", [CARTPOLE, PENDULUM, CARDS, CHOICES], ids=lambda env: env.id)
@pytest.mark.parametrize("algorithm", [A2C, PPO])
def test_one_actor_in_lockstep_gives_what_the_learner_would_have_made_itself(pools, algorithm, env, network):
    task = TaskConfig(env=env, network=network, algorithm=algorithm)
    pool, alone = pools(task), inline(task)
    assert not pool.trainer.ready
    pool.trainer.publish()
    for _ in range(8):
        assert pool.act() == [0]
        assert pool.act() == []  # not before there is another policy
        assert pool.trainer.ready
        same(pool.step(), alone.step())
        np.testing.assert_array_equal(pool.trainer.flat, alone.flat)
    for name, array in alone.sidecar().items():
        np.testing.assert_array_equal(pool.trainer.sidecar()[name], array)
    alone.close()


@pytest.mark.parametrize("squash", ["none", "tanh"])
def test_actors_explore_and_squash_as_the_learner_would(pools, squash):
    network = NetworkConfig(
        hidden=(8,),
        squash=squash,
        rescale_actions=True,
        exploration_noise="sde",
        sde_sample_freq=5,
        log_std_init=-1.0,
    )
    task = TaskConfig(env=PENDULUM, network=network, algorithm=PPO)
    pool, alone = pools(task), inline(task)
    pool.trainer.publish()
    for _ in range(4):
        assert pool.act() == [0]
        same(pool.step(), alone.step())
        np.testing.assert_array_equal(pool.trainer.flat, alone.flat)
    alone.close()


def test_a2c_needs_no_other_generator(pools):
    task = TaskConfig(env=PENDULUM, network=MLP, algorithm=A2C)
    pool, alone = pools(task), build_trainer(task, SEED, "cpu")
    pool.trainer.publish()
    for _ in range(5):
        pool.act()
        same(pool.step(), alone.step())
    np.testing.assert_array_equal(pool.trainer.flat, alone.flat)
    alone.close()


def test_several_actors_share_the_environments_and_the_order_of_arrival_doesnt_matter(pools):
    task = TaskConfig(env=PENDULUM, network=LSTM, algorithm=PPO)
    one, other = pools(task, actors=2), pools(task, actors=2)
    assert one.source.spec.shares == (2, 1)
    for pool in (one, other):
        pool.trainer.publish()
    for _ in range(5):
        one.act(0, 1)
        other.act(1)
        assert not other.trainer.ready
        other.act(0)
        stats = one.step()
        same(stats, other.step())
        assert stats.env_steps >= 3 * 24 - 6
    np.testing.assert_array_equal(one.trainer.flat, other.trainer.flat)


def test_actors_play_different_episodes_and_a_successor_others_again():
    seeds = {actor_seed(SEED, number, life) for number in range(8) for life in range(8)}
    assert len(seeds) == 64
    assert actor_seed(SEED, 0, 0) == SEED


def test_an_actor_may_be_ahead_by_what_is_allowed(pools):
    pool = pools(TaskConfig(env=CARTPOLE, network=MLP, algorithm=A2C), ahead=1)
    pool.trainer.publish()
    assert [pool.act(), pool.act(), pool.act()] == [[0], [0], []]
    versions, staleness = [], []
    for _ in range(4):
        versions.append(pool.lanes[0].peek().policy_version)
        staleness.append(pool.step().metrics["actor_staleness"])
        assert pool.act() == [0]
    assert versions == [0, 0, 1, 2]
    assert staleness == [0, 1, 1, 1]


def test_impala_knows_how_old_the_policy_of_an_actor_that_is_ahead_was(pools):
    pool = pools(
        TaskConfig(env=CARTPOLE, network=MLP, algorithm=ImpalaConfig(learning_rate=0.02, unroll_steps=8)),
        ahead=1,
    )
    pool.trainer.publish()
    assert [pool.act(), pool.act()] == [[0], [0]]
    seen = []
    for _ in range(4):
        metrics = pool.step().metrics
        seen.append((metrics["actor_staleness"], metrics["rho"] < 0.9999, metrics["kl"] > 1e-6))
        pool.act()
    assert seen == [(0, False, False), *[(1, True, True)] * 3]


def test_an_actor_that_is_down_is_not_waited_for(pools):
    pool = pools(TaskConfig(env=PENDULUM, network=MLP, algorithm=A2C), actors=3)
    pool.trainer.publish()
    pool.act()
    pool.step()
    pool.act(0, 2)
    pool.lanes[1].begin()  # it was at work, and is killed
    assert not pool.trainer.ready
    pool.lanes[1].running = False
    assert pool.trainer.ready
    assert pool.step().env_steps <= 2 * 7
    pool.performers[1].close()
    pool.performers[1] = pool.performer(1, life=1)
    assert pool.lanes[1].torn == 1
    pool.act(0, 2)
    assert not pool.trainer.ready  # its successor is
    pool.act(1)
    before = pool.trainer.own_moments()["returns"].count
    stats = pool.step()
    assert pool.trainer.own_moments()["returns"].count == before + stats.env_steps
    assert pool.source.left_out == 1


def test_an_actor_that_is_late_is_waited_for_so_long_and_once(pools):
    pool = pools(TaskConfig(env=CARTPOLE, network=MLP, algorithm=A2C), actors=2)
    pool.trainer.publish()
    pool.act()
    pool.step()
    pool.act(0)
    assert not pool.trainer.ready
    pool.now_s += LATE_S - 0.1
    assert not pool.trainer.ready
    pool.now_s += 0.2
    assert pool.trainer.ready
    pool.step()
    pool.act(0)
    assert pool.trainer.ready  # it is known to be late
    pool.step()
    pool.act()  # there it is again
    assert pool.trainer.ready
    pool.step()
    pool.act(0)
    assert not pool.trainer.ready


@pytest.mark.parametrize(
    ("learners", "share", "columns"), [(1, 1.0, 4), (2, 0.5, 2), (3, 0.25, 1), (9, 0.25, 1)]
)
def test_of_a_divided_update_a_learner_has_whole_unrolls_of_fewer_actors(pools, learners, share, columns):
    pool = pools(TaskConfig(env=EnvConfig(num_envs=4), network=MLP, algorithm=A2C), actors=4)
    pool.trainer.share(0, learners)
    pool.trainer.publish()
    assert pool.act() == [0, 1, 2, 3]
    stats = pool.step()
    assert stats.env_steps == A2C.unroll_steps * columns
    assert stats.metrics.get("batch_share", 1.0) == share
    assert sorted(pool.act()) == list(range(columns)), "only whose unroll was used begins another"
    assert pool.source.ready


def test_an_update_that_breaks_off_has_used_nothing_up(pools):
    pool = pools(TaskConfig(env=CARTPOLE, network=MLP, algorithm=A2C))
    pool.trainer.publish()
    pool.act()

    class Broken:
        ends_update = False

        def step(self, *args, **options):
            raise ConnectionError

    own, pool.trainer.stepper = pool.trainer.stepper, Broken()
    with pytest.raises(ConnectionError):
        pool.trainer.step()
    pool.trainer.stepper = own
    assert pool.trainer.ready
    assert pool.step().env_steps > 0
    assert not pool.trainer.ready


def test_a_successor_of_the_learner_goes_on_with_what_lies_there(pools):
    task = TaskConfig(env=CARTPOLE, network=MLP, algorithm=A2C)
    pool = pools(task)
    pool.trainer.publish()
    pool.act()
    heir = build_trainer(task, SEED, "cpu", source=partial(ActorSource, actors=1, ahead=0))
    heir.source.attach(*(SharedRegion.attach(os.dup(r.fd), r.nbytes) for r in (pool.ring, pool.policy)))
    assert heir.ready
    alone = inline(task)
    same(heir.step(), alone.step())
    heir.close()
    alone.close()


class Elsewhere:
    """An actor of another node, with some environments of its own, and what moves its unrolls."""

    def __init__(self, pool, lane, environments, seed):
        self.worker = RolloutWorker(pool.task, seed, environments)
        spec = UnrollSpec(pool.source.spec.items, (environments,), 1)
        self.region = SharedRegion.create(spec.nbytes, "elsewhere")
        self.own = UnrollRing(self.region, spec).lanes[0]
        self.own.started()
        self.memory = SharedPolicy(pool.policy, pool.trainer.layout.size, self.worker.obs_shape)
        self.lane = pool.lanes[lane]
        self.lane.started()
        self.lane.running = True

    def act(self, *, counted=False):
        """Make an unroll and send it, if the learner lets it; return whether it does."""
        self.own.grant(0)
        if not self.lane.may_begin:
            return False
        assert make_unroll(self.worker, self.own, self.memory)
        found = self.own.peek()
        self.lane.fill(found.environments)[:] = found.content
        facts = found._asdict()
        names = ("policy_version", "episodes", "env_steps", "environments")
        self.lane.commit(**{name: facts[name] for name in names}, counted=counted)
        self.own.consume()
        return True

    def close(self):
        self.worker.close()
        self.region.close()


@pytest.fixture
def others():
    made = []

    def make(*args):
        made.append(Elsewhere(*args))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("network", [MLP, LSTM], ids=["mlp", "lstm"])
@pytest.mark.parametrize("env", [CARTPOLE, PENDULUM], ids=lambda env: env.id)
def test_an_actor_of_another_node_gives_what_an_own_one_would(pools, others, env, network):
    task = TaskConfig(env=env, network=network, algorithm=PPO)
    pool, alone = pools(task, actors=0, remote=2), inline(task)
    far = others(pool, 1, 3, actor_seed(SEED, 0, 0))
    pool.trainer.publish()
    for _ in range(4):
        assert not pool.trainer.ready
        assert far.act()
        same(pool.step(), alone.step())
        np.testing.assert_array_equal(pool.trainer.flat, alone.flat)
    alone.close()


def test_a_batch_has_the_oldest_unrolls_that_fit(pools, others):
    task = TaskConfig(env=CARTPOLE, network=MLP, algorithm=ImpalaConfig(unroll_steps=8))
    pool = pools(task, actors=0, remote=3)
    small, smaller, whole = (others(pool, n, size, n) for n, size in enumerate((2, 1, 3)))
    pool.trainer.publish()
    assert whole.act()
    assert pool.trainer.ready  # all that a batch may have, though others have nothing yet
    assert 8 * 3 - 6 <= pool.step().env_steps <= 8 * 3
    assert whole.act()
    assert small.act()
    assert smaller.act()
    pool.step()  # all of one age but for the first: 2 + 1 of the policy before
    assert [lane.waiting for lane in pool.lanes] == [0, 0, 1]
    assert pool.trainer.ready
    pool.step()
    assert [lane.waiting for lane in pool.lanes] == [0, 0, 0]
    assert small.act()
    assert not pool.trainer.ready  # the others are waited for, for a while
    for far in (smaller, whole):
        far.lane.running = False
    assert pool.trainer.ready
    assert pool.step().env_steps <= 8 * 2


def test_lanes_that_nobody_has_come_to_are_not_waited_for(pools, others):
    pool = pools(TaskConfig(env=CARTPOLE, network=MLP, algorithm=A2C), actors=1, remote=2)
    pool.trainer.publish()
    assert not pool.trainer.ready
    pool.act(0)
    assert pool.trainer.ready
    pool.step()
    assert pool.source.left_out == 0


@pytest.mark.parametrize(("least", "unrolls", "slots"), [(1, 2, 2), (0, 1, 1)])
def test_how_far_ahead_actors_of_other_nodes_may_be(pools, others, least, unrolls, slots):
    task = TaskConfig(env=CARTPOLE, network=MLP, algorithm=PPO)
    pool = pools(task, actors=1, remote=1, remote_ahead=least)
    far = others(pool, 1, 3, 1)
    pool.trainer.publish()
    assert [far.act() for _ in range(3)].count(True) == unrolls
    assert [pool.act(0), pool.act(0)] == [[0], []], "this node's own keeps step in any case"
    assert pool.source.spec.slots == slots


def test_what_other_nodes_count_is_told_apart(pools, others):
    task = TaskConfig(env=CARTPOLE, network=MLP, algorithm=ImpalaConfig(unroll_steps=40))
    pool = pools(task, actors=1, remote=2)
    counting, other = others(pool, 1, 3, 1), others(pool, 2, 3, 2)
    pool.trainer.publish()
    seen = []
    for far, counted in ((counting, True), (other, False)):
        assert far.act(counted=counted)
        stats = pool.step()
        seen.append((stats.elsewhere.env_steps, stats.elsewhere.episodes))
        assert stats.episodes
        assert seen[-1] == ((stats.env_steps, len(stats.episodes)) if counted else (0, 0))
    assert pool.act(0)
    assert pool.step().elsewhere == (0, 0)


def test_a_learner_that_has_lent_its_actors_touches_nothing_of_theirs(pools, others):
    task = TaskConfig(env=CARTPOLE, network=MLP, algorithm=ImpalaConfig(unroll_steps=8))
    pool = pools(task, actors=1, remote=1)
    far = others(pool, 1, 3, 1)
    pool.trainer.publish()
    assert pool.act(0)
    assert far.act()
    memory = SharedPolicy(pool.policy, pool.trainer.layout.size, pool.performers[0].obs_shape)
    written = memory.writes
    pool.source.lend(lent=True)
    assert not pool.trainer.ready
    assert not pool.lanes[1].waiting, "what came from others would be stale by the time that it is read"
    pool.trainer.publish()
    assert memory.writes == written
    pool.lanes[0].consume()  # the daemon has sent it
    assert not pool.act(0), "nor does it let them begin"
    pool.source.lend(lent=False)
    pool.trainer.publish()
    assert memory.writes == written + 1
    assert pool.act(0)
    assert far.act()
    assert pool.trainer.ready


def test_a_stream_that_was_interrupted_begins_anew_in_the_replay(pools, others):
    algorithm = DQNConfig(unroll_steps=8, learning_starts=10_000)
    pool = pools(TaskConfig(env=CARTPOLE, network=MLP, algorithm=algorithm), actors=0, remote=1)
    far = others(pool, 0, 3, 1)
    pool.trainer.publish()
    for _ in range(3):
        assert far.act()
        pool.step()
    far.lane.started()  # an unroll between was lost
    assert far.act()
    batch = pool.source.next()
    pool.source.commit()
    drawn = batch.draw(2000)
    moved = (drawn.next_obs_BX[:, 0] - drawn.obs_BX[:, 0] - 0.02 * drawn.obs_BX[:, 1]).abs()
    assert moved.max() < 1e-5  # x' = x + 0.02 v holds within a stream only


def test_an_actor_follows_its_assignment_from_one_unroll_to_the_next(pools):
    pool = pools(TaskConfig(env=EnvConfig(num_envs=4), network=MLP, algorithm=A2C))
    lane, acted = pool.lanes[0], []

    def make(assignment, before):
        worker = RolloutWorker(
            pool.task, SEED + before, assignment.environments, first=assignment.first, total=assignment.total
        )
        acted.append(worker)
        return worker

    pool.performers[0].close()
    assigned = AssignedWorker(make, lane, Assignment(4, 0, 4))
    pool.performers[0] = assigned.follow()
    pool.trainer.publish()
    steps = []
    for assignment in (
        None,
        Assignment(4, 4, 8),
        Assignment(1, 2, 4),
        Assignment(1, 3, 4),
        Assignment(4, 0, 4),
    ):
        if assignment is not None:
            lane.assign(assignment)
        pool.performers[0] = assigned.follow()
        assert pool.act() == [0]
        found = lane.peek()
        assert found.environments == found.arrays["valid"].shape[1]
        assert not found.arrays["episode_returns"].reshape(-1)[found.episodes :].any()
        steps.append((found.environments, found.life))
        assert pool.step().env_steps <= found.environments * A2C.unroll_steps
    assert steps == [(4, 1), (4, 1), (1, 2), (1, 2), (4, 3)], "streams begin anew where environments do"
    assert [worker.environments for worker in acted] == [4, 1, 4]


@pytest.mark.parametrize("remote", [False, True], ids=["own", "of another node"])
def test_the_rate_goes_by_how_long_batches_are_once_actors_have_fewer_environments(pools, remote):
    actors = {"actors": 0, "remote": 2} if remote else {}
    pool = pools(TaskConfig(env=EnvConfig(num_envs=4), network=MLP, algorithm=A2C), **actors)
    lane, found = pool.lanes[0], []
    whole = pool.performer(0)
    few = RolloutWorker(pool.task, SEED, 1, first=2, total=4)
    pool.performers[:] = [whole, few]
    pool.trainer.share(0, 4, 0.5)
    pool.trainer.publish()
    for worker in (whole, few, few):
        if worker is few and not remote:
            lane.assign(Assignment(1, 2, 4))
        memory = SharedPolicy(pool.policy, pool.trainer.layout.size, worker.obs_shape)
        assert make_unroll(worker, lane, memory)
        metrics = pool.step().metrics
        found.append((metrics.get("batch_share", 1.0), metrics["learning_rate"] / A2C.learning_rate))
    assert found == [(1.0, 1.0), (0.25, 2.0), (0.25, 2.0)]
