"""Unrolls from node to node: each counts once, none that can't be is learned from, actors change learners."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import numpy as np
import pytest

from p2pdrl.config.node import LearnerConfig
from p2pdrl.config.task import EnvConfig, TaskConfig
from p2pdrl.errors import PeerRefusedError
from p2pdrl.node.children.actors import ActorPool
from p2pdrl.node.experience.messages import (
    ROUTE,
    Enlist,
    Enlisted,
    SentUnroll,
    UnrollReceipt,
    acting_together,
    learner_of,
)
from p2pdrl.node.experience.receiver import ExperienceReceiver
from p2pdrl.node.experience.sender import LOOK_S, ExperienceSender, LentActors
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.shared_policy import ActingPolicy, SharedPolicy
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout
from p2pdrl.tensors.unroll_ring import UnrollItem, UnrollSpec
from p2pdrl.transport.protocol import Address
from p2pdrl.workers.protocol import Start

pytestmark = pytest.mark.looptime

SIZE = 10_000
BOARD = BoardSpec(
    Layout((TensorEntry("w", (SIZE,)),)),
    SidecarLayout((SidecarItem("observations.mean", (3,), "float64", "moments"),)),
)
ITEMS = (
    UnrollItem("obs", "float32", (5, -1, 3)),
    UnrollItem("actions", "int64", (4, -1), choices=2),
    UnrollItem("valid", "bool", (4, -1)),
    UnrollItem("episode_returns", "float64", (3, -1)),
)
TASK = TaskConfig(env=EnvConfig(num_envs=4))
START = Start(task=b"", seed=1, device="cpu", threads=1, allow_import=False)


class LearnerNode:
    """A node that learns: what came is read and counted, and a new policy published."""

    def __init__(self, world, number, remote=4, slots=2):
        self.id = f"{number:032x}"
        self.address = Address("10.0.0.1", 7000 + number)
        self.transport = world.network.join(self.id, self.address)
        self.pool = ActorPool(START, LearnerConfig(), world.clock, world.events)
        self.pool.open(UnrollSpec(ITEMS, (4,) * remote, slots, remote), BOARD)
        self.striking = world.striking(2)
        self.receiver = ExperienceReceiver(
            task_hash="task",
            pool=self.pool,
            spec=lambda: BOARD,
            strikes=self.striking,
            named=lambda node: node[-2:],
            events=world.events,
            stale=world.stale.append,
        )
        self.transport.serve(ROUTE, self.receiver.answer, max_vector_bytes=1 << 20)
        self.version = 0
        self.read = []
        self.counted = []
        """Steps of each unroll, where its node counts them; else 0."""

    def close(self):
        self.pool.close()

    def publish(self):
        _, (_, region) = self.pool.collected()
        policy = ActingPolicy(self.version, 0.5, np.zeros(3), np.ones(3))
        SharedPolicy(region, SIZE, (3,)).write(np.full(SIZE, self.version, np.float32), policy)
        for lane in self.pool.lanes:
            lane.grant(1)

    def learn(self):
        """Take one unroll of each lane that has one; return whether there was any."""
        found = [(lane, one) for lane in self.pool.lanes if (one := lane.peek()) is not None]
        for lane, one in found:
            self.read.append((float(one.arrays["obs"][0, 0, 0]), one.policy_version, one.life))
            self.counted.append(one.env_steps if one.counted else 0)
            lane.consume()
        if found:
            self.version += 1
            self.publish()
        return bool(found)


class ActorNode:
    """A node that acts: its processes are coroutines here."""

    def __init__(self, world, number, actors=2, learner=None, counts=None):
        self.id = f"{number:032x}"
        self.address = Address("10.0.0.1", 7000 + number)
        self.transport = world.network.join(self.id, self.address)
        self.works_for = learner
        self.pool = ActorPool(
            msgspec.structs.replace(START, actors=actors), LearnerConfig(), world.clock, world.events
        )
        self.sender = ExperienceSender(
            task=TASK,
            task_hash="task",
            boot=1,
            transport=self.transport,
            learner=lambda: None if self.works_for is None else (self.works_for.id, self.works_for.address),
            actors=actors,
            remote=1,
            ahead=0,
            named=lambda node: node[-2:],
            clock=world.clock,
            events=world.events,
            max_bytes=1 << 20,
            divide=self.divide,
            counts=counts,
        )
        self.nodes = 1
        self.made = 0
        self.seen = []

    def close(self):
        self.pool.close()

    def divide(self):
        self.pool.divide(self.nodes - 1, self.nodes)

    async def run(self):
        board, unrolls = await self.sender.layout()
        assert board == BOARD
        self.pool.open(unrolls, board)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.sender.run(self.pool))
            for lane in self.pool.lanes[:-1]:
                group.create_task(self._act(lane))

    async def _act(self, lane):
        lane.started()
        out = np.zeros(SIZE, np.float32)
        while True:
            await asyncio.sleep(0.01)
            _, (_, region) = self.pool.collected()
            acting = SharedPolicy(region, SIZE, (3,)).read(out)
            if acting is None or not lane.may_begin:
                continue
            assert (out == acting.version).all()
            self.seen.append(acting.version)
            environments = lane.assignment.environments
            arrays = lane.begin(environments)
            self.made += 1
            for array in arrays.values():
                array[:] = 0
            arrays["obs"][:] = 1000 * int(self.id, 16) + self.made
            arrays["valid"][:] = True
            lane.commit(
                policy_version=acting.version,
                episodes=0,
                env_steps=arrays["valid"].size,
                environments=environments,
            )


async def learn(learner, updates):
    """Let it make so many updates."""
    goal = learner.version + updates
    async with asyncio.timeout(120):
        while learner.version < goal:
            await asyncio.sleep(0.02)
            learner.learn()


async def test_each_unroll_arrives_once_and_newer_parameters_come_back(world):
    learner = await world.add(LearnerNode, 1)
    learner.publish()
    node = await world.add(ActorNode, 2, learner=learner)
    world.start(node.run())
    await learn(learner, 50)
    numbers = [number for number, *_ in learner.read]
    assert len(set(numbers)) == len(numbers)
    assert node.seen == sorted(node.seen)
    assert node.seen[-1] >= learner.version - 3
    figures = learner.receiver.figures()
    rows = figures["actors"]
    assert [(row["environments"], row["lost"]) for row in rows] == [(2, 0), (2, 0)]
    assert figures["policies"]["differences"] >= 20
    assert figures["policies"]["whole"] == 0  # the first came when the node enlisted
    assert sum(row["unrolls"] for row in rows) >= len(numbers)
    assert node.sender.works_for == learner.id


async def test_actors_of_more_nodes_have_fewer_environments_each_from_the_next_unroll_on(world):
    learner = await world.add(LearnerNode, 1)
    learner.publish()
    node = await world.add(ActorNode, 2, learner=learner)
    world.start(node.run())
    await learn(learner, 5)
    node.nodes = 2
    await learn(learner, 20)
    rows = learner.receiver.figures()["actors"]
    assert [(row["environments"], row["lost"]) for row in rows] == [(1, 0), (1, 0)]
    numbers = [number for number, *_ in learner.read]
    assert len(set(numbers)) == len(numbers) >= 25
    assert node.sender.env_steps < 4 * 2 * node.sender.sent
    node.nodes = 1
    await learn(learner, 20)
    assert [row["environments"] for row in learner.receiver.figures()["actors"]] == [2, 2]


async def test_a_learner_that_takes_nothing_isnt_flooded(world):
    learner = await world.add(LearnerNode, 1)
    learner.publish()
    node = await world.add(ActorNode, 2, learner=learner)
    world.start(node.run())
    await asyncio.sleep(20)
    assert sum(lane.waiting for lane in learner.pool.lanes) == 2 * 2
    assert node.made == 2 * 3  # and one that waits here
    assert learner.receiver.refused[423] == node.sender.refused > 10
    await learn(learner, 10)


async def test_a_lost_answer_has_the_unroll_sent_again_and_it_counts_once(world):
    learner = await world.add(LearnerNode, 1)
    learner.publish()
    node = await world.add(ActorNode, 2, actors=1, learner=learner)
    world.network.breaks = 0.2
    world.start(node.run())
    await learn(learner, 60)
    numbers = [number for number, *_ in learner.read]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] - numbers[0] == len(numbers) - 1, "none is missing"


async def test_actors_go_to_another_learner_with_the_same_unroll(world):
    first, second = await world.add(LearnerNode, 1), await world.add(LearnerNode, 3)
    for learner in (first, second):
        learner.publish()
    node = await world.add(ActorNode, 2, actors=1, learner=first)
    world.start(node.run())
    await learn(first, 5)
    node.works_for = None  # it died
    await first.transport.close()
    await asyncio.sleep(5)
    node.works_for = second
    await learn(second, 5)
    assert node.sender.works_for == second.id
    ends, begins = first.read[-1][0], second.read[0][0]
    assert begins - ends <= 3
    assert [number for number, *_ in second.read] == list(np.arange(begins, begins + len(second.read)))


async def test_a_learner_with_no_lane_left_says_so_and_is_asked_again(world):
    learner = await world.add(LearnerNode, 1, remote=2)
    learner.publish()
    first, second = [await world.add(ActorNode, number, learner=learner) for number in (2, 3)]
    world.start(first.run())
    await learn(learner, 3)
    world.start(second.run())
    await asyncio.sleep(3)
    assert second.made == 0
    assert any("node.learner.remote_actors" in str(event) for event in world.events.since(0))
    world.tasks[0].cancel()
    learner.receiver.sweep({second.id})
    await learn(learner, 5)
    assert second.made > 0
    lives = {life for number, _, life in learner.read if number > 3000}
    assert lives == {2}, "streams of another actor"


async def test_actors_wait_for_the_first_parameters(world):
    learner = await world.add(LearnerNode, 1)
    node = await world.add(ActorNode, 2, learner=learner)
    world.start(node.run())
    await asyncio.sleep(3)
    assert node.made == 0
    learner.publish()
    await learn(learner, 3)


async def enlisted(world, learner, environments=(2,), boot=7):
    """Someone who speaks the protocol by hand; returns its transport and lanes."""
    stranger = world.network.join("e" * 32, Address("10.0.0.9", 7777))
    await stranger.start()
    answer = await call(stranger, learner, Enlist("task", boot, environments), None)
    return stranger, msgspec.msgpack.decode(answer.meta, type=Enlisted).lanes


async def call(stranger, learner, message, content, policy=None):
    def into(_, nbytes):
        return memoryview(bytearray(nbytes)) if policy is None else policy(nbytes)

    return await stranger.call(
        learner.address,
        learner.id,
        ROUTE,
        msgspec.msgpack.encode(message),
        vector=content,
        into=into,
        deadline_s=5.0,
        lane="bulk",
    )


def unroll_of(environments=2, **changes):
    spec = UnrollSpec(ITEMS, (environments,), 1)
    content = bytearray(spec.content_nbytes(environments))
    arrays = spec.views(memoryview(content), environments)
    arrays["valid"][:] = True
    for name, value in changes.items():
        array = arrays[name]
        (array.view(np.uint8) if name == "valid" else array)[0, 0] = value
    return memoryview(content)


def head(lane, serial=1, **changes):
    facts = {
        "boot": 7,
        "lane": lane,
        "serial": serial,
        "life": 1,
        "policy_version": 0,
        "episodes": 0,
        "environments": 2,
        "held": -1,
    }
    return SentUnroll(**facts | changes)


@pytest.mark.parametrize(
    "changes", [{"obs": np.nan}, {"obs": np.inf}, {"actions": 2}, {"actions": -1}, {"valid": 9}]
)
async def test_numbers_that_cant_be_are_refused_and_struck(world, changes):
    learner = await world.add(LearnerNode, 1)
    learner.publish()
    stranger, (lane,) = await enlisted(world, learner)
    for status in (422, 422, 403):
        with pytest.raises(PeerRefusedError) as refused:
            await call(stranger, learner, head(lane), unroll_of(**changes))
        assert refused.value.status == status
    assert [peer for peer, _ in learner.striking.strikes] == ["e" * 32] * 2
    assert not learner.learn()


@pytest.mark.parametrize(
    ("message", "content", "status"),
    [
        (head(0), unroll_of(1), 422),
        (head(0, environments=4), unroll_of(4), 422),
        (head(0), None, 422),
        (head(1), unroll_of(), 409),
        (head(10**9), unroll_of(), 409),
        (head(0, boot=8), unroll_of(), 409),
        (Enlist("another", 7, (2,)), None, 409),
        (Enlist("task", 7, (5,)), None, 422),
        (Enlist("task", 7, (1,) * 9), None, 503),
    ],
)
async def test_what_doesnt_fit_is_refused(world, message, content, status):
    learner = await world.add(LearnerNode, 1)
    learner.publish()
    stranger, lanes = await enlisted(world, learner)
    assert lanes == (0,)
    with pytest.raises(PeerRefusedError) as refused:
        await call(stranger, learner, message, content)
    assert refused.value.status == status
    assert not learner.learn()
    assert learner.receiver.refused == {status: 1}


@pytest.mark.parametrize("meta", [b"", b"\xc1", msgspec.msgpack.encode({"type": "enlist"})])
async def test_what_is_no_message_is_refused(world, meta):
    learner = await world.add(LearnerNode, 1)
    stranger = world.network.join("e" * 32, Address("10.0.0.9", 7777))
    await stranger.start()
    with pytest.raises(PeerRefusedError) as refused:
        await stranger.call(learner.address, learner.id, ROUTE, meta, deadline_s=5.0)
    assert refused.value.status == 400


async def test_a_gap_between_unrolls_begins_the_streams_anew(world):
    learner = await world.add(LearnerNode, 1)
    learner.publish()
    stranger, (lane,) = await enlisted(world, learner)
    for serial, life in ((1, 1), (2, 1), (4, 1), (5, 2), (5, 2)):
        with contextlib.suppress(PeerRefusedError):
            await call(stranger, learner, head(lane, serial, life=life), unroll_of())
        learner.learn()
    assert [life for *_, life in learner.read] == [1, 1, 2, 3]
    (row,) = learner.receiver.figures()["actors"]
    assert (row["unrolls"], row["lost"], row["repeated"]) == (4, 1, 1)


async def test_how_old_unrolls_are_is_told(world):
    learner = await world.add(LearnerNode, 1)
    learner.version = 7
    learner.publish()
    stranger, (lane,) = await enlisted(world, learner)
    await call(stranger, learner, head(lane, policy_version=4), unroll_of())
    assert world.stale == [3]
    assert learner.receiver.unrolls == 1


async def test_nobody_claims_a_policy_of_the_future(world):
    learner = await world.add(LearnerNode, 1)
    learner.publish()
    stranger, (lane,) = await enlisted(world, learner)
    await call(stranger, learner, head(lane, policy_version=10**12), unroll_of())
    learner.learn()
    assert learner.read[0][1] == 0


async def test_parameters_are_read_once_a_version(world, monkeypatch):
    learner = await world.add(LearnerNode, 1, remote=8)
    learner.publish()
    reads = []
    policy = learner.pool.policy
    real = policy.read
    monkeypatch.setattr(policy, "read", lambda: reads.append(1) or real())
    stranger, lanes = await enlisted(world, learner, (1,) * 8)
    for _ in range(5):
        for lane in lanes:
            serial = learner.receiver.claims[lane].serial + 1
            message = head(lane, serial, environments=1)
            answer = await call(stranger, learner, message, unroll_of(1))
            taken = msgspec.msgpack.decode(answer.meta, type=UnrollReceipt)
            assert taken.policy_version == learner.version
            assert answer.vector_nbytes == policy.nbytes
        learner.learn()
    assert len(reads) == 5


@pytest.mark.parametrize("takes", [False, True], ids=["as older releases", "as this one"])
async def test_the_next_policy_comes_as_a_difference_to_who_takes_it(world, takes):
    learner = await world.add(LearnerNode, 1)
    learner.publish()
    stranger, (lane,) = await enlisted(world, learner)
    came = []
    for version, held in ((1, 0), (2, 0), (3, 0), (4, 0), (5, 4), (6, -1), (6, 6)):
        learner.version = version
        learner.publish()
        sent = head(lane, len(came) + 1, held=held, differences=takes)
        answer = await call(stranger, learner, sent, unroll_of())
        receipt = msgspec.msgpack.decode(answer.meta, type=UnrollReceipt)
        assert receipt.policy_version == version
        came.append((answer.vector_nbytes, receipt.begins))
        learner.learn()
    whole = (learner.pool.policy.nbytes, ())
    # 112 bytes of what goes with it; three scales and 10,000 levels for each policy since
    one, two, three = (112 + 10_012 * number for number in (1, 2, 3))
    differences = [(one, (0,)), (two, (0, 1)), (three, (0, 1, 2)), whole, (one, (4,)), whole, (0, ())]
    assert came == (differences if takes else [*[whole] * 6, (0, ())])


def test_learners_have_as_many_actors_each_as_can_be():
    learners, actors = [f"l{n}" for n in range(3)], [f"a{n}" for n in range(7)]
    whose = [learner_of(me, actors, learners) for me in actors]
    assert sorted(map(whose.count, learners)) == [2, 2, 3]
    assert learner_of("a0", actors, []) is None
    without = [learner_of(me, actors, learners[1:]) for me in actors]
    assert sorted(map(without.count, learners)) == [0, 3, 4]


class RankNode(ActorNode):
    """A later rank of a pipeline; what its learner has last said about its actors is set by hand."""

    def __init__(self, world, number, learner=None):
        self.counts = []
        super().__init__(world, number, learner=learner, counts=self.counts.append)
        self.serves, self.loan, self.lends, self.asked = True, 0, [], 0
        self.lent_actors = LentActors(
            self.sender,
            lend=self.lends.append,
            loan=lambda: self.loan,
            serves=lambda: self.serves,
            first=lambda: None if self.works_for is None else (self.works_for.id, self.works_for.address),
            asked=self._ask,
        )
        self.pool.open(UnrollSpec(ITEMS, (2, 2, 4), 2, 1), BOARD)

    def _ask(self):
        self.asked += 1

    async def run(self):
        async with asyncio.TaskGroup() as group:
            group.create_task(self.lent_actors.run(self.pool))
            for lane in self.pool.lanes[:-1]:
                group.create_task(self._act(lane))

    def counted(self):
        return sum(one.env_steps for one in self.counts)


async def test_a_later_ranks_actors_work_for_the_first_once_its_learner_has_let_go(world):
    first = await world.add(LearnerNode, 1)
    first.publish()
    node = await world.add(RankNode, 2, learner=first)
    world.start(node.run())
    await asyncio.sleep(5)
    assert (node.lends, node.asked, node.lent_actors.away, node.lent_actors.lent) == ([1], 1, True, False)
    assert not first.receiver.claims
    assert node.made == 0, "its learner has let nobody begin"
    node.loan = 1
    await learn(first, 20)
    assert node.lent_actors.working
    assert sum(first.counted) <= node.counted() == 8 * node.sender.sent
    assert min(first.counted) == 8
    assert node.seen[-1] >= first.version - 3


async def test_nobody_sends_while_a_pipeline_is_formed_and_the_actors_stay_lent(world):
    first, second = await world.add(LearnerNode, 1), await world.add(LearnerNode, 3)
    for learner in (first, second):
        learner.publish()
    node = await world.add(RankNode, 2, learner=first)
    node.loan = 1
    world.start(node.run())
    await learn(first, 5)
    node.works_for, node.serves = None, None
    await asyncio.sleep(2 * LOOK_S + 1)
    sent = node.sender.sent
    await asyncio.sleep(5)
    assert (node.sender.sent, node.lent_actors.lent, node.lent_actors.working) == (sent, True, False)
    node.works_for, node.serves = second, True
    await learn(second, 5)
    assert node.lends == [1]
    assert node.counted() == 8 * node.sender.sent
    assert min(second.counted) == 8


async def test_actors_are_given_back_to_a_learner_that_learns_again(world):
    first = await world.add(LearnerNode, 1)
    first.publish()
    node = await world.add(RankNode, 2, learner=first)
    node.loan = 1
    world.start(node.run())
    await learn(first, 5)
    node.serves = False
    await asyncio.sleep(2 * LOOK_S)
    assert node.lends == [1, 0]
    assert (node.lent_actors.away, node.lent_actors.lent) == (False, False)
    writes = node.pool.policy.version
    sent = node.sender.sent
    node.serves = True  # and the learner has yet to hear of it: what it said of the first loan is no answer
    first.learn()
    await asyncio.sleep(5)
    assert (node.sender.sent, node.pool.policy.version) == (sent, writes)
    assert (node.lends, node.lent_actors.lent) == ([1, 0, 2], False)
    node.loan = 2
    await learn(first, 5)
    assert node.sender.sent > sent


async def test_lanes_of_nodes_that_send_elsewhere_are_free(world):
    first = await world.add(LearnerNode, 1, remote=2)
    first.publish()
    node = await world.add(RankNode, 2, learner=first)
    node.loan = 1
    world.start(node.run())
    await learn(first, 3)
    first.receiver.keep({node.id})
    assert len(first.receiver.claims) == 2
    first.receiver.keep(())
    assert not first.receiver.claims
    assert not any(lane.running for lane in first.pool.lanes)
    await learn(first, 3)  # it enlists anew
    assert len(first.receiver.claims) == 2


@pytest.mark.parametrize(
    ("me", "acting", "actors", "learners", "joint", "expected"),
    [
        ("b", "cd", "cd", "a", False, "bcd"),  # one learner, which only learns
        ("a", "bcd", "bcd", "a", False, "abcd"),  # or acts, too
        ("b", "acd", "cd", "a", False, "abcd"),
        ("a", "bc", "", "abc", False, "a"),  # each learns by itself
        ("a", "bc", "", "abc", True, "abc"),  # or shares out updates
        ("a", "bcdef", "cdef", "ab", False, "ace"),  # those that work for it
        ("d", "abcef", "cef", "ab", False, "bdf"),
        ("d", "cef", "cef", "ab", False, "df"),
        ("d", "cef", "cef", "ab", True, "cdef"),
        ("d", "c", "c", "", False, "cd"),
    ],
)
def test_whose_unrolls_make_batches_together(me, acting, actors, learners, joint, expected):
    assert "".join(acting_together(me, acting, actors, learners, joint=joint)) == expected
    if learners and me not in learners:
        assert learner_of(me, actors, learners) in learners
