"""A socket pair with a mailbox at one end, and learners that are told what to do."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from p2pdrl.config.learner_mode import LearnerMode
from p2pdrl.workers.mailbox import Mailbox
from p2pdrl.workers.protocol import FrameBuffer, FromLearner, ToLearner, decode_from_learner, frame

from .rigs import Rig, Script
from .stage_learners import Team


@pytest.fixture(autouse=True, scope="session")
def _single_thread() -> None:
    """Networks here are tiny: a second thread costs five times as much as it brings."""
    torch.set_num_threads(1)


class Daemon:
    """The other end of the mailbox' socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._frames = FrameBuffer()

    def say(self, *messages: ToLearner) -> None:
        self.sock.sendall(b"".join(frame(message) for message in messages))

    def hear(self) -> list[FromLearner]:
        """What has arrived by now."""
        self.sock.setblocking(False)
        bodies = []
        try:
            while data := self.sock.recv(1 << 20):
                bodies += self._frames.feed(data)
        except BlockingIOError:
            pass
        return [decode_from_learner(body) for body in bodies]


@pytest.fixture
def ends() -> Iterator[tuple[Mailbox, Daemon]]:
    ours, theirs = socket.socketpair()
    mailbox, daemon = Mailbox(theirs), Daemon(ours)
    yield mailbox, daemon
    mailbox.close()
    ours.close()


@pytest.fixture
def rig() -> Iterator[Callable[[LearnerMode, Script], Rig]]:
    made: list[Rig] = []

    def make(learner_mode: LearnerMode, script: Script) -> Rig:
        made.append(Rig(learner_mode, script))
        return made[-1]

    yield make
    for each in made:
        for region in each.regions:
            region.close()


@pytest.fixture
def team() -> Iterator[Callable[..., Team]]:
    made: list[Team] = []

    def make(*arguments: Any, **options: Any) -> Team:
        made.append(Team(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
