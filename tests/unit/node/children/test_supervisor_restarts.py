"""Learners that die, and those that replace them."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
import time

import numpy as np
import pytest

from p2pdrl.config.node import LearnerConfig
from p2pdrl.errors import WorkerError
from p2pdrl.node.children import child_process as link_module
from p2pdrl.node.children import hang_watchdog
from p2pdrl.node.children import supervisor as supervisor_module
from p2pdrl.node.children.learner_link import LearnerLink
from p2pdrl.pipeline.plan import StageNews
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.workers.pipeline.protocol import News
from p2pdrl.workers.protocol import LearnerPace, Progress

from ..supervised import START
from .orders import stage_order

ORDER = stage_order(7)


async def test_one_that_dies_is_replaced_from_the_board(plan, supervise, until):
    plan("die:30", "exit:20", "train")
    it = supervise()
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


async def test_a_delta_posted_while_it_is_down_isnt_lost(plan, supervise, until):
    plan("train")
    it = supervise(LearnerConfig(restart_min_s=0.2))
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


async def test_a_paused_successor_stays_paused(plan, supervise, until):
    plan("train")
    it = supervise()
    it.one.tell(LearnerPace(paused=True, max_updates_per_s=0.0))
    await it.begin()
    os.kill(it.one.pid, signal.SIGKILL)
    await until(lambda: it.one.restarts == 1)
    heard = len(it.reports)
    await until(lambda: len(it.reports) > heard)
    await asyncio.sleep(0.05)
    assert it.one.totals.updates <= 3


@pytest.mark.slow
async def test_a_successor_that_cant_be_built_is_tried_again(plan, supervise, until):
    plan("die:2", "crash", "train")
    it = supervise()
    await it.begin()
    await until(lambda: it.one.restarts == 1)
    assert it.told("learner-failed") == 1
    assert it.one.failures == 2


async def test_a_successor_that_turns_out_bad_is_tried_again(plan, supervise, until):
    plan("die:2", "usage", "train")
    it = supervise()
    await it.begin()
    await until(lambda: it.one.restarts == 1)
    (failed,) = [event for event in it.events.since(0) if event["kind"] == "learner-failed"]
    assert "no such environment; next try in 0.02 s" in failed["text"]


@pytest.mark.slow
async def test_a_successor_of_another_layout_is_tried_again(plan, supervise, until):
    plan("die:50", "train")
    it = supervise()
    await it.begin()
    spec, it.one.spec = it.one.spec, BoardSpec(Layout((TensorEntry("other", (4,)),)))
    await until(lambda: it.told("learner-failed") >= 1)
    it.one.spec = spec
    await until(lambda: it.one.restarts == 1)


async def test_without_file_descriptors_it_is_tried_again(plan, supervise, until, monkeypatch):
    plan("die:2", "train")
    it = supervise()
    await it.begin()

    def exhausted(*_args):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(link_module.socket, "socketpair", exhausted)
        with pytest.raises(WorkerError, match="Too many open files"):
            await LearnerLink.spawn(START)
        await until(lambda: it.told("learner-failed") >= 1)
    await until(lambda: it.one.restarts == 1)


async def test_stopping_doesnt_wait_for_the_next_try(plan, supervise, until):
    plan("die:2")
    it = supervise(LearnerConfig(restart_min_s=30.0))
    await it.begin()
    await until(lambda: it.one.down_s is not None)
    began_s = time.monotonic()
    await it.one.stop()
    assert time.monotonic() - began_s < 1.0
    assert it.told("learner-restarted") == 0


async def test_stopping_ends_a_successor_that_builds(plan, supervise, until, monkeypatch):
    monkeypatch.setattr(supervisor_module, "END_TIMEOUT_S", 0.3)
    plan("die:2", "mute")
    it = supervise()
    await it.begin()
    await until(lambda: it.told("learner-died") == 1 and it.one.pid is not None)
    await it.one.stop()
    assert it.told("learner-failed") == 0
    assert it.one.pid is None


@pytest.mark.slow
async def test_one_that_hangs_instead_of_becoming_a_stage_is_replaced(plan, supervise, until, monkeypatch):
    """A frozen process stands for one that waits in a library without end."""
    monkeypatch.setattr(hang_watchdog, "HANGS_S", 0.4)
    plan("train")
    it = supervise()
    await it.begin()
    await until(lambda: it.one.totals.updates >= 1)
    os.kill(it.one.pid, signal.SIGSTOP)
    await asyncio.sleep(0.6)
    assert it.told("learner-hangs") == 0  # nobody waits for it
    it.one.stages.work(ORDER, {})
    await until(lambda: it.one.restarts == 1)
    assert it.told("learner-hangs") == 1
    assert (await it.one.stages.news()).what == "broken"


async def test_a_head_that_freezes_at_work_is_replaced(plan, supervise, until, monkeypatch):
    monkeypatch.setattr(hang_watchdog, "HANGS_S", 0.4)
    monkeypatch.setattr(hang_watchdog, "TIMES", 1.0)  # a busy machine's first update is long
    plan("train")
    it = supervise(LearnerConfig(restart_min_s=0.01, restart_max_s=0.05, stopped_deadline_s=0))
    await it.begin()
    await until(lambda: it.one.totals.updates >= 1)
    os.kill(it.one.pid, signal.SIGSTOP)
    it.one.stages.work(ORDER, {})
    it.one.stages.heard(News(StageNews(7, "ready")))  # as if it had said so before
    await until(lambda: it.one.restarts == 1)
    assert it.told("learner-hangs") == 1
    assert [(await it.one.stages.news()).what for _ in range(2)] == ["ready", "broken"]
    await until(lambda: it.one.metrics.get("life") == 1.0)


# --- that stand still outside a pipeline --------------------------------------------------------

IMPATIENT = LearnerConfig(restart_min_s=0.01, restart_max_s=0.05, stopped_deadline_s=0.6, hung_deadline_s=2.0)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("stop:5", "had been stopped"),
        pytest.param("hang:5", "had given no sign of life", marks=pytest.mark.slow),
    ],
)
async def test_one_that_stands_still_is_told_and_replaced(plan, supervise, until, word, why):
    plan(word, "train")
    it = supervise(IMPATIENT)
    await it.begin()
    await until(lambda: it.one.restarts == 1)
    (death,) = [event for event in it.events.since(0) if event["kind"] == "learner-died"]
    assert why in death["text"]
    assert it.told("learner-stopped") == int(word == "stop:5")
    await until(lambda: it.one.metrics.get("life") == 1.0)
    assert it.one.metrics["total"] > 4  # from the board
    assert it.one.stopped_s == 0.0


@pytest.mark.slow
async def test_one_that_is_stopped_and_goes_on_is_left_alone(plan, supervise, until):
    plan("train")
    it = supervise(LearnerConfig(stopped_deadline_s=2.0))
    await it.begin()
    await until(lambda: it.one.totals.updates >= 1)
    os.kill(it.one.pid, signal.SIGSTOP)
    await until(lambda: it.told("learner-stopped") == 1)
    assert it.one.stopped_s > 0.0
    os.kill(it.one.pid, signal.SIGCONT)
    before = it.one.totals.updates
    await until(lambda: it.one.totals.updates > before and it.one.stopped_s == 0.0)
    assert it.told("learner-died") == 0


@pytest.mark.slow
async def test_one_in_a_slow_step_is_left_alone(plan, supervise, until):
    plan("slow:5")
    it = supervise(IMPATIENT)
    await it.begin()
    await until(lambda: it.one.totals.updates > 5)
    assert it.told("learner-died") == 0


@pytest.mark.slow
async def test_one_that_is_stopped_or_killed_while_it_is_first_built_is_replaced(plan, supervise):
    plan("stop", "train")
    it = supervise(IMPATIENT)
    await it.begin()
    assert it.told("learner-died") == 1


async def test_one_that_dies_between_being_built_and_let_go_is_replaced(plan, supervise, until):
    plan("train")
    it = supervise()
    await it.one.build()
    os.kill(it.one.pid, signal.SIGKILL)
    await asyncio.sleep(0.1)
    await it.one.begin(restore=False)
    await until(lambda: it.one.totals.updates > 3)
    assert it.one.restarts == 1


@pytest.mark.slow
async def test_a_slow_start_is_waited_for_and_told_at_growing_intervals(plan, supervise, until, monkeypatch):
    monkeypatch.setattr(supervisor_module, "STARTING_TOLD_S", 0.2)
    plan("late")
    it = supervise(IMPATIENT)
    building = asyncio.create_task(it.begin())
    await until(lambda: it.told("learner-starting") == 1)
    assert it.one.starting_s > 0.0
    await building
    assert it.one.starting_s is None
    (first, *more) = [event for event in it.events.since(0) if event["kind"] == "learner-starting"]
    assert "is starting for" in first["text"]
    assert 1 <= len(more) <= 4
    assert it.told("learner-died") == 0


# --- that die of an error -----------------------------------------------------------------------


@pytest.mark.slow
async def test_the_error_that_ends_one_is_told_in_one_record(plan, supervise, until):
    plan("raise:5", "train")
    it = supervise()
    await it.begin()
    await until(lambda: it.one.restarts == 1)
    (death,) = [event for event in it.events.since(0) if event["kind"] == "learner-died"]
    assert "died of ValueError: the environment fell over" in death["text"]
    assert "signal 9" not in death["text"]
    error = death["error"]
    assert (error["type"], error["message"]) == ("ValueError", "the environment fell over")
    assert "fake_learner.py" in error["where"]
    assert error["traceback"].endswith("ValueError: the environment fell over")
    assert 'raise ValueError("the environment fell over")' in error["traceback"]
    assert it.one.restart_policy.last_death.document == error


@pytest.mark.parametrize(
    "words", [("raise:5",), pytest.param(("exit:5",), marks=pytest.mark.slow), ("die:5", "raise")]
)
async def test_learners_that_end_the_same_way_end_the_watch(plan, supervise, words):
    plan(*words)
    it = supervise(LearnerConfig(restart_min_s=0.01, restart_max_s=0.05, give_up_after=3))
    await it.begin()
    with pytest.raises(WorkerError, match="3 times in a row") as caught:
        await asyncio.wait_for(it.one.watch(), 30)
    assert it.one.restart_policy.last_death.how in str(caught.value)
    assert it.one.pid is None
    await it.one.stop()
