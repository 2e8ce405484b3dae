"""A learner as a stage of a pipeline: which order is in force, and what becomes of it.

    ordered ──► ready ──► (rank 0) update after update; at every K-th all ranks get a copy of the whole state
                   │      (others) one update after another served
                   └──► over: told to finish │ broken: a neighbour failed │ ended by another order or learner
                   mode

Without an order the learner stands still. Rank 0 trains as any learner does, but that its gradients come from
all ranks. What peers post on its board it takes at those copies only, so that all ranks get it; the others
have what rank 0 has, and take nothing from theirs.

A neighbour's failure ends the generation here: the update is dropped, and with it the experience that it was
made from; parameters and optimizer are those of the last update or copy.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from p2pdrl.errors import ConfigError, PeerTimeoutError, TransportError
from p2pdrl.pipeline.plan import StageNews, StageOrder
from p2pdrl.workers.pipeline.protocol import Blocks, Finish, Measure, News, StartStage, Trace, Traced
from p2pdrl.workers.protocol import ToLearner
from p2pdrl.workers.replica import Replica

if TYPE_CHECKING:
    from p2pdrl.rl.pipeline.rank import Assembled, Pipelined
    from p2pdrl.rl.pipeline.runner import Recorder
    from p2pdrl.rl.trainer import StepStats, Trainer
    from p2pdrl.workers.pipeline.rank import Pipes, WorkerRank

__all__ = ["StageRunner"]

POLL_S = 0.05
_ENGINE_ONLY = ("stages", "bubble", "step_s", "activation_bytes")
"""Figures of the engine that are told as the rank's."""


class StageRunner:
    """The rank that is taken, and the order that was heard.

    Args:
        listen: hears the daemon's messages, without waiting, obeys them, and reports when that is due.
        paused: whether the learner is held.
        ahead: what the daemon has said and wasn't heard yet; called in other threads.
    """

    def __init__(
        self,
        trainer: Trainer,
        replica: Replica,
        *,
        say: Callable[[Blocks | News | Traced], None],
        listen: Callable[[], None],
        paused: Callable[[], bool],
        ahead: Callable[[], Sequence[ToLearner]] = list,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainer = trainer
        self._replica = replica
        self._say = say
        self._listen = listen
        self._paused = paused
        self._ahead = ahead
        self._clock = clock
        self._rank: WorkerRank | None = None
        self._recorder: Recorder | None = None
        self._order: tuple[StageOrder, Pipes] | None = None
        self._own: tuple[Any, Any] | None = None
        self._stages = self._stages_next = self._ended = False
        self._finish: int | None = None
        self._asked: list[Measure] = []
        self._costs: dict[int, Blocks] = {}
        self._figures: dict[str, float] = {}
        self._idle_since_s = 0.0

    # What the learner asks

    @property
    def takes(self) -> bool:
        """Whether what lies on the board is taken between any two updates."""
        return self._rank is None

    @property
    def trains(self) -> bool:
        """Whether the learner makes updates at all: not without an order, nor on any rank but the first."""
        if not self._stages:
            return True
        rank = self._rank
        return rank is not None and rank.head is not None and self._finish != rank.order.generation

    @property
    def serves(self) -> bool:
        """Whether updates of another rank are waited for: `work` does so, and nothing else need wait."""
        return self._rank is not None and self._rank.server is not None

    def metrics(self, own: dict[str, float]) -> dict[str, float]:
        """Return what to report: the trainer's figures and the rank's; none of the former where it serves."""
        return self._figures if self.serves else {**own, **self._figures}

    # What the daemon says

    def hear(self, message: StartStage | Finish | Measure | Trace, take_fd: Callable[[], int]) -> None:
        """Note what is to be done between two updates; another order ends the wait for a neighbour at once.

        ``take_fd`` claims the next descriptor that came along.

        Raises:
            WorkerError: a descriptor is missing.
        """
        match message:
            case Trace():
                self._say(self._trace(message))
            case Finish(generation=generation):
                self._finish = generation
            case Measure():
                self._asked.append(message)
            case StartStage(order=order):
                pipes = {side: (take_fd(), ticket) for side, ticket in message.tickets}
                self._forget_order()
                self._order = order, pipes
                self._finish = None  # of a generation before, which may have had the same number
                if not self._stages_next:
                    self._forget_order()
                    self._tell(order, "broken", why="the learner works by a learner_mode without stages")

    def end(self, *, stages: bool) -> None:
        """Another learner mode comes, or none: whatever is under way ends, and no order before it counts.

        ``stages``: whether the next learner mode has any.
        """
        self._ended = True
        self._stages_next = stages
        self._forget_order()

    # What the learner does

    def leave(self) -> None:
        """Leave the rank if another order or learner mode has ended it; before that one comes into force."""
        if self._interrupted():
            self._leave_rank()

    def turn(self, *, stages: bool) -> None:
        """Carry out the order that was heard last; ``stages``: whether the learner mode in force has any."""
        self._stages, self._ended = stages, False
        if self._order is None:
            return
        from p2pdrl.workers.pipeline.rank import DaemonCallbacks, make_rank

        self._replica.take()
        self._replica.publish()
        callbacks = DaemonCallbacks(
            self._listen, self._interrupted, lambda news: self._say(News(news)), self._ahead
        )
        self._answer()
        # Not before: until a rank has them, the descriptors are closed with the order.
        (order, pipes), self._order = self._order, None
        self._replica.offload()  # a share of the model has its own gradients and optimizer
        try:
            rank = make_rank(order, pipes, self._trainer, callbacks)
        except (TransportError, ConfigError, OSError) as error:
            self._replica.reload()
            if not self._interrupted():
                self._tell(order, "broken", why=str(error))
            return
        self._rank, self._recorder = rank, rank.recorder
        if rank.head is not None:
            self._own = self._trainer.engine, self._trainer.stepper
            self._trainer.engine = self._trainer.stepper = rank.head
        self._figures = rank.figures({})
        self._idle_since_s = self._clock()
        self._tell(order, "ready")
        if rank.head is not None and order.ranks > 1:
            try:
                self._begin(rank.head)
            except TransportError as error:
                self._break(rank, error)

    def step(self) -> StepStats | None:
        """Have the trainer make an update; None when a neighbour failed, and it isn't to be counted."""
        rank = self._rank
        if rank is None:
            return self._trainer.step()
        try:
            stats = self._trainer.step()
        except TransportError as error:
            self._break(rank, error)
            return None
        self._figures = rank.figures(stats.metrics)
        for name in _ENGINE_ONLY:
            stats.metrics.pop(name, None)
        return stats

    def updated(self) -> None:
        """Copy the whole state to all ranks, if that is due after the update."""
        rank = self._rank
        if rank is None or rank.head is None or rank.head.held is None:
            return
        try:
            self._copy(rank, rank.head.held)
        except TransportError as error:
            self._break(rank, error)
            return
        self._tell(rank.order, "copied")

    def work(self) -> None:
        """Do what is to be done between two updates, and on all ranks but the first serve one."""
        self._answer()
        rank = self._rank
        if rank is None:
            return
        try:
            if rank.server is not None:
                self._serve(rank)
            elif self._finish == rank.order.generation:
                self._end(rank)
            else:
                rank.carrier.check()
        except TransportError as error:
            self._break(rank, error)

    def close(self) -> None:
        """Leave, and let go of everything."""
        self._forget_order()
        self._leave_rank()

    def _interrupted(self) -> bool:
        return self._ended or self._order is not None

    def _serve(self, rank: WorkerRank) -> None:
        """Take part in an update, if one comes soon."""
        assert rank.server is not None  # noqa: S101 - callers check
        if not rank.carrier.waiting("down", POLL_S):
            now_s = self._clock()
            if self._paused():
                self._idle_since_s = now_s
            elif now_s > self._idle_since_s + rank.order.idle_timeout_s:
                rank.carrier.side = "previous"
                raise PeerTimeoutError(f"there was no update for {rank.order.idle_timeout_s:g} s")
            return
        whole = rank.server.serve()
        self._figures = rank.figures(rank.server.metrics())
        self._idle_since_s = self._clock()
        if whole is None:
            return
        assert whole.optimizer is not None  # noqa: S101 - spread with the optimizer's state only
        self._replica.become(whole.vector_D, whole.optimizer, whole.version, whole.position)
        self._trainer.reset_targets()  # those of the first rank don't travel; this one may go on without it
        self._replica.publish()
        if whole.last:
            self._over(rank)
        elif whole.step > 0:
            self._tell(rank.order, "copied")

    def _end(self, rank: WorkerRank) -> None:
        """End the pipeline, with a copy of the whole state to all ranks."""
        assert rank.head is not None  # noqa: S101 - callers check
        whole = rank.head.fetch(state=True, spread=True, last=True)
        assert whole.optimizer is not None  # noqa: S101 - fetched
        self._replica.become(whole.vector_D, whole.optimizer, self._replica.version, self._trainer.position)
        self._copy(rank, whole)
        self._over(rank)

    def _copy(self, rank: WorkerRank, whole: Assembled) -> None:
        """Take what peers have posted, let all ranks have what has become of it, and publish."""
        assert rank.head is not None  # noqa: S101 - callers check
        changed = self._replica.take()
        whole = replace(whole, version=self._replica.version, position=self._trainer.position)
        if changed:
            whole = replace(whole, vector_D=self._trainer.flat.copy(), optimizer=self._optimizer(rank.head))
        rank.head.give(whole, changed=changed)
        self._replica.publish()

    def _begin(self, head: Pipelined[Any]) -> None:
        """Have all ranks begin with this one's state: versions may be equal where states aren't."""
        from p2pdrl.rl.pipeline.rank import Assembled

        vector_D, version, position = self._trainer.flat.copy(), self._replica.version, self._trainer.position
        head.give(Assembled(0, vector_D, self._optimizer(head), version, position), changed=True)

    def _optimizer(self, head: Pipelined[Any]) -> dict[str, Any]:
        """Return copies of the optimizer's arrays, as they are in the trainer."""
        arrays = self._trainer.sidecar()
        return {item.name: np.array(arrays[item.name]) for item in head.share.optimizer.items()}

    def _over(self, rank: WorkerRank) -> None:
        """Leave in good order: the ranks behind get what is on its way to them."""
        with contextlib.suppress(TransportError):  # they tell themselves if they didn't
            rank.carrier.flush(rank.order.timeout_s)
        self._leave_rank()
        self._tell(rank.order, "over")

    def _break(self, rank: WorkerRank, error: TransportError) -> None:
        """Leave, and say why, unless the daemon itself had it end."""
        self._leave_rank()
        if self._interrupted():
            return
        side, why = rank.carrier.side, str(error)
        print(f"learner: generation {rank.order.generation} of the pipeline broke: {why}", file=sys.stderr)
        self._replica.publish()
        self._tell(rank.order, "broken", side=side, why=why, behind=rank.behind)

    def _leave_rank(self) -> None:
        """Leave the rank; the trainer works by itself again."""
        rank, self._rank, self._figures = self._rank, None, {}
        if rank is None:
            return
        rank.close()
        self._replica.reload()
        if self._own is not None:
            (self._trainer.engine, self._trainer.stepper), self._own = self._own, None

    def _forget_order(self) -> None:
        if self._order is not None:
            (_, pipes), self._order = self._order, None
            for fd, _ in pipes.values():
                os.close(fd)

    def _answer(self) -> None:
        """Say what blocks cost, if that was asked."""
        while self._asked:
            from p2pdrl.workers.pipeline.measure import measured

            self._say(measured(self._trainer, self._asked.pop(), self._costs))

    def _trace(self, asked: Trace) -> Traced:
        """Return what was done lately, in this generation or the last one."""
        clock_s = time.perf_counter()
        spans = [] if self._recorder is None else self._recorder.spans(clock_s - asked.seconds)
        return Traced(asked.number, clock_s, time.monotonic(), tuple(spans))

    def _tell(self, order: StageOrder, what: Any, **more: Any) -> None:
        self._say(News(StageNews(order.generation, what, policy_version=self._replica.version, **more)))
