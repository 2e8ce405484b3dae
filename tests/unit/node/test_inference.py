"""Batches, the newest policy, and the life of the inference process, which is a fake here."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from p2pdrl.api.answers import ApiRefusal
from p2pdrl.clock import ManualClock
from p2pdrl.config.node import InferenceConfig, LearnerConfig, NodeConfig
from p2pdrl.config.task import RegressionConfig, TaskConfig
from p2pdrl.errors import ConfigError, WorkerError
from p2pdrl.node.children.actors import StepPort
from p2pdrl.node.children.restarts import death_of
from p2pdrl.node.inference import Batcher, Inference, NewestPolicy
from p2pdrl.telemetry.metrics import Registry
from p2pdrl.tensors.board import BoardSpec, DaemonBoard, LearnerBoard
from p2pdrl.tensors.inference_slots import InferenceSlots, InferenceSpec, StepItem, StepLanes, StepSpec
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.shared_policy import ActingPolicy, PolicyCopies, SharedPolicy
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout
from p2pdrl.workers.protocol import (
    ActedForActors,
    FrameBuffer,
    Infer,
    InferenceReady,
    Inferred,
    StartInference,
    UseSlots,
    UseSteps,
    decode_to_inference,
)

SPEC = InferenceSpec(
    obs_shape=(2,), obs_dtype="float32", action_shape=(), action_dtype="int64", has_values=True
)
BOARD = BoardSpec(
    Layout((TensorEntry("w", (3,)),)),
    SidecarLayout((SidecarItem("observations.mean", (2,), "float64", "moments"),)),
)


# --- Batcher -------------------------------------------------------------------------------------


def test_a_batch_waits_for_others_from_its_oldest_request_on():
    batcher = Batcher(max_batch=8, wait_s=0.5, max_waiting=100)
    assert batcher.due_in_s(0.0) is None
    batcher.put("a", 2, 10.0)
    assert batcher.due_in_s(10.0) == 0.5
    batcher.put("b", 3, 10.25)
    assert batcher.due_in_s(10.25) == 0.25
    assert batcher.due_in_s(11.0) == 0.0
    assert batcher.take() == ["a", "b"]
    assert (batcher.due_in_s(11.0), batcher.rows, len(batcher)) == (None, 0, 0)


def test_a_full_batch_is_due_at_once_and_keeps_the_order():
    batcher = Batcher(max_batch=4, wait_s=0.5, max_waiting=100)
    for name, rows in (("a", 1), ("b", 2), ("c", 3), ("d", 1)):
        assert batcher.put(name, rows, 0.0)
    assert batcher.due_in_s(0.0) == 0.0
    assert batcher.take() == ["a", "b"]  # c doesn't fit, and d isn't let pass it
    assert batcher.take() == ["c", "d"]


def test_there_is_room_for_so_many_observations_and_for_one_request_of_any_size():
    batcher = Batcher(max_batch=4, wait_s=0.0, max_waiting=5)
    assert batcher.put("a", 3, 0.0)
    assert not batcher.put("b", 3, 0.0)
    assert batcher.put("c", 2, 0.0)
    assert batcher.clear() == ["a", "c"]
    assert Batcher(max_batch=9, wait_s=0.0, max_waiting=5).put("a", 9, 0.0)


def test_who_gives_up_leaves_its_place():
    batcher = Batcher(max_batch=4, wait_s=0.0, max_waiting=5)
    first, second = [1], [1]  # equal, and not the same
    batcher.put(first, 3, 0.0)
    batcher.put(second, 2, 0.0)
    batcher.drop(second)
    batcher.drop(second)
    assert batcher.rows == 3
    assert batcher.take()[0] is first


# --- the newest policy ---------------------------------------------------------------------------


def samples(count, seed):
    return np.random.default_rng(seed).normal(seed, 1 + seed, (count, 2))


def wire(rows):
    moments = Moments.zeros((2,))
    moments.update(rows)
    return {"observations": msgspec.msgpack.encode(moments.to_wire())}


class Training:
    """A board with a learner behind it, and nobody else."""

    def __init__(self, task: TaskConfig | None = None) -> None:
        self.task = TaskConfig() if task is None else task
        region = SharedRegion.create(BOARD.nbytes, "board")
        self.learner, self.board = LearnerBoard(region, BOARD), DaemonBoard(region, BOARD)
        self.spec, self.lineage, self.learns, self.actors = BOARD, "aa" * 8, True, None
        self.learners = SimpleNamespace(moments={})

    ready = property(lambda self: self.board.published_once)
    policy_version = property(lambda self: self.board.policy_version)

    def publish(self, value, version):
        self.learner.publish(np.full(3, value, np.float32), None, version)


@pytest.fixture
def training():
    return Training()


def read(policy):
    vector = np.empty(3, np.float32)
    return SharedPolicy(policy.region, 3, (2,)).read(vector), vector.tolist()


def make_policy(training, clock, others=None):
    tracker = SimpleNamespace(others_moments=lambda: others or {})
    return NewestPolicy(training, tracker, clock)


async def test_the_newest_policy_is_the_boards_with_what_was_exchanged(training):
    clock = ManualClock()
    policy = make_policy(training, clock)
    with pytest.raises(WorkerError, match="no policy yet"):
        await policy.refresh()
    training.publish(1.0, 5)
    training.board.post_delta(np.array([0.5, 0, 0], np.float32), 9)
    await policy.refresh()
    acting, vector = read(policy)
    assert (acting.version, vector) == (9, [1.5, 1.0, 1.0])
    assert (acting.mean_X.tolist(), acting.scale_X.tolist()) == ([0, 0], [1, 1])
    training.publish(2.0, 10)
    await policy.refresh()  # too soon
    assert read(policy)[0].version == 9
    clock.advance(1.0)
    await policy.refresh()
    assert read(policy)[0].version == 10
    await policy.close()


async def test_observations_are_normalised_by_everybodys_moments(training):
    own, others = samples(40, 1), samples(60, 2)
    training.learners.moments = wire(own)
    training.publish(1.0, 5)
    policy = make_policy(training, ManualClock(), wire(others))
    await policy.refresh()
    acting, _ = read(policy)
    seen = np.concatenate([own, others])
    np.testing.assert_allclose(acting.mean_X, seen.mean(0), rtol=1e-12)
    np.testing.assert_allclose(acting.scale_X, 1 / np.sqrt(seen.var(0) + 1e-8), rtol=1e-12)
    await policy.close()


# --- the process ---------------------------------------------------------------------------------


class FakeLink:
    """A process whose action is its first number, and whose value is the second."""

    def __init__(self, team: Team, region: SharedRegion) -> None:
        self.pid = 100 + len(team.links)
        self.batches: list[Infer] = []
        self.killed = False
        self._team, self.region = team, region
        self._frames = FrameBuffer()
        self._heard: asyncio.Queue[object] = asyncio.Queue()
        self._slots: InferenceSlots | None = None
        self.lanes: StepLanes | None = None
        team.links.append(self)

    async def ready(self):
        if self._team.error is not None:
            raise self._team.error
        return InferenceReady(SPEC, "cpu", self._team.refusal, self._team.steps)

    async def send(self, data, things=()):
        for body in self._frames.feed(data):
            message = decode_to_inference(body)
            if isinstance(message, UseSlots):
                self._slots = InferenceSlots(things[0], SPEC, message.rows, message.slots)
            elif isinstance(message, UseSteps):
                self.lanes = StepLanes(things[0], STEPS)
            else:
                self.batches.append(message)
                if self._team.answers:
                    self.answer(message)

    def answer(self, message):
        slot = self._slots[message.slot]
        slot.actions_NA[: message.rows] = slot.obs_NX[: message.rows, 0]
        slot.values_N[: message.rows] = slot.obs_NX[: message.rows, 1]
        slot.log_probs_N[: message.rows] = -1.0
        self._heard.put_nowait(Inferred(message.slot, 77))

    def die(self):
        self.say(None)

    def say(self, message):
        self._heard.put_nowait(message)

    async def hear(self):
        found = await self._heard.get()
        if found is None:
            raise WorkerError("the inference process is gone")
        return [found]

    async def ended(self, stood_still=None):
        return death_of(-9, stood_still=stood_still)

    async def kill(self):
        self.killed = True


class Team:
    """An `Inference` and all processes that it started."""

    def __init__(self, training, events, clock=None, **config):
        self.links: list[FakeLink] = []
        self.starts: list[tuple[StartInference, StepPort | None]] = []
        self.error: Exception | None = None
        self.answers = True
        self.registry = Registry("1")
        self.clock = clock or ManualClock()
        self.refusal = ""
        self.steps: StepSpec | None = None
        options = {"batch_wait_s": 0.0, "max_batch": 8, "max_waiting": 8} | config
        self.inference = Inference(
            NodeConfig(
                inference=InferenceConfig(**options),
                learner=LearnerConfig(restart_min_s=0.01, give_up_after=3),
            ),
            training,
            SimpleNamespace(others_moments=dict),
            seed=1,
            clock=self.clock,
            events=events,
            registry=self.registry,
            spawn=self._spawn,
        )

    async def _spawn(self, start, region, steps):
        self.starts.append((start, steps))
        return FakeLink(self, region)

    def count(self, outcome):
        return self.registry.value("act_requests_total", outcome=outcome)


@pytest.fixture
async def make(training, events):
    training.publish(1.0, 5)
    jobs = []

    def made(**config):
        team = Team(training, events, **config)
        jobs.append(asyncio.create_task(team.inference.run()))
        return team

    yield made
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)


def rows(*first):
    return np.array([[number, number / 2] for number in first], np.float32)


async def settled():
    """Let everything that is ready run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_requests_share_a_batch_and_each_gets_its_own_answers(make):
    team = make()
    asked = [
        asyncio.create_task(team.inference.act(rows(1, 2), greedy=False)),
        asyncio.create_task(team.inference.act(rows(3), greedy=True)),
        asyncio.create_task(team.inference.act(rows(4, 5), greedy=False)),
    ]
    found = await asyncio.gather(*asked)
    assert [one.actions_NA.tolist() for one in found] == [[1, 2], [3], [4, 5]]
    assert [one.values_N.tolist() for one in found] == [[0.5, 1.0], [1.5], [2.0, 2.5]]
    assert {one.policy_version for one in found} == {77}
    assert [(batch.rows, batch.greedy) for batch in team.links[0].batches] == [(5, 1)]
    assert (team.count("ok"), team.registry.value("act_observations_total")) == (3, 5)
    assert team.registry.value("act_batch_observations_sum") == 5
    assert len(team.links) == 1


async def test_the_process_is_started_by_the_first_request_and_tells_what_it_takes(make):
    team = make()
    await settled()
    assert team.links == []
    assert await team.inference.spec() == SPEC
    assert team.inference.figures() == {"pid": 100, "device": "cpu", "starts": 1, "waiting": 0}


async def test_two_batches_are_under_way_at_most_and_more_than_the_queue_holds_are_refused(make):
    team = make(max_batch=2, max_waiting=2)
    team.answers = False
    await team.inference.spec()
    asked = []
    for number in (1, 2, 3):
        asked.append(asyncio.create_task(team.inference.act(rows(number, number), greedy=True)))
        await settled()
    assert len(team.links[0].batches) == 2
    with pytest.raises(ApiRefusal, match="wait already") as caught:
        await team.inference.act(rows(4), greedy=True)
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (503, "1")
    assert team.count("busy") == 1
    team.answers = True
    for batch in list(team.links[0].batches):
        team.links[0].answer(batch)
    assert [one.actions_NA.tolist() for one in await asyncio.gather(*asked)] == [[1, 1], [2, 2], [3, 3]]


async def test_a_death_is_told_refuses_who_waits_and_the_next_request_starts_another(make, events):
    team = make()
    await team.inference.act(rows(1), greedy=True)
    team.answers = False
    asked = asyncio.create_task(team.inference.act(rows(2), greedy=True))
    await settled()
    team.links[0].die()
    with pytest.raises(ApiRefusal, match="signal 9") as caught:
        await asked
    assert caught.value.status == 503
    assert [event["kind"] for event in events.since(0)] == ["inference-failed"]
    assert team.registry.value("inference_failures_total") == 1
    team.answers = True
    assert (await team.inference.act(rows(3), greedy=True)).actions_NA.tolist() == [3]
    assert len(team.links) == 2
    assert team.links[0].killed


async def test_one_that_dies_before_it_answers_isnt_started_at_every_request(make):
    team = make()
    team.error = WorkerError("the inference process is gone")
    for _ in range(3):
        with pytest.raises(ApiRefusal):
            await team.inference.act(rows(1), greedy=True)
    assert len(team.links) == 1
    team.error = None
    team.clock.advance(1.5)
    assert (await team.inference.act(rows(3), greedy=True)).actions_NA.tolist() == [3]


async def test_a_policy_that_cant_be_asked_is_said_so_for_good(make):
    team = make()
    team.error = ConfigError("the policy has a memory")
    for _ in range(2):
        with pytest.raises(ApiRefusal, match="has a memory") as caught:
            await team.inference.spec()
        assert caught.value.status == 409
    assert len(team.links) == 1


async def test_nobody_waits_beyond_the_deadline(make):
    team = make(deadline_s=0.05)
    team.answers = False
    with pytest.raises(ApiRefusal, match="deadline_s") as caught:
        await team.inference.act(rows(1), greedy=True)
    assert (caught.value.status, team.count("late")) == (503, 1)


async def test_without_a_policy_nothing_is_started(events):
    team = Team(Training(), events)
    with pytest.raises(ApiRefusal, match="no policy yet") as caught:
        await team.inference.spec()
    assert (caught.value.status, team.links) == (503, [])
    regression = Team(Training(TaskConfig(algorithm=RegressionConfig())), events)
    with pytest.raises(ApiRefusal, match="regression") as caught:
        await regression.inference.act(rows(1), greedy=True)
    assert caught.value.status == 409


async def test_a_node_that_only_acts_answers_with_what_its_actors_act_with(training):
    region = SharedRegion.create(SharedPolicy.nbytes_of(3, (2,)), "actors")
    training.learns, training.actors = False, SimpleNamespace(policy=PolicyCopies(region, 3, 2))
    policy = make_policy(training, ManualClock())
    with pytest.raises(WorkerError, match="no policy yet"):
        await policy.refresh()
    given = ActingPolicy(12, 0.5, np.array([1.0, 2.0]), np.array([3.0, 4.0]))
    SharedPolicy(region, 3, (2,)).write(np.full(3, 2.5, np.float32), given)
    await policy.refresh()
    acting, vector = read(policy)
    assert (acting.version, vector) == (12, [2.5] * 3)
    assert (acting.mean_X.tolist(), acting.scale_X.tolist()) == ([1, 2], [3, 4])
    await policy.close()


async def test_one_that_is_stuck_is_killed(make, events, until):
    team = make(deadline_s=0.3)
    team.answers = False
    with pytest.raises(ApiRefusal, match="deadline_s"):
        await team.inference.act(rows(1), greedy=True)
    team.clock.advance(1.0)
    await until(lambda: events.since(0))
    assert "killed because it took over 0.3 s for a batch" in events.since(0)[0]["text"]
    assert team.links[0].killed


async def test_it_ends_when_nobody_asks_and_begins_again(make, until):
    team = make(idle_s=0.05)
    await team.inference.act(rows(1), greedy=True)
    team.clock.advance(1.0)
    await until(lambda: team.links[0].killed)
    assert (await team.inference.act(rows(2), greedy=True)).actions_NA.tolist() == [2]
    assert len(team.links) == 2
    assert team.registry.value("inference_failures_total") == 0


# --- for the node's actors -----------------------------------------------------------------------

STEPS = StepSpec(
    asked=(StepItem("obs", "float32", (2,)),),
    answered=(StepItem("actions", "int64", ()),),
    shares=(1, 2),
)


@pytest.fixture
def pool(training):
    """What an `ActorPool` shows of actors that ask, with a policy that the learner has written for them."""
    region = SharedRegion.create(SharedPolicy.nbytes_of(3, (2,)), "policy")
    shared = SharedPolicy(region, 3, (2,))
    shared.write(np.full(3, 2.5, np.float32), ActingPolicy(12, 0.5, np.zeros(2), np.ones(2)))
    steps = StepPort(STEPS.shares)
    made = SimpleNamespace(batched=True, steps=steps, policy=PolicyCopies(region, 3, 2), policy_region=region)
    training.actors = made
    yield made
    steps.close()


async def test_for_actors_it_runs_unasked_with_their_policy_and_callers_ask_it_too(pool, make, until):
    team = make(idle_s=0.05)
    await until(lambda: team.links)
    (start, steps), link = team.starts[0], team.links[0]
    assert (start.shares, steps) == (STEPS.shares, pool.steps)
    assert len(start.bells) == 3
    assert link.region is pool.policy_region
    assert (await team.inference.act(rows(4), greedy=True)).actions_NA.tolist() == [4]
    team.clock.advance(1000.0)
    await asyncio.sleep(0.1)
    assert not link.killed  # nobody asks, and it stays


async def test_what_it_did_for_actors_is_measured(pool, make, until):
    team = make()
    await until(lambda: team.links)
    team.links[0].say(ActedForActors([3, 1], [0.004, 0.0001]))
    await until(lambda: team.registry.value("actor_batch_environments_count") == 2)
    assert team.registry.value("actor_batch_environments_sum") == 4
    assert team.registry.value("actor_batch_seconds_bucket", le="0.002") == 1


async def test_actors_have_another_process_soon_after_one_died(pool, make, until, events):
    team = make()
    await until(lambda: team.links)
    await settled()
    team.links[0].die()
    await until(lambda: len(team.links) == 2)
    assert "actors wait, and another takes its place" in events.since(0)[0]["text"]
    assert team.registry.value("inference_failures_total") == 1
    team.clock.advance(1.0)
    assert (await team.inference.act(rows(3), greedy=True)).actions_NA.tolist() == [3]


async def test_one_that_leaves_an_actor_without_an_answer_is_killed(pool, make, until, events):
    team = make(deadline_s=0.2)
    team.steps = STEPS
    await until(lambda: team.links and team.links[0].lanes)
    spec, region = await pool.steps.opened()
    assert spec == STEPS
    StepLanes(region, STEPS).lanes[1].ask()
    await asyncio.sleep(0.1)  # it is seen
    team.clock.advance(1.0)
    await until(lambda: events.since(0))
    assert "killed because it took over 0.2 s for a batch" in events.since(0)[0]["text"]


async def test_callers_are_told_that_a_policy_remembers_and_actors_go_on(pool, make, until):
    team = make()
    team.refusal = "the policy has a memory"
    await until(lambda: team.links)
    await settled()
    with pytest.raises(ApiRefusal, match="has a memory") as caught:
        await team.inference.act(rows(1), greedy=True)
    assert caught.value.status == 409
    assert not team.links[0].killed


async def test_a_policy_that_cant_act_for_actors_ends_the_node(pool, training, events):
    training.publish(1.0, 5)
    team = Team(training, events)
    team.error = ConfigError("no such device")
    with pytest.raises(ConfigError, match="no such device"):
        await team.inference.run()
