"""Synchronous parameter servers: map, reduce, broadcast; backup workers (Chen 2016, arXiv 1604.00981)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal

import numpy as np

from p2pdrl.config.strategy import Mode, ServerSyncConfig
from p2pdrl.errors import PeerTimeoutError, PoisonedVectorError
from p2pdrl.group.adaptive_timeout import AdaptiveTimeout
from p2pdrl.group.round_collector import (
    CollectedRound,
    Contribution,
    RoundCollector,
    UpdatePosition,
    leader_ends,
)
from p2pdrl.strategies.offload import heavy
from p2pdrl.strategies.protocol import LearnerRequest, Merged, RoundReport, StrategyContext
from p2pdrl.strategies.servers.base import ServedStrategy
from p2pdrl.strategies.servers.messages import GradientPush, ServerAnswer
from p2pdrl.strategies.servers.shard import Shard, ShardVersion
from p2pdrl.strategies.servers.shard_client import (
    BadServerError,
    PoisonedPushError,
    ServerWorker,
    ShardClient,
    SliceAnswer,
    together,
)
from p2pdrl.strategies.servers.shard_server import (
    Answered,
    Attendance,
    PushReader,
    ReceivedPush,
    Seeding,
    ShardServer,
    ShardServerOptions,
    Turns,
    give,
)
from p2pdrl.strategies.servers.view_session import ViewSession
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.robust import combine
from p2pdrl.transport.protocol import Refusal

__all__ = ["ServerSyncStrategy", "SyncShardServer"]


class SyncShardServer:
    """One shard's rounds in one view.

    Args:
        shard: filled, unless ``seed``.
        config: the strategy's options.
        options: what the node and the view give.
        seed: whether the shard becomes the mean of the givers' parameters first.
        timeout: of rounds; it outlives views.
    """

    def __init__(
        self,
        shard: Shard,
        config: ServerSyncConfig,
        options: ShardServerOptions,
        timeout: AdaptiveTimeout,
        *,
        seed: bool,
    ) -> None:
        self._shard = shard
        self._config = config
        self._options = options
        self._inbox = PushReader(config, shard.span.size, options.max_abs, options.strike)
        self._turns = Turns()
        self._begun = asyncio.Event()
        self._poisoned: set[tuple[int, str]] = set()
        self._attendance = Attendance(options.members, options.doubt)
        self._combined: Float32Array = np.zeros(shard.span.size, np.float32)
        self._seeding = Seeding(shard, options, self._inbox, self._turns.turn) if seed else None
        self._gathering = RoundCollector(
            size=shard.span.size,
            members=options.members,
            clock=options.clock,
            timeout=timeout,
            quorum=config.quorum,
            backups=min(config.backups, len(options.members) - 1),
            reduce=self._reduce,
            first=options.version,
        )

    async def push(self, sender: str, head: GradientPush, parcel: ReceivedPush) -> Answered:
        """Take what a worker sends and answer when its round has closed.

        Raises:
            Refusal: the view has ended (409), the round found too few (408), a poisoned gradient (422).
            TensorError: poisoned parameters.
        """
        given, before = ServerAnswer(self._shard.version), self._gathering.result
        if head.op == "seed" and self._seeding is not None:
            await self._seeding.give(sender, parcel)
        elif head.op in ("seed", "fetch"):
            await self._reach(head.number if head.op == "fetch" else 0)
        elif before is not None and head.op == "step" and _counted(sender, head.number, before):
            given = self._told(before)  # it is asked again: the answer was lost
        elif head.number < self._shard.version:
            self._options.counts["late"] += head.op == "step"
            given = ServerAnswer(self._shard.version, outcome="late", ends_update=_ends_update(before))
        elif head.op == "step":
            given = await self._step(sender, head, parcel)
        else:
            given = await self._idle(sender, head)
        await self._inbox.drain(parcel)
        if given.outcome == "waiting":
            return given, None
        return give(self._shard, head.base, given, wants=head.wants)

    async def close(self, why: str) -> None:
        """Refuse everybody, and wait for a step that is under way."""
        self._turns.close(why)
        self._begun.set()
        self._gathering.close(why)
        if self._seeding is not None:
            await self._seeding.close(why)
        await self._gathering.closed()

    async def _reach(self, version: int) -> None:
        """Wait until the shard has parameters of ``version`` or later."""
        while self._shard.version_buffer is None or self._shard.version < version:
            await self._turns.next(self._options.config.deadline_s)

    async def _step(self, sender: str, head: GradientPush, parcel: ReceivedPush) -> ServerAnswer:
        async def fill(out: Float32Array) -> None:
            try:
                async with self._inbox.received(parcel, whole=False) as data:
                    await self._inbox.decode(sender, data, out, whole=False)
            except PoisonedVectorError:
                # It came, so the others needn't wait for it; but it doesn't count.
                self._poisoned.add((head.number, sender))
                refused.append(sender)
            self._attendance.note(head.number, sender)
            self._begun.set()

        refused: list[str] = []
        gathered = await self._contribute(sender, head, head.weight, fill)
        if refused:
            self._options.counts["poisoned"] += 1
            raise Refusal(422, "the gradient is malformed, or holds NaN or an entry beyond the bound")
        if gathered.late:
            self._options.counts["late"] += 1
        return self._told(gathered)

    def _weight(self, one: Contribution) -> float:
        """How much a gradient counts for, relative to the others of its round."""
        return one.weight if self._config.reduce == "count" else 1.0

    def _told(self, gathered: CollectedRound) -> ServerAnswer:
        merged = tuple((one.sender, self._weight(one)) for one in gathered.merged if one.weight > 0)
        return ServerAnswer(
            gathered.number + 1,
            outcome="late" if gathered.late else "ok",
            merged=merged,
            missing=gathered.missing,
            ends_update=_ends_update(gathered),
        )

    async def _idle(self, sender: str, head: GradientPush) -> ServerAnswer:
        """Wait for the round to begin, then count as come without a gradient."""
        try:
            async with asyncio.timeout(self._config.deadline_s / 2):
                await self._begun.wait()
        except TimeoutError:
            return ServerAnswer(self._shard.version, outcome="waiting")
        if not self._attendance.came(head.number, sender) and head.number == self._shard.version:
            self._attendance.note(head.number, sender)
            await self._contribute(sender, head, 0.0, _nothing)
        else:
            await self._reach(head.number + 1)
        return ServerAnswer(self._shard.version, ends_update=_ends_update(self._gathering.result))

    async def _contribute(
        self, sender: str, head: GradientPush, weight: float, fill: object
    ) -> CollectedRound:
        try:
            return await self._gathering.contribute(
                head.number,
                sender,
                weight,
                head.policy,
                fill,  # type: ignore[arg-type]
                left=head.left,
            )
        except Refusal as refusal:
            if refusal.status == 408:
                self._poisoned.clear()
                self._begun.clear()
                self._attendance.doubt_absent(head.number, "its gradient didn't come")
            raise

    async def _reduce(self, contributions: Sequence[Contribution]) -> Float32Array:
        shard = self._shard
        number = shard.version
        counted = [
            one for one in contributions if one.weight > 0 and (number, one.sender) not in self._poisoned
        ]
        learning_rate = self._options.learning_rate()
        shard.stepping = True
        try:
            async with shard.lock:
                version_buffer = await heavy(
                    4 * shard.span.size * (len(counted) + 1), lambda: self._work(counted, learning_rate)
                )
                shard.stepping = False
                shard.publish(version_buffer, shard.version + 1)
                shard.progress += int(sum(one.weight for one in counted))
        finally:
            shard.stepping = False
        self._options.counts["steps"] += 1
        self._options.counts["gradients"] += len(counted)
        self._poisoned.clear()
        self._attendance.clear()
        self._begun.clear()
        self._turns.turn()
        return version_buffer.vector

    def _work(self, counted: Sequence[Contribution], learning_rate: float) -> ShardVersion:
        config = self._config
        if counted:
            combine(
                [one.vector for one in counted],
                [self._weight(one) for one in counted],
                mixing=config.mixing,
                clip_distance=config.clip_distance,
                trim=config.trim,
                reference=self._combined,
                out=self._combined,
            )
            if config.reduce == "sum":
                np.multiply(self._combined, np.float32(len(counted)), out=self._combined)
            if math.isfinite(learning_rate):
                self._shard.apply(self._combined, learning_rate)
        return self._shard.write_version()


def _counted(sender: str, number: int, gathered: CollectedRound) -> bool:
    """Whether a sender's gradient is in that round, which was the last."""
    return gathered.number == number and any(
        one.sender == sender and one.weight > 0 for one in gathered.merged
    )


def _ends_update(gathered: CollectedRound | None) -> bool:
    """Whether the leader's update ended with that round: then all others collect now."""
    merged = () if gathered is None else gathered.merged
    return leader_ends(UpdatePosition(one.sender, one.weight, one.left) for one in merged)


async def _nothing(out: Float32Array) -> None:
    """A contribution of weight 0 needs no vector."""
    del out


FIRST_POST_S = 2.0
"""A learner that hasn't posted at all is waited for this long."""
LEAST_POST_S = 0.5
RETRY_S = 0.25


class ServerSyncStrategy(ServedStrategy):
    """Synchronous rounds with servers among the nodes.

    Args:
        config: the strategy's options.
        context: what the node gives.
    """

    mode: Mode = "server-sync"

    def __init__(self, config: ServerSyncConfig, context: StrategyContext) -> None:
        super().__init__(config, context, differences=True)
        self._config = config
        self._worker = ServerWorker(context, self._store)
        self._learner = context.learner
        self._clock = context.clock
        self._rounds_patience = AdaptiveTimeout(config.deadline_s)
        self._posts_patience = AdaptiveTimeout(config.deadline_s, least_s=LEAST_POST_S)
        self._post: LearnerRequest | None = None
        """What the learner waits for: kept from view to view until it is answered."""
        self._posted_once = False
        self._version = -1

    def _open_server(self, session: ViewSession, shard: Shard, options: ShardServerOptions) -> ShardServer:
        return SyncShardServer(shard, self._config, options, self._rounds_patience, seed=session.plan.seed)

    async def _work(self, session: ViewSession) -> None:
        client = ShardClient(session, self._context, self._config, differences=True)
        before = self._version
        self._version = (await self._worker.join(session, client, settle=True))[0]
        if self._post is not None and self._version != before:
            self._done(self._post, "regrouped")
        while not self._stopped.is_set():
            if 0 < self._context.max_exchanges <= self._outcomes.count("ok"):
                await self._stand_aside(client)
                continue
            if self._post is None:
                await self._next_post(client)
            if self._post is not None:
                await self._round(client, self._post)

    async def _next_post(self, client: ShardClient) -> None:
        """Wait for the learner; when it takes long, follow the rounds that go on without it."""
        began_s = self._clock.monotonic()
        limit_s = self._posts_patience.deadline_s if self._posted_once else FIRST_POST_S
        self._post = await self._posts.next(min(limit_s, self._config.deadline_s))
        if self._post is None and not self._stopped.is_set():
            async with self._following(client) as following:
                while self._post is None and not following.done() and not self._stopped.is_set():
                    self._post = await self._posts.next(LEAST_POST_S)
        if self._post is not None:
            self._posted_once = True
            self._posts_patience.observe(self._clock.monotonic() - began_s)

    async def _stand_aside(self, client: ShardClient) -> None:
        """We had rounds enough: let our learner go on, and hold up nobody who hasn't."""
        async with self._following(client) as following:
            while not following.done() and not self._stopped.is_set():
                post, self._post = self._post, None
                if post is not None:
                    self._learner.answer(post, "none")
                self._post = await self._posts.next(LEAST_POST_S)

    @asynccontextmanager
    async def _following(self, client: ShardClient) -> AsyncIterator[asyncio.Task[None]]:
        """Follow the rounds of the others meanwhile; see `_follow`."""
        following = asyncio.create_task(self._follow(client), name="follow")
        try:
            yield following
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)  # reads what it raised, too
        if not following.cancelled():
            following.result()

    async def _follow(self, client: ShardClient) -> None:
        """Tell the servers that we have no gradient, and take what they give, round by round."""
        while True:
            parts = await self._ask_all(client, "idle", None)
            if any(part.given.outcome != "waiting" for part in parts):
                await self._take(client, parts)
                self._host.counts["rounds_without_us"] += 1

    async def _round(self, client: ShardClient, post: LearnerRequest) -> None:
        """Give the post's gradient to a round, and answer it."""
        began_s = self._clock.monotonic()
        board = self._learner.board
        if not board.absorbed:
            # Computed before the learner took what we put on the board last.
            self._done(post, "stale")
            return
        usable = post.vector is not None and await self._encode(client, post.vector)
        try:
            parts = await self._ask_all(client, "step" if usable else "idle", post)
        except PoisonedPushError as error:
            self._swarm.tell("servers", f"our gradient was refused: {error}", warning=True)
            await self._take(client, await self._fetched(client))
            self._done(post, "poisoned")
            return
        outcomes = {part.given.outcome for part in parts}
        if outcomes == {"waiting"}:
            self._done(post, "idle")
            return
        given = parts[0].given
        changed = await self._take(client, parts)
        outcome = "late" if "late" in outcomes else "ok" if usable else "idle"
        bytes_out, bytes_in, trips = client.traffic()
        seconds = self._clock.monotonic() - began_s
        report = RoundReport(
            outcome,
            merged=_merged(given.merged),
            missing=given.missing,
            seconds=seconds,
            waited_s=seconds,
            bytes_out=bytes_out,
            bytes_in=bytes_in,
            round_trips=trips,
            changed=changed,
        )
        self._done(post, outcome, report, end_update=given.ends_update and post.left > 0)

    async def _encode(self, client: ShardClient, gradient: Float32Array) -> bool:
        """Get a gradient ready to travel; False, and nobody is given it, when it is unusable."""
        try:
            await heavy(8 * gradient.size, lambda: client.encode(gradient))
        except PoisonedVectorError as error:
            self._swarm.tell("servers", f"our gradient isn't given away: {error}", warning=True)
            self._host.counts["own_poisoned"] += 1
            return False
        return True

    async def _ask_all(
        self, client: ShardClient, op: Literal["step", "idle"], post: LearnerRequest | None
    ) -> list[SliceAnswer]:
        """Take part in the round that begins with the parameters which we hold."""
        gives = post if op == "step" else None
        return await together(
            *(
                client.insist(
                    shard,
                    op,
                    self._version,
                    base=self._version,
                    weight=0.0 if gives is None else float(gives.samples),
                    policy=0 if gives is None else gives.policy_version,
                    left=0 if gives is None else gives.left,
                    vector=None if gives is None else gives.vector,
                )
                for shard in range(len(client.spans))
            )
        )

    async def _take(self, client: ShardClient, parts: list[SliceAnswer]) -> float:
        """Take a round's result; until it is usable."""
        while True:
            settled = parts
            try:
                settled = await client.settle(parts)
                version = settled[0].given.version
                changed = await self._worker.take(client, settled, version, version)
                self._version = version
                return changed
            except BadServerError as error:
                self._swarm.strike(error.server, str(error))
                client.session.doubt(error.server, "its parameters are unusable")
            except PeerTimeoutError as error:
                self._swarm.tell("servers", str(error), warning=True)
            finally:
                client.release(settled)
            await asyncio.sleep(RETRY_S)
            parts = await self._fetched(client)

    async def _fetched(self, client: ShardClient) -> list[SliceAnswer]:
        return await together(
            *(client.insist(shard, "fetch", self._version) for shard in range(len(client.spans)))
        )

    def _done(
        self,
        post: LearnerRequest,
        outcome: str,
        report: RoundReport | None = None,
        *,
        end_update: bool = False,
    ) -> None:
        """Let the learner go on with what is on the board."""
        self._post = None
        self._outcomes.ended(RoundReport(outcome) if report is None else report, ours=report is not None)
        self._learner.answer(post, "set", end_update=end_update)


def _merged(weights: tuple[tuple[str, float], ...]) -> tuple[Merged, ...]:
    """Weights as parts of their sum."""
    total = sum(weight for _, weight in weights) or 1.0
    return tuple(Merged(peer, weight / total) for peer, weight in weights)
