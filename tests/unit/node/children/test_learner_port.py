"""The port over a supervisor with real child processes."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest

from p2pdrl.clock import SystemClock
from p2pdrl.config.learner_mode import FREE, LearnerMode
from p2pdrl.config.node import LearnerConfig
from p2pdrl.config.task import A2CConfig, PPOConfig
from p2pdrl.errors import WorkerError
from p2pdrl.node.children.supervisor import LearnerPort, LearnerSupervisor
from p2pdrl.strategies.protocol import LearnerRequest
from p2pdrl.workers.protocol import LearnerPace, Start

START = Start(b"{}", 0, "cpu", 1, False)


class Port(LearnerPort):
    """A port, and the supervisor behind it."""

    def __init__(self, events) -> None:
        self.supervisor = LearnerSupervisor(
            start=START,
            config=LearnerConfig(restart_min_s=0.01),
            window=4,
            clock=SystemClock(),
            events=events,
            on_report=lambda report, new: None,
        )
        self.fraction = 0.0
        super().__init__(self.supervisor, PPOConfig(), lambda: self.fraction)

    async def begin(self, learner_mode: LearnerMode) -> None:
        await self.supervisor.build()
        self.supervisor.work(learner_mode, 1)
        self.supervisor.tell(LearnerPace(paused=False, max_updates_per_s=0.0))
        await self.supervisor.begin(restore=False)

    async def post(self):
        return await asyncio.wait_for(self.next_request(), 20)

    def now(self) -> float:
        out = np.empty(4, np.float32)
        self.board.now(out)
        return float(out[0])


@pytest.fixture
async def port(events):
    made = Port(events)
    yield made
    await made.supervisor.stop()
    made.supervisor.close()


async def test_a_strategy_replaces_gradients(plan, port):
    plan("gradients")
    await port.begin(LearnerMode("gradients"))
    for number in range(1, 6):
        post = await port.post()
        assert (post.kind, post.samples, post.policy_version) == ("gradients", number, number - 1)
        assert post.vector.tolist() == [1.0] * 4
        assert port.now() == -10.0 * (number - 1)  # published: what the gradient was computed on
        post.vector[:] = 10.0
        port.answer(post, "replace")


async def test_a_strategy_serves_parameters(plan, port):
    plan("gradients")
    await port.begin(LearnerMode("gradients", steps=False))
    for number in range(1, 6):
        post = await port.post()
        port.board.post_set(np.full(4, float(number), np.float32), None, 10 * number)
        port.answer(post, "set")
        assert post.policy_version == 10 * (number - 1)
    await port.post()
    assert port.now() == 5.0


async def test_rounds_of_parameters(plan, port):
    plan("train")
    await port.begin(LearnerMode("parameters", every=2))
    for number in range(1, 6):
        post = await port.post()
        assert (post.kind, post.vector) == ("parameters", None)
        assert port.now() == (2.0 if number == 1 else 102.0)
        port.board.post_set(np.full(4, 100.0, np.float32), None, 100 * number)
        port.answer(post, "set")


async def test_a_live_learner_changes_its_mode(plan, port, until):
    plan("gradients")
    await port.begin(LearnerMode("gradients"))
    old = await port.post()
    pid = port.supervisor.pid
    port.supervisor.work(FREE, 2)
    updates = port.supervisor.totals.updates
    await until(lambda: port.supervisor.totals.updates > updates + 5)
    port.supervisor.work(LearnerMode("gradients", ahead=1), 3)
    posts = [await port.post() for _ in range(2)]
    assert posts[0].vector.ctypes.data != posts[1].vector.ctypes.data
    port.answer(old, "replace")
    port.answer(posts[0], "none")
    await port.post()
    port.supervisor.work(LearnerMode("parameters"), 4)
    assert (await port.post()).kind == "parameters"
    assert (port.supervisor.pid, port.supervisor.restarts) == (pid, 0)


async def test_the_successor_of_one_that_died_waiting_works_the_same_way(plan, port, until):
    plan("train")
    await port.begin(LearnerMode("parameters", every=3))
    old = await port.post()
    os.kill(port.supervisor.pid, signal.SIGKILL)
    await until(lambda: port.supervisor.restarts == 1)
    new = await port.post()
    assert new.number <= old.number  # by which strategies see that it is another learner
    port.answer(old, "none")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(port.next_request(), 0.1)
    port.answer(new, "none")
    await port.post()
    assert port.now() == 9.0


async def test_a_paused_learner_that_waits_can_be_stopped(plan, port):
    plan("train")
    await port.begin(LearnerMode("parameters"))
    await port.post()
    port.supervisor.tell(LearnerPace(paused=True, max_updates_per_s=0.0))
    async with asyncio.timeout(2.0):
        await port.supervisor.stop()
    assert port.supervisor.totals.updates == 1


async def test_the_learning_rate_is_annealed(port):
    assert port.learning_rate == PPOConfig().learning_rate
    for algorithm in (
        PPOConfig(learning_rate=0.5, anneal="linear"),
        A2CConfig(learning_rate=0.5, anneal="linear"),
    ):
        rates = [
            LearnerPort(port.supervisor, algorithm, lambda fraction=fraction: fraction).learning_rate
            for fraction in (0.0, 0.25, 1.0, 7.0)
        ]
        assert rates == [0.5, 0.375, 0.0, 0.0]


@pytest.mark.parametrize(
    ("said", "told"), [(0.2, 0.2), (1e6, 0.5), (-1.0, 0.0), (float("nan"), 0.5), (0.0, 0.0), (None, None)]
)
async def test_what_peers_say_never_raises_the_learning_rate(port, monkeypatch, said, told):
    answers = []
    supervisor = port.supervisor
    port = LearnerPort(supervisor, PPOConfig(learning_rate=0.5), lambda: 0.0)
    monkeypatch.setattr(supervisor, "answer", lambda *answer, **more: answers.append((*answer, more)))
    post = LearnerRequest(1, "gradients", 0, 1, None)
    for end in (False, True):
        port.answer(post, "replace", said, end_update=end)
        assert answers.pop() == (post, "replace", told, {"end_update": end})


async def test_before_there_is_a_learner(port):
    with pytest.raises(WorkerError, match="isn't built"):
        _ = port.board
    with pytest.raises(WorkerError, match="isn't built"):
        port.supervisor.work(FREE, 1)
