"""The failure detector: one probe an interval, k relays when it times out (SWIM, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

from p2pdrl.membership.events import Answered, Respond, SendFailed, proves_absence, shows_life
from p2pdrl.membership.kernel import Kernel, Outcome
from p2pdrl.membership.messages import Ack, GossipMessage, Nack, Ping, PingReq
from p2pdrl.membership.records import Incarnation, Record, Suspicion
from p2pdrl.membership.rumours import Rumours
from p2pdrl.membership.table import Member

__all__ = ["LastLooks", "Prober"]


@dataclass(slots=True)
class _Look:
    """One last look under way: answers still to come, and whether any showed life."""

    node_id: str
    generation: int
    open: int = 0
    over: bool = False


class LastLooks:
    """Looks at suspects before they are given up.

    Args:
        kernel: what the core's parts share.
        rumours: takes the verdict, and the records that ride on answers.
    """

    def __init__(self, kernel: Kernel, rumours: Rumours) -> None:
        self._kernel = kernel
        self._rumours = rumours

    def start(self, member: Member) -> None:
        """Look at ``member``, whose suspicion has run out."""
        look = _Look(member.record.id, member.generation)
        self._ping(member, lambda result: self._first(look, member, result))

    def _ping(self, member: Member, outcome: Outcome) -> None:
        kernel = self._kernel
        evidence = self._rumours.evidence(member)
        ping = Ping(kernel.me.incarnation, member.record.incarnation, kernel.load(*evidence))
        kernel.send(member, ping, self._deadline_s(), outcome)

    def _deadline_s(self) -> float:
        return self._kernel.awareness.scale(self._kernel.config.probe_timeout_s)

    def _first(self, look: _Look, member: Member, result: Answered | SendFailed) -> None:
        self._learn(result)
        if shows_life(result) or self._is_our_trouble(result):
            self._end(look, found=True)
        elif isinstance(result, SendFailed) and proves_absence(result):
            self._end(look, found=False)
        else:
            self._ask_around(look, member)

    def _ask_around(self, look: _Look, member: Member) -> None:
        kernel = self._kernel
        relays = kernel.table.sample(
            2 * kernel.config.indirect_probes, kernel.rng, lambda other: other.state == "alive"
        )
        look.open = len(relays) + 1
        self._ping(member, lambda result: self._second(look, result))
        for relay in relays:
            request = PingReq(look.node_id, member.record.incarnation, kernel.load())
            kernel.send(relay, request, self._deadline_s(), lambda result: self._second(look, result))

    def _second(self, look: _Look, result: Answered | SendFailed) -> None:
        self._learn(result)
        look.open -= 1
        if isinstance(result, Answered) and isinstance(result.message, Ack):
            self._end(look, found=True)
        elif look.open == 0:
            self._end(look, found=False)

    def _learn(self, result: Answered | SendFailed) -> None:
        if isinstance(result, Answered) and isinstance(result.message, Ack | Nack):
            self._rumours.apply(result.message.records, result.told_by)

    @staticmethod
    def _is_our_trouble(result: Answered | SendFailed) -> bool:
        return isinstance(result, SendFailed) and result.kind == "local"

    def _end(self, look: _Look, found: bool) -> None:
        if not look.over:
            look.over = True
            self._rumours.looked(look.node_id, look.generation, found)


LOOK_AHEAD = 128
"""Members of the round among which the most silent is probed first."""


@dataclass(slots=True)
class _Probe:
    """One probe under way; ``failed`` once the direct ping did."""

    target: str
    incarnation: Incarnation
    started: float
    relays_asked: int = 0
    nacks: int = 0
    silent: int = 0
    indirect: bool = False
    failed: bool = False


class Prober:
    """Probes members in a shuffled round, and probes on behalf of others.

    Args:
        kernel: what the core's parts share.
        rumours: takes the records that ride on answers, and our accusations.
    """

    def __init__(self, kernel: Kernel, rumours: Rumours) -> None:
        self._kernel = kernel
        self._rumours = rumours
        self._ring: list[str] = []
        self._probes: dict[int, _Probe] = {}
        self._count = 0

    # Rounds

    def enter(self, member: Member) -> None:
        """Give a newcomer a random place in the present round."""
        self._ring.insert(self._kernel.rng.randint(0, len(self._ring)), member.record.id)

    def probe_next(self) -> None:
        """Probe the next living member of the round."""
        member = self._next()
        if member is not None:
            self.probe(member)

    def _next(self) -> Member | None:
        """Of the next few of the round, the one that we haven't heard from for longest.

        Everybody is probed once a round all the same; but who fell silent comes first, which cuts the
        tail of the time to the first probe that fails.
        """
        table = self._kernel.table
        for fresh in (False, True):
            if fresh:
                self._ring = [member.record.id for member in table.living]
                self._kernel.rng.shuffle(self._ring)
            while self._ring:
                node_id = min(self._ring[-LOOK_AHEAD:], key=self._heard)
                self._ring.remove(node_id)
                member = table.get(node_id)
                if member is not None and member.living:
                    return member
        return None

    def _heard(self, node_id: str) -> float:
        member = self._kernel.table.get(node_id)
        return 0.0 if member is None or member.last_seen is None else member.last_seen

    def second_opinion(self, member: Member) -> None:
        """Somebody accuses ``member``: maybe look ourselves, soon.

        About ``second_opinions`` of all members do, so that a death is confirmed, or refuted, fast.
        """
        kernel, config = self._kernel, self._kernel.config
        others = max(1, kernel.table.living_total - 2)
        if kernel.rng.random() * others >= config.second_opinions:
            return
        node_id, generation = member.record.id, member.generation

        def look() -> None:
            held = kernel.table.get(node_id)
            if held is None or held.timer is None or held.generation != generation:
                return
            if kernel.me.id not in held.timer.accusers:
                self.probe(held)

        kernel.arm(kernel.rng.uniform(0.0, 0.25) * config.probe_interval_s, look)

    def forget(self) -> None:
        """Drop every probe under way without a verdict: we were held up ourselves."""
        self._probes.clear()

    # One probe

    def probe(self, member: Member) -> None:
        """Start one probe of ``member``."""
        kernel, config = self._kernel, self._kernel.config
        self._count += 1
        number, record = self._count, member.record
        self._probes[number] = _Probe(record.id, record.incarnation, kernel.now)
        window_s = kernel.awareness.scale(config.probe_interval_s)
        ping = Ping(kernel.me.incarnation, record.incarnation, kernel.load(*self._rumours.evidence(member)))
        kernel.send(member, ping, window_s, lambda result: self._direct(number, result))
        kernel.arm(config.probe_timeout_s, lambda: self._ask_relays(number))
        kernel.arm(window_s, lambda: self._verdict(number))

    def _direct(self, number: int, result: Answered | SendFailed) -> None:
        probe = self._probes.get(number)
        if isinstance(result, Answered) and isinstance(result.message, Ack):
            member = None if probe is None else self._kernel.table.get(probe.target)
            if probe is not None and member is not None:
                member.measured(self._kernel.now - probe.started)
            self._good(number, result, result.message)
            return
        if probe is None:
            return
        if isinstance(result, SendFailed) and proves_absence(result):
            del self._probes[number]
            member = self._kernel.table.get(probe.target)
            if member is not None:
                self._rumours.accuse(member, probe.incarnation, result.reason)
        elif shows_life(result):
            del self._probes[number]
        else:
            if isinstance(result, SendFailed) and result.kind == "local":
                self._kernel.awareness.add(1)
            probe.failed = True
            self._ask_relays(number)
            self._settle(number)

    def _ask_relays(self, number: int) -> None:
        kernel = self._kernel
        probe = self._probes.get(number)
        if probe is None or probe.indirect:
            return
        probe.indirect = True
        relays = kernel.table.sample(
            kernel.config.indirect_probes,
            kernel.rng,
            lambda member: member.state == "alive" and member.record.id != probe.target,
        )
        probe.relays_asked = len(relays)
        deadline_s = kernel.awareness.scale(kernel.config.probe_timeout_s)
        for relay in relays:
            request = PingReq(probe.target, probe.incarnation, kernel.load())
            kernel.send(relay, request, deadline_s, lambda result: self._relayed(number, result))

    def _relayed(self, number: int, result: Answered | SendFailed) -> None:
        if isinstance(result, Answered) and isinstance(result.message, Ack):
            self._good(number, result, result.message)
            return
        probe = self._probes.get(number)
        if isinstance(result, Answered) and isinstance(result.message, Nack):
            self._rumours.apply(result.message.records, result.told_by)
            if probe is not None:
                probe.nacks += 1
        elif probe is not None:
            probe.silent += 1
        self._settle(number)

    def _good(self, number: int, result: Answered, ack: Ack) -> None:
        probe = self._probes.pop(number, None)
        self._rumours.apply(ack.records, result.told_by)
        if probe is not None:
            self._kernel.awareness.add(-1)

    def _settle(self, number: int) -> None:
        """Judge early when nothing more can come."""
        probe = self._probes.get(number)
        if probe is not None and probe.failed and probe.nacks + probe.silent == probe.relays_asked > 0:
            self._verdict(number)

    def _verdict(self, number: int) -> None:
        kernel = self._kernel
        probe = self._probes.pop(number, None)
        if probe is None:
            return
        missing = probe.relays_asked - probe.nacks
        kernel.awareness.add(missing if probe.relays_asked else 1)
        member = kernel.table.get(probe.target)
        if member is None:
            return
        reason = "no answer to probe"
        if probe.relays_asked:
            reason += f"; {probe.nacks} of {probe.relays_asked} relays could not reach it either"
        self._rumours.accuse(member, probe.incarnation, reason)

    # Answering

    def answer_ping(self, token: int, sender: str, ping: Ping, told_by: str) -> None:
        """Answer a probe of ourselves: with our record when it is news, and with accusations."""
        kernel = self._kernel
        self._rumours.apply(ping.records, told_by)
        first = (kernel.me,) if ping.known < kernel.me.incarnation else ()
        kernel.effects.append(Respond(token, self.ack(sender, ping.incarnation, *first)))

    def ack(self, sender: str, incarnation: Incarnation, *first: Record) -> Ack:
        """An ack to ``sender``, who said that it is in ``incarnation``."""
        kernel = self._kernel
        member = kernel.table.get(sender)
        accusations: tuple[Suspicion, ...] = ()
        if member is not None and member.record.incarnation == incarnation:
            accusations = self._rumours.evidence(member)
        want = member is None or member.record.incarnation < incarnation
        records = kernel.load(*first, *self._rumours.corrections(), *accusations)
        return Ack(kernel.me.incarnation, records, want)

    def answer_ping_req(self, token: int, request: PingReq, told_by: str) -> None:
        """Probe ``request.target`` for somebody else; only at the address that we hold."""
        kernel = self._kernel
        self._rumours.apply(request.records, told_by)
        member = kernel.table.get(request.target)
        if member is None or member.state == "left":
            kernel.effects.append(Respond(token, Nack("not in my view", kernel.load())))
            return
        record = member.record
        if record.incarnation > request.known and member.state == "alive":
            kernel.effects.append(Respond(token, Ack(record.incarnation, kernel.load(record))))
            return
        if record.incarnation == request.known and member.state == "dead":
            kernel.effects.append(Respond(token, Nack("given up here too", kernel.load())))
            return
        known = min(request.known, record.incarnation)

        def relay(result: Answered | SendFailed) -> None:
            if isinstance(result, Answered) and isinstance(result.message, Ack):
                ack = result.message
                self._rumours.apply(ack.records, result.told_by)
                newer = (member.record,) if member.record.incarnation > request.known else ()
                answer: Ack | Nack = Ack(ack.incarnation, kernel.load(*newer))
            else:
                reason = result.reason if isinstance(result, SendFailed) else "a strange answer"
                answer = Nack(reason[:200], kernel.load())
                if isinstance(result, SendFailed) and proves_absence(result):
                    self._rumours.accuse(member, record.incarnation, reason)
            kernel.effects.append(Respond(token, answer))

        ping = Ping(kernel.me.incarnation, known, kernel.load(*self._rumours.evidence(member)))
        kernel.send(member, ping, kernel.config.probe_timeout_s * kernel.config.nack_fraction, relay)

    def introduce(self, member: Member) -> None:
        """Send our own record to a member that asked for it."""
        kernel = self._kernel
        gossip = GossipMessage(kernel.me.incarnation, kernel.load(kernel.me))
        kernel.send(member, gossip, kernel.config.probe_interval_s, lambda result: None)
