"""Learners that are stages: real trainers, boards, mailboxes and pipes, each in a thread or a process."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np
import torch

from p2pdrl.config.learner_mode import LearnerMode
from p2pdrl.config.task import DDPGConfig, EnvConfig, NetworkConfig, PPOConfig, RegressionConfig, TaskConfig
from p2pdrl.pipeline.plan import StageOrder
from p2pdrl.rl.engines import EngineOptions
from p2pdrl.rl.registry import build_trainer
from p2pdrl.tensors.board import BoardSpec, DaemonBoard, LearnerBoard
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.workers.learner import Learner
from p2pdrl.workers.mailbox import Mailbox
from p2pdrl.workers.pipeline.protocol import Finish, News, StartStage
from p2pdrl.workers.protocol import (
    Alive,
    Attach,
    FrameBuffer,
    LearnerPace,
    Report,
    Start,
    Stop,
    WorkMode,
    decode_from_learner,
    frame,
)

from ..transport.pipes import KEYS
from .pipes import joined

PATIENCE_S = 20.0
"""No test waits for it."""
STAGES = LearnerMode(stages=True)

CARTPOLE = TaskConfig(
    seed=5,
    env=EnvConfig(num_envs=2),
    network=NetworkConfig(hidden=(16, 12, 10)),
    algorithm=PPOConfig(unroll_steps=24, epochs=2, minibatches=2),
)
RECURRENT = TaskConfig(
    seed=5,
    env=EnvConfig(num_envs=3),
    network=NetworkConfig(hidden=(8,), core="lstm", core_size=6),
    algorithm=PPOConfig(unroll_steps=12, epochs=1, minibatches=1),
)
PENDULUM = TaskConfig(
    seed=5,
    env=EnvConfig(id="Pendulum-v1", num_envs=2),
    network=NetworkConfig(hidden=(12, 10)),
    algorithm=DDPGConfig(joint=True, unroll_steps=8, learning_starts=10, batch_size=16, buffer_size=500),
)
CLASSIFIER = TaskConfig(
    algorithm=RegressionConfig(
        kind="classifier", features=8, rows=256, classes=3, hidden=(12, 10, 8), optimizer="adam", workers=1
    )
)


def build(task, seed=1, microbatches=1):
    return build_trainer(task, seed, "cpu", engine=EngineOptions(microbatches=microbatches))


def alone(task, updates, microbatches=4):
    trainer = build(task, seed=1, microbatches=microbatches)
    for _ in range(updates):
        trainer.step()
    return trainer


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def orders(blocks, ranks, *, schedule="1f1b", stages=None, generation=1, **options):
    """One for each rank."""
    stages = stages or ranks
    fields = {"microbatches": 4, "timeout_s": 30.0, "idle_timeout_s": 60.0, "state_every": 2, **options}
    cuts = tuple(blocks * stage // stages for stage in range(1, stages))
    return [
        StageOrder(
            generation=generation,
            rank=rank,
            blocks=blocks,
            cuts=cuts,
            schedule=schedule,
            ranks=ranks,
            **fields,
        )
        for rank in range(ranks)
    ]


class Side:
    """A daemon's end of what it has with its learner."""

    def __init__(self, sock):
        self.sock = sock
        self.heard = queue.SimpleQueue()
        self.reports, self.error = [], None
        self._reader = threading.Thread(target=self._read)

    def attach(self, spec):
        self.spec = spec
        self.region = SharedRegion.create(spec.nbytes, "board")
        self.board = DaemonBoard(self.region, spec)

    def _read(self):
        frames = FrameBuffer()
        while data := self._receive():
            for body in frames.feed(data):
                message = decode_from_learner(body)
                if isinstance(message, Alive):
                    continue
                if isinstance(message, Report):
                    self.reports.append(message)
                else:
                    self.heard.put(message)

    def _receive(self):
        try:
            return self.sock.recv(1 << 20)
        except ConnectionResetError:
            return b""

    def say(self, *messages):
        self.sock.sendall(b"".join(frame(message) for message in messages))

    def send_fds(self, message, fds):
        data = frame(message)
        if fds:
            data = data[socket.send_fds(self.sock, [data], fds) :]
        self.sock.sendall(data)

    def order(self, order, pipes):
        tickets = tuple((side, ticket) for side, (_, ticket) in pipes.items())
        self.send_fds(StartStage(order, tickets), [fd for fd, _ in pipes.values()])
        for fd, _ in pipes.values():
            os.close(fd)

    def hear(self, timeout_s=PATIENCE_S):
        try:
            return self.heard.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"nothing was said; the learner: {self.error!r}") from self.error

    def news(self, *whats, timeout_s=PATIENCE_S):
        """The next news of these kinds; others are passed over."""
        while True:
            message = self.hear(timeout_s)
            if isinstance(message, News) and message.news.what in whats:
                return message.news

    def wait(self, condition):
        until_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until_s
            time.sleep(0.005)

    def now(self):
        out = np.empty(self.spec.layout.size, np.float32)
        return out, self.board.now(out).policy_version

    def optimizer(self):
        return {k: v for k, v in self.board.sidecar().items() if k.startswith("optimizer.")}

    def close(self):
        try:
            self.say(Stop())
        except OSError:
            pass
        if self._reader.ident is not None:
            self._reader.join(PATIENCE_S)
            assert not self._reader.is_alive()
        self.sock.close()
        self.region.close()


class Hosted(Side):
    """A learner in a thread.

    Attributes:
        at_step: called with the number of updates after each.
    """

    def __init__(self, trainer):
        sock, theirs = socket.socketpair()
        super().__init__(sock)
        self.trainer = trainer
        self.at_step = lambda number: None
        self.steps = 0
        self._own_step, trainer.step = trainer.step, self._step
        self.attach(BoardSpec(trainer.layout, trainer.sidecar_layout))
        self.mailbox = Mailbox(theirs)
        self.learner = Learner(trainer, LearnerBoard(self.region, self.spec), self.mailbox)
        self._thread = threading.Thread(target=self._live)

    def start(self, learner_mode=STAGES):
        self.say(WorkMode(learner_mode, 1), LearnerPace(paused=False, max_updates_per_s=0.0))
        self._thread.start()
        self._reader.start()
        return self

    def _step(self):
        stats = self._own_step()
        self.steps += 1
        self.at_step(self.steps)
        return stats

    def _live(self):
        torch.set_num_threads(1)
        try:
            self.learner.begin(restore=False)
            self.learner.run()
        except Exception as error:  # noqa: BLE001 - shown by whoever waits
            self.error = error
        self.mailbox.close()

    def close(self):
        super().close()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE_S)
            assert not self._thread.is_alive()
        self.mailbox.close()


class Spawned(Side):
    """A learner in a process of its own, as the daemon starts it."""

    def __init__(self, task, seed, learner_mode=STAGES):
        sock, theirs = socket.socketpair()
        super().__init__(sock)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "p2pdrl.workers.learner"),
                *("--fd", str(theirs.fileno()), "--parent", str(os.getpid())),
            ],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self._reader.start()
        self.say(Start(msgspec.json.encode(task), seed, "cpu", 1, False))
        self._learner_mode = learner_mode

    def begin(self):
        """Wait until it is built, and let it go on."""
        hello = self.hear(120.0)
        self.attach(BoardSpec.from_wire(msgspec.msgpack.decode(hello.spec)))
        self.send_fds(Attach(self.region.nbytes, restore=False), [self.region.fd])
        self.say(WorkMode(self._learner_mode, 1), LearnerPace(paused=False, max_updates_per_s=0.0))

    def close(self):
        super().close()
        self.process.wait(PATIENCE_S)


class Team:
    """Learners that hold one model among them."""

    def __init__(self, task, ranks, learner_mode=STAGES):
        self.task = task
        self.members = [Hosted(build(task, seed=1 + rank)) for rank in range(ranks)]
        for member in self.members:
            member.start(learner_mode)

    @property
    def head(self):
        return self.members[0]

    @property
    def blocks(self):
        return len(self.head.trainer.parts().blocks)

    def form(self, keys=KEYS, members=None, **options):
        members = self.members if members is None else members
        made = orders(self.blocks, len(members), **options)
        circle = options.get("schedule") == "interleaved"
        pipes = joined(len(members), circle, keys) if len(members) > 1 else [{}]
        for member, order, mine in zip(members, made, pipes, strict=True):
            member.order(order, mine)

    def finish_after(self, updates, generation=1):
        """Have the head end with this update of its life."""

        def at_step(number):
            if number == updates:
                self.head.say(Finish(generation))

        self.head.at_step = at_step

    def close(self):
        for member in self.members:
            member.close()
