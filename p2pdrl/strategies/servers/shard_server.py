"""One shard at work in one view: what the servers of both strategies share, and the view itself.

Shapes: every vector is flat, of the shard's length; names carry no suffix.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from p2pdrl.config.strategy import ServerOptions
from p2pdrl.errors import PoisonedVectorError, WireError
from p2pdrl.group.adaptive_timeout import AdaptiveTimeout
from p2pdrl.group.round_collector import Contribution, RoundCollector
from p2pdrl.group.service import Group, GroupView
from p2pdrl.strategies.clipping_radius import BeyondCounts
from p2pdrl.strategies.offload import heavy
from p2pdrl.strategies.protocol import StrategyContext
from p2pdrl.strategies.servers.messages import GradientPush, ServerAnswer
from p2pdrl.strategies.servers.shard import Shard, ShardVersion
from p2pdrl.strategies.servers.shard_plan import ServerNote, ShardPlan
from p2pdrl.tensors import mix
from p2pdrl.tensors.compression import make_codec
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.robust import combine
from p2pdrl.transport.protocol import Incoming, Refusal

__all__ = ["Answered", "Attendance", "ReceivedPush", "ShardServer", "ShardServerOptions", "ViewSession"]

READERS = 8
"""Vectors that are read at a time; other senders wait."""


@dataclass(slots=True)
class ReceivedPush:
    """The vector of a push: a peer's, still to be read off the network, or the local worker's.

    Attributes:
        incoming: a peer's call; None for the local worker.
        vector: the local worker's; unchanged until the push is answered.
        was_read: whether the vector was read off the network.
    """

    incoming: Incoming | None
    vector: Float32Array | None = None
    was_read: bool = False


class PushReader:
    """Reads the vectors of one shard's pushes.

    Args:
        size: entries of the shard.
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
        self._readers = asyncio.Semaphore(READERS)
        self._buffers: list[memoryview] = []

    @asynccontextmanager
    async def read(self, push: ReceivedPush, *, whole: bool) -> AsyncIterator[memoryview | Float32Array]:
        """Read a push's vector; what is yielded is good for `decode` until the block ends.

        Args:
            push: whose.
            whole: whether it is parameters, which travel as float32; else a gradient.

        Raises:
            Refusal: its length is impossible (422).
            WireError: truncated, or altered on the way.
            PeerTimeoutError: the peer stopped sending.
        """
        incoming = push.incoming
        if incoming is None:
            if push.vector is None or push.vector.size != self._size:
                raise Refusal(422, "the push brings no vector of this shard's length")
            yield push.vector
            return
        nbytes, most = incoming.vector_nbytes, (self._whole if whole else self._codec).max_nbytes
        if not 0 < nbytes <= most:
            self._strike(incoming.sender, f"a vector of {nbytes} bytes, at most {most} are possible")
            raise Refusal(422, "the vector has an impossible length")
        async with self._readers:
            longest = max(self._whole.max_nbytes, self._codec.max_nbytes)
            buffer = self._buffers.pop() if self._buffers else memoryview(bytearray(longest))
            try:
                push.was_read = True
                await incoming.read_vector_into(buffer[:nbytes])
                yield buffer[:nbytes]
            finally:
                self._buffers.append(buffer)

    async def drain(self, push: ReceivedPush) -> None:
        """Read what nobody needed: a connection with an unread vector can't be used again."""
        if push.incoming is not None and push.incoming.vector_nbytes and not push.was_read:
            async with self.read(push, whole=True):
                pass

    async def read_into(self, sender: str, push: ReceivedPush, out: Float32Array, *, whole: bool) -> None:
        """Read a push's vector into ``out``.

        Raises:
            P2PDRLError: as `read` and `decode`.
        """
        async with self.read(push, whole=whole) as data, self._decoding:
            await heavy(8 * self._size, lambda: self.decode(sender, data, out, whole=whole))

    def decode(self, sender: str, data: memoryview | Float32Array, out: Float32Array, *, whole: bool) -> None:
        """Write what was read into ``out``; one at a time, in a thread where it is long.

        Raises:
            PoisonedVectorError: malformed, NaN or an entry beyond the bound; the sender has its strike.
        """
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
"""An answer; the version is held for the caller, who releases it."""


@dataclass(frozen=True)
class ShardServerOptions:
    """What a server needs of its node and view.

    Attributes:
        members: of the view, in order.
        learning_rate: of the next step.
        counts: of what happened, for status.
        beyond: who sends gradients that are far off.
    """

    config: ServerOptions
    context: StrategyContext
    members: tuple[str, ...]
    plan: ShardPlan
    doubt: Callable[[str, str], None]
    learning_rate: Callable[[], float]
    counts: Counter[str]
    beyond: BeyondCounts


class Attendance:
    """Who contributed to the present round."""

    def __init__(self, members: Sequence[str], doubt: Callable[[str, str], None]) -> None:
        self._members = members
        self._doubt = doubt
        self._came: set[tuple[int, str]] = set()

    def note(self, number: int, member: str) -> None:
        """Note that ``member`` contributed to round ``number``."""
        self._came.add((number, member))

    def came(self, number: int, member: str) -> bool:
        """Tell whether ``member`` contributed to round ``number``."""
        return (number, member) in self._came

    def clear(self) -> None:
        """Forget all, at a round's end."""
        self._came.clear()

    def doubt_absent(self, number: int, why: str) -> None:
        """Doubt those without whom round ``number`` timed out; of a round's waiters only the first does."""
        absent = [member for member in self._members if not self.came(number, member)]
        if len(absent) < len(self._members):
            self.clear()
            for member in absent:
                self._doubt(member, why)


class Seeding:
    """The first round of a mode epoch: the shard becomes the mean of all givers' parameters.

    All count the same: whatever mode was in force before, the mean of all nodes stays.

    Args:
        done: called once the shard is filled.
    """

    def __init__(
        self, shard: Shard, options: ShardServerOptions, reader: PushReader, done: Callable[[], None]
    ) -> None:
        self._shard = shard
        self._options = options
        self._reader = reader
        self._done = done
        self._attendance = Attendance(options.plan.givers, options.doubt)
        self._collector = RoundCollector(
            size=shard.span.size,
            members=options.plan.givers,
            clock=options.context.clock,
            timeout=AdaptiveTimeout(options.config.deadline_s),
            reduce=self._reduce,
            first=0,
        )

    async def contribute(self, sender: str, push: ReceivedPush) -> None:
        """Take a giver's parameters and wait for the mean.

        Raises:
            Refusal: not in time (408): those who are missing are doubted.
            PoisonedVectorError: they are unusable.
        """

        async def fill(out: Float32Array) -> None:
            await self._reader.read_into(sender, push, out, whole=True)
            self._attendance.note(0, sender)

        try:
            await self._collector.contribute(0, sender, 1.0, 0, fill)
        except Refusal as refusal:
            if refusal.status == 408:
                self._attendance.doubt_absent(0, "it gave no parameters to begin with")
            raise

    async def close(self, why: str) -> None:
        """Refuse everybody."""
        self._collector.close(why)
        await self._collector.closed()

    async def _reduce(self, contributions: Sequence[Contribution]) -> Float32Array:
        shard, vectors = self._shard, [one.vector for one in contributions]
        config = self._options.config
        async with shard.lock:

            def work() -> ShardVersion:
                rule = config.rule(bounded=self._options.context.bounded)
                combine(
                    vectors,
                    [1.0] * len(vectors),
                    mixing=rule,
                    clip_distance=config.clip_distance,
                    trim=config.trim,
                    out=shard.parameters,
                )
                return shard.write_version()

            mean = await heavy(4 * shard.span.size * (len(vectors) + 1), work)
            shard.publish(mean, self._options.plan.version)
        self._done()
        return mean.vector


class ShardServer(ABC):
    """One shard at work in one view.

    It opens once the shard is filled, or waits for its seed, and closes with the view.
    """

    def __init__(self, shard: Shard, options: ShardServerOptions) -> None:
        self._shard = shard
        self._options = options
        context = options.context
        self._reader = PushReader(options.config, shard.span.size, context.max_abs, context.swarm.strike)
        self._stepped = asyncio.Event()
        """Set and replaced when a version is out."""
        self._why: str | None = None
        """Why it is closed."""
        self._seeding = Seeding(shard, options, self._reader, self._wake) if options.plan.seed else None

    async def push(self, sender: str, head: GradientPush, push: ReceivedPush) -> Answered:
        """Take what a worker sends; give it the parameters where it wants them.

        Raises:
            Refusal: the view has ended (409), nothing came of it in time (408), a poisoned gradient (422).
            TensorError: poisoned parameters.
        """
        if head.op == "seed" and self._seeding is not None:
            await self._seeding.contribute(sender, push)
            answer = ServerAnswer(self._shard.version)
        else:
            answer = await self._serve(sender, head, push)
        await self._reader.drain(push)
        if answer.outcome == "waiting":
            return answer, None
        return await self._give(answer, head)

    @abstractmethod
    async def _serve(self, sender: str, head: GradientPush, push: ReceivedPush) -> ServerAnswer:
        """Do what a worker asks for, but for the seed."""

    async def close(self, why: str) -> None:
        """Refuse everybody; afterwards nothing touches the shard."""
        self._why = why
        self._stepped.set()
        if self._seeding is not None:
            await self._seeding.close(why)

    async def _reach(self, version: int = 0) -> None:
        """Wait until the shard has parameters, of ``version`` or later.

        Raises:
            Refusal: it is closed (409), or no new version came in time (408).
        """
        while self._shard.published is None or self._shard.version < version:
            try:
                async with asyncio.timeout(self._options.config.deadline_s):
                    if self._why is None:
                        await self._stepped.wait()
            except TimeoutError as error:
                raise Refusal(408, "no new version in time") from error
            self._check_open()

    def _wake(self) -> None:
        """Wake all who wait for a version: it is out."""
        self._stepped.set()
        self._stepped = asyncio.Event()

    def _check_open(self) -> None:
        """Go on, unless it is closed.

        Raises:
            Refusal: 409, it is.
        """
        if self._why is not None:
            raise Refusal(409, self._why)

    async def _give(self, answer: ServerAnswer, head: GradientPush) -> Answered:
        """Add the newest version to an answer: as a difference where the worker holds the one before.

        Raises:
            Refusal: there is none yet (503).
        """
        newest = self._shard.published
        if newest is None:
            raise Refusal(503, "this shard has no parameters yet")
        kind: Literal["whole", "delta", "nothing"] = "whole"
        if not head.wants or head.base == newest.version:
            kind = "nothing"
        elif newest.delta is not None and head.base == newest.version - 1:
            kind = "delta"
        complete = msgspec.structs.replace(
            answer, version=newest.version, kind=kind, progress=self._shard.progress
        )
        return complete, None if kind == "nothing" else newest.hold()


class ViewSession:
    """A view in force.

    Args:
        notes: the members', read.
    """

    def __init__(
        self, view: GroupView, plan: ShardPlan, notes: Mapping[str, ServerNote], me: str, group: Group
    ) -> None:
        self.key, self.members = view.key, view.members
        self.plan, self.notes = plan, notes
        self.me, self.group = me, group
        self.index = plan.shard_of(me)
        """Shard that we serve; None for none."""
        self._server: ShardServer | None = None
        self._opened = asyncio.Event()
        self._why: str | None = None

    def open(self, server: ShardServer) -> None:
        """Let our shard be called."""
        self._server = server
        self._opened.set()

    async def server(self, limit_s: float) -> ShardServer:
        """Return our shard's server once it is open.

        Raises:
            Refusal: we serve nothing (409), the view has ended (409), or it isn't open in time (503).
        """
        if self.index is None:
            raise Refusal(409, "this node serves no shard")
        try:
            async with asyncio.timeout(limit_s):
                await self._opened.wait()
        except TimeoutError as error:
            raise Refusal(503, "this node's shard isn't filled yet") from error
        if self._why is not None or self._server is None:
            raise Refusal(409, self._why or "this node serves no shard")
        return self._server

    async def close(self, why: str) -> None:
        """Refuse everybody, at the view's end; afterwards nothing touches the shard."""
        self._why = why
        self._opened.set()
        if self._server is not None:
            await self._server.close(why)
