"""A worker's side: one slice to each server and back, put together to one vector on the learner's board."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from p2pdrl.config.strategy import ServerOptions
from p2pdrl.errors import (
    PeerRefusedError,
    PeerTimeoutError,
    PeerUnreachableError,
    PoisonedVectorError,
    TensorError,
    TransportError,
    WireError,
)
from p2pdrl.group.compatibility import Summary
from p2pdrl.strategies.feedback import FeedbackEncoder
from p2pdrl.strategies.offload import heavy
from p2pdrl.strategies.own_vector import read_now
from p2pdrl.strategies.protocol import StrategyContext
from p2pdrl.strategies.servers.messages import GradientPush, Op, ServerAnswer
from p2pdrl.strategies.servers.replica_store import ReplicaStore
from p2pdrl.strategies.servers.shard import ShardVersion, difference_codec
from p2pdrl.strategies.servers.shard_server import ReceivedPush
from p2pdrl.strategies.servers.view_session import ViewSession
from p2pdrl.tensors import mix
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Refusal

__all__ = ["BadServerError", "PoisonedPushError", "ServerWorker", "ShardClient", "SliceAnswer", "together"]

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


class SliceAnswer(NamedTuple):
    """One server's answer.

    Args:
        given: its head.
        data: parameters as they came over the network; valid until the client's next question.
        version_buffer: parameters of our own shard, held.
    """

    given: ServerAnswer
    data: memoryview | None
    version_buffer: ShardVersion | None


class ShardClient:
    """Asks all servers of one view.

    Args:
        session: the view.
        context: what the node gives.
        config: the strategy's options.
        differences: whether servers may send differences.
    """

    def __init__(
        self, session: ViewSession, context: StrategyContext, config: ServerOptions, *, differences: bool
    ) -> None:
        self.session = session
        self.spans = session.plan.spans
        self._deadline_s = config.deadline_s + GRACE_S
        self._max_abs = context.max_abs
        sizes = [span.size for span in session.plan.spans]
        remote = [server != session.me for server in session.plan.servers]
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
        for span, encoder in zip(self.session.plan.spans, self._encoders, strict=True):
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
    ) -> SliceAnswer:
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
        session = self.session
        head = GradientPush(session.key, shard, op, number, base, weight, policy, wants=wants, left=left)
        encoder, span = self._encoders[shard], session.plan.spans[shard]
        part = None if vector is None else vector[span.slice]
        if encoder is None:
            return await self._ask_ourselves(head, part)
        message = None
        if part is not None:
            message = encoder.message if op == "step" else part.data.cast("B")
        room = self._rooms[shard]
        self.calls += 1
        self.bytes_out += 0 if message is None else message.nbytes
        server = session.plan.servers[shard]
        try:
            answer = await session.calls.call(
                session.address_of(server),
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
        given: ServerAnswer = codec.decode(answer.meta, ServerAnswer, "server's answer")
        if (given.kind == "nothing") != (answer.vector_nbytes == 0):
            raise WireError("the server's answer brings another vector than it says")
        self.bytes_in += answer.vector_nbytes
        if op == "step" and given.outcome == "ok":
            encoder.delivered()
        return SliceAnswer(given, room[: answer.vector_nbytes], None)

    async def _ask_ourselves(self, head: GradientPush, part: Float32Array | None) -> SliceAnswer:
        try:
            server = await self.session.server(self._deadline_s)
            given, version_buffer = await server.push(self.session.me, head, ReceivedPush(None, part))
        except Refusal as refusal:
            raise PeerRefusedError(refusal.status, refusal.reason) from refusal
        except PoisonedVectorError as error:
            raise PoisonedPushError(str(error)) from error
        return SliceAnswer(given, None, version_buffer)

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
    ) -> SliceAnswer:
        """Ask until there is an answer: for as long as the view is in force, which is when we are cancelled.

        A server that can't be reached twice in a row, nor answers anything else, is doubted; and one that
        doesn't answer in time.

        Raises:
            PoisonedPushError: it finds our vector poisoned.
        """
        server, pause_s, broken = self.session.plan.servers[shard], FIRST_PAUSE_S, False
        while True:
            try:
                return await self.ask(
                    shard, op, number, base=base, weight=weight, policy=policy, left=left, vector=vector
                )
            except PeerUnreachableError as error:
                if broken and not await self.session.lives(server):
                    self.session.doubt(server, str(error))
                broken = True
            except PeerTimeoutError as error:
                self.session.doubt(server, str(error))
            except PoisonedPushError:
                raise
            except TransportError:
                broken = False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def assemble(
        self, parts: Sequence[SliceAnswer | None], held: Float32Array | None, out: Float32Array
    ) -> None:
        """Put the servers' slices together.

        Args:
            parts: one of each server; None where none came: its slice stays what it was.
            held: the whole vector that we hold.
            out: the new one; another than ``held``.

        Raises:
            BadServerError: a slice is unusable.
        """
        for shard, (span, part) in enumerate(zip(self.session.plan.spans, parts, strict=True)):
            into = out[span.slice]
            try:
                self._place(shard, part, None if held is None else held[span.slice], into)
                mix.check_finite(into, self._max_abs)
            except (WireError, PoisonedVectorError) as error:
                raise BadServerError(self.session.plan.servers[shard], str(error)) from error

    def _place(
        self, shard: int, part: SliceAnswer | None, held: Float32Array | None, into: Float32Array
    ) -> None:
        if part is not None and part.version_buffer is not None:
            np.copyto(into, part.version_buffer.vector)
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

    async def settle(self, parts: Sequence[SliceAnswer]) -> list[SliceAnswer]:
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
    def release(parts: Sequence[SliceAnswer | None]) -> None:
        """Hold our own shard's versions no more."""
        for part in parts:
            if part is not None and part.version_buffer is not None:
                part.version_buffer.release()

    def traffic(self) -> tuple[int, int, int]:
        """Bytes out, bytes in and calls since the last call of this."""
        counts = (self.bytes_out, self.bytes_in, self.calls)
        self.bytes_out = self.bytes_in = self.calls = 0
        return counts


RETRY_S = 0.25
ADOPT_S = 1.0


class ServerWorker:
    """One node's worker, for as long as its strategy lasts.

    Args:
        context: what the node gives.
        store: where the whole copy is kept.
    """

    def __init__(self, context: StrategyContext, store: ReplicaStore) -> None:
        self._context = context
        self._swarm = context.swarm
        self._board = context.learner.board
        self._store = store
        self._nbytes = 4 * context.size
        self.posted = -1
        """Version of the vector that was last put on the board."""

    async def join(self, session: ViewSession, client: ShardClient, *, settle: bool) -> list[int]:
        """Begin a view with the servers' parameters, to which our own are the seed if there were none.

        Args:
            session: the view.
            client: to its servers.
            settle: whether all slices must be of one version.

        Returns:
            The version of each shard.
        """
        await self._adopt(session)
        if session.plan.seed and not session.plan.givers:
            await self._leave_for_good(session)
        while True:
            try:
                versions = await self._begin(session, client, settle=settle)
            except BadServerError as error:
                self._swarm.strike(error.server, str(error))
                session.doubt(error.server, "its parameters are unusable")
            except PoisonedPushError as error:
                self._swarm.heal(f"our own parameters are unusable: {error}")
            except PeerTimeoutError as error:
                self._swarm.tell("servers", str(error), warning=True)
            else:
                self._store.branch = f"{session.key.generation}/{session.key.proposer[-12:]}"
                return versions
            await asyncio.sleep(RETRY_S)

    async def _begin(self, session: ViewSession, client: ShardClient, *, settle: bool) -> list[int]:
        seeds = session.plan.seed and session.me in session.plan.givers
        own = await self._own() if seeds else None
        parts: Sequence[SliceAnswer] = await together(
            *(
                client.insist(shard, "seed" if seeds else "fetch", session.plan.version, vector=own)
                for shard in range(len(session.plan.spans))
            )
        )
        if settle:
            parts = await client.settle(parts)
        try:
            versions = [part.given.version for part in parts]
            await self.take(client, parts, max(versions), min(versions))
            return versions
        finally:
            client.release(parts)

    async def take(
        self, client: ShardClient, parts: Sequence[SliceAnswer | None], policy: int, version: int
    ) -> float:
        """Put slices together, keep the vector, and put it on the board when it is another than before.

        Args:
            client: that brought them.
            parts: one of each server.
            policy: policy version for the learner.
            version: for our note: every slice has it, or a higher one.

        Returns:
            Euclidean norm of the change.

        Raises:
            BadServerError: a slice is unusable; nothing was changed.
        """
        out = self._store.blank_copy()
        held = None if self._store.copy is None else self._store.copy.parameters

        def work() -> float:
            client.assemble(parts, held, out)
            return mix.norm(out) if held is None else mix.distance(out, held)

        changed = await heavy(3 * self._nbytes, work)
        await self._store.replace_copy(out, version)
        progress = [part.given.progress for part in parts if part is not None]
        self._store.progress = max(self._store.progress, *progress, 0)
        if changed or self.posted != policy:
            self.posted = -1
            await heavy(self._nbytes, lambda: self._board.post_set(out, None, policy))
            self.posted = policy
        return changed

    async def _adopt(self, session: ViewSession) -> None:
        """Of another lineage than the one that stays, we take its whole state before we work."""
        plan, mine = session.plan, session.notes[session.me].lineage
        while mine and plan.lineage and mine != plan.lineage:
            why = f"lineage {plan.lineage} has more steps than ours"
            if await self._swarm.adopted(plan.donor, plan.lineage, why):
                self.posted = -1
                return
            await asyncio.sleep(ADOPT_S)

    async def _leave_for_good(self, session: ViewSession) -> None:
        """Nobody in this view had parameters: once we have some, ask for a view that knows it."""
        while True:
            await asyncio.sleep(ADOPT_S)
            summary: Summary | None = self._swarm.summary()
            if summary is not None:
                session.doubt(session.me, "it has parameters by now")

    async def _own(self) -> Float32Array:
        """Our own parameters, as they are on the board."""
        out = self._store.blank_copy()
        while True:
            try:
                await heavy(self._nbytes, lambda: read_now(self._board, out, self._context.max_abs))
                return out
            except PoisonedVectorError as error:
                self._swarm.heal(f"our own parameters are unusable: {error}")
            except TensorError:
                pass  # nothing was published yet
            await asyncio.sleep(RETRY_S)
