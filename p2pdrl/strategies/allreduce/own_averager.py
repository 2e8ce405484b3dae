"""Exact averaging over the swarm's own connections: every member ends with the same bits.

The vector is cut into contiguous pieces; each has an owner. A member sends each owner its part of that
piece in one call, and the answer, which is held until all parts have come, carries the average. So a round
is one round trip, and moves 2·D·(n−1)/n elements each way and member: as a ring does (Patarasu and Yuan
2009), without its n−1 steps. A vector of less than `LEAST_PIECE` elements per member has fewer owners,
down to one: for short vectors the number of calls is what costs.

The owner sums in the order of the members and rounds once; the others decode its bytes. Parts come
compressed; averages go back dense: float32 when compression is ``none``, else bf16.

What is lost is sent again (`group.holding`). A member where nobody listens is doubted at once. One that stays
silent is asked whether it is alive after `AdaptiveTimeout` (at most `ASK_S`), and doubted when it doesn't
answer; one that is alive, whose learner is still at work, has until ``deadline_s``.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from typing import Any

from p2pdrl.config.strategy import Grouped
from p2pdrl.errors import PoisonedVectorError, WireError
from p2pdrl.group.adaptive_timeout import AdaptiveTimeout
from p2pdrl.group.rendezvous import ranked
from p2pdrl.group.service import Group, GroupView
from p2pdrl.strategies.allreduce.averager import Average, RoundContribution
from p2pdrl.strategies.allreduce.liveness import LivenessCheck
from p2pdrl.strategies.allreduce.messages import ROUTE, ReduceAnswer, ReduceRequest
from p2pdrl.strategies.allreduce.reduce_scatter import AverageMemory, Formats, OwnedPiece, PieceOwner
from p2pdrl.strategies.offload import heavy
from p2pdrl.strategies.protocol import StrategyContext
from p2pdrl.tensors import wire
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.mix import check_finite
from p2pdrl.tensors.wire import WireDtype
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

__all__ = ["LEAST_PIECE", "ViewAverager", "cut_pieces"]

LEAST_PIECE = 1 << 16
"""Elements that a piece has at least, unless it is the only one."""
SLACK_S = 1.0
"""Callers wait so much longer than owners, so that owners say who is missing."""
RETRY_S = 0.25
"""Pause before our own part of a round is given again."""


def cut_pieces(view: GroupView, size: int, least: int | None = None) -> tuple[OwnedPiece, ...]:
    """Cut ``size`` elements among the members of ``view``; the same at all of them.

    Args:
        view: whose members own the pieces, in rendezvous order where not all do.
        size: D.
        least: elements of a piece, see `LEAST_PIECE`.
    """
    most = max(1, size // (LEAST_PIECE if least is None else least))
    owners = sorted(ranked(str(view.key), view.members)[: min(most, size)])
    edges = [index * size // len(owners) for index in range(len(owners) + 1)]
    return tuple(OwnedPiece(owner, slice(edges[i], edges[i + 1])) for i, owner in enumerate(owners))


class ViewAverager:
    """`Averager` for one view; serves the parts of the others, too.

    Args:
        context: what the node gives.
        config: the strategy's options.
        group: told whom we doubt.
        view: in which it averages.
        memory: taken over from view to view.
        timeout: learns how long rounds take, through all views.
        first: number of the first round.
        raw: whether that round's vectors travel as float32 whatever the config says.
        spread: whether owners measure how far the parts are apart.
    """

    def __init__(
        self,
        context: StrategyContext,
        config: Grouped,
        group: Group,
        view: GroupView,
        *,
        memory: AverageMemory,
        timeout: AdaptiveTimeout,
        first: int,
        raw: bool = False,
        spread: bool = False,
    ) -> None:
        self._context, self._config, self._group, self.view = context, config, group, view
        self._memory, self._timeout = memory, timeout
        self._formats = Formats(config, first if raw else -1)
        self._me = context.swarm.node_id
        self._pieces = cut_pieces(view, context.size)
        self._others = [piece for piece in self._pieces if piece.owner != self._me]
        memory.writer.recut()
        self._owner: PieceOwner | None = None
        for piece in self._pieces:
            if piece.owner == self._me:
                self._owner = PieceOwner(
                    context,
                    config,
                    group,
                    view,
                    piece=piece,
                    memory=memory,
                    formats=self._formats,
                    first=first,
                    spread=spread,
                )
        self._waiting: set[str] = set()
        self._given = -1
        self._busy = False
        self._calls = 0
        self._roll = LivenessCheck(context, group, view)

    @property
    def given(self) -> int:
        """Number of the last round that we gave our part to; -1 before the first."""
        return self._given

    @property
    def in_force(self) -> bool:
        """Whether our view still is; what comes of it counts only then."""
        return self._group.view == self.view

    @property
    def busy(self) -> bool:
        """Whether a round is under way."""
        return self._busy

    async def average(self, number: int, part: RoundContribution) -> Average:
        """Do one round; see `Averager`."""
        began_s = self._context.clock.monotonic()
        result, raw = self._memory.results[number % 2], self._formats.raw(number)
        writer, vector = self._memory.writer, part.vector
        if vector is not None:
            await heavy(vector.nbytes, lambda: writer.load(vector, raw=raw))
        self._given, self._calls, self._busy = number, 0, True
        jobs = [self._bring(piece, number, part, result) for piece in self._pieces]
        self._waiting = {piece.owner for piece in self._others}
        self._roll.begin(number, self._timeout.deadline_s, self._silent)
        try:
            heads = await _together(jobs)
        finally:
            self._busy = False
            await self._roll.end()
        self._timeout.observe(self._context.clock.monotonic() - began_s)
        return self._whole(number, part, result, heads)

    def _silent(self) -> set[str]:
        """Whom this round waits for."""
        late = set() if self._owner is None else set(self._owner.missing)
        return (self._waiting | late) - {self._me}

    def _whole(
        self, number: int, part: RoundContribution, result: Float32Array, heads: Sequence[ReduceAnswer]
    ) -> Average:
        formats, writer = self._formats, self._memory.writer
        first = heads[0]  # all members go by the same owner's: one may tell each owner something else
        raw, own_out, own_in = formats.raw(number), 0, 0
        if self._owner is not None:
            own_out = self._owner.piece.result_nbytes(formats, number) * (len(self.view.members) - 1)
            own_in = self._owner.received_bytes(number)
        sent = sum(writer.nbytes(piece.span, raw=raw) for piece in self._others) if part.weight else 0
        return Average(
            vector=result,
            weights=first.weights,
            versions=first.versions,
            norm=math.sqrt(sum(head.square for head in heads)),
            spread=sum(head.spread for head in heads),
            bytes_out=sent + own_out,
            bytes_in=sum(piece.result_nbytes(formats, number) for piece in self._others) + own_in,
            round_trips=self._calls,
            learning_rates=first.learning_rates,
            ends_update=first.ends_update,
        )

    def _bring(
        self, piece: OwnedPiece, number: int, part: RoundContribution, result: Float32Array
    ) -> Coroutine[Any, Any, ReduceAnswer]:
        if self._owner is not None and piece.owner == self._me:
            return self._give_own(self._owner, number, part)
        return self._deliver(piece, number, part, result)

    async def _give_own(self, owner: PieceOwner, number: int, part: RoundContribution) -> ReduceAnswer:
        """Give our part to our own piece; doubt those whose parts are late."""
        while True:
            try:
                return await owner.give(number, part)
            except Refusal as refusal:
                if refusal.status != 408:
                    raise
                for peer in owner.overdue:
                    self._group.doubt(peer, f"its part of round {number} didn't come")
                await asyncio.sleep(RETRY_S)

    async def _deliver(
        self, piece: OwnedPiece, number: int, part: RoundContribution, result: Float32Array
    ) -> ReduceAnswer:
        """Bring our part to an owner and the average back, trying until the view ends."""
        encoded: memoryview | None = None
        if part.vector is not None:
            encoded = await heavy(4 * piece.size, lambda: self._memory.writer.encode(piece.span))
        ask = ReduceRequest(
            "part",
            self.view.key,
            number,
            part.weight,
            part.policy_version,
            part.learning_rate,
            left=part.left,
        )
        head = await self._group.insist(
            piece.owner,
            lambda: self._call(piece, ask, encoded, result),
            late_after_s=self._config.deadline_s,
        )
        self._waiting.discard(piece.owner)
        return head

    async def _call(
        self, piece: OwnedPiece, ask: ReduceRequest, encoded: memoryview | None, result: Float32Array
    ) -> ReduceAnswer:
        """Make one call; the average is in ``result`` afterwards, checked."""
        dtype, out = self._formats.dtype(ask.number), result[piece.span]
        if dtype == "float32":
            room = out.data.cast("B")
        else:
            room = self._memory.arriving[2 * piece.span.start : 2 * piece.span.stop]
        self._calls += 1
        answer = await self._group.call(
            piece.owner,
            ROUTE,
            ask,
            vector=encoded,
            into=lambda _, nbytes: room if nbytes == room.nbytes else None,
            deadline_s=self._config.deadline_s + SLACK_S,
        )
        head: ReduceAnswer = codec.decode(answer.meta, ReduceAnswer, "average")
        lists = (head.weights, head.versions, head.learning_rates)
        fits = all(len(figures) == len(self.view.members) for figures in lists)
        if head.number != ask.number or answer.vector_nbytes != room.nbytes or not fits:
            raise WireError(f"{piece.owner} answered another round than {ask.number}")
        try:
            await heavy(out.nbytes, lambda: _receive(room, dtype, out, self._context.max_abs))
        except PoisonedVectorError as error:
            self._context.swarm.strike(piece.owner, str(error))
            self._group.doubt(piece.owner, "its average is poisoned")
            raise
        return head

    async def serve(self, incoming: Incoming, ask: ReduceRequest) -> Reply:
        """Take a member's part of our own piece, and answer with the average once all have come.

        Raises:
            Refusal: not now, or not here (409), poisoned (422), malformed (400), too few came (408).
        """
        if self._owner is None or incoming.sender == self._me:
            raise Refusal(409, "another member owns that piece")
        return await self._owner.serve(incoming, ask)

    def close(self) -> None:
        """See `Averager`."""
        if self._owner is not None:
            self._owner.close()

    async def closed(self) -> None:
        """See `Averager`."""
        if self._owner is not None:
            await self._owner.closed()


def _receive(room: memoryview, dtype: WireDtype, out: Float32Array, max_abs: float) -> None:
    if dtype != "float32":
        wire.decode(room, dtype, out)
    check_finite(out, max_abs)


async def _together(jobs: Sequence[Coroutine[Any, Any, ReduceAnswer]]) -> list[ReduceAnswer]:
    """Run all; when one fails or we are cancelled, end the others before that goes on."""
    if len(jobs) == 1:
        return [await jobs[0]]
    tasks = [asyncio.create_task(job, name="average") for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
