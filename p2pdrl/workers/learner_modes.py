"""The learner's side of a strategy: the learner mode in force, its requests, and its waits for answers.

``ModeSwitcher`` brings the learner mode that the daemon asks for into force between two updates, with what it
needs: the ring for gradients, a stepper that sends them, the vector that the learners of one node share.
Between two updates of a learner mode that sends parameters, it requests an exchange and waits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from p2pdrl.config.learner_mode import FREE, LearnerMode
from p2pdrl.tensors.shared_memory import GradientRing, SharedRegion, SharedVector
from p2pdrl.workers.protocol import PostedRequest, RequestAnswer, RequestKind, WorkMode
from p2pdrl.workers.replica import Replica

if TYPE_CHECKING:
    from p2pdrl.rl.gradients import Stepper
    from p2pdrl.rl.trainer import Trainer

__all__ = ["ModeRequests", "ModeSwitcher"]

POLL_S = 0.05
FLUSH_POLL_S = 0.002
FLUSH_LIMIT_S = 5.0
BACKSTOP_S = 60.0
"""The longest wait for an answer, not counting pauses. Strategies have deadlines of their own, far below; a
learner that comes here goes on alone until its request is answered, and says so with its next one."""


class ModeRequests:
    """The learner's requests to its strategy under one learner mode, until they are answered.

    Args:
        work: the learner mode and its epoch.
        first: number of the first request.
        say: sends a message to the daemon.
        listen: reads messages, up to so many seconds long, obeys them, and reports when that is due.
        report: reports at once.
        paused: whether the learner is paused.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        work: WorkMode,
        *,
        first: int,
        say: Callable[[PostedRequest], None],
        listen: Callable[[float], None],
        report: Callable[[], None],
        paused: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work = work
        self._say = say
        self._listen = listen
        self._report = report
        self._paused = paused
        self._clock = clock
        self._open: dict[int, int] = {}
        self._answers: dict[int, tuple[RequestAnswer, int]] = {}
        self._free = set(range(work.learner_mode.slots))
        self._alone = False
        self.next_number = first
        self.waited_s = 0.0
        """Since it was last set to 0."""
        self.over = False
        """Whether another learner mode is in force, or none any more."""
        self.next_mode: LearnerMode | None = None
        """The learner mode that follows; None when the learner is to stop."""

    @property
    def full(self) -> bool:
        """Whether more requests are unanswered than may be while the learner goes on."""
        return len(self._open) > self._work.learner_mode.ahead

    def end(self, next_mode: LearnerMode | None) -> None:
        """Give up all requests: ``next_mode`` is in force from now on."""
        self.over, self.next_mode = True, next_mode

    def slot(self) -> int:
        """A slot that the learner may write; -1 when the learner mode has none, or the daemon holds all."""
        return min(self._free, default=-1)

    def send(self, kind: RequestKind, slot: int, policy_version: int, samples: int, *, left: int = 0) -> int:
        """Hand ``slot`` over to the daemon (-1: none); return the request's number. See `PostedRequest`."""
        number = self.next_number
        self.next_number += 1
        self._open[number] = slot
        self._free.discard(slot)
        epoch, alone = self._work.epoch, self._alone
        self._say(PostedRequest(number, epoch, kind, slot, policy_version, samples, alone=alone, left=left))
        self._alone = False
        return number

    def hear(self, answer: RequestAnswer) -> None:
        """Note an answer; those to another learner mode's requests are ignored."""
        if not self.over and answer.epoch == self._work.epoch and answer.number in self._open:
            self._answers[answer.number] = (answer, self._open.pop(answer.number))

    def collect(self, use: Callable[[RequestAnswer, int], None]) -> None:
        """Let ``use`` have each answer that came, and its slot, in order; then the slots are free again."""
        while self._answers:
            answer, slot = self._answers.pop(next(iter(self._answers)))
            use(answer, slot)
            if slot >= 0:
                self._free.add(slot)

    def hold(self) -> bool:
        """Wait while the learner is paused; False once the learner mode is over."""
        return self._wait_until(lambda: not self._paused(), BACKSTOP_S, POLL_S)

    def wait(self) -> bool:
        """Wait until no more requests are unanswered than the learner mode allows.

        Returns:
            False when that didn't happen: the learner mode is over, or answers took longer than `BACKSTOP_S`.
        """
        if not self.full:
            self._listen(0.0)
        in_time = self._wait_until(lambda: not self.full, BACKSTOP_S, POLL_S)
        if not in_time and not self.over:
            self._alone = self._work.learner_mode.ahead == 0
            print(f"learner: no answer for {BACKSTOP_S:g} s; it goes on alone meanwhile", file=sys.stderr)
        return in_time

    def take_set(self, replica: Replica, content: int) -> None:
        """Take from the board what an answer spoke of, and publish.

        Where the board's slot was in use when the strategy wrote it, it arrives a little later: after the
        learner's next publication, and the report by which the daemon learns of that. Nobody waits for the
        time at which that report would be due.
        """

        def caught_up() -> bool:
            replica.take()
            replica.publish()
            return replica.taken_id >= content

        if not caught_up():
            self._report()
            self._wait_until(caught_up, FLUSH_LIMIT_S, FLUSH_POLL_S)

    def _wait_until(self, done: Callable[[], bool], limit_s: float, poll_s: float) -> bool:
        while not done():
            if self.over or limit_s <= 0:
                return False
            began_s = self._clock()
            self._listen(min(poll_s, limit_s))
            took_s = self._clock() - began_s
            self.waited_s += took_s
            if not self._paused():
                limit_s -= took_s
        return not self.over


class ModeSwitcher:
    """The learner mode in force, and the one that was asked for.

    Args:
        say: sends a request to the daemon.
        listen: reads messages, up to so many seconds long, obeys them, and reports when that is due.
        report: reports at once.
        paused: whether the learner is paused.
    """

    def __init__(
        self,
        trainer: Trainer,
        replica: Replica,
        *,
        say: Callable[[PostedRequest], None],
        listen: Callable[[float], None],
        report: Callable[[], None],
        paused: Callable[[], bool],
    ) -> None:
        self._trainer = trainer
        self._replica = replica
        self._say = say
        self._listen = listen
        self._report = report
        self._paused = paused
        self._own_stepper: Stepper | None = None
        self._regions: list[SharedRegion] = []
        self._next: tuple[WorkMode, list[SharedRegion]] | None = None
        self._vector: SharedVector | None = None
        self._updates = 0
        self._samples = 0
        self.learner_mode: LearnerMode = FREE
        self._requests = self._open_requests(WorkMode(FREE, 0), first=1)

    def waited(self) -> float:
        """Return the seconds that were spent in waits since the last call."""
        waited_s, self._requests.waited_s = self._requests.waited_s, 0.0
        return waited_s

    @property
    def ready(self) -> bool:
        """Whether there are parameters to step: a Hogwild worker waits for the first learner's."""
        return self._vector is None or self._vector.filled

    def hear(self, work: WorkMode, take_fd: Callable[[], int]) -> None:
        """Note another learner mode, which comes into force by `turn`; waits end at once.

        Args:
            work: with the sizes of the memory that came along.
            take_fd: claims its next descriptor.

        Raises:
            WorkerError: a descriptor is missing.
            TensorError: the memory isn't as long as was said.
        """
        sizes = (work.ring_nbytes, work.shared_nbytes)
        regions = [SharedRegion.attach(take_fd(), nbytes) for nbytes in sizes if nbytes]
        if self._next is not None:
            _close(self._next[1])
        self._next = (work, regions)
        self._requests.end(work.learner_mode)

    def answered(self, answer: RequestAnswer) -> None:
        """Note an answer."""
        self._requests.hear(answer)

    def stop(self) -> None:
        """Give up all requests: the learner is to end."""
        self._requests.end(None)

    def help(self, region: SharedRegion, *, shared_statistics: bool = False) -> None:
        """Step the vector in ``region``, which another learner fills, from now on."""
        self._vector = self._shared_vector(region, shared_statistics=shared_statistics)
        self._trainer.rebind(self._vector.vector, write=False)
        if shared_statistics:
            self._trainer.share_statistics(self._vector.statistics, write=False)

    def turn(self) -> None:
        """Apply the learner mode that was asked for last."""
        if self._next is None:
            return
        (work, regions), self._next = self._next, None
        self._share(work, regions)
        self._requests = self._open_requests(work, first=self._requests.next_number)
        self._use_stepper(work, regions)
        self.learner_mode = work.learner_mode
        self._updates = self._samples = 0
        _close(self._regions)
        self._regions = regions

    def updated(self, samples: int) -> None:
        """Do what is due after an update: request an exchange of parameters, wait, take what came.

        Args:
            samples: environment steps that the update took.
        """
        self._updates += 1
        self._samples += samples
        if self.learner_mode.sends != "parameters" or self._updates % self.learner_mode.every:
            return
        requests = self._requests
        if requests.over or requests.full:
            return
        self._replica.publish()
        requests.send("parameters", -1, self._replica.version, self._samples)
        self._samples = 0
        requests.wait()
        due: list[int] = []
        requests.collect(lambda answer, _: due.append(answer.content) if answer.kind == "set" else None)
        if due:
            requests.take_set(self._replica, due[-1])

    def _open_requests(self, work: WorkMode, first: int) -> ModeRequests:
        return ModeRequests(
            work,
            first=first,
            say=self._say,
            listen=self._listen,
            report=self._report,
            paused=self._paused,
        )

    def _share(self, work: WorkMode, regions: list[SharedRegion]) -> None:
        """Move the parameters onto the shared vector, or back into memory of the learner's own."""
        size = self._trainer.layout.size
        if work.shared_nbytes:
            statistics = work.learner_mode.shared_statistics
            vector = self._shared_vector(regions[-1], shared_statistics=statistics)
            self._trainer.rebind(vector.vector, write=True)
            if statistics:
                self._trainer.share_statistics(vector.statistics, write=True)
            else:
                self._unshare_statistics()
            vector.fill()
            self._vector = vector
        elif self._vector is not None:
            self._trainer.rebind(np.empty(size, np.float32), write=True)
            self._unshare_statistics()
            self._vector = None

    def _unshare_statistics(self) -> None:
        if self._vector is not None and self._vector.statistics:
            self._trainer.keep_statistics()

    def _shared_vector(self, region: SharedRegion, *, shared_statistics: bool) -> SharedVector:
        trainer = self._trainer
        if not shared_statistics:
            return SharedVector(region, trainer.layout.size)
        return SharedVector(region, trainer.layout.size, trainer.sidecar_layout.under("optimizer"))

    def _use_stepper(self, work: WorkMode, regions: list[SharedRegion]) -> None:
        learner_mode = work.learner_mode
        if self.learner_mode.preempted:
            self._trainer.source.preempted = None
        if learner_mode.sends == "gradients":
            if self._own_stepper is None:
                self._own_stepper = self._trainer.stepper
            ring = GradientRing(regions[0], learner_mode.slots, self._trainer.layout.size)
            if learner_mode.preempted:
                requests = self._requests
                self._trainer.source.preempted = lambda: ring.preempted == requests.next_number
            from p2pdrl.workers.request_stepper import RequestStepper  # imports torch, which takes seconds

            self._trainer.stepper = RequestStepper(learner_mode, self._requests, self._replica, ring)
        elif self._own_stepper is not None:
            self._trainer.stepper = self._own_stepper
            self._own_stepper = None


def _close(regions: list[SharedRegion]) -> None:
    for region in regions:
        region.close()
