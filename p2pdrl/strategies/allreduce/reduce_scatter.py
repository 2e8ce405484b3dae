"""Exact averaging over the swarm's own connections: every member ends with the same bits.

The vector is cut into contiguous pieces; each has an owner. A member sends each owner its part of that
piece in one call, and the answer, which is held until all parts have come, carries the average:
reduce-scatter and all-gather in one round trip. It moves 2·D·(n−1)/n elements each way and member: as a ring
does (Patarasu and Yuan 2009), without its n−1 steps. A vector of less than `LEAST_PIECE` elements per member
has fewer owners, down to one: for short vectors the number of calls is what costs.

The owner sums in the order of the members and rounds once; the others decode its bytes. Parts come
compressed; averages go back dense: float32 when compression is ``none``, else bf16. What a lossy compression
leaves out of a member's part is added to its next part.

What is lost is sent again (`group.calls`). A member where nobody listens is doubted at once. One that stays
silent is asked whether it is alive after `AdaptiveTimeout` (at most `ASK_S`), and doubted when it doesn't
answer; one that is alive, whose learner is still at work, has until ``deadline_s``.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from p2pdrl.config.strategy import Compressed, GradAverageConfig, Grouped, Robust
from p2pdrl.errors import PoisonedVectorError, WireError
from p2pdrl.group.adaptive_timeout import AdaptiveTimeout
from p2pdrl.group.rendezvous import ranked
from p2pdrl.group.round_collector import Contribution, RoundCollector, UpdatePosition, leader_ends
from p2pdrl.group.service import Group, GroupView
from p2pdrl.strategies.allreduce.averager import (
    ROUTE,
    Average,
    Averager,
    Backend,
    Preemption,
    ReduceAnswer,
    ReduceRequest,
    RoundContribution,
)
from p2pdrl.strategies.clipping_radius import BeyondCounts, tell_far
from p2pdrl.strategies.offload import heavy
from p2pdrl.strategies.protocol import StrategyContext
from p2pdrl.strategies.task_runner import together
from p2pdrl.tensors import wire
from p2pdrl.tensors.compression import Codec, make_codec
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.mix import check_finite
from p2pdrl.tensors.robust import Clipping, clipping_of, combine, combine_clipped
from p2pdrl.tensors.wire import DOT_CHUNK, WireDtype, spans
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

__all__ = [
    "CHUNK",
    "LEAST_PIECE",
    "AverageMemory",
    "Formats",
    "OwnedPiece",
    "PieceOwner",
    "PieceWriter",
    "ReductionStats",
    "ViewAverager",
    "cut_pieces",
    "is_lossy",
    "piece_codec",
    "reduce_piece",
]

CHUNK = 1 << 16
"""Elements per step: a few vectors' worth stays in the second-level cache."""


class ReductionStats(NamedTuple):
    """What was measured on the way.

    Args:
        square: ‖result‖².
        spread: Σ w_k ‖x_k − mean‖² / Σ w_k; 0 unless asked for.
    """

    square: float
    spread: float


def reduce_piece(
    vectors: Sequence[Float32Array],
    weights: Sequence[float],
    rule: Robust,
    dtype: WireDtype,
    *,
    out: Float32Array,
    encoded: memoryview,
    shorten: Callable[[Clipping], Clipping] | None = None,
    spread: bool = False,
) -> ReductionStats:
    """Write what ``vectors`` come to into ``out``, rounded as it travels, and as it travels into ``encoded``.

    The mean is Σ w_k x_k / Σ w_k, summed in float32 in the order given.

    Args:
        vectors: of those with a weight above 0; none gives zeros.
        weights: theirs, above 0.
        dtype: how the result travels; with ``float32``, ``encoded`` isn't written: it is ``out`` itself.
        encoded: room for the result's bytes.
        shorten: what is done to ``clipped``'s factors.
        spread: whether to measure how far the vectors are from their mean.
    """
    mean = rule.mixing in ("auto", "mean") or len(vectors) < 2
    if rule.mixing == "clipped" and not mean:
        clipping = clipping_of(vectors, weights, rule.clip_distance)
        clipping = clipping if shorten is None else shorten(clipping)
        mean, weights = clipping.whole, clipping.weights
        if not mean:
            combine_clipped(vectors, clipping, out)
    elif not mean:
        combine(vectors, weights, mixing="trimmed", trim=rule.trim, out=out)
    heaviest, total = max(weights, default=1.0), sum(weights)
    factors = [np.float32(weight / heaviest) for weight in weights]
    share = np.float32(heaviest / total if weights else 0.0)
    scratch = np.empty(min(CHUNK, out.size), np.float32)
    square = energy = 0.0
    for span in spans(out.size, CHUNK):
        piece, parts = out[span], [vector[span] for vector in vectors]
        if mean:
            _mean(parts, factors, share, piece, scratch)
        if dtype == "bf16":
            part = encoded[2 * span.start : 2 * span.stop]
            wire.encode(piece, dtype, part)
            wire.decode(part, dtype, piece)
        square += _square(piece)
        if spread:
            energy += sum(weight * _square(part) for part, weight in zip(parts, weights, strict=True))
    return ReductionStats(square, max(0.0, energy / total - square) if spread and weights else 0.0)


def _mean(
    parts: Sequence[Float32Array],
    factors: Sequence[np.float32],
    share: np.float32,
    out: Float32Array,
    scratch: Float32Array,
) -> None:
    if not parts:
        out[:] = 0
        return
    np.multiply(parts[0], factors[0], out=out)
    for part, factor in zip(parts[1:], factors[1:], strict=True):
        if factor == 1:
            np.add(out, part, out=out)
        else:
            np.multiply(part, factor, out=scratch[: out.size])
            np.add(out, scratch[: out.size], out=out)
    np.multiply(out, share, out=out)


def _square(vector: Float32Array) -> float:
    total = 0.0
    for span in spans(vector.size, DOT_CHUNK):
        part = vector[span]
        total += float(np.dot(part, part))
    return total


def is_lossy(config: Compressed) -> bool:
    """Whether so much is lost at once that it has to be kept for the next time."""
    return config.compression not in ("none", "bf16")


def piece_codec(config: Compressed, size: int) -> Codec:
    """Return the codec for a piece of ``size`` elements."""
    return make_codec(config.compression, size, keep=config.keep, threshold=config.threshold, feedback=False)


class PieceWriter:
    """One node's stream of contributions, through all views of a strategy.

    Pieces change with every view, so what compression lost is kept for the whole vector and not in the codecs
    (error feedback: Karimireddy 2019, arXiv 1901.09847): ``given = vector + lost``, ``lost ← given − sent``
    once the round has counted. A round that is done again gives the same.
    """

    def __init__(self, config: Compressed, size: int) -> None:
        self._config = config
        self._raw = False
        self._keeps = is_lossy(config)
        self._codecs: dict[int, tuple[Codec, memoryview]] = {}
        self._written: dict[int, int] = {}
        self._whole = memoryview(bytearray(2 * size)) if config.compression == "bf16" else memoryview(b"")
        kept = size if self._keeps else 0
        self._lost: Float32Array = np.zeros(kept, np.float32)
        self._given: Float32Array = np.zeros(kept, np.float32)
        self._sent: Float32Array = np.zeros(kept, np.float32)
        self._counted = False
        self._vector: Float32Array = np.empty(0, np.float32)

    def load(self, vector: Float32Array, *, raw: bool) -> None:
        """Begin a contribution; ``vector`` stays unchanged until the last piece is written and sent.

        Args:
            raw: write float32, and leave what is kept alone.
        """
        self._raw, self._vector = raw, vector
        if raw or not self._keeps:
            return
        if self._counted:
            np.subtract(self._given, self._sent, out=self._lost)
            self._counted = False
        np.add(vector, self._lost, out=self._given)
        np.copyto(self._sent, self._given)  # our own piece loses nothing
        self._vector = self._given

    def own(self, span: slice) -> Float32Array:
        """Our own piece, as it counts."""
        return self._vector[span]

    def encode(self, span: slice) -> memoryview:
        """Return the bytes of one piece; valid until the next `load`."""
        piece = self._vector[span]
        if self._raw or self._config.compression == "none":
            return piece.data.cast("B")
        if not self._keeps:
            room = self._whole[2 * span.start : 2 * span.stop]
            wire.encode(piece, "bf16", room)
            return room
        codec, room = self._codec(span)
        written = room[: codec.encode(piece, room)]
        codec.decode(written, self._sent[span])
        self._written[span.start] = written.nbytes
        return written

    def _codec(self, span: slice) -> tuple[Codec, memoryview]:
        """Each piece has its own: several may be written at a time, in threads."""
        if span.start not in self._codecs:
            codec = piece_codec(self._config, span.stop - span.start)
            self._codecs[span.start] = codec, memoryview(bytearray(codec.max_nbytes))
        return self._codecs[span.start]

    def nbytes(self, span: slice, *, raw: bool) -> int:
        """Bytes that a piece took on the wire; of a sparse kind, when it was last written."""
        if raw or self._config.compression == "none":
            return int(4 * (span.stop - span.start))
        if not self._keeps:
            return int(2 * (span.stop - span.start))
        return self._written.get(span.start, 0)

    def counted(self) -> None:
        """The round that the contribution was for has ended with it."""
        self._counted = self._keeps and not self._raw

    def recut(self) -> None:
        """A new view began: free the room of the old one's pieces."""
        self._codecs.clear()
        self._written.clear()

    def reset(self) -> None:
        """Forget what was kept: the parameters were replaced."""
        self._lost[:] = 0
        self._counted = False


class Formats(NamedTuple):
    """How vectors travel in each round.

    Args:
        raw_number: the round whose vectors travel as float32 whatever the config says; -1 for none.
    """

    config: Compressed
    raw_number: int

    def raw(self, number: int) -> bool:
        """Whether it is that round."""
        return number == self.raw_number

    def dtype(self, number: int) -> WireDtype:
        """Of the average on its way back."""
        return "float32" if self.raw(number) or self.config.compression == "none" else "bf16"


class OwnedPiece(NamedTuple):
    """A run of the vector and its owner."""

    owner: str
    span: slice

    @property
    def size(self) -> int:
        """Elements."""
        return int(self.span.stop - self.span.start)

    def result_nbytes(self, formats: Formats, number: int) -> int:
        """Bytes of its average on the wire."""
        return wire.encoded_nbytes(self.size, formats.dtype(number))


class AverageMemory:
    """Buffers that outlive a view."""

    def __init__(self, config: Grouped, size: int) -> None:
        self.writer = PieceWriter(config, size)
        self.results: tuple[Float32Array, ...] = tuple(np.empty(size, np.float32) for _ in range(2))
        self.arriving = memoryview(bytearray(0 if config.compression == "none" else 2 * size))


class PieceOwner:
    """Our own piece, in one view. Results of even and odd rounds are kept in turn."""

    def __init__(
        self,
        backend: OwnBackend,
        group: Group,
        view: GroupView,
        piece: OwnedPiece,
        formats: Formats,
        *,
        first: int,
        spread: bool,
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        context, config = backend.context, backend.config
        self.piece, self._group = piece, group
        self._swarm, self._max_abs = context.swarm, context.max_abs
        self._beyond = backend.beyond
        self._config, self._memory = config, backend.memory
        self._formats, self._spread = formats, spread
        self._encoded = tuple(memoryview(bytearray(2 * piece.size)) for _ in range(2))
        self._rooms: dict[str, memoryview] = {}
        self._heads: dict[int, ReduceAnswer] = {}
        self._received: dict[int, int] = {}
        self._collector = RoundCollector(
            size=piece.size,
            members=view.members,
            clock=context.clock,
            timeout=AdaptiveTimeout(config.deadline_s),
            reduce=self._reduce,
            first=first,
            arrived=lambda: None if arrived is None else arrived(self._collector.number),
        )

    @property
    def missing(self) -> tuple[str, ...]:
        """Members whose parts of the present round haven't come."""
        return self._collector.missing

    @property
    def overdue(self) -> tuple[str, ...]:
        """Members for whose sake a round was given up."""
        return self._collector.overdue

    def received_bytes(self, number: int) -> int:
        """Bytes of others' parts of a round, the last or the one before."""
        return self._received.get(number, 0)

    async def give(self, number: int, part: RoundContribution) -> ReduceAnswer:
        """Give our own part, which was loaded into the writer; wait for the round's end.

        Raises:
            Refusal: too few came (408), or the view has ended (409).
        """

        async def fill(_: Float32Array) -> None:
            return  # `_reduce` takes it where it is

        me = self.piece.owner
        await self._collector.contribute(
            number,
            me,
            part.weight,
            part.policy_version,
            fill,
            learning_rate=part.learning_rate,
            left=part.left,
        )
        return self._heads[number]

    async def serve(self, incoming: Incoming, ask: ReduceRequest) -> Reply:
        """Take a member's part; see `ViewAverager.serve`."""
        if bool(ask.weight) != bool(incoming.vector_nbytes):
            raise Refusal(400, "a part has a vector exactly when it has a weight")

        async def fill(out: Float32Array) -> None:
            if incoming.vector_nbytes:
                await self._read(incoming, ask.number, out)
                self._received[ask.number] = self.received_bytes(ask.number) + incoming.vector_nbytes

        try:
            await self._collector.contribute(
                ask.number,
                incoming.sender,
                ask.weight,
                ask.policy_version,
                fill,
                learning_rate=ask.learning_rate,
                left=ask.left,
            )
        except PoisonedVectorError as error:
            self._swarm.strike(incoming.sender, str(error))
            self._group.doubt(incoming.sender, "its part is poisoned")
            raise
        head = self._heads.get(ask.number)
        if head is None:
            raise Refusal(409, f"round {ask.number} is long over")
        return Reply(msgspec.msgpack.encode(head), vector=self._result(ask.number))

    def close(self) -> None:
        """The view has ended: whoever waits is told (409)."""
        self._collector.close("the group's view has ended")

    async def closed(self) -> None:
        """Wait, after `close`, for a reduction under way."""
        await self._collector.closed()

    async def _read(self, incoming: Incoming, number: int, out: Float32Array) -> None:
        """Read a part into ``out``, and check it.

        Raises:
            Refusal: its length can't be right (400).
            PoisonedVectorError: NaN, or beyond the bound.
            WireError: malformed.
        """
        if self._formats.raw(number) or self._config.compression == "none":
            if incoming.vector_nbytes != out.nbytes:
                raise Refusal(400, f"a part of {incoming.vector_nbytes} bytes doesn't fit the piece")
            await incoming.read_vector_into(out.data.cast("B"))
            await heavy(out.nbytes, lambda: check_finite(out, self._max_abs))
            return
        reader = piece_codec(self._config, out.size)
        if incoming.vector_nbytes > reader.max_nbytes:
            raise Refusal(400, f"a part of {incoming.vector_nbytes} bytes is longer than the piece")
        if incoming.sender not in self._rooms:
            self._rooms[incoming.sender] = memoryview(bytearray(reader.max_nbytes))
        room = self._rooms[incoming.sender][: incoming.vector_nbytes]
        await incoming.read_vector_into(room)

        def decode() -> None:
            reader.decode(room, out)
            check_finite(out, self._max_abs)

        await heavy(out.nbytes, decode)

    async def _reduce(self, contributions: Sequence[Contribution]) -> Float32Array:
        number, span, me = self._collector.number, self.piece.span, self.piece.owner
        counting = [part for part in contributions if part.weight > 0]
        own = self._memory.writer.own(span)
        vectors = [own if part.sender == me else part.vector for part in counting]
        out = self._memory.results[number % 2][span]
        figures = await heavy(
            out.nbytes * len(contributions),
            lambda: reduce_piece(
                vectors,
                [part.weight for part in counting],
                self._config,
                self._formats.dtype(number),
                out=out,
                encoded=self._encoded[number % 2],
                shorten=lambda clipping: self._beyond.shortened(clipping, [part.sender for part in counting]),
                spread=self._spread,
            ),
        )
        self._heads.pop(number - 2, None)
        self._received.pop(number - 2, None)
        self._heads[number] = ReduceAnswer(
            number,
            tuple(part.weight for part in contributions),
            tuple(part.policy_version for part in contributions),
            figures.square,
            figures.spread,
            learning_rates=tuple(part.learning_rate for part in contributions),
            ends_update=leader_ends(
                UpdatePosition(part.sender, part.weight, part.left) for part in contributions
            ),
        )
        return out

    def _result(self, number: int) -> memoryview:
        if self._formats.dtype(number) == "float32":
            return self._memory.results[number % 2][self.piece.span].data.cast("B")
        return self._encoded[number % 2]


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
        least: elements of a piece, see `LEAST_PIECE`.
    """
    most = max(1, size // (LEAST_PIECE if least is None else least))
    owners = sorted(ranked(str(view.key), view.members)[: min(most, size)])
    edges = [index * size // len(owners) for index in range(len(owners) + 1)]
    return tuple(OwnedPiece(owner, slice(edges[i], edges[i + 1])) for i, owner in enumerate(owners))


class ViewAverager(Averager):
    """`Averager` over the swarm's own connections; serves the parts of the others, too."""

    def __init__(
        self, backend: OwnBackend, group: Group, view: GroupView, *, first: int, raw: bool, spread: bool
    ) -> None:
        super().__init__(backend.context, group, view, backend.timeout)
        self._config, self._memory = backend.config, backend.memory
        self._formats = Formats(self._config, first if raw else -1)
        self._pieces = cut_pieces(view, self._context.size)
        self._others = [piece for piece in self._pieces if piece.owner != self._me]
        self._memory.writer.recut()
        self._owner: PieceOwner | None = None
        self._preemption: Preemption | None = None
        threshold = self._config.preemption_threshold if isinstance(self._config, GradAverageConfig) else 1.0
        if threshold < 1 and self._pieces[0].owner == self._me:
            self._preemption = Preemption(
                self._context,
                group,
                view,
                threshold,
                missing=lambda: () if self._owner is None else self._owner.missing,
                own=self.preempted,
            )
        for piece in self._pieces:
            if piece.owner == self._me:
                self._owner = PieceOwner(
                    backend,
                    group,
                    view,
                    piece,
                    self._formats,
                    first=first,
                    spread=spread,
                    arrived=None if self._preemption is None else self._preemption.arrived,
                )
        self._waiting: set[str] = set()
        self._calls = 0

    async def _average(self, number: int, part: RoundContribution) -> Average:
        result, raw = self._memory.results[number % 2], self._formats.raw(number)
        writer, vector = self._memory.writer, part.vector
        self._waiting, self._calls = {piece.owner for piece in self._others}, 0
        if vector is not None:
            await heavy(vector.nbytes, lambda: writer.load(vector, raw=raw))
        heads = await together(*(self._bring(piece, number, part, result) for piece in self._pieces))
        return self._whole(number, part, result, heads)

    def _silent(self) -> set[str]:
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
        if self._preemption is not None:
            self._preemption.close()
        if self._owner is not None:
            self._owner.close()

    async def closed(self) -> None:
        """See `Averager`."""
        if self._preemption is not None:
            await self._preemption.closed()
        if self._owner is not None:
            await self._owner.closed()


def _receive(room: memoryview, dtype: WireDtype, out: Float32Array, max_abs: float) -> None:
    if dtype != "float32":
        wire.decode(room, dtype, out)
    check_finite(out, max_abs)


class OwnBackend(Backend):
    """Averages over the swarm's own connections.

    Attributes:
        timeout: learns how long rounds take, through all views.
    """

    def __init__(self, context: StrategyContext, config: Grouped, memory: AverageMemory) -> None:
        self.context, self.config, self.memory = context, config, memory
        self.timeout = AdaptiveTimeout(config.deadline_s)
        self.beyond = BeyondCounts(tell_far(context.swarm))

    def averager(self, group: Group, view: GroupView, *, first: int, raw: bool, spread: bool) -> Averager:
        """Return one for ``view``; see `Backend`."""
        return ViewAverager(self, group, view, first=first, raw=raw, spread=spread)
