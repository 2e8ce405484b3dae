"""Asynchronous parameter servers: DistBelief's Downpour SGD (Dean 2012, section 4.1).

A worker sends each server its slice of a gradient and, each ``fetch_every`` pushes, takes the server's
slice of the parameters along; nobody waits for anybody else. Servers step as gradients come (`desk_async`).

- One worker that pushes and fetches each gradient with ``ahead = 0`` is serial training.
- Slices may be of different versions: shards are independent, as in the paper.
- A push is sent once. A server that doesn't answer in time, or isn't at work at it, costs the worker that
  slice of that gradient, never more than its patience, and keeps its slice of the parameters as it was; it is
  counted as ``lost``.
- Adagrad is the paper's optimizer: each parameter's step is γ / √Σ g².
- A gradient that is older than ``max_staleness`` steps of its server counts for less, or is refused
  (`desk_async.weight_of`). The worker's report of each push says its staleness and what it counted for, the
  greatest and the least of its slices'.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence

from p2pdrl.config.strategy import Mode, ServerAsyncConfig
from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, PoisonedVectorError, TransportError
from p2pdrl.strategies.calling import CallDeadline
from p2pdrl.strategies.heavy import heavy
from p2pdrl.strategies.protocol import Context, Merged, Post, RoundReport
from p2pdrl.strategies.servers.bench import Bench
from p2pdrl.strategies.servers.courier import BadServerError, Courier, Part, PoisonedPushError, together
from p2pdrl.strategies.servers.desk import Desk, DeskOptions
from p2pdrl.strategies.servers.desk_async import AsyncDesk
from p2pdrl.strategies.servers.served import ServedStrategy
from p2pdrl.strategies.servers.shard import Shard
from p2pdrl.strategies.servers.term import Term

__all__ = ["ServerAsyncStrategy"]

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

    def __init__(self, config: ServerAsyncConfig, context: Context) -> None:
        super().__init__(config, context, differences=False)
        self._config = config
        self._bench = Bench(context, self._holdings)
        self._learner = context.learner
        self._clock = context.clock
        self._versions: list[int] = []
        self._sets: deque[tuple[int, list[int]]] = deque(maxlen=SETS_REMEMBERED)
        """Policy version and shards' versions of what was put on the board, the latest last."""
        self._taking = asyncio.Lock()
        self._pushes = 0
        self._lost: Counter[str] = Counter()
        """Calls that failed in a row, by server."""

    def _open_desk(self, term: Term, shard: Shard, options: DeskOptions) -> Desk:
        return AsyncDesk(shard, self._config, options, seed=term.plan.seed)

    async def _work(self, term: Term) -> None:
        courier = Courier(term, self._context, self._config, differences=False)
        self._versions = await self._bench.join(term, courier, settle=False)
        self._sets.clear()
        self._sets.append((max(self._versions), list(self._versions)))
        lanes = [courier]
        lanes += [
            Courier(term, self._context, self._config, differences=False)
            for _ in range(self._config.ahead - 1)
        ]
        await together(*(self._lane(lane) for lane in lanes))

    async def _lane(self, courier: Courier) -> None:
        """Push one gradient after the other."""
        deadline = CallDeadline(self._config.deadline_s)
        while not self._stopped.is_set():
            post = await self._posts.next()
            if post is None:
                continue
            try:
                await self._push(courier, post, deadline)
            except asyncio.CancelledError:
                # The view has ended: what was under way is lost, and the learner goes on.
                self._end(post, RoundReport("regrouped"))
                raise

    async def _push(self, courier: Courier, post: Post, deadline: CallDeadline) -> None:
        began_s = self._clock.monotonic()
        enough = 0 < self._context.max_exchanges <= self._tally.count("ok")
        gradient = post.vector
        if gradient is None or enough:
            self._learner.answer(post, "none")
            return
        bases = self._bases(post)
        self._pushes += 1
        wants = self._pushes % self._config.fetch_every == 0
        try:
            await heavy(8 * gradient.size, lambda: courier.encode(gradient))
        except PoisonedVectorError as error:
            self._swarm.tell("servers", f"our gradient isn't given away: {error}", warning=True)
            self._end(post, RoundReport("poisoned", error=str(error)))
            return
        shards = range(len(courier.spans))
        outcomes: list[str] = []
        parts = await together(
            *(
                self._ask(
                    courier,
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
            changed = await self._take(courier, parts)
            fetched = True
        courier.release(parts)
        outcome = next((word for word in ("poisoned", "lost", "stale") if word in outcomes), "ok")
        report = self._report(courier, parts, outcome, changed, self._clock.monotonic() - began_s)
        self._tell_aged(report)
        self._end(post, report, fetched=fetched)

    def _report(
        self, courier: Courier, parts: Sequence[Part | None], outcome: str, changed: float, seconds: float
    ) -> RoundReport:
        given = [part.given for part in parts if part is not None]
        shares = [share for one in given for peer, share in one.merged if peer == self._me]
        stalest = max((one.staleness for one in given if one.merged), default=0)
        refused = [one.staleness for one in given if one.outcome == "stale"]
        servers = courier.term.plan.servers
        bytes_out, bytes_in, trips = courier.traffic()
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
        self._office.counts[word] += 1
        count = self._office.counts[word]
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
        courier: Courier,
        shard: int,
        post: Post,
        *,
        base: int,
        wants: bool,
        deadline: CallDeadline,
        outcomes: list[str],
    ) -> Part | None:
        """Push one slice, once; None when it is lost."""
        server = courier.term.plan.servers[shard]
        began_s = self._clock.monotonic()
        word = "lost"
        try:
            part = await courier.ask(
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
            await self._lose(courier.term, server, error)
        except TransportError:
            pass
        finally:
            outcomes.append(word)
            ended = "ok" if word in ("ok", "stale") else "timeout" if word == "lost" else word
            deadline.note(ended, self._clock.monotonic() - began_s)
        return None

    async def _lose(self, term: Term, server: str, error: TransportError) -> None:
        """A call failed: when that happens time and again, doubt the server."""
        in_a_row = self._lost[server] = self._lost[server] + 1
        some = LOST_TIMEOUTS if isinstance(error, PeerTimeoutError) else LOST_CALLS
        if in_a_row >= LOST_FOR_GOOD or (in_a_row % some == 0 and not await term.lives(server)):
            term.doubt(server, str(error))

    async def _take(self, courier: Courier, parts: Sequence[Part | None]) -> float:
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
                changed = await self._bench.take(courier, fresh, max(versions), min(versions))
            except BadServerError as error:
                self._swarm.strike(error.server, str(error))
                courier.term.doubt(error.server, "its parameters are unusable")
                return 0.0
            self._versions = versions
            self._sets.append((max(versions), list(versions)))
            return changed

    def _bases(self, post: Post) -> list[int]:
        """Versions of the shards that a gradient was computed on: of the last set it can have seen."""
        sets = list(self._sets)
        if not self._learner.board.absorbed and len(sets) > 1:
            sets.pop()
        seen = [versions for policy, versions in sets if policy <= post.policy_version]
        return seen[-1] if seen else sets[0][1]

    def _end(self, post: Post, report: RoundReport, *, fetched: bool = False) -> None:
        """Answer a post."""
        self._tally.ended(report)
        self._learner.answer(post, "set" if fetched else "none")
