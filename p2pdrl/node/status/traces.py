"""What all ranks of our pipeline did lately, as one trace: each node tells of its own learner.

A peer is asked for its monotonic clock some times; its answer is taken for the middle of the fastest round
trip, so it is off by half of that at most.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from p2pdrl.clock import Clock
from p2pdrl.errors import (
    ConfigError,
    P2PDRLError,
    PeerTimeoutError,
    PeerUnreachableError,
    TransportError,
    WireError,
    WorkerError,
)
from p2pdrl.node.children.stage_port import StagePort
from p2pdrl.pipeline.plan import StageOrder
from p2pdrl.pipeline.trace import MOST_SPANS, RankSpans, TraceSpan, trace
from p2pdrl.transport.codec import decode
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply, Transport

__all__ = ["MAX_SECONDS", "ROUTE", "TraceCollector"]

ROUTE = "timeline"
MAX_SECONDS = 60.0
MAX_SPANS = 8192
LEARNER_S = 3.0
"""A learner may be in the midst of a long microbatch."""
CALL_S = LEARNER_S + 1.0
TRIES = 8
"""Round trips to learn a clock by."""


class TraceRequest(msgspec.Struct, frozen=True):
    """Asks for the spans of the last ``seconds``."""

    generation: Annotated[int, Meta(ge=0)]
    """Of the pipeline; another one is refused."""
    seconds: Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
    """How far back; 0 asks for the clock alone."""


class SpanWire(msgspec.Struct, frozen=True, array_like=True):
    """`pipeline.trace.TraceSpan`, bounded."""

    what: Annotated[str, Meta(max_length=32)]
    start_s: float
    end_s: float
    stage: Annotated[int, Meta(ge=-1, lt=2**31)] = -1
    microbatch: Annotated[int, Meta(ge=-1, lt=2**31)] = -1
    step: Annotated[int, Meta(ge=-1, lt=2**53)] = -1


class TraceAnswer(msgspec.Struct, frozen=True):
    """The spans of one rank."""

    clock_s: float
    """Monotonic, as the answer is made."""
    spans: Annotated[tuple[SpanWire, ...], Meta(max_length=MAX_SPANS)] = ()


class TraceCollector:
    """Tells peers of our learner's part, and puts all parts of our pipeline together."""

    def __init__(
        self,
        *,
        me: str,
        stages: StagePort,
        members: Callable[[], Sequence[str]],
        transport: Transport,
        clock: Clock,
        alive: Callable[[], dict[str, Address]],
        named: Callable[[str], str],
    ) -> None:
        self._me = me
        self._stages = stages
        self._members = members
        self._transport = transport
        self._clock = clock
        self._alive = alive
        self._named = named
        self._serving = False

    async def answer(self, incoming: Incoming) -> Reply:
        """Tell a peer what our learner did.

        Raises:
            Refusal: 400 when it can't be read, 409 when we aren't in that pipeline, 423 while another asks,
                503 when the learner doesn't answer.
        """
        try:
            ask: TraceRequest = decode(incoming.meta, TraceRequest, "question for a timeline")
        except WireError as error:
            raise Refusal(400, str(error)) from error
        order = self._stages.order
        if order is None or order.generation != ask.generation:
            raise Refusal(409, f"this node isn't in generation {ask.generation} of a pipeline")
        if ask.seconds == 0:
            return Reply(msgspec.msgpack.encode(TraceAnswer(self._clock.monotonic())))
        if self._serving:
            raise Refusal(423, "another one asks for our timeline")
        self._serving = True
        try:
            spans = await self._own(ask.seconds)
        except WorkerError as error:
            raise Refusal(503, str(error)) from error
        finally:
            self._serving = False
        told = TraceAnswer(self._clock.monotonic(), tuple(SpanWire(*span) for span in spans[-MAX_SPANS:]))
        return Reply(msgspec.msgpack.encode(told))

    async def collect(self, seconds: float) -> dict[str, Any]:
        """Return the trace of the last seconds of our pipeline, in Chrome's format.

        Ranks that don't answer have an empty row; ``otherData`` says why, and of the others how many boxes
        they told, how long ago those begin and end, and whether they remember no more than that.

        Raises:
            ConfigError: this node is in no pipeline.
        """
        order = self._stages.order
        if order is None:
            raise ConfigError("this node is in no pipeline at the moment; see `p2pdrl mode show`")
        members = self._members() or (self._me,)
        found = await asyncio.gather(*(self._of(peer, order, seconds) for peer in members))
        rows: list[RankSpans] = []
        missing: dict[str, str] = {}
        for rank, (peer, spans) in enumerate(zip(members, found, strict=True)):
            name = f"rank {rank}: {self._named(peer)}"
            if isinstance(spans, P2PDRLError):
                missing[name] = str(spans)
                rows.append(RankSpans(name, ()))
            else:
                rows.append(spans._replace(name=name))
        document = trace({f"pipeline, generation {order.generation}, {order.schedule}": rows})
        now_s = self._clock.monotonic()
        document["otherData"] = {
            "generation": order.generation,
            "backend": order.backend,
            "missing": missing,
            "told": {row.name: _told(row, now_s) for row in rows if row.name not in missing},
        }
        return document

    async def _of(self, peer: str, order: StageOrder, seconds: float) -> RankSpans | P2PDRLError:
        try:
            if peer == self._me:
                return RankSpans("", await self._own(seconds))
            address = self._alive().get(peer)
            if address is None:
                raise PeerUnreachableError("it isn't known to be alive")
            async with asyncio.timeout(CALL_S):
                offset_s = await self._offset_s(peer, address, order.generation)
                told, _ = await self._ask(peer, address, TraceRequest(order.generation, seconds))
        except TimeoutError:
            return PeerTimeoutError(f"no timeline within {CALL_S:g} s")
        except (TransportError, WorkerError) as error:
            return error
        return RankSpans("", [TraceSpan(*msgspec.structs.astuple(span)) for span in told.spans], offset_s)

    async def _own(self, seconds: float) -> Sequence[TraceSpan]:
        return await self._stages.trace(seconds, deadline_s=LEARNER_S)

    async def _offset_s(self, peer: str, address: Address, generation: int) -> float:
        """What is to be added to a peer's clock, by the fastest of some round trips."""
        trips = []
        for _ in range(TRIES):
            begin_s = self._clock.monotonic()
            told, end_s = await self._ask(peer, address, TraceRequest(generation, 0.0))
            trips.append((end_s - begin_s, (begin_s + end_s) / 2 - told.clock_s))
        return min(trips)[1]

    async def _ask(self, peer: str, address: Address, ask: TraceRequest) -> tuple[TraceAnswer, float]:
        """Ask; return the answer, and when it came."""
        meta = msgspec.msgpack.encode(ask)
        answer = await self._transport.call(address, peer, ROUTE, meta, deadline_s=CALL_S)
        came_s = self._clock.monotonic()
        told: TraceAnswer = decode(answer.meta, TraceAnswer, "timeline")
        times = [told.clock_s, *(time for span in told.spans for time in (span.start_s, span.end_s))]
        if not all(map(math.isfinite, times)):
            raise WireError("a timeline holds times that aren't finite")
        return told, came_s


def _told(rank: RankSpans, now_s: float) -> dict[str, Any]:
    """What part of the time asked for a rank's spans are of: it remembers `MOST_SPANS` and no more."""
    times = [time_s + rank.offset_s for span in rank.spans for time_s in (span.start_s, span.end_s)]
    return {
        "boxes": len(rank.spans),
        "began_s_ago": max(0.0, round(now_s - min(times), 3)) if times else None,
        "ended_s_ago": max(0.0, round(now_s - max(times), 3)) if times else None,
        "remembers_no_more": len(rank.spans) >= MOST_SPANS,
    }
