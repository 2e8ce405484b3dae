"""How pipelines agree: their heads average in pairs, as every node does under AD-PSGD.

A head's deltas wait on its board until the pipeline's next state copy, when its learner takes them and gives
the result to all ranks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

from p2pdrl.config.strategy import AdpsgdConfig, PipelineConfig
from p2pdrl.group.compatibility import Summary
from p2pdrl.strategies.admission import BUSY
from p2pdrl.strategies.gossip.adpsgd import ROUTE, AdpsgdStrategy
from p2pdrl.strategies.protocol import StrategyContext, SwarmView
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply

__all__ = ["ROUTE", "Rank0Gossip"]

MIN_INTERVAL_S = 0.05


class _Among:
    """The node as its gossip sees it: nobody lives but the other heads."""

    def __init__(self, swarm: SwarmView) -> None:
        self._swarm = swarm
        self.heads: frozenset[str] = frozenset()
        self.node_id = swarm.node_id
        self.name_of, self.steps_since = swarm.name_of, swarm.steps_since
        self.adopt, self.adopted, self.heal = swarm.adopt, swarm.adopted, swarm.heal
        self.strike, self.quarantined = swarm.strike, swarm.quarantined
        self.observed, self.round, self.tell = swarm.observed, swarm.round, swarm.tell

    def alive(self) -> dict[str, Address]:
        return {peer: at for peer, at in self._swarm.alive().items() if peer in self.heads}

    def summary(self) -> Summary | None:
        return self._swarm.summary()


class Rank0Gossip:
    """Gossip with the other heads, while we are one.

    Args:
        config: the strategy's options.
        context: what the node gives.
    """

    def __init__(self, config: PipelineConfig, context: StrategyContext) -> None:
        self._config = AdpsgdConfig(
            every_updates=0,
            every_s=config.gossip_every_s,
            min_interval_s=min(MIN_INTERVAL_S, config.gossip_every_s),
            deadline_s=config.deadline_s,
        )
        self._among = _Among(context.swarm)
        self._context = replace(context, swarm=self._among, start_at_members=0)
        self._gossip: AdpsgdStrategy | None = None
        self._past: Counter[str] = Counter()
        self._distance: float | None = None
        self._is_head = False

    @property
    def outcomes(self) -> Counter[str]:
        """Exchanges by outcome."""
        now = Counter[str]() if self._gossip is None else Counter(self._gossip.outcomes)
        return self._past + now

    @property
    def distance(self) -> float | None:
        """Estimate of how far heads are apart; None before they met."""
        now = None if self._gossip is None else self._gossip.consensus_distance
        return self._distance if now is None else now

    def with_whom(self, heads: tuple[str, ...]) -> None:
        """Say who the heads are; nobody is met by one who isn't."""
        me = self._among.node_id
        self._among.heads = frozenset(heads) - {me}
        self._is_head = me in heads

    async def begin(self) -> asyncio.Task[None]:
        """Begin to meet them, or go on; return what ends with it, and raises a bug of ours."""
        if self._gossip is None:
            self._gossip = AdpsgdStrategy(self._config, self._context)
            await self._gossip.start()
        return asyncio.create_task(self._gossip.watch(), name="heads")

    async def end(self, timeout_s: float) -> None:
        """End the exchange in flight, at most ``timeout_s`` long; nothing is posted afterwards."""
        gossip, self._gossip = self._gossip, None
        if gossip is not None:
            try:
                await gossip.stop(timeout_s)
            except asyncio.CancelledError:
                await gossip.stop(0.0)
                raise
            self._past.update(gossip.outcomes)
            self._distance = gossip.consensus_distance or self._distance

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve another head's exchange.

        Raises:
            Refusal: see `AdpsgdStrategy.answer`; 409, we are none
                of several; 423, we head nothing at the moment.
        """
        if not self._among.heads or not (self._is_head or self._gossip):
            raise Refusal(409, "this node isn't one of several heads, who alone exchange parameters")
        if self._gossip is None:
            raise Refusal(BUSY, "this node heads no pipeline at the moment")
        return await self._gossip.answer(incoming)
