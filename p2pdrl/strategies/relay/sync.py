"""Getting a base: from a member that has one, or by beginning a history when nobody has.

The lowest id begins, once all who answer have said that they have none either. Whoever took part before says
what it has; a member that lacks some of that lets it ask again for a while, since that may be under way, and
then begins a greater history, which all others follow.
"""

from __future__ import annotations

import asyncio
import random
from typing import Literal

import msgspec
import numpy as np

from p2pdrl.config.strategy import StromConfig
from p2pdrl.errors import PeerTimeoutError, PoisonedVectorError, TensorError, TransportError, WireError
from p2pdrl.strategies.door import Door
from p2pdrl.strategies.judgement import Verdict
from p2pdrl.strategies.protocol import Context
from p2pdrl.strategies.relay.log import Origin
from p2pdrl.strategies.relay.member import Given, StromMember
from p2pdrl.strategies.relay.messages import ROUTE, Ask, Asked, State
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.transport.codec import decode
from p2pdrl.transport.protocol import Address, Refusal, Reply

__all__ = ["StromSync"]

FIRST_PAUSE_S = 0.05
MOST_PAUSE_S = 1.0
URGENT_AFTER = 6
"""Rounds of asking, with growing pauses: about two seconds."""
SILENT_AFTER = 3
"""Rounds of asking after which those who don't answer are no longer waited for."""
STATE_DEADLINE_S = 30.0
"""Longest time for a base; it begins with the strategy's deadline and doubles when that wasn't enough."""

Heard = Literal["taken", "wait", "failed"]


class StromSync:
    """Asks for bases, and gives them.

    Args:
        config: the strategy's options.
        context: what the node gives.
        member: our part.
        door: judges peers.
    """

    def __init__(self, config: StromConfig, context: Context, member: StromMember, door: Door) -> None:
        self._context, self._member, self._door = context, member, door
        self._swarm, self._rng = context.swarm, random.Random(context.rng.getrandbits(64))
        self._first_deadline_s = self._deadline_s = config.deadline_s
        self.hint = ""
        """Who is known to have a base that we need."""
        self.taken = 0
        self.bytes_in = self.bytes_out = 0

    async def run(self) -> None:
        """Ask until we are in step."""
        rounds = 0
        while not self._member.in_step:
            if self._swarm.summary() is not None and await self._round(rounds):
                return
            rounds += 1
            pause_s = min(FIRST_PAUSE_S * 2.0**rounds, MOST_PAUSE_S)
            await asyncio.sleep(self._rng.uniform(0.5, 1.0) * pause_s)

    async def _round(self, rounds: int) -> bool:
        """Ask everybody who has a base, then one of them for it."""
        living = self._swarm.alive()
        peers = sorted(living)
        told = dict(
            zip(
                peers, await asyncio.gather(*(self._probe(peer, living[peer]) for peer in peers)), strict=True
            )
        )
        histories = {peer: one.history for peer, one in told.items() if one is not None and one.history}
        if histories:
            best = [peer for peer in peers if histories.get(peer) == max(histories.values())]
            giver = self.hint if self.hint in best else self._rng.choice(best)
            heard = await self._ask(giver, living[giver], urgent=rounds >= URGENT_AFTER)
            self.hint = giver if heard == "wait" else ""
            return heard == "taken"
        silent = [peer for peer in peers if told[peer] is None]
        if silent and rounds < SILENT_AFTER:
            return False
        if any(peer < self._swarm.node_id for peer in peers if told[peer] is not None):
            return False
        history = self._member.log.history
        await self._member.found(era=0 if history is None else history.era + 1)
        return True

    async def _probe(self, peer: str, address: Address) -> Asked | None:
        """Ask which history a peer has; None when it doesn't say, or can't be mixed with."""
        mine = self._swarm.summary()
        if mine is None:
            return None
        try:
            answer = await self._context.transport.call(
                address,
                peer,
                ROUTE,
                msgspec.msgpack.encode(Ask(mine, self._member.log.own.boot, 0, probe=True)),
                deadline_s=self._first_deadline_s,
                lane="bulk",
            )
            told: Asked = decode(answer.meta, Asked, "answer of a member")
        except (TransportError, TensorError):
            return None
        return told if self._door.heard(peer, mine, told.summary, told.verdict) == "ok" else None

    async def _ask(self, peer: str, address: Address, *, urgent: bool) -> Heard:
        """Ask a peer for its base, and have it."""
        mine, log = self._swarm.summary(), self._member.log
        if mine is None:
            return "failed"
        have = [(origin.node, origin.boot, number) for origin, number in log.have.items()]
        ask = Ask(mine, log.own.boot, log.oldest_own, log.history, have, urgent)
        base: Float32Array = np.empty(self._context.size, np.float32)
        room = base.data.cast("B")
        try:
            answer = await self._context.transport.call(
                address,
                peer,
                ROUTE,
                msgspec.msgpack.encode(ask),
                into=lambda _, nbytes: room if nbytes == len(room) else None,
                deadline_s=self._deadline_s,
                lane="bulk",
            )
            told: State | Asked = decode(answer.meta, State | Asked, "answer of a member")
            if isinstance(told, Asked):
                return "wait" if told.history is not None else "failed"
            if answer.vector_nbytes != len(room):
                return "failed"
            self.bytes_in += len(room)
            contains = {Origin(node, boot): number for node, boot, number in told.have}
            version = max(mine.policy_version, told.summary.policy_version)
            done = await self._member.take(Given(told.history, contains, base), version)
        except (PoisonedVectorError, WireError) as error:
            self._swarm.strike(peer, str(error))
            return "failed"
        except (TransportError, TensorError) as error:
            if isinstance(error, PeerTimeoutError):
                self._deadline_s = min(2 * self._deadline_s, max(STATE_DEADLINE_S, self._deadline_s))
            return "failed"
        self.taken += 1
        return "taken" if done else "failed"

    async def answer(self, sender: str, ask: Ask) -> Reply:
        """Give our base.

        Raises:
            Refusal: see `Door`; our own numbers are unusable (503).
        """
        mine = self._door.admit(sender, stopping=False)
        verdict = self._door.judge(sender, mine, ask.summary)
        log = self._member.log
        if ask.probe or verdict is not Verdict.MIX or not self._member.in_step or log.history is None:
            history = log.history if self._member.in_step else None
            return Reply(msgspec.msgpack.encode(Asked(mine, verdict.value, history)))
        have = {Origin(node, boot): number for node, boot, number in ask.have}
        if not log.contains(ask.history, have, Origin(sender, ask.boot), ask.oldest):
            if not ask.urgent:
                return Reply(msgspec.msgpack.encode(Asked(mine, history=log.history)))
            await self._member.found(era=log.history.era + 1)
        try:
            given = await self._member.give()
        except PoisonedVectorError as error:
            self._swarm.heal(f"our own parameters are unusable: {error}")
            raise Refusal(503, "our own numbers are unusable") from error
        if given is None:
            return Reply(msgspec.msgpack.encode(Asked(mine)))
        contains = [(origin.node, origin.boot, number) for origin, number in given.have.items()]
        vector = given.base.data.cast("B")
        self.bytes_out += len(vector)
        return Reply(msgspec.msgpack.encode(State(mine, given.history, contains)), vector=vector)
