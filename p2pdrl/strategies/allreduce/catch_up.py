"""How a member comes to the state of the others: the last round's result, or all of a member's state.

And how a history that begins with one member's state begins: with the mean of all members' parameters where
the `RoundQuantity` wants that. All give theirs, the one takes the mean, the others take its state as always.

A state is given while its giver stands still between two rounds; it can't go on before the taker gives its
part, so what is taken is the state after the last round exactly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import blake2b
from typing import Literal

import msgspec
import numpy as np

from p2pdrl.config.strategy import Grouped
from p2pdrl.errors import PeerRefusedError, TensorError, TransportError
from p2pdrl.group.calls import HOLD
from p2pdrl.group.service import Group
from p2pdrl.strategies.allreduce.averager import (
    NOTHING,
    ROUTE,
    Average,
    Averager,
    ReduceAnswer,
    ReduceRequest,
    RoundContribution,
    RoundQuantity,
)
from p2pdrl.strategies.allreduce.history import CatchUpPlan, RoundHistory
from p2pdrl.strategies.learner_requests import RequestQueue
from p2pdrl.strategies.offload import heavy, through
from p2pdrl.strategies.own_vector import read_now
from p2pdrl.strategies.protocol import LearnerRequest, StrategyContext
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.mix import check_finite
from p2pdrl.transport.codec import decode
from p2pdrl.transport.protocol import Refusal, Reply

__all__ = ["CatchingUp"]

Wanted = Literal["result", "state"]

POLL_S = 0.02
BEGIN_S = 0.5
"""For how long a member is asked again that hasn't begun with our view: all begin at about the same time."""
NOT_BEGUN = 409
"""Status with which a member says so."""
OUT_OF_STEP = 410
"""Status with which a member says that it has no state to give itself."""


class CatchingUp:
    """One member's place in the group's history."""

    def __init__(
        self,
        context: StrategyContext,
        config: Grouped,
        work: RoundQuantity,
        *,
        history: RoundHistory,
        requests: RequestQueue,
        group: Group,
    ) -> None:
        self._context, self._config, self._work, self._group = context, config, work, group
        self._history, self._requests = history, requests
        self._board = context.learner.board
        self.in_step = False
        """Whether our state is the one that our history leads to."""
        self.kept: Average | None = None
        """Result of the last round; None where others can't come to our state by it."""
        self._content = 0

    def check(self, request: LearnerRequest | None) -> None:
        """Notice what takes a learner in synchronous out of step."""
        if not self._work.synchronous:
            self._requests.restarted = False
            return
        if request is not None and self._requests.restarted:
            self._requests.restarted = False
            self.in_step = False
        if self._content != self._board.content_id:
            self.in_step = False  # the node replaced the learner's state

    def stepped(self, request: LearnerRequest | None) -> None:
        """A round was applied; a learner in synchronous that wasn't there missed a step."""
        if request is None and self._work.synchronous:
            self.in_step = False

    def arrived(self) -> None:
        """Our state, as it is now, is where the history is; what we kept was another round's result."""
        self.in_step, self.kept = True, None
        self._content = self._board.content_id

    # Beginning

    async def found(self, plan: CatchUpPlan, averager: Averager) -> None:
        """Begin a history with the first leader's state; every member calls this.

        Args:
            plan: a fresh one.
            averager: its first round is the one before ``plan.number`` if that is to be the mean's.
        """
        leads = self._context.swarm.node_id == plan.leaders[0]
        if self._work.seeded and len(averager.view.members) > 1:
            request = await self._requests.next()  # while it waits for the answer, its learner stands still
            average = await averager.average(plan.number - 1, await self._own(plan))
            if leads and averager.in_force:
                await through(self._take_mean(request, average))
        if leads and averager.in_force:
            await self._lead(averager, 1)

    async def _own(self, plan: CatchUpPlan) -> RoundContribution:
        """Our parameters; nothing where they are unusable, or of another founding than the others'."""
        summary, size = self._context.swarm.summary(), self._context.size
        if summary is None or summary.lineage != plan.lineage:
            return NOTHING
        own: Float32Array = np.empty(size, np.float32)
        try:
            snapshot = await heavy(own.nbytes, lambda: read_now(self._board, own, self._context.max_abs))
            return RoundContribution(own, 1.0, snapshot.policy_version)
        except TensorError as error:
            text = f"our own parameters don't count in the group's beginning: {error}"
            self._context.swarm.tell("poisoned", text, warning=True)
            return NOTHING

    async def _take_mean(self, request: LearnerRequest | None, average: Average) -> None:
        """Have the mean in our parameters' place; the optimizer stays as it is."""
        if not average.total:
            return
        version, board = max(average.versions), self._board
        await heavy(average.vector.nbytes, lambda: board.post_set(average.vector, None, version))
        if request is not None:
            self._requests.answer(request, "set")

    # Taking

    async def result(self, plan: CatchUpPlan, averager: Averager, out: Float32Array) -> Average | None:
        """Fetch the result of round ``plan.number - 1`` into ``out``; None when nobody gives it."""
        until_s = self._context.clock.monotonic() + min(BEGIN_S, self._config.deadline_s)
        ask = plan.leaders
        while ask:
            later = []
            for peer in ask:
                try:
                    average = await self._result_of(peer, plan, averager, out)
                except PeerRefusedError as refusal:
                    if refusal.status == NOT_BEGUN:
                        later.append(peer)
                    continue
                if average is not None:
                    return average
            if self._context.clock.monotonic() >= until_s:
                break
            ask = tuple(later)
            await asyncio.sleep(POLL_S)
        return None

    async def _result_of(
        self, peer: str, plan: CatchUpPlan, averager: Averager, out: Float32Array
    ) -> Average | None:
        """Fetch it from one member; None when what it gives is none.

        Raises:
            PeerRefusedError: it gives nothing.
        """
        room = out.data.cast("B")
        answer = await self._request("result", peer, averager, plan.number - 1, room)
        if answer is None or answer[1] != room.nbytes or answer[0].before != self._history.digest:
            return None
        head = answer[0]
        if not head.weights or len(head.weights) != len(head.learning_rates):
            return None
        try:
            await heavy(out.nbytes, lambda: check_finite(out, self._context.max_abs))
        except TensorError as error:
            self._context.swarm.strike(peer, str(error))
            return None
        self._history.take(head.number, head.digest, head.before)
        self.kept = Average(
            vector=out,
            weights=head.weights,
            versions=head.versions,
            norm=head.square**0.5,
            spread=head.spread,
            learning_rates=head.learning_rates,
            ends_update=head.ends_update,
        )
        return self.kept

    async def state(self, plan: CatchUpPlan, averager: Averager, number: int) -> bool:
        """Take a member's state, as it is before round ``number``; False when nobody gives it."""
        me, summary = self._context.swarm.node_id, self._context.swarm.summary()
        order = [*plan.leaders, *(peer for peer in averager.view.members if peer not in plan.leaders)]
        foreign = summary is None or summary.lineage != plan.lineage
        nobody = True
        for peer in order:
            if peer == me:
                continue
            try:
                answer = await self._request("state", peer, averager, number, self._work.room())
            except PeerRefusedError as refusal:
                nobody = nobody and refusal.status == OUT_OF_STEP
                continue
            nobody = False
            fits = answer is not None and answer[0].number == number - 1
            if answer is not None and fits and await self._adopt(peer, plan, answer, foreign=foreign):
                return True
        if nobody and me == order[0]:  # none is in step any more: the first one's state is as good as any
            await self._lead(averager, number)
        return False

    async def _adopt(
        self, peer: str, plan: CatchUpPlan, answer: tuple[ReduceAnswer, int], *, foreign: bool
    ) -> bool:
        """Have the state that ``peer`` gives."""
        why, swarm = "comes to the group's rounds", self._context.swarm
        whole = self._work.synchronous or foreign
        if whole and not await swarm.adopted(peer, plan.lineage, why):
            return False
        head, nbytes = answer
        if self._work.synchronous and await self._digest() != head.state:
            return False  # the node took another member's, who may have gone on
        try:
            if nbytes:
                await self._work.take()
        except TensorError as error:
            swarm.strike(peer, str(error))
            return False
        self._history.take(head.number, head.digest, head.before)
        self.arrived()
        return True

    async def _lead(self, averager: Averager, number: int) -> None:
        """Begin a history with our own state, as it is before round ``number``."""
        await self._work.found()
        self._history.found(averager.view.key)
        self._history.number = number - 1
        self.arrived()

    async def _request(
        self, what: Wanted, peer: str, averager: Averager, number: int, room: memoryview
    ) -> tuple[ReduceAnswer, int] | None:
        """Ask a member; return its answer and the vector's bytes; None when that fails.

        Raises:
            PeerRefusedError: 410, it is out of step itself; 409, it hasn't begun with our view; and others.
        """
        ask = ReduceRequest(what, averager.view.key, number)
        try:
            answer = await self._group.call(
                peer,
                ROUTE,
                ask,
                into=lambda _, nbytes: room if nbytes == room.nbytes else None,
                deadline_s=self._config.deadline_s,
            )
            head: ReduceAnswer = decode(answer.meta, ReduceAnswer, "state")
        except PeerRefusedError:
            raise
        except TransportError:
            return None
        return head, answer.vector_nbytes

    # Giving

    async def serve(self, ask: ReduceRequest, check: Callable[[], None]) -> Reply:
        """Give the last result, or the state before round ``ask.number``, once our learner stands still.

        Args:
            check: raises once the asker's view has ended.

        Raises:
            Refusal: we are out of step (410), or weren't ready in time (503).
        """
        until_s = self._context.clock.monotonic() + HOLD * self._config.deadline_s
        what: Wanted = "result" if ask.what == "result" else "state"
        wanted = ask.number if what == "result" else ask.number - 1
        while self._context.clock.monotonic() < until_s:
            check()
            if not self.in_step:
                raise Refusal(OUT_OF_STEP, "this member is out of step itself")
            still = self._requests.open is not None or not self._work.synchronous or what == "result"
            if self._history.number == wanted and still:
                return await self._give(what)
            await asyncio.sleep(POLL_S)
        raise Refusal(503, "this member's learner is still at work")

    async def _give(self, what: Wanted) -> Reply:
        history, kept = self._history, self.kept
        head = ReduceAnswer(history.number, digest=history.digest, before=history.before)
        if what == "state":
            if self._work.synchronous:
                head = msgspec.structs.replace(head, state=await self._digest())
            return Reply(msgspec.msgpack.encode(head), vector=self._work.state())
        if kept is None:
            raise Refusal(OUT_OF_STEP, "this member has no result to give")
        head = msgspec.structs.replace(
            head,
            weights=kept.weights,
            versions=kept.versions,
            square=kept.norm**2,
            spread=kept.spread,
            learning_rates=kept.learning_rates,
            ends_update=kept.ends_update,
        )
        return Reply(msgspec.msgpack.encode(head), vector=kept.vector.data.cast("B"))

    async def _digest(self) -> bytes:
        """Of our parameters as they are now."""
        size = self._context.size

        def work() -> bytes:
            vector: Float32Array = np.empty(size, np.float32)
            self._board.now(vector)
            return blake2b(vector.data, digest_size=16).digest()

        return await heavy(4 * size, work)
