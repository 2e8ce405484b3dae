"""The stepper of a learner that sends gradients: each goes to the strategy before, or instead of, a step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from p2pdrl.config.learner_mode import LearnerMode
from p2pdrl.rl.optimizers import Optimizer, clip_gradients, gradient_norm
from p2pdrl.tensors.shared_memory import GradientRing
from p2pdrl.workers.learner_modes import ModeRequests
from p2pdrl.workers.protocol import RequestAnswer
from p2pdrl.workers.replica import Replica

__all__ = ["RequestStepper"]


class RequestStepper:
    """Implements `rl.gradients.Stepper` for one learner mode that sends gradients.

    Args:
        requests: of this learner mode.
        replica: the parameters, which are published before each request and taken from the board after it.
        ring: where gradients lie.
    """

    def __init__(
        self, learner_mode: LearnerMode, requests: ModeRequests, replica: Replica, ring: GradientRing
    ) -> None:
        self._learner_mode = learner_mode
        self._requests = requests
        self._replica = replica
        self._slots = [torch.from_numpy(ring.slot(number)) for number in range(len(ring))]
        self._sum_D: Tensor | None = None
        self._gathered = 0
        self._samples = 0
        self._set_due: int | None = None
        self._ends_update = False

    @property
    def ends_update(self) -> bool:
        """Whether the answer to the last gradient ends the update."""
        return self._ends_update

    def step(
        self,
        optimizer: Optimizer,
        *,
        learning_rate: float,
        max_grad_norm: float,
        samples: int,
        left: int,
    ) -> float:
        """Use the mean gradient over ``samples`` rows in ``optimizer.span`` as the learner mode says.

        Returns:
            The norm of the gradient that was used, before it was clipped; infinite or NaN when the step was
            skipped.
        """
        ((_, gradients_D),) = optimizer.span.pieces  # that of the only loss, over the whole vector
        before = self._learner_mode.clip == "before"
        norm = clip_gradients(max_grad_norm, gradients_D) if before else gradient_norm(gradients_D)
        finite = math.isfinite(norm)
        if not finite:
            gradients_D.zero_()
        self._ends_update = False
        awaited = None if self._requests.over else self._send(gradients_D, samples if finite else 0, left)
        merged, told_rate = self._merge(gradients_D, awaited)
        if merged:
            norm = gradient_norm(gradients_D)
        alone = self._requests.over and not merged
        if self._may_step(alone=alone) and (finite or merged) and math.isfinite(norm):
            if not before:
                clip_gradients(max_grad_norm, gradients_D, norm=norm)
            optimizer.step(learning_rate if told_rate is None else told_rate)
            self._replica.moved(versions=0)
        elif alone:
            norm = math.nan
        self._take()
        return norm

    def _may_step(self, *, alone: bool) -> bool:
        """Whether the optimizer steps; also by the rest of an update that a new mode came into."""
        next_mode = self._requests.next_mode
        return (next_mode is not None and next_mode.steps) if alone else self._learner_mode.steps

    def _send(self, gradients_D: Tensor, samples: int, left: int) -> int | None:
        """Send a gradient if one is due, and wait as the learner mode says; return the request's number."""
        sum_D = self._gather(gradients_D, samples)
        if self._requests.slot() < 0:  # a wait was given up; the answer came too late for most of it
            self._requests.collect(self._use_late)
        slot = self._requests.slot()
        nobody_waits = self._learner_mode.ahead > 0
        if sum_D is None or slot < 0 or self._requests.full or (nobody_waits and self._samples == 0):
            return None
        if not self._requests.hold():  # an update of many gradients may take long
            return None
        self._slots[slot].copy_(sum_D)
        self._replica.publish()
        number = self._requests.send("gradients", slot, self._replica.version, self._samples, left=left)
        self._requests.wait()
        return number

    def _gather(self, gradients_D: Tensor, samples: int) -> Tensor | None:
        """Count a gradient in; return the sum to be sent when it is complete."""
        if self._learner_mode.every == 1:
            self._samples = samples
            return gradients_D
        if self._sum_D is None:
            self._sum_D = torch.zeros_like(gradients_D)
        if self._gathered == 0:
            self._sum_D.zero_()
            self._samples = 0
        self._sum_D.add_(gradients_D)
        self._samples += samples
        self._gathered = (self._gathered + 1) % self._learner_mode.every
        return None if self._gathered else self._sum_D

    def _merge(self, gradients_D: Tensor, awaited: int | None) -> tuple[bool, float | None]:
        """Apply the answers that came.

        Returns:
            Whether ``gradients_D`` has become another gradient by them, and the learning rate that one of
            them said.
        """
        merged, told_rate = False, None

        def use(answer: RequestAnswer, slot: int) -> None:
            nonlocal merged, told_rate
            self._use_late(answer, slot)
            self._ends_update |= answer.end_update and answer.number == awaited
            if answer.kind == "replace" and answer.number == awaited and self._learner_mode.ahead == 0:
                gradients_D.copy_(self._slots[slot])
                told_rate = answer.learning_rate
                merged = True
            elif answer.kind == "add":
                gradients_D.add_(self._slots[slot].to(gradients_D.device))
                merged = True

        self._requests.collect(use)
        return merged, told_rate

    def _use_late(self, answer: RequestAnswer, _: int) -> None:
        if answer.kind == "set":
            self._set_due = answer.content

    def _take(self) -> None:
        if self._set_due is None:
            self._replica.take()
            return
        content, self._set_due = self._set_due, None
        self._requests.take_set(self._replica, content)
