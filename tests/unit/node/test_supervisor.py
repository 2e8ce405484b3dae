"""The supervisor with real child processes that train nothing."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

from p2pdrl.clock import SystemClock
from p2pdrl.config.node import LearnerConfig
from p2pdrl.errors import ConfigError, WorkerError
from p2pdrl.node import hanging
from p2pdrl.node import process_link as link_module
from p2pdrl.node import supervisor as supervisor_module
from p2pdrl.node.learner_link import LearnerLink
from p2pdrl.node.supervisor import LearnerSupervisor
from p2pdrl.pipeline.order import StageOrder
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.layout import Entry, Layout
from p2pdrl.workers.protocol import Pace, Progress, Report, Start

START = Start(b"{}", 0, "cpu", 1, False)
QUICK = LearnerConfig(restart_min_s=0.01, restart_max_s=0.05)


class Supervised:
    """A supervisor and what it told."""

    def __init__(self, events, config: LearnerConfig = QUICK) -> None:
        self.reports: list[tuple[Report, int]] = []
        self.events = events
        self.one = LearnerSupervisor(
            start=START,
            config=config,
            window=4,
            clock=SystemClock(),
            events=events,
            on_report=lambda report, new: self.reports.append((report, new)),
        )

    async def begin(self) -> None:
        await self.one.build()
        await self.one.begin(restore=False)

    def told(self, kind: str) -> int:
        return [event["kind"] for event in self.events.since(0)].count(kind)

    def now(self) -> tuple[float, int]:
        out = np.empty(4, np.float32)
        version = self.one.board.now(out).policy_version
        return float(out[0]), version


@pytest.fixture
async def make(events):
    made: list[Supervised] = []

    def supervised(config: LearnerConfig = QUICK) -> Supervised:
        made.append(Supervised(events, config))
        return made[-1]

    yield supervised
    for each in made:
        await each.one.stop()
        each.one.close()


async def test_a_learner_trains_and_ends_when_told(plan, make, until):
    plan("train")
    it = make()
    await it.begin()
    assert it.one.device == "fake"
    await until(lambda: it.one.totals.updates >= 3)
    assert it.one.pid is not None
    assert it.one.moments.keys() == {"obs"}
    await it.one.stop()
    totals = it.one.totals
    assert (totals.env_steps, totals.episodes) == (10 * totals.updates, totals.updates)
    # The last state stays on the board, and is the one that was reported last.
    assert it.now() == (float(totals.updates), totals.updates)
    assert sum(new for _, new in it.reports) == totals.updates
    assert len(it.one.returns) == min(4, totals.updates)
    assert (it.one.pid, it.one.restarts, it.told("learner-died")) == (None, 0, 0)
    await it.one.stop()


async def test_a_flush_under_way_ends_before_the_board_is_freed(plan, make):
    """Even when the supervision has ended before."""
    plan("train")
    it = make()
    await it.begin()
    await it.one.stop()
    gate = threading.Event()
    it.one._flushing = asyncio.create_task(asyncio.to_thread(gate.wait, 10))
    stopping = asyncio.create_task(it.one.stop())
    _, under_way = await asyncio.wait([stopping], timeout=0.05)
    gate.set()
    await stopping
    assert under_way
    assert it.one._flushing.done()


async def test_one_that_dies_is_replaced_from_the_board(plan, make, until):
    plan("die:30", "exit:20", "train")
    it = make()
    it.one.tell(Progress(0.5))
    await it.begin()
    await until(lambda: it.one.restarts == 2 and it.one.metrics.get("life") == 2.0)
    before = it.one.totals.updates
    await until(lambda: it.one.totals.updates > before + 5)
    assert it.one.down_s is None
    assert it.one.failures == 2
    assert it.one.metrics["fraction"] == 0.5  # told to each that replaces it
    await it.one.stop()
    value, version = it.now()
    # Each death costs the update it was in, and what wasn't reported yet; nothing is counted twice.
    assert value == version
    assert it.one.totals.updates <= version
    assert it.one.metrics["total"] == value
    counts = [report.updates for report, _ in it.reports]
    assert all(new >= 0 for _, new in it.reports)
    assert sum(new for _, new in it.reports) == it.one.totals.updates
    assert sum(1 for before, after in itertools.pairwise(counts) if after < before) == 2
    deaths = [event for event in it.events.since(0) if event["kind"] == "learner-died"]
    assert [event["code"] for event in deaths] == [-9, 5]
    assert "was killed by signal 9" in deaths[0]["text"]
    assert it.told("learner-restarted") == 2


async def test_a_delta_posted_while_it_is_down_isnt_lost(plan, make, until):
    plan("train")
    it = make(LearnerConfig(restart_min_s=0.2))
    await it.begin()
    await until(lambda: it.one.totals.updates >= 2)
    os.kill(it.one.pid, signal.SIGKILL)
    await until(lambda: it.one.down_s is not None)
    assert it.one.pid is None
    _, version = it.now()
    it.one.board.post_delta(np.full(4, 1000.0, np.float32), version + 500)
    await until(lambda: it.one.restarts == 1 and it.one.board.absorbed)
    await until(lambda: it.one.metrics.get("life") == 1.0)
    await it.one.stop()
    value, after = it.now()
    assert value == 1000.0 + after - 500
    assert it.one.down_s is None


@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
async def test_what_had_no_room_on_the_board_follows(plan, make, until, monkeypatch, inline_bytes):
    monkeypatch.setattr(supervisor_module, "INLINE_BYTES", inline_bytes)
    plan("train")
    it = make()
    await it.begin()
    await until(lambda: it.one.totals.updates >= 1)
    for _ in range(3):
        it.one.board.post_delta(np.full(4, 1000.0, np.float32), 0)
    await until(lambda: it.one.board.absorbed)
    await it.one.stop()
    value, version = it.now()
    assert value == 3000.0 + version


async def test_a_paused_successor_stays_paused(plan, make, until):
    plan("train")
    it = make()
    it.one.tell(Pace(paused=True, max_updates_per_s=0.0))
    await it.begin()
    os.kill(it.one.pid, signal.SIGKILL)
    await until(lambda: it.one.restarts == 1)
    heard = len(it.reports)
    await until(lambda: len(it.reports) > heard)
    await asyncio.sleep(0.05)
    assert it.one.totals.updates <= 3


@pytest.mark.parametrize(
    ("word", "error", "words"),
    [("usage", ConfigError, "no such environment"), ("crash", WorkerError, "the learner is gone")],
)
async def test_a_build_that_fails_is_told(plan, make, word, error, words):
    plan(word)
    with pytest.raises(error, match=words):
        await make().one.build()


async def test_a_task_that_turns_out_bad_ends_the_watch(plan, make):
    plan("usage:5")
    it = make()
    await it.begin()
    with pytest.raises(ConfigError, match="turned out to be bad"):
        await asyncio.wait_for(it.one.watch(), 20)
    assert it.told("learner-died") == 0


async def test_a_successor_that_cant_be_built_is_tried_again(plan, make, until):
    plan("die:2", "crash", "train")
    it = make()
    await it.begin()
    await until(lambda: it.one.restarts == 1)
    assert it.told("learner-failed") == 1
    assert it.one.failures == 2


async def test_a_successor_that_turns_out_bad_is_tried_again(plan, make, until):
    plan("die:2", "usage", "train")
    it = make()
    await it.begin()
    await until(lambda: it.one.restarts == 1)
    (failed,) = [event for event in it.events.since(0) if event["kind"] == "learner-failed"]
    assert "no such environment; next try in 0.02 s" in failed["text"]


async def test_a_successor_of_another_layout_is_tried_again(plan, make, until):
    plan("die:50", "train")
    it = make()
    await it.begin()
    spec, it.one.spec = it.one.spec, BoardSpec(Layout((Entry("other", (4,)),)))
    await until(lambda: it.told("learner-failed") >= 1)
    it.one.spec = spec
    await until(lambda: it.one.restarts == 1)


async def test_without_file_descriptors_it_is_tried_again(plan, make, until, monkeypatch):
    plan("die:2", "train")
    it = make()
    await it.begin()

    def exhausted(*_args):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(link_module.socket, "socketpair", exhausted)
        with pytest.raises(WorkerError, match="Too many open files"):
            await LearnerLink.spawn(START)
        await until(lambda: it.told("learner-failed") >= 1)
    await until(lambda: it.one.restarts == 1)


async def test_stopping_before_it_was_let_go(plan, make):
    plan("train")
    it = make()
    await it.one.build()
    await it.one.stop()
    assert it.one.pid is None


async def test_the_last_report_is_read_before_the_end(plan, make, until):
    plan("train")
    for _ in range(3):
        it = make()
        await it.begin()
        await until(lambda: it.one.totals.updates >= 1)  # noqa: B023 (called at once)
        await it.one.stop()
        assert it.now() == (float(it.one.totals.updates), it.one.totals.updates)


async def test_a_bug_that_shows_while_stopping_is_raised(plan, make, until, monkeypatch):
    plan("train")
    it = make()
    await it.begin()
    await until(lambda: it.one.totals.updates >= 1)

    monkeypatch.setattr(it.one, "_on_report", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await it.one.stop()
    await it.one.stop()
    with pytest.raises(ZeroDivisionError):
        await it.one.watch()
    assert it.one.pid is None


async def test_a_bug_ends_the_watch(plan, make, until, monkeypatch):
    plan("train")
    it = make()
    await it.begin()
    monkeypatch.setattr(it.one, "_on_report", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(it.one.watch(), 20)
    await it.one.stop()


async def test_a_learner_that_doesnt_end_is_killed(plan, make, until, monkeypatch):
    monkeypatch.setattr(supervisor_module, "END_TIMEOUT_S", 0.2)
    plan("train")
    it = make()
    await it.begin()
    await until(lambda: it.one.totals.updates >= 1)
    pid = it.one.pid
    os.kill(pid, signal.SIGSTOP)
    await it.one.stop()
    assert it.one.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_the_window_may_change(make):
    it = make()
    it.one.returns.extend([1.0, 2.0, 3.0, 4.0, 5.0])
    it.one.set_window(2)
    assert list(it.one.returns) == [4.0, 5.0]
    it.one.set_window(3)
    it.one.returns.extend([6.0, 7.0])
    assert list(it.one.returns) == [5.0, 6.0, 7.0]


async def test_stopping_doesnt_wait_for_the_next_try(plan, make, until):
    plan("die:2")
    it = make(LearnerConfig(restart_min_s=30.0))
    await it.begin()
    await until(lambda: it.one.down_s is not None)
    began_s = time.monotonic()
    await it.one.stop()
    assert time.monotonic() - began_s < 1.0
    assert it.told("learner-restarted") == 0


async def test_stopping_ends_a_successor_that_builds(plan, make, until, monkeypatch):
    monkeypatch.setattr(supervisor_module, "END_TIMEOUT_S", 0.3)
    plan("die:2", "mute")
    it = make()
    await it.begin()
    await until(lambda: it.told("learner-died") == 1 and it.one.pid is not None)
    await it.one.stop()
    assert it.told("learner-failed") == 0
    assert it.one.pid is None


async def test_waits_double_up_to_a_bound(make):
    it = make(LearnerConfig(restart_min_s=0.5, restart_max_s=30.0))
    waits = []
    for it.one.failures in (0, 1, 2, 3, 6, 7, 5000):
        waits.append(it.one._rest_s())
    assert waits == [0.5, 0.5, 1.0, 2.0, 16.0, 30.0, 30.0]


async def test_a_long_life_forgives_earlier_deaths(make):
    it = make()
    for lived_s, failures in [(1.0, 1), (59.0, 2), (60.0, 0), (5.0, 1)]:
        it.one._died(-9, lived_s)
        assert it.one.failures == failures


async def test_no_python_to_start(make, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(WorkerError, match="can't start the learner"):
        await LearnerLink.spawn(START)


async def test_a_child_that_ends_at_once(make, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/true")
    it = make()
    with pytest.raises(WorkerError, match="gone"):
        await it.one.build()


async def test_out_of_order_calls_are_told(make):
    with pytest.raises(WorkerError, match="isn't built yet"):
        await make().one.begin(restore=False)
    await make().one.watch()


async def test_one_that_hangs_instead_of_becoming_a_stage_is_replaced(plan, make, until, monkeypatch):
    """A frozen process stands for one that waits in a library without end."""
    monkeypatch.setattr(hanging, "HANGS_S", 0.4)
    plan("train")
    it = make()
    await it.begin()
    await until(lambda: it.one.totals.updates >= 1)
    os.kill(it.one.pid, signal.SIGSTOP)
    await asyncio.sleep(0.6)
    assert it.told("learner-hangs") == 0  # nobody waits for it
    it.one.stages.work(
        StageOrder(
            generation=7,
            rank=0,
            blocks=1,
            cuts=(),
            schedule="1f1b",
            microbatches=1,
            ranks=1,
            timeout_s=1.0,
            idle_timeout_s=1.0,
            state_every=1,
        ),
        {},
    )
    await until(lambda: it.one.restarts == 1)
    assert it.told("learner-hangs") == 1
    assert (await it.one.stages.news()).what == "broken"
