"""What AD-PSGD, SGP and GALA share: when to begin an exchange, which peers rest, and the loop that does it.

`ExchangeTimer` is pure; the planner simulates swarms with it too.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from p2pdrl.config.strategy import Mode, Paced
from p2pdrl.errors import PoisonedVectorError, TensorError
from p2pdrl.strategies.admission import ExchangeAdmission
from p2pdrl.strategies.call_timeouts import CallDeadline
from p2pdrl.strategies.offload import Arithmetic
from p2pdrl.strategies.protocol import RoundReport, Strategy, StrategyContext
from p2pdrl.strategies.task_runner import OutcomeMetrics, TaskRunner
from p2pdrl.transport.protocol import Address, Answer, Incoming, Reply, VectorBuffer

__all__ = ["COOL_MAX_S", "AsynchronousStrategy", "ExchangeTimer"]

IDLE_S = 1.0
"""Longest wait for news: what else an exchange waits for (a state, members) is looked at so often."""
COOL_FIRST_S = 0.5
COOL_MAX_S = 15.0
UNREADY_MAX_S = 1.0
"""A peer that says that it is only just starting rests no longer."""
MAX_DOUBLINGS = 3
MAX_FAILURES = 16
"""Counted no further: the rest has long reached its bound by then."""


class ExchangeTimer:
    """When an exchange is due, and the rests of peers that failed. Times are monotonic.

    Args:
        cool_first_s: how long a peer rests after its first failure in a row.

    Attributes:
        next_s: no exchange begins before.
    """

    def __init__(self, config: Paced, rng: random.Random, cool_first_s: float = COOL_FIRST_S) -> None:
        self._config = config
        self._rng = rng
        self._cool_first_s = cool_first_s
        self._updates = 0
        self._began_s = float("-inf")
        self.next_s = float("-inf")
        self._busy_in_a_row = 0
        self._failures: dict[str, int] = {}
        self._cool_until_s: dict[str, float] = {}

    def rest_s(self, now_s: float) -> float:
        """How long to wait for news: up to the moment at which an exchange may begin.

        Without updates (the learner is paused, say) only time makes one due, so there is no hurry.
        """
        left_s = self.next_s - now_s
        if left_s <= 0:
            every_s = self._config.every_s
            left_s = self._config.min_interval_s
            if not self.due(now_s):
                left_s = IDLE_S if every_s <= 0 else min(IDLE_S, self._began_s + every_s - now_s)
        return max(left_s, 0.005)

    def updated(self, updates: int) -> None:
        """Note that the learner made ``updates`` more updates."""
        self._updates += updates

    def due(self, now_s: float) -> bool:
        """Tell whether an exchange should begin at ``now_s``; it is asked several times before one begins."""
        if now_s < self.next_s:
            return False
        config = self._config
        by_count = config.every_updates > 0 and self._updates >= config.every_updates
        by_time = config.every_s > 0 and now_s >= self._began_s + config.every_s
        return by_count or by_time

    def fit(self, peers: Iterable[str], now_s: float) -> list[str]:
        """Those of ``peers``, in their order, that don't rest after a failure."""
        return [peer for peer in peers if self._cool_until_s.get(peer, now_s) <= now_s]

    def began(self, now_s: float) -> None:
        """Note that an exchange begins."""
        self._began_s = now_s
        self.next_s = now_s + self._config.min_interval_s

    def skipped(self, now_s: float) -> None:
        """Note that the exchange that was due isn't to be: the next one is due as if it had been done."""
        self.began(now_s)
        self._updates = 0

    def mixed(self, partner: str) -> None:
        """Note that an exchange that we began with ``partner`` ended well."""
        self._updates = 0
        self._busy_in_a_row = 0
        self._failures.pop(partner, None)
        self._cool_until_s.pop(partner, None)

    def busy(self, now_s: float, took_s: float) -> None:
        """Note that the partner was in another exchange: the next one begins after a moment.

        The moment is random, so that two nodes that called each other don't do so again; it is
        measured in the time that the refused call took, and doubles like Ethernet's back-off,
        because calls that last longer than the moments differ would cross for ever.

        Args:
            took_s: how long the refused call took.
        """
        spread = 2.0 ** min(self._busy_in_a_row, MAX_DOUBLINGS)
        self._busy_in_a_row += 1
        self._began_s = float("-inf")
        least_s = self._rng.uniform(0.1, 0.5) * self._config.min_interval_s
        self.next_s = now_s + least_s + self._rng.uniform(0.0, spread) * took_s

    def failed(self, partner: str, now_s: float, *, unready: bool = False) -> None:
        """Note that an exchange with ``partner`` failed: it rests a while, which doubles up to 15 s.

        Args:
            partner: who didn't answer, or refused.
            unready: it said that it has no state yet: it rests a second at most, however often it says so.
        """
        failures = min(self._failures.get(partner, 0) + 1, MAX_FAILURES)
        rest_s = min(self._cool_first_s * 2.0 ** (failures - 1), COOL_MAX_S)
        if unready and rest_s > UNREADY_MAX_S:
            rest_s = UNREADY_MAX_S
        else:
            self._failures[partner] = failures
        self._cool_until_s[partner] = now_s + rest_s


Timer = TypeVar("Timer", bound=ExchangeTimer)


class AsynchronousStrategy(Strategy, ABC, Generic[Timer]):
    """Exchanges that begin by themselves, now and then, while the learner goes on; see `Strategy`.

    Args:
        core: says when to begin, and with whom.
        nbytes: of the vectors that are worked on.
    """

    mode: Mode = "gossip"
    DONE: ClassVar[str]
    """Outcome of an exchange that this node began and that went well."""

    def __init__(self, config: Paced, context: StrategyContext, core: Timer, nbytes: int) -> None:
        self._swarm = context.swarm
        self._board = context.learner.board
        self._transport = context.transport
        self._clock = context.clock
        self._core = core
        self._max_exchanges = context.max_exchanges
        self._start_at_members = context.start_at_members
        self._admission = ExchangeAdmission(context.swarm, context.epoch, config.max_staleness)
        self._deadline = CallDeadline(config.deadline_s)
        self._arithmetic = Arithmetic(nbytes)
        self._outcomes = OutcomeMetrics(context.swarm)
        self._runner = TaskRunner()

    @property
    def consensus_distance(self) -> float | None:
        """Estimate of sqrt(mean over nodes of ‖x_i − x̄‖²) from the vectors that were exchanged."""
        return self._outcomes.consensus_distance

    @property
    def outcomes(self) -> dict[str, int]:
        """Exchanges so far, by how they ended."""
        return self._outcomes.outcomes

    async def start(self) -> None:
        """Begin."""
        self._runner.start(self._run(), *self._beside())

    async def stop(self, timeout_s: float) -> None:
        """Finish the exchange in flight, waiting at most ``timeout_s``, and end."""
        await self._runner.stop(timeout_s)
        await self._arithmetic.close()

    async def watch(self) -> None:
        """Wait until the strategy is stopped; raise what ended it before: a bug of ours."""
        await self._runner.watch()

    def updated(self, updates: int) -> None:
        """The learner made ``updates`` more updates."""
        self._core.updated(updates)
        self._runner.news.set()

    @abstractmethod
    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a peer's call."""

    @abstractmethod
    async def _turn(self) -> bool:
        """Do the exchange that is to be done now; False when there is none."""

    def _beside(self) -> list[Coroutine[Any, Any, None]]:
        """What runs beside the loop, for ever."""
        return []

    async def _run(self) -> None:
        while not self._runner.stopping:
            if not await self._turn():
                await self._runner.rest(self._core.rest_s(self._clock.monotonic()))

    def _may_begin(self, now_s: float, members: int) -> bool:
        """Whether to begin an exchange: one is due, none too many, and there are members and a state."""
        enough = 0 < self._max_exchanges <= self._outcomes.count(self.DONE)
        early = members < self._start_at_members
        if enough or early or not self._core.due(now_s) or self._swarm.summary() is None:
            return False
        self._start_at_members = 0
        return True

    async def _call(
        self,
        to: Address,
        peer: str,
        route: str,
        head: msgspec.Struct,
        *,
        vector: memoryview,
        into: VectorBuffer | None = None,
    ) -> Answer:
        """Send a peer a vector, with the deadline that follows the calls before."""
        return await self._transport.call(
            to,
            peer,
            route,
            msgspec.msgpack.encode(head),
            vector=vector,
            into=into,
            deadline_s=self._deadline.seconds,
            lane="bulk",
        )

    async def _usable(self, work: Callable[[], None]) -> bool:
        """Do ``work`` on our own parameters; False when they can't be used (poisoned ones are healed)."""
        try:
            await self._arithmetic.run(work)
        except PoisonedVectorError as error:
            self._swarm.heal(f"our own parameters are unusable: {error}")
            return False
        except TensorError:
            return False
        return True

    def _ended(self, peer: str, report: RoundReport, began_s: float, *, busy_again: bool = True) -> None:
        """Note how an exchange that this node began with ``peer`` has ended.

        Args:
            busy_again: whether another one begins soon where the peer was busy.
        """
        now_s = self._clock.monotonic()
        took_s, done = now_s - began_s, report.outcome == self.DONE
        self._deadline.note("ok" if done else report.outcome, took_s)
        self._outcomes.ended(replace(report, seconds=took_s))
        if done or report.outcome == "unchanged":
            self._core.mixed(peer)
        elif report.outcome == "busy":
            if busy_again:
                self._core.busy(now_s, took_s)
        else:
            self._core.failed(peer, now_s, unready=report.unready)
