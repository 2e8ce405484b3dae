"""Rounds through torch.distributed, whose processes are played here: what the strategy makes of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from p2pdrl.config.strategy import GradAverageConfig, ParamAverageConfig
from p2pdrl.errors import ConfigError, WorkerError
from p2pdrl.strategies.allreduce.group_process import Sum
from p2pdrl.strategies.allreduce.torch_averager import TIMEOUT_S
from p2pdrl.strategies.registry import build
from p2pdrl.testing.virtual_swarm import SimNode

from .bowls import Bowls, stall_s, together, until

pytestmark = pytest.mark.looptime

GRADIENTS = GradAverageConfig(backend="torch", compression="none", deadline_s=4.0)
PARAMETERS = ParamAverageConfig(backend="torch", compression="none", every_updates=4, deadline_s=4.0)
BOTH = pytest.mark.parametrize("config", [GRADIENTS, PARAMETERS], ids=["gradients", "parameters"])


class Meeting:
    """A group of processes at one store."""

    def __init__(self) -> None:
        self.size = 0
        self.ranks: dict[int, FakeProcess] = {}
        self.rounds: dict[int, dict[int, object]] = {}
        self.broken = ""
        self.changed = asyncio.Event()

    def change(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def fail(self, why: str) -> None:
        self.broken = self.broken or why
        self.change()

    async def until(self, happened, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not happened():
                    if self.broken:
                        await asyncio.sleep(0.05)
                        raise WorkerError(self.broken)
                    await self.changed.wait()
        except TimeoutError:
            raise WorkerError("timed out") from None


class FakeProcess:
    """What `node.group_process.GroupProcesses` would be, for a whole hub of members."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.meeting: Meeting | None = None
        self.rank = 0
        self.busy = self.frozen = False
        self.timeout_s = 0.0
        self.killed = self.failures = 0

    async def start(self, size, timeout_s):
        assert size > 0
        self.timeout_s = timeout_s

    async def host(self, others):
        assert others
        await asyncio.sleep(0.01)
        self.hub.meetings.append(Meeting())
        return len(self.hub.meetings)

    async def join(self, rank):
        meeting = self.meeting = self.hub.meetings[rank.port - 1]
        self.rank, meeting.size = rank.rank, rank.size
        meeting.ranks[rank.rank] = self
        meeting.change()
        await self._wait(lambda: len(meeting.ranks) == meeting.size)
        return "gloo"

    async def sum(self, order, out):
        meeting = self.meeting
        if meeting is None:
            raise WorkerError("a group is joined before it averages")
        vector = None if order.vector is None else order.vector.copy()
        if self.frozen:
            await self._wait(lambda: False)
        rows = meeting.rounds.setdefault(order.number, {})
        rows[self.rank] = (order, vector)
        if set(meeting.rounds) - {order.number - 1, order.number}:
            meeting.rounds.pop(order.number - 2, None)
        meeting.change()
        await self._wait(lambda: len(rows) == meeting.size)
        await asyncio.sleep(0.001)
        if self.failures:
            self.failures -= 1
            meeting.fail("somebody's connection broke")
            raise WorkerError("our connection broke")
        parts = [rows[rank] for rank in range(meeting.size)]
        total = sum(part.weight for part, _ in parts)
        out[:] = 0
        for part, vector in parts:
            if vector is not None:
                out += vector * np.float32(part.weight / total)
        return Sum(
            tuple(part.weight for part, _ in parts),
            tuple(part.policy_version for part, _ in parts),
            tuple(part.learning_rate for part, _ in parts),
            tuple(0.0 if v is None else float(v @ v) for _, v in parts),
            tuple(part.left for part, _ in parts),
            float(np.linalg.norm(out)),
            order.number != self.hub.poisoned,
        )

    async def leave(self):
        if self.busy:
            self.killed += 1
            await self.stop()

    async def stop(self):
        self.busy = self.frozen = False
        if self.meeting is not None:
            self.meeting.fail("somebody is gone")
        self.meeting = None

    async def _wait(self, happened):
        meeting = self.meeting
        self.busy = True
        try:
            await meeting.until(happened, self.timeout_s)
        except WorkerError:
            if not self.frozen:
                self.busy = False
                self.meeting = None
            raise
        self.busy = False


class Hub:
    """All processes of a swarm."""

    def __init__(self) -> None:
        self.meetings: list[Meeting] = []
        self.processes: dict[str, FakeProcess] = {}
        self.poisoned = -1
        """Number of the round whose mean is no number."""

    def of(self, node: SimNode) -> FakeProcess:
        return self.processes[node.id]


@pytest.fixture
def hub(monkeypatch):
    made, context = Hub(), SimNode.context

    def with_process(node):
        process = made.processes.setdefault(node.id, FakeProcess(made))
        return replace(context(node), trusted_network=True, group_process=process)

    monkeypatch.setattr(SimNode, "context", with_process)
    return made


def rounds(bowls) -> int:
    return min(node.strategy.outcomes.get("ok", 0) for node in bowls.swarm.living)


async def more(bowls, count=10, within_s=30.0) -> float:
    goal = rounds(bowls) + count
    return await until(lambda: rounds(bowls) >= goal, within_s)


@BOTH
async def test_replicas_stay_equal_and_each_view_meets_once(hub, config):
    async with Bowls(config) as bowls:
        await bowls.start()
        await until(lambda: rounds(bowls) >= 20)
        assert together(bowls.nodes)
        assert {node.strategy.facts["members"] for node in bowls.nodes} == {4}
        assert all(process.timeout_s == TIMEOUT_S for process in hub.processes.values())
        told = [text for kind, text in bowls.nodes[0].swarm.told if kind == "torch"]
        assert told == ["vectors travel through torch.distributed (gloo)"]


async def test_the_mean_is_weighted_by_samples(hub):
    async with Bowls(GRADIENTS, nodes=0, learning_rate=0.5) as bowls:
        nodes = [bowls.add(samples=samples) for samples in (1, 3)]
        bowls.swarm.introduce()
        await bowls.start()
        await until(lambda: rounds(bowls) > 60)
        wanted = (nodes[0].target + 3 * nodes[1].target) / 4
        assert np.allclose(nodes[0].learner.now(), wanted, atol=1e-5)


async def test_alone_it_steps_by_itself_without_any_group(hub):
    async with Bowls(GRADIENTS, nodes=1) as bowls:
        await bowls.start()
        await until(lambda: rounds(bowls) >= 60)
        assert hub.meetings == []
        assert np.allclose(bowls.nodes[0].learner.now(), bowls.nodes[0].target, atol=0.02)


@BOTH
@pytest.mark.parametrize("victim", [0, 3])
async def test_the_others_go_on_when_one_is_killed(hub, config, victim):
    async with Bowls(config) as bowls:
        await bowls.start()
        await until(lambda: rounds(bowls) >= 10)
        began_s = asyncio.get_running_loop().time()
        await bowls.swarm.kill(bowls.nodes[victim])
        await more(bowls)
        living = bowls.swarm.living
        assert max(stall_s(node, began_s) for node in living) < 5
        assert {node.strategy.facts["members"] for node in living} == {3}
        assert together(living)


@BOTH
async def test_a_round_that_only_some_completed_is_caught_up_with(hub, config):
    async with Bowls(config) as bowls:
        await bowls.start()
        await until(lambda: rounds(bowls) >= 10)
        hub.of(bowls.nodes[2]).failures = 1
        await more(bowls)
        assert together(bowls.nodes)
        assert {node.strategy.facts["members"] for node in bowls.nodes} == {4}
        assert any(kind == "torch-failed" for kind, _ in bowls.nodes[2].swarm.told)


async def test_a_frozen_process_of_a_living_node_is_replaced(hub):
    async with Bowls(GRADIENTS) as bowls:
        await bowls.start()
        await until(lambda: rounds(bowls) >= 10)
        frozen = hub.of(bowls.nodes[1])
        frozen.frozen = True
        assert await more(bowls, within_s=TIMEOUT_S + 5) > TIMEOUT_S - 1
        assert frozen.killed
        assert together(bowls.nodes)


async def test_who_comes_later_is_met_in_a_new_group(hub):
    async with Bowls(GRADIENTS, nodes=2) as bowls:
        await bowls.start()
        await until(lambda: rounds(bowls) >= 10)
        newcomer = bowls.add()
        bowls.swarm.introduce()
        await bowls.start(nodes=[newcomer])
        await more(bowls)
        assert together(bowls.nodes)


@BOTH
async def test_a_mean_that_is_no_number_moves_nobody(hub, config):
    async with Bowls(config) as bowls:
        await bowls.start()
        await until(lambda: rounds(bowls) >= 10)
        hub.poisoned = bowls.nodes[0].strategy.facts["round"] + 3
        await until(lambda: all("empty" in node.strategy.outcomes for node in bowls.nodes))
        await more(bowls)
        assert together(bowls.nodes)
        assert any(kind == "poisoned" for kind, _ in bowls.nodes[0].swarm.told)


async def test_one_after_another_failure_is_waited_for_longer(hub):
    async with Bowls(GRADIENTS, nodes=2) as bowls:
        for node in bowls.nodes:
            hub.of(node).failures = 6
        await bowls.start()
        assert await until(lambda: rounds(bowls) >= 3, 60) > 0.25 + 0.5 + 1 + 2
        assert together(bowls.nodes)


async def test_it_is_refused_in_words_where_the_network_isnt_trusted(hub):
    async with Bowls(GRADIENTS, nodes=1) as bowls:
        context = bowls.nodes[0].context()
        for config in (GRADIENTS, PARAMETERS):
            with pytest.raises(ConfigError, match="trusted_network = true"):
                build(config, replace(context, trusted_network=False))
            with pytest.raises(ConfigError, match="backend = own"):
                build(config, replace(context, group_process=None))
