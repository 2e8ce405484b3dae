"""The serving side of a node: fills its shard, keeps copies for others, hands its own over, answers peers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec

from p2pdrl.config.strategy_bases import Served
from p2pdrl.errors import PoisonedVectorError, TensorError, TransportError
from p2pdrl.strategies.protocol import Context
from p2pdrl.strategies.servers.desk import Desk, DeskOptions
from p2pdrl.strategies.servers.holdings import Holdings, StateShape
from p2pdrl.strategies.servers.inbox import Parcel
from p2pdrl.strategies.servers.messages import Pull, Push, Take
from p2pdrl.strategies.servers.restoring import NobodyGivesError, Puller, restore
from p2pdrl.strategies.servers.serving import Span, pieces
from p2pdrl.strategies.servers.shard import Shard
from p2pdrl.strategies.servers.term import Term
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

__all__ = ["Office", "OpenDesk"]

KEEP_S = 2.0
"""A successor pulls its copy so often; less when pulling takes long."""
KEEP_SHARE = 10.0
FORGET_S = 10.0
"""A view this old needs no copies of an older one any more."""
RETRY_S = 0.2
HANDOVER_S = 3.0

OpenDesk = Callable[[Term, Shard, DeskOptions], Desk]


class Office:
    """What one node does as a server, and for other servers.

    Args:
        config: the strategy's options.
        context: what the node gives.
        holdings: what it holds.
        doubt: asks for a view without a member.
        open_desk: puts a shard to work.
        differences: whether workers may be sent differences between versions.
    """

    def __init__(
        self,
        config: Served,
        context: Context,
        holdings: Holdings,
        doubt: Callable[[str, str], None],
        open_desk: OpenDesk,
        *,
        differences: bool,
    ) -> None:
        self._options = config
        self._context = context
        self._swarm = context.swarm
        self._me = context.swarm.node_id
        self._holdings = holdings
        self._doubt = doubt
        self._open_desk = open_desk
        self._differences = differences
        self._shape = StateShape.of(config)
        self.counts: Counter[str] = Counter()

    async def serve(self, term: Term, span: Span) -> None:
        """Fill our shard, put it to work, and stay."""
        shard = await (self._blank(term, span) if term.plan.seed else self._filled(term, span))
        shard.progress = term.plan.progress
        options = DeskOptions(
            config=self._options,
            members=term.members,
            givers=term.plan.givers,
            version=term.plan.version,
            clock=self._context.clock,
            learning_rate=self._learning_rate,
            max_abs=self._context.max_abs,
            strike=self._swarm.strike,
            doubt=self._doubt,
            counts=self.counts,
        )
        term.open(self._open_desk(term, shard, options))
        await asyncio.Event().wait()

    def _learning_rate(self) -> float:
        rate = self._options.learning_rate
        return self._context.learner.learning_rate if rate is None else rate

    async def _blank(self, term: Term, span: Span) -> Shard:
        shard = Shard(span, self._options, term.plan.version, differences=self._differences)
        self._holdings.replace_shard(shard)
        return shard

    async def _filled(self, term: Term, span: Span) -> Shard:
        """Our shard with the freshest contents: as it is, or restored."""
        parts = pieces(span, self._me, term.plan, term.notes)
        best = max(holder.version for part in parts for holder in part.holders[:1])
        shard = self._holdings.shard
        if shard is None or shard.span != span or shard.edition is None or shard.version < best:
            shard = Shard(span, self._options, term.plan.version, differences=self._differences)
            while True:
                try:
                    kept_state = await restore(shard, parts, self._puller(term))
                    break
                except (NobodyGivesError, TensorError) as error:
                    self.counts["restores_failed"] += 1
                    self._swarm.tell("servers", f"our shard can't be filled: {error}", warning=True)
                    await asyncio.sleep(RETRY_S)
            what = "with" if kept_state else "without"
            self._swarm.tell("servers", f"took over entries {span.start} to {span.stop - 1}, {what} momenta")
            self.counts["takeovers"] += 1
        async with shard.lock:
            if shard.edition is None or shard.version != term.plan.version:
                shard.publish(await shard.edit(), term.plan.version)
        self._holdings.replace_shard(shard)
        return shard

    def _puller(self, term: Term) -> Puller:
        return Puller(
            self._me,
            term.key,
            self._holdings,
            self._context.transport,
            term.address_of,
            self._context.max_abs,
            self._swarm.strike,
            self._shape,
        )

    # Keeping copies for others

    async def insure(self, term: Term) -> None:
        """Pull copies of the shards that we would take over."""
        plan, clock = term.plan, self._context.clock
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
                await self._keep(term, server, span)
            now_s = clock.monotonic()
            pause_s = max(KEEP_S, KEEP_SHARE * (now_s - before_s))
            if now_s - began_s > FORGET_S:
                self._holdings.forget({span for _, span in mine}, keep_shard=term.index is not None)

    async def _keep(self, term: Term, server: str, span: Span) -> bool:
        """Pull one copy; a failure is left to the next time."""
        have = self._holdings.kept.get(span)
        try:
            contents = await self._puller(term).pull(
                server, span, 0 if have is None else have.version + 1, parameters=True, state=True
            )
        except (TransportError, PoisonedVectorError):
            return False
        self._holdings.keep(contents)
        return True

    async def hand_over(self, term: Term) -> None:
        """Let our successor pull our shard before we leave."""
        shard = self._holdings.shard
        if term.index is None or shard is None or shard.edition is None:
            return
        successor = term.plan.successors[term.index]
        if successor == self._me:
            return
        take = Take(term.key, *shard.span, shard.version)
        try:
            await self._context.transport.call(
                term.address_of(successor),
                successor,
                "shard",
                msgspec.msgpack.encode(take),
                deadline_s=HANDOVER_S,
                lane="bulk",
            )
        except TransportError:
            self.counts["handovers_failed"] += 1

    # Peers' calls

    async def answer_push(self, incoming: Incoming, head: Push, term: Term) -> Reply:
        """Answer a worker.

        Raises:
            Refusal: see `Desk.push`; another node serves the shard (409).
        """
        if head.shard != term.index:
            raise Refusal(409, "another node serves this shard")
        desk = await term.desk(self._options.deadline_s)
        given, edition = await desk.push(incoming.sender, head, Parcel(incoming))
        meta = msgspec.msgpack.encode(given)
        if edition is None:
            return Reply(meta)
        vector = edition.delta if given.kind == "delta" else edition.vector.data.cast("B")
        held = edition
        return Reply(meta, vector, on_end=lambda _: held.release())

    async def answer_pull(self, pull: Pull) -> Reply:
        """Give a piece of what we hold.

        Raises:
            Refusal: we hold nothing so new (409).
        """
        head, contents = await self._holdings.serve(pull)
        return Reply(msgspec.msgpack.encode(head), contents.views, on_end=lambda _: self._holdings.sent())

    async def answer_take(self, sender: str, take: Take, term: Term) -> Reply:
        """Pull the shard of a server that leaves.

        Raises:
            Refusal: it isn't its own (409), or can't be pulled (503).
        """
        span = Span(take.start, take.stop)
        if (sender, span) not in zip(term.plan.servers, term.plan.spans, strict=True):
            raise Refusal(409, "this shard isn't yours to give")
        if not await self._keep(term, sender, span):
            raise Refusal(503, "the shard couldn't be pulled")
        return Reply(b"")
