"""Several learner processes of one node on one vector."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec
import numpy as np
import pytest

from p2pdrl.clock import SystemClock
from p2pdrl.config.learner_mode import FREE, LearnerMode
from p2pdrl.config.node import LearnerConfig
from p2pdrl.config.task import RegressionConfig, TaskConfig
from p2pdrl.errors import WorkerError
from p2pdrl.node.children.learner_pool import LearnerPool, pooled
from p2pdrl.node.children.supervisor import LearnerSupervisor
from p2pdrl.rl.registry import build_trainer
from p2pdrl.tensors.moments import Moments
from p2pdrl.workers.protocol import DataShare, LearnerPace, Others, Progress, Report, Start

START = Start(b"{}", 0, "cpu", 1, False)
QUICK = LearnerConfig(restart_min_s=0.01, restart_max_s=0.05)
GO = LearnerPace(paused=False, max_updates_per_s=0.0)


def packed(count: float, value: float) -> bytes:
    return msgspec.msgpack.encode(Moments(count, np.full(2, value), np.zeros(2)).to_wire())


def count_of(moments: dict[str, bytes]) -> float:
    return Moments.from_wire(msgspec.msgpack.decode(moments["obs"])).count if moments else 0.0


class Node:
    """A first learner and its pool."""

    def __init__(self, events, start: Start = START, config: LearnerConfig = QUICK) -> None:
        self.events = events
        self.new = 0
        options = {"start": start, "config": config, "clock": SystemClock(), "events": events}
        self.first = LearnerSupervisor(**options, window=1000, on_report=self.heard)
        self.on_help = self.heard
        self.learners = LearnerPool(
            supervisor=self.first,
            **options,
            on_report=lambda *report: self.on_help(*report),  # noqa: PLW0108 - a test replaces it
        )

    def heard(self, report: Report, new: int) -> None:
        self.new += new

    async def begin(self, pace: LearnerPace = GO) -> None:
        await self.first.build()
        self.learners.tell(pace)
        await self.first.begin(restore=False)

    def told(self, kind: str) -> int:
        return [event["kind"] for event in self.events.since(0)].count(kind)

    def now(self) -> np.ndarray:
        out = np.empty(self.first.spec.layout.size, np.float32)
        self.first.board.now(out)
        return out

    @property
    def helped(self) -> int:
        return self.learners.totals.updates - self.first.totals.updates


@pytest.fixture
async def make(events):
    made: list[Node] = []

    def node(start: Start = START, config: LearnerConfig = QUICK) -> Node:
        made.append(Node(events, start, config))
        return made[-1]

    yield node
    for each in made:
        await each.learners.stop()
        await each.first.stop()
        each.first.close()


async def test_helpers_come_and_go_while_the_first_learner_runs(plan, make, until):
    plan("train")
    it = make()
    await it.begin()
    pid = it.first.pid
    await it.learners.change(LearnerMode(learners=3), 1)
    it.learners.tell(Progress(0.5))
    await until(lambda: len(it.learners.pids) == 2 and it.helped >= 20)
    # They step one vector: what is published holds the workers' steps too.
    await until(lambda: it.now()[0] > it.first.totals.updates + 5)
    await it.learners.change(FREE, 2)
    assert it.learners.pids == ()
    helped, before = it.helped, it.first.totals.updates
    await until(lambda: it.first.totals.updates > before + 10)
    assert it.helped == helped
    assert (it.first.pid, it.first.restarts, it.told("worker-died")) == (pid, 0, 0)
    # Each process' work is counted once, for this node.
    totals = it.learners.totals
    assert (totals.env_steps, totals.episodes) == (10 * totals.updates, totals.updates)
    assert it.new == totals.updates
    assert count_of(it.learners.moments) == totals.updates
    assert len(it.first.returns) == min(1000, totals.updates)
    # Alone again, one step is one.
    value, version = it.now()[0], it.first.board.policy_version
    await until(lambda: it.first.board.policy_version > version + 3)
    assert it.now()[0] - value == pytest.approx(it.first.board.policy_version - version, abs=2)


async def test_a_helper_that_dies_is_replaced_and_stays_counted(plan, make, until):
    plan("train")
    it = make()
    await it.begin()
    await it.learners.change(LearnerMode(learners=2), 1)
    await until(lambda: it.helped >= 5)
    helped, (pid,) = it.helped, it.learners.pids
    os.kill(pid, signal.SIGKILL)
    await until(lambda: it.told("worker-died") == 1)
    await until(lambda: it.helped > helped + 5)
    assert it.learners.pids not in ((), (pid,))
    assert count_of(it.learners.moments) == it.learners.totals.updates
    assert it.first.restarts == 0


@pytest.mark.slow
async def test_the_first_learner_dies_and_its_helpers_work_on(plan, make, until):
    plan("train")
    it = make()
    await it.begin()
    await it.learners.change(LearnerMode(learners=2), 1)
    await until(lambda: it.helped >= 5)
    pids = it.learners.pids
    os.kill(it.first.pid, signal.SIGKILL)
    await until(lambda: it.first.restarts == 1)
    before = it.first.totals.updates
    await until(lambda: it.now()[0] > it.learners.totals.updates - it.helped + 5)
    await until(lambda: it.first.totals.updates > before + 5)
    assert it.learners.pids == pids


async def test_each_is_told_what_all_others_counted(plan, make, until):
    plan("train")
    it = make()
    await it.begin()
    it.learners.share({})
    it.learners.share({"obs": packed(1000, 2.0)})
    await until(lambda: it.first.metrics.get("others") == 1000)
    await it.learners.change(LearnerMode(learners=2), 1)
    await until(lambda: it.helped >= 5)
    it.learners.tell(LearnerPace(paused=True, max_updates_per_s=0.0))
    (worker,) = it.learners.workers
    heard: list[int] = []
    await until(lambda: heard.append(it.helped) or (len(heard) > 50 and heard[-50] == heard[-1]))
    it.learners.share({"obs": packed(1000, 2.0)})
    assert count_of(worker.told[Others].moments) == 1000 + count_of(it.first.moments)
    assert count_of(it.first.told[Others].moments) == 1000 + worker.last.updates


async def test_they_share_the_nodes_pace(plan, make, until):
    plan("train")
    it = make()
    await it.begin(LearnerPace(paused=False, max_updates_per_s=90.0))
    await it.learners.change(LearnerMode(learners=3), 1)
    for process in (it.first, *it.learners.workers):
        assert process.told[LearnerPace] == LearnerPace(paused=False, max_updates_per_s=30.0)
    await it.learners.change(FREE, 2)
    assert it.first.told[LearnerPace].max_updates_per_s == 90.0


async def test_they_divide_the_nodes_part_of_the_data(plan, make, until):
    plan("train")
    it = make()
    await it.begin()
    it.learners.divide(DataShare(1, 3))
    assert it.first.told[DataShare] == DataShare(1, 3)
    await it.learners.change(LearnerMode(learners=2), 1)
    (worker,) = it.learners.workers
    assert (it.first.told[DataShare], worker.told[DataShare]) == (DataShare(2, 6), DataShare(3, 6))
    it.learners.divide(DataShare(0, 2, rate_power=0.5))
    parts = DataShare(0, 4, rate_power=0.5), DataShare(1, 4, rate_power=0.5)
    assert (it.first.told[DataShare], worker.told[DataShare]) == parts
    await it.learners.change(FREE, 2)
    assert it.first.told[DataShare] == DataShare(0, 2, rate_power=0.5)


async def test_a_nodes_own_learners_share_out_data_but_no_update(plan, make):
    plan("train")
    it = make()
    await it.begin()
    await it.learners.change(LearnerMode(learners=2), 1)
    it.learners.divide(DataShare(0, 1))
    (worker,) = it.learners.workers
    parts = DataShare(0, 2, total_speed=1.0), DataShare(1, 2, total_speed=1.0)
    assert (it.first.told[DataShare], worker.told[DataShare]) == parts


async def test_a_gpu_works_alone(plan, make):
    plan("train")
    it = make()
    await it.begin()
    it.first.device = "cuda:0"
    await it.learners.change(LearnerMode(learners=4), 1)
    assert (it.learners.pids, it.told("one-learner"), it.first.requests.learner_mode) == ((), 1, FREE)


@pytest.mark.slow
async def test_leaving_while_helpers_are_built(plan, make, until):
    plan("train", "mute")
    it = make()
    await it.begin()
    await it.learners.change(LearnerMode(learners=2), 1)
    await until(lambda: it.learners.pids)
    async with asyncio.timeout(2.0):
        await it.learners.stop()
    assert it.learners.pids == ()


async def test_a_bug_in_what_hears_them_is_raised(plan, make):
    plan("train")
    it = make()
    await it.begin()
    watch = asyncio.create_task(it.learners.watch())
    it.on_help = lambda *_: 1 / 0
    await it.learners.change(LearnerMode(learners=2), 1)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(watch, 20)


async def test_without_a_first_learner_there_is_no_crew(make):
    with pytest.raises(WorkerError, match="isn't built"):
        await make().learners.change(LearnerMode(learners=2), 1)


def test_moments_pool_by_stream():
    merged = pooled([{}, {"obs": packed(3, 1.0)}, {"obs": packed(1, 5.0), "returns": packed(2, 0.0)}])
    obs = Moments.from_wire(msgspec.msgpack.decode(merged["obs"]))
    assert (obs.count, obs.mean.tolist()) == (4.0, [2.0, 2.0])
    assert merged["returns"] == packed(2, 0.0)
    assert pooled([]) == {}


SPARSE = TaskConfig(
    algorithm=RegressionConfig(
        features=500, density=0.01, rows=2000, noise=0.0, batch_size=1, learning_rate=0.05, evaluate_every=50
    )
)


def test_one_process_on_shared_memory_is_serial_sgd_to_the_bit():
    alone, shared = (build_trainer(SPARSE, seed=3, device="cpu") for _ in range(2))
    buffer = np.zeros(alone.layout.size, np.float32)
    shared.rebind(buffer, write=True)
    for _ in range(300):
        alone.step()
        shared.step()
    assert buffer.any()
    np.testing.assert_array_equal(alone.flat, buffer)


@pytest.mark.slow
async def test_four_processes_solve_sparse_least_squares(make, until):
    it = make(Start(msgspec.json.encode(SPARSE), 1, "cpu", 1, False))
    await it.begin(LearnerPace(paused=True, max_updates_per_s=0.0))
    await it.learners.change(LearnerMode(learners=4), 1)
    await until(lambda: all(worker.last for worker in it.learners.workers), 60.0)
    it.learners.tell(GO)
    await until(lambda: it.first.returns and it.first.returns[-1] > -1e-3, 60.0)
    assert all(worker.last.updates > 100 for worker in it.learners.workers)
    assert it.told("worker-died") == 0


@pytest.mark.slow
async def test_a_helper_whose_environment_always_fails_ends_the_watch(plan, make):
    plan("train", "raise:3")
    it = make(config=LearnerConfig(restart_min_s=0.01, restart_max_s=0.05, give_up_after=2))
    await it.begin()
    await it.learners.change(LearnerMode(learners=2), 1)
    with pytest.raises(WorkerError, match=r"2 times in a row in the same way.*ValueError: the environment"):
        await asyncio.wait_for(it.learners.watch(), 20)
    died = [event for event in it.events.since(0) if event["kind"] == "worker-died"]
    assert [event["error"]["type"] for event in died] == ["ValueError"] * 2


@pytest.mark.slow
async def test_a_bug_of_a_helpers_keeping_before_anybody_watches_is_raised_later(
    plan, make, until, monkeypatch
):
    plan("train")
    it = make()
    await it.begin()
    monkeypatch.setattr(it.learners, "_on_report", lambda *_: 1 / 0)
    await it.learners.change(LearnerMode(learners=2), 1)
    await until(lambda: it.learners.pids)
    await until(lambda: it.learners.pids == ())
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(it.learners.watch(), 1)
