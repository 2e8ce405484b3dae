"""Synchronous gossip with neighbours on a graph: D-PSGD (Lian 2017, arXiv 1705.09056).

The group's members lay a graph over themselves (`topology`), whose Metropolis weights keep their mean. Each
``every_updates`` updates the learner posts and stands still; its node exchanges vectors with each neighbour
(`calls`, `visits`), mixes, and lets it go on:

    x_i ← x_i + Σ_j W_ij (x_j − x_i)

A neighbour that doesn't come in time is left out of the round, by both ends. When the view changes, a round
that has exchanged nothing yet is done again in the new one; one that has ends with the edges it has, which
keeps the mean as well. While there is no view, or no state, the learner waits ``deadline_s`` at most.

With ``exchanges = "gradients"`` it posts each gradient and steps with g_i + Σ_j W_ij (g_j − g_i); each
``parameters_every`` rounds the parameters that the gradient was computed on are mixed as well, before it
steps: that is D-PSGD's own update, x ← W x − γ g(x).

**Which mixing keeps the mean**: ``mean`` and ``clipped`` (both ends shorten an edge alike). ``trimmed``
leaves out other values at each node, so the mean moves by as much as what was left out.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import numpy as np

from p2pdrl.config.strategy import DsgdConfig, Mode
from p2pdrl.errors import PoisonedVectorError
from p2pdrl.strategies.arithmetic import Arithmetic
from p2pdrl.strategies.group.service import ROUTE as GROUP_ROUTE
from p2pdrl.strategies.group.service import Group
from p2pdrl.strategies.neighbours.calls import NeighbourCalls
from p2pdrl.strategies.neighbours.messages import ROUTE
from p2pdrl.strategies.neighbours.neighbourhood import Neighbourhood
from p2pdrl.strategies.neighbours.offers import GradientOffer, Offer, ParameterOffer
from p2pdrl.strategies.neighbours.report import stage_report
from p2pdrl.strategies.neighbours.seat import Seat
from p2pdrl.strategies.neighbours.stage import Stage
from p2pdrl.strategies.neighbours.visits import NeighbourVisits
from p2pdrl.strategies.protocol import AnswerKind, Context, Post, RoundReport
from p2pdrl.strategies.runner import Runner
from p2pdrl.strategies.tally import Tally
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

__all__ = ["DsgdStrategy"]

POLL_S = 0.05
LAST_ROUND_S = 0.5
"""How long `stop` waits for the round under way."""
IDLE_S = 3600.0
NOTE_BYTES = 8
MAX_NUMBER = 2**52


class DsgdStrategy:
    """D-PSGD over the transport; see `Strategy`.

    Args:
        config: its options.
        context: what the node gives.
    """

    mode: Mode = "gossip"

    def __init__(self, config: DsgdConfig, context: Context) -> None:
        self._config, self._context = config, context
        self._swarm, self._clock, self._learner = context.swarm, context.clock, context.learner
        self._heavy = Arithmetic(4 * context.size)
        delta_D = np.zeros(context.size, np.float32)
        self._parameters = ParameterOffer(config, context, delta_D)
        self._gradients = GradientOffer(config, context, delta_D) if config.exchanges == "gradients" else None
        longest = max(offer.max_nbytes for offer in (self._parameters, self._gradients) if offer is not None)
        self._tally = Tally(context.swarm)
        self._group = Group(context, self._note)
        self._seat = Seat(
            config, context, self._group, self._heavy, longest, unsure=self._unsure, distance=self._tally.met
        )
        self._calls, self._visits = NeighbourCalls(self._seat), NeighbourVisits(self._seat)
        self._post: Post | None = None
        self._post_s = 0.0
        self._group_runs = asyncio.Event()
        self._runner = Runner()

    @property
    def group(self) -> Group:
        """In which views are agreed on."""
        return self._group

    @property
    def consensus_distance(self) -> float | None:
        """Estimate of sqrt(mean over nodes of ‖x_i − x̄‖²) from our neighbours, as if they were anybody."""
        return self._tally.consensus_distance

    @property
    def outcomes(self) -> dict[str, int]:
        """Rounds so far: ``ok`` (somebody was merged), ``regrouped`` (done again in a new view).

        Else, why nobody was: ``timeout late gone away refused poisoned past ahead behind failed``; ``unsure``
        counts edges in which one end may have moved alone, and a ``timeout`` may hide another such case.
        """
        return self._tally.outcomes

    @property
    def facts(self) -> dict[str, float | str]:
        """Figures for people; ``lambda2``: a round shrinks the distance to the mean by so much."""
        hood = self._seat.hood
        facts: dict[str, float | str] = {"topology": self._config.topology, "round": self._seat.next_number}
        if hood is None:
            return facts
        names = ", ".join(self._swarm.name_of(peer) for peer in sorted(hood.weights)[:8])
        more = f" and {len(hood.weights) - 8} more" if len(hood.weights) > 8 else ""
        return facts | {
            "members": len(hood.view.members),
            "neighbours": names + more,
            "spectral_gap": hood.spectral_gap,
            "lambda2": 1.0 - hood.spectral_gap,
            "patience_s": self._seat.patience.deadline_s,
        }

    async def start(self) -> None:
        """Begin."""
        self._runner.start(self._run(), self._pump(), self._watch_group(), self._follow_views())

    async def stop(self, timeout_s: float) -> None:
        """Let the round under way end with the edges that it has, and end everything."""
        self._seat.stopping = self._runner.stopping = True
        self._seat.leave()
        await self._runner.stop(min(timeout_s, LAST_ROUND_S))
        await self._group.stop()
        await self._heavy.close()

    async def watch(self) -> None:
        """Wait until it is stopped; raise what ended it before: a bug of ours."""
        await self._runner.watch()

    def updated(self, updates: int) -> None:
        """Rounds follow posts, not updates."""

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a peer's call; see `NeighbourVisits.answer` and `Group.answer`."""
        if incoming.route == GROUP_ROUTE:
            return await self._group.answer(incoming)
        if incoming.route != ROUTE:
            raise Refusal(409, f"this node's strategy is dsgd, which has no {incoming.route}")
        return await self._visits.answer(incoming)

    # Views

    def _note(self) -> bytes:
        return min(self._seat.next_number, MAX_NUMBER).to_bytes(NOTE_BYTES, "big")

    async def _follow_views(self) -> None:
        """Stand in the view in force, for ever."""
        while True:
            enough = len(self._swarm.alive()) + 1 >= self._context.start_at_members
            if enough and self._swarm.summary() is not None:
                break
            await asyncio.sleep(POLL_S)
        await self._group.start()
        self._group_runs.set()
        key = None
        while True:
            active = await self._group.active(after=key)
            key = active.view.key
            firsts = [int.from_bytes(note[:NOTE_BYTES], "big") for note in active.notes.values()]
            first = min(max(firsts, default=0), MAX_NUMBER)
            self._seat.enter(Neighbourhood(self._config, self._swarm.node_id, active.view, first))
            await self._group.ended(key)
            self._seat.leave()

    async def _watch_group(self) -> None:
        await self._group_runs.wait()
        await self._group.watch()

    # Turns of the learner

    async def _pump(self) -> None:
        """Take posts as they come, for ever; a learner that was started anew replaces its old one's."""
        while True:
            self._post = await self._learner.next_post()
            self._post_s = self._clock.monotonic()
            self._runner.news.set()

    async def _run(self) -> None:
        while not self._runner.stopping:
            if self._post is None:
                await self._runner.rest(IDLE_S)
            else:
                await self._turn(self._post)

    async def _turn(self, post: Post) -> None:
        """Do what a post is for, and let the learner go on."""
        began_s, sets = self._post_s, self._learner.board.sets
        offer: Offer | None = self._parameters
        if self._gradients is not None:
            self._gradients.post = post
            offer = None if post.vector is None else self._gradients
        kind: AnswerKind = "none"
        enough = 0 < self._context.max_exchanges <= self._tally.count("ok")
        if offer is not None and self._group_runs.is_set() and not enough:
            stage = await self._round(offer, began_s)
            if stage is not None and self._runner.stopping and not stage.met:
                return
            if stage is not None and await self._ended(stage, offer, began_s):
                kind = "set" if offer is self._parameters else "replace"
            if stage is not None and offer is self._gradients:
                await self._mix_parameters(stage.number)
        if kind == "none" and self._learner.board.sets != sets:
            kind = "set"
        if self._post is post:
            self._post = None
        if not self._runner.stopping or kind != "none":
            self._learner.answer(post, kind)

    async def _round(self, offer: Offer, began_s: float) -> Stage | None:
        """Do one round; None when there is nobody to do it with, or nothing to do it with."""
        while not self._runner.stopping:
            hood = await self._place(began_s + self._config.deadline_s)
            if hood is None or not hood.weights or not await self._load(offer):
                return None
            number = self._seat.next_number
            stage = await self._calls.meet(hood, number, offer)
            late = self._clock.monotonic() > began_s + self._config.deadline_s
            if stage.met or late or not (stage.regrouped or self._seat.next_number > number + 1):
                return stage
            self._tally.ended(
                RoundReport("regrouped" if stage.regrouped else "past", missing=tuple(stage.missing)),
                ours=False,
            )
        return None

    async def _mix_parameters(self, number: int) -> None:
        """After a round of gradients: the parameters, each so many rounds, over the same edges."""
        hood = self._seat.hood
        if (number + 1) % self._config.parameters_every or hood is None or self._group.view != hood.view:
            return
        began_s = self._clock.monotonic()
        if self._seat.at.number == number and await self._load(self._parameters):
            stage = await self._calls.meet(hood, number, self._parameters)
            await self._ended(stage, self._parameters, began_s)

    async def _place(self, until_s: float) -> Neighbourhood | None:
        """Wait for a state of ours and a view; None when they don't come in time."""
        while not self._runner.stopping:
            view, hood = self._group.view, self._seat.hood
            ready = view is not None and hood is not None and hood.key == view.key
            if ready and self._swarm.summary() is not None:
                return hood
            left_s = until_s - self._clock.monotonic()
            if left_s <= 0:
                return None
            with contextlib.suppress(TimeoutError, Refusal):
                async with asyncio.timeout(min(POLL_S, left_s)):
                    await self._seat.change()
        return None

    async def _load(self, offer: Offer) -> bool:
        """Take what is ours; False when it can't be given to anybody. Parameters that can't are healed."""
        try:
            await self._heavy.run(offer.load)
            return True
        except PoisonedVectorError as error:
            if offer is self._parameters:
                self._swarm.heal(f"our own parameters are unusable: {error}")
            return False

    async def _ended(self, stage: Stage, offer: Offer, began_s: float) -> bool:
        """Mix what came, and report; False when nothing was added to ours."""
        own_version = self._learner.board.policy_version
        changed: float | None = 0.0
        if stage.met:
            others = [(met.theirs, met.edge.weight) for _, met in sorted(stage.met.items())]
            version = max(own_version, *(met.policy_version for met in stage.met.values()))
            changed = await self._heavy.run(lambda: offer.apply(others, version))
        report = stage_report(stage, self._config.mixing, self._swarm.node_id, own_version, changed)
        now_s = self._clock.monotonic()
        self._tally.ended(replace(report, seconds=now_s - stage.began_s, waited_s=now_s - began_s))
        return bool(stage.met) and changed is not None

    def _unsure(self, peer: str) -> None:
        self._tally.ended(RoundReport("unsure", missing=(peer,), error="one end may have moved"), ours=False)
