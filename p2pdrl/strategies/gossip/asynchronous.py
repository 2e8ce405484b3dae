"""What asynchronous gossip shares: one core that says when to begin, a loop, and what became of exchanges.

`adpsgd`, `sgp` and `gala` stand on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from p2pdrl.config.strategy import AdpsgdConfig, GalaConfig, Mode, SgpConfig
from p2pdrl.strategies.admission import ExchangeAdmission
from p2pdrl.strategies.call_timeouts import CallDeadline
from p2pdrl.strategies.gossip.exchange_timer import ExchangeTimer
from p2pdrl.strategies.offload import Arithmetic
from p2pdrl.strategies.protocol import RoundReport, Strategy, StrategyContext
from p2pdrl.strategies.task_runner import OutcomeMetrics, TaskRunner
from p2pdrl.transport.protocol import Incoming, Reply

__all__ = ["AsynchronousStrategy"]

Core = TypeVar("Core", bound=ExchangeTimer)


class AsynchronousStrategy(Strategy, ABC, Generic[Core]):
    """Exchanges that begin by themselves, now and then, while the learner goes on; see `Strategy`.

    Args:
        config: the strategy's options.
        context: what the node gives.
        core: says when to begin, and with whom.
        nbytes: of the vectors that are worked on.
    """

    mode: Mode = "gossip"
    DONE: ClassVar[str]
    """Outcome of an exchange that we began and that went well."""

    def __init__(
        self, config: AdpsgdConfig | SgpConfig | GalaConfig, context: StrategyContext, core: Core, nbytes: int
    ) -> None:
        self._swarm = context.swarm
        self._board = context.learner.board
        self._transport = context.transport
        self._clock = context.clock
        self._core = core
        self._max_exchanges = context.max_exchanges
        self._start_at_members = context.start_at_members
        self._admission = ExchangeAdmission(context.swarm, context.epoch, config.max_staleness)
        self._deadline = CallDeadline(config.deadline_s)
        self._heavy = Arithmetic(nbytes)
        self._outcomes = OutcomeMetrics(context.swarm)
        self._runner = TaskRunner()

    @property
    def consensus_distance(self) -> float | None:
        """Estimate of sqrt(mean over nodes of ‖x_i − x̄‖²) from the vectors that we met."""
        return self._outcomes.consensus_distance

    @property
    def outcomes(self) -> dict[str, int]:
        """Exchanges so far, by how they ended."""
        return self._outcomes.outcomes

    async def start(self) -> None:
        """Begin."""
        self._runner.start(self._run(), *self._beside())

    async def stop(self, timeout_s: float) -> None:
        """Finish the exchange in flight, at most ``timeout_s`` long, and end."""
        await self._runner.stop(timeout_s)
        await self._heavy.close()

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

    def _ended(self, peer: str, report: RoundReport, began_s: float) -> None:
        """Note how an exchange with ``peer`` that we began has ended."""
        now_s = self._clock.monotonic()
        took_s, done = now_s - began_s, report.outcome == self.DONE
        self._deadline.note("ok" if done else report.outcome, took_s)
        self._outcomes.ended(replace(report, seconds=took_s))
        if done or report.outcome == "unchanged":
            self._core.mixed(peer)
        elif report.outcome == "busy":
            self._core.busy(now_s, took_s)
        else:
            self._core.failed(peer, now_s, unready=report.unready)
