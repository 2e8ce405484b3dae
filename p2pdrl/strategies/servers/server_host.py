"""The serving side of a node: fills its shard, keeps copies for others, hands its own over, answers peers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec

from p2pdrl.config.strategy import ServerOptions
from p2pdrl.errors import PoisonedVectorError, TensorError, TransportError
from p2pdrl.strategies.protocol import StrategyContext
from p2pdrl.strategies.servers.messages import GradientPush, Pull, Take
from p2pdrl.strategies.servers.replica_store import (
    NobodyGivesError,
    Puller,
    ReplicaStore,
    StateShape,
    restore,
)
from p2pdrl.strategies.servers.shard import Shard
from p2pdrl.strategies.servers.shard_plan import ShardSpan, pieces
from p2pdrl.strategies.servers.shard_server import ReceivedPush, ShardServer, ShardServerOptions
from p2pdrl.strategies.servers.view_session import ViewSession
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

__all__ = ["OpenServer", "ServerHost"]

KEEP_S = 2.0
"""A successor pulls its copy so often; less when pulling takes long."""
KEEP_SHARE = 10.0
FORGET_S = 10.0
"""A view this old needs no copies of an older one any more."""
RETRY_S = 0.2
HANDOVER_S = 3.0

OpenServer = Callable[[ViewSession, Shard, ShardServerOptions], ShardServer]


class ServerHost:
    """What one node does as a server, and for other servers.

    Args:
        config: the strategy's options.
        context: what the node gives.
        store: what it holds.
        doubt: asks for a view without a member.
        open_server: puts a shard to work.
        differences: whether workers may be sent differences between versions.
    """

    def __init__(
        self,
        config: ServerOptions,
        context: StrategyContext,
        store: ReplicaStore,
        doubt: Callable[[str, str], None],
        open_server: OpenServer,
        *,
        differences: bool,
    ) -> None:
        self._options = config
        self._context = context
        self._swarm = context.swarm
        self._me = context.swarm.node_id
        self._store = store
        self._doubt = doubt
        self._open_server = open_server
        self._differences = differences
        self._shape = StateShape.of(config)
        self.counts: Counter[str] = Counter()

    async def serve(self, session: ViewSession, span: ShardSpan) -> None:
        """Fill our shard, put it to work, and stay."""
        shard = await (self._blank(session, span) if session.plan.seed else self._filled(session, span))
        shard.progress = session.plan.progress
        options = ShardServerOptions(
            config=self._options,
            members=session.members,
            givers=session.plan.givers,
            version=session.plan.version,
            clock=self._context.clock,
            learning_rate=self._learning_rate,
            max_abs=self._context.max_abs,
            strike=self._swarm.strike,
            doubt=self._doubt,
            counts=self.counts,
        )
        session.open(self._open_server(session, shard, options))
        await asyncio.Event().wait()

    def _learning_rate(self) -> float:
        rate = self._options.learning_rate
        return self._context.learner.learning_rate if rate is None else rate

    async def _blank(self, session: ViewSession, span: ShardSpan) -> Shard:
        shard = Shard(span, self._options, session.plan.version, differences=self._differences)
        self._store.replace_shard(shard)
        return shard

    async def _filled(self, session: ViewSession, span: ShardSpan) -> Shard:
        """Our shard with the freshest contents: as it is, or restored."""
        parts = pieces(span, self._me, session.plan, session.notes)
        best = max(holder.version for part in parts for holder in part.holders[:1])
        shard = self._store.shard
        if shard is None or shard.span != span or shard.version_buffer is None or shard.version < best:
            shard = Shard(span, self._options, session.plan.version, differences=self._differences)
            while True:
                try:
                    kept_state = await restore(shard, parts, self._puller(session))
                    break
                except (NobodyGivesError, TensorError) as error:
                    self.counts["restores_failed"] += 1
                    self._swarm.tell("servers", f"our shard can't be filled: {error}", warning=True)
                    await asyncio.sleep(RETRY_S)
            what = "with" if kept_state else "without"
            self._swarm.tell("servers", f"took over entries {span.start} to {span.stop - 1}, {what} momenta")
            self.counts["takeovers"] += 1
        async with shard.lock:
            if shard.version_buffer is None or shard.version != session.plan.version:
                shard.publish(await shard.edit(), session.plan.version)
        self._store.replace_shard(shard)
        return shard

    def _puller(self, session: ViewSession) -> Puller:
        return Puller(
            self._me,
            session.key,
            self._store,
            self._context.transport,
            session.address_of,
            self._context.max_abs,
            self._swarm.strike,
            self._shape,
        )

    # Keeping copies for others

    async def insure(self, session: ViewSession) -> None:
        """Pull copies of the shards that we would take over."""
        plan, clock = session.plan, self._context.clock
        mine = [
            (server, span)
            for server, span, keeper in zip(plan.servers, plan.spans, plan.successors, strict=True)
            if keeper == self._me != server
        ]
        began_s, pause_s = clock.monotonic(), KEEP_S
        while True:
            await asyncio.sleep(pause_s)
            before_s = clock.monotonic()
            for server, span in mine:
                await self._keep(session, server, span)
            now_s = clock.monotonic()
            pause_s = max(KEEP_S, KEEP_SHARE * (now_s - before_s))
            if now_s - began_s > FORGET_S:
                self._store.forget({span for _, span in mine}, keep_shard=session.index is not None)

    async def _keep(self, session: ViewSession, server: str, span: ShardSpan) -> bool:
        """Pull one copy; a failure is left to the next time."""
        have = self._store.kept.get(span)
        try:
            contents = await self._puller(session).pull(
                server, span, 0 if have is None else have.version + 1, parameters=True, state=True
            )
        except (TransportError, PoisonedVectorError):
            return False
        self._store.keep(contents)
        return True

    async def hand_over(self, session: ViewSession) -> None:
        """Let our successor pull our shard before we leave."""
        shard = self._store.shard
        if session.index is None or shard is None or shard.version_buffer is None:
            return
        successor = session.plan.successors[session.index]
        if successor == self._me:
            return
        take = Take(session.key, *shard.span, shard.version)
        try:
            await self._context.transport.call(
                session.address_of(successor),
                successor,
                "shard",
                msgspec.msgpack.encode(take),
                deadline_s=HANDOVER_S,
                lane="bulk",
            )
        except TransportError:
            self.counts["handovers_failed"] += 1

    # Peers' calls

    async def answer_push(self, incoming: Incoming, head: GradientPush, session: ViewSession) -> Reply:
        """Answer a worker.

        Raises:
            Refusal: see `ShardServer.push`; another node serves the shard (409).
        """
        if head.shard != session.index:
            raise Refusal(409, "another node serves this shard")
        server = await session.server(self._options.deadline_s)
        given, version_buffer = await server.push(incoming.sender, head, ReceivedPush(incoming))
        meta = msgspec.msgpack.encode(given)
        if version_buffer is None:
            return Reply(meta)
        vector = version_buffer.delta if given.kind == "delta" else version_buffer.vector.data.cast("B")
        held = version_buffer
        return Reply(meta, vector, on_end=lambda _: held.release())

    async def answer_pull(self, pull: Pull) -> Reply:
        """Give a piece of what we hold.

        Raises:
            Refusal: we hold nothing so new (409).
        """
        head, contents = await self._store.serve(pull)
        return Reply(msgspec.msgpack.encode(head), contents.views, on_end=lambda _: self._store.sent())

    async def answer_take(self, sender: str, take: Take, session: ViewSession) -> Reply:
        """Pull the shard of a server that leaves.

        Raises:
            Refusal: it isn't its own (409), or can't be pulled (503).
        """
        span = ShardSpan(take.start, take.stop)
        if (sender, span) not in zip(session.plan.servers, session.plan.spans, strict=True):
            raise Refusal(409, "this shard isn't yours to give")
        if not await self._keep(session, sender, span):
            raise Refusal(503, "the shard couldn't be pulled")
        return Reply(b"")
