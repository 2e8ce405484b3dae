"""The group process' loop over a real socket pair. Real groups meet in ``test_group_process`` of the node."""

from __future__ import annotations

import socket
import threading

import pytest
import torch

from p2pdrl.errors import WorkerError
from p2pdrl.workers.protocol import FrameBuffer
from p2pdrl.workers.torch_group.process import TorchGroup, serve
from p2pdrl.workers.torch_group.protocol import (
    Broken,
    GroupReduced,
    Host,
    Hosting,
    Joined,
    JoinGroup,
    Ready,
    Reduce,
    decode_from_group,
    frame,
)
from p2pdrl.workers.torch_group.rendezvous import cuda_device, local_address

REDUCE = Reduce(
    number=1, weight=1.0, policy_version=2, learning_rate=0.5, max_abs=1e6, bf16=False, spread=True
)
JOIN = JoinGroup(rank=1, size=2, host="127.0.0.1", port=4711, timeout_s=1.0)


class FakeGroup:
    """Does what it is told to."""

    def __init__(self) -> None:
        self.left = 0
        self.error: Exception | None = None

    def host(self, order):
        assert order.others
        return Hosting(4711)

    def join(self, order):
        assert order.port == 4711
        return Joined("gloo")

    def reduce(self, order):
        if self.error is not None:
            raise self.error
        return GroupReduced((), 0.0, sound=True)

    def leave(self):
        self.left += 1


class Daemon:
    """The other end."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self._frames, self._bodies = sock, FrameBuffer(), []

    def ask(self, *orders):
        self.sock.sendall(b"".join(frame(order) for order in orders))
        return [self.hear() for _ in orders]

    def hear(self):
        while not self._bodies:
            self._bodies += self._frames.feed(self.sock.recv(1 << 16))
        return decode_from_group(self._bodies.pop(0))


@pytest.fixture
def served():
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    group = FakeGroup()
    thread = threading.Thread(target=serve, args=(theirs, group, "cpu"))
    thread.start()
    yield Daemon(ours), group
    ours.close()
    thread.join(10)
    assert not thread.is_alive()
    theirs.close()


def test_each_order_is_answered_once_and_in_order(served):
    daemon, group = served
    assert daemon.hear() == Ready("cpu")
    answers = daemon.ask(Host(("127.0.0.1",), 1.0), JOIN, REDUCE)
    assert answers == [Hosting(4711), Joined("gloo"), GroupReduced((), 0.0, sound=True)]
    assert group.left == 0


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("[x.cc:5] Connection closed by peer [127.0.0.1]:3. This is typically caused\n by"),
         "Connection closed by peer [127.0.0.1]:3"),
        (OSError(99, "no such address"), "[Errno 99] no such address"),
        (WorkerError("not all members do round 1"), "not all members do round 1"),
        (ValueError(), "ValueError"),
        (RuntimeError("long " * 1000), ("long " * 1000)[:300]),
    ],
)  # fmt: skip
def test_a_failure_is_told_in_brief_and_the_group_is_left(served, error, told):
    daemon, group = served
    daemon.hear()
    group.error = error
    assert daemon.ask(REDUCE) == [Broken(told)]
    assert group.left == 1
    group.error = None
    assert daemon.ask(JOIN) == [Joined("gloo")]


def test_orders_out_of_turn_are_refused():
    group = TorchGroup(torch.zeros(3), torch.zeros(3), None)
    with pytest.raises(WorkerError, match="joined"):
        group.reduce(REDUCE)
    with pytest.raises(WorkerError, match="store"):
        group.join(JoinGroup(rank=0, size=2, host="127.0.0.1", port=4711, timeout_s=1.0))
    group.leave()


def test_who_is_on_this_machine_is_reached_from_loopback():
    assert local_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(OSError, match=r"known|resolution"):
        local_address("no such host")


def test_no_gpu_is_taken_where_the_learner_may_not():
    assert cuda_device("cpu") is None
    if not torch.cuda.is_available():
        assert cuda_device("auto") is None
