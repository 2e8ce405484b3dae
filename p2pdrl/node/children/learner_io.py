"""How the learner is to work now, the shared memory for it, and its posts on the way to the strategy.

`supervisor` keeps one through all lives of the learner: each life gets the order anew, on memory of its own,
so that nothing which still writes into a slot of a dead learner's can spoil a gradient of its successor's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from p2pdrl.config.learner_mode import FREE, LearnerMode
from p2pdrl.errors import TensorError
from p2pdrl.strategies.protocol import AnswerKind, LearnerRequest
from p2pdrl.tensors.shared_memory import GradientRing, SharedRegion, SharedVector
from p2pdrl.workers.protocol import Posted, RequestAnswer, WorkMode

__all__ = ["LearnerIO"]


class LearnerIO:
    """The learner mode in force, its memory, and the posts under it.

    Posts are numbered anew, from one again with each life of the learner and whenever it went on alone:
    strategies whose learners keep step see by it that this one's state isn't what they think. An answer goes
    by the post itself, so it never meets another one of the same number.
    """

    def __init__(self) -> None:
        self.learner_mode: LearnerMode = FREE
        self.epoch = 0
        self._ring: GradientRing | None = None
        self._ring_region: SharedRegion | None = None
        self._shared_region: SharedRegion | None = None
        self._number = 0
        self._posts: asyncio.Queue[LearnerRequest] = asyncio.Queue()
        self._open: dict[int, tuple[LearnerRequest, int]] = {}
        """By our numbers: the posts, and the numbers that the learner gave."""

    @property
    def shared(self) -> SharedRegion | None:
        """The vector that several learners step, where the learner mode wants one."""
        return self._shared_region

    def arrange(
        self, learner_mode: LearnerMode, epoch: int, size: int
    ) -> tuple[WorkMode, Sequence[SharedRegion]]:
        """Put another learner mode into force; what was posted before is void.

        Args:
            learner_mode: it.
            epoch: of the mode.
            size: D.

        Returns:
            What the learner is told, and the regions whose descriptors go along.

        Raises:
            TensorError: the system gives no shared memory; the old learner mode is over all the same.
        """
        self.learner_mode, self.epoch = learner_mode, epoch
        self._close_shared()
        if learner_mode.learners > 1:
            self._shared_region = SharedRegion.create(SharedVector.nbytes_of(size), "hogwild")
        return self.renew(size)

    def renew(self, size: int) -> tuple[WorkMode, Sequence[SharedRegion]]:
        """Give the learner mode in force to a new learner, or to the present one: with a ring of its own.

        Raises:
            TensorError: the system gives no shared memory.
        """
        self._open.clear()
        self._number = 0
        while not self._posts.empty():
            self._posts.get_nowait()
        self._close_ring()
        slots = self.learner_mode.slots
        if slots:
            self._ring_region = SharedRegion.create(GradientRing.nbytes_of(slots, size), "gradients")
            self._ring = GradientRing(self._ring_region, slots, size)
        regions = [region for region in (self._ring_region, self._shared_region) if region is not None]
        ring_nbytes, shared_nbytes = (
            0 if region is None else region.nbytes for region in (self._ring_region, self._shared_region)
        )
        return WorkMode(self.learner_mode, self.epoch, ring_nbytes, shared_nbytes), regions

    def posted(self, posted: Posted) -> None:
        """Note what the learner posted; what belongs to an earlier learner mode is dropped.

        Raises:
            TensorError: it names a slot that there isn't.
        """
        # An epoch has two modes where its strategy couldn't be started: then its learner trains alone.
        if posted.epoch != self.epoch or posted.kind != self.learner_mode.sends:
            return
        vector = None
        if posted.kind == "gradients":
            if self._ring is None:
                raise TensorError("the learner posted a gradient, and there is no ring")
            vector = self._ring.slot(posted.slot)
        self._number = 1 if posted.alone else self._number + 1
        post = LearnerRequest(
            self._number, posted.kind, posted.policy_version, posted.samples, vector, posted.left
        )
        self._open[post.number] = post, posted.number
        self._posts.put_nowait(post)

    async def next_post(self) -> LearnerRequest:
        """Wait for the next post; cancelling loses none."""
        return await self._posts.get()

    def answered(
        self,
        post: LearnerRequest,
        kind: AnswerKind,
        content: int,
        learning_rate: float | None = None,
        *,
        end_update: bool = False,
    ) -> RequestAnswer | None:
        """Return the message that answers a post; None when nobody waits for it any more."""
        waiting, theirs = self._open.get(post.number, (None, 0))
        if waiting is not post:
            return None
        del self._open[post.number]
        return RequestAnswer(theirs, self.epoch, kind, content, learning_rate, end_update)

    def close(self) -> None:
        """Free the memory."""
        self._close_ring()
        self._close_shared()

    def _close_ring(self) -> None:
        self._ring = None
        if self._ring_region is not None:
            self._ring_region.close()
            self._ring_region = None

    def _close_shared(self) -> None:
        if self._shared_region is not None:
            self._shared_region.close()
            self._shared_region = None
