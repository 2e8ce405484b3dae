"""The board between two real processes: torn reads, descriptors passed on, and kill -9."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from p2pdrl.tensors.board import BoardSpec, DaemonBoard
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.shared_memory import SharedRegion

SIZE = 20_000
SPEC = BoardSpec(Layout((TensorEntry("x", (SIZE,)),)))

# A learner on the board whose descriptor it is given; it says a word after each step, and reads commands.
CHILD = f"""
import socket, sys
import numpy as np
from p2pdrl.tensors.board import BoardSpec, LearnerBoard
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.shared_memory import SharedRegion

spec = BoardSpec(Layout((TensorEntry("x", ({SIZE},)),)))
how, fd = sys.argv[1], int(sys.argv[2])
if how == "send_fds":
    with socket.socket(fileno=fd) as channel:
        _, (fd,), _, _ = socket.recv_fds(channel, 1, 1)
learner = LearnerBoard(SharedRegion.attach(fd, spec.nbytes), spec)
x, _, version = learner.restore()
x = x.copy()
for line in sys.stdin:
    command, count = line.split()
    for _ in range(int(count)):
        if command in ("take", "turn"):
            taken = learner.take()
            if taken is not None:
                x += taken.vector
        if command == "update":
            x += 1
        if command in ("publish", "turn", "update"):
            version += 1
            learner.publish(x, None, version)
    print("done", flush=True)
"""


class Child:
    def __init__(self, region: SharedRegion, how: str = "pass_fds") -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX)
        with mine, theirs:
            fd = region.fd if how == "pass_fds" else theirs.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-c", CHILD, how, str(fd)],
                pass_fds=[fd],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            if how == "send_fds":
                socket.send_fds(mine, [b"x"], [region.fd])

    def start(self, command: str, count: int = 1) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command} {count}\n")
        self.process.stdin.flush()

    def finish(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "done\n"

    def do(self, command: str, count: int = 1) -> None:
        self.start(command, count)
        self.finish()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def daemon() -> Iterator[tuple[SharedRegion, DaemonBoard]]:
    region = SharedRegion.create(SPEC.nbytes, "two-processes")
    board = DaemonBoard(region, SPEC)
    board.seed(np.zeros(SIZE, np.float32), None, 0)
    yield region, board
    region.close()


def ones(value: float = 1.0) -> np.ndarray:
    return np.full(SIZE, value, np.float32)


def test_no_read_is_torn_while_another_process_publishes(daemon: tuple[SharedRegion, DaemonBoard]) -> None:
    region, board = daemon
    child, out = Child(region), np.empty(SIZE, np.float32)
    try:
        child.do("publish")
        child.start("update", 2000)
        while (snapshot := board.published(out)).policy_version < 2001:
            assert (out == out[0]).all()
            assert out[0] == max(snapshot.policy_version - 1, 0)
        child.finish()
        assert out[0] == 2000
    finally:
        child.kill()


@pytest.mark.parametrize("how", ["pass_fds", "send_fds"])
def test_deltas_posted_while_the_learner_runs_each_arrive_once(
    daemon: tuple[SharedRegion, DaemonBoard], how: str
) -> None:
    region, board = daemon
    child, out = Child(region, how), np.empty(SIZE, np.float32)
    try:
        child.start("turn", 1000)
        for n in range(1, 301):
            board.post_delta(ones(), 0)
            board.now(out)
            assert (out == n).all()
        child.finish()
        while not board.absorbed:
            board.flush()
            child.do("turn")
        board.published(out)
        assert (out == 300).all()
    finally:
        child.kill()


def test_a_learner_killed_between_take_and_publish_loses_and_doubles_nothing(
    daemon: tuple[SharedRegion, DaemonBoard],
) -> None:
    region, board = daemon
    out = np.empty(SIZE, np.float32)
    for n in range(1, 3):
        board.post_delta(ones(), 0)
        victim = Child(region)
        victim.do("take")
        victim.kill()
        board.now(out)
        assert (out == n).all()
        successor = Child(region)
        successor.do("turn", 2)
        successor.kill()
        board.published(out)
        assert (out == n).all()
        assert board.absorbed


def test_a_learner_killed_while_it_publishes_leaves_a_whole_vector(
    daemon: tuple[SharedRegion, DaemonBoard],
) -> None:
    region, board = daemon
    out = np.empty(SIZE, np.float32)
    for _ in range(3):
        before = board.published(out).publications
        child = Child(region)
        child.start("update", 1_000_000)
        while board.published(out).publications < before + 20:
            pass
        child.kill()
        snapshot = board.published(out)
        assert (out == snapshot.policy_version).all()
