"""Asynchronous parameter servers: DistBelief's Downpour SGD (Dean 2012, section 4.1).

A worker sends each server its slice of a gradient and, each ``fetch_every`` pushes, takes the server's slice
of the parameters along; servers step as gradients come, and nobody waits for anybody else.

- One worker that pushes and fetches each gradient with ``ahead = 0`` is serial training.
- Slices may be of different versions: shards are independent, as in the paper.
- Staleness s is the shard's version minus the version that the gradient was computed on. Up to
  ``max_staleness`` a gradient counts whole; beyond it, by `weight_of`, less and less or not at all.
- A push is sent once. A server that doesn't answer in time costs the worker that slice of that gradient and
  leaves its slice of the parameters as it was; it is counted as ``lost``.
- Adagrad is the paper's optimizer: each parameter's step is γ / √Σ g².
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from p2pdrl.config.strategy import Mode, ServerAsyncConfig
from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, TransportError
from p2pdrl.strategies.call_timeouts import CallDeadline
from p2pdrl.strategies.clipping_radius import UsualLengths
from p2pdrl.strategies.offload import heavy
from p2pdrl.strategies.protocol import LearnerRequest, Merged, RoundReport, StrategyContext
from p2pdrl.strategies.servers.base import ServedStrategy
from p2pdrl.strategies.servers.messages import GradientPush, ServerAnswer
from p2pdrl.strategies.servers.shard import Shard
from p2pdrl.strategies.servers.shard_client import BadServerError, PoisonedPushError, ShardClient, SliceAnswer
from p2pdrl.strategies.servers.shard_server import (
    Answered,
    ReceivedPush,
    ShardServer,
    ShardServerOptions,
    ViewSession,
)
from p2pdrl.strategies.task_runner import together
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.mix import norm

__all__ = ["ServerAsyncStrategy", "bucket_of", "weight_of"]


class AsyncShardServer(ShardServer):
    """One shard at work in one view."""

    def __init__(self, shard: Shard, config: ServerAsyncConfig, options: ShardServerOptions) -> None:
        super().__init__(shard, options)
        self._config = config
        self._gradient: Float32Array = np.empty(shard.span.size, np.float32)
        clipped = config.rule(bounded=options.context.bounded) == "clipped"
        self._norms = UsualLengths() if clipped else None
        """Of each worker's gradients; None where they aren't bounded."""

    async def close(self, why: str) -> None:
        """Refuse everybody, and wait for a step that is under way."""
        await super().close(why)
        async with self._shard.lock:
            pass

    async def _serve(self, sender: str, head: GradientPush, push: ReceivedPush) -> ServerAnswer:
        """Apply a gradient, where the worker brings one."""
        await self._reach()
        if head.op == "step" and head.weight > 0:
            return await self._step(sender, head, push)
        return ServerAnswer(self._shard.version)

    async def _give(self, answer: ServerAnswer, head: GradientPush) -> Answered:
        """Give the parameters with all steps so far."""
        if head.wants:
            await self._shard.republish()
        return await super()._give(answer, head)

    async def _step(self, sender: str, head: GradientPush, push: ReceivedPush) -> ServerAnswer:
        shard, options = self._shard, self._options
        async with self._reader.read(push, whole=False) as data, shard.lock:
            self._check_open()
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
                self._reader.decode(sender, data, self._gradient, whole=False)
                self._bound(sender)
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

    def _bound(self, sender: str) -> None:
        """Shorten what was read to a multiple of the workers' usual norm; more and more who goes on so."""
        norms = self._norms
        if norms is None:
            return
        length, before = norm(self._gradient), norms.median
        norms.note(sender, length)
        most = self._config.clip_distance * min(before, norms.median)
        factor = self._options.beyond.share(sender, beyond=length > most)
        if length > most:
            np.multiply(self._gradient, np.float32(factor * most / length), out=self._gradient)


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
    """Pushes and fetches without rounds."""

    mode: Mode = "server-async"

    def __init__(self, config: ServerAsyncConfig, context: StrategyContext) -> None:
        super().__init__(config, context, differences=False, most_open=config.ahead + 1)
        self._config = config
        self._versions: list[int] = []
        """Of the shards, as we hold them."""
        self._sets: deque[tuple[int, list[int]]] = deque(maxlen=SETS_REMEMBERED)
        """Policy version and shards' versions of what was put on the board, the latest last."""
        self._taking = asyncio.Lock()
        self._pushes = 0
        self._lost: Counter[str] = Counter()
        """Calls that failed in a row, by server."""

    def _open_server(self, shard: Shard, options: ShardServerOptions) -> ShardServer:
        return AsyncShardServer(shard, self._config, options)

    async def _work(self, session: ViewSession) -> None:
        lanes = [
            ShardClient(session, self._context, self._config, differences=False)
            for _ in range(max(1, self._config.ahead))
        ]
        self._versions = await self._join(session, lanes[0], settle=False)
        self._sets.clear()
        self._sets.append((max(self._versions), list(self._versions)))
        await together(*(self._lane(client) for client in lanes))

    async def _lane(self, client: ShardClient) -> None:
        """Push one gradient after the other."""
        deadline = CallDeadline(self._config.deadline_s)
        while not self._stopped.is_set():
            request = await self._requests.take()
            if request is None:
                continue
            try:
                await self._push(client, request, deadline)
            except asyncio.CancelledError:
                # The view has ended: what was under way is lost, and the learner goes on.
                self._answer_learner(request, RoundReport("regrouped"))
                raise

    async def _push(self, client: ShardClient, request: LearnerRequest, deadline: CallDeadline) -> None:
        began_s = self._clock.monotonic()
        enough = 0 < self._context.max_exchanges <= self._outcomes.count("ok")
        gradient = request.vector
        if gradient is None or enough:
            self._learner.answer(request, "none")
            return
        bases = self._bases(request)
        self._pushes += 1
        wants = self._pushes % self._config.fetch_every == 0
        poisoned = await self._encode(client, gradient)
        if poisoned:
            self._answer_learner(request, RoundReport("poisoned", error=poisoned))
            return
        heads = [
            GradientPush(
                client.session.key,
                shard,
                "step",
                base,
                weight=float(request.samples),
                policy=request.policy_version,
                wants=wants,
            )
            for shard, base in enumerate(bases)
        ]
        outcomes: list[str] = []
        parts = await together(*(self._ask(client, head, gradient, deadline, outcomes) for head in heads))
        changed, fetched = 0.0, False
        if wants and any(part is not None for part in parts):
            changed = await self._take(client, parts)
            fetched = True
        client.release(parts)
        outcome = next((word for word in ("poisoned", "lost", "stale") if word in outcomes), "ok")
        report = self._report(client, parts, outcome, changed, self._clock.monotonic() - began_s)
        self._tell_stale(report)
        self._answer_learner(request, report, fetched=fetched)

    def _report(
        self,
        client: ShardClient,
        parts: Sequence[SliceAnswer | None],
        outcome: str,
        changed: float,
        seconds: float,
    ) -> RoundReport:
        answers = [part.head for part in parts if part is not None]
        shares = [share for one in answers for peer, share in one.merged if peer == self._me]
        stalest = max((one.staleness for one in answers if one.merged), default=0)
        refused = [one.staleness for one in answers if one.outcome == "stale"]
        servers = client.session.plan.servers
        report = RoundReport(
            outcome,
            merged=(Merged(self._me, min(shares), stalest),) if shares else (),
            missing=tuple(server for server, part in zip(servers, parts, strict=True) if part is None),
            seconds=seconds,
            waited_s=0.0 if self._config.ahead else seconds,
            changed=changed,
            error=f"refused: {max(refused)} steps old" if refused else "",
            served=True,
        )
        return client.with_traffic(report)

    def _tell_stale(self, report: RoundReport) -> None:
        """Tell people of a push that was scaled or refused: the first one, the tenth, the hundredth …."""
        if report.outcome == "stale":
            word, what, advice = "own_stale", "were refused", "; raise it, or set stale = scale"
        elif report.outcome == "ok" and any(one.weight < 1 for one in report.merged):
            word, what, advice = "own_scaled", "count for less", ""
        else:
            return
        self._counts[word] += 1
        count = self._counts[word]
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
        head: GradientPush,
        gradient: Float32Array,
        deadline: CallDeadline,
        outcomes: list[str],
    ) -> SliceAnswer | None:
        """Push one slice, once, and note how that ended; None when it is lost."""
        server = client.session.plan.servers[head.shard]
        began_s = self._clock.monotonic()
        word = "lost"
        try:
            part = await client.ask(head, gradient, once_s=deadline.seconds)
            word = part.head.outcome
            del self._lost[server]
            return part
        except PoisonedPushError:
            word = "poisoned"
        except (PeerTimeoutError, PeerUnreachableError) as error:
            await self._lose(server, error)
        except TransportError:
            pass
        finally:
            outcomes.append(word)
            ended = "ok" if word in ("ok", "stale") else "timeout" if word == "lost" else word
            deadline.note(ended, self._clock.monotonic() - began_s)
        return None

    async def _lose(self, server: str, error: TransportError) -> None:
        """Note a failed call; after several in a row doubt the server."""
        in_a_row = self._lost[server] = self._lost[server] + 1
        some = LOST_TIMEOUTS if isinstance(error, PeerTimeoutError) else LOST_CALLS
        if in_a_row >= LOST_FOR_GOOD or (in_a_row % some == 0 and not await self._group.lives(server)):
            self._group.doubt(server, str(error))

    async def _take(self, client: ShardClient, parts: Sequence[SliceAnswer | None]) -> float:
        """Put what is newer than what we have on the board."""
        async with self._taking:
            fresh = [
                part if part is not None and part.head.version >= version else None
                for part, version in zip(parts, self._versions, strict=True)
            ]
            versions = [
                version if part is None else part.head.version
                for part, version in zip(fresh, self._versions, strict=True)
            ]
            try:
                changed = await self._take_parts(client, fresh, max(versions), min(versions))
            except BadServerError as error:
                self._reject(error)
                return 0.0
            self._versions = versions
            self._sets.append((max(versions), list(versions)))
            return changed

    def _bases(self, request: LearnerRequest) -> list[int]:
        """Return the shards' versions that a gradient was computed on: of the last set it can have seen."""
        sets = list(self._sets)
        if not self._learner.board.absorbed and len(sets) > 1:
            sets.pop()
        seen = [versions for policy, versions in sets if policy <= request.policy_version]
        return seen[-1] if seen else sets[0][1]

    def _answer_learner(self, request: LearnerRequest, report: RoundReport, *, fetched: bool = False) -> None:
        """Let the learner go on, with what is on the board where that was fetched."""
        self._outcomes.ended(report)
        self._learner.answer(request, "set" if fetched else "none")
