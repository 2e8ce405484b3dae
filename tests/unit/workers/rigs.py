"""A learner's stepper on a board, whose posts a script answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from p2pdrl.config.learner_mode import LearnerMode
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.optimizers import Optimizer
from p2pdrl.tensors.board import BoardSpec, DaemonBoard, LearnerBoard
from p2pdrl.tensors.optimizers import SGD
from p2pdrl.tensors.shared_memory import GradientRing, SharedRegion
from p2pdrl.workers.learner_modes import ModeRequests
from p2pdrl.workers.protocol import PostedRequest, RequestAnswer, WorkMode
from p2pdrl.workers.replica import Replica
from p2pdrl.workers.request_stepper import RequestStepper

SIZE = 3

EPOCH = 9

WAIT = LearnerMode("gradients")

SERVED = LearnerMode("gradients", steps=False, clip="before")

Script = Callable[[PostedRequest, np.ndarray], str | None]


class Trainer:
    """As much of one as a replica needs."""

    def __init__(self) -> None:
        module = nn.Linear(SIZE, 1, bias=False)
        self.module = FlatModule(module, torch.device("cpu"))
        self.module.set_(np.zeros(SIZE, np.float32))
        self.optimizer = Optimizer(SGD(), self.module)

    @property
    def flat(self) -> np.ndarray:
        return self.module.numpy()

    def sidecar(self) -> None:
        return None

    def set_state(self, vector: np.ndarray, sidecar: object) -> None:
        self.module.set_(vector)

    def add_delta(self, delta: np.ndarray) -> None:
        self.module.add_(delta)


class Rig:
    """A learner under one learner mode, and its strategy."""

    def __init__(self, learner_mode: LearnerMode, script: Script) -> None:
        self.trainer = Trainer()
        self.script = script
        self.said: list[PostedRequest] = []
        self.seen: list[np.ndarray] = []
        self.waiting: list[PostedRequest] = []
        self.told_rate: float | None = None
        self.ends_at: int | None = None
        """Number of the post whose answer ends the update."""
        self.now_s = 0.0
        self.reports = 0
        self.paused = False
        spec = BoardSpec(self.trainer.module.layout)
        ring_nbytes = GradientRing.nbytes_of(learner_mode.slots, SIZE)
        self.regions = [SharedRegion.create(n, "test") for n in (spec.nbytes, ring_nbytes)]
        self.board = DaemonBoard(self.regions[0], spec)
        self.ring = GradientRing(self.regions[1], learner_mode.slots, SIZE)
        self.replica = Replica(self.trainer, LearnerBoard(self.regions[0], spec))
        self.posts = ModeRequests(
            WorkMode(learner_mode, EPOCH),
            first=1,
            say=self.say,
            listen=self.listen,
            report=self.report,
            paused=lambda: self.paused,
            clock=lambda: self.now_s,
        )
        self.stepper = RequestStepper(
            learner_mode, self.posts, self.replica, GradientRing(self.regions[1], learner_mode.slots, SIZE)
        )

    def say(self, posted: PostedRequest) -> None:
        self.said.append(posted)
        self.waiting.append(posted)
        self.seen.append(self.ring.slot(posted.slot).copy())

    def listen(self, timeout_s: float) -> None:
        self.now_s += timeout_s
        for posted in list(self.waiting):
            kind = self.script(posted, self.ring.slot(posted.slot))
            if kind is not None:
                self.waiting.remove(posted)
                content = self.board.content_id
                ends = posted.number == self.ends_at
                self.posts.hear(
                    RequestAnswer(posted.number, EPOCH, kind, content, self.told_rate, end_update=ends)
                )

    def report(self) -> None:
        """The daemon hears of it at once, and moves what it gathered to the board's slot."""
        self.reports += 1
        self.board.flush()

    def step(
        self,
        gradient: object,
        *,
        samples: int = 1,
        rate: float = 1.0,
        bound: float = 1e9,
        left: int = 0,
    ) -> float:
        self.trainer.module.gradients_D.copy_(torch.as_tensor(gradient, dtype=torch.float32))
        return self.stepper.step(
            self.trainer.optimizer,
            learning_rate=rate,
            max_grad_norm=bound,
            samples=samples,
            left=left,
        )

    @property
    def x(self) -> list[float]:
        return self.trainer.flat.tolist()

    @property
    def publications(self) -> int:
        return self.board.published(np.empty(SIZE, np.float32)).publications
