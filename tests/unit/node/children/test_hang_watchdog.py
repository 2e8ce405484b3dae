"""Learners that say nothing: which of them hang, by a clock of the test's."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from p2pdrl.clock import LoopClock, ManualClock
from p2pdrl.config.node import LearnerConfig
from p2pdrl.node.children import hang_watchdog
from p2pdrl.node.children.hang_watchdog import (
    HANGS_S,
    LOOKS,
    Activity,
    HangWatchdog,
    Standstill,
    activity_of,
    kill_if_it_hangs,
)
from p2pdrl.pipeline.plan import StageNews, StageOrder
from p2pdrl.workers.pipeline.protocol import News
from p2pdrl.workers.protocol import Report

from .orders import stage_order

LOOK_S = HANGS_S / LOOKS
HEAD = stage_order()
SECOND = stage_order(rank=1)
DAY_S = 86400.0


def report(updates: int) -> Report:
    return Report(
        policy_version=updates, updates=updates, env_steps=0, episodes=0, returns=[], metrics={}, moments={}
    )


class Watched:
    """A learner that is watched as `kill_if_it_hangs` does."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.told = SimpleNamespace(order=None, unanswered=False)
        self.watch = HangWatchdog(self.told, self.clock)
        self.next_look_s = 0.0
        self.updates = 0
        self.hung_s = 0.0
        """Of the first look that found it hanging."""

    def silence(self, seconds: float) -> float | None:
        """Let it say nothing; return after how long it was found to hang, None if it wasn't."""
        began_s = self.clock.monotonic()
        until_s = began_s + seconds
        while self.next_look_s <= until_s:
            self.clock.advance(self.next_look_s - self.clock.monotonic())
            self.next_look_s += LOOK_S
            if hung_s := self.watch.look():
                self.hung_s = self.hung_s or hung_s
                return self.clock.monotonic() - began_s
        self.clock.advance(until_s - self.clock.monotonic())
        return None

    def frozen(self, seconds: float) -> None:
        """Let the daemon be frozen; it looks as soon as it runs again."""
        self.clock.advance(seconds)
        self.next_look_s = self.clock.monotonic()

    def order(self, order: StageOrder, *, answered_after_s: float | None = None) -> None:
        self.told.order, self.told.unanswered = order, True
        if answered_after_s is not None:
            assert self.silence(answered_after_s) is None
            self.watch.heard(News(StageNews(order.generation, "ready")))
            self.told.unanswered = False

    def update(self, seconds: float) -> float | None:
        """Make an update of so many seconds and report it; return what `silence` does."""
        hung_after_s = self.silence(seconds)
        self.updates += 1
        self.watch.heard(report(self.updates))
        return hung_after_s


@pytest.fixture
def learner() -> Watched:
    return Watched()


@pytest.fixture
def head(learner: Watched) -> Watched:
    """It has been at work for a while, with updates of a second."""
    learner.order(HEAD, answered_after_s=5.0)
    for _ in range(100):
        learner.update(1.0)
    return learner


# --- ordered, and no answer ----------------------------------------------------------------------


@pytest.mark.parametrize("order", [HEAD, SECOND])
def test_who_leaves_its_order_unanswered_hangs(learner, order):
    learner.order(order)
    assert HANGS_S <= learner.silence(DAY_S) <= HANGS_S + LOOK_S
    assert learner.hung_s >= HANGS_S


def test_who_says_something_meanwhile_doesnt(learner):
    learner.order(HEAD)
    for _ in range(10):
        assert learner.silence(0.9 * HANGS_S) is None
        learner.watch.heard(report(0))


def test_who_has_no_order_may_say_nothing(learner):
    for _ in range(10):
        learner.update(1.0)
    assert learner.silence(DAY_S) is None


def test_silence_before_the_order_doesnt_count(learner):
    assert learner.silence(DAY_S) is None
    learner.order(HEAD)
    assert learner.silence(HANGS_S - LOOK_S) is None
    learner.order(stage_order(2))
    assert HANGS_S <= learner.silence(DAY_S) <= HANGS_S + 2 * LOOK_S


def test_who_is_ordered_in_a_long_update_may_end_it_first(learner):
    for _ in range(3):
        assert learner.update(60.0) is None
    learner.order(HEAD)
    assert learner.silence(60.0 + 0.5 * HANGS_S) is None
    assert learner.silence(DAY_S) <= 0.5 * HANGS_S + 2 * LOOK_S


# --- at work -------------------------------------------------------------------------------------


def test_a_head_that_freezes_at_work_hangs(head):
    assert HANGS_S <= head.silence(DAY_S) <= HANGS_S + LOOK_S


def test_a_long_first_update_isnt_judged(learner):
    learner.order(HEAD, answered_after_s=5.0)
    assert learner.update(DAY_S) is None


def test_a_head_that_made_updates_under_an_earlier_order_is_judged(head):
    head.told.order = None
    head.order(stage_order(2), answered_after_s=20.0)
    assert HANGS_S <= head.silence(DAY_S) <= HANGS_S + LOOK_S


def test_long_but_regular_updates_arent_judged(learner):
    learner.order(HEAD, answered_after_s=5.0)
    for _ in range(20):
        assert learner.update(60.0) is None
    for seconds in (90.0, 300.0, 599.0):
        assert learner.update(seconds) is None
    assert 5990.0 <= learner.silence(DAY_S) <= 5990.0 + LOOK_S


@pytest.mark.parametrize("updates_s", [10.0, 18.0, 37.0, 60.0])
def test_the_bound_is_ten_times_the_longest_silence(learner, updates_s):
    learner.order(HEAD, answered_after_s=5.0)
    for _ in range(10):
        learner.update(updates_s)
        learner.update(1.0)
    bound_s = max(HANGS_S, 10 * updates_s)
    assert bound_s <= learner.silence(DAY_S) <= bound_s + LOOK_S


def test_the_time_to_take_a_rank_isnt_silence_at_work(learner):
    learner.order(HEAD, answered_after_s=60.0)
    learner.update(1.0)
    assert learner.silence(DAY_S) <= HANGS_S + LOOK_S


def test_other_ranks_arent_judged(head):
    head.order(SECOND, answered_after_s=1.0)
    assert head.silence(DAY_S) is None


# --- whoever watches was frozen ------------------------------------------------------------------


@pytest.mark.parametrize("silent_s", [0.0, 30.0, 74.0])
@pytest.mark.parametrize("frozen_s", [40.0, DAY_S])
def test_a_frozen_daemon_doesnt_judge_a_head(head, silent_s, frozen_s):
    for _ in range(5):
        assert head.silence(silent_s) is None
        head.frozen(frozen_s)
        assert head.silence(0.01) is None  # looks before it reads what was said meanwhile
        head.update(0.1)
    assert head.silence(DAY_S) is not None


@pytest.mark.parametrize("silent_s", [0.0, 30.0, 74.0])
@pytest.mark.parametrize("frozen_s", [40.0, DAY_S])
def test_a_frozen_daemon_doesnt_judge_who_is_ordered(learner, silent_s, frozen_s):
    for _ in range(5):
        learner.order(msgspec.structs.replace(HEAD))
        assert learner.silence(silent_s) is None
        learner.frozen(frozen_s)
        assert learner.silence(0.01) is None
        learner.watch.heard(report(0))
    assert learner.silence(DAY_S) is not None


def test_a_freeze_of_both_is_no_silence(head):
    """A learner that was frozen with the daemon has its time from then on."""
    for _ in range(2):
        head.frozen(DAY_S)
        assert head.silence(0.5 * LOOK_S) is None
    assert head.silence(HANGS_S - 3 * LOOK_S) is None
    head.update(0.0)
    # nor is it how long updates take
    assert head.silence(DAY_S) <= 10 * (HANGS_S + LOOK_S)


def test_who_hangs_is_found_in_spite_of_a_freeze(head):
    head.silence(30.0)
    head.frozen(DAY_S)
    assert head.silence(DAY_S) <= HANGS_S


# --- the one that is killed ----------------------------------------------------------------------


@pytest.fixture
def killed(monkeypatch) -> list:
    made: list = []
    monkeypatch.setattr(hang_watchdog.os, "kill", lambda *arguments: made.append(arguments))
    return made


@pytest.mark.looptime
async def test_who_hangs_is_killed_once(killed, events):
    told = SimpleNamespace(order=None, unanswered=False)
    watch = HangWatchdog(told, LoopClock())
    heard: list = []
    note = watch.noting(heard.append)
    killing = asyncio.create_task(kill_if_it_hangs(4711, watch, events))
    told.order = HEAD
    for number in range(200):
        await asyncio.sleep(1)
        note(report(number))
    assert [message.updates for message in heard] == list(range(200))
    assert not killed
    began_s = asyncio.get_running_loop().time()
    async with asyncio.timeout(DAY_S):
        await killing
    assert HANGS_S <= asyncio.get_running_loop().time() - began_s <= HANGS_S + LOOK_S
    assert killed == [(4711, signal.SIGKILL)]
    (event,) = events.since(0)
    assert (event["kind"], event["level"]) == ("learner-hangs", "warning")


@pytest.mark.looptime
async def test_who_is_gone_already_cant_be_killed(events, monkeypatch):
    def gone(*_arguments):
        raise ProcessLookupError

    monkeypatch.setattr(hang_watchdog.os, "kill", gone)
    await kill_if_it_hangs(
        4711, HangWatchdog(SimpleNamespace(order=HEAD, unanswered=True), LoopClock()), events
    )
    assert events.since(0)


# --- processes that stand still -------------------------------------------------------------------

ALL = LearnerConfig(stopped_deadline_s=15.0, hung_deadline_s=300.0)
RUNNING, SLEEPING, ON_DISK = psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING, psutil.STATUS_DISK_SLEEP
STOPPED, TRACED = psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP


class Process:
    """A process as the system sees it, and whoever looks at it."""

    def __init__(self, config: LearnerConfig = ALL) -> None:
        self.now_s = 0.0
        self.cpu_s = 0.0
        self.watch = Standstill(config, self.now_s)

    def spend(
        self, seconds: float, state: str, *, cpu: float = 0.0, beats: bool = False, gone: bool = False
    ) -> str | None:
        """Let time pass, with so much processor time a second; return the verdict, if there was one."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += self.watch.look_s
            self.cpu_s += cpu * self.watch.look_s
            if beats:
                self.watch.beat()
            if why := self.watch.look(self.now_s, lambda: None if gone else Activity(state, self.cpu_s)):
                return why
        return None


def test_one_that_is_stopped_is_found_in_time():
    process = Process()
    assert process.spend(60.0, SLEEPING, cpu=0.01, beats=True) is None
    assert "had been stopped for 1" in process.spend(DAY_S, STOPPED)
    assert 75.0 <= process.now_s <= 60.0 + 15.0 + 2 * process.watch.look_s


def test_one_that_hangs_is_found_in_time():
    process = Process()
    process.spend(60.0, RUNNING, cpu=1.0, beats=True)
    assert "no sign of life" in process.spend(DAY_S, SLEEPING)
    assert 360.0 <= process.now_s <= 360.0 + 3 * process.watch.look_s


@pytest.mark.parametrize(
    ("state", "life"),
    [
        (SLEEPING, {"beats": True}),  # a step that waits for something
        (RUNNING, {"cpu": 1.0}),  # a step that computes in C and lets no other thread run
        (SLEEPING, {"cpu": 0.01}),  # the same, or a process under it
        (RUNNING, {}),  # wants a processor and gets none
        (ON_DISK, {}),  # swaps
        (TRACED, {}),  # is held by a debugger
        (SLEEPING, {"gone": True}),
    ],
)
def test_others_dont_stand_still(state, life):
    process = Process()
    assert process.spend(DAY_S / 10, state, **life) is None
    assert process.watch.stopped_s == 0.0


def test_one_that_goes_on_in_time_is_left_alone():
    process = Process()
    for _ in range(20):
        assert process.spend(12.0, STOPPED) is None
        assert process.watch.stopped_s > 0.0
        assert process.spend(3.0, RUNNING, beats=True) is None
        assert process.watch.stopped_s == 0.0


def test_time_in_which_whoever_looks_was_frozen_doesnt_count():
    process = Process()
    for _ in range(20):
        assert process.spend(9.0, STOPPED) is None
        process.now_s += DAY_S
        assert process.spend(0.1, STOPPED) is None  # signs of life may have yet to be read
        assert process.spend(3.0, RUNNING, beats=True) is None


def test_nought_waits_for_ever():
    process = Process(LearnerConfig(stopped_deadline_s=0.0, hung_deadline_s=0.0))
    assert process.spend(DAY_S, STOPPED) is None
    assert process.watch.stopped_s > DAY_S / 2  # and is told all the same


def test_a_process_is_looked_at():
    mine = activity_of(os.getpid())
    assert mine.state in {RUNNING, SLEEPING}
    assert mine.cpu_s > 0.0
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert activity_of(child.pid).state == STOPPED
    finally:
        child.kill()
        child.communicate()
    assert activity_of(child.pid) is None
