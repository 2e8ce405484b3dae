"""The owner of a piece: takes everybody's parts, hands everybody the same average.

Shapes: every vector is flat, of D elements (all parameters) or of the piece; names carry no suffix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from p2pdrl.config.strategy_bases import Compressed, Grouped
from p2pdrl.errors import PoisonedVectorError
from p2pdrl.strategies.averaging.averager import Part
from p2pdrl.strategies.averaging.messages import Ask, Reduced
from p2pdrl.strategies.averaging.piece_mean import reduce_piece
from p2pdrl.strategies.averaging.piece_writer import PieceWriter, piece_codec
from p2pdrl.strategies.gathering import Contribution, Gathering
from p2pdrl.strategies.group.service import Group, GroupView
from p2pdrl.strategies.heavy import heavy
from p2pdrl.strategies.lockstep import Place, leader_ends
from p2pdrl.strategies.patience import Patience
from p2pdrl.strategies.protocol import Context
from p2pdrl.tensors import wire
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.mix import check_finite
from p2pdrl.tensors.wire import WireDtype
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

__all__ = ["AverageMemory", "Formats", "Piece", "PieceOwner"]


class Formats(NamedTuple):
    """How vectors travel in each round.

    Args:
        config: which compression.
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


class Piece(NamedTuple):
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
    """Buffers that outlive a view.

    Args:
        config: which compression.
        size: D.
    """

    def __init__(self, config: Grouped, size: int) -> None:
        self.writer = PieceWriter(config, size)
        self.results: tuple[Float32Array, ...] = tuple(np.empty(size, np.float32) for _ in range(2))
        self.arriving = memoryview(bytearray(0 if config.compression == "none" else 2 * size))


class PieceOwner:
    """Our own piece, in one view.

    Args:
        context: what the node gives.
        config: the strategy's options.
        group: told whom we doubt.
        view: the members.
        piece: ours.
        memory: where results go: those of even and odd rounds in turn.
        formats: how vectors travel.
        first: number of the first round.
        spread: whether to measure how far parts are apart.
    """

    def __init__(
        self,
        context: Context,
        config: Grouped,
        group: Group,
        view: GroupView,
        *,
        piece: Piece,
        memory: AverageMemory,
        formats: Formats,
        first: int,
        spread: bool,
    ) -> None:
        self.piece = piece
        self._swarm, self._max_abs = context.swarm, context.max_abs
        self._config, self._group, self._memory = config, group, memory
        self._formats, self._spread = formats, spread
        self._encoded = tuple(memoryview(bytearray(2 * piece.size)) for _ in range(2))
        self._rooms: dict[str, memoryview] = {}
        self._heads: dict[int, Reduced] = {}
        self._received: dict[int, int] = {}
        self._gathering = Gathering(
            size=piece.size,
            members=view.members,
            clock=context.clock,
            patience=Patience(config.deadline_s),
            reduce=self._reduce,
            first=first,
        )

    @property
    def missing(self) -> tuple[str, ...]:
        """Members whose parts of the present round haven't come."""
        return self._gathering.missing

    @property
    def overdue(self) -> tuple[str, ...]:
        """Members for whose sake a round was given up."""
        return self._gathering.overdue

    def received_bytes(self, number: int) -> int:
        """Bytes of others' parts of a round, the last or the one before."""
        return self._received.get(number, 0)

    async def give(self, number: int, part: Part) -> Reduced:
        """Give our own part, which was loaded into the writer; wait for the round's end.

        Raises:
            Refusal: too few came (408), or the view has ended (409).
        """

        async def fill(_: Float32Array) -> None:
            return  # `_reduce` takes it where it is

        me = self.piece.owner
        await self._gathering.contribute(
            number,
            me,
            part.weight,
            part.policy_version,
            fill,
            learning_rate=part.learning_rate,
            left=part.left,
        )
        return self._heads[number]

    async def serve(self, incoming: Incoming, ask: Ask) -> Reply:
        """Take a member's part; see `ViewAverager.serve`."""
        if bool(ask.weight) != bool(incoming.vector_nbytes):
            raise Refusal(400, "a part has a vector exactly when it has a weight")

        async def fill(out: Float32Array) -> None:
            if incoming.vector_nbytes:
                await self._read(incoming, ask.number, out)
                self._received[ask.number] = self.received_bytes(ask.number) + incoming.vector_nbytes

        try:
            await self._gathering.contribute(
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
        self._gathering.close("the group's view has ended")

    async def closed(self) -> None:
        """Wait, after `close`, for a reduction under way."""
        await self._gathering.closed()

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
        reader = piece_codec(self._config, out.size, raw=False)
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
        number, span, me = self._gathering.number, self.piece.span, self.piece.owner
        counting = [part for part in contributions if part.weight > 0]
        own = self._memory.writer.own(span)
        vectors = [own if part.sender == me else part.vector for part in counting]
        ours = any(part.sender == me for part in counting)
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
                reference=own if ours else None,
                spread=self._spread,
            ),
        )
        self._heads.pop(number - 2, None)
        self._received.pop(number - 2, None)
        self._heads[number] = Reduced(
            number,
            tuple(part.weight for part in contributions),
            tuple(part.policy_version for part in contributions),
            figures.square,
            figures.spread,
            learning_rates=tuple(part.learning_rate for part in contributions),
            ends_update=leader_ends(Place(part.sender, part.weight, part.left) for part in contributions),
        )
        return out

    def _result(self, number: int) -> memoryview:
        if self._formats.dtype(number) == "float32":
            return self._memory.results[number % 2][self.piece.span].data.cast("B")
        return self._encoded[number % 2]
