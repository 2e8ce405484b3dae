"""A synchronous round with all neighbours: the lower id of each edge calls, the higher one answers.

There is one call for each edge and round: the request carries x_i and the answer x_j. As in pairwise gossip
the answer can be lost: the callee counts an edge once its answer is written. The caller asks after it
(`group.holding`) and calls again, and gets the same answer; only when that fails until the round's end has
the callee moved alone. Such edges are counted as ``unsure``, on the side that can know.
"""

from __future__ import annotations

import asyncio

import msgspec

from p2pdrl.errors import P2PDRLError, PeerRefusedError, PeerUnreachableError, TensorError, TransportError
from p2pdrl.strategies.calling import outcome_of
from p2pdrl.strategies.neighbours.messages import PAST, ROUTE, Position, decode_neighbour_head
from p2pdrl.strategies.neighbours.neighbourhood import Neighbourhood
from p2pdrl.strategies.neighbours.offers import Offer
from p2pdrl.strategies.neighbours.seat import Seat
from p2pdrl.strategies.neighbours.stage import Stage
from p2pdrl.transport.protocol import Refusal

__all__ = ["NeighbourCalls"]

GRACE_S = 1.0
"""How long a round that was cut off waits for what is under way."""
RETRY_S = 0.05
RETRIES = 3
"""Calls that a neighbour refuses because it is in another view (ours changes soon as well), or that break."""


class NeighbourCalls:
    """Rounds of one node.

    Args:
        seat: where it stands.
    """

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    async def meet(self, hood: Neighbourhood, number: int, offer: Offer) -> Stage:
        """Exchange what ``offer`` has loaded with each neighbour, as far as they come."""
        seat, began_s = self._seat, self._seat.clock.monotonic()
        until_s = began_s + seat.patience.deadline_s
        position = Position(number, int(offer.content == "parameters"))
        message = seat.sent.begin(hood.key, position, offer.message)
        stage = Stage(hood.key, number, offer.content, hood.weights, began_s, until_s, message)
        seat.begin(stage, offer)
        calls = [
            asyncio.create_task(self._call(stage, offer, hood, peer), name="neighbour")
            for peer in sorted(hood.weights)
            if peer > seat.me
        ]
        try:
            await asyncio.sleep(0)
            if seat.stopping or seat.group.view is None or seat.group.view.key != hood.key:
                stage.cut("regrouped", regrouped=True)
            await stage.wait(until_s - seat.clock.monotonic())
            stage.cut("timeout")
            await stage.wait_settled(GRACE_S)
        finally:
            stage.close()
            seat.end()
            for call in calls:
                call.cancel()
            ended = await asyncio.gather(*calls, return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                raise error
        for peer in stage.half & stage.missing.keys():
            seat.unsure(peer)
        self._doubts(stage, hood)
        return stage

    def _doubts(self, stage: Stage, hood: Neighbourhood) -> None:
        """Ask for a view without neighbours that are gone for good.

        Who was left out before, and comes to no round after its return either, is left out again at once.
        """
        seat, took_s = self._seat, self._seat.clock.monotonic() - stage.began_s
        for peer in hood.weights:
            if peer not in stage.missing:
                seat.missed_s.pop(peer, None)
                continue
            missed_s = seat.missed_s[peer] = seat.missed_s.get(peer, 0.0) + took_s
            if stage.missing[peer] == "gone":
                seat.group.doubt(peer, "nothing listens there")
            elif missed_s > seat.config.deadline_s and not stage.regrouped:
                seat.group.doubt(peer, f"came to no round for {missed_s:.1f} s")

    async def _call(self, stage: Stage, offer: Offer, hood: Neighbourhood, peer: str) -> None:
        """Exchange with a neighbour; whatever becomes of it settles the edge."""
        for attempt in range(RETRIES + 1):
            try:
                await self._exchange(stage, offer, hood, peer)
            except PeerRefusedError as refusal:
                stage.busy.discard(peer)
                if refusal.status == 409 and attempt < RETRIES and not stage.cut_off:
                    await asyncio.sleep(RETRY_S * 2**attempt)
                    continue
                stage.miss(peer, "late" if refusal.status == 408 else "refused")
                if refusal.status == 408:  # it lives, and is slower than we thought
                    self._seat.patience.observe(2 * (self._seat.clock.monotonic() - stage.began_s))
            except (TransportError, TensorError, Refusal) as error:
                broke = isinstance(error, PeerUnreachableError) and error.sent
                if broke and attempt < RETRIES and not stage.cut_off:
                    await asyncio.sleep(RETRY_S)
                    continue
                self._failed(stage, peer, error)
            return

    def _failed(self, stage: Stage, peer: str, error: P2PDRLError) -> None:
        outcome = outcome_of(error)
        if outcome == "poisoned":
            self._seat.swarm.strike(peer, str(error))
        if isinstance(error, PeerUnreachableError):
            outcome = "unsure" if error.sent else "gone"
        if isinstance(error, Refusal):  # our own round had ended when its answer came
            outcome = "unsure"
        if outcome in ("unsure", "poisoned"):
            self._seat.unsure(peer)
        stage.miss(peer, outcome)

    async def _exchange(self, stage: Stage, offer: Offer, hood: Neighbourhood, peer: str) -> None:
        seat = self._seat
        address, mine = seat.swarm.alive().get(peer), seat.swarm.summary()
        left_s = stage.until_s - seat.clock.monotonic()
        if address is None or mine is None or left_s <= 0 or stage.cut_off:
            stage.miss(peer, "away" if address is None else "timeout")
            return
        line = seat.line(hood, peer)
        stage.busy.add(peer)
        stage.bytes_out += stage.message.nbytes
        stage.round_trips += 1
        head = seat.head(stage, offer, mine, wait_s=left_s)
        answer = await seat.group.calls.call(
            address,
            peer,
            ROUTE,
            lambda call: msgspec.msgpack.encode(msgspec.structs.replace(head, call=call)),
            vector=stage.message.view,
            into=lambda _, nbytes: line.room(nbytes),
            deadline_s=left_s,
        )
        stage.bytes_in += answer.vector_nbytes
        theirs = decode_neighbour_head(answer.meta)
        if theirs is None:
            stage.miss(peer, "failed")
            return
        if theirs.verdict == PAST:
            seat.seen = max(seat.seen, theirs.number)
            stage.miss(peer, PAST)
            return
        heard = seat.door.heard(peer, mine, theirs.summary, theirs.verdict)
        if heard != "ok" or theirs.position != stage.position or not answer.vector_nbytes:
            stage.miss(peer, "failed" if heard == "ok" else heard)
            return
        met = await seat.read(stage, line, peer, answer.vector_nbytes, theirs.summary)
        if stage.settle(peer, met):
            seat.came(stage, met)
