"""Asynchronous parameter servers: DistBelief's Downpour SGD (Dean 2012, section 4.1)."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from p2pdrl.config.strategy import Mode, ServerAsyncConfig
from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, PoisonedVectorError, TransportError
from p2pdrl.strategies.call_timeouts import CallDeadline
from p2pdrl.strategies.offload import heavy
from p2pdrl.strategies.protocol import LearnerRequest, Merged, RoundReport, StrategyContext
from p2pdrl.strategies.servers.base import ServedStrategy
from p2pdrl.strategies.servers.messages import GradientPush, ServerAnswer
from p2pdrl.strategies.servers.shard import Shard
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
from p2pdrl.transport.protocol import Refusal

__all__ = ["AsyncShardServer", "ServerAsyncStrategy", "bucket_of", "weight_of"]


class AsyncShardServer:
    """One shard at work in one view.

    Args:
        shard: filled, unless ``seed``.
        config: the strategy's options.
        options: what the node and the view give.
        seed: whether the shard becomes the mean of the givers' parameters first.
    """

    def __init__(
        self, shard: Shard, config: ServerAsyncConfig, options: ShardServerOptions, *, seed: bool
    ) -> None:
        self._shard = shard
        self._config = config
        self._options = options
        self._inbox = PushReader(config, shard.span.size, options.max_abs, options.strike)
        self._turns = Turns()
        self._gradient: Float32Array = np.empty(shard.span.size, np.float32)
        self._seeding = Seeding(shard, options, self._inbox, self._turns.turn) if seed else None
        self._why: str | None = None

    async def push(self, sender: str, head: GradientPush, parcel: ReceivedPush) -> Answered:
        """Take what a worker sends: apply its gradient, give the parameters if they are wanted.

        Raises:
            Refusal: the view has ended (409), or no parameters came in time (408).
            TensorError: what it sent is poisoned.
        """
        given = ServerAnswer(self._shard.version)
        if head.op == "seed" and self._seeding is not None:
            await self._seeding.give(sender, parcel)
        elif head.op == "step" and head.weight > 0:
            await self._filled()
            given = await self._step(sender, head, parcel)
        else:
            await self._filled()
        await self._inbox.drain(parcel)
        if head.wants:
            await self._refresh()
        return give(self._shard, head.base, given, wants=head.wants)

    async def close(self, why: str) -> None:
        """Refuse everybody, and wait for a step that is under way."""
        self._why = why
        self._turns.close(why)
        if self._seeding is not None:
            await self._seeding.close(why)
        async with self._shard.lock:
            pass

    async def _filled(self) -> None:
        while self._shard.version_buffer is None:
            await self._turns.next(self._options.config.deadline_s)

    async def _step(self, sender: str, head: GradientPush, parcel: ReceivedPush) -> ServerAnswer:
        shard, options = self._shard, self._options
        async with self._inbox.received(parcel, whole=False) as data, shard.lock:
            if self._why is not None:
                raise Refusal(409, self._why)
            staleness = max(0, shard.version - head.number)
            options.counts[bucket_of(staleness)] += 1
            weight = weight_of(staleness, self._config)
            if not weight:
                options.counts["stale"] += 1
                return ServerAnswer(shard.version, outcome="stale", staleness=staleness)
            options.counts["scaled"] += weight < 1
            # The step and not the gradient: adaptive optimizers would divide a factor of it out again.
            rate = weight * options.learning_rate()

            def work() -> None:
                self._inbox.decode_now(sender, data, self._gradient, whole=False)
                if math.isfinite(rate):
                    shard.apply(self._gradient, rate)

            shard.stepping = True
            try:
                await heavy(8 * shard.span.size, work)
                shard.version += 1
                shard.progress += int(head.weight)
            finally:
                shard.stepping = False
            options.counts["steps"] += 1
            return ServerAnswer(shard.version, merged=((sender, weight),), staleness=staleness)

    async def _refresh(self) -> None:
        """See to it that the newest version buffer is of the present version."""
        shard = self._shard
        async with shard.lock:
            if shard.version_buffer is None or shard.version_buffer.version != shard.version:
                version = shard.version
                shard.publish(await shard.edit(), version)


def weight_of(staleness: int, config: ServerAsyncConfig) -> float:
    """Factor of the step along a gradient that is ``staleness`` steps old; 0 for one that is dropped.

    1 up to τ = ``max_staleness``. Beyond it, with ``stale = "scale"``, (1 + τ) / (1 + s): it has no jump at
    τ, and with τ = 0 it is 1 / (1 + s), as in staleness-aware SGD (Zhang 2016, arXiv 1511.05950, equation 6).
    """
    if staleness <= config.max_staleness:
        return 1.0
    return (1.0 + config.max_staleness) / (1.0 + staleness) if config.stale == "scale" else 0.0


def bucket_of(staleness: int) -> str:
    """Name the bucket of a histogram that ``staleness`` falls into: 0, 1, 2-3, 4-7, …."""
    if staleness < 2:
        return f"staleness_{staleness}"
    low = 1 << (staleness.bit_length() - 1)
    return f"staleness_{low}-{2 * low - 1}"


SETS_REMEMBERED = 64
LOST_CALLS = 2
"""After so many refused or broken connections in a row a server is doubted unless it answers a question."""
LOST_TIMEOUTS = 3
"""The same for calls that ran out of time."""
LOST_FOR_GOOD = 12
"""So many in a row, and it is doubted whatever else it answers."""


class ServerAsyncStrategy(ServedStrategy):
    """Pushes and fetches without rounds.

    Args:
        config: the strategy's options.
        context: what the node gives.
    """

    mode: Mode = "server-async"

    def __init__(self, config: ServerAsyncConfig, context: StrategyContext) -> None:
        super().__init__(config, context, differences=False)
        self._config = config
        self._worker = ServerWorker(context, self._store)
        self._learner = context.learner
        self._clock = context.clock
        self._versions: list[int] = []
        self._sets: deque[tuple[int, list[int]]] = deque(maxlen=SETS_REMEMBERED)
        """Policy version and shards' versions of what was put on the board, the latest last."""
        self._taking = asyncio.Lock()
        self._pushes = 0
        self._lost: Counter[str] = Counter()
        """Calls that failed in a row, by server."""

    def _open_server(self, session: ViewSession, shard: Shard, options: ShardServerOptions) -> ShardServer:
        return AsyncShardServer(shard, self._config, options, seed=session.plan.seed)

    async def _work(self, session: ViewSession) -> None:
        client = ShardClient(session, self._context, self._config, differences=False)
        self._versions = await self._worker.join(session, client, settle=False)
        self._sets.clear()
        self._sets.append((max(self._versions), list(self._versions)))
        lanes = [client]
        lanes += [
            ShardClient(session, self._context, self._config, differences=False)
            for _ in range(self._config.ahead - 1)
        ]
        await together(*(self._lane(lane) for lane in lanes))

    async def _lane(self, client: ShardClient) -> None:
        """Push one gradient after the other."""
        deadline = CallDeadline(self._config.deadline_s)
        while not self._stopped.is_set():
            post = await self._posts.next()
            if post is None:
                continue
            try:
                await self._push(client, post, deadline)
            except asyncio.CancelledError:
                # The view has ended: what was under way is lost, and the learner goes on.
                self._end(post, RoundReport("regrouped"))
                raise

    async def _push(self, client: ShardClient, post: LearnerRequest, deadline: CallDeadline) -> None:
        began_s = self._clock.monotonic()
        enough = 0 < self._context.max_exchanges <= self._outcomes.count("ok")
        gradient = post.vector
        if gradient is None or enough:
            self._learner.answer(post, "none")
            return
        bases = self._bases(post)
        self._pushes += 1
        wants = self._pushes % self._config.fetch_every == 0
        try:
            await heavy(8 * gradient.size, lambda: client.encode(gradient))
        except PoisonedVectorError as error:
            self._swarm.tell("servers", f"our gradient isn't given away: {error}", warning=True)
            self._end(post, RoundReport("poisoned", error=str(error)))
            return
        shards = range(len(client.spans))
        outcomes: list[str] = []
        parts = await together(
            *(
                self._ask(
                    client,
                    shard,
                    post,
                    base=bases[shard],
                    wants=wants,
                    deadline=deadline,
                    outcomes=outcomes,
                )
                for shard in shards
            )
        )
        changed, fetched = 0.0, False
        if wants and any(part is not None for part in parts):
            changed = await self._take(client, parts)
            fetched = True
        client.release(parts)
        outcome = next((word for word in ("poisoned", "lost", "stale") if word in outcomes), "ok")
        report = self._report(client, parts, outcome, changed, self._clock.monotonic() - began_s)
        self._tell_aged(report)
        self._end(post, report, fetched=fetched)

    def _report(
        self,
        client: ShardClient,
        parts: Sequence[SliceAnswer | None],
        outcome: str,
        changed: float,
        seconds: float,
    ) -> RoundReport:
        given = [part.given for part in parts if part is not None]
        shares = [share for one in given for peer, share in one.merged if peer == self._me]
        stalest = max((one.staleness for one in given if one.merged), default=0)
        refused = [one.staleness for one in given if one.outcome == "stale"]
        servers = client.session.plan.servers
        bytes_out, bytes_in, trips = client.traffic()
        return RoundReport(
            outcome,
            merged=(Merged(self._me, min(shares), stalest),) if shares else (),
            missing=tuple(server for server, part in zip(servers, parts, strict=True) if part is None),
            seconds=seconds,
            waited_s=0.0 if self._config.ahead else seconds,
            bytes_out=bytes_out,
            bytes_in=bytes_in,
            round_trips=trips,
            changed=changed,
            error=f"refused: {max(refused)} steps old" if refused else "",
            served=True,
        )

    def _tell_aged(self, report: RoundReport) -> None:
        """Tell people of a push that was scaled or refused: the first one, the tenth, the hundredth …."""
        if report.outcome == "stale":
            word, what, advice = "own_stale", "were refused", "; raise it, or set stale = scale"
        elif report.outcome == "ok" and any(one.weight < 1 for one in report.merged):
            word, what, advice = "own_scaled", "count for less", ""
        else:
            return
        self._host.counts[word] += 1
        count = self._host.counts[word]
        if str(count).strip("0") != "1":
            return
        self._swarm.tell(
            "servers",
            f"{count} of our {self._pushes} pushes {what}: they were older than max_staleness = "
            f"{self._config.max_staleness} of the servers' steps{advice}",
            warning=word == "own_stale",
            facts={word: count, "pushes": self._pushes},
        )

    async def _ask(
        self,
        client: ShardClient,
        shard: int,
        post: LearnerRequest,
        *,
        base: int,
        wants: bool,
        deadline: CallDeadline,
        outcomes: list[str],
    ) -> SliceAnswer | None:
        """Push one slice, once; None when it is lost."""
        server = client.session.plan.servers[shard]
        began_s = self._clock.monotonic()
        word = "lost"
        try:
            part = await client.ask(
                shard,
                "step",
                base,
                weight=float(post.samples),
                policy=post.policy_version,
                wants=wants,
                vector=post.vector,
                once_s=deadline.seconds,
            )
            word = part.given.outcome
            del self._lost[server]
            return part
        except PoisonedPushError:
            word = "poisoned"
        except (PeerTimeoutError, PeerUnreachableError) as error:
            await self._lose(client.session, server, error)
        except TransportError:
            pass
        finally:
            outcomes.append(word)
            ended = "ok" if word in ("ok", "stale") else "timeout" if word == "lost" else word
            deadline.note(ended, self._clock.monotonic() - began_s)
        return None

    async def _lose(self, session: ViewSession, server: str, error: TransportError) -> None:
        """A call failed: when that happens time and again, doubt the server."""
        in_a_row = self._lost[server] = self._lost[server] + 1
        some = LOST_TIMEOUTS if isinstance(error, PeerTimeoutError) else LOST_CALLS
        if in_a_row >= LOST_FOR_GOOD or (in_a_row % some == 0 and not await session.lives(server)):
            session.doubt(server, str(error))

    async def _take(self, client: ShardClient, parts: Sequence[SliceAnswer | None]) -> float:
        """Put what is newer than what we have on the board."""
        async with self._taking:
            fresh = [
                part if part is not None and part.given.version >= version else None
                for part, version in zip(parts, self._versions, strict=True)
            ]
            versions = [
                version if part is None else part.given.version
                for part, version in zip(fresh, self._versions, strict=True)
            ]
            try:
                changed = await self._worker.take(client, fresh, max(versions), min(versions))
            except BadServerError as error:
                self._swarm.strike(error.server, str(error))
                client.session.doubt(error.server, "its parameters are unusable")
                return 0.0
            self._versions = versions
            self._sets.append((max(versions), list(versions)))
            return changed

    def _bases(self, post: LearnerRequest) -> list[int]:
        """Versions of the shards that a gradient was computed on: of the last set it can have seen."""
        sets = list(self._sets)
        if not self._learner.board.absorbed and len(sets) > 1:
            sets.pop()
        seen = [versions for policy, versions in sets if policy <= post.policy_version]
        return seen[-1] if seen else sets[0][1]

    def _end(self, post: LearnerRequest, report: RoundReport, *, fetched: bool = False) -> None:
        """Answer a post."""
        self._outcomes.ended(report)
        self._learner.answer(post, "set" if fetched else "none")
