"""Where a node stands among its neighbours: the view, the round, and what both roles of an exchange need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2pdrl.config.strategy import DsgdConfig
from p2pdrl.strategies.arithmetic import Arithmetic
from p2pdrl.strategies.door import Door
from p2pdrl.strategies.group.service import Group
from p2pdrl.strategies.judgement import Summary
from p2pdrl.strategies.neighbours.messages import NeighbourHead, Position
from p2pdrl.strategies.neighbours.mixing import measure
from p2pdrl.strategies.neighbours.neighbourhood import Line, Neighbourhood
from p2pdrl.strategies.neighbours.offers import Offer
from p2pdrl.strategies.neighbours.sent import SentMessages
from p2pdrl.strategies.neighbours.stage import Met, Stage
from p2pdrl.strategies.pairwise.pair import Bounds
from p2pdrl.strategies.patience import Patience
from p2pdrl.strategies.protocol import Context
from p2pdrl.transport.protocol import Refusal

__all__ = ["Seat"]

REMEMBERED = 16
"""Rounds of which we know when they began, to learn how late the late ones are."""


class Seat:
    """One node's place.

    Args:
        config: the strategy's options.
        context: what the node gives.
        group: its views.
        heavy: runs arithmetic.
        max_nbytes: of the longest message.
        unsure: told of each edge in which one side may have moved alone.
        distance: told how far a neighbour's parameters were.

    Attributes:
        at: the last round that was begun.
        seen: the greatest number that neighbours were heard to be at.
        stage: the round under way.
        offer: what it mixes.
        sent: our messages of the last rounds.
        missed_s: how long rounds have waited in vain for each neighbour, since the last that it came to.
    """

    def __init__(
        self,
        config: DsgdConfig,
        context: Context,
        group: Group,
        heavy: Arithmetic,
        max_nbytes: int,
        *,
        unsure: Callable[[str], None],
        distance: Callable[[float], None],
    ) -> None:
        self.config, self.context, self.group = config, context, group
        self.me, self.swarm, self.clock = context.swarm.node_id, context.swarm, context.clock
        self.unsure, self._distance, self._heavy = unsure, distance, heavy
        self.door = Door(context.swarm, context.epoch, config.max_staleness)
        clip = config.clip_distance if config.mixing == "clipped" else None
        self._bounds = Bounds(context.max_abs, config.max_distance, clip)
        self._max_nbytes = max_nbytes
        self.sent = SentMessages(max_nbytes)
        self.hood: Neighbourhood | None = None
        self.at, self.seen = Position(-1, 1), 0
        self.stage: Stage | None = None
        self.offer: Offer | None = None
        self.patience = Patience(config.deadline_s)
        self.stopping = False
        self.missed_s: dict[str, float] = {}
        self._began_s: dict[Position, float] = {}
        self._changed = asyncio.Event()

    @property
    def next_number(self) -> int:
        """Number of the next round."""
        return max(self.at.number + 1, self.seen)

    def enter(self, hood: Neighbourhood) -> None:
        """A view is in force."""
        if self.hood is not None:
            hood.inherit(self.hood)
        self.hood = hood
        self.at, self.seen = Position(hood.first - 1, 1), hood.first
        self._began_s.clear()
        living = self.swarm.alive()
        self.missed_s = {peer: missed_s for peer, missed_s in self.missed_s.items() if peer in living}
        self.notify()

    def leave(self) -> None:
        """The view is over, or the strategy stops: the round under way ends with the edges that it has."""
        if self.stage is not None:
            self.stage.cut("regrouped", regrouped=True)
        self.notify()

    def begin(self, stage: Stage, offer: Offer) -> None:
        """A round begins."""
        self.stage, self.offer, self.at = stage, offer, stage.position
        self._began_s[stage.position] = stage.began_s
        while len(self._began_s) > REMEMBERED:
            del self._began_s[min(self._began_s)]
        self.notify()

    def end(self) -> None:
        """It has ended."""
        self.stage = self.offer = None
        self.notify()

    def came(self, stage: Stage, met: Met) -> None:
        """An edge counts."""
        self.patience.observe(self.clock.monotonic() - stage.began_s)
        if stage.content == "parameters":
            self._distance(met.edge.distance)

    def came_late(self, position: Position) -> None:
        """A neighbour came to a round that is over."""
        began_s = self._began_s.get(position)
        if began_s is not None:
            self.patience.observe(self.clock.monotonic() - began_s)

    def line(self, hood: Neighbourhood, peer: str) -> Line:
        """The edge to a neighbour."""
        return hood.line(peer, self.context.size, self._max_nbytes)

    async def read(self, stage: Stage, line: Line, peer: str, nbytes: int, theirs: Summary) -> Met:
        """Read and check the vector in an edge's buffer.

        Raises:
            PoisonedVectorError: it is unusable.
            WireError: it is malformed.
            Refusal: the round has ended (408).
        """
        room, offer = line.room(nbytes), self.offer
        if room is None or offer is None or self.stage is not stage:
            raise Refusal(408, f"round {stage.number} has ended")
        mine, length, weight = offer.mine, offer.my_length, stage.weights[peer]

        def work() -> Met:
            offer.read(room, line.theirs)
            edge = measure(mine, length, line.theirs, weight, self._bounds)
            return Met(edge, theirs.policy_version, line.theirs)

        return await self._heavy.run(work)

    def head(
        self, stage: Stage, offer: Offer, mine: Summary, *, wait_s: float = 0.0, verdict: str = "mix"
    ) -> NeighbourHead:
        """What goes before our message."""
        return NeighbourHead(stage.key, stage.number, offer.content, offer.wire, mine, wait_s, verdict)

    async def change(self) -> None:
        """Wait until something in here changes.

        Raises:
            Refusal: the strategy stops (503).
        """
        if self.stopping:
            raise Refusal(503, "the strategy stops")
        await self._changed.wait()

    def notify(self) -> None:
        """Something in here has changed."""
        self._changed.set()
        self._changed = asyncio.Event()
