"""A worker's side of the wire: one slice to each server and back, put together to one vector.

A worker on the node that serves a shard hands its slice over without the network.

Shapes: every vector is flat, of D elements (all parameters) or of a shard's; names carry no suffix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from p2pdrl.config.strategy_bases import Served
from p2pdrl.errors import (
    PeerRefusedError,
    PeerTimeoutError,
    PeerUnreachableError,
    PoisonedVectorError,
    TransportError,
    WireError,
)
from p2pdrl.strategies.feedback import FeedbackEncoder
from p2pdrl.strategies.protocol import Context
from p2pdrl.strategies.servers.editions import Edition
from p2pdrl.strategies.servers.inbox import Parcel
from p2pdrl.strategies.servers.messages import Given, Op, Push
from p2pdrl.strategies.servers.shard import difference_codec
from p2pdrl.strategies.servers.term import Term
from p2pdrl.tensors import mix
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Refusal

__all__ = ["BadServerError", "Courier", "Part", "PoisonedPushError", "together"]

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5
SETTLE_TRIES = 8
T = TypeVar("T")

GRACE_S = 2.0
"""How much longer a call may take than a server waits for its round."""


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Do several things at a time; when one fails the others are cancelled, and ended."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class PoisonedPushError(TransportError):
    """A server finds what we sent poisoned."""


class BadServerError(PoisonedVectorError):
    """What a server gave is unusable.

    Attributes:
        server: node id.
    """

    def __init__(self, server: str, why: str) -> None:
        super().__init__(f"server {server}: {why}")
        self.server = server


class Part(NamedTuple):
    """One server's answer.

    Args:
        given: its head.
        data: parameters as they came over the network; valid until the courier's next question.
        edition: parameters of our own shard, held.
    """

    given: Given
    data: memoryview | None
    edition: Edition | None


class Courier:
    """Asks all servers of one view.

    Args:
        term: the view.
        context: what the node gives.
        config: the strategy's options.
        differences: whether servers may send differences.
    """

    def __init__(self, term: Term, context: Context, config: Served, *, differences: bool) -> None:
        self.term = term
        self.spans = term.plan.spans
        self._deadline_s = config.deadline_s + GRACE_S
        self._max_abs = context.max_abs
        sizes = [span.size for span in term.plan.spans]
        remote = [server != term.me for server in term.plan.servers]
        self._rooms = [
            memoryview(bytearray(4 * n if far else 0)) for n, far in zip(sizes, remote, strict=True)
        ]
        self._encoders = [
            FeedbackEncoder(
                config.compression,
                n,
                keep=config.keep,
                threshold=config.threshold,
                max_abs=context.max_abs,
            )
            if far
            else None
            for n, far in zip(sizes, remote, strict=True)
        ]
        self._differences = [
            difference_codec(config.compression, n) if differences and far else None
            for n, far in zip(sizes, remote, strict=True)
        ]
        self.bytes_out = self.bytes_in = self.calls = 0

    def encode(self, gradient: Float32Array) -> None:
        """Write each server's slice as it travels.

        Raises:
            PoisonedVectorError: NaN, infinity or an entry beyond the bound.
        """
        mix.check_finite(gradient, self._max_abs)
        for span, encoder in zip(self.term.plan.spans, self._encoders, strict=True):
            if encoder is not None:
                encoder.encode(gradient[span.slice])

    async def ask(
        self,
        shard: int,
        op: Op,
        number: int,
        *,
        base: int = -1,
        weight: float = 0.0,
        policy: int = 0,
        left: int = 0,
        wants: bool = True,
        vector: Float32Array | None = None,
        once_s: float | None = None,
    ) -> Part:
        """Ask the server of one shard.

        Args:
            shard: its index.
            op: see `messages`.
            number: version that the gradient was computed on, or the least one to fetch.
            base: version of the parameters that we hold.
            weight: samples behind the gradient.
            policy: our policy version.
            left: gradients of the same update that come after this one.
            wants: whether parameters shall come back.
            vector: all D parameters (``seed``) or the gradient that was encoded (``step``).
            once_s: the call is made once, and its deadline is this; else it is made again as often as it, or
                its answer, gets lost, until a little more than a round's deadline.

        Raises:
            PeerRefusedError: it says no; our own shard says so too.
            PoisonedPushError: it finds our vector poisoned.
            TransportError: it doesn't answer, or not so.
        """
        term = self.term
        head = Push(term.key, shard, op, number, base, weight, policy, wants=wants, left=left)
        encoder, span = self._encoders[shard], term.plan.spans[shard]
        part = None if vector is None else vector[span.slice]
        if encoder is None:
            return await self._ask_ourselves(head, part)
        message = None
        if part is not None:
            message = encoder.message if op == "step" else part.data.cast("B")
        room = self._rooms[shard]
        self.calls += 1
        self.bytes_out += 0 if message is None else message.nbytes
        server = term.plan.servers[shard]
        try:
            answer = await term.calls.call(
                term.address_of(server),
                server,
                "push",
                lambda call: msgspec.msgpack.encode(msgspec.structs.replace(head, call=call)),
                vector=message,
                into=lambda _, nbytes: room[:nbytes] if nbytes <= room.nbytes else None,
                deadline_s=self._deadline_s if once_s is None else once_s,
                once=once_s is not None,
            )
        except PeerRefusedError as refusal:
            if refusal.status == 422:
                raise PoisonedPushError(refusal.reason) from refusal
            raise
        given: Given = codec.decode(answer.meta, Given, "server's answer")
        if (given.kind == "nothing") != (answer.vector_nbytes == 0):
            raise WireError("the server's answer brings another vector than it says")
        self.bytes_in += answer.vector_nbytes
        if op == "step" and given.outcome == "ok":
            encoder.delivered()
        return Part(given, room[: answer.vector_nbytes], None)

    async def _ask_ourselves(self, head: Push, part: Float32Array | None) -> Part:
        try:
            desk = await self.term.desk(self._deadline_s)
            given, edition = await desk.push(self.term.me, head, Parcel(None, part))
        except Refusal as refusal:
            raise PeerRefusedError(refusal.status, refusal.reason) from refusal
        except PoisonedVectorError as error:
            raise PoisonedPushError(str(error)) from error
        return Part(given, None, edition)

    async def insist(
        self,
        shard: int,
        op: Op,
        number: int,
        *,
        base: int = -1,
        weight: float = 0.0,
        policy: int = 0,
        left: int = 0,
        vector: Float32Array | None = None,
    ) -> Part:
        """Ask until there is an answer: for as long as the view is in force, which is when we are cancelled.

        A server that can't be reached twice in a row, nor answers anything else, is doubted; and one that
        doesn't answer in time.

        Raises:
            PoisonedPushError: it finds our vector poisoned.
        """
        server, pause_s, broken = self.term.plan.servers[shard], FIRST_PAUSE_S, False
        while True:
            try:
                return await self.ask(
                    shard, op, number, base=base, weight=weight, policy=policy, left=left, vector=vector
                )
            except PeerUnreachableError as error:
                if broken and not await self.term.lives(server):
                    self.term.doubt(server, str(error))
                broken = True
            except PeerTimeoutError as error:
                self.term.doubt(server, str(error))
            except PoisonedPushError:
                raise
            except TransportError:
                broken = False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def assemble(self, parts: Sequence[Part | None], held: Float32Array | None, out: Float32Array) -> None:
        """Put the servers' slices together.

        Args:
            parts: one of each server; None where none came: its slice stays what it was.
            held: the whole vector that we hold.
            out: the new one; another than ``held``.

        Raises:
            BadServerError: a slice is unusable.
        """
        for shard, (span, part) in enumerate(zip(self.term.plan.spans, parts, strict=True)):
            into = out[span.slice]
            try:
                self._place(shard, part, None if held is None else held[span.slice], into)
                mix.check_finite(into, self._max_abs)
            except (WireError, PoisonedVectorError) as error:
                raise BadServerError(self.term.plan.servers[shard], str(error)) from error

    def _place(self, shard: int, part: Part | None, held: Float32Array | None, into: Float32Array) -> None:
        if part is not None and part.edition is not None:
            np.copyto(into, part.edition.vector)
        elif part is not None and part.given.kind == "whole" and part.data is not None:
            if part.data.nbytes != into.nbytes:
                raise WireError(f"a slice of {part.data.nbytes} bytes came, not of {into.nbytes}")
            np.copyto(into, np.frombuffer(part.data, "<f4"))
        elif held is None:
            raise WireError("a slice is missing that we never had")
        elif part is not None and part.given.kind == "delta" and part.data is not None:
            difference = self._differences[shard]
            if difference is None:
                raise WireError("a difference came where none can be")
            difference.decode(part.data, into)
            np.add(held, into, out=into)
        else:
            np.copyto(into, held)

    async def settle(self, parts: Sequence[Part]) -> list[Part]:
        """Ask again for slices until all are of one version: servers move on while we ask.

        Raises:
            PeerTimeoutError: they never came to be.
        """
        settled = list(parts)
        for _ in range(SETTLE_TRIES):
            newest = max(part.given.version for part in settled)
            old = [shard for shard, part in enumerate(settled) if part.given.version < newest]
            if not old:
                return settled
            self.release([settled[shard] for shard in old])
            fresh = await together(*(self.insist(shard, "fetch", newest) for shard in old))
            for shard, part in zip(old, fresh, strict=True):
                settled[shard] = part
        self.release(settled)
        raise PeerTimeoutError("the servers are at different versions, and stay so")

    @staticmethod
    def release(parts: Sequence[Part | None]) -> None:
        """Hold our own shard's editions no more."""
        for part in parts:
            if part is not None and part.edition is not None:
                part.edition.release()

    def traffic(self) -> tuple[int, int, int]:
        """Bytes out, bytes in and calls since the last call of this."""
        counts = (self.bytes_out, self.bytes_in, self.calls)
        self.bytes_out = self.bytes_in = self.calls = 0
        return counts
