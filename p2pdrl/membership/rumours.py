"""What a received record changes: the rules of alive, suspect, dead and left (SWIM, section 4.2).

`Rumours` takes in records from any message, whoever brought them, and the prober's own findings.

| held | arrives | result |
|---|---|---|
| anything | a member's record of a higher incarnation | taken; alive, or left |
| alive at i | a suspicion at i | suspect; the timer starts |
| suspect at i | a suspicion at i by somebody new | the timer comes down |
| suspect at i | the timer runs out, and a last probe fails | dead; told as evidence |
| ourselves at i | a suspicion at i | we raise our incarnation: a refutation |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from p2pdrl.membership.events import EventKind, State, SwarmChanged, TwinFound
from p2pdrl.membership.kernel import Kernel
from p2pdrl.membership.records import (
    BadRecordError,
    Incarnation,
    MemberRecord,
    Record,
    Suspicion,
    SwarmRecord,
    sign_suspicion,
)
from p2pdrl.membership.suspicion import SuspicionTimer
from p2pdrl.membership.table import Member

__all__ = ["Rumours"]

MAX_CORRECTIONS = 4
"""Most records that correct the teller in one answer."""


class Rumours:
    """Applies records to the view.

    Args:
        kernel: what the core's parts share.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._corrections: dict[str, MemberRecord | SwarmRecord] = {}

    def apply(
        self, records: Iterable[Record], told_by: str = "", trusted: bool = False
    ) -> BadRecordError | None:
        """Take in ``records``; bad ones are skipped and counted.

        Args:
            records: in any order; member records are taken first, so accusers are known.
            told_by: IP address of the teller.
            trusted: it is our welcome into the swarm.

        Returns:
            The first bad record's error, if any.
        """
        bad: BadRecordError | None = None
        self._corrections.clear()
        for record in sorted(records, key=lambda record: isinstance(record, Suspicion)):
            try:
                if isinstance(record, MemberRecord):
                    self._member(record, told_by)
                elif isinstance(record, Suspicion):
                    self._suspicion(record)
                else:
                    self._setting(record, trusted)
            except BadRecordError as error:
                self._kernel.refused_records += 1
                bad = bad or error
        return bad

    def corrections(self) -> tuple[MemberRecord | SwarmRecord, ...]:
        """What the teller of the last batch didn't know yet; ride back on the answer."""
        return tuple(self._corrections.values())[:MAX_CORRECTIONS]

    def evidence(self, member: Member) -> tuple[Suspicion, ...]:
        """What to tell ``member`` so that it can refute; empty while it is alive."""
        return tuple(member.evidence[:2]) if member.state in ("suspect", "dead") else ()

    # Member records

    def _member(self, record: MemberRecord, told_by: str) -> None:
        kernel = self._kernel
        if record.id == kernel.me.id:
            self._about_me(record)
            return
        held = kernel.table.get(record.id)
        if held is not None and record.incarnation <= held.record.incarnation:
            if record.incarnation < held.record.incarnation:
                self._corrections[record.id] = held.record
            says_left = record.state == "left" and held.state != "left"
            if not (says_left and record.incarnation == held.record.incarnation):
                return
        kernel.verifier.check_member(record, kernel.wall())
        refusal = None if record.state == "left" else kernel.policy.refuse(record.address, told_by)
        if refusal is not None:
            raise BadRecordError(400, refusal)
        if held is None:
            self._newcomer(record)
        else:
            self._newer(held, record)
        kernel.broadcast(record)

    def _about_me(self, record: MemberRecord) -> None:
        kernel = self._kernel
        me = kernel.me
        if kernel.leaving or record.incarnation <= me.incarnation:
            return
        kernel.verifier.check_member(record, kernel.wall())
        is_twin = record.incarnation.boot_ms > me.incarnation.boot_ms and record.address != me.address
        if is_twin and record.state == "alive":
            kernel.effects.append(TwinFound(record.address))
            return
        kernel.renew(record.incarnation)

    def _newcomer(self, record: MemberRecord) -> None:
        kernel = self._kernel
        if record.state == "left":
            kernel.table.add(Member(record, "left", kernel.now, "left"))
            return
        member = Member(record, "alive", kernel.now, "joined")
        if not kernel.table.add(member):
            raise BadRecordError(429, f"the view is full: {len(kernel.table)} members")
        kernel.tell("joined", member, "joined")
        kernel.on_joined(member)

    def _newer(self, held: Member, record: MemberRecord) -> None:
        kernel = self._kernel
        before, state = held.record, held.state
        held.record, held.evidence, held.timer, held.looking = record, [], None, False
        kernel.table.touch()
        if record.state == "left":
            if state != "left":
                self._enter(held, "left", "left")
            return
        rebooted = record.incarnation.boot_ms > before.incarnation.boot_ms
        if state == "left" or rebooted:
            where = f" at {record.address}" if record.address != before.address else ""
            self._enter(held, "alive", "came back" if state == "left" else f"restarted{where}", kind="joined")
            kernel.on_joined(held)
        elif state != "alive":
            self._enter(held, "alive", f"refuted that it was {state}")
            kernel.on_joined(held)
        elif (record.name, record.address, record.tags) != (before.name, before.address, before.tags):
            moved = record.address != before.address
            kernel.tell("updated", held, f"moved to {record.address}" if moved else "changed its tags")

    def _enter(self, member: Member, state: State, reason: str, kind: EventKind | None = None) -> None:
        kernel = self._kernel
        member.state = state
        member.since = kernel.now
        member.reason = reason
        kernel.table.touch()
        kernel.tell(kind or state, member, reason)

    # Suspicions

    def _suspicion(self, suspicion: Suspicion) -> None:
        kernel = self._kernel
        if suspicion.subject == kernel.me.id:
            self._accused(suspicion)
            return
        member = kernel.table.get(suspicion.subject)
        if member is None or suspicion.incarnation != member.record.incarnation:
            if member is not None and suspicion.incarnation < member.record.incarnation:
                self._corrections[suspicion.subject] = member.record
            return
        if suspicion.accuser in (kernel.me.id, suspicion.subject) or member.state == "left":
            return
        if member.state == "dead":
            self._pass_on(member, suspicion)
            return
        timer = member.timer
        dead = suspicion.verdict == "dead"
        counted = timer is not None and (timer.settled or suspicion.accuser in timer.accusers)
        accuser = kernel.table.get(suspicion.accuser)
        if accuser is None or (counted and not dead):
            return
        kernel.verifier.check_suspicion(suspicion, accuser.record.public_key)
        self._count_accuser(member, suspicion)
        if dead:
            self._count_burier(member, suspicion)
        if timer is None:
            kernel.on_suspect(member)

    def _buriers_needed(self) -> int:
        """How many must have given a member up before we look at once."""
        kernel = self._kernel
        return max(2, min(kernel.config.suspicion_confirmations + 1, kernel.table.living_total - 2))

    def _pass_on(self, member: Member, suspicion: Suspicion) -> None:
        """We hold it dead already: help the verdicts of others reach those who don't."""
        kernel = self._kernel
        accuser = kernel.table.get(suspicion.accuser)
        known = {verdict.accuser for verdict in member.evidence}
        if accuser is None or suspicion.verdict != "dead" or suspicion.accuser in known:
            return
        if len(known) > self._buriers_needed():
            return
        kernel.verifier.check_suspicion(suspicion, accuser.record.public_key)
        member.evidence.append(suspicion)
        kernel.broadcast(suspicion)

    def _count_burier(self, member: Member, suspicion: Suspicion) -> None:
        kernel = self._kernel
        needed = self._buriers_needed()
        if member.timer is not None and member.timer.bury(suspicion.accuser, needed, kernel.now):
            kernel.broadcast(suspicion)
            self._arm(member)

    def _accused(self, suspicion: Suspicion) -> None:
        kernel = self._kernel
        if kernel.leaving or suspicion.incarnation != kernel.me.incarnation:
            self._corrections[kernel.me.id] = kernel.me
            return
        accuser = kernel.table.get(suspicion.accuser)
        if accuser is not None:
            kernel.verifier.check_suspicion(suspicion, accuser.record.public_key)
        kernel.awareness.add(1)
        kernel.renew()

    def accuse(self, member: Member, incarnation: Incarnation, reason: str) -> None:
        """Our own probe of ``member`` in ``incarnation`` failed."""
        timer = member.timer
        if not member.living or member.record.incarnation != incarnation:
            return
        if timer is not None and (timer.settled or self._kernel.me.id in timer.accusers):
            return
        self._count_accuser(member, self._signed(member, "suspect", reason))

    def _signed(self, member: Member, verdict: Literal["suspect", "dead"], reason: str) -> Suspicion:
        kernel = self._kernel
        record = member.record
        plain = Suspicion(record.id, record.incarnation, kernel.me.id, verdict, reason[:200])
        return sign_suspicion(kernel.signer, kernel.verifier.swarm_id, plain)

    def _count_accuser(self, member: Member, suspicion: Suspicion) -> None:
        kernel = self._kernel
        if member.timer is None:
            self._begin(member, suspicion)
        elif not member.timer.confirm(suspicion.accuser):
            return
        member.evidence.append(suspicion)
        kernel.broadcast(suspicion)
        self._arm(member)

    def _begin(self, member: Member, suspicion: Suspicion) -> None:
        kernel, config = self._kernel, self._kernel.config
        total = kernel.table.living_total
        needed = max(0, min(config.suspicion_confirmations, total - 2))
        member.generation += 1
        member.evidence = []
        member.timer = SuspicionTimer(
            suspicion.accuser,
            needed,
            config.suspicion_min_s(total),
            config.suspicion_max_s(total),
            kernel.now,
        )
        own = suspicion.accuser == kernel.me.id
        told = suspicion.reason if own else f"{kernel.name_of(suspicion.accuser)} says: {suspicion.reason}"
        self._enter(member, "suspect", told)

    def _arm(self, member: Member) -> None:
        timer = member.timer
        if timer is None:
            return
        node_id, generation = member.record.id, member.generation
        self._kernel.arm(
            max(0.0, timer.deadline - self._kernel.now), lambda: self._expired(node_id, generation)
        )

    def _suspect(self, node_id: str, generation: int) -> Member | None:
        """The member, if it is still under the suspicion of that generation."""
        member = self._kernel.table.get(node_id)
        if member is None or member.state != "suspect" or member.generation != generation:
            return None
        return member

    def _expired(self, node_id: str, generation: int) -> None:
        """The timer ran out: look once more ourselves, as whoever answers isn't dead."""
        kernel = self._kernel
        member = self._suspect(node_id, generation)
        if member is None or member.timer is None or member.looking:
            return
        if kernel.now < member.timer.deadline - 1e-9:
            return  # its deadline moved on; another timer stands there
        member.looking = True
        kernel.on_expired(member)

    def looked(self, node_id: str, generation: int, found: bool) -> None:
        """The last look at a suspect is over: give it up, or give it more time."""
        member = self._suspect(node_id, generation)
        if member is None or member.timer is None:
            return
        member.looking = False
        if found:
            member.timer.restart(self._kernel.now)
            self._arm(member)
        else:
            self._bury(member)

    def _bury(self, member: Member) -> None:
        kernel = self._kernel
        verdict = self._signed(member, "dead", member.reason)
        member.evidence = [verdict]
        member.timer = None
        self._enter(member, "dead", member.reason)
        kernel.queue.forget_suspicions(member.record.id)
        kernel.broadcast(verdict)

    # Settings

    def _setting(self, record: SwarmRecord, trusted: bool) -> None:
        kernel = self._kernel
        if kernel.swarm.merge(record, trusted):
            kernel.table.touch()
            kernel.broadcast(record)
            kernel.effects.append(SwarmChanged(record))
            return
        held = kernel.swarm.get(record.key)
        newer = held is not None and (held.epoch, held.proposer) > (record.epoch, record.proposer)
        if held is not None and newer and record.lineage == held.lineage:
            self._corrections[record.key] = held
