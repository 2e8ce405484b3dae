"""A learner as a coroutine, that follows its `LearnerMode` as the real one does.

Its problem is f(x) = ½ |x|² unless the test gives another gradient, so that every result can be computed by
hand.

Shapes: every vector is flat, of D elements; names carry no suffix.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import numpy as np

from p2pdrl.config.learner_mode import FREE, LearnerMode
from p2pdrl.strategies.protocol import AnswerKind, LearnerRequest
from p2pdrl.tensors.board import BoardSpec, DaemonBoard, LearnerBoard
from p2pdrl.tensors.layout import Float32Array, Layout, TensorEntry
from p2pdrl.tensors.shared_memory import SharedRegion

__all__ = ["FakeLearner"]

Gradient = Callable[[Float32Array], Float32Array]
Step = Callable[[Float32Array, Float32Array], Float32Array]


class FakeLearner:
    """A learner as a coroutine: plain gradient descent under any learner_mode.

    Args:
        start: its first vector.
        learner_mode: how it works.
        gradient: of its own loss; None is that of ½ |x|².
        learning_rate: of its own steps, and told to servers.
        samples: behind each gradient.
        period_s: time that one gradient takes, or what draws it anew for each.
        request_s: from a request to the daemon, and from its answer to the learner.
        absorbs_first: takes what was posted to the board before that time, as a real learner does, not after.
        gradients: of one update; all the same, and each counts as an update.
        collect_s: time before the first gradient of an update.
        step: gives the next vector from vector and gradient; None is plain gradient descent.
    """

    def __init__(
        self,
        start: Float32Array,
        learner_mode: LearnerMode = FREE,
        *,
        gradient: Gradient | None = None,
        learning_rate: float = 0.1,
        samples: int = 1,
        period_s: float | Callable[[], float] = 0.01,
        request_s: float = 0.0,
        absorbs_first: bool = False,
        gradients: int = 1,
        collect_s: float = 0.0,
        step: Step | None = None,
    ) -> None:
        spec = BoardSpec(Layout((TensorEntry("x", (start.size,)),)))
        self._region = SharedRegion.create(spec.nbytes, "learner")
        self.board = DaemonBoard(self._region, spec)
        self._own = LearnerBoard(self._region, spec)
        self.x = start.astype(np.float32)
        self.version = 10
        self.learner_mode = learner_mode
        self.gradient = gradient if gradient is not None else lambda x: x
        self.learning_rate = learning_rate
        self.samples = samples
        self.period_s = period_s
        self.request_s = request_s
        self.absorbs_first = absorbs_first
        self.gradients = gradients
        self.collect_s = collect_s
        self.collected_s = 0.0
        """How long the last collection took."""
        self._preempted = asyncio.Event()
        self.left = 0
        """Gradients of the present update that are still to be computed."""
        self.shortened = 0
        """Updates that an answer ended."""
        self.told_learning_rate: float | None = None
        """With the last answer."""
        self.step = step if step is not None else self._descend
        self.updates = 0
        self.waited_s = 0.0
        self.history: list[Float32Array] = []
        """The vector after each update, when ``keep_history`` is set."""
        self.keep_history = False
        self.idle: Callable[[], None] = lambda: None
        """Called now and then by a learner that works by orders only."""
        self.on_update: Callable[[int], None] = lambda _updates: None
        self._requests: asyncio.Queue[LearnerRequest] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[AnswerKind]] = {}
        self._number = 0
        self._extra = np.zeros(start.size, np.float32)
        self._sum = np.zeros(start.size, np.float32)
        self._summed = 0
        self._own.publish(self.x, None, self.version)

    async def next_request(self) -> LearnerRequest:
        """Wait for the learner's next request."""
        return await self._requests.get()

    def answer(
        self,
        request: LearnerRequest,
        kind: AnswerKind,
        learning_rate: float | None = None,
        *,
        end_update: bool = False,
    ) -> None:
        """Let the learner go on."""
        self.told_learning_rate = learning_rate
        if end_update:
            self.shortened += 1
            self.left = 0
        future = self._answers.get(request.number)
        if future is None or future.done():
            return
        if self.request_s:
            asyncio.get_running_loop().call_later(self.request_s, _settle, future, kind)
        else:
            future.set_result(kind)

    def preempt(self) -> None:
        """End the collection under way."""
        if not self._answers:
            self._preempted.set()

    async def _collect(self) -> None:
        """Sleep as long as a collection takes, or until it is preempted."""
        self._preempted.clear()
        if not self.learner_mode.preempted:
            await asyncio.sleep(self.collect_s)
            self.collected_s = self.collect_s
            return
        began_s = asyncio.get_running_loop().time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.collect_s):
                await self._preempted.wait()
        self.collected_s = asyncio.get_running_loop().time() - began_s

    async def run(self, updates: int | None = None) -> None:
        """Make ``updates`` updates (None: for ever)."""
        made = 0
        while updates is None or made < updates:
            if not self.left:
                self.left = self.gradients
                if self.collect_s:
                    await self._collect()
            if self.absorbs_first:
                self.absorb()
            await asyncio.sleep(self.next_period_s())
            if self.learner_mode.stages:
                self.left = 0
                self.idle()
                continue  # it works by orders only, see `FakeStages`
            self.left -= 1
            await self._update()
            made += 1

    def next_period_s(self) -> float:
        """The time that the next gradient takes."""
        return self.period_s() if callable(self.period_s) else self.period_s

    async def _update(self) -> None:
        if not self.absorbs_first:
            self.absorb()
        gradient = self.gradient(self.x).astype(np.float32)
        if self.learner_mode.sends == "gradients":
            await self._send(gradient)
        else:
            self.x = self.step(self.x, gradient)
        self.version += 1
        self.updates += 1
        self.publish()
        if self.learner_mode.sends == "parameters" and self.updates % self.learner_mode.every == 0:
            await self._ask(self.make_request("parameters", None))
            self.absorb()
            self.publish()
        if self.keep_history:
            self.history.append(self.x.copy())
        self.on_update(1)

    async def _send(self, gradient: Float32Array) -> None:
        self._sum += gradient
        self._summed += 1
        if self._summed < self.learner_mode.every:
            if self.learner_mode.steps:
                self.x = self.step(self.x, gradient)
            return
        request = self.make_request("gradients", self._sum.copy(), self._summed * self.samples)
        self._sum[:] = 0
        self._summed = 0
        if self.learner_mode.ahead:
            self._answers[request.number].add_done_callback(lambda done: self._late(request, done))
            began_s = asyncio.get_running_loop().time()
            while len(self._answers) > self.learner_mode.ahead:
                await asyncio.wait(self._answers.values(), return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(0)
            self.waited_s += asyncio.get_running_loop().time() - began_s
            gradient = gradient + self._extra
            self._extra[:] = 0
        else:
            kind = await self._ask(request)
            if kind == "replace" and request.vector is not None:
                gradient = request.vector.copy()
            elif kind == "add" and request.vector is not None:
                gradient = gradient + request.vector
            elif kind == "set":
                self.absorb()
                return
        if self.learner_mode.steps:
            self.x = self.step(self.x, gradient)
        self.absorb()

    def _descend(self, x: Float32Array, gradient: Float32Array) -> Float32Array:
        told = self.told_learning_rate
        return x - np.float32(self.learning_rate if told is None else told) * gradient

    def _late(self, request: LearnerRequest, done: asyncio.Future[AnswerKind]) -> None:
        del self._answers[request.number]
        if not done.cancelled() and done.result() == "add" and request.vector is not None:
            self._extra += request.vector

    def make_request(
        self, kind: str, vector: Float32Array | None, samples: int | None = None
    ) -> LearnerRequest:
        """Send ``gradients`` or ``parameters``; whoever calls this by hand waits for no answer."""
        self._number += 1
        made = LearnerRequest(
            self._number,
            "gradients" if kind == "gradients" else "parameters",
            self.version,
            self.samples if samples is None else samples,
            vector,
            self.left,
        )
        self._answers[made.number] = asyncio.get_running_loop().create_future()
        if self.request_s:
            asyncio.get_running_loop().call_later(self.request_s, self._requests.put_nowait, made)
        else:
            self._requests.put_nowait(made)
        return made

    async def _ask(self, request: LearnerRequest) -> AnswerKind:
        began_s = asyncio.get_running_loop().time()
        try:
            return await self._answers[request.number]
        finally:
            self.waited_s += asyncio.get_running_loop().time() - began_s
            del self._answers[request.number]

    def absorb(self) -> None:
        """Take what was posted to the board."""
        self.board.flush()
        taken = self._own.take()
        if taken is None:
            return
        if taken.kind == "set":
            self.x = taken.vector.copy()
            self.version = taken.policy_version
        else:
            self.x = self.x + taken.vector
            self.version = max(self.version, taken.policy_version)
        self.publish()

    def publish(self) -> None:
        """Show the vector as it is."""
        self._own.publish(self.x, None, self.version)

    def restart(self) -> None:
        """Number requests from 1 again, as a learner process that was started anew does."""
        self._number = 0

    def drop_posts(self) -> None:
        """Wait for no answer any more: the strategy that was asked has ended."""
        while not self._requests.empty():
            self._requests.get_nowait()
        for answer in tuple(self._answers.values()):
            if not answer.done():
                answer.set_result("none")

    def now(self) -> Float32Array:
        """The vector with everything that was posted."""
        out = np.empty_like(self.x)
        self.board.now(out)
        return out

    def close(self) -> None:
        """Free the board."""
        self._region.close()


def _settle(future: asyncio.Future[AnswerKind], kind: AnswerKind) -> None:
    if not future.done():
        future.set_result(kind)
