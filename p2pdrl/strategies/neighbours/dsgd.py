"""Synchronous gossip with neighbours on a graph: D-PSGD (Lian 2017, arXiv 1705.09056).

The group's members lay a graph over themselves (`topology`), whose Metropolis weights keep their mean. Each
``every_updates`` updates the learner makes a request and stands still; its node exchanges vectors with each
neighbour, mixes, and lets it go on:

    x_i ← x_i + Σ_j W_ij (x_j − x_i)

A neighbour that doesn't come in time is left out of the round, by both ends. When the view changes, a round
that has exchanged nothing yet is done again in the new one; one that has ends with the edges it has, which
keeps the mean as well. While there is no view, or no state, the learner waits ``deadline_s`` at most.

With ``exchanges = "gradients"`` it sends each gradient and steps with g_i + Σ_j W_ij (g_j − g_i); each
``parameters_every`` rounds the parameters that the gradient was computed on are mixed as well, before it
steps: that is D-PSGD's own update, x ← W x − γ g(x).

**Which mixing keeps the mean**: ``mean``, and ``clipped`` where nobody is far. Who is far is shortened by
each end's own radius; ``trimmed`` leaves out other values at each node. The mean moves by as much as that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np

from p2pdrl.config.strategy import DsgdConfig, Mode
from p2pdrl.errors import (
    P2PDRLError,
    PeerRefusedError,
    PeerUnreachableError,
    PoisonedVectorError,
    TensorError,
    TransportError,
    WireError,
)
from p2pdrl.group.adaptive_timeout import AdaptiveTimeout
from p2pdrl.group.calls import HOLD
from p2pdrl.group.compatibility import Summary, Verdict
from p2pdrl.group.service import ROUTE as GROUP_ROUTE
from p2pdrl.group.service import ActiveView, Group
from p2pdrl.group.view import ViewKey
from p2pdrl.strategies.admission import ExchangeAdmission
from p2pdrl.strategies.call_timeouts import outcome_of
from p2pdrl.strategies.gossip.pair_average import Bounds
from p2pdrl.strategies.learner_requests import RequestQueue
from p2pdrl.strategies.neighbours.mixing import (
    GradientContribution,
    NeighbourContribution,
    ParameterContribution,
    measure,
)
from p2pdrl.strategies.neighbours.round import (
    PAST,
    ROUTE,
    EdgeBuffer,
    Met,
    NeighbourHead,
    Neighbourhood,
    NeighbourRound,
    Position,
    SentMessages,
    position_of,
    round_report,
)
from p2pdrl.strategies.offload import Arithmetic
from p2pdrl.strategies.protocol import AnswerKind, LearnerRequest, RoundReport, Strategy, StrategyContext
from p2pdrl.strategies.task_runner import OutcomeMetrics, TaskRunner
from p2pdrl.transport.codec import decode
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

__all__ = ["DsgdStrategy", "NeighbourCalls", "NeighbourRoundServer", "PeerState"]

REMEMBERED = 16
"""Rounds of which we know when they began, to learn how late the late ones are."""


class PeerState:
    """Where one node stands in its neighbourhood: the view, the round under way, what was sent.

    Args:
        max_nbytes: of the longest message.
        unsure: told of each edge in which one side may have moved alone.
        distance: told how far a neighbour's parameters were.

    Attributes:
        at: the last round that was begun.
        seen: the greatest number that neighbours were heard to be at.
        round: the one under way.
        missed_s: how long rounds have waited in vain for each neighbour, since the last that it came to.
    """

    def __init__(
        self,
        config: DsgdConfig,
        context: StrategyContext,
        group: Group,
        arithmetic: Arithmetic,
        max_nbytes: int,
        *,
        unsure: Callable[[str], None],
        distance: Callable[[float], None],
    ) -> None:
        self.config, self.context, self.group = config, context, group
        self.me, self.swarm, self.clock = context.swarm.node_id, context.swarm, context.clock
        self.unsure, self._distance, self._arithmetic = unsure, distance, arithmetic
        self.admission = ExchangeAdmission(context.swarm, context.epoch, config.max_staleness)
        self._bounds = Bounds(context.max_abs, config.max_distance)
        self._max_nbytes = max_nbytes
        self.sent = SentMessages(max_nbytes)
        self.hood: Neighbourhood | None = None
        self.at, self.seen = Position(-1, 1), 0
        self.round: NeighbourRound | None = None
        self.adaptive = AdaptiveTimeout(config.deadline_s)
        self.stopping = False
        self.missed_s: dict[str, float] = {}
        self._began_s: dict[Position, float] = {}
        self._told_far: set[str] = set()
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
        self._told_far &= set(hood.weights)
        living = self.swarm.alive()
        self.missed_s = {peer: missed_s for peer, missed_s in self.missed_s.items() if peer in living}
        self.notify()

    def leave(self) -> None:
        """The view is over, or the strategy stops: the round under way ends with the edges that it has."""
        if self.round is not None:
            self.round.cut("regrouped", regrouped=True)
        self.notify()

    def begin(self, round_: NeighbourRound) -> None:
        """A round begins."""
        self.round, self.at = round_, round_.position
        self._began_s[round_.position] = round_.began_s
        while len(self._began_s) > REMEMBERED:
            del self._began_s[min(self._began_s)]
        self.notify()

    def end(self) -> None:
        """It has ended."""
        self.round = None
        self.notify()

    def came(self, round_: NeighbourRound, met: Met) -> None:
        """An edge counts."""
        self.adaptive.observe(self.clock.monotonic() - round_.began_s)
        if round_.part.content == "parameters":
            self._distance(met.edge.distance)

    def came_late(self, position: Position) -> None:
        """A neighbour came to a round that is over."""
        began_s = self._began_s.get(position)
        if began_s is not None:
            self.adaptive.observe(self.clock.monotonic() - began_s)

    def buffer(self, hood: Neighbourhood, peer: str) -> EdgeBuffer:
        """The edge to a neighbour."""
        return hood.buffer(peer, self.context.size, self._max_nbytes)

    async def read(
        self, round_: NeighbourRound, buffer: EdgeBuffer, peer: str, nbytes: int, theirs: Summary
    ) -> Met:
        """Read and check the vector in an edge's buffer.

        Raises:
            PoisonedVectorError: it is unusable.
            WireError: it is malformed.
            Refusal: the round has ended (408).
        """
        room, part = buffer.room(nbytes), round_.part
        if room is None or self.round is not round_:
            raise Refusal(408, f"round {round_.number} has ended")
        mine, length = part.mine, part.my_length
        weight = round_.hood.weights[peer] * self.swarm.trust(peer)
        bounds = self._bounds._replace(radius=part.radius)

        def work() -> Met:
            part.read(room, buffer.theirs)
            edge = measure(mine, length, buffer.theirs, weight, bounds, peer=peer)
            return Met(edge, theirs.policy_version, buffer.theirs)

        met = await self._arithmetic.run(work)
        if met.edge.strike and peer not in self._told_far:
            # No quarantine: the group would be formed anew without it, and again with it.
            self._told_far.add(peer)
            name = self.swarm.name_of(peer)
            self.swarm.tell("far", f"{name} counts for less and less: {met.edge.strike}", warning=True)
        return met

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


class NeighbourRoundServer:
    """Answers neighbours' calls, held until we have come to the same round or they have waited too long.

    Who gives up says so, and both ends leave the edge out. A caller that lags hears of it and goes on to our
    round; when we lag, its call shows us where it is, and waits there for us.
    """

    def __init__(self, state: PeerState) -> None:
        self._state = state

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a neighbour's call.

        Raises:
            WireError: malformed.
            Refusal: another view, mode, topology or route (409), we didn't come to that round in time (408),
                no state (503), quarantined (403), poisoned (422).
        """
        state = self._state
        head: NeighbourHead = decode(incoming.meta, NeighbourHead, "head")
        state.admission.admit(incoming.sender, stopping=state.stopping)
        try:
            async with asyncio.timeout(HOLD * min(head.wait_s, state.config.deadline_s)):
                work = self._answer(incoming, head)
                return await state.group.hold(incoming.sender, head.call, work)
        except TimeoutError as error:
            raise Refusal(408, f"not at round {head.number} in time") from error

    async def _answer(self, incoming: Incoming, head: NeighbourHead) -> Reply:
        state, sender = self._state, incoming.sender
        hood = await self._until_view(head.view)
        if sender not in hood.weights or sender > state.me:
            raise Refusal(409, "in this node's graph you are no neighbour that calls it")
        again = state.sent.again(head.view, head.position, sender)
        if again is not None:  # it counts here already, and our answer was lost
            return again
        buffer = state.buffer(hood, sender)
        buffer.newest = max(buffer.newest, head.position)
        state.notify()
        async with buffer.lock:
            room = buffer.room(incoming.vector_nbytes)
            if room is None:
                raise Refusal(422, "the vector has another length than ours")
            await incoming.read_vector_into(room)
            round_ = await self._until_round(head, buffer, sender)
            mine = state.admission.admit(sender, stopping=state.stopping)
            if round_ is None:
                return Reply(msgspec.msgpack.encode(self._past(head, mine, sender)))
            round_.busy.add(sender)
            try:
                return await self._reply(round_, buffer, incoming, head, mine)
            except BaseException as error:
                round_.miss(sender, "refused" if isinstance(error, Refusal) else "timeout")
                raise

    async def _until_view(self, key: ViewKey) -> Neighbourhood:
        """Wait for view ``key``, which may be in force at others first.

        Raises:
            Refusal: a later one is in force (409), or we stop (503).
        """
        state = self._state
        while True:
            view, hood = state.group.view, state.hood
            if view is not None and hood is not None and hood.key == view.key >= key:
                state.group.check(key)
                return hood
            await state.change()

    async def _until_round(
        self, head: NeighbourHead, buffer: EdgeBuffer, sender: str
    ) -> NeighbourRound | None:
        """Wait for the round that ``head`` is about; None when it is over.

        Raises:
            Refusal: the view changed (409), or we stop (503).
        """
        state, wanted = self._state, head.position
        while buffer.newest == wanted and state.at <= wanted:
            round_ = state.round
            if state.at == wanted:
                if round_ is not None and round_.awaits(sender):
                    return round_
                break
            state.seen = max(state.seen, head.number)
            if round_ is not None:
                round_.miss(sender, "ahead")
            await state.change()
            state.group.check(head.view)
        state.came_late(wanted)
        return None

    async def _reply(
        self,
        round_: NeighbourRound,
        buffer: EdgeBuffer,
        incoming: Incoming,
        head: NeighbourHead,
        mine: Summary,
    ) -> Reply:
        state, sender, nbytes = self._state, incoming.sender, incoming.vector_nbytes
        verdict = state.admission.judge(sender, mine, head.summary)
        meta = msgspec.msgpack.encode(round_.head(mine, verdict=verdict.value))
        if verdict is not Verdict.MIX:
            round_.miss(sender, "behind" if verdict is Verdict.ADOPT else "ahead")
            return Reply(meta)
        if head.wire != round_.part.wire:
            raise Refusal(422, "the vector has another format than ours")
        try:
            met = await state.read(round_, buffer, sender, nbytes, head.summary)
        except PoisonedVectorError as error:
            state.swarm.strike(sender, str(error))
            round_.miss(sender, "poisoned")
            raise Refusal(422, f"poisoned vector: {error}") from error
        if round_.closed:
            raise Refusal(408, f"round {head.number} has ended")
        round_.bytes_in += nbytes
        round_.bytes_out += round_.message.nbytes
        return self._counted(round_, sender, met, meta)

    def _counted(self, round_: NeighbourRound, sender: str, met: Met, meta: bytes) -> Reply:
        """An answer whose end makes the edge count."""
        state = self._state

        def ended(sent: bool) -> None:
            if not sent:
                round_.broke(sender)
            elif round_.settle(sender, met):
                round_.message.answers[sender] = meta
                state.came(round_, met)
            else:
                state.unsure(sender)

        return round_.message.reply(meta, ended)

    def _past(self, head: NeighbourHead, mine: Summary, sender: str) -> NeighbourHead:
        """Say which round is the next one that the sender can meet us in."""
        state = self._state
        round_ = state.round
        number = state.next_number
        if round_ is not None and round_.number > head.number and round_.awaits(sender):
            number = round_.number
        return NeighbourHead(head.view, number, head.content, head.wire, mine, verdict=PAST)


GRACE_S = 1.0
"""How long a round that was cut off waits for what is under way."""
RETRY_S = 0.05
RETRIES = 3
"""Calls that a neighbour refuses because it is in another view (ours changes soon as well), or that break."""


class NeighbourCalls:
    """Does rounds: the lower id of each edge calls, the higher one answers; x_i goes there, x_j comes back.

    The callee counts an edge once its answer is written, and that can be lost. The caller asks after it
    (`group.calls`) and calls again, and gets the same answer; only when that fails until the round's end has
    the callee moved alone. Such edges are counted as ``unsure``, on the side that can know.
    """

    def __init__(self, state: PeerState) -> None:
        self._state = state

    async def meet(self, hood: Neighbourhood, number: int, part: NeighbourContribution) -> NeighbourRound:
        """Exchange what ``part`` has loaded with each neighbour, as far as they come."""
        state, began_s = self._state, self._state.clock.monotonic()
        until_s = began_s + state.adaptive.deadline_s
        message = state.sent.begin(hood.key, position_of(number, part.content), part.message)
        round_ = NeighbourRound(hood, number, part, began_s, until_s, message)
        state.begin(round_)
        calls = [
            asyncio.create_task(self._call(round_, peer), name="neighbour")
            for peer in sorted(hood.weights)
            if peer > state.me
        ]
        try:
            await asyncio.sleep(0)
            if state.stopping or state.group.view is None or state.group.view.key != hood.key:
                round_.cut("regrouped", regrouped=True)
            await round_.wait(until_s - state.clock.monotonic())
            round_.cut("timeout")
            await round_.wait_settled(GRACE_S)
        finally:
            round_.close()
            state.end()
            for call in calls:
                call.cancel()
            ended = await asyncio.gather(*calls, return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                raise error
        for peer in round_.half & round_.missing.keys():
            state.unsure(peer)
        self._doubts(round_)
        return round_

    def _doubts(self, round_: NeighbourRound) -> None:
        """Ask for a view without neighbours that are gone for good.

        Who was left out before, and comes to no round after its return either, is left out again at once.
        """
        state, took_s = self._state, self._state.clock.monotonic() - round_.began_s
        for peer in round_.hood.weights:
            if peer not in round_.missing:
                state.missed_s.pop(peer, None)
                continue
            missed_s = state.missed_s[peer] = state.missed_s.get(peer, 0.0) + took_s
            if round_.missing[peer] == "gone":
                state.group.doubt(peer, "nothing listens there")
            elif missed_s > state.config.deadline_s and not round_.regrouped:
                state.group.doubt(peer, f"came to no round for {missed_s:.1f} s")

    async def _call(self, round_: NeighbourRound, peer: str) -> None:
        """Exchange with a neighbour; whatever becomes of it settles the edge."""
        for attempt in range(RETRIES + 1):
            try:
                await self._exchange(round_, peer)
            except PeerRefusedError as refusal:
                round_.busy.discard(peer)
                if refusal.status == 409 and attempt < RETRIES and not round_.cut_off:
                    await asyncio.sleep(RETRY_S * 2**attempt)
                    continue
                round_.miss(peer, "late" if refusal.status == 408 else "refused")
                if refusal.status == 408:  # it lives, and is slower than we thought
                    self._state.adaptive.observe(2 * (self._state.clock.monotonic() - round_.began_s))
            except (TransportError, TensorError, Refusal) as error:
                broke = isinstance(error, PeerUnreachableError) and error.sent
                if broke and attempt < RETRIES and not round_.cut_off:
                    await asyncio.sleep(RETRY_S)
                    continue
                self._failed(round_, peer, error)
            return

    def _failed(self, round_: NeighbourRound, peer: str, error: P2PDRLError) -> None:
        outcome = outcome_of(error)
        if outcome == "poisoned":
            self._state.swarm.strike(peer, str(error))
        if isinstance(error, PeerUnreachableError):
            outcome = "unsure" if error.sent else "gone"
        if isinstance(error, Refusal):  # our own round had ended when its answer came
            outcome = "unsure"
        if outcome in ("unsure", "poisoned"):
            self._state.unsure(peer)
        round_.miss(peer, outcome)

    async def _exchange(self, round_: NeighbourRound, peer: str) -> None:
        state = self._state
        away, mine = peer not in state.swarm.alive(), state.swarm.summary()
        left_s = round_.until_s - state.clock.monotonic()
        if away or mine is None or left_s <= 0 or round_.cut_off:
            round_.miss(peer, "away" if away else "timeout")
            return
        buffer = state.buffer(round_.hood, peer)
        round_.busy.add(peer)
        round_.bytes_out += round_.message.nbytes
        round_.round_trips += 1
        head = round_.head(mine, wait_s=left_s)
        answer = await state.group.call(
            peer,
            ROUTE,
            head,
            vector=round_.message.view,
            into=lambda _, nbytes: buffer.room(nbytes),
            deadline_s=left_s,
        )
        round_.bytes_in += answer.vector_nbytes
        try:
            theirs: NeighbourHead = decode(answer.meta, NeighbourHead, "head")
        except WireError:
            round_.miss(peer, "failed")
            return
        if theirs.verdict == PAST:
            state.seen = max(state.seen, theirs.number)
            round_.miss(peer, PAST)
            return
        heard = state.admission.heard(peer, mine, theirs.summary, theirs.verdict)
        if heard != "ok" or theirs.position != round_.position or not answer.vector_nbytes:
            round_.miss(peer, "failed" if heard == "ok" else heard)
            return
        met = await state.read(round_, buffer, peer, answer.vector_nbytes, theirs.summary)
        if round_.settle(peer, met):
            state.came(round_, met)


POLL_S = 0.05
LAST_ROUND_S = 0.5
"""How long `stop` waits for the round under way."""
NOTE_BYTES = 8
MAX_NUMBER = 2**52


class DsgdStrategy(Strategy):
    """D-PSGD over the transport; see `Strategy`."""

    mode: Mode = "gossip"

    def __init__(self, config: DsgdConfig, context: StrategyContext) -> None:
        self._config, self._context = config, context
        self._swarm, self._clock, self._learner = context.swarm, context.clock, context.learner
        self._arithmetic = Arithmetic(4 * context.size)
        delta_D = np.zeros(context.size, np.float32)
        self._parameters = ParameterContribution(config, context, delta_D)
        self._gradients = (
            GradientContribution(config, context, delta_D) if config.exchanges == "gradients" else None
        )
        longest = max(part.max_nbytes for part in (self._parameters, self._gradients) if part is not None)
        self._outcomes = OutcomeMetrics(context.swarm)
        self._group = Group(context.swarm, context.transport, context.clock, context.epoch, self._note)
        self._state = PeerState(
            config,
            context,
            self._group,
            self._arithmetic,
            longest,
            unsure=self._unsure,
            distance=self._outcomes.met,
        )
        self._calls, self._server = NeighbourCalls(self._state), NeighbourRoundServer(self._state)
        self._requests = RequestQueue(context.learner, context.clock)
        self._group_runs = False
        self._runner = TaskRunner()

    @property
    def group(self) -> Group:
        """In which views are agreed on."""
        return self._group

    @property
    def consensus_distance(self) -> float | None:
        """Estimate of sqrt(mean over nodes of ‖x_i − x̄‖²) from our neighbours, as if they were anybody."""
        return self._outcomes.consensus_distance

    @property
    def outcomes(self) -> dict[str, int]:
        """Rounds so far: ``ok`` (somebody was merged), ``regrouped`` (done again in a new view).

        Else, why nobody was: ``timeout late gone away refused poisoned past ahead behind failed``; ``unsure``
        counts edges in which one end may have moved alone, and a ``timeout`` may hide another such case.
        """
        return self._outcomes.outcomes

    @property
    def facts(self) -> dict[str, float | str]:
        """Figures for people; ``lambda2``: a round shrinks the distance to the mean by so much."""
        hood = self._state.hood
        facts: dict[str, float | str] = {"topology": self._config.topology, "round": self._state.next_number}
        if hood is None:
            return facts
        names = ", ".join(self._swarm.name_of(peer) for peer in sorted(hood.weights)[:8])
        more = f" and {len(hood.weights) - 8} more" if len(hood.weights) > 8 else ""
        return facts | {
            "members": len(hood.view.members),
            "neighbours": names + more,
            "spectral_gap": hood.spectral_gap,
            "lambda2": 1.0 - hood.spectral_gap,
            "patience_s": self._state.adaptive.deadline_s,
        }

    async def start(self) -> None:
        """Begin."""
        self._runner.start(self._run(), self._requests.follow(), self._follow_views())

    async def stop(self, timeout_s: float) -> None:
        """Let the round under way end with the edges that it has, and end everything."""
        self._state.stopping = self._runner.stopping = True
        self._state.leave()
        self._requests.close()
        await self._runner.stop(min(timeout_s, LAST_ROUND_S))
        await self._group.stop()
        await self._arithmetic.close()

    async def watch(self) -> None:
        """Wait until it is stopped; raise what ended it before: a bug of ours."""
        await self._runner.watch()

    def updated(self, updates: int) -> None:
        """Rounds follow requests, not updates."""

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a peer's call; see `NeighbourRoundServer.answer` and `Group.answer`."""
        if incoming.route == GROUP_ROUTE:
            return await self._group.answer(incoming)
        if incoming.route != ROUTE:
            raise Refusal(409, f"this node's strategy is dsgd, which has no {incoming.route}")
        return await self._server.answer(incoming)

    # Views

    def _note(self) -> bytes:
        return min(self._state.next_number, MAX_NUMBER).to_bytes(NOTE_BYTES, "big")

    async def _follow_views(self) -> None:
        """Stand in the view in force, for ever."""
        while True:
            enough = len(self._swarm.alive()) + 1 >= self._context.start_at_members
            if enough and self._swarm.summary() is not None:
                break
            await asyncio.sleep(POLL_S)
        await self._group.start()
        self._group_runs = True
        await self._group.run(self._in_view)

    async def _in_view(self, active: ActiveView) -> None:
        firsts = [int.from_bytes(note[:NOTE_BYTES], "big") for note in active.notes.values()]
        first = min(max(firsts, default=0), MAX_NUMBER)
        self._state.enter(Neighbourhood(self._config, self._swarm.node_id, active.view, first))
        try:
            await self._group.ended(active.view.key)
        finally:
            self._state.leave()

    # Turns of the learner

    async def _run(self) -> None:
        while not self._runner.stopping:
            request = await self._requests.next()
            if request is not None:
                await self._turn(request)

    async def _turn(self, request: LearnerRequest) -> None:
        """Do what the learner asks for, and let the learner go on."""
        began_s, sets = self._requests.since_s, self._learner.board.sets
        part: NeighbourContribution | None = self._parameters
        if self._gradients is not None:
            self._gradients.request = request
            part = None if request.vector is None else self._gradients
        kind: AnswerKind = "none"
        enough = 0 < self._context.max_exchanges <= self._outcomes.count("ok")
        if part is not None and self._group_runs and not enough:
            round_ = await self._round(part, began_s)
            if round_ is not None and self._runner.stopping and not round_.met:
                return
            if round_ is not None and await self._ended(round_, part, began_s):
                kind = "set" if part is self._parameters else "replace"
            if round_ is not None and part is self._gradients:
                await self._mix_parameters(round_.number)
        if kind == "none" and self._learner.board.sets != sets:
            kind = "set"
        if not self._runner.stopping or kind != "none":
            self._requests.answer(request, kind)

    async def _round(self, part: NeighbourContribution, began_s: float) -> NeighbourRound | None:
        """Do one round; None when there is nobody to do it with, or nothing to do it with."""
        while not self._runner.stopping:
            hood = await self._place(began_s + self._config.deadline_s)
            if hood is None or not hood.weights or not await self._load(part):
                return None
            number = self._state.next_number
            round_ = await self._calls.meet(hood, number, part)
            late = self._clock.monotonic() > began_s + self._config.deadline_s
            if round_.met or late or not (round_.regrouped or self._state.next_number > number + 1):
                return round_
            self._outcomes.ended(
                RoundReport("regrouped" if round_.regrouped else "past", missing=tuple(round_.missing)),
                ours=False,
            )
        return None

    async def _mix_parameters(self, number: int) -> None:
        """After a round of gradients: the parameters, each so many rounds, over the same edges."""
        hood = self._state.hood
        if (number + 1) % self._config.parameters_every or hood is None or self._group.view != hood.view:
            return
        began_s = self._clock.monotonic()
        if self._state.at.number == number and await self._load(self._parameters):
            round_ = await self._calls.meet(hood, number, self._parameters)
            await self._ended(round_, self._parameters, began_s)

    async def _place(self, until_s: float) -> Neighbourhood | None:
        """Wait for a state of ours and a view; None when they don't come in time."""
        while not self._runner.stopping:
            view, hood = self._group.view, self._state.hood
            ready = view is not None and hood is not None and hood.key == view.key
            if ready and self._swarm.summary() is not None:
                return hood
            left_s = until_s - self._clock.monotonic()
            if left_s <= 0:
                return None
            with contextlib.suppress(TimeoutError, Refusal):
                async with asyncio.timeout(min(POLL_S, left_s)):
                    await self._state.change()
        return None

    async def _load(self, part: NeighbourContribution) -> bool:
        """Take what is ours; False when it can't be given to anybody. Parameters that can't are healed."""
        try:
            await self._arithmetic.run(part.load)
            return True
        except PoisonedVectorError as error:
            if part is self._parameters:
                self._swarm.heal(f"our own parameters are unusable: {error}")
            return False

    async def _ended(self, round_: NeighbourRound, part: NeighbourContribution, began_s: float) -> bool:
        """Mix what came, and report; False when nothing was added to ours."""
        own_version = self._learner.board.policy_version
        changed: float | None = 0.0
        if round_.met:
            others = [(met.theirs, met.edge.weight) for _, met in sorted(round_.met.items())]
            version = max(own_version, *(met.policy_version for met in round_.met.values()))
            changed = await self._arithmetic.run(lambda: part.apply(others, version))
        report = round_report(round_, self._config.mixing, self._swarm.node_id, own_version, changed)
        now_s = self._clock.monotonic()
        self._outcomes.ended(replace(report, seconds=now_s - round_.began_s, waited_s=now_s - began_s))
        return bool(round_.met) and changed is not None

    def _unsure(self, peer: str) -> None:
        self._outcomes.ended(
            RoundReport("unsure", missing=(peer,), error="one end may have moved"), ours=False
        )
