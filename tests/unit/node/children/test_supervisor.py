"""The supervisor with real child processes that train nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from p2pdrl.errors import ConfigError, WorkerError
from p2pdrl.node.children import supervisor as supervisor_module
from p2pdrl.node.children.learner_link import LearnerLink
from p2pdrl.strategies.protocol import LearnerRequest

from ..supervised import START


async def test_a_learner_trains_and_ends_when_told(plan, supervise, until):
    plan("train")
    it = supervise()
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


async def test_a_flush_under_way_ends_before_the_board_is_freed(plan, supervise, monkeypatch):
    """Even when the supervision has ended before."""
    monkeypatch.setattr(supervisor_module, "INLINE_BYTES", 0)
    plan("train")
    it = supervise()
    await it.begin()
    await it.one.stop()
    admission = threading.Event()
    flushed = []
    it.one.board = SimpleNamespace(
        pending=True, content_id=0, flush=lambda: flushed.append(admission.wait(10))
    )
    it.one.answer(LearnerRequest(1, "gradients", 0, 1, None), "set")
    stopping = asyncio.create_task(it.one.stop())
    _, under_way = await asyncio.wait([stopping], timeout=0.05)
    admission.set()
    await stopping
    assert under_way
    assert flushed == [True]


@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
async def test_what_had_no_room_on_the_board_follows(plan, supervise, until, monkeypatch, inline_bytes):
    monkeypatch.setattr(supervisor_module, "INLINE_BYTES", inline_bytes)
    plan("train")
    it = supervise()
    await it.begin()
    await until(lambda: it.one.totals.updates >= 1)
    for _ in range(3):
        it.one.board.post_delta(np.full(4, 1000.0, np.float32), 0)
    await until(lambda: it.one.board.absorbed)
    await it.one.stop()
    value, version = it.now()
    assert value == 3000.0 + version


@pytest.mark.parametrize(
    ("word", "error", "words"),
    [
        ("usage", ConfigError, "no such environment"),
        ("crash", WorkerError, "the learner ended with code 7, while it was built"),
        ("raise", WorkerError, "died of ValueError: the environment can't be made"),
    ],
)
async def test_a_build_that_fails_is_told(plan, supervise, word, error, words):
    plan(word)
    with pytest.raises(error, match=words):
        await supervise().one.build()


async def test_a_task_that_turns_out_bad_ends_the_watch(plan, supervise):
    plan("usage:5")
    it = supervise()
    await it.begin()
    with pytest.raises(ConfigError, match="turned out to be bad"):
        await asyncio.wait_for(it.one.watch(), 20)
    assert it.told("learner-died") == 0


async def test_stopping_before_it_was_let_go(plan, supervise):
    plan("train")
    it = supervise()
    await it.one.build()
    await it.one.stop()
    assert it.one.pid is None


@pytest.mark.slow
async def test_the_last_report_is_read_before_the_end(plan, supervise, until):
    plan("train")
    for _ in range(3):
        it = supervise()
        await it.begin()
        await until(lambda: it.one.totals.updates >= 1)  # noqa: B023 (called at once)
        await it.one.stop()
        assert it.now() == (float(it.one.totals.updates), it.one.totals.updates)


async def test_a_bug_that_shows_while_stopping_is_raised(plan, supervise, until):
    plan("train")
    it = supervise()
    await it.begin()
    await until(lambda: it.one.totals.updates >= 1)

    it.on_report = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        await it.one.stop()
    await it.one.stop()
    with pytest.raises(ZeroDivisionError):
        await it.one.watch()
    assert it.one.pid is None


async def test_a_bug_ends_the_watch(plan, supervise, until):
    plan("train")
    it = supervise()
    await it.begin()
    it.on_report = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(it.one.watch(), 20)
    await it.one.stop()


async def test_a_learner_that_doesnt_end_is_killed(plan, supervise, until, monkeypatch):
    monkeypatch.setattr(supervisor_module, "END_TIMEOUT_S", 0.2)
    plan("train")
    it = supervise()
    await it.begin()
    await until(lambda: it.one.totals.updates >= 1)
    pid = it.one.pid
    os.kill(pid, signal.SIGSTOP)
    await it.one.stop()
    assert it.one.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_the_window_may_change(supervise):
    it = supervise()
    it.one.returns.extend([1.0, 2.0, 3.0, 4.0, 5.0])
    it.one.set_window(2)
    assert list(it.one.returns) == [4.0, 5.0]
    it.one.set_window(3)
    it.one.returns.extend([6.0, 7.0])
    assert list(it.one.returns) == [5.0, 6.0, 7.0]


async def test_no_python_to_start(supervise, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(WorkerError, match="can't start the learner"):
        await LearnerLink.spawn(START)


async def test_a_child_that_ends_at_once(supervise, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/true")
    it = supervise()
    with pytest.raises(WorkerError, match="ended with code 0"):
        await it.one.build()


async def test_out_of_order_calls_are_told(supervise):
    with pytest.raises(WorkerError, match="isn't built yet"):
        await supervise().one.begin(restore=False)
