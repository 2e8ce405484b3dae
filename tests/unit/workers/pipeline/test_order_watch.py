from __future__ import annotations

import threading

import pytest

from p2pdrl.config.learner_mode import FREE
from p2pdrl.errors import WorkerError
from p2pdrl.workers.pipeline.protocol import Finish, Measure, StartStage
from p2pdrl.workers.pipeline.torch_stages import OrderWatch
from p2pdrl.workers.protocol import LearnerPace, Progress, Stop, WorkMode

from ..stage_learners import orders

NEWS = (LearnerPace(paused=False, max_updates_per_s=0.0), Progress(0.5), Finish(1))


@pytest.fixture
def watch():
    made = []

    def make(ahead, meeting):
        ended = threading.Event()
        made.append(OrderWatch(ahead, ended.set, every_s=0.002))
        made[-1].meeting = meeting
        return made[-1], ended

    yield make
    for each in made:
        each.close()
        each.close()


@pytest.mark.parametrize("order", [StartStage(orders(2, 1)[0]), WorkMode(FREE, 1), Stop()])
@pytest.mark.parametrize("meeting", [False, True])
def test_orders_end_waits(watch, order, meeting):
    said = list(NEWS)
    each, ended = watch(lambda: said, meeting)
    assert not each.wanted
    said.append(order)
    assert ended.wait(10.0)


def test_who_is_asked_for_costs_while_others_are_awaited_is_wanted(watch):
    each, _ = watch(lambda: [*NEWS, Measure(4)], False)
    assert not each.wanted
    each.meeting = True
    assert each.wanted


def test_a_daemon_that_is_gone_ends_waits(watch):
    def ahead():
        raise WorkerError("the daemon is gone")

    assert watch(ahead, False)[1].wait(10.0)


def test_who_never_gets_to_an_end_is_not_waited_for():
    going, stuck = threading.Event(), threading.Event()

    def end():
        stuck.set()
        going.wait(10.0)

    each = OrderWatch(lambda: [Stop()], end, every_s=0.002)
    assert stuck.wait(10.0)
    assert not each.close(0.01)
    going.set()
    assert each.close()


def test_nothing_is_ended_after_the_end(watch):
    said = []
    each, ended = watch(lambda: said, False)
    each.close()
    said.append(Stop())
    assert not ended.wait(0.02)
