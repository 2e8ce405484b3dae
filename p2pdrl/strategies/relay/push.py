"""Messages on their way: what a peer lacks is sent until it says that it has it; what comes is added once."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from p2pdrl.config.strategy import StromConfig
from p2pdrl.errors import P2PDRLError, TensorError, TransportError, WireError
from p2pdrl.strategies.calling import outcome_of
from p2pdrl.strategies.door import Door
from p2pdrl.strategies.judgement import Summary, Verdict
from p2pdrl.strategies.protocol import Context, Merged, RoundReport
from p2pdrl.strategies.relay.log import History, Origin
from p2pdrl.strategies.relay.member import Absorbed, StromMember
from p2pdrl.strategies.relay.messages import MAX_MESSAGES, ROUTE, Known, Push, Pushed, cut_runs, run_head
from p2pdrl.strategies.relay.sync import StromSync
from p2pdrl.strategies.tally import Tally
from p2pdrl.transport.codec import decode
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply

__all__ = ["StromPush"]

GAP_S = 1.0
"""With relays, messages that one neighbour has lost may come from another one within this time."""
BATCH_BYTES = 1 << 20


class StromPush:
    """Sends and takes messages.

    Args:
        config: the strategy's options.
        context: what the node gives.
        member: our part.
        door: judges peers.
        sync: told who has a base when we need one.
        tally: counts.
    """

    def __init__(  # noqa: PLR0917 - the parts of one strategy
        self,
        config: StromConfig,
        context: Context,
        member: StromMember,
        door: Door,
        sync: StromSync,
        tally: Tally,
    ) -> None:
        self._config, self._context, self._member = config, context, member
        self._door, self._sync, self._tally = door, sync, tally
        self._swarm, self._clock = context.swarm, context.clock
        self._most_bytes = max(BATCH_BYTES, member.state.max_nbytes)
        self._gaps_s: dict[str, float] = {}

    # As the one that calls

    async def push(self, peer: str, address: Address, *, relay: bool) -> bool:
        """Send a peer what it lacks; False when it is better left alone for a while."""
        mine, log, began_s = self._swarm.summary(), self._member.log, self._clock.monotonic()
        if mine is None or log.history is None:
            return False
        runs = log.runs_for(peer, relay=relay, most_bytes=self._most_bytes, most=MAX_MESSAGES)
        vector = memoryview(b"".join(message for run in runs for message in run.messages))
        asks = tuple((origin.node, origin.boot) for origin in log.origins(relay=relay))
        head = Push(mine, log.history, self._member.state.tau, tuple(run_head(run) for run in runs), asks)
        report = RoundReport("failed", missing=(peer,), bytes_out=len(vector), round_trips=1)
        try:
            answer = await self._context.transport.call(
                address,
                peer,
                ROUTE,
                msgspec.msgpack.encode(head),
                vector=vector if vector else None,
                deadline_s=self._config.deadline_s,
                lane="bulk",
            )
            report = self._heard(peer, mine, head, decode(answer.meta, Pushed, "answer of a member"), report)
        except (TransportError, TensorError) as error:
            report = replace(report, outcome=outcome_of(error), error=str(error))
        if report.outcome != "pushed" or vector:
            self._tally.ended(replace(report, seconds=self._clock.monotonic() - began_s))
        return report.outcome == "pushed"

    def _heard(self, peer: str, mine: Summary, head: Push, told: Pushed, report: RoundReport) -> RoundReport:
        """Say what an answer means."""
        heard = self._door.heard(peer, mine, told.summary, told.verdict)
        if heard != "ok":
            return replace(report, outcome=heard, error=f"it answered {told.verdict}")
        if told.history is None:
            return replace(report, outcome="ahead", error="it has no base yet")
        if told.history != head.history:
            if told.history > head.history:
                self._outranked(peer, told.history)
                return replace(report, outcome="behind", error="it has a greater history")
            return replace(report, outcome="ahead", error="it takes a base of our history first")
        self._member.log.known(peer, {Origin(node, boot): number for node, boot, number in told.have})
        me, staleness = self._swarm.node_id, mine.policy_version - told.summary.policy_version
        merged = (Merged(me, 0.5), Merged(peer, 0.5, staleness))  # both count alike
        return replace(report, outcome="pushed", merged=merged, missing=())

    def _outranked(self, peer: str, history: History) -> None:
        """Somebody has a greater history: take its base."""
        log = self._member.log
        if log.history is None or history > log.history:
            self._member.in_step, self._sync.hint = False, peer

    # As the one that is called

    async def answer(self, incoming: Incoming, push: Push, *, relay: bool) -> Reply:
        """Add what is new to our parameters.

        Raises:
            Refusal: see `StromStrategy.answer`.
        """
        sender, member, began_s = incoming.sender, self._member, self._clock.monotonic()
        mine = self._door.admit(sender, stopping=False)
        verdict = self._door.judge(sender, mine, push.summary)
        if verdict is not Verdict.MIX:
            return Reply(msgspec.msgpack.encode(Pushed(mine, verdict.value)))
        if push.tau != member.state.tau:
            raise Refusal(409, f"this node's tau is {member.state.tau:g}, not {push.tau:g}")
        self._outranked(sender, push.history)
        history = member.log.history if member.in_step else None
        if history is None or push.history < history:
            return Reply(msgspec.msgpack.encode(Pushed(mine, history=history)))
        absorbed = await self._absorb(incoming, push, relay=relay)
        self._note_gap(sender, absorbed.gap, relay=relay)
        if incoming.vector_nbytes:
            merged = Merged(sender, 0.5, mine.policy_version - push.summary.policy_version)
            report = RoundReport(
                "answered" if absorbed.messages else "known",
                merged=(Merged(self._swarm.node_id, 0.5), merged) if absorbed.messages else (),
                bytes_in=incoming.vector_nbytes,
                changed=absorbed.changed,
                seconds=self._clock.monotonic() - began_s,
            )
            self._tally.ended(report, ours=False)
        history = member.log.history if member.in_step else None
        return Reply(msgspec.msgpack.encode(Pushed(mine, history=history, have=self._have(push))))

    async def _absorb(self, incoming: Incoming, push: Push, *, relay: bool) -> Absorbed:
        if incoming.vector_nbytes > self._most_bytes:
            raise Refusal(422, f"more than {self._most_bytes} bytes at once")
        vector = memoryview(bytearray(incoming.vector_nbytes))
        if vector:
            await incoming.read_vector_into(vector)
        runs = cut_runs(push.runs, vector)
        if runs is None:
            raise Refusal(400, "the messages' lengths don't add up")
        try:
            return await self._member.absorb(runs, push.summary.policy_version, relay=relay)
        except WireError as error:
            self._strike(incoming.sender, error)
            raise Refusal(422, f"a message can't be: {error}") from error

    def _strike(self, sender: str, error: P2PDRLError) -> None:
        self._swarm.strike(sender, str(error))

    def _have(self, push: Push) -> Known:
        asked = self._member.log.covers(Origin(node, boot) for node, boot in push.asks)
        return [(origin.node, origin.boot, number) for origin, number in asked.items()]

    def _note_gap(self, sender: str, gap: bool, *, relay: bool) -> None:
        """Messages that nobody keeps are missing: take a base."""
        if not gap:
            self._gaps_s.pop(sender, None)
            return
        now_s = self._clock.monotonic()
        since_s = self._gaps_s.setdefault(sender, now_s)
        if not relay or now_s - since_s > GAP_S:
            self._gaps_s.clear()
            self._member.in_step, self._sync.hint = False, sender
