"""Brings the learner mode that the daemon asks for about, between two updates of a running learner.

What a learner mode needs (the ring for gradients, a stepper that posts them, the vector that the learners of
one node share) is put up here when it comes into force and taken down when the next one does. Between two
updates of a learner mode that sends parameters, this is where the learner posts and waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from p2pdrl.config.learner_mode import FREE, LearnerMode
from p2pdrl.tensors.shared_memory import GradientRing, SharedRegion, SharedVector
from p2pdrl.workers.protocol import Posted, RequestAnswer, WorkMode
from p2pdrl.workers.replica import Replica
from p2pdrl.workers.requests import RequestPoster

if TYPE_CHECKING:
    from p2pdrl.rl.stepping import Stepper
    from p2pdrl.rl.trainer import Trainer

__all__ = ["ModeSwitcher"]


class ModeSwitcher:
    """The learner mode in force, and the one that was asked for.

    Args:
        trainer: what is stepped.
        replica: its parameters.
        say: sends a post to the daemon.
        listen: reads messages, up to so many seconds long, obeys them, and reports when that is due.
        paused: whether the learner is held.
    """

    def __init__(
        self,
        trainer: Trainer,
        replica: Replica,
        *,
        say: Callable[[Posted], None],
        listen: Callable[[float], None],
        paused: Callable[[], bool],
    ) -> None:
        self._trainer = trainer
        self._replica = replica
        self._say = say
        self._listen = listen
        self._paused = paused
        self._own_stepper: Stepper | None = None
        self._regions: list[SharedRegion] = []
        self._next: tuple[WorkMode, list[SharedRegion]] | None = None
        self._vector: SharedVector | None = None
        self._updates = 0
        self._samples = 0
        self.learner_mode: LearnerMode = FREE
        self._posts = self._open_posts(WorkMode(FREE, 0), first=1)

    @property
    def ready(self) -> bool:
        """Whether there are parameters to step: a helper waits until the first learner has put them down."""
        return self._vector is None or self._vector.filled

    def hear(self, work: WorkMode, take_fd: Callable[[], int]) -> None:
        """Note another learner mode, which comes into force by `turn`; waits end at once.

        Args:
            work: it.
            take_fd: claims the next descriptor that came along.

        Raises:
            WorkerError: a descriptor is missing.
            TensorError: the memory isn't as long as was said.
        """
        sizes = (work.ring_nbytes, work.shared_nbytes)
        regions = [SharedRegion.attach(take_fd(), nbytes) for nbytes in sizes if nbytes]
        if self._next is not None:
            _close(self._next[1])
        self._next = (work, regions)
        self._posts.end(work.learner_mode)

    def answered(self, answer: RequestAnswer) -> None:
        """Note an answer."""
        self._posts.hear(answer)

    def stop(self) -> None:
        """The learner is to end: give up what was posted."""
        self._posts.end(None)

    def help(self, region: SharedRegion) -> None:
        """Step the vector in ``region``, which another learner fills, from now on."""
        self._vector = SharedVector(region, self._trainer.layout.size)
        self._trainer.rebind(self._vector.vector, write=False)

    def turn(self) -> None:
        """Bring the learner mode that was asked for last into force."""
        if self._next is None:
            return
        (work, regions), self._next = self._next, None
        self._share(work, regions)
        self._posts = self._open_posts(work, first=self._posts.next_number)
        self._use_stepper(work, regions)
        self.learner_mode = work.learner_mode
        self._updates = self._samples = 0
        _close(self._regions)
        self._regions = regions

    def updated(self, samples: int) -> None:
        """Do what is due after an update: post parameters, wait, take what came.

        Args:
            samples: environment steps that the update took.
        """
        self._updates += 1
        self._samples += samples
        if self.learner_mode.sends != "parameters" or self._updates % self.learner_mode.every:
            return
        posts = self._posts
        if posts.over or posts.crowded:
            return
        self._replica.publish()
        posts.post("parameters", -1, self._replica.version, self._samples)
        self._samples = 0
        posts.wait()
        due: list[int] = []
        posts.collect(lambda answer, _: due.append(answer.content) if answer.kind == "set" else None)
        if due:
            posts.take_set(self._replica, due[-1])

    def _open_posts(self, work: WorkMode, first: int) -> RequestPoster:
        return RequestPoster(work, first=first, say=self._say, listen=self._listen, paused=self._paused)

    def _share(self, work: WorkMode, regions: list[SharedRegion]) -> None:
        """Move the parameters onto the shared vector, or back into memory of our own."""
        size = self._trainer.layout.size
        if work.shared_nbytes:
            vector = SharedVector(regions[-1], size)
            self._trainer.rebind(vector.vector, write=True)
            vector.fill()
            self._vector = vector
        elif self._vector is not None:
            self._trainer.rebind(np.empty(size, np.float32), write=True)
            self._vector = None

    def _use_stepper(self, work: WorkMode, regions: list[SharedRegion]) -> None:
        learner_mode = work.learner_mode
        if learner_mode.sends == "gradients":
            # Not above: torch is slow to import, and a learner that runs freely has no need of it here.
            from p2pdrl.workers.requests import PostingStepper

            if self._own_stepper is None:
                self._own_stepper = self._trainer.stepper
            ring = GradientRing(regions[0], learner_mode.slots, self._trainer.layout.size)
            self._trainer.stepper = PostingStepper(learner_mode, self._posts, self._replica, ring)
        elif self._own_stepper is not None:
            self._trainer.stepper = self._own_stepper
            self._own_stepper = None


def _close(regions: list[SharedRegion]) -> None:
    for region in regions:
        region.close()
