"""Samples from shards on other nodes: whoever dies costs its rows only, and nobody believes anything."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from p2pdrl.config.task import DQNConfig, EnvConfig, TaskConfig
from p2pdrl.errors import PeerRefusedError
from p2pdrl.node.children.draws import DrawPort
from p2pdrl.node.experience.messages import (
    REPLAY_ROUTE,
    ROUTE,
    AskRows,
    FetchPolicy,
    RowsDrawn,
    SetPriorities,
    UnrollReceipt,
)
from p2pdrl.node.experience.policy import PolicyFollower
from p2pdrl.node.experience.sampler import ReplaySampler
from p2pdrl.node.experience.shard import ReplayServer
from p2pdrl.replay.memory import ReplayLayout, ReplayMemory
from p2pdrl.replay.shards import ERRORS, PRIORITIES, pack_sample, sample_items
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.shared_policy import ActingPolicy, PolicyCopies, SharedPolicy
from p2pdrl.tensors.sidecar import SidecarLayout
from p2pdrl.tensors.unroll_ring import UnrollRing, UnrollSpec
from p2pdrl.transport.protocol import Address
from p2pdrl.workers.protocol import DrawnRows, DrawRows, Hello, Prioritize

pytestmark = pytest.mark.looptime

SIZE = 10_000
BOARD = BoardSpec(Layout((TensorEntry("w", (SIZE,)),)), SidecarLayout(()))
TASK = TaskConfig(
    env=EnvConfig(num_envs=2),
    algorithm=DQNConfig(
        unroll_steps=4, gradient_steps=2, batch_size=8, learning_starts=10, buffer_size=400, prioritized=True
    ),
)
LAYOUT = ReplayLayout((1,), "float32", (), "int64", streams=2, capacity=400, alpha=0.6)
SPEC = UnrollSpec(sample_items(LAYOUT, 1, 2), (16,), 4)


class ShardNode:
    """A node with a shard, whose process is this object: it draws from a memory of its own."""

    def __init__(self, world, number, spoil=lambda arrays: None):
        self.id = f"{number:032x}"
        self.address = Address("10.0.0.1", 7000 + number)
        self.transport = world.network.join(self.id, self.address)
        self.memory = ReplayMemory(LAYOUT)
        self.rng = np.random.default_rng(number)
        self.spoil = spoil
        self.hangs = False
        self.port = DrawPort(lambda: self)
        self.port.open(SPEC, self.memory.places)
        self.striking = world.striking(3)
        self.server = ReplayServer(task_hash="task", boot=7, port=self.port, strikes=self.striking)
        self.transport.serve(REPLAY_ROUTE, self.server.answer, max_vector_bytes=1 << 20)
        self.first = 1000.0 * number
        self.errors = []

    def append(self, steps=4):
        numbers = self.first + np.arange(steps + 1)
        obs = np.stack((numbers, numbers + 500), 1)[..., None].astype(np.float32)
        self.first += steps
        no = np.zeros((steps, 2), bool)
        self.memory.append(
            obs,
            np.zeros((steps, 2), np.int64),
            np.ones((steps, 2)),
            terminated_TB=no,
            truncated_TB=no,
            valid_TB=~no,
        )

    def answer(self, message):
        """What the process is sent."""
        memory = self.memory
        if isinstance(message, Prioritize):
            arrays = PRIORITIES.views(memoryview(message.content), message.rows)
            self.errors += arrays["errors"].tolist()
            memory.update_priorities(arrays["indices"], arrays["serials"], arrays["errors"])
            return
        assert isinstance(message, DrawRows)
        if self.hangs:
            return
        mass, rows = memory.mass, 0
        if message.rows and memory.count:
            rows = message.rows
            arrays = SPEC.views(self.port.content(message.slot, rows), rows)
            pack_sample(memory.sample(rows, self.rng, discount=0.9), mass, arrays)
            self.spoil(arrays)
        drawn = DrawnRows(
            message.number,
            rows=rows,
            mass=mass,
            count=memory.count,
            appended=memory.appended,
            full=memory.full,
        )
        asyncio.get_running_loop().call_later(0.001, self.port.heard, drawn)

    def close(self):
        pass


class LearnerNode:
    """A node whose learner is this object: it takes samples, and says that each row's error is its number."""

    def __init__(self, world, number):
        self.id = f"{number:032x}"
        self.address = Address("10.0.0.1", 7000 + number)
        self.transport = world.network.join(self.id, self.address)
        self.where = {}
        self.striking = world.striking(3)
        self.sampler = ReplaySampler(
            task=TASK,
            task_hash="task",
            transport=self.transport,
            shards=lambda: self.where,
            learners=lambda: 1,
            strikes=self.striking,
            named=lambda node: node[-2:],
            clock=world.clock,
            events=world.events,
            rng=np.random.default_rng(0),
        )
        self.sampler.open(
            Hello("cpu", b"", samples=msgspec.msgpack.encode(SPEC.to_wire())),
            BOARD,
        )
        _, (samples, errors, self.policy) = self.sampler.told()
        (self.samples,) = UnrollRing(samples, SPEC).lanes
        (self.back,) = UnrollRing(errors, UnrollSpec(ERRORS, SPEC.shares, SPEC.slots)).lanes
        self.transport.serve(ROUTE, self.sampler.answer, max_vector_bytes=1 << 20)
        self.numbers = []
        self.chances = []

    def learn(self):
        found = self.samples.peek()
        if found is None:
            return False
        numbers = found.arrays["obs"][:, 0].copy()
        self.numbers += numbers.tolist()
        self.chances += found.arrays["chances"].tolist()
        content = self.back.fill(len(numbers))
        np.frombuffer(content, np.float32, len(numbers))[:] = numbers
        self.back.commit(policy_version=found.serial, episodes=0, env_steps=0, environments=len(numbers))
        self.samples.consume()
        return True

    def close(self):
        self.sampler.close()


async def learn(learner, shards, updates, *, each=4):
    """Let the learner take so many samples, while rows come to the shards."""
    taken = 0
    async with asyncio.timeout(60):
        while taken < updates:
            for shard in shards:
                shard.append(each)
            await asyncio.sleep(0.05)
            while learner.learn():
                taken += 1
    await asyncio.sleep(0.1)


async def start(world, *numbers):
    learner = await world.add(LearnerNode, 1)
    shards = [await world.add(ShardNode, number) for number in numbers]
    learner.where = {shard.id: shard.address for shard in shards}
    world.start(learner.sampler.run())
    return learner, shards


def came_from(numbers):
    return {int(number // 1000) for number in numbers}


async def test_a_sample_is_of_all_shards_and_errors_go_back_to_their_rows(world):
    learner, shards = await start(world, 2, 3)
    await learn(learner, shards, 30)
    assert came_from(learner.numbers) == {2, 3}
    assert sum(row["share"] for row in learner.sampler.figures()["shards"]) == pytest.approx(1.0)
    for number, shard in zip((2, 3), shards, strict=True):
        assert len(shard.errors) > 100
        assert came_from(shard.errors) == {number}
        memory = shard.memory
        found = memory.sample(4000, np.random.default_rng(0), discount=0.9)
        masses = dict(zip(found.obs_NX[:, 0].tolist(), found.masses_N.tolist(), strict=True))
        told = set(shard.errors) & masses.keys()
        assert len(told) > 30
        for observed in told:  # each row's error was the number that it observes
            assert masses[observed] == pytest.approx((observed + 1e-6) ** 0.6, rel=1e-5)


async def test_the_learner_learns_as_much_for_each_step_as_with_a_memory_of_its_own(world):
    learner, shards = await start(world, 2, 3)
    for shard in shards:
        shard.append(20)
    await asyncio.sleep(2)
    assert learner.sampler.samples == 0  # nothing has come since there is enough
    before = sum(shard.memory.appended for shard in shards)
    taken = 0
    for _ in range(50):
        for shard in shards:
            shard.append(4)
        await asyncio.sleep(0.5)
        while learner.learn():
            taken += 1
            await asyncio.sleep(0.01)
    rows = sum(shard.memory.appended for shard in shards) - before
    assert taken == pytest.approx(rows / 8, abs=4)  # an unroll of 2 × 4 steps, two gradients, one sample
    learner.where = {}
    await asyncio.sleep(2)
    assert learner.sampler.figures()["rows"] == 0


async def test_a_shard_that_dies_costs_its_rows_only(world):
    learner, shards = await start(world, 2, 3)
    await learn(learner, shards, 10)
    await shards[1].transport.close()
    world.nodes.remove(shards[1])
    learner.numbers.clear()
    while learner.learn():  # drawn before
        pass
    learner.numbers.clear()
    began = world.clock.monotonic()
    await learn(learner, shards[:1], 12)
    assert world.clock.monotonic() - began < 5.0
    assert came_from(learner.numbers[-64:]) == {2}
    assert [event for event in world.events.since(0) if event["kind"] == "replay-shard-lost"]
    again = await world.add(ShardNode, 4)
    learner.where = {shards[0].id: shards[0].address, again.id: again.address}
    again.append(40)
    rows = again.memory.sample(99, again.rng, discount=0.9)
    again.memory.update_priorities(rows.indices_N, rows.serials_N, rows.obs_NX[:, 0])  # as the others'
    await learn(learner, [shards[0], again], 10)
    assert 4 in came_from(learner.numbers)


async def test_a_shard_whose_process_hangs_is_left_out_until_it_answers(world):
    learner, shards = await start(world, 2, 3)
    await learn(learner, shards, 6)
    shards[1].hangs = True
    await asyncio.sleep(8)
    while learner.learn():
        pass
    learner.numbers.clear()
    await learn(learner, shards, 8)
    assert came_from(learner.numbers) == {2}
    shards[1].hangs = False
    shards[1].port.died()  # another process takes its place: all slots are free again
    await asyncio.sleep(5)
    await learn(learner, shards, 8)
    assert came_from(learner.numbers) == {2, 3}
    assert shards[1].server.refused[503] > 0


def not_finite(arrays):
    arrays["returns"][0] = np.nan


def too_likely(arrays):
    arrays["chances"][:] = 7.0


def never(arrays):
    arrays["chances"][0] = 0.0


def no_action(arrays):
    arrays["actions"][0] = 2


def grows(arrays):
    arrays["discounts"][0] = 1.5


@pytest.mark.parametrize("spoil", [not_finite, too_likely, never, no_action, grows])
async def test_rows_that_cant_be_are_struck_and_never_learned_from(world, spoil):
    learner = await world.add(LearnerNode, 1)
    good = await world.add(ShardNode, 2)
    bad = await world.add(ShardNode, 3, spoil=spoil)
    learner.where = {shard.id: shard.address for shard in (good, bad)}
    world.start(learner.sampler.run())
    await learn(learner, [good, bad], 10)
    assert came_from(learner.numbers) == {2}
    assert {peer for peer, _ in learner.striking.strikes} == {bad.id}
    assert np.isfinite(learner.chances).all()


async def call(world, shard, message, vector=None):
    sender = await world.add(LearnerNode, 9)
    return await sender.transport.call(
        shard.address,
        shard.id,
        REPLAY_ROUTE,
        message if isinstance(message, bytes) else msgspec.msgpack.encode(message),
        vector=vector,
        into=lambda meta, nbytes: memoryview(bytearray(nbytes)),
        deadline_s=10.0,
        lane="bulk",
    )


def priorities(rows=2, **changes):
    content = bytearray(PRIORITIES.content_nbytes(rows))
    arrays = PRIORITIES.views(memoryview(content), rows)
    arrays["errors"][:] = 3.0
    for name, value in changes.items():
        arrays[name][0] = value
    return memoryview(content)


@pytest.mark.parametrize(
    ("message", "content", "status"),
    [
        (b"\x00", None, 400),
        (AskRows("other", 1), None, 409),
        (AskRows("task", 17), None, 422),
        (SetPriorities("task", 7, 12), priorities(2), 422),
        (SetPriorities("task", 7, 1000), priorities(2), 422),
        (SetPriorities("task", 7, 2), priorities(errors=np.inf), 422),
        (SetPriorities("task", 7, 2), priorities(indices=-1), 422),
        (SetPriorities("task", 7, 2), priorities(indices=10**9), 422),
        (SetPriorities("task", 7, 2), priorities(serials=-5), 422),
    ],
)
async def test_what_a_learner_cant_ask_for_is_refused(world, message, content, status):
    shard = await world.add(ShardNode, 2)
    shard.append(20)
    with pytest.raises(PeerRefusedError) as refused:
        await call(world, shard, message, content)
    assert refused.value.status == status
    assert shard.errors == []


async def test_priorities_of_an_earlier_boot_are_passed_over(world):
    shard = await world.add(ShardNode, 2)
    shard.append(20)
    await call(world, shard, SetPriorities("task", 6, 2), priorities())
    assert shard.errors == []


async def test_who_asks_for_more_than_there_are_slots_is_refused_at_once(world):
    shard = await world.add(ShardNode, 2)
    shard.append(20)
    shard.hangs = True
    calls = [asyncio.ensure_future(call(world, shard, AskRows("task", 4))) for _ in range(4)]
    await asyncio.sleep(0.5)
    with pytest.raises(PeerRefusedError) as refused:
        await call(world, shard, AskRows("task", 4))
    assert refused.value.status == 423
    await asyncio.sleep(5)
    assert [type(one.exception()) for one in calls] == [PeerRefusedError] * 4
    shard.hangs = False
    with pytest.raises(PeerRefusedError):  # a process that may still write to them keeps them
        await call(world, shard, AskRows("task", 4))
    shard.port.died()
    answer = await call(world, shard, AskRows("task", 4))
    assert msgspec.msgpack.decode(answer.meta, type=RowsDrawn).rows == 4


async def test_a_shards_node_follows_the_learners_policy(world):
    learner = await world.add(LearnerNode, 1)
    shard = await world.add(ShardNode, 2)
    region = SharedRegion.create(PolicyCopies.nbytes_of(SIZE, 0), "policy")
    copies = PolicyCopies(region, SIZE, 0)
    follower = PolicyFollower(
        task_hash="task",
        transport=shard.transport,
        learner=lambda: (learner.id, learner.address),
        copies=lambda: copies,
        named=str,
        clock=world.clock,
        events=world.events,
        max_bytes=1 << 20,
    )
    world.start(follower.run())
    await asyncio.sleep(1)
    assert (follower.version, copies.version) == (-1, None)
    theirs = SharedPolicy(learner.policy, SIZE, (0,))
    for version in (1, 5):
        theirs.write(np.full(SIZE, version, np.float32), ActingPolicy(version, 0.1, np.zeros(0), np.ones(0)))
        await asyncio.sleep(1)
        assert (follower.version, copies.version) == (version, version)
    assert learner.sampler.policy.reads == 2
    # who was given something else meanwhile, under the same version, finds out, and asks for a whole policy
    local = SharedPolicy(region, SIZE, (0,))
    local.write(np.full(SIZE, 77, np.float32), ActingPolicy(5, 0.1, np.zeros(0), np.ones(0)))
    out = np.zeros(SIZE, np.float32)
    theirs.write(np.full(SIZE, 6, np.float32), ActingPolicy(6, 0.1, np.zeros(0), np.ones(0)))
    for _ in range(100):
        if follower.version == 5:
            await asyncio.sleep(0.01)
    local.read(out)
    assert follower.version == -1
    assert (out == 77).all()
    await asyncio.sleep(1)
    local.read(out)
    assert follower.version == 6
    assert (out == 6).all()
    theirs.write(np.full(SIZE, 5, np.float32), ActingPolicy(8, 0.1, np.zeros(0), np.ones(0)))
    await asyncio.sleep(1)
    assert follower.version == 8
    with pytest.raises(PeerRefusedError) as refused:
        await shard.transport.call(learner.address, learner.id, ROUTE, b"\x00", deadline_s=5.0, lane="bulk")
    assert refused.value.status == 503
    message = msgspec.msgpack.encode(FetchPolicy("task", 8))
    answer = await shard.transport.call(
        learner.address, learner.id, ROUTE, message, deadline_s=5.0, lane="bulk"
    )
    assert msgspec.msgpack.decode(answer.meta, type=UnrollReceipt) == UnrollReceipt(8)
    assert answer.vector_nbytes == 0
    region.close()
