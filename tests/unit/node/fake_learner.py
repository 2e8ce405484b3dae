"""Stands in for the learner process: the real conversation and loop around a trainer that counts.

``FAKE_LEARNER_PLAN`` names a file with one word per life, the last one for all that follow:
``train``, ``die:N`` (killed at step N), ``exit:N``, ``usage:N`` (says that the task is bad),
``usage`` and ``crash`` and ``mute`` (while it builds), ``raise:N`` and ``raise`` (an error that nobody
catches, at step N and while it builds), ``stop:N`` and ``stop`` (its process is stopped), ``hang:N`` (waits
in C for 30 s and lets no thread of Python run), ``slow:N`` (a step of 3 s), ``late`` (built after 1.5 s),
``gradients`` (a real flat module, whose gradient is one everywhere, goes through the stepper in force).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np

from p2pdrl.errors import ConfigError
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout
from p2pdrl.workers import learner

ELSEWHERE = SimpleNamespace(env_steps=0, episodes=0)
"""Nobody else has made anything of a batch."""


class Trainer:
    """Adds one to each of four parameters with every step."""

    layout = Layout((TensorEntry("w", (4,)),))
    sidecar_layout = SidecarLayout((SidecarItem("step", (), "int64"),))
    source = None
    replay_nbytes = 0
    spaces: dict[str, str] = {}  # noqa: RUF012
    ready = True
    policy_version = 0

    def __init__(self, act: str, at: int) -> None:
        self.flat = np.zeros(4, np.float32)
        self.act, self.at = act, at
        self.steps = 0
        self.total = 0
        self.fraction = -1.0
        self.others = 0.0
        self.stepper: object = None

    def publish(self) -> None:
        """Nobody else acts."""

    def share(self, *share: float) -> None:
        """Steps are as long for all."""

    def step(self) -> SimpleNamespace:
        self.steps += 1
        self.total += 1
        self.flat += 1.0
        time.sleep(0.001)
        if self.steps == self.at:
            if self.act == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.act == "exit":
                sys.exit(5)
            if self.act == "raise":
                raise ValueError("the environment fell over")
            if self.act == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
                return self.step()
            if self.act == "hang":
                ctypes.PyDLL(None).sleep(30)
            if self.act == "slow":
                time.sleep(3)
                return self.step()
            raise ConfigError("the task turned out to be bad")
        metrics = {
            "fraction": self.fraction,
            "life": float(LIFE),
            "total": float(self.total),
            "others": self.others,
        }
        return SimpleNamespace(
            env_steps=10, episodes=[(1.0, 10)], metrics=metrics, elsewhere=ELSEWHERE, acted=True
        )

    def rebind(self, buffer: np.ndarray, *, write: bool) -> None:
        if write:
            buffer[:] = self.flat
        self.flat = buffer

    def add_delta(self, delta: np.ndarray) -> None:
        self.flat += delta

    def set_state(self, vector: np.ndarray, sidecar: dict | None, *, own: bool = False) -> None:
        self.flat[:] = vector
        self.total = int(sidecar["step"]) if sidecar is not None else self.total

    def sidecar(self) -> dict[str, np.ndarray]:
        return {"step": np.array(self.total, np.int64)}

    def own_moments(self) -> dict[str, Moments]:
        return {"obs": Moments(float(self.steps), np.ones(2), np.zeros(2))}

    def set_progress(self, fraction: float, env_steps: int = 0) -> None:
        self.fraction = fraction

    def set_other_moments(self, moments: dict[str, Moments]) -> None:
        self.others = moments["obs"].count


class Gradients(Trainer):
    """Steps by plain gradient descent of rate 1 along a gradient of ones."""

    def __init__(self) -> None:
        import torch

        from p2pdrl.rl.flat import FlatModule
        from p2pdrl.rl.gradients import OwnStepper
        from p2pdrl.rl.optimizers import Optimizer
        from p2pdrl.tensors.optimizers import SGD

        super().__init__("gradients", 0)
        self.module = FlatModule(torch.nn.Linear(4, 1, bias=False), torch.device("cpu"))
        self.flat = self.module.numpy()
        self.flat[:] = 0.0
        self.optimizer = Optimizer(SGD(), self.module)
        self.stepper = OwnStepper()

    def step(self) -> SimpleNamespace:
        self.total += 1
        self.module.gradients_D.fill_(1.0)
        self.stepper.step(self.optimizer, learning_rate=1.0, max_grad_norm=1e9, samples=self.total, left=0)
        metrics = {"life": float(LIFE)}
        return SimpleNamespace(env_steps=10, episodes=[], metrics=metrics, elsewhere=ELSEWHERE, acted=True)


def next_life() -> tuple[int, str]:
    plan = Path(os.environ["FAKE_LEARNER_PLAN"])
    count = plan.with_suffix(".lives")
    life = len(count.read_text()) if count.exists() else 0
    count.write_text("x" * (life + 1))
    words = plan.read_text().split()
    return life, words[min(life, len(words) - 1)]


def build(start: object) -> tuple[Trainer, str]:
    Path(os.environ["FAKE_LEARNER_PLAN"]).with_suffix(".start").write_bytes(msgspec.json.encode(start))
    act, _, at = WORD.partition(":")
    if act == "usage" and not at:
        raise ConfigError("there is no such environment")
    if act == "crash":
        sys.exit(7)
    if act == "raise" and not at:
        raise ValueError("the environment can't be made")
    if act == "stop" and not at:
        os.kill(os.getpid(), signal.SIGSTOP)
    if act == "late":
        time.sleep(1.5)
    if act == "mute":
        time.sleep(60)
    if act == "gradients":
        return Gradients(), "fake"
    return Trainer(act, int(at or 0)), "fake"


LIFE, WORD = next_life()
learner._build = build  # noqa: SLF001 - its only argument is the socket
learner.FIRST_MESSAGES_S = 0.05
del sys.argv[1:3]  # -m p2pdrl.workers.learner
sys.exit(learner.main())
