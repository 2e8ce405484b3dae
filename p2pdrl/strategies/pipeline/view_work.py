"""What a node does in one view of the group: end what was before, form, work, find out what broke."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from p2pdrl.config.pipeline import PipelineConfig
from p2pdrl.errors import WorkerError
from p2pdrl.pipeline.order import StageNews
from p2pdrl.strategies.group.service import Group, GroupView
from p2pdrl.strategies.pipeline.calls import Peers, Unformed
from p2pdrl.strategies.pipeline.heads import Heads
from p2pdrl.strategies.pipeline.layout import Layout, Place
from p2pdrl.strategies.pipeline.lead import Lead
from p2pdrl.strategies.pipeline.links import LinkBook
from p2pdrl.strategies.pipeline.messages import Note
from p2pdrl.strategies.pipeline.planning import measured_with
from p2pdrl.strategies.pipeline.port import Pipes
from p2pdrl.strategies.pipeline.recruit import FORM_S, Recruit
from p2pdrl.strategies.pipeline.telling import Telling
from p2pdrl.strategies.pipeline.term import LearnerSide, Term, blamed
from p2pdrl.strategies.protocol import Context

__all__ = ["GOSSIP_END_S", "LearnerLostError", "Tools", "ViewWork", "finish_s", "left_behind", "parts_of"]

ANSWER_S = 2.0
"""The longest that a learner may take to say that it is there, once a pipeline broke."""
FINISH_S = 15.0
"""The longest that the end of an update is waited for; more where the strategy's deadline is longer."""
LONE_S = 1.0
"""The same where somebody else's pipeline has ended already, or a member is gone."""
RENEW_S = 3.0
"""A new view is asked for again after this."""
CALM_S = (0.25, 5.0)
"""Pause after the second failure in a row before a new view is asked for; doubles, up to the greatest."""
BLAMED_AFTER = 3
"""Failures in a row after which a neighbour is left out; twice as many before it is the previous rank."""
GOSSIP_END_S = 0.5
"""The longest that an exchange with another head may take to end."""


class LearnerLostError(WorkerError):
    """Our own learner doesn't answer."""


def parts_of(config: PipelineConfig, context: Context) -> int:
    """Return into how many parts the learner's longest batch is cut for one microbatch of a minibatch."""
    return context.batches * measured_with(config, context.rows)


def left_behind(context: Context, term: Term) -> bool:
    """Whether this node has adopted another lineage's state since a generation began."""
    summary = context.swarm.summary()
    return summary is not None and summary.lineage != term.lineage


def finish_s(config: PipelineConfig) -> float:
    """Return the longest that the end of an update is waited for."""
    return max(FINISH_S, config.deadline_s + 5.0)


@dataclass(slots=True)
class Tools:
    """What outlives a view.

    Attributes:
        config: the strategy's options.
        context: what the node gives.
        pipes: opens pipes.
        side: our learner.
        heads: gossip with other heads.
        links: what is known of them.
        telling: what people are told.
        failures: in a row, since the last state copy.
    """

    config: PipelineConfig
    context: Context
    pipes: Pipes
    side: LearnerSide
    heads: Heads
    links: LinkBook
    telling: Telling
    failures: int = 0


class ViewWork:
    """One view.

    Args:
        tools: what outlives it.
        group: agreed on it.
        view: which.
        notes: of its members.
        layout: that follows from both.

    Attributes:
        lead: forms our pipeline, where we head it.
        recruit: takes our place in it, where another does.
    """

    def __init__(
        self, tools: Tools, group: Group, view: GroupView, notes: Mapping[str, Note], layout: Layout
    ) -> None:
        self._tools, self._group, self._view = tools, group, view
        self._notes, self._layout = notes, layout
        self._side, self._telling = tools.side, tools.telling
        self._me = tools.context.swarm.node_id
        self._peers = Peers(tools.context, group)
        self.lead: Lead | None = None
        self.recruit: Recruit | None = None

    async def run(self) -> None:
        """Be in a pipeline until the view ends and we are cancelled; return where there is none for us.

        Raises:
            LearnerLostError: our own learner doesn't answer.
        """
        place = self._layout.place_of(self._me)
        term = self._side.running
        if term is None or place is None or not _goes_on(place, term):
            await self._release()
            if place is None:
                self._telling.standing_by(self._layout)
                return
            try:
                term = await self._form(place)
            except Unformed as error:
                await self._came_to_nothing(place, error)
                return
        news = await self._serve(term)
        self._ended(term, news)
        if news.what == "broken":
            await self._still_there()
        elif not left_behind(self._tools.context, term):
            await asyncio.sleep(RENEW_S)  # who had it finished is about to go
        await self._anew(term.members, news.why or "it is over")

    async def close(self) -> None:
        """The view ended: give up what isn't done."""
        if self.recruit is not None:
            await self.recruit.close()

    # The generation before

    async def _release(self) -> None:
        """End it: finished where it works at all its members, else soon or as it is."""
        await self._tools.heads.end(GOSSIP_END_S)
        term = self._side.running
        if term is not None and (term.formed or term.leads):
            if term.leads:
                self._side.finish()
            lone = term.order.ranks == 1
            works = term.formed and (lone or all(_is_in(self._notes.get(one), term) for one in term.members))
            patience_s = finish_s(self._tools.config) if works else LONE_S
            await asyncio.wait({term.ended}, timeout=patience_s)
            gone = not set(term.members) <= set(self._view.members)
            if term.running and term.formed and not works and not gone:
                await self._still_there()  # it ended at others, so that it should have here, too
        term = self._side.term
        self._side.drop()
        if term is not None and term.ended.done():
            news = term.ended.result()
            self._ended(term, news)
            if news.what == "broken":
                await self._still_there()

    # Forming

    async def _form(self, place: Place) -> Term:
        """Form a pipeline as its head, or take the place that the head gives us.

        Raises:
            Unformed: it came to nothing.
        """
        tools = self._tools
        if place.head != self._me:
            return await self._recruited(place)
        self.lead = Lead(
            tools.context,
            tools.config,
            pipes=tools.pipes,
            side=self._side,
            peers=self._peers,
            links=tools.links,
            key=self._view.key,
            place=place,
            offer_s=finish_s(tools.config) + 5.0,
        )
        term = await self.lead.form()
        self._telling.formed(term)
        return term

    async def _recruited(self, place: Place) -> Term:
        tools = self._tools
        recruit = self.recruit = Recruit(
            tools.context,
            tools.config,
            pipes=tools.pipes,
            side=self._side,
            peers=self._peers,
            key=self._view.key,
            place=place,
            doubt=self._group.doubt,
        )
        try:
            async with asyncio.timeout(finish_s(tools.config) + FORM_S):
                await recruit.settled.wait()
        except TimeoutError as error:
            raise Unformed("the head didn't form its pipeline in time", place.head) from error
        term = self._side.term
        if recruit.lost or term is None:
            raise Unformed(recruit.lost)
        self._telling.formed(term)
        return term

    async def _came_to_nothing(self, place: Place, error: Unformed) -> None:
        self._telling.unformed(place, str(error), error.suspect)
        self._tools.failures += 1
        if error.suspect:
            self._group.doubt(error.suspect, str(error))
        else:
            await self._still_there()
        await asyncio.sleep(error.for_s)
        await self._anew(place.members, str(error))

    # Working

    async def _serve(self, term: Term) -> StageNews:
        """Wait for the end of a generation; a head meets the others meanwhile."""
        heads = self._tools.heads
        heads.with_whom((*self._layout.heads, *(term.members if term.alone else ())))
        gossip = [await heads.begin()] if term.leads else []
        try:
            waiting: list[asyncio.Future[Any]] = [term.ended, *gossip]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in gossip:
                if task.done():
                    task.result()
            return await asyncio.shield(term.ended)
        finally:
            for task in gossip:
                task.cancel()
            await asyncio.gather(*gossip, return_exceptions=True)
            if not term.running:
                await heads.end(GOSSIP_END_S)

    def _ended(self, term: Term, news: StageNews) -> None:
        """Note a generation's end; doubt a neighbour with whom it breaks time and again, though it lives."""
        if not self._telling.ended(term, news) or news.what != "broken":
            return
        self._tools.failures += 1
        peer = blamed(term, news)
        if peer and self._tools.failures >= BLAMED_AFTER * (1 if news.side == "next" else 2):
            self._group.doubt(peer, f"pipelines break with it time and again: {news.why}")

    async def _still_there(self) -> None:
        """Make sure that our own learner is.

        Raises:
            LearnerLostError: it isn't.
        """
        try:
            await self._side.measure(parts_of(self._tools.config, self._tools.context), ANSWER_S)
        except WorkerError as error:
            raise LearnerLostError(str(error)) from error

    async def _anew(self, members: tuple[str, ...], why: str) -> None:
        """Doubt who doesn't answer, and ask for a new view until this one ends, and we with it."""
        failures = self._tools.failures
        if failures > 1:
            await asyncio.sleep(min(CALM_S[0] * 2.0 ** min(failures - 2, 16), CALM_S[1]))
        others = tuple(member for member in members if member != self._me)
        while True:
            for peer in await self._peers.silent(others):
                self._group.doubt(peer, "its pipeline broke, and it doesn't answer")
            self._group.renew(self._view.key, why)
            await asyncio.sleep(RENEW_S)


def _goes_on(place: Place, term: Term) -> bool:
    return (place.generation, place.head) == (term.generation, term.head)


def _is_in(note: Note | None, term: Term) -> bool:
    """Whether a member said that it works in a generation."""
    return note is not None and (note.generation, note.head) == (term.generation, term.head)
