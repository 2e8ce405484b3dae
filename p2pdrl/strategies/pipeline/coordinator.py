"""The head's part in the forming of a pipeline: it asks its ranks, plans, and has everybody take their place.

    offers → the newest state → plan → an order to each rank → our own learner's

Whoever fails is named, and the caller asks for a view without it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from functools import partial
from typing import Any

import msgspec

from p2pdrl.config.strategy import PipelineConfig
from p2pdrl.errors import ConfigError, PeerUnreachableError, TransportError, WorkerError
from p2pdrl.group.view import ViewKey
from p2pdrl.pipeline.layers import FREE, Links
from p2pdrl.pipeline.order import StageSide
from p2pdrl.pipeline.ordering import MOST_PEERS
from p2pdrl.strategies.pipeline.backend import BackendFallback, Choice, chosen
from p2pdrl.strategies.pipeline.calls import Peers, Unformed
from p2pdrl.strategies.pipeline.connections import RankConnections
from p2pdrl.strategies.pipeline.generation import Generation, LearnerSide
from p2pdrl.strategies.pipeline.layout import PipelineMembers
from p2pdrl.strategies.pipeline.link_probe import LinkBook
from p2pdrl.strategies.pipeline.messages import (
    MAX_GENERATION,
    Form,
    PipeHead,
    PipelineDone,
    RankOffer,
    RankRequest,
    as_reason,
)
from p2pdrl.strategies.pipeline.planning import Design, RankCandidate, design
from p2pdrl.strategies.pipeline.port import Pipes
from p2pdrl.strategies.pipeline.rank_setup import (
    FORM_S,
    MEET_S,
    READY_S,
    closes_circle,
    generation_of,
    newest,
    offered,
    still_holds,
)
from p2pdrl.strategies.protocol import StrategyContext
from p2pdrl.transport.pipe.ticket import Pipe, PipeReply
from p2pdrl.transport.protocol import Refusal

__all__ = ["Coordinator"]

ADOPT_TRIES = 2
OWN_STATE_S = 10.0
OWN_PAUSE_S = 0.1
INLINE_CUTS = 50_000
"""Planning that looks at more of them goes to a thread: so many take some milliseconds."""
UNFIT_S = 30.0
"""A model that fits nowhere is tried again after this: memory may have become free."""


class Coordinator:
    """Forms one pipeline in one view.

    Args:
        context: what the node gives.
        config: the strategy's options.
        pipes: opens pipes.
        side: our learner.
        peers: the other members.
        links: what is known of the links.
        key: of the view.
        place: the pipeline; we are its head.
        offer_s: the longest that a rank may take to end what it did before.
        fallback: of torch, where that is chosen.

    Attributes:
        design: what was planned; None before.
        choice: what carries activations.
    """

    def __init__(
        self,
        context: StrategyContext,
        config: PipelineConfig,
        *,
        pipes: Pipes,
        side: LearnerSide,
        peers: Peers,
        links: LinkBook,
        key: ViewKey,
        place: PipelineMembers,
        offer_s: float,
        fallback: BackendFallback,
    ) -> None:
        self._context, self._config, self._side, self._peers = context, config, side, peers
        self._pipes = pipes
        self._links, self._key, self._place, self._offer_s = links, key, place, offer_s
        self._fallback = fallback
        self._me = context.swarm.node_id
        self._connections: RankConnections | None = None
        self.design: Design | None = None
        self.choice = Choice("stream")

    async def form(self) -> Generation:
        """Do it all.

        Raises:
            Unformed: somebody is gone, something isn't ready in time, or the model fits nowhere.
        """
        offers = await self._ask()
        await self._take_newest(offers)
        self.design = await self.plan(offers)
        standings = [(self._name(peer), offers[peer]) for peer in self.design.members]
        self.choice = chosen(self._config.backend, standings, self._fallback.failed)
        try:
            return await self._order(offers, self.design)
        except (WorkerError, TransportError, ConfigError, Refusal) as error:
            raise Unformed(str(error)) from error

    def accept(self, sender: str, head: PipeHead) -> PipeReply:
        """Take the last rank's pipe, where the schedule closes the circle.

        Raises:
            Refusal: see `RankConnections.accept`; 503, we haven't planned yet.
        """
        if self._connections is None:
            raise Refusal(503, "this pipeline isn't being formed here yet")
        return self._connections.accept(sender, head)

    # One after the other

    async def _ask(self) -> dict[str, RankOffer]:
        mine = await self._own()

        async def ask(peer: str) -> RankOffer:
            return await self._peers.call(
                peer, RankRequest(self._key), RankOffer, "offer", deadline_s=self._offer_s
            )

        found = await _together([ask(peer) for peer in self._place.others])
        offers = {self._me: mine, **dict(zip(self._place.others, found, strict=True))}
        for peer, offer in offers.items():
            if offer.blocks != mine.blocks:
                why = f"{self._name(peer)} has a policy of {offer.blocks} blocks, we of {mine.blocks}"
                raise Unformed(why, peer)
            if self._config.backend == "torch" and not offer.trusted and len(offers) > 1:
                why = f"{self._name(peer)} isn't on a trusted network, which backend = torch needs"
                raise Unformed(why, peer)
        return offers

    async def _own(self) -> RankOffer:
        until_s = self._context.clock.monotonic() + OWN_STATE_S
        while True:
            try:
                return await offered(self._context, self._side)
            except Refusal as refusal:
                if self._context.clock.monotonic() >= until_s:
                    raise Unformed(f"we have no state: {refusal.reason}") from refusal
            await asyncio.sleep(OWN_PAUSE_S)

    async def _take_newest(self, offers: dict[str, RankOffer]) -> None:
        """Begin with the newest state of all ranks."""
        donor = newest(self._me, offers)
        theirs, mine = offers[donor], offers[self._me]
        if donor == self._me or (theirs.digest, theirs.lineage) == (mine.digest, mine.lineage):
            return
        why = f"{self._name(donor)} has the newest state of this pipeline: version {theirs.policy_version}"
        for _ in range(ADOPT_TRIES):
            if await self._context.swarm.adopted(donor, theirs.lineage, why):
                return
        raise Unformed(f"{self._name(donor)} has the newest state and doesn't give it", donor)

    async def plan(self, offers: dict[str, RankOffer]) -> Design:
        """Cut the model over the ranks that made offers, by their speeds, memory and links.

        Raises:
            Unformed: there is no cut that all have memory for.
        """
        members = self._place.members
        links: Links = FREE
        if len(members) > 1:
            links = await self._links.between(self._peers, members)
        ranks = [
            RankCandidate(peer, self._name(peer), offers[peer].seconds, offers[peer].memory_bytes or math.inf)
            for peer in members
        ]
        context = self._context
        work = partial(
            design,
            self._config,
            self._side.layers,
            ranks,
            links,
            minibatches=context.minibatches,
            rows=context.rows,
        )
        try:
            # Cancelling leaves the thread to itself: nobody hears what it finds, and no more comes of it.
            return await asyncio.to_thread(work) if self._is_long(len(ranks)) else work()
        except ConfigError as error:
            raise Unformed(str(error), for_s=UNFIT_S) from error

    def _is_long(self, ranks: int) -> bool:
        """Whether the plan takes so long that others would wait: there are many orders, or many cuts."""
        orders = math.factorial(min(ranks, MOST_PEERS) - 1)
        return orders * (len(self._side.layers) + 1) ** 2 > INLINE_CUTS

    async def _order(self, offers: dict[str, RankOffer], planned: Design) -> Generation:
        """Give everybody their place.

        Raises:
            Unformed: a rank didn't take it.
            WorkerError: our learner didn't.
            TransportError: a pipe couldn't be opened.
        """
        state = await self._own()
        last = max(self._side.last, *(offer.generation for offer in offers.values()))
        form = Form(
            key=self._key,
            generation=min(max(self._key.generation, last + 1), MAX_GENERATION - 1),
            members=planned.members,
            blocks=planned.plan.blocks,
            cuts=planned.plan.cuts,
            microbatches=planned.plan.microbatches,
            lineage=state.lineage,
            policy_version=state.policy_version,
            digest=state.digest,
            alone=planned.alone,
            backend=self.choice.backend,
            step_s=min(planned.step_s, 1e6),
            bubble=planned.bubble,
            why=as_reason(
                planned.why if planned.alone or not self.choice.why else f"{planned.why}; {self.choice.why}"
            ),
        )
        self._side.last = form.generation  # though it may come to nothing: ranks may have heard of it
        if form.backend == "torch" and len(planned.members) > 1 and not planned.alone:
            return await self._meet(form)
        members = (self._me,) if form.alone else form.members
        circle = closes_circle(self._config, len(members))
        generation = generation_of(self._config, form, 0)
        connections = self._connections = RankConnections(
            self._pipes, form.key, form.generation, members, 0, circle=circle
        )
        pipes: dict[StageSide, Pipe] = {}
        begun = False
        try:
            await _together([self._complete(connections, pipes), *self._places(form)])
            await still_holds(self._context, form.digest, pipes)
            self._side.begin(generation, pipes)
            begun = True
            await generation.until_ready(READY_S)
        finally:
            await connections.close()
            if not begun:
                for pipe in pipes.values():
                    pipe.close()
        generation.formed = True
        return generation

    async def _meet(self, form: Form) -> Generation:
        """The same with torch.distributed: our learner opens the store that all others come to."""
        hosts = [self._peers.address(peer).host for peer in form.members[1:]]
        generation = generation_of(self._config, form, 0, hosts[0])
        self._side.begin(generation, {})
        try:
            port = await generation.port(MEET_S)
            places = self._places(msgspec.structs.replace(form, port=port))
            await _together([generation.until_ready(FORM_S), *places])
        except (WorkerError, Unformed) as error:
            self._fallback.unmet(form.generation, str(error))
            raise
        except asyncio.CancelledError:  # a rank that failed may have asked for another view already
            if generation.ended.done():
                self._fallback.unmet(form.generation, generation.ended.result().why)
            raise
        generation.formed = True
        return generation

    def _places(self, form: Form) -> list[Coroutine[Any, Any, Any]]:
        return [
            self._peers.call(peer, form, PipelineDone, "readiness", deadline_s=FORM_S)
            for peer in form.members[1:]
        ]

    async def _complete(self, connections: RankConnections, pipes: dict[StageSide, Pipe]) -> None:
        """Put our pipes into ``pipes`` as soon as there are all: somebody else's failure may follow."""
        try:
            pipes.update(await connections.complete(self._peers.address, FORM_S))
        except PeerUnreachableError as error:
            raise Unformed(str(error), connections.next or "") from error

    def _name(self, peer: str) -> str:
        return self._context.swarm.name_of(peer)


async def _together(jobs: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run all; when one fails or we are cancelled, end the others before that goes on."""
    tasks = [asyncio.create_task(job, name="form") for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
