"""Pairwise asynchronous gossip: the I/O around `adpsgd` (with whom, when) and `sides` (what).

A node begins an exchange when its core says so, and answers those of others; never two at a
time. Who is engaged refuses (423) and the caller tries somebody else. An exchange that isn't
done by its deadline is given up: training goes on meanwhile, so it costs that round alone.

When the last answer is lost after the responder committed, the responder has moved alone: the
swarm's mean then moves by at most ``weight · ‖a − b‖ / N``. That is counted as ``unsure``.

With ``exchanges = "gradients"`` the learner's newest gradient is held on offer until an exchange, begun
by either side, has used it or the next one is there; the learner runs ahead and never waits.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from p2pdrl.config.strategy import AdpsgdConfig
from p2pdrl.errors import P2PDRLError, PoisonedVectorError, TensorError, TransportError
from p2pdrl.ids import new_exchange_id
from p2pdrl.strategies.asynchronous import AsynchronousStrategy
from p2pdrl.strategies.calling import outcome_of, unready
from p2pdrl.strategies.door import BUSY
from p2pdrl.strategies.judgement import Summary, Verdict
from p2pdrl.strategies.pairwise.adpsgd import AdpsgdCore
from p2pdrl.strategies.pairwise.engagement import Engagement
from p2pdrl.strategies.pairwise.freshness import fresh_weight
from p2pdrl.strategies.pairwise.pair import ExchangeHead, PairScratch, decode_head, pair_report
from p2pdrl.strategies.pairwise.sides import GradientSide, PairSide, ParameterSide
from p2pdrl.strategies.protocol import Context, RoundReport
from p2pdrl.tensors.wire import WireDtype
from p2pdrl.transport.protocol import Address, Answer, Incoming, Refusal, Reply

__all__ = ["ROUTE", "GossipStrategy"]

ROUTE = "exchange"
REMEMBERED = 1024


class _Visit(NamedTuple):
    """An exchange that a peer began."""

    incoming: Incoming
    side: PairSide
    theirs: ExchangeHead
    ours: ExchangeHead
    began_s: float


class GossipStrategy(AsynchronousStrategy[AdpsgdCore]):
    """AD-PSGD over the transport; see `Strategy`.

    Outcomes of exchanges that we began: ``ok busy timeout refused failed poisoned unchanged``, ``behind`` (we
    adopted instead) and ``ahead`` (the peer did); begun by peers: ``answered``. ``unsure``: one side may have
    moved alone; a ``timeout`` may hide another such case.
    """

    DONE = "ok"

    def __init__(self, config: AdpsgdConfig, context: Context) -> None:
        wire: WireDtype = "float32" if config.compression == "none" else "bf16"
        self._scratch = PairScratch(
            context.size,
            wire,
            config.weight,
            context.max_abs,
            config.max_distance,
            config.clip_distance if config.mixing == "clipped" else None,
        )
        core = AdpsgdCore(config, context.swarm.node_id, context.rng)
        super().__init__(config, context, core, self._scratch.nbytes)
        self._config = config
        self._parameters = ParameterSide(self._scratch, self._board, wire)
        self._gradients: GradientSide | None = None
        if config.exchanges == "gradients":
            self._gradients = GradientSide(config, context.learner, context.size, context.max_abs)
        self._fresh_steps = 0
        self._engaged = Engagement()
        self._seen: OrderedDict[str, None] = OrderedDict()

    async def stop(self, timeout_s: float) -> None:
        """Finish the exchange in flight, in either role, waiting at most ``timeout_s``."""
        until_s = self._clock.monotonic() + timeout_s
        await self._runner.stop(timeout_s)
        await self._engaged.until_free(until_s - self._clock.monotonic())
        await self._heavy.close()

    def _beside(self) -> list[Coroutine[Any, Any, None]]:
        if self._gradients is None:
            return []
        return [self._gradients.offers.follow(self._swarm.alive, self._runner.news.set)]

    async def _turn(self) -> bool:
        partner = self._next_partner()
        if partner is None:
            return False
        await self._meet(*partner)
        return True

    def _next_partner(self) -> tuple[str, Address] | None:
        now_s, alive = self._clock.monotonic(), self._swarm.alive()
        if self._engaged or not self._may_begin(now_s, len(alive) + 1):
            return None
        if self._gradients is not None and self._core.gradients_next and not self._gradients.offers.open:
            return None
        peer = self._core.choose(alive, now_s)
        return None if peer is None else (peer, alive[peer])

    # --- as the one that calls ------------------------------------------------------------------

    async def _meet(self, peer: str, address: Address) -> None:
        began_s = self._clock.monotonic()
        self._core.began(began_s)
        gradients = self._gradients if self._core.gradients_next else None
        side: PairSide = self._parameters if gradients is None else gradients
        self._engaged.begin()
        report = RoundReport("failed", missing=(peer,), error="given up")
        try:
            report = await self._exchange(side, peer, address)
        finally:
            side.end(done=report.outcome in ("ok", "unchanged"))
            self._engaged.end()
        self._ended(peer, report, began_s)

    async def _exchange(self, side: PairSide, peer: str, address: Address) -> RoundReport:
        """Begin an exchange and finish it; a peer's failure is a report."""
        report = RoundReport("failed", missing=(peer,))
        mine = self._swarm.summary()
        if mine is None or not side.begin():
            return replace(report, error="there is nothing to exchange")
        try:
            if not await self._load(side):
                return replace(report, error="our own numbers are unusable")
            report = replace(report, bytes_out=len(side.outgoing), round_trips=1)
            head = self._head(new_exchange_id(), side, mine)
            answer = await self._call(side, head, peer, address)
            report = replace(report, bytes_in=answer.vector_nbytes)
            theirs = decode_head(answer.meta)
            if theirs is None or theirs.exchange_id != head.exchange_id:
                return replace(report, error="the answer's head can't be read")
            heard = self._door.heard(peer, mine, theirs.summary, theirs.verdict)
            if heard != "ok" or theirs.content != side.content or not answer.vector_nbytes:
                outcome = "failed" if heard == "ok" else heard
                return replace(report, outcome=outcome, error=f"it answered {theirs.verdict} without numbers")
            await self._mix(side, head, theirs)
            version = max(mine.policy_version, theirs.summary.policy_version)
            if not await self._heavy.run(lambda: side.commit(version)):
                return replace(report, outcome="unsure", error="our vector was replaced meanwhile")
        except (TransportError, TensorError) as error:
            return self._failed(peer, report, error)
        return self._met(side, peer, head, theirs.summary, report)

    async def _call(self, side: PairSide, head: ExchangeHead, peer: str, address: Address) -> Answer:
        return await self._transport.call(
            address,
            peer,
            ROUTE,
            msgspec.msgpack.encode(head),
            vector=side.outgoing,
            into=lambda _, nbytes: side.room(nbytes),
            deadline_s=self._deadline.seconds,
            lane="bulk",
        )

    def _failed(self, peer: str, report: RoundReport, error: P2PDRLError) -> RoundReport:
        outcome = outcome_of(error)
        if outcome == "poisoned":
            self._swarm.strike(peer, str(error))
        return replace(report, outcome=outcome, error=str(error), unready=unready(error))

    # --- as the one that is called ---------------------------------------------------------------

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a peer's exchange.

        Raises:
            Refusal: engaged (423), no state yet (503), another task or mode (409), a replay (409),
                poisoned (422), quarantined (403), malformed (400).
        """
        if incoming.route != ROUTE:
            raise Refusal(409, f"this node's strategy is adpsgd, which has no {incoming.route}")
        head = decode_head(incoming.meta)
        if head is None:
            raise Refusal(400, "the exchange's head can't be read")
        mine = self._door.admit(incoming.sender, stopping=self._runner.stopping)
        if self._engaged:
            raise Refusal(BUSY, "in another exchange")
        verdict = self._door.judge(incoming.sender, mine, head.summary)
        side: PairSide | None = self._parameters if head.content == "parameters" else self._gradients
        if side is None:
            raise Refusal(409, f"this node exchanges parameters, not {head.content}")
        reply = self._head(head.exchange_id, side, mine, verdict)
        if verdict is not Verdict.MIX:
            return Reply(msgspec.msgpack.encode(reply))
        room = side.room(incoming.vector_nbytes)
        if head.wire != side.wire or room is None:
            raise Refusal(422, "the vector has another format or length than ours")
        if head.exchange_id in self._seen:
            raise Refusal(409, "this exchange was here before")
        if not side.begin():
            raise Refusal(BUSY, "no gradient at hand")
        self._remember(head.exchange_id)
        return await self._engage(_Visit(incoming, side, head, reply, self._clock.monotonic()), room)

    async def _engage(self, visit: _Visit, room: memoryview) -> Reply:
        incoming, side = visit.incoming, visit.side
        self._engaged.begin()
        handed_over = False
        try:
            async with asyncio.timeout(self._config.deadline_s):
                await incoming.read_vector_into(room)
                if not await self._load(side):
                    raise Refusal(503, "our own numbers are unusable")
                await self._mix(side, visit.ours, visit.theirs)

            def ended(sent: bool) -> None:
                self._runner.briefly(self._commit(visit, sent=sent and not self._heavy.closed))

            handed_over = True
            return Reply(msgspec.msgpack.encode(visit.ours), vector=side.outgoing, on_end=ended)
        except PoisonedVectorError as error:
            self._swarm.strike(incoming.sender, str(error))
            raise Refusal(422, f"poisoned vector: {error}") from error
        except TimeoutError as error:
            raise Refusal(408, "the vector didn't arrive in time") from error
        finally:
            if not handed_over:
                side.end(done=False)
                self._engaged.end()

    async def _commit(self, visit: _Visit, *, sent: bool) -> None:
        """End an exchange that a peer began: our side counts once the answer is written."""
        peer, side, nbytes = visit.incoming.sender, visit.side, visit.incoming.vector_nbytes
        version = max(visit.ours.summary.policy_version, visit.theirs.summary.policy_version)
        report = RoundReport("unsure", missing=(peer,), bytes_in=nbytes, error="cut off")
        try:
            if sent and await self._heavy.run(lambda: side.commit(version)):
                report = RoundReport("answered", bytes_in=nbytes, bytes_out=len(side.outgoing))
                report = self._met(side, peer, visit.ours, visit.theirs.summary, report)
        finally:
            side.end(done=report.outcome == "answered")
            self._engaged.end()
        took_s = self._clock.monotonic() - visit.began_s
        self._tally.ended(replace(report, seconds=took_s), ours=False)

    # --- in both roles ----------------------------------------------------------------------------

    def _head(
        self, exchange_id: str, side: PairSide, mine: Summary, verdict: Verdict = Verdict.MIX
    ) -> ExchangeHead:
        if self._config.merge_weights == "fresh":
            self._fresh_steps += self._swarm.steps_since()
        return ExchangeHead(exchange_id, side.wire, mine, verdict.value, side.content, self._fresh_steps)

    async def _mix(self, side: PairSide, mine: ExchangeHead, theirs: ExchangeHead) -> None:
        """Compute how far our side moves; the other computes its own from the same two heads."""
        weight = self._config.weight
        if self._config.merge_weights == "fresh":
            weight = fresh_weight(weight, mine.freshness, theirs.freshness)
        await self._heavy.run(lambda: side.mix(weight))

    async def _load(self, side: PairSide) -> bool:
        """Take what is ours; False when it can't be given to anybody. Parameters that can't are healed."""
        try:
            await self._heavy.run(side.load)
            return True
        except PoisonedVectorError as error:
            why = str(error)
        if side is not self._parameters:
            # One bad gradient is its learner's business, unless the parameters are bad as well.
            try:
                await self._heavy.run(self._parameters.load)
                return False
            except PoisonedVectorError as error:
                why = str(error)
        self._swarm.heal(f"our own parameters are unusable: {why}")
        return False

    def _met(
        self, side: PairSide, peer: str, mine: ExchangeHead, theirs: Summary, report: RoundReport
    ) -> RoundReport:
        """Note an exchange that is done; complete its report, whose outcome says in which role."""
        gradients = side.content == "gradients"
        self._core.exchanged(gradients=gradients)
        self._fresh_steps = max(self._fresh_steps - mine.fresh_steps, 0)
        if not gradients:
            self._tally.met(side.step.distance)
        staleness = mine.summary.policy_version - theirs.policy_version
        return pair_report(report, self._swarm.node_id, peer, side.step, staleness)

    def _remember(self, exchange_id: str) -> None:
        self._seen[exchange_id] = None
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
