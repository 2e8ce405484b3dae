"""Gossiping actor-learners over the transport: the I/O around `core` (to whom) and `gala_side` (what).

Each node pushes its vector to its out-peers and averages what in-peers pushed, when its learner has made
an update (GALA, Assran 2019, arXiv 1906.04585). Neither waits for the other: a silent in-peer is left out, a
silent out-peer costs its own push. Each vector counts once; one that is more than τ policy versions behind
ours doesn't count. The mean of the swarm isn't kept exactly (rows of the mixing matrix sum to one, columns
needn't). On a ring, who doesn't take pushes is passed over, and who gets none asks for some (`lending`).

**How far apart learners get.** Whatever is lost or left out, each entry of an average lies between the least
and the greatest of our own and those that it takes, also with clipped or trimmed mixing. So averages never
spread learners: over all of them, and the vectors under way between them, the range of an entry grows by what
the learners' own updates move it, and by nothing else (but for the rounding of the wire).
Without assumptions that is all: nobody waits, so a learner that takes nothing and of whom nothing is taken,
because it is cut off or too old, goes where its own updates lead. The paper's bounded distance (proposition
1) assumes a bounded delay of every push; τ doesn't bring it about, for it drops what is older. It holds
while, in each stretch of time, pushes that count lead from some learner to all others: with plain means a
stretch then takes the range down by a factor of 1 − w^k at least, where w = 1 / (1 + in-peers) and k counts
the averages that learners on such a way make meanwhile; so the range stays below what the updates of one
stretch move, divided by w^k.

With ``exchanges = "gradients"`` the vectors are gradients: each of the learner's posts is answered at once,
with what the average adds to it or with none; every so many pushes carry parameters.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from p2pdrl.config.strategy import GalaConfig
from p2pdrl.errors import PoisonedVectorError, TensorError, TransportError, WireError
from p2pdrl.ids import new_exchange_id
from p2pdrl.strategies.asynchronous import AsynchronousStrategy
from p2pdrl.strategies.calling import outcome_of, unready
from p2pdrl.strategies.door import BUSY
from p2pdrl.strategies.judgement import Verdict
from p2pdrl.strategies.protocol import Context, RoundReport
from p2pdrl.strategies.push.buffers import BufferPool
from p2pdrl.strategies.push.core import PushCore
from p2pdrl.strategies.push.gala_side import GalaSide
from p2pdrl.strategies.push.lending import Lending
from p2pdrl.strategies.push.messages import PushAnswer, PushHead, decode_push_answer, decode_push_head
from p2pdrl.strategies.push.own_vector import OwnVector
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply

__all__ = ["ROUTE", "GalaStrategy"]

ROUTE = "push"
UNDER_WAY = 3
"""Vectors that may be under way at once: a silent out-peer holds one until its deadline."""

_UNUSABLE = RoundReport("failed", error="our own numbers are unusable")


class GalaStrategy(AsynchronousStrategy[PushCore]):
    """Non-blocking push gossip; see `Strategy`.

    Outcomes of averages: ``ok``, ``unchanged``, ``stale`` (all that came was too old), ``failed``. Of our
    pushes: ``pushed busy refused failed timeout unsure``, ``behind`` and ``ahead`` (somebody adopts).
    """

    DONE = "pushed"

    def __init__(self, config: GalaConfig, context: Context) -> None:
        me = context.swarm.node_id
        super().__init__(config, context, PushCore(config, me, context.rng), 4 * context.size)
        self._config = config
        self._learner = context.learner
        self._parameters = GalaSide("parameters", config, context)
        self._gradients = GalaSide("gradients", config, context) if config.exchanges == "gradients" else None
        self._own = OwnVector(self._board, context.size)
        self._boot = new_exchange_id()
        self._number = 0
        self._flights: dict[str, asyncio.Task[None]] = {}
        longest = max(side.encoder.max_nbytes for side in (self._parameters, self._gradients) if side)
        self._messages = BufferPool(longest, UNDER_WAY)
        self._lending = Lending(me)
        self._gradients_in_a_row = 0
        self._gradient_wanted = False
        self._gradient_ready = False
        self._unmixed_updates = 0
        self._books = asyncio.Lock()

    def updated(self, updates: int) -> None:
        """The learner made ``updates`` more updates."""
        self._unmixed_updates += updates
        super().updated(updates)

    def _beside(self) -> list[Coroutine[Any, Any, None]]:
        posts = [] if self._gradients is None else [self._answer_posts(self._gradients)]
        return [self._average(), *posts]

    # --- averaging --------------------------------------------------------------------------------

    async def _average(self) -> None:
        """Average our parameters with what came, once after each update of the learner."""
        side, own = self._parameters, self._own
        while True:
            self._follow()
            if not self._unmixed_updates or not side.inbox.any_fresh or self._swarm.summary() is None:
                await self._runner.rest(self._core.rest_s(self._clock.monotonic()))
                continue
            self._unmixed_updates = 0
            began_s, report = self._clock.monotonic(), _UNUSABLE
            async with self._books:
                if await self._read():
                    report = await self._heavy.run(
                        lambda: side.merge(own.vector, own.policy_version, own.add)
                    )
            self._averaged(report, began_s)
            if report.distance is not None:
                self._tally.met(report.distance)

    async def _answer_posts(self, side: GalaSide) -> None:
        """Answer each gradient as it comes; push it when one is wanted."""
        while True:
            post = await self._learner.next_post()
            outcome = "none"
            if post.vector is not None:
                async with self._books:
                    outcome = await self._average_gradient(side, post.vector, post.policy_version)
            self._learner.answer(post, "add" if outcome == "ok" else "none")

    async def _average_gradient(self, side: GalaSide, gradient_D: Float32Array, policy_version: int) -> str:
        """Put what in-peers' gradients add to ours in its place; return how that went."""

        def correct(delta_D: Float32Array, _newest: int) -> bool:
            np.copyto(gradient_D, delta_D)
            return True

        began_s = self._clock.monotonic()
        try:
            await self._heavy.run(lambda: side.check(gradient_D))
            if self._gradient_wanted:
                await self._heavy.run(lambda: side.encoder.encode(gradient_D))
                self._gradient_wanted, self._gradient_ready = False, True
                self._runner.news.set()
        except PoisonedVectorError:
            await self._read()  # one bad gradient is its learner's business, unless the parameters are bad
            return "failed"
        if not side.inbox.any_fresh:
            return "none"
        report = await self._heavy.run(lambda: side.merge(gradient_D, policy_version, correct))
        self._averaged(report, began_s)
        return report.outcome

    def _averaged(self, report: RoundReport, began_s: float) -> None:
        self._tally.ended(replace(report, seconds=self._clock.monotonic() - began_s), ours=False)

    # --- pushing ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        await super()._run()
        if self._flights:
            await asyncio.wait(self._flights.values())

    async def _turn(self) -> bool:
        now_s, alive = self._clock.monotonic(), self._swarm.alive()
        side = self._due(now_s, len(alive) + 1)
        if side is None:
            return False
        lent = self._core.fit(self._lending.lent & alive.keys(), now_s)
        peers = {*self._core.choose_all(alive, now_s), *lent}
        if not peers:
            self._gradient_ready = False  # it would be old when somebody is there
        peers -= self._flights.keys()
        if not peers or not self._messages.any_free:
            return False
        self._core.began(now_s)
        await self._push(side, {peer: alive[peer] for peer in sorted(peers)})
        hungry_for = None if self._config.partners == "random" else self._lending.whom_to_ask(alive)
        if hungry_for is not None:
            self._runner.beside(self._ask(hungry_for, alive[hungry_for]))
        return True

    def _due(self, now_s: float, members: int) -> GalaSide | None:
        """What is to be pushed now; a gradient is asked for first."""
        if not self._may_begin(now_s, members):
            return None
        if self._gradients is None or self._gradients_in_a_row >= self._config.parameters_every:
            return self._parameters
        self._gradient_wanted = not self._gradient_ready
        return self._gradients if self._gradient_ready else None

    async def _push(self, side: GalaSide, peers: dict[str, Address]) -> None:
        """Push to all of ``peers`` at once, and wait for none."""
        summary = self._swarm.summary()
        if side is self._parameters and not await self._load():
            self._averaged(_UNUSABLE, self._clock.monotonic())
            return
        buffer = self._messages.take()
        if summary is None or buffer is None:
            return
        message = buffer[: len(side.encoder.message)]
        message[:] = side.encoder.message
        side.encoder.delivered()  # what a lost push carried is lost
        self._gradient_ready = self._gradient_ready and side is self._parameters
        self._gradients_in_a_row = 0 if side is self._parameters else self._gradients_in_a_row + 1
        self._number += 1
        self._lending.pushed()
        head = PushHead(self._boot, self._number, side.wire, summary, side.content)
        for peer, address in peers.items():
            self._flights[peer] = self._runner.beside(self._push_to(head, message, peer, address))
        flights = [self._flights[peer] for peer in peers]
        self._runner.beside(self._land(flights, buffer))

    async def _land(self, flights: list[asyncio.Task[None]], buffer: memoryview) -> None:
        """Have the buffer back when the last push of it has ended."""
        await asyncio.wait(flights)
        self._messages.give(buffer)

    async def _load(self) -> bool:
        """Encode our parameters; False when they can't be given to anybody."""
        async with self._books:
            if not await self._read():
                return False
            await self._heavy.run(lambda: self._parameters.encoder.encode(self._own.vector))
            return True

    async def _push_to(self, head: PushHead, message: memoryview, peer: str, address: Address) -> None:
        """Push to one peer."""
        began_s = self._clock.monotonic()
        meta, deadline_s = msgspec.msgpack.encode(head), self._deadline.seconds
        report = RoundReport("unsure", missing=(peer,), bytes_out=len(message), round_trips=1)
        try:
            got = await self._transport.call(
                address, peer, ROUTE, meta, vector=message, deadline_s=deadline_s, lane="bulk"
            )
            report = self._pushed(peer, head, decode_push_answer(got.meta), report)
        except TransportError as error:
            report = replace(report, outcome=outcome_of(error), error=str(error), unready=unready(error))
        finally:
            del self._flights[peer]
        now_s = self._clock.monotonic()
        self._deadline.note("ok" if report.outcome == "pushed" else report.outcome, now_s - began_s)
        self._tally.ended(replace(report, seconds=now_s - began_s))
        if report.outcome == "pushed":
            self._core.mixed(peer)
        elif report.outcome != "busy":
            self._core.failed(peer, now_s, unready=report.unready)

    async def _ask(self, peer: str, address: Address) -> None:
        """Ask for a peer's pushes; when nothing comes of it, the next is asked."""
        summary = self._swarm.summary()
        if summary is None:
            return
        head = PushHead(self._boot, self._number, self._parameters.wire, summary, asks=True)
        meta = msgspec.msgpack.encode(head)
        with contextlib.suppress(TransportError):
            await self._transport.call(address, peer, ROUTE, meta, deadline_s=self._deadline.seconds)

    def _pushed(
        self, peer: str, head: PushHead, answer: PushAnswer | None, report: RoundReport
    ) -> RoundReport:
        if answer is None or answer.number != head.number:
            return replace(report, error="the answer can't be read")
        heard = self._door.heard(peer, head.summary, answer.summary, answer.verdict)
        if heard != "ok":
            return replace(report, outcome=heard, error=f"it answered {answer.verdict}")
        if answer.more:
            self._lending.renew(peer)
        return replace(report, outcome="pushed", missing=())

    # --- what comes -------------------------------------------------------------------------------

    async def answer(self, incoming: Incoming) -> Reply:
        """Keep what a peer pushes for the next average.

        Raises:
            Refusal: too many at once (423), no state yet (503), another task or mode (409), poisoned (422),
                quarantined (403), malformed (400), late (408).
        """
        if incoming.route != ROUTE:
            raise Refusal(409, f"this node's strategy is gala, which has no {incoming.route}")
        head = decode_push_head(incoming.meta)
        if head is None:
            raise Refusal(400, "the push's head can't be read")
        mine = self._door.admit(incoming.sender, stopping=self._runner.stopping)
        verdict = self._door.judge(incoming.sender, mine, head.summary)
        if head.asks:
            lent = verdict is Verdict.MIX and self._lending.lend(incoming.sender)
            result = PushAnswer(head.number, "taken" if lent else "void", mine, verdict.value)
            return Reply(msgspec.msgpack.encode(result))
        side = self._parameters if head.content == "parameters" else self._gradients
        if side is None:
            raise Refusal(409, f"this node pushes parameters, not {head.content}")
        if verdict is Verdict.MIX and not side.inbox.known(incoming.sender, head.boot, head.number):
            if head.wire != side.wire or not 0 < incoming.vector_nbytes <= side.encoder.max_nbytes:
                raise Refusal(422, "the vector has another format or length than ours")
            message = await side.arrivals.read(incoming, self._config.deadline_s)
            keeping = self._keep(side, head, message, incoming.vector_nbytes, incoming.sender)
            refusal = await asyncio.shield(self._runner.briefly(keeping))
            if refusal is not None:
                raise refusal
        result = PushAnswer(head.number, "taken" if verdict is Verdict.MIX else "void", mine, verdict.value)
        result = msgspec.structs.replace(result, more=self._lending.only(incoming.sender))
        return Reply(msgspec.msgpack.encode(result))

    async def _keep(
        self, side: GalaSide, head: PushHead, message: memoryview, nbytes: int, sender: str
    ) -> Refusal | None:
        """Keep what came; return why not, if it is refused."""
        try:
            async with self._books:
                if side.inbox.known(sender, head.boot, head.number):
                    return None
                letter = side.inbox.open(sender)
                if letter is None:
                    return Refusal(BUSY, "too many peers push to this node")
                await self._heavy.run(lambda: side.keep(letter, message[:nbytes]))
                side.inbox.seal(letter, head, nbytes)
                self._lending.came(sender)
        except PoisonedVectorError as error:
            self._swarm.strike(sender, str(error))
            return Refusal(422, f"poisoned vector: {error}")
        except WireError as error:
            return Refusal(400, str(error))
        except Refusal as refusal:
            return refusal
        finally:
            side.arrivals.give(message)
        self._runner.news.set()
        return None

    async def _read(self) -> bool:
        """Take our parameters off the board; False when they can't be used (then they are healed)."""

        def work() -> None:
            self._own.read()
            self._parameters.check(self._own.vector)

        try:
            await self._heavy.run(work)
        except PoisonedVectorError as error:
            self._swarm.heal(f"our own parameters are unusable: {error}")
            return False
        except TensorError:
            return False
        self._follow()
        return True

    def _follow(self) -> None:
        """When our vector was replaced by another, use nothing that came before."""
        if self._own.replaced():
            self._parameters.inbox.clear()
            if self._gradients is not None:
                self._gradients.inbox.clear()
