"""One shard at work in one view: what the servers of both strategies share, and how pushes are read."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
import numpy as np

from p2pdrl.clock import Clock
from p2pdrl.config.strategy import ServerOptions
from p2pdrl.errors import PoisonedVectorError, WireError
from p2pdrl.group.adaptive_timeout import AdaptiveTimeout
from p2pdrl.group.round_collector import Contribution, RoundCollector
from p2pdrl.strategies.offload import heavy
from p2pdrl.strategies.servers.messages import GradientPush, ServerAnswer
from p2pdrl.strategies.servers.shard import Shard, ShardVersion
from p2pdrl.tensors import mix
from p2pdrl.tensors.compression import make_codec
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.robust import combine
from p2pdrl.transport.protocol import Incoming, Refusal

__all__ = [
    "Answered",
    "Attendance",
    "PushReader",
    "ReceivedPush",
    "Seeding",
    "ShardServer",
    "ShardServerOptions",
    "Turns",
    "give",
]

READERS = 8
"""Vectors that are read at a time; other senders wait."""


class ReceivedPush:
    """What comes with a push: a peer's vector, or the local worker's.

    Args:
        incoming: a peer's call.
        vector: the local worker's; unchanged until the push is answered.
    """

    def __init__(self, incoming: Incoming | None, vector: Float32Array | None = None) -> None:
        self.incoming = incoming
        self.vector = vector
        self.read = False
        """Whether the vector was read off the network."""


class PushReader:
    """Reads the vectors of one shard's pushes.

    Args:
        config: compression.
        size: entries of the shard.
        max_abs: greatest entry accepted.
        strike: notes that a peer sent something poisoned.
    """

    def __init__(
        self, config: ServerOptions, size: int, max_abs: float, strike: Callable[[str, str], None]
    ) -> None:
        self._size = size
        self._max_abs = max_abs
        self._strike = strike
        self._whole = make_codec("none", size)
        self._codec = make_codec(
            config.compression, size, keep=config.keep, threshold=config.threshold, feedback=False
        )
        self._decoding = asyncio.Lock()
        self._room = asyncio.Semaphore(READERS)
        self._buffers: list[memoryview] = []

    @asynccontextmanager
    async def received(
        self, parcel: ReceivedPush, *, whole: bool
    ) -> AsyncIterator[memoryview | Float32Array]:
        """Read a parcel; what it gives is good for `decode` until the block ends.

        Args:
            parcel: what came.
            whole: whether it is parameters, which travel as float32; else a gradient.

        Raises:
            Refusal: its length is impossible (422).
            WireError: truncated, or altered on the way.
            PeerTimeoutError: the peer stopped sending.
        """
        incoming = parcel.incoming
        if incoming is None:
            if parcel.vector is None or parcel.vector.size != self._size:
                raise Refusal(422, "the push brings no vector of this shard's length")
            yield parcel.vector
            return
        nbytes, most = incoming.vector_nbytes, (self._whole if whole else self._codec).max_nbytes
        if not 0 < nbytes <= most:
            self._strike(incoming.sender, f"a vector of {nbytes} bytes, at most {most} are possible")
            raise Refusal(422, "the vector has an impossible length")
        async with self._room:
            room = max(self._whole.max_nbytes, self._codec.max_nbytes)
            buffer = self._buffers.pop() if self._buffers else memoryview(bytearray(room))
            try:
                parcel.read = True
                await incoming.read_vector_into(buffer[:nbytes])
                yield buffer[:nbytes]
            finally:
                self._buffers.append(buffer)

    async def drain(self, parcel: ReceivedPush) -> None:
        """Read what nobody needed: a connection with an unread vector can't be used again."""
        if parcel.incoming is not None and parcel.incoming.vector_nbytes and not parcel.read:
            async with self.received(parcel, whole=True):
                pass

    async def decode(
        self, sender: str, data: memoryview | Float32Array, out: Float32Array, *, whole: bool
    ) -> None:
        """Write what was received into ``out``.

        Raises:
            PoisonedVectorError: malformed, NaN or an entry beyond the bound; the sender has its strike.
        """
        async with self._decoding:
            await heavy(8 * self._size, lambda: self.decode_now(sender, data, out, whole=whole))

    def decode_now(
        self, sender: str, data: memoryview | Float32Array, out: Float32Array, *, whole: bool
    ) -> None:
        """The same, here and now; one at a time."""
        try:
            if isinstance(data, memoryview):
                (self._whole if whole else self._codec).decode(data, out)
            else:
                np.copyto(out, data)
            mix.check_finite(out, self._max_abs)
        except (WireError, PoisonedVectorError) as error:
            self._strike(sender, str(error))
            raise PoisonedVectorError(str(error)) from error


Answered = tuple[ServerAnswer, ShardVersion | None]
"""An answer; the version buffer is held for the caller, who releases it."""


@dataclass(frozen=True)
class ShardServerOptions:
    """What a server needs of its node and view.

    Args:
        config: the strategy's options.
        members: of the view, in order.
        givers: those whose parameters make the seed.
        version: at which the shard begins.
        clock: time.
        learning_rate: of the next step.
        max_abs: greatest entry accepted.
        strike: notes that a peer sent something poisoned.
        doubt: asks for a view without a member.
        counts: of what happened, for status.
    """

    config: ServerOptions
    members: tuple[str, ...]
    givers: tuple[str, ...]
    version: int
    clock: Clock
    learning_rate: Callable[[], float]
    max_abs: float
    strike: Callable[[str, str], None]
    doubt: Callable[[str, str], None]
    counts: Counter[str]


class Turns:
    """Lets many wait for the next version."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._why: str | None = None

    def turn(self) -> None:
        """A version is out: wake all."""
        self._event.set()
        self._event = asyncio.Event()

    def close(self, why: str) -> None:
        """No more: all who wait, and whoever comes, are refused."""
        self._why = why
        self._event.set()

    async def next(self, limit_s: float) -> None:
        """Wait for the next turn.

        Raises:
            Refusal: it is closed (409), or none came in time (408).
        """
        try:
            async with asyncio.timeout(limit_s):
                if self._why is None:
                    await self._event.wait()
        except TimeoutError as error:
            raise Refusal(408, "no new version in time") from error
        if self._why is not None:
            raise Refusal(409, self._why)


class Attendance:
    """Who came to the present round.

    Args:
        members: who should come.
        doubt: asks for a view without a member.
    """

    def __init__(self, members: Sequence[str], doubt: Callable[[str, str], None]) -> None:
        self._members = members
        self._doubt = doubt
        self._came: set[tuple[int, str]] = set()

    def note(self, number: int, member: str) -> None:
        """``member`` came to round ``number``."""
        self._came.add((number, member))

    def came(self, number: int, member: str) -> bool:
        """Tell whether ``member`` came to round ``number``."""
        return (number, member) in self._came

    def clear(self) -> None:
        """A round is over."""
        self._came.clear()

    def doubt_absent(self, number: int, why: str) -> None:
        """Round ``number`` found too few: doubt those who didn't come. Only the first call does it."""
        absent = [member for member in self._members if not self.came(number, member)]
        if len(absent) < len(self._members):
            self.clear()
            for member in absent:
                self._doubt(member, why)


class ShardServer(Protocol):
    """One shard at work."""

    async def push(self, sender: str, head: GradientPush, parcel: ReceivedPush) -> Answered:
        """Take a push and answer it; raises `Refusal` or `TensorError`."""
        ...

    async def close(self, why: str) -> None:
        """Refuse everybody; afterwards nothing touches the shard."""
        ...


class Seeding:
    """The first round of a mode epoch: the shard becomes the mean of all givers' parameters.

    Everybody's parameters count the same, so what mode was before, the mean of all nodes stays.

    Args:
        shard: to fill.
        options: of the server.
        inbox: reads the vectors.
        done: called once the shard is filled.
    """

    def __init__(
        self, shard: Shard, options: ShardServerOptions, inbox: PushReader, done: Callable[[], None]
    ) -> None:
        self._shard = shard
        self._options = options
        self._inbox = inbox
        self._done = done
        self._attendance = Attendance(options.givers, options.doubt)
        self._gathering = RoundCollector(
            size=shard.span.size,
            members=options.givers,
            clock=options.clock,
            timeout=AdaptiveTimeout(options.config.deadline_s),
            reduce=self._reduce,
            first=0,
        )

    async def give(self, sender: str, parcel: ReceivedPush) -> None:
        """Take a member's parameters and wait for the mean.

        Raises:
            Refusal: not in time (408): those who are missing are doubted.
            PoisonedVectorError: they are unusable.
        """

        async def fill(out: Float32Array) -> None:
            async with self._inbox.received(parcel, whole=True) as data:
                await self._inbox.decode(sender, data, out, whole=True)
            self._attendance.note(0, sender)

        try:
            await self._gathering.contribute(0, sender, 1.0, 0, fill)
        except Refusal as refusal:
            if refusal.status == 408:
                self._attendance.doubt_absent(0, "it gave no parameters to begin with")
            raise

    async def close(self, why: str) -> None:
        """Refuse everybody."""
        self._gathering.close(why)
        await self._gathering.closed()

    async def _reduce(self, contributions: Sequence[Contribution]) -> Float32Array:
        shard, vectors = self._shard, [one.vector for one in contributions]
        async with shard.lock:

            def work() -> ShardVersion:
                combine(vectors, [1.0] * len(vectors), out=shard.parameters)
                return shard.write_version()

            version_buffer = await heavy(4 * shard.span.size * (len(vectors) + 1), work)
            shard.publish(version_buffer, self._options.version)
        self._done()
        return version_buffer.vector


def give(shard: Shard, base: int, given: ServerAnswer, *, wants: bool) -> Answered:
    """Answer with the newest version_buffer: as a difference where the worker holds the one before.

    Raises:
        Refusal: there is none yet (503).
    """
    version_buffer = shard.version_buffer
    if version_buffer is None:
        raise Refusal(503, "this shard has no parameters yet")
    if not wants or base == version_buffer.version:
        return _with(given, shard, version_buffer.version, "nothing"), None
    if version_buffer.delta is not None and base == version_buffer.version - 1:
        return _with(given, shard, version_buffer.version, "delta"), version_buffer.hold()
    return _with(given, shard, version_buffer.version, "whole"), version_buffer.hold()


def _with(
    given: ServerAnswer, shard: Shard, version: int, kind: Literal["whole", "delta", "nothing"]
) -> ServerAnswer:
    return msgspec.structs.replace(given, version=version, kind=kind, progress=shard.progress)
