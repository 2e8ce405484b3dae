"""The inference process of a node: acts with the node's newest policy on observations that others bring.

Started by the daemon (`node.inference`) as ``python -m p2pdrl.workers.inference --fd N --parent PID --policy
FD …``. One turn of its loop: read the message that names a slot, copy the parameters where there are newer
ones in shared memory, act on the slot's observations, say so. It keeps no state that must survive: it ends
when it is killed, when the daemon dies or closes its socket.

With ``node.actors.inference = "batched"`` the node's actors ask it, too, each at every step and without a
message (`ActorBatches`; Rapid's forward-pass workers, and SEED RL's inference, Espeholt 2020, arXiv
1910.06591, section 3). Both kinds are served in turn, with one copy of the parameters.
"""

from __future__ import annotations

import argparse
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from p2pdrl.config.task import TaskConfig
from p2pdrl.errors import ConfigError, LayoutMismatchError, WorkerError
from p2pdrl.tensors.inference_slots import InferenceSlots, StepLanes, StepSpec
from p2pdrl.tensors.shared_memory import Doorbell, SharedRegion
from p2pdrl.tensors.shared_policy import SharedPolicy
from p2pdrl.workers.child import child_main, made_for_good
from p2pdrl.workers.protocol import (
    ActedForActors,
    FrameBuffer,
    Infer,
    InferenceReady,
    Inferred,
    StartInference,
    ToInference,
    UseSlots,
    UseSteps,
    decode_to_inference,
    frame,
)

if TYPE_CHECKING:
    from p2pdrl.rl.inference import PolicyInference

__all__ = ["ActorBatches", "InferenceWorker", "StepBatcher", "main"]

READ_BYTES = 1 << 16
TELL_EVERY_S = 1.0
MOST_TOLD = 8192
"""Batches that are remembered to be told of, where the daemon reads nothing for long."""


class InferenceWorker:
    """A policy, the memory that its parameters come from, and the slots that batches come in.

    Args:
        policy: as the daemon writes it, with one version there at least.

    Raises:
        LayoutMismatchError: the daemon's parameters aren't those of this network.
    """

    def __init__(self, inference: PolicyInference, policy: SharedRegion, size: int) -> None:
        if inference.size != size:
            raise LayoutMismatchError(f"this network has {inference.size} parameters, the node's has {size}")
        self._inference = inference
        self._shared = SharedPolicy(policy, size, inference.obs_shape)
        self._vector_D = np.empty(size, np.float32)
        self._writes = 0
        self._slots: InferenceSlots | None = None

    def use_slots(self, region: SharedRegion, rows: int, slots: int) -> None:
        """Take the memory for batches of up to ``rows`` observations.

        Raises:
            LayoutMismatchError: it is too small.
        """
        self._slots = InferenceSlots(region, self._inference.spec, rows, slots)

    def infer(self, request: Infer) -> Inferred:
        """Act on a batch, with the newest parameters.

        Raises:
            WorkerError: there are no slots yet, or there is no policy.
        """
        if self._slots is None:
            raise WorkerError("the daemon sent a batch before the memory for it")
        self._refresh()
        slot = self._slots[request.slot]
        answer = self._inference.answer(slot.obs_NX[: request.rows], request.greedy)
        slot.actions_NA[: request.rows] = answer.actions_NA
        slot.log_probs_N[: request.rows] = answer.log_probs_N
        if answer.values_N is not None:
            slot.values_N[: request.rows] = answer.values_N
        return Inferred(request.slot, answer.policy_version)

    def step_spec(self, shares: tuple[int, ...]) -> StepSpec:
        """Return what actors with so many environments each ask with, and are answered by."""
        return self._inference.step_spec(shares)

    def step(self, lanes: StepLanes, batch: StepBatch) -> None:
        """Act for the actors of a batch, with the newest parameters, and write their answers.

        Raises:
            WorkerError: there is no policy.
        """
        self._refresh()
        whole = len(batch.lanes) == len(lanes.rows)
        rows = [lanes.rows[number] for number in batch.lanes]
        asked = {
            name: array if whole else np.concatenate([array[part] for part in rows])
            for name, array in lanes.asked.items()
        }
        answers, version = self._inference.step(asked)
        for name, array in lanes.answered.items():
            if whole:
                array[...] = answers[name]
                continue
            at = 0
            for part in rows:
                array[part] = answers[name][at : at + part.stop - part.start]
                at += part.stop - part.start
        for number, question in zip(batch.lanes, batch.questions, strict=True):
            lanes.answer(number, question, version)

    def _refresh(self) -> None:
        writes = self._shared.writes
        if writes and writes == self._writes:
            return
        acting = self._shared.read(self._vector_D)
        if acting is None:  # it was rewritten all the time: the next batch tries again
            if not self._writes:
                raise WorkerError("there is no policy to read")
            return
        self._inference.use(self._vector_D, acting)
        self._writes = writes


class StepBatch(NamedTuple):
    """Which lanes are answered together.

    Args:
        lanes: numbers, rising.
        questions: of each, as `StepLanes.questions` said.
        since_s: when the first of them was seen.
    """

    lanes: list[int]
    questions: list[int]
    since_s: float


class StepBatcher:
    """Says when actors that have asked are answered, and which of them together. Pure: time comes in.

    A batch is due once all actors that are within an unroll have asked, once there are ``max_rows`` rows, or
    when its first question has waited for ``wait_s``. The oldest questions go first.

    Args:
        shares: rows of each lane.
    """

    def __init__(self, shares: tuple[int, ...], max_rows: int, wait_s: float) -> None:
        self._shares = shares
        self._max_rows = max_rows
        self._wait_s = wait_s
        self._since_s: dict[int, float] = {}
        self._questions: dict[int, int] = {}
        self._all_asked = False

    def look(self, lanes: StepLanes, now_s: float) -> None:
        """Note who waits for an answer."""
        questions, acting = lanes.questions, lanes.acting
        found = {number: question for number, question in enumerate(questions) if question}
        self._questions = found
        self._since_s = {number: self._since_s.get(number, now_s) for number in found}
        self._all_asked = all(question for question, acts in zip(questions, acting, strict=True) if acts)

    def due_in_s(self, now_s: float) -> float | None:
        """Return when the next batch is to be answered, 0 for now; None while nobody waits."""
        if not self._questions:
            return None
        if self._all_asked or sum(self._shares[number] for number in self._questions) >= self._max_rows:
            return 0.0
        return max(0.0, min(self._since_s.values()) + self._wait_s - now_s)

    def take(self) -> StepBatch:
        """Return the next batch: the oldest questions that fit, one at least."""
        taken: list[int] = []
        room = self._max_rows
        for number in sorted(self._questions, key=lambda number: (self._since_s[number], number)):
            if taken and self._shares[number] > room:
                break
            taken.append(number)
            room -= self._shares[number]
        taken.sort()
        since_s = min(self._since_s.pop(number) for number in taken)
        return StepBatch(taken, [self._questions.pop(number) for number in taken], since_s)


class ActorBatches:
    """Answers the node's actors.

    Args:
        asked: the doorbell that they ring.
        answered: theirs, in the order of the lanes.
    """

    def __init__(
        self,
        worker: InferenceWorker,
        lanes: StepLanes,
        asked: Doorbell,
        answered: tuple[Doorbell, ...],
        *,
        batcher: StepBatcher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._lanes = lanes
        self.asked = asked
        self._answered = answered
        self._batcher = batcher
        self._clock = clock
        self._environments: list[int] = []
        self._seconds: list[float] = []
        self._told_s = clock()

    def serve(self) -> float | None:
        """Answer a batch that is due; return in how many seconds the next one is, None while nobody asks.

        One batch at a time: what comes meanwhile from elsewhere has its turn between two.
        """
        self.asked.hush()
        now_s = self._clock()
        self._batcher.look(self._lanes, now_s)
        due_s = self._batcher.due_in_s(now_s)
        if due_s != 0.0:
            return due_s
        batch = self._batcher.take()
        self._worker.step(self._lanes, batch)
        for number in batch.lanes:
            self._answered[number].ring()
        if len(self._seconds) < MOST_TOLD:
            rows = [self._lanes.rows[number] for number in batch.lanes]
            self._environments.append(sum(part.stop - part.start for part in rows))
            self._seconds.append(self._clock() - batch.since_s)
        # who asked while it was computed didn't wake anybody; a batch of one that had to wait isn't due yet
        return self._batcher.due_in_s(self._clock())

    def news(self) -> ActedForActors | None:
        """Return what there is to tell the daemon, now and then."""
        now_s = self._clock()
        if not self._seconds or now_s - self._told_s < TELL_EVERY_S:
            return None
        self._told_s = now_s
        told = ActedForActors(self._environments, self._seconds)
        self._environments, self._seconds = [], []
        return told


class _FromDaemon:
    """Messages, and the descriptors that come beside them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = FrameBuffer()
        self.fds: deque[int] = deque()

    def __iter__(self) -> Iterator[ToInference | None]:
        """Yield messages until the daemon closes its socket, None while there is none."""
        while True:
            if not select.select([self._sock], [], [], 0.0)[0]:
                yield None
                continue
            data, fds, _, _ = socket.recv_fds(self._sock, READ_BYTES, 4)
            self.fds += fds
            if not data:
                return
            for body in self._frames.feed(data):
                yield decode_to_inference(body)


def _live(sock: socket.socket, options: argparse.Namespace) -> None:
    messages = _FromDaemon(sock)
    worker: InferenceWorker | None = None
    batches: ActorBatches | None = None
    start: StartInference | None = None
    for message in messages:
        if message is None:
            _turn(sock, batches)
        elif isinstance(message, StartInference):
            with made_for_good():
                start, worker = message, _start(sock, message, options.policy)
        elif worker is None or start is None:
            raise WorkerError("the daemon didn't say first what to act with")
        elif isinstance(message, UseSlots):
            region = SharedRegion.attach(messages.fds.popleft(), message.nbytes)
            worker.use_slots(region, message.rows, message.slots)
        elif isinstance(message, UseSteps):
            region = SharedRegion.attach(messages.fds.popleft(), message.nbytes)
            batches = _batches(worker, start, region)
        else:
            sock.sendall(frame(worker.infer(message)))


def _turn(sock: socket.socket, batches: ActorBatches | None) -> None:
    """Act for actors, or sleep until anybody wants anything."""
    if batches is None:
        select.select([sock], [], [])
        return
    due_s = batches.serve()
    if due_s != 0.0:
        select.select([sock.fileno(), batches.asked.waiter], [], [], due_s)
    news = batches.news()
    if news is not None and select.select([], [sock], [], 0.0)[1]:
        sock.sendall(frame(news))


def _batches(worker: InferenceWorker, start: StartInference, region: SharedRegion) -> ActorBatches:
    lanes = StepLanes(region, worker.step_spec(start.shares))
    asked, *answered = (Doorbell.attach(*bell) for bell in start.bells)
    batcher = StepBatcher(start.shares, start.max_rows, start.step_wait_s)
    return ActorBatches(worker, lanes, asked, tuple(answered), batcher=batcher)


def _start(sock: socket.socket, start: StartInference, policy_fd: int) -> InferenceWorker:
    import torch

    torch.set_num_threads(start.threads)
    from p2pdrl.rl.inference import PolicyInference  # torch is slow to import: not before it is needed

    task = msgspec.json.decode(start.task, type=TaskConfig)
    inference = PolicyInference(task, start.seed, start.device, allow_import=start.allow_import)
    region = SharedRegion.attach(policy_fd, start.policy_nbytes, writable=False)
    worker = InferenceWorker(inference, region, start.policy_size)
    if inference.refusal and not start.shares:
        raise ConfigError(inference.refusal)
    steps = worker.step_spec(start.shares) if start.shares else None
    sock.sendall(frame(InferenceReady(inference.spec, str(inference.device), inference.refusal, steps)))
    return worker


def main() -> int:
    """Entry point of the child process; returns its exit code."""
    return child_main("inference process", _live, ["--policy"])


if __name__ == "__main__":
    sys.exit(main())
