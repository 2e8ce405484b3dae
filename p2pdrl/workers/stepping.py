"""The stepper of learners whose gradients travel: it posts them, waits for answers, merges, clips, steps.

``trainer`` calls it once per minibatch through `rl.stepping.Stepper`. What it does follows
`config.regime.Regime`; what an answer asks for is said at `strategies.protocol.AnswerKind`:

| regime | a gradient … | its answer … |
|---|---|---|
| ``ahead = 0`` | is posted and waited for, then stepped with | replaces it, is added to it, or leaves it |
| ``ahead > 0`` | is posted and stepped with at once | (``add``) is added to the next one |
| ``steps`` off | is posted | (``set``) brings the parameters |
| ``every > 1`` | goes into the sum of ``every`` of them, which is posted | |

What replaces it may come with the learning rate to step at, the same for all who step with it. An answer may
end the update, too: then all learners who keep step collect at the same time (`strategies.lockstep`).

The sum, not the mean: a server's step along it is what ``every`` steps of the learner's own would have been
(DistBelief's accrued gradients: Dean 2012, section 4.1 and its appendix). Along the mean it would be a single
one, and each fetch would take the learner back by the rest.

A gradient that isn't finite never leaves. Where peers wait for it, zeros with ``samples = 0`` are posted in
its place, so that nobody waits in vain; the learner then steps only with what the answer brings.

Shape suffix: D parameters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from p2pdrl.config.regime import Regime
from p2pdrl.rl.flat import FlatSpan
from p2pdrl.rl.optimizers import Optimizer, clip_gradients, gradient_norm
from p2pdrl.tensors.gradient_ring import GradientRing
from p2pdrl.workers.posts import Posts
from p2pdrl.workers.protocol import Answer
from p2pdrl.workers.replica import Replica

__all__ = ["PostingStepper"]


class PostingStepper:
    """Implements `rl.stepping.Stepper` for one regime that sends gradients.

    Args:
        regime: what to do.
        posts: of this regime.
        replica: the parameters, which are published before each post and taken from the board after it.
        ring: where gradients lie.
    """

    def __init__(self, regime: Regime, posts: Posts, replica: Replica, ring: GradientRing) -> None:
        self._regime = regime
        self._posts = posts
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
        flat: FlatSpan,
        optimizer: Optimizer,
        *,
        learning_rate: float,
        max_grad_norm: float,
        samples: int,
        left: int,
    ) -> float:
        """Use the mean gradient over ``samples`` rows in ``flat.gradients_D`` as the regime says.

        Returns:
            The norm of the gradient that was used, before it was clipped; infinite or NaN when the step was
            skipped.
        """
        gradients_D = flat.gradients_D
        before = self._regime.clip == "before"
        norm = clip_gradients(gradients_D, max_grad_norm) if before else gradient_norm(gradients_D)
        finite = math.isfinite(norm)
        if not finite:
            gradients_D.zero_()
        self._ends_update = False
        awaited = None if self._posts.over else self._post(gradients_D, samples if finite else 0, left)
        merged, told_rate = self._merge(gradients_D, awaited)
        if merged:
            norm = gradient_norm(gradients_D)
        alone = self._posts.over and not merged
        if self._may_step(alone=alone) and (finite or merged) and math.isfinite(norm):
            if alone or not before:
                clip_gradients(gradients_D, max_grad_norm)
            optimizer.step(learning_rate if told_rate is None else told_rate)
            self._replica.moved(versions=0)
        elif alone:
            norm = math.nan
        self._take()
        return norm

    def _may_step(self, *, alone: bool) -> bool:
        """Whether the optimizer steps; for the rest of an update that a new regime came into, by that one."""
        heir = self._posts.heir
        return (heir is not None and heir.steps) if alone else self._regime.steps

    def _post(self, gradients_D: Tensor, samples: int, left: int) -> int | None:
        """Post a gradient if one is due, and wait as the regime says; return the post's number."""
        sum_D = self._gather(gradients_D, samples)
        if self._posts.slot() < 0:  # a wait was given up; the answer has come since, too late for most of it
            self._posts.collect(self._use_late)
        slot = self._posts.slot()
        nobody_waits = self._regime.ahead > 0
        if sum_D is None or slot < 0 or self._posts.crowded or (nobody_waits and self._samples == 0):
            return None
        if not self._posts.hold():  # an update of many gradients may take long
            return None
        self._slots[slot].copy_(sum_D)
        self._replica.publish()
        number = self._posts.post("gradients", slot, self._replica.version, self._samples, left=left)
        self._posts.wait()
        return number

    def _gather(self, gradients_D: Tensor, samples: int) -> Tensor | None:
        """Count a gradient in; return the sum to be posted when it is complete."""
        if self._regime.every == 1:
            self._samples = samples
            return gradients_D
        if self._sum_D is None:
            self._sum_D = torch.zeros_like(gradients_D)
        if self._gathered == 0:
            self._sum_D.zero_()
            self._samples = 0
        self._sum_D.add_(gradients_D)
        self._samples += samples
        self._gathered = (self._gathered + 1) % self._regime.every
        return None if self._gathered else self._sum_D

    def _merge(self, gradients_D: Tensor, awaited: int | None) -> tuple[bool, float | None]:
        """Bring in the answers that came.

        Returns:
            Whether ``gradients_D`` has become another gradient by them, and the learning rate that one of
            them said.
        """
        merged, told_rate = False, None

        def use(answer: Answer, slot: int) -> None:
            nonlocal merged, told_rate
            self._use_late(answer, slot)
            self._ends_update |= answer.end_update and answer.number == awaited
            if answer.kind == "replace" and answer.number == awaited and self._regime.ahead == 0:
                gradients_D.copy_(self._slots[slot])
                told_rate = answer.learning_rate
                merged = True
            elif answer.kind == "add":
                gradients_D.add_(self._slots[slot].to(gradients_D.device))
                merged = True

        self._posts.collect(use)
        return merged, told_rate

    def _use_late(self, answer: Answer, _: int) -> None:
        if answer.kind == "set":
            self._set_due = answer.content

    def _take(self) -> None:
        if self._set_due is None:
            self._replica.take()
            return
        content, self._set_due = self._set_due, None
        self._posts.take_set(self._replica, content)
