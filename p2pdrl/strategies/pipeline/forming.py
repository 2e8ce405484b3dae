"""How a pipeline is formed: the coordinator plans and orders, every other rank takes its part."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil

from p2pdrl.config.strategy import PipelineConfig
from p2pdrl.errors import ConfigError, PeerUnreachableError, TensorError, TransportError, WorkerError
from p2pdrl.group.compatibility import lineage_of_most_words
from p2pdrl.group.service import Group
from p2pdrl.group.view import ViewKey
from p2pdrl.pipeline.layers import FREE, Links
from p2pdrl.pipeline.partition import MOST_PEERS
from p2pdrl.pipeline.plan import Rendezvous, StageOrder, StageSide
from p2pdrl.strategies.offload import heavy
from p2pdrl.strategies.pipeline.backend import BackendFallback, Choice, chosen
from p2pdrl.strategies.pipeline.connections import BLAMELESS, RankConnections, Unformed, call_rank
from p2pdrl.strategies.pipeline.events import PipelineEvents
from p2pdrl.strategies.pipeline.generation import Generation, LearnerSide
from p2pdrl.strategies.pipeline.layout import PipelineMembers
from p2pdrl.strategies.pipeline.link_probe import LinkTable
from p2pdrl.strategies.pipeline.messages import (
    MAX_GENERATION,
    Form,
    PipelineDone,
    RankOffer,
    RankRequest,
    as_reason,
)
from p2pdrl.strategies.pipeline.planning import Design, RankCandidate, design, schedule_of
from p2pdrl.strategies.pipeline.port import Pipes
from p2pdrl.strategies.pipeline.rank0_gossip import Rank0Gossip
from p2pdrl.strategies.protocol import StrategyContext
from p2pdrl.strategies.task_runner import cancel_and_wait, together
from p2pdrl.tensors.board import DaemonBoard
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.transport.pipe.ticket import Pipe
from p2pdrl.transport.protocol import Refusal

__all__ = [
    "FORM_S",
    "Coordinator",
    "PipelineParts",
    "RankSetup",
    "generation_of",
    "newest",
    "read_state",
    "usable_bytes",
]


@dataclass(slots=True)
class PipelineParts:
    """What of a node's pipelines outlives a view.

    Attributes:
        side: our learner.
        gossip: with other pipelines' rank 0.
        links: what is known of them.
        events: what people are told.
        fallback: of torch, where that is chosen.
        failures: in a row, since the last state copy.
    """

    config: PipelineConfig
    context: StrategyContext
    pipes: Pipes
    side: LearnerSide
    gossip: Rank0Gossip
    links: LinkTable
    events: PipelineEvents
    fallback: BackendFallback
    failures: int = 0


PART = 0.8
"""Of what is available; the rest is for what nobody has counted, and for other processes."""
HOST = "cpu"


def usable_bytes(device: str, on_gpu: int = 0) -> int:
    """Return the bytes that a stage may take on a device now; 0 where nobody knows, which is no limit.

    Nodes that share a machine or a GPU see the same bytes, each of them all.

    Args:
        device: where the learner computes, as torch writes it.
        on_gpu: what it said of its GPU's memory when it was asked last, in bytes; 0 where it knows nothing.
    """
    available = psutil.virtual_memory().available if device == HOST else on_gpu
    return int(PART * available)


DIGEST_BYTES = 16


class HeldState(NamedTuple):
    """What is on a board, with all that was posted to it.

    Args:
        digest: of the parameters.
        policy_version: theirs.
    """

    digest: bytes
    policy_version: int


async def read_state(board: DaemonBoard, size: int) -> HeldState:
    """Read a board.

    Args:
        board: holds the parameters.
        size: D, float32 parameters.

    Raises:
        TensorError: there is nothing on it.
    """

    def work() -> HeldState:
        vector: Float32Array = np.empty(size, np.float32)
        version = board.now(vector).policy_version
        return HeldState(blake2b(vector.data.cast("B"), digest_size=DIGEST_BYTES).digest(), version)

    return await heavy(4 * size, work)


def newest(rank0: str, offers: Mapping[str, RankOffer]) -> str:
    """Return whose state all are to begin with.

    Which lineage stays, `group.compatibility` says; in it the highest policy version; of equals rank 0, then
    the lowest node id.

    Args:
        rank0: node id, among the offers.
        offers: of all ranks.
    """
    lineage = lineage_of_most_words((offer.lineage, offer.lineage_steps) for offer in offers.values())
    candidates = [peer for peer, offer in offers.items() if offer.lineage == lineage]
    return min(candidates, key=lambda peer: (-offers[peer].policy_version, peer != rank0, peer))


TORCH_S = (10.0, 30.0)
"""Least and longest wait for a neighbour with torch.distributed."""
COME_S = 30.0
"""Longest wait until all ranks have come to where they meet: some may be importing torch.distributed."""
IDLE_S = 600.0
"""Longest wait for the next minibatch, while rank 0 makes experience; that it lives is seen elsewhere."""


def generation_of(config: PipelineConfig, form: Form, rank: int, host: str = "") -> Generation:
    """Return the generation that an order makes of a rank's learner.

    Args:
        config: the strategy's options, the same at all ranks.
        form: the order.
        host: where the store of torch.distributed is; for rank 0 where any other rank is.

    Raises:
        ConfigError: the numbers don't fit each other, or our options.
    """
    ranks = 1 if form.alone else len(form.members)
    if form.alone and form.cuts:
        raise ConfigError("peers that compute by themselves hold all blocks")
    over_torch = form.backend == "torch" and ranks > 1
    if ranks > 1 and config.backend not in ("auto", form.backend):
        raise ConfigError(f"pipelines run over {config.backend} here, not over {form.backend}")
    timeout_s = config.deadline_s
    if over_torch:
        timeout_s = min(max(TORCH_S[0], timeout_s), TORCH_S[1])
    order = StageOrder(
        generation=form.generation,
        rank=0 if form.alone else rank,
        blocks=form.blocks,
        cuts=form.cuts,
        schedule=schedule_of(config, ranks),
        microbatches=form.microbatches,
        ranks=ranks,
        timeout_s=timeout_s,
        idle_timeout_s=IDLE_S,
        state_every=config.state_every,
        tune=config.microbatches == "auto",
        backend=form.backend if ranks > 1 else "stream",
        meeting=Rendezvous(host, form.port, COME_S) if over_torch else None,
        checkpoint_activations=config.checkpoint_activations,
    )
    _ = order.plan  # raises
    return Generation(order, form, rank)


def connections_of(parts: PipelineParts, form: Form, rank: int) -> RankConnections:
    """Return a rank's pipes: none where it computes by itself, or over torch.distributed."""
    me = parts.context.swarm.node_id
    members = (me,) if form.alone or form.port else form.members
    circle = schedule_of(parts.config, len(members)) == "interleaved"  # the last rank sends to rank 0
    return RankConnections(
        parts.pipes, form.key, form.generation, members, rank if len(members) > 1 else 0, circle=circle
    )


FORM_S = 120.0
"""The longest that a rank may take to be ready: most of it is for the whole state of a large model."""
READY_S = 10.0
"""The longest that its learner may take of that."""
MEET_S = COME_S + TORCH_S[1]
"""The same over torch.distributed, where all learners have to meet, and tell if that comes to nothing."""
ABSORB_S = 2.0
"""The longest that a learner at rest may take to absorb what was posted to its board."""
LOOK_S = 1.0
"""The longest that a learner may take to say how much of its GPU is free."""
POLL_S = 0.02
TRIES = 3
"""To take over rank 0's state."""


async def own_state(context: StrategyContext) -> HeldState:
    """Read what we hold, once the learner has taken what was posted to it.

    Raises:
        Refusal: 503, nothing, or not for the moment.
    """
    if context.swarm.summary() is None:
        raise Refusal(503, "no state yet, or another one is being taken")
    board, until_s = context.learner.board, context.clock.monotonic() + ABSORB_S
    # A learner that gets an order takes what is on the board for it, and not what waits behind that.
    while board.pending and context.clock.monotonic() < until_s:  # noqa: ASYNC110 - another process takes it
        await asyncio.sleep(POLL_S)
    if board.pending:
        raise Refusal(503, "the learner doesn't take what was posted to it")
    try:
        return await read_state(context.learner.board, context.size)
    except TensorError as error:
        raise Refusal(503, f"no state yet: {error}") from error


async def still_holds(context: StrategyContext, digest: bytes, pipes: Mapping[StageSide, Pipe]) -> None:
    """Make sure that a learner begins with what was agreed: the generation before may have moved it since.

    Args:
        digest: of the parameters.
        pipes: closed where this raises.

    Raises:
        Refusal: 503, it doesn't.
    """
    with contextlib.ExitStack() as stack:
        for pipe in pipes.values():
            stack.callback(pipe.close)
        if (await own_state(context)).digest == digest:
            stack.pop_all()
            return
    raise Refusal(503, "the learner's parameters changed meanwhile")


async def offered(context: StrategyContext, side: LearnerSide) -> RankOffer:
    """Return what we can contribute to a pipeline.

    Raises:
        Refusal: 503, there is no state yet.
    """
    state = await own_state(context)
    await side.look_again(LOOK_S)
    summary = context.swarm.summary()
    if summary is None:
        raise Refusal(503, "another state is being taken")
    return RankOffer(
        summary.lineage,
        summary.lineage_steps,
        state.policy_version,
        state.digest,
        side.last,
        side.seconds,
        len(side.layers),
        side.device[:64],
        context.trusted_network,
        usable_bytes(side.device, side.gpu_bytes),
        side.gpu[:64],
        context.direct,
    )


class RankSetup:
    """Takes our part in a pipeline that another node coordinates, in one view.

    Args:
        key: of the view; messages of another are refused.
        pipeline: as everybody computes it.

    Attributes:
        connections: our pipes, once something was ordered.
        settled: set once our learner is in place, or can't be.
        lost: why our own learner can't be; empty otherwise.
    """

    def __init__(self, parts: PipelineParts, group: Group, key: ViewKey, pipeline: PipelineMembers) -> None:
        self._parts, self._context, self._config = parts, parts.context, parts.config
        self._side, self._group = parts.side, group
        self.key, self.pipeline = key, pipeline
        self.settled = asyncio.Event()
        self.lost = ""
        self._me = parts.context.swarm.node_id
        self._form: Form | None = None
        self._task: asyncio.Task[Generation] | None = None
        self.connections: RankConnections | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    async def offer(self) -> RankOffer:
        """Return what we can contribute, and, where torch might be chosen, whether we reach all others.

        Raises:
            Refusal: 503, there is no state yet.
        """
        mine = await offered(self._context, self._side)
        if not (mine.trusted and mine.gpu and mine.direct):
            return mine
        others = [member for member in self.pipeline.members if member != self._me]
        alive = await asyncio.gather(*map(self._group.lives, others))
        return msgspec.structs.replace(mine, direct=all(alive))

    async def follow(self, sender: str, form: Form) -> Generation:
        """Do what the coordinator ordered; the same order again is the same.

        Raises:
            Refusal: it isn't for us (409), makes no sense (400), or can't be done now (503).
        """
        asked = msgspec.structs.replace(form, call=0)
        async with self._turn:
            task = self._task
            if task is None or asked != self._form:
                generation = self._check(sender, asked)
                await self._give_up()
                task = self._begin(generation, asked)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise Refusal(409, "the group's view has ended") from error
            raise

    def _begin(self, generation: Generation, form: Form) -> asyncio.Task[Generation]:
        if self._closed:
            raise Refusal(409, "the group's view has ended")
        self._form = form
        self._side.drop()
        self.connections = connections_of(self._parts, form, generation.rank)
        self._task = asyncio.create_task(self._take(generation, form, self.connections), name="follow-order")
        return self._task

    def _check(self, sender: str, form: Form) -> Generation:
        """Return the generation that an order is about.

        Raises:
            Refusal: see `follow`.
        """
        if sender != self.pipeline.rank0 or form.members[0] != sender:
            raise Refusal(409, "another node coordinates this pipeline")
        if sorted(form.members) != sorted(self.pipeline.members):
            raise Refusal(409, "this pipeline has other members")
        last = self._side.last if self._form is None else max(self._side.last, self._form.generation)
        if form.generation <= last:
            raise Refusal(409, f"generation {form.generation} is over: {last} was here")
        if form.blocks != len(self._side.layers):
            raise Refusal(409, f"this node's policy has {len(self._side.layers)} blocks, not {form.blocks}")
        if form.port and not self._context.trusted_network:
            raise Refusal(409, "torch.distributed isn't allowed on this node: node.trusted_network is false")
        if bool(form.port) != (form.backend == "torch" and not form.alone):
            raise Refusal(400, f"a pipeline over {form.backend} has no ranks that meet at port {form.port}")
        try:
            rank = form.members.index(self._me)
            host = self._group.address(sender).host if form.port else ""
            return generation_of(self._config, form, rank, host)
        except ConfigError as error:
            raise Refusal(400, f"no such pipeline: {error}") from error
        except TransportError as error:
            raise Refusal(503, str(error)) from error

    async def _take(self, generation: Generation, form: Form, connections: RankConnections) -> Generation:
        """Take rank 0's state, connect, and have our learner work; who is to blame is doubted here."""
        try:
            await self._take_state(form)
            pipes = await connections.complete(self._group.address, FORM_S)
            await still_holds(self._context, form.digest, pipes)
            self._side.begin(generation, pipes)
            await generation.until_ready(MEET_S if form.port else READY_S)
        except Refusal as refusal:
            raise Refusal(BLAMELESS, refusal.reason) from refusal
        except TransportError as error:
            if connections.next is not None:
                self._group.doubt(connections.next, str(error))
            raise Refusal(BLAMELESS, str(error)) from error
        except WorkerError as error:
            self.lost = str(error)
            self.settled.set()
            raise Refusal(500, str(error)) from error
        finally:
            await connections.close()
        generation.formed = True
        self.settled.set()
        return generation

    async def _take_state(self, form: Form) -> None:
        """Hold exactly what rank 0 holds."""
        for _ in range(TRIES):
            if await self._holds(form):
                return
            why = "a pipeline begins with its rank 0's state"
            await self._context.swarm.adopted(form.members[0], form.lineage, why)
        if not await self._holds(form):
            raise Refusal(503, "the state that was taken isn't rank 0's")

    async def _holds(self, form: Form) -> bool:
        """Whether we have rank 0's parameters, and count as being of its lineage."""
        state, summary = await own_state(self._context), self._context.swarm.summary()
        return state.digest == form.digest and summary is not None and summary.lineage == form.lineage

    async def close(self) -> None:
        """Give up what isn't done, at the view's end."""
        self._closed = True
        await self._give_up()

    async def _give_up(self) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)
        if self.connections is not None:
            await self.connections.close()


ADOPT_TRIES = 2
OWN_STATE_S = 10.0
OWN_PAUSE_S = 0.1
INLINE_CUTS = 50_000
"""Planning that looks at more of them goes to a thread: so many take some milliseconds."""
UNFIT_S = 30.0
"""A model that fits nowhere is tried again after this: memory may have become free."""


class Coordinator:
    """Forms one pipeline in one view, as its rank 0: it asks the ranks, plans, and orders.

        offers → the newest state → plan → an order to each rank → our own learner's

    Whoever fails is named, and the caller asks for a view without it.

    Args:
        pipeline: we are its rank 0.
        offer_s: the longest that a rank may take to end what it did before.

    Attributes:
        choice: what carries activations.
        connections: our pipes, once we have planned.
    """

    def __init__(
        self, parts: PipelineParts, group: Group, key: ViewKey, pipeline: PipelineMembers, *, offer_s: float
    ) -> None:
        self._parts, self._context, self._config = parts, parts.context, parts.config
        self._side, self._group = parts.side, group
        self._key, self._pipeline, self._offer_s = key, pipeline, offer_s
        self._me = parts.context.swarm.node_id
        self.connections: RankConnections | None = None
        self.choice = Choice("stream")

    async def form(self) -> Generation:
        """Form it; return once every rank's learner is in place.

        Raises:
            Unformed: somebody is gone, something isn't ready in time, or the model fits nowhere.
        """
        offers = await self._ask()
        await self._take_newest(offers)
        planned = await self.plan(offers)
        ranks = [(self._name(peer), offers[peer]) for peer in planned.members]
        self.choice = chosen(self._config.backend, ranks, self._parts.fallback.failed)
        try:
            return await self._order(offers, planned)
        except (WorkerError, TransportError, ConfigError, Refusal) as error:
            raise Unformed(str(error)) from error

    # One after the other

    async def _ask(self) -> dict[str, RankOffer]:
        mine, others = await self._own(), self._pipeline.others
        found = await together(
            *(
                call_rank(
                    self._context,
                    self._group,
                    peer,
                    RankRequest(self._key),
                    RankOffer,
                    what="offer",
                    deadline_s=self._offer_s,
                )
                for peer in others
            )
        )
        offers = {self._me: mine, **dict(zip(others, found, strict=True))}
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
        members = self._pipeline.members
        links: Links = FREE
        if len(members) > 1:
            links = await self._parts.links.between(self._group.address, members)
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
        """Order all ranks, and our own learner.

        Raises:
            Unformed: a rank didn't do as ordered.
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
        generation = generation_of(self._config, form, 0)
        connections = self.connections = connections_of(self._parts, form, 0)
        pipes: dict[StageSide, Pipe] = {}
        begun = False
        try:
            await together(self._complete(connections, pipes), *self._orders(form))
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
        """Form a pipeline over torch.distributed: our learner opens the store where all ranks meet."""
        hosts = [self._group.address(peer).host for peer in form.members[1:]]
        generation = generation_of(self._config, form, 0, hosts[0])
        self._side.begin(generation, {})
        try:
            port = await generation.port(MEET_S)
            orders = self._orders(msgspec.structs.replace(form, port=port))
            await together(generation.until_ready(FORM_S), *orders)
        except (WorkerError, Unformed) as error:
            self._parts.fallback.unmet(form.generation, str(error))
            raise
        except asyncio.CancelledError:  # a rank that failed may have asked for another view already
            if generation.ended.done():
                self._parts.fallback.unmet(form.generation, generation.ended.result().why)
            raise
        generation.formed = True
        return generation

    def _orders(self, form: Form) -> list[Coroutine[Any, Any, Any]]:
        return [
            call_rank(
                self._context, self._group, peer, form, PipelineDone, what="readiness", deadline_s=FORM_S
            )
            for peer in form.members[1:]
        ]

    async def _complete(self, connections: RankConnections, pipes: dict[StageSide, Pipe]) -> None:
        """Put our pipes into ``pipes`` as soon as there are all: somebody else's failure may follow."""
        try:
            pipes.update(await connections.complete(self._group.address, FORM_S))
        except PeerUnreachableError as error:
            raise Unformed(str(error), connections.next or "") from error

    def _name(self, peer: str) -> str:
        return self._context.swarm.name_of(peer)
