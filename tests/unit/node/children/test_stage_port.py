"""Orders to a learner that is a stage, their pipes, and news of it; a real link carries descriptors."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from p2pdrl.errors import ConfigError, WorkerError
from p2pdrl.node.children.learner_link import LearnerLink
from p2pdrl.node.children.stage_port import StagePort
from p2pdrl.pipeline.layers import Layer
from p2pdrl.pipeline.plan import StageNews
from p2pdrl.pipeline.trace import TraceSpan
from p2pdrl.strategies.pipeline.port import Measured
from p2pdrl.transport.pipe.ticket import Pipe, PipeTicket
from p2pdrl.workers.pipeline.protocol import Blocks, Finish, Measure, News, StartStage, Trace, Traced
from p2pdrl.workers.protocol import frame

from .orders import stage_order

TICKET = PipeTicket(None, b"early", hides=False)
LAYERS = (Layer("body.0", 0.001, 0.002, 64, 128),)


class Learner:
    """Remembers what it is told, and says it was sent when the test does."""

    def __init__(self) -> None:
        self.told: list = []
        self.fds: list[list[int]] = []
        self.sent = lambda: None
        self.withdrawn: list[type] = []

    def tell(self, message, things=(), sent=lambda: None) -> None:
        self.told.append(message)
        self.fds.append([thing.fd for thing in things])
        self.sent = sent

    def withdraw(self, kind) -> None:
        self.withdrawn.append(kind)


@pytest.fixture
def pipes():
    """Makes pipes; each has its peer's socket and whether it counts no more."""
    socks = []

    class Made(Pipe):
        closed = 0

        def __init__(self) -> None:
            ours, self.far = socket.socketpair()
            self.far.settimeout(5)
            socks.extend([ours, self.far])
            super().__init__(ours, "b" * 32, b"", TICKET, self._count)

        def _count(self) -> None:
            self.closed += 1

    yield Made
    for sock in socks:
        sock.close()


@pytest.fixture
def learner() -> Learner:
    return Learner()


@pytest.fixture
def port(learner) -> StagePort:
    return StagePort(lambda: learner)


async def test_an_order_goes_with_its_pipes_which_are_the_learners_then(port, learner, pipes):
    up, down = pipes(), pipes()
    fds = [down.fd, up.fd]
    port.work(stage_order(), {"next": down, "previous": up})
    assert learner.told == [StartStage(stage_order(), (("next", TICKET), ("previous", TICKET)))]
    assert learner.fds == [fds]
    assert (up.fd, down.fd) == (fds[1], fds[0])  # until they were sent
    learner.sent()
    assert (up.fd, down.fd) == (-1, -1)
    assert (up.closed, down.closed) == (0, 0)  # they still count
    port.heard(News(StageNews(1, "ready")))
    port.heard(News(StageNews(1, "over", policy_version=7)))
    assert [(await port.news()).what for _ in range(2)] == ["ready", "over"]
    assert (up.closed, down.closed) == (1, 1)
    assert port.order is None


async def test_another_order_closes_the_pipes_of_the_one_before_even_if_that_was_never_sent(
    port, learner, pipes
):
    first, second = pipes(), pipes()
    port.work(stage_order(1), {"next": first})
    port.work(stage_order(2), {"next": second})
    assert (first.fd, first.closed, second.closed) == (-1, 1, 0)
    port.heard(News(StageNews(1, "broken")))  # was on its way
    port.heard(News(StageNews(2, "ready")))
    assert (await port.news()).generation == 2
    assert second.closed == 0
    port.heard(News(StageNews(2, "broken", "next", "it is gone")))
    news = await port.news()
    assert (news.side, second.closed) == ("next", 1)
    port.heard(News(StageNews(2, "broken")))  # once is enough
    await nothing(port)


async def test_a_learner_that_dies_breaks_its_generation_once(port, learner, pipes):
    pipe = pipes()
    port.work(stage_order(3), {"next": pipe})
    port.died("its learner died")
    assert await port.news() == StageNews(3, "broken", why="its learner died")
    assert pipe.closed == 1
    port.died("its learner died")
    await nothing(port)


async def test_an_order_for_a_learner_that_is_down_is_broken_at_once(pipes):
    port, pipe = StagePort(lambda: None), pipes()
    port.work(stage_order(4), {"previous": pipe})
    assert (await port.news()).what == "broken"
    assert (pipe.fd, pipe.closed) == (-1, 1)
    port.finish(4)
    with pytest.raises(WorkerError, match="down"):
        await port.measure(4, deadline_s=1)


async def test_another_mode_drops_orders_and_news(port, learner, pipes):
    pipe = pipes()
    port.work(stage_order(5), {"next": pipe})
    port.finish(5)
    assert learner.told[-1] == Finish(5)
    port.heard(News(StageNews(5, "ready")))
    port.close()
    assert learner.withdrawn == [StartStage, Finish]
    assert pipe.closed == 1
    port.heard(News(StageNews(5, "over")))
    await nothing(port)


async def test_blocks_are_measured_one_number_after_the_other(port, learner):
    one = asyncio.create_task(port.measure(4, deadline_s=5))
    two = asyncio.create_task(port.measure(8, deadline_s=5))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert learner.told == [Measure(4)]
    port.heard(Blocks(2, LAYERS, "cpu"))  # of somebody who gave up
    port.heard(Blocks(4, LAYERS, "cuda:0", usable_bytes=1000, gpu="G1"))
    assert await one == Measured(LAYERS, "cuda:0", 1000, "G1")
    await asyncio.sleep(0)
    assert learner.told == [Measure(4), Measure(8)]
    port.heard(Blocks(8, (), "cpu", "the policy has one block"))
    with pytest.raises(ConfigError, match="one block"):
        await two


@pytest.mark.looptime
async def test_a_measurement_has_a_deadline_and_ends_with_the_learner(port, learner):
    with pytest.raises(WorkerError, match="within 2 s"):
        await port.measure(4, deadline_s=2)
    port.heard(Blocks(4, LAYERS, "cpu"))
    waiting = asyncio.create_task(port.measure(4, deadline_s=2))
    await asyncio.sleep(0.1)
    port.died("its learner died")
    with pytest.raises(WorkerError, match="died"):
        await waiting


@pytest.mark.looptime
async def test_what_a_stage_did_is_told_in_the_machines_time(port, learner):
    one = asyncio.create_task(port.trace(2.0, deadline_s=5))
    two = asyncio.create_task(port.trace(3.0, deadline_s=5))
    await asyncio.sleep(0.1)
    assert learner.told == [Trace(1, 2.0), Trace(2, 3.0)]
    port.heard(Traced(2, 10.0, 110.0, (TraceSpan("forward", 7.0, 8.0, 1, 2, 3),)))
    assert await two == [TraceSpan("forward", 107.0, 108.0, 1, 2, 3)]
    port.heard(Traced(2, 10.0, 110.0))  # nobody asks any more
    with pytest.raises(WorkerError, match="within 5 s"):
        await one
    three = asyncio.create_task(port.trace(2.0, deadline_s=5))
    await asyncio.sleep(0.1)
    port.died("its learner died")
    with pytest.raises(WorkerError, match="died"):
        await three


async def test_whether_an_order_is_unanswered(port):
    assert not port.unanswered
    port.work(stage_order(1), {})
    assert port.unanswered
    port.heard(News(StageNews(1, "ready")))
    assert not port.unanswered
    port.work(stage_order(2), {})
    port.heard(News(StageNews(1, "copied")))  # of the one before
    assert port.unanswered
    port.heard(News(StageNews(2, "meeting", port=4711)))
    assert port.unanswered  # the others may never come
    port.heard(News(StageNews(2, "broken")))
    assert not port.unanswered
    port.work(stage_order(3), {})
    port.close()
    assert not port.unanswered


async def nothing(port) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(port.news(), 0)


# The real link

HOLDS = """
import socket, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with socket.socket(fileno=int(given["--fd"])) as sock:
    mine = []
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 65536, 4)
        for fd in fds:
            mine.append(socket.socket(fileno=fd))
            mine[-1].send(b"mine")
        if not data:
            sys.exit()
"""


async def test_a_pipe_that_was_handed_over_ends_with_the_learner(tmp_path, pipes, until):
    (tmp_path / "holds.py").write_text(HOLDS)
    link = LearnerLink(*await LearnerLink.launch("holds", {}, os.environ | {"PYTHONPATH": str(tmp_path)}))
    talking = asyncio.create_task(link.converse(lambda _: None))
    try:
        port, down, up = StagePort(lambda: link), pipes(), pipes()
        port.work(stage_order(), {"next": down, "previous": up})
        await until(lambda: down.fd == up.fd == -1)
        for pipe in (down, up):
            assert await asyncio.to_thread(pipe.far.recv, 4) == b"mine"
    finally:
        await link.kill()
        await talking
    assert down.far.recv(1) == b""


async def test_a_later_order_goes_after_what_was_said_meanwhile(tmp_path, until):
    (tmp_path / "writes.py").write_text(WRITES)
    said = tmp_path / "said"
    link = LearnerLink(
        *await LearnerLink.launch("writes", {"--to": said}, os.environ | {"PYTHONPATH": str(tmp_path)})
    )
    link.tell(StartStage(stage_order(1)))
    link.tell(Finish(1))
    link.tell(StartStage(stage_order(2)))
    link.tell(Measure(4))
    link.withdraw(Measure)
    talking = asyncio.create_task(link.converse(lambda _: None))
    try:
        await until(lambda: len(frames(said)) == 2)
        assert frames(said) == [frame(Finish(1)), frame(StartStage(stage_order(2)))]
    finally:
        await link.kill()
        await talking


WRITES = """
import os, socket, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with socket.socket(fileno=int(given["--fd"])) as sock, open(given["--to"], "wb", buffering=0) as out:
    while data := sock.recv(65536):
        out.write(data)
"""


def frames(said: Path) -> list[bytes]:
    """What the child has written, cut into frames; the last one may be incomplete."""
    data, found = said.read_bytes() if said.exists() else b"", []
    while data:
        end = 4 + int.from_bytes(data[:4], "little")
        found.append(data[:end])
        data = data[end:]
    return found
