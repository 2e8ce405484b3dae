"""How pipelines agree: their ranks 0 average in pairs, as all nodes do under AD-PSGD.

Deltas wait on rank 0's board until the pipeline's next state copy, when its learner takes them and gives the
result to all ranks.
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


class _Rank0Swarm:
    """The node as its gossip sees it: nobody lives but the other pipelines' rank 0."""

    def __init__(self, swarm: SwarmView) -> None:
        self._node = swarm
        self.rank0s: frozenset[str] = frozenset()
        self.node_id = swarm.node_id
        self.name_of, self.steps_since = swarm.name_of, swarm.steps_since
        self.adopt, self.adopted, self.heal = swarm.adopt, swarm.adopted, swarm.heal
        self.strike, self.quarantined, self.trust = swarm.strike, swarm.quarantined, swarm.trust
        self.observed, self.round, self.tell = swarm.observed, swarm.round, swarm.tell

    def alive(self) -> dict[str, Address]:
        return {peer: at for peer, at in self._node.alive().items() if peer in self.rank0s}

    def summary(self) -> Summary | None:
        return self._node.summary()


class Rank0Gossip:
    """Gossip with the other pipelines' rank 0, while we are rank 0 of ours."""

    def __init__(self, config: PipelineConfig, context: StrategyContext) -> None:
        self._config = AdpsgdConfig(
            every_updates=0,
            every_s=config.gossip_every_s,
            min_interval_s=min(MIN_INTERVAL_S, config.gossip_every_s),
            deadline_s=config.deadline_s,
        )
        self._swarm = _Rank0Swarm(context.swarm)
        self._context = replace(context, swarm=self._swarm, start_at_members=0)
        self._gossip: AdpsgdStrategy | None = None
        self._past: Counter[str] = Counter()
        self._distance: float | None = None
        self._is_rank0 = False

    @property
    def outcomes(self) -> Counter[str]:
        """Exchanges by outcome."""
        now = Counter[str]() if self._gossip is None else Counter(self._gossip.outcomes)
        return self._past + now

    @property
    def distance(self) -> float | None:
        """Estimate of how far pipelines are apart; None before any met."""
        now = None if self._gossip is None else self._gossip.consensus_distance
        return self._distance if now is None else now

    def set_peers(self, rank0s: tuple[str, ...]) -> None:
        """Say who is rank 0 of a pipeline; nobody else takes part."""
        me = self._swarm.node_id
        self._swarm.rank0s = frozenset(rank0s) - {me}
        self._is_rank0 = me in rank0s

    async def begin(self) -> asyncio.Task[None]:
        """Begin, or go on; return what ends with the gossip, and raises a bug of ours."""
        if self._gossip is None:
            self._gossip = AdpsgdStrategy(self._config, self._context)
            await self._gossip.start()
        return asyncio.create_task(self._gossip.watch(), name="rank-0 gossip")

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
        """Serve an exchange of another pipeline's rank 0.

        Raises:
            Refusal: see `AdpsgdStrategy.answer`; 409, we are rank 0 of none of several pipelines; 423, not at
                the moment.
        """
        if not self._swarm.rank0s or not (self._is_rank0 or self._gossip):
            raise Refusal(
                409, "only rank 0 of one of several pipelines exchanges parameters, which this node isn't"
            )
        if self._gossip is None:
            raise Refusal(BUSY, "this node is rank 0 of no pipeline at the moment")
        return await self._gossip.answer(incoming)
