"""Synchronous parameter servers: map, reduce, broadcast; backup workers (Chen 2016, arXiv 1604.00981).

    worker's request ─▶ slices ─▶ servers: collect, combine, step ─▶ slices of one version ─▶ board

Every worker begins a round on the same parameters w_v and sends each server its slice of the gradient; a
server steps once with all of them and answers with its slice of w_{v+1}. So n workers with gradients over n_k
samples each are one worker with the gradient over Σ n_k (``reduce = "count"``, which counts samples).

- A round is numbered by the version v that its gradients were computed on.
- It waits for all members of the group or, past a deadline that follows what was observed, for a ``quorum``
  of them; ``backups`` are never waited for. A gradient that comes too late is dropped, and its worker gets
  the newest parameters.
- A worker without a gradient (its learner is paused, starting, or much slower than it was) says so, counts as
  having come, and takes the parameters of the rounds that go on without it. A round begins with a gradient.
- When the leader's update ends, everybody's does, so that all collect at the same time.
- A member that doesn't answer is doubted, and the group goes on without it: at most one round is lost.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Literal

import msgspec
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
from p2pdrl.strategies.servers.base import RETRY_S, ServedStrategy
from p2pdrl.strategies.servers.messages import GradientPush, ServerAnswer
from p2pdrl.strategies.servers.shard import Shard, ShardVersion
from p2pdrl.strategies.servers.shard_client import BadServerError, PoisonedPushError, ShardClient, SliceAnswer
from p2pdrl.strategies.servers.shard_server import (
    Attendance,
    ReceivedPush,
    ShardServer,
    ShardServerOptions,
    ViewSession,
)
from p2pdrl.strategies.task_runner import cancel_and_wait
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.robust import clipping_of, combine, combine_clipped
from p2pdrl.transport.protocol import Refusal

__all__ = ["ServerSyncStrategy"]


class SyncShardServer(ShardServer):
    """One shard's rounds in one view.

    Args:
        timeout: of rounds; it outlives views.
    """

    def __init__(
        self, shard: Shard, config: ServerSyncConfig, options: ShardServerOptions, timeout: AdaptiveTimeout
    ) -> None:
        super().__init__(shard, options)
        self._config = config
        self._begun = asyncio.Event()
        """Set once somebody gave a gradient to the present round."""
        self._poisoned: set[tuple[int, str]] = set()
        """Round and sender of gradients that came and don't count."""
        self._attendance = Attendance(options.members, options.doubt)
        self._combined: Float32Array = np.zeros(shard.span.size, np.float32)
        self._rule = config.rule(bounded=options.context.bounded)
        self._collector = RoundCollector(
            size=shard.span.size,
            members=options.members,
            clock=options.context.clock,
            timeout=timeout,
            quorum=config.quorum,
            backups=min(config.backups, len(options.members) - 1),
            reduce=self._reduce,
            first=options.plan.version,
        )

    async def close(self, why: str) -> None:
        """Refuse everybody, and wait for a step that is under way."""
        self._begun.set()
        self._collector.close(why)
        await super().close(why)
        await self._collector.closed()

    async def _serve(self, sender: str, head: GradientPush, push: ReceivedPush) -> ServerAnswer:
        """Answer when the worker's round has closed."""
        last = self._collector.result
        if head.op in ("seed", "fetch"):
            answer = ServerAnswer(self._shard.version)
            await self._reach(head.number if head.op == "fetch" else 0)
            return answer
        if last is not None and head.op == "step" and _counted(sender, head.number, last):
            return self._answer(last)  # it is asked again: the answer was lost
        if head.number < self._shard.version:
            self._options.counts["late"] += head.op == "step"
            return ServerAnswer(self._shard.version, outcome="late", ends_update=_ends_update(last))
        if head.op == "step":
            return await self._step(sender, head, push)
        return await self._idle(sender, head)

    async def _step(self, sender: str, head: GradientPush, push: ReceivedPush) -> ServerAnswer:
        async def fill(out: Float32Array) -> None:
            try:
                await self._reader.read_into(sender, push, out, whole=False)
            except PoisonedVectorError:
                # It came, so the others needn't wait for it; but it doesn't count.
                self._poisoned.add((head.number, sender))
                refused.append(sender)
            self._attendance.note(head.number, sender)
            self._begun.set()

        refused: list[str] = []
        collected = await self._contribute(sender, head, head.weight, fill)
        if refused:
            self._options.counts["poisoned"] += 1
            raise Refusal(422, "the gradient is malformed, or holds NaN or an entry beyond the bound")
        if collected.late:
            self._options.counts["late"] += 1
        return self._answer(collected)

    def _weight(self, one: Contribution) -> float:
        """How much a gradient counts for, relative to the others of its round."""
        return one.weight if self._config.reduce == "count" else 1.0

    def _answer(self, collected: CollectedRound) -> ServerAnswer:
        return ServerAnswer(
            collected.number + 1,
            outcome="late" if collected.late else "ok",
            merged=tuple((one.sender, self._weight(one)) for one in collected.merged if one.weight > 0),
            missing=collected.missing,
            ends_update=_ends_update(collected),
        )

    async def _idle(self, sender: str, head: GradientPush) -> ServerAnswer:
        """Wait for the round to begin, then contribute to it without a gradient."""
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
        return ServerAnswer(self._shard.version, ends_update=_ends_update(self._collector.result))

    async def _contribute(
        self, sender: str, head: GradientPush, weight: float, fill: Callable[[Float32Array], Awaitable[None]]
    ) -> CollectedRound:
        try:
            return await self._collector.contribute(
                head.number, sender, weight, head.policy, fill, left=head.left
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
                written = await heavy(
                    4 * shard.span.size * (len(counted) + 1), lambda: self._apply(counted, learning_rate)
                )
                shard.stepping = False
                shard.publish(written, shard.version + 1)
                shard.progress += int(sum(one.weight for one in counted))
        finally:
            shard.stepping = False
        self._options.counts["steps"] += 1
        self._options.counts["gradients"] += len(counted)
        self._poisoned.clear()
        self._attendance.clear()
        self._begun.clear()
        self._wake()
        return written.vector

    def _apply(self, counted: Sequence[Contribution], learning_rate: float) -> ShardVersion:
        """Step along the gradients' mean (or sum), and write the next version; in a thread."""
        config = self._config
        if counted:
            vectors, weights = [one.vector for one in counted], [self._weight(one) for one in counted]
            if self._rule == "clipped":
                clipping = clipping_of(vectors, weights, config.clip_distance)
                clipping = self._options.beyond.shortened(clipping, [one.sender for one in counted])
                combine_clipped(vectors, clipping, self._combined)
            else:
                combine(vectors, weights, mixing=self._rule, trim=config.trim, out=self._combined)
            if config.reduce == "sum":
                np.multiply(self._combined, np.float32(len(counted)), out=self._combined)
            if math.isfinite(learning_rate):
                self._shard.apply(self._combined, learning_rate)
        return self._shard.write_version()


def _counted(sender: str, number: int, last: CollectedRound) -> bool:
    """Whether a sender's gradient is in the last round, and that was ``number``."""
    return last.number == number and any(one.sender == sender and one.weight > 0 for one in last.merged)


def _ends_update(collected: CollectedRound | None) -> bool:
    """Whether the leader's update ended with that round: then all others make experience again."""
    merged = () if collected is None else collected.merged
    return leader_ends(UpdatePosition(one.sender, one.weight, one.left) for one in merged)


async def _nothing(out: Float32Array) -> None:
    """A contribution of weight 0 needs no vector."""
    del out


FIRST_REQUEST_S = 2.0
"""A learner that never gave a gradient is waited for this long."""
LEAST_REQUEST_S = 0.5


class ServerSyncStrategy(ServedStrategy):
    """Synchronous rounds with servers among the nodes."""

    mode: Mode = "server-sync"

    def __init__(self, config: ServerSyncConfig, context: StrategyContext) -> None:
        super().__init__(config, context, differences=True)
        self._config = config
        self._round_timeout = AdaptiveTimeout(config.deadline_s)
        self._request_timeout = AdaptiveTimeout(config.deadline_s, least_s=LEAST_REQUEST_S)
        self._request: LearnerRequest | None = None
        """What the learner waits for: kept from view to view until it is answered."""
        self._requested_once = False
        self._version = -1

    def _open_server(self, shard: Shard, options: ShardServerOptions) -> ShardServer:
        return SyncShardServer(shard, self._config, options, self._round_timeout)

    async def _work(self, session: ViewSession) -> None:
        client = ShardClient(session, self._context, self._config, differences=True)
        before = self._version
        self._version = (await self._join(session, client, settle=True))[0]
        if self._request is not None and self._version != before:
            self._answer_learner(self._request, "regrouped")
        while not self._stopped.is_set():
            if 0 < self._context.max_exchanges <= self._outcomes.count("ok"):
                await self._stand_aside(client)
                continue
            if self._request is None:
                await self._next_request(client)
            if self._request is not None:
                await self._round(client, self._request)

    async def _next_request(self, client: ShardClient) -> None:
        """Wait for the learner; when it takes long, follow the rounds that go on without it."""
        began_s = self._clock.monotonic()
        limit_s = self._request_timeout.deadline_s if self._requested_once else FIRST_REQUEST_S
        self._request = await self._requests.take(min(limit_s, self._config.deadline_s))
        if self._request is None and not self._stopped.is_set():
            async with self._following(client) as following:
                while self._request is None and not following.done() and not self._stopped.is_set():
                    self._request = await self._requests.take(LEAST_REQUEST_S)
        if self._request is not None:
            self._requested_once = True
            self._request_timeout.observe(self._clock.monotonic() - began_s)

    async def _stand_aside(self, client: ShardClient) -> None:
        """Let our learner go on, which had rounds enough, and hold up nobody who hasn't."""
        async with self._following(client) as following:
            while not following.done() and not self._stopped.is_set():
                request, self._request = self._request, None
                if request is not None:
                    self._learner.answer(request, "none")
                self._request = await self._requests.take(LEAST_REQUEST_S)

    @asynccontextmanager
    async def _following(self, client: ShardClient) -> AsyncIterator[asyncio.Task[None]]:
        """Follow the others' rounds meanwhile."""
        following = asyncio.create_task(self._follow(client), name="follow")
        try:
            yield following
        finally:
            await cancel_and_wait(following)
        if not following.cancelled():
            following.result()

    async def _follow(self, client: ShardClient) -> None:
        """Tell the servers that we have no gradient, and take what they give, round by round."""
        while True:
            parts = await self._push(client, "idle", None)
            if any(part.head.outcome != "waiting" for part in parts):
                await self._take(client, parts)
                self._counts["rounds_without_us"] += 1

    async def _round(self, client: ShardClient, request: LearnerRequest) -> None:
        """Give the learner's gradient to a round, and answer it."""
        began_s = self._clock.monotonic()
        if not self._learner.board.absorbed:
            # Computed before the learner took what we put on the board last.
            self._answer_learner(request, "stale")
            return
        usable = request.vector is not None
        if request.vector is not None and await self._encode(client, request.vector):
            usable = False
            self._counts["own_poisoned"] += 1
        try:
            parts = await self._push(client, "step" if usable else "idle", request)
        except PoisonedPushError as error:
            self._swarm.tell("servers", f"our gradient was refused: {error}", warning=True)
            await self._take(client, await client.fetch(self._version))
            self._answer_learner(request, "poisoned")
            return
        outcomes = {part.head.outcome for part in parts}
        if outcomes == {"waiting"}:
            self._answer_learner(request, "idle")
            return
        answer = parts[0].head
        changed = await self._take(client, parts)
        outcome = "late" if "late" in outcomes else "ok" if usable else "idle"
        seconds = self._clock.monotonic() - began_s
        report = RoundReport(
            outcome,
            merged=_merged(answer.merged),
            missing=answer.missing,
            seconds=seconds,
            waited_s=seconds,
            changed=changed,
        )
        end_update = answer.ends_update and request.left > 0
        self._answer_learner(request, outcome, client.with_traffic(report), end_update=end_update)

    async def _push(
        self, client: ShardClient, op: Literal["step", "idle"], request: LearnerRequest | None
    ) -> list[SliceAnswer]:
        """Take part in the round that begins with the parameters which we hold."""
        head = GradientPush(client.session.key, 0, op, self._version, base=self._version)
        if op == "idle" or request is None:
            return await client.insist_all(head)
        head = msgspec.structs.replace(
            head, weight=float(request.samples), policy=request.policy_version, left=request.left
        )
        return await client.insist_all(head, request.vector)

    async def _take(self, client: ShardClient, parts: list[SliceAnswer]) -> float:
        """Take a round's result; fetch it again until it is usable."""
        while True:
            try:
                settled = await client.settle(parts)
                version = settled[0].head.version
                try:
                    changed = await self._take_parts(client, settled, version, version)
                finally:
                    client.release(settled)
                self._version = version
                return changed
            except BadServerError as error:
                self._reject(error)
            except PeerTimeoutError as error:
                self._swarm.tell("servers", str(error), warning=True)
            await asyncio.sleep(RETRY_S)
            parts = await client.fetch(self._version)

    def _answer_learner(
        self,
        request: LearnerRequest,
        outcome: str,
        report: RoundReport | None = None,
        *,
        end_update: bool = False,
    ) -> None:
        """Let the learner go on with what is on the board."""
        self._request = None
        self._outcomes.ended(RoundReport(outcome) if report is None else report, ours=report is not None)
        self._learner.answer(request, "set", end_update=end_update)


def _merged(weights: tuple[tuple[str, float], ...]) -> tuple[Merged, ...]:
    """Weights as parts of their sum."""
    total = sum(weight for _, weight in weights) or 1.0
    return tuple(Merged(peer, weight / total) for peer, weight in weights)
