"""Calls of neighbours: held until we have come to the same round, or for most of the time they wait.

Who gives up says so, and both ends leave the edge out. A caller that lags hears of it and goes on to our
round; when we lag, its call shows us where it is, and waits there for us.
"""

from __future__ import annotations

import asyncio

import msgspec

from p2pdrl.errors import PoisonedVectorError
from p2pdrl.strategies.group.view import ViewKey
from p2pdrl.strategies.judgement import Summary, Verdict
from p2pdrl.strategies.neighbours.messages import PAST, NeighbourHead, decode_neighbour_head
from p2pdrl.strategies.neighbours.neighbourhood import Line, Neighbourhood
from p2pdrl.strategies.neighbours.offers import Offer
from p2pdrl.strategies.neighbours.seat import Seat
from p2pdrl.strategies.neighbours.stage import Met, Stage
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

__all__ = ["NeighbourVisits"]

HOLD = 0.8
"""Part of the time a caller waits for which its call is held; the rest is for the way back."""


class NeighbourVisits:
    """Answers of one node.

    Args:
        seat: where it stands.
    """

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a neighbour's call.

        Raises:
            Refusal: malformed (400), another view, mode, topology or route (409), we didn't come to that
                round in time (408), no state (503), quarantined (403), poisoned (422).
        """
        seat, head = self._seat, decode_neighbour_head(incoming.meta)
        if head is None:
            raise Refusal(400, "the head can't be read")
        seat.door.admit(incoming.sender, stopping=seat.stopping)
        try:
            async with asyncio.timeout(HOLD * min(head.wait_s, seat.config.deadline_s)):
                work = self._answer(incoming, head)
                return await seat.group.hold(incoming.sender, head.call, work)
        except TimeoutError as error:
            raise Refusal(408, f"not at round {head.number} in time") from error

    async def _answer(self, incoming: Incoming, head: NeighbourHead) -> Reply:
        seat, sender = self._seat, incoming.sender
        hood = await self._until_view(head.view)
        if sender not in hood.weights or sender > seat.me:
            raise Refusal(409, "in this node's graph you are no neighbour that calls it")
        again = seat.sent.again(head.view, head.position, sender)
        if again is not None:  # it counts here already, and our answer was lost
            return again
        line = seat.line(hood, sender)
        line.newest = max(line.newest, head.position)
        seat.notify()
        async with line.lock:
            room = line.room(incoming.vector_nbytes)
            if room is None:
                raise Refusal(422, "the vector has another length than ours")
            await incoming.read_vector_into(room)
            stage = await self._until_round(head, line, sender)
            offer, mine = seat.offer, seat.door.admit(sender, stopping=seat.stopping)
            if stage is None or offer is None:
                return Reply(msgspec.msgpack.encode(self._past(head, mine, sender)))
            stage.busy.add(sender)
            try:
                return await self._reply(stage, offer, line, incoming, head)
            except BaseException as error:
                stage.miss(sender, "refused" if isinstance(error, Refusal) else "timeout")
                raise

    async def _until_view(self, key: ViewKey) -> Neighbourhood:
        """Wait for view ``key``, which may be in force at others first.

        Raises:
            Refusal: a later one is in force (409), or we stop (503).
        """
        seat = self._seat
        while True:
            view, hood = seat.group.view, seat.hood
            if view is not None and hood is not None and hood.key == view.key >= key:
                seat.group.check(key)
                return hood
            await seat.change()

    async def _until_round(self, head: NeighbourHead, line: Line, sender: str) -> Stage | None:
        """Wait for the round that ``head`` is about; None when it is over.

        Raises:
            Refusal: the view changed (409), or we stop (503).
        """
        seat, wanted = self._seat, head.position
        while line.newest == wanted and seat.at <= wanted:
            stage = seat.stage
            if seat.at == wanted:
                if stage is not None and stage.awaits(sender):
                    return stage
                break
            seat.seen = max(seat.seen, head.number)
            if stage is not None:
                stage.miss(sender, "ahead")
            await seat.change()
            seat.group.check(head.view)
        seat.came_late(wanted)
        return None

    async def _reply(
        self, stage: Stage, offer: Offer, line: Line, incoming: Incoming, head: NeighbourHead
    ) -> Reply:
        seat, sender, nbytes = self._seat, incoming.sender, incoming.vector_nbytes
        mine = seat.door.admit(sender, stopping=seat.stopping)
        verdict = seat.door.judge(sender, mine, head.summary)
        meta = msgspec.msgpack.encode(seat.head(stage, offer, mine, verdict=verdict.value))
        if verdict is not Verdict.MIX:
            stage.miss(sender, "behind" if verdict is Verdict.ADOPT else "ahead")
            return Reply(meta)
        if head.wire != offer.wire:
            raise Refusal(422, "the vector has another format than ours")
        try:
            met = await seat.read(stage, line, sender, nbytes, head.summary)
        except PoisonedVectorError as error:
            seat.swarm.strike(sender, str(error))
            stage.miss(sender, "poisoned")
            raise Refusal(422, f"poisoned vector: {error}") from error
        if stage.closed:
            raise Refusal(408, f"round {head.number} has ended")
        stage.bytes_in += nbytes
        stage.bytes_out += stage.message.nbytes
        return self._counted(stage, sender, met, meta)

    def _counted(self, stage: Stage, sender: str, met: Met, meta: bytes) -> Reply:
        """An answer whose end makes the edge count."""
        seat = self._seat

        def ended(sent: bool) -> None:
            if not sent:
                stage.broke(sender)
            elif stage.settle(sender, met):
                stage.message.answers[sender] = meta
                seat.came(stage, met)
            else:
                seat.unsure(sender)

        return stage.message.reply(meta, ended)

    def _past(self, head: NeighbourHead, mine: Summary, sender: str) -> NeighbourHead:
        """Say which round is the next one that the sender can meet us in."""
        seat = self._seat
        stage = seat.stage
        number = seat.next_number
        if stage is not None and stage.number > head.number and stage.awaits(sender):
            number = stage.number
        return NeighbourHead(head.view, number, head.content, head.wire, mine, verdict=PAST)
