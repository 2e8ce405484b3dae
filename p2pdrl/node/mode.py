"""The mode in force on this node: its strategy, changed for another when the swarm's record says so.

`training` keeps one, and `record_follower` changes it. A change waits for the exchange in flight. A strategy
that can't run here leaves the node training alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from p2pdrl.config.learner_mode import LearnerMode, learner_mode_of
from p2pdrl.config.strategy import LocalConfig, StrategyConfig
from p2pdrl.errors import ConfigError
from p2pdrl.node import settings
from p2pdrl.node.accounting.exchanges import Accounting
from p2pdrl.strategies.local import LocalStrategy
from p2pdrl.strategies.protocol import EXCHANGE_END_S, Strategy, StrategyContext
from p2pdrl.strategies.registry import build
from p2pdrl.transport.pipe.ticket import PipeReply
from p2pdrl.transport.protocol import Incoming, Reply

__all__ = ["ModeInForce"]

LONGEST_END_S = 15.0
"""The longest that a strategy has for its end: it may have to wait for an update, or for a whole state."""


class ModeInForce:
    """The strategy in force, from one mode to the next.

    Args:
        context: from a mode's stamp to what its strategy is given.
        change: has the learners work under a learner mode, from the mode of a stamp on.
        accounting: what each strategy cost.
        build: makes a strategy of its options and what it is given.

    Attributes:
        strategy: it; `LocalStrategy` before the first.
        config: its options.
        epoch: of the mode, a `settings.stamp`, so that two modes proposed at once never mix.
    """

    def __init__(
        self,
        context: Callable[[int], StrategyContext],
        change: Callable[[LearnerMode, int], Awaitable[None]],
        accounting: Accounting,
        build: Callable[[StrategyConfig, StrategyContext], Strategy] = build,
    ) -> None:
        self._build = build
        self._context = context
        self._change = change
        self._accounting = accounting
        self._past: Counter[str] = Counter()
        self._used = asyncio.Event()
        self.strategy: Strategy = LocalStrategy()
        self.config: StrategyConfig = LocalConfig()
        self.epoch = 0

    @property
    def outcomes(self) -> Counter[str]:
        """Exchanges by outcome, over all strategies of this boot."""
        return self._past + Counter(self.strategy.outcomes)

    @property
    def members(self) -> Sequence[str]:
        """Node ids of those whom our learner works with, in their order, as far as the strategy says so."""
        return self.strategy.members

    async def use(self, config: StrategyConfig, epoch: int) -> None:
        """Change to another strategy, after the exchange in flight.

        Args:
            config: its options.
            epoch: stamp of the mode record.

        Raises:
            ConfigError: this node can't run it; until the next call it trains alone.
        """
        await self.strategy.stop(min(self.strategy.ends_within_s, LONGEST_END_S))
        self._past.update(self.strategy.outcomes)
        self._accounting.saw_distance(self.strategy.consensus_distance)
        interim = LocalStrategy()
        self.strategy, self.config = interim, LocalConfig()
        self.epoch = epoch
        strategy = self._build(config, self._context(epoch))
        await self._change(learner_mode_of(config), epoch)
        self.strategy = strategy
        await interim.stop(0.0)  # who began to watch it meanwhile goes on to this one
        try:
            await strategy.start()
        except ConfigError:
            self.strategy = LocalStrategy()
            await strategy.stop(0.0)
            raise
        self.config = config
        self._accounting.entered(config, settings.epoch_of(epoch))
        self._used.set()

    async def watch(self) -> None:
        """Wait for ever, from one strategy to the next; raise what ended one: a bug of ours."""
        while True:
            self._used.clear()
            await self.strategy.watch()
            await self._used.wait()

    async def answer(self, incoming: Incoming) -> Reply:
        """Pass a peer's call on to the strategy.

        Raises:
            Refusal: the strategy refuses.
        """
        return await self.strategy.answer(incoming)

    async def accept(self, incoming: Incoming) -> PipeReply:
        """Pass a peer's request for a pipe on to the strategy.

        Raises:
            Refusal: the strategy refuses, or has no use for pipes (409).
        """
        return await self.strategy.accept(incoming)

    async def stop(self) -> None:
        """Finish the exchange in flight, soon: when the node leaves, others wait their turn."""
        await self.strategy.stop(EXCHANGE_END_S)
