"""A worker's calls to the servers of one view: one slice to each and back, put together to one vector.

A worker on the node that serves a shard hands its slice over without the network.

Shapes: every vector is flat, of D elements (all parameters) or of a shard's; names carry no suffix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from p2pdrl.config.strategy import ServerOptions
from p2pdrl.errors import P2PDRLError, PeerRefusedError, PeerTimeoutError, PoisonedVectorError, WireError
from p2pdrl.strategies.feedback import FeedbackEncoder
from p2pdrl.strategies.protocol import RoundReport, StrategyContext
from p2pdrl.strategies.servers.messages import GradientPush, ServerAnswer
from p2pdrl.strategies.servers.shard import ShardVersion, difference_codec
from p2pdrl.strategies.servers.shard_server import ReceivedPush, ViewSession
from p2pdrl.strategies.task_runner import together
from p2pdrl.tensors import mix
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Refusal

__all__ = ["BadServerError", "PoisonedPushError", "ShardClient", "SliceAnswer"]

SETTLE_TRIES = 8
GRACE_S = 2.0
"""How much longer a call may take than a server waits for its round."""


class PoisonedPushError(P2PDRLError):
    """A server found what we sent poisoned: to send it again is of no use."""


class BadServerError(PoisonedVectorError):
    """What a server gave is unusable.

    Attributes:
        server: node id.
    """

    def __init__(self, server: str, why: str) -> None:
        super().__init__(f"server {server}: {why}")
        self.server = server


class SliceAnswer(NamedTuple):
    """One server's answer.

    Args:
        head: what it says.
        data: parameters as they came over the network; valid until the client's next question.
        own: parameters of our own shard, held until `ShardClient.release`.
    """

    head: ServerAnswer
    data: memoryview | None
    own: ShardVersion | None


class ShardClient:
    """Asks all servers of one view.

    Args:
        differences: whether servers may send differences.
    """

    def __init__(
        self, session: ViewSession, context: StrategyContext, config: ServerOptions, *, differences: bool
    ) -> None:
        self.session = session
        self.spans = session.plan.spans
        self._deadline_s = config.deadline_s + GRACE_S
        self._max_abs = context.max_abs
        sizes = [span.size for span in self.spans]
        remote = [server != session.me for server in session.plan.servers]
        self._rooms = [
            memoryview(bytearray(4 * n if far else 0)) for n, far in zip(sizes, remote, strict=True)
        ]
        self._encoders = [
            FeedbackEncoder(
                config.compression, n, keep=config.keep, threshold=config.threshold, max_abs=context.max_abs
            )
            if far
            else None
            for n, far in zip(sizes, remote, strict=True)
        ]
        self._differences = [
            difference_codec(config.compression, n) if differences and far else None
            for n, far in zip(sizes, remote, strict=True)
        ]
        self._bytes_out = self._bytes_in = self._calls = 0

    def encode(self, gradient: Float32Array) -> None:
        """Write each server's slice as it travels.

        Raises:
            PoisonedVectorError: NaN, infinity or an entry beyond the bound.
        """
        mix.check_finite(gradient, self._max_abs)
        for span, encoder in zip(self.spans, self._encoders, strict=True):
            if encoder is not None:
                encoder.encode(gradient[span.slice])

    async def ask(
        self, head: GradientPush, vector: Float32Array | None = None, *, once_s: float | None = None
    ) -> SliceAnswer:
        """Ask the server of one shard.

        Args:
            head: which shard, and what for.
            vector: all D parameters (``seed``), or the gradient that was encoded (``step``).
            once_s: the call is made once, and its deadline is this; else it is made again as often as it, or
                its answer, gets lost, until a little more than a round's deadline.

        Raises:
            PeerRefusedError: it says no; our own shard says so too.
            PoisonedPushError: it finds our vector poisoned.
            TransportError: it doesn't answer, or not so.
        """
        session, shard = self.session, head.shard
        encoder = self._encoders[shard]
        part = None if vector is None else vector[self.spans[shard].slice]
        if encoder is None:
            return await self._ask_ourselves(head, part)
        message = None
        if part is not None:
            message = encoder.message if head.op == "step" else part.data.cast("B")
        room = self._rooms[shard]
        self._calls += 1
        self._bytes_out += 0 if message is None else message.nbytes
        server = session.plan.servers[shard]
        try:
            reply = await session.group.call(
                server,
                "push",
                head,
                vector=message,
                into=lambda _, nbytes: room[:nbytes] if nbytes <= room.nbytes else None,
                deadline_s=self._deadline_s if once_s is None else once_s,
                once=once_s is not None,
            )
        except PeerRefusedError as refusal:
            if refusal.status == 422:
                raise PoisonedPushError(refusal.reason) from refusal
            raise
        answer: ServerAnswer = codec.decode(reply.meta, ServerAnswer, "server's answer")
        if (answer.kind == "nothing") != (reply.vector_nbytes == 0):
            raise WireError("the server's answer brings another vector than it says")
        self._bytes_in += reply.vector_nbytes
        if head.op == "step" and answer.outcome == "ok":
            encoder.delivered()
        return SliceAnswer(answer, room[: reply.vector_nbytes], None)

    async def _ask_ourselves(self, head: GradientPush, part: Float32Array | None) -> SliceAnswer:
        try:
            server = await self.session.server(self._deadline_s)
            answer, version = await server.push(self.session.me, head, ReceivedPush(None, part))
        except Refusal as refusal:
            raise PeerRefusedError(refusal.status, refusal.reason) from refusal
        except PoisonedVectorError as error:
            raise PoisonedPushError(str(error)) from error
        return SliceAnswer(answer, None, version)

    async def insist_all(
        self, head: GradientPush, vector: Float32Array | None = None, shards: Sequence[int] | None = None
    ) -> list[SliceAnswer]:
        """Ask all servers at a time, or those of ``shards``, whichever shard ``head`` names.

        Each until there is an answer, or the view ends and we are cancelled; see `Group.insist`.

        Raises:
            PoisonedPushError: one finds our vector poisoned.
        """

        def insist(shard: int) -> Coroutine[Any, Any, SliceAnswer]:
            one = msgspec.structs.replace(head, shard=shard)
            return session.group.insist(session.plan.servers[shard], lambda: self.ask(one, vector))

        session = self.session
        return await together(*map(insist, range(len(self.spans)) if shards is None else shards))

    async def fetch(self, version: int, shards: Sequence[int] | None = None) -> list[SliceAnswer]:
        """Get parameters of ``version`` or later; see `insist_all`."""
        return await self.insist_all(GradientPush(self.session.key, 0, "fetch", version), shards=shards)

    def assemble(
        self, parts: Sequence[SliceAnswer | None], held: Float32Array | None, out: Float32Array
    ) -> None:
        """Put the servers' slices together.

        Args:
            parts: one of each server; None where none came: its slice stays as it was.
            held: the whole vector that we hold.
            out: the new one; another buffer than ``held``.

        Raises:
            BadServerError: a slice is unusable.
        """
        for shard, (span, part) in enumerate(zip(self.spans, parts, strict=True)):
            into = out[span.slice]
            try:
                self._copy(shard, part, None if held is None else held[span.slice], into)
                mix.check_finite(into, self._max_abs)
            except (WireError, PoisonedVectorError) as error:
                raise BadServerError(self.session.plan.servers[shard], str(error)) from error

    def _copy(
        self, shard: int, part: SliceAnswer | None, held: Float32Array | None, into: Float32Array
    ) -> None:
        if part is not None and part.own is not None:
            np.copyto(into, part.own.vector)
        elif part is not None and part.head.kind == "whole" and part.data is not None:
            if part.data.nbytes != into.nbytes:
                raise WireError(f"a slice of {part.data.nbytes} bytes came, not of {into.nbytes}")
            np.copyto(into, np.frombuffer(part.data, "<f4"))
        elif held is None:
            raise WireError("a slice is missing that we never had")
        elif part is not None and part.head.kind == "delta" and part.data is not None:
            difference = self._differences[shard]
            if difference is None:
                raise WireError("a difference came where none can be")
            difference.decode(part.data, into)
            np.add(held, into, out=into)
        else:
            np.copyto(into, held)

    async def settle(self, parts: Sequence[SliceAnswer]) -> list[SliceAnswer]:
        """Ask again for slices until all are of one version: servers move on while we ask.

        What isn't returned is released, also where this raises or is cancelled.

        Raises:
            PeerTimeoutError: they never came to be.
        """
        held = dict(enumerate(parts))
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: self.release(list(held.values())))
            for _ in range(SETTLE_TRIES):
                newest = max(part.head.version for part in held.values())
                old = [shard for shard, part in held.items() if part.head.version < newest]
                if not old:
                    stack.pop_all()
                    return [held[shard] for shard in range(len(parts))]
                self.release([held.pop(shard) for shard in old])
                held.update(zip(old, await self.fetch(newest, old), strict=True))
            raise PeerTimeoutError("the servers are at different versions, and stay so")

    @staticmethod
    def release(parts: Sequence[SliceAnswer | None]) -> None:
        """Hold our own shard's versions no more."""
        for part in parts:
            if part is not None and part.own is not None:
                part.own.release()

    def with_traffic(self, report: RoundReport) -> RoundReport:
        """Complete a report by the bytes and calls since the last call of this."""
        report = replace(report, bytes_out=self._bytes_out, bytes_in=self._bytes_in, round_trips=self._calls)
        self._bytes_out = self._bytes_in = self._calls = 0
        return report
