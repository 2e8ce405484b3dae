"""Synchronous parameter servers: broadcast, map, reduce, with backup workers (Chen 2016, arXiv 1604.00981).

Every worker begins a round on the same parameters w_v. It sends each server its slice of the gradient; a
server steps once with all of them and answers with its slice of w_{v+1}. So n workers with gradients over
n_k samples each are one worker with the gradient over Σ n_k (``reduce = "count"``, which counts samples).

    worker    post ─▶ slices ─▶ servers: collect, combine, step ─▶ slices of one version ─▶ board ─▶ "set"

- A round waits for all members of the group, or, past a deadline that follows what was observed, for a
  ``quorum`` of them; ``backups`` are never waited for. A gradient that comes too late is dropped, and its
  worker gets the newest parameters.
- A worker whose learner has no gradient (paused, starting, or much slower than it was) says so, and takes
  the parameters of the rounds that go on without it.
- When the leader's update ends, everybody's does, so that all collect at the same time (`lockstep`).
- A member that doesn't answer is doubted, and the group goes on without it; who held its shard next has the
  same parameters as all workers, so at most that round is lost, and a gradient that was computed on the
  parameters with which the new view begins is sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from p2pdrl.config.strategy import Mode, ServerSyncConfig
from p2pdrl.errors import PeerTimeoutError, PoisonedVectorError
from p2pdrl.strategies.heavy import heavy
from p2pdrl.strategies.patience import Patience
from p2pdrl.strategies.protocol import Context, Merged, Post, RoundReport
from p2pdrl.strategies.servers.bench import Bench
from p2pdrl.strategies.servers.courier import BadServerError, Courier, Part, PoisonedPushError, together
from p2pdrl.strategies.servers.desk import Desk, DeskOptions
from p2pdrl.strategies.servers.desk_sync import SyncDesk
from p2pdrl.strategies.servers.served import ServedStrategy
from p2pdrl.strategies.servers.shard import Shard
from p2pdrl.strategies.servers.term import Term
from p2pdrl.tensors.layout import Float32Array

__all__ = ["ServerSyncStrategy"]

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

    def __init__(self, config: ServerSyncConfig, context: Context) -> None:
        super().__init__(config, context, differences=True)
        self._config = config
        self._bench = Bench(context, self._holdings)
        self._learner = context.learner
        self._clock = context.clock
        self._rounds_patience = Patience(config.deadline_s)
        self._posts_patience = Patience(config.deadline_s, least_s=LEAST_POST_S)
        self._post: Post | None = None
        """What the learner waits for: kept from view to view until it is answered."""
        self._posted_once = False
        self._version = -1

    def _open_desk(self, term: Term, shard: Shard, options: DeskOptions) -> Desk:
        return SyncDesk(shard, self._config, options, self._rounds_patience, seed=term.plan.seed)

    async def _work(self, term: Term) -> None:
        courier = Courier(term, self._context, self._config, differences=True)
        before = self._version
        self._version = (await self._bench.join(term, courier, settle=True))[0]
        if self._post is not None and self._version != before:
            self._done(self._post, "regrouped")
        while not self._stopped.is_set():
            if 0 < self._context.max_exchanges <= self._tally.count("ok"):
                await self._stand_aside(courier)
                continue
            if self._post is None:
                await self._next_post(courier)
            if self._post is not None:
                await self._round(courier, self._post)

    async def _next_post(self, courier: Courier) -> None:
        """Wait for the learner; when it takes long, follow the rounds that go on without it."""
        began_s = self._clock.monotonic()
        limit_s = self._posts_patience.deadline_s if self._posted_once else FIRST_POST_S
        self._post = await self._posts.next(min(limit_s, self._config.deadline_s))
        if self._post is None and not self._stopped.is_set():
            async with self._following(courier) as following:
                while self._post is None and not following.done() and not self._stopped.is_set():
                    self._post = await self._posts.next(LEAST_POST_S)
        if self._post is not None:
            self._posted_once = True
            self._posts_patience.observe(self._clock.monotonic() - began_s)

    async def _stand_aside(self, courier: Courier) -> None:
        """We had rounds enough: let our learner go on, and hold up nobody who hasn't."""
        async with self._following(courier) as following:
            while not following.done() and not self._stopped.is_set():
                post, self._post = self._post, None
                if post is not None:
                    self._learner.answer(post, "none")
                self._post = await self._posts.next(LEAST_POST_S)

    @asynccontextmanager
    async def _following(self, courier: Courier) -> AsyncIterator[asyncio.Task[None]]:
        """Follow the rounds of the others meanwhile; see `_follow`."""
        following = asyncio.create_task(self._follow(courier), name="follow")
        try:
            yield following
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)  # reads what it raised, too
        if not following.cancelled():
            following.result()

    async def _follow(self, courier: Courier) -> None:
        """Tell the servers that we have no gradient, and take what they give, round by round."""
        while True:
            parts = await self._ask_all(courier, "idle", None)
            if any(part.given.outcome != "waiting" for part in parts):
                await self._take(courier, parts)
                self._office.counts["rounds_without_us"] += 1

    async def _round(self, courier: Courier, post: Post) -> None:
        """Give the post's gradient to a round, and answer it."""
        began_s = self._clock.monotonic()
        board = self._learner.board
        if not board.absorbed:
            # Computed before the learner took what we put on the board last.
            self._done(post, "stale")
            return
        usable = post.vector is not None and await self._encode(courier, post.vector)
        try:
            parts = await self._ask_all(courier, "step" if usable else "idle", post)
        except PoisonedPushError as error:
            self._swarm.tell("servers", f"our gradient was refused: {error}", warning=True)
            await self._take(courier, await self._fetched(courier))
            self._done(post, "poisoned")
            return
        outcomes = {part.given.outcome for part in parts}
        if outcomes == {"waiting"}:
            self._done(post, "idle")
            return
        given = parts[0].given
        changed = await self._take(courier, parts)
        outcome = "late" if "late" in outcomes else "ok" if usable else "idle"
        bytes_out, bytes_in, trips = courier.traffic()
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

    async def _encode(self, courier: Courier, gradient: Float32Array) -> bool:
        """Get a gradient ready to travel; False, and nobody is given it, when it is unusable."""
        try:
            await heavy(8 * gradient.size, lambda: courier.encode(gradient))
        except PoisonedVectorError as error:
            self._swarm.tell("servers", f"our gradient isn't given away: {error}", warning=True)
            self._office.counts["own_poisoned"] += 1
            return False
        return True

    async def _ask_all(self, courier: Courier, op: Literal["step", "idle"], post: Post | None) -> list[Part]:
        """Take part in the round that begins with the parameters which we hold."""
        gives = post if op == "step" else None
        return await together(
            *(
                courier.insist(
                    shard,
                    op,
                    self._version,
                    base=self._version,
                    weight=0.0 if gives is None else float(gives.samples),
                    policy=0 if gives is None else gives.policy_version,
                    left=0 if gives is None else gives.left,
                    vector=None if gives is None else gives.vector,
                )
                for shard in range(len(courier.spans))
            )
        )

    async def _take(self, courier: Courier, parts: list[Part]) -> float:
        """Take a round's result; until it is usable."""
        while True:
            settled = parts
            try:
                settled = await courier.settle(parts)
                version = settled[0].given.version
                changed = await self._bench.take(courier, settled, version, version)
                self._version = version
                return changed
            except BadServerError as error:
                self._swarm.strike(error.server, str(error))
                courier.term.doubt(error.server, "its parameters are unusable")
            except PeerTimeoutError as error:
                self._swarm.tell("servers", str(error), warning=True)
            finally:
                courier.release(settled)
            await asyncio.sleep(RETRY_S)
            parts = await self._fetched(courier)

    async def _fetched(self, courier: Courier) -> list[Part]:
        return await together(
            *(courier.insist(shard, "fetch", self._version) for shard in range(len(courier.spans)))
        )

    def _done(
        self, post: Post, outcome: str, report: RoundReport | None = None, *, end_update: bool = False
    ) -> None:
        """Let the learner go on with what is on the board."""
        self._post = None
        self._tally.ended(RoundReport(outcome) if report is None else report, ours=report is not None)
        self._learner.answer(post, "set", end_update=end_update)


def _merged(weights: tuple[tuple[str, float], ...]) -> tuple[Merged, ...]:
    """Weights as parts of their sum."""
    total = sum(weight for _, weight in weights) or 1.0
    return tuple(Merged(peer, weight / total) for peer, weight in weights)
