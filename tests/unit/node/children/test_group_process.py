"""The node's group processes: which is asked, which is killed, which stands by; and three real ones."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest

from p2pdrl.config.node import LearnerConfig
from p2pdrl.errors import ConfigError, TensorError, WireError, WorkerError
from p2pdrl.node.children import group_process as module
from p2pdrl.node.children.group_process import GroupProcesses
from p2pdrl.strategies.allreduce.group_process import GroupRank, SumOrder
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.workers.torch_group.protocol import GroupReduced, Host, Hosting, Joined, Reduce, Row

CPU = LearnerConfig(device="cpu")
RANK = GroupRank(0, 2, "127.0.0.1", 4711)
SIZE = 5


class FakeLink:
    """A process that averages with nobody, and doubles what it is given."""

    def __init__(self, region: SharedRegion, size: int, number: int) -> None:
        self.vectors = np.frombuffer(region.buf, np.float32).reshape(2, size)
        self.pid = number
        self.usable = True
        self.killed = False
        self.hangs = False
        self.error: Exception | None = None
        self.orders: list[object] = []

    async def ask(self, order, kind, deadline_s):
        assert self.usable
        assert deadline_s > 3.0
        self.orders.append(order)
        if self.hangs:
            self.usable = False
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        if isinstance(order, Host):
            return Hosting(4711)
        if isinstance(order, Reduce):
            self.vectors[1] = 2 * self.vectors[0]
            return GroupReduced(
                (Row(order.weight, order.policy_version, order.learning_rate, 0.0),), 1.0, sound=True
            )
        return Joined("gloo")

    async def kill(self):
        self.killed, self.usable = True, False


class Made:
    """Processes on fakes."""

    def __init__(self) -> None:
        self.links: list[FakeLink] = []
        self.errors: list[Exception] = []
        self.one = GroupProcesses(CPU, self.spawn)

    async def spawn(self, region, size, config):
        assert config is CPU
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop()
        self.links.append(FakeLink(region, size, len(self.links)))
        return self.links[-1]


@pytest.fixture
async def made():
    it = Made()
    await it.one.start(SIZE, 3.0)
    yield it
    await it.one.stop()
    assert all(link.killed for link in it.links)


def order(vector, number=1) -> SumOrder:
    weight = 0.0 if vector is None else 2.0
    return SumOrder(number, vector, weight, 7, 0.5, 1e6, bf16=False, spread=False)


async def test_one_works_and_once_it_has_joined_another_stands_by(made):
    assert await made.one.host(["127.0.0.1"]) == 4711
    assert len(made.links) == 1
    assert await made.one.join(RANK) == "gloo"
    await asyncio.sleep(0.01)
    assert len(made.links) == 2
    assert made.one.pids == (0,)
    out = np.zeros(SIZE, np.float32)
    got = await made.one.sum(order(np.arange(SIZE, dtype=np.float32)), out)
    assert (got.weights, got.versions, got.norm, got.sound) == ((2.0,), (7,), 1.0, True)
    assert out.tolist() == [0, 2, 4, 6, 8]
    assert made.links[1].orders == []


async def test_a_process_that_failed_in_order_is_kept(made):
    await made.one.join(RANK)
    made.links[0].error = WorkerError("somebody is gone")
    with pytest.raises(WorkerError, match="gone"):
        await made.one.sum(order(None), np.zeros(SIZE, np.float32))
    made.links[0].error = None
    await made.one.leave()
    await made.one.join(RANK)
    assert made.one.pids == (0,)
    assert not made.links[0].killed


async def test_one_that_hangs_is_killed_and_the_next_one_takes_its_place(made):
    await made.one.join(RANK)
    made.links[0].hangs = True
    summing = asyncio.create_task(made.one.sum(order(None), np.zeros(SIZE, np.float32)))
    await asyncio.sleep(0.01)
    summing.cancel()
    await asyncio.gather(summing, return_exceptions=True)
    assert not made.links[0].killed
    await made.one.leave()
    assert made.links[0].killed
    await made.one.join(RANK)
    assert made.one.pids == (1,)


async def test_one_that_cant_be_made_is_tried_again(made):
    await asyncio.sleep(0.01)
    made.errors = [WorkerError("no more processes")]
    await made.one.join(RANK)  # the first was made already
    made.links[0].usable = False
    with pytest.raises(WorkerError, match="no more processes"):
        await made.one.join(RANK)
    await made.one.join(RANK)
    assert made.one.pids == (1,)


async def test_cancelling_while_it_is_made_loses_none(made):
    joining = asyncio.create_task(made.one.join(RANK))
    await asyncio.sleep(0)
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)
    await made.one.join(RANK)
    assert made.one.pids == (0,)


async def test_nothing_is_asked_before_the_start_and_after_the_end():
    one = Made().one
    for _ in range(2):
        with pytest.raises(WorkerError, match="started"):
            await one.join(RANK)
        with pytest.raises(WorkerError, match="started"):
            await one.sum(order(None), np.zeros(SIZE, np.float32))
        await one.start(SIZE, 3.0)
        await one.stop()


async def test_no_memory_is_told_as_what_the_node_cant_do(monkeypatch):
    def refuse(nbytes, label):
        raise TensorError("no memory")

    monkeypatch.setattr(module.SharedRegion, "create", refuse)
    with pytest.raises(ConfigError, match="no memory"):
        await Made().one.start(SIZE, 3.0)


async def meet(nodes):
    port = await nodes[0].host(["127.0.0.1"] * (len(nodes) - 1))
    return await asyncio.gather(
        *(node.join(GroupRank(rank, len(nodes), "127.0.0.1", port)) for rank, node in enumerate(nodes))
    )


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_three_real_processes_average_and_two_go_on(until):
    """Against numpy in float64; seed 0."""
    size, weights = 100_003, (1.0, 2.0, 5.0)
    vectors = np.random.default_rng(0).standard_normal((3, size)).astype(np.float32)
    outs = [np.empty(size, np.float32) for _ in range(3)]
    nodes = [GroupProcesses(CPU) for _ in range(3)]

    async def average(number, *, bf16=False, used=nodes):
        orders = (
            SumOrder(number, vector, weight, 7, weight / 10, 1e6, bf16, spread=True, left=int(weight) + 1)
            for vector, weight in zip(vectors, weights, strict=True)
        )
        jobs = (node.sum(one, out) for node, one, out in zip(used, orders, outs, strict=False))
        return await asyncio.gather(*jobs, return_exceptions=True)

    try:
        for node in nodes:
            await node.start(size, 20.0)
        assert await meet(nodes) == ["gloo"] * 3
        wanted = np.average(vectors.astype(np.float64), axis=0, weights=weights)
        got = await average(1)
        assert got[0] == got[1] == got[2]
        assert (got[0].weights, got[0].versions, got[0].sound) == (weights, (7, 7, 7), True)
        assert got[0].learning_rates == (0.1, 0.2, 0.5)
        assert got[0].lefts == (2, 3, 6)
        assert got[0].norm == pytest.approx(np.linalg.norm(wanted), rel=1e-6)
        assert got[0].squares == pytest.approx([float(x @ x) for x in vectors.astype(np.float64)], rel=1e-6)
        assert np.abs(outs[0] - wanted).max() < 1e-6
        assert len({out.tobytes() for out in outs}) == 1

        await average(2, bf16=True)
        assert np.abs(outs[0] - wanted).max() < 0.05
        assert len({out.tobytes() for out in outs}) == 1

        vectors[1, 17] = np.nan
        assert [one.sound for one in await average(3)] == [False] * 3
        vectors[1, 17] = 0

        os.kill(nodes[2].pids[0], signal.SIGKILL)
        assert all(isinstance(failed, WorkerError) for failed in await average(4))
        before = [node.pids for node in nodes[:2]]
        assert await meet(nodes[:2]) == ["gloo"] * 2
        assert [node.pids for node in nodes[:2]] == before
        assert [one.weights for one in await average(4, used=nodes[:2])] == [(1.0, 2.0)] * 2
        assert len({out.tobytes() for out in outs[:2]}) == 1
    finally:
        for node in nodes:
            await node.stop()


async def test_an_answer_of_another_kind_is_a_bug(made):
    async def other(order, kind, deadline_s):
        raise WireError("the group process answered Joined instead of Hosting")

    await made.one.join(RANK)
    made.links[0].ask = other
    with pytest.raises(WireError):
        await made.one.host(["127.0.0.1"])
