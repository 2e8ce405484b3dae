"""One core, with hand-made peers: the tests of memberlist and serf, in idea."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest

from p2pdrl.membership.events import (
    Answered,
    Effect,
    Failed,
    Input,
    MemberEvent,
    Reject,
    Request,
    Respond,
    Send,
    SwarmChanged,
    Tick,
    Told,
    TwinFound,
    Welcomed,
)
from p2pdrl.membership.identity import Identity, verify
from p2pdrl.membership.messages import (
    Ack,
    Delta,
    Digest,
    Gossip,
    Join,
    Message,
    Nack,
    Ping,
    PingReq,
    Sync,
    Welcome,
)
from p2pdrl.membership.opening import own_record
from p2pdrl.membership.parameters import MembershipConfig
from p2pdrl.membership.records import (
    Incarnation,
    MemberRecord,
    Record,
    Suspicion,
    Verifier,
    sign_member,
    sign_suspicion,
)
from p2pdrl.membership.state import Membership

WALL_S = 1_000_000.0
BOOT_MS = int(WALL_S * 1000)
KEYS = [Identity(bytes([number]) * 32) for number in range(1, 9)]


def record(number: int, counter: int = 0, **changes: object) -> MemberRecord:
    key = KEYS[number]
    plain = own_record(key, f"n{number}", f"10.0.0.{number}:7600", BOOT_MS, {})
    changes.setdefault("incarnation", Incarnation(BOOT_MS, counter))
    return sign_member(key, "swarm", msgspec.structs.replace(plain, **changes))


def suspicion(subject: int, accuser: int, counter: int = 0, verdict: str = "suspect") -> Suspicion:
    plain = Suspicion(
        KEYS[subject].node_id, Incarnation(BOOT_MS, counter), KEYS[accuser].node_id, verdict, "no answer"
    )
    return sign_suspicion(KEYS[accuser], "swarm", plain)


class Bench:
    """Node 0 under test among ``others`` peers; calls to peers succeed unless named in ``down``."""

    def __init__(self, others: int = 4, **options: object) -> None:
        self.now = 0.0
        self.core = Membership(
            config=MembershipConfig(**options),
            signer=KEYS[0],
            verifier=Verifier("swarm", verify),
            record=own_record(KEYS[0], "n0", "10.0.0.0:7600", BOOT_MS, {}),
            rng=random.Random(0),
            wall=lambda: WALL_S + self.now,
            now=0.0,
        )
        self.core.assume([record(number) for number in range(1, others + 1)], 0.0)
        self.down: dict[int, str] = {}
        self.sent: list[Send] = []
        self.events: list[MemberEvent] = []
        self.other_effects: list[Effect] = []
        self._tokens: Iterator[int] = iter(range(1, 10**6))

    def feed(self, event: Input) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, Told):
                self.events.append(effect.event)
            elif isinstance(effect, Send):
                self.sent.append(effect)
            else:
                self.other_effects.append(effect)
        return effects

    def run(self, seconds: float) -> None:
        """Let timers run; every call is answered at once, or fails as ``down`` says."""
        end = self.now + seconds
        while True:
            self.answer_all()
            due = self.core.next_wakeup()
            if due is None or due > end:
                break
            self.now = max(due, self.now)
            self.feed(Tick())
        self.now = end

    def answer_all(self) -> None:
        while self.sent:
            send = self.sent.pop(0)
            number = next(i for i, key in enumerate(KEYS) if key.node_id == send.target_id)
            if number in self.down:
                kind = self.down[number]
                self.feed(Failed(send.call_id, kind, f"it was {kind}"))  # type: ignore[arg-type]
            elif isinstance(send.message, PingReq):
                self.feed(Answered(send.call_id, Nack("no answer")))
            elif isinstance(send.message, Sync):
                self.feed(Answered(send.call_id, Digest(True)))
            else:
                self.feed(Answered(send.call_id, Ack(Incarnation(BOOT_MS, 0))))

    def ask(self, sender: int, message: Message, told_by: str = "") -> Message | Reject:
        """Give it a request and return its answer."""
        token = next(self._tokens)
        for effect in self.feed(Request(token, KEYS[sender].node_id, message, told_by)):
            if isinstance(effect, Respond) and effect.token == token:
                return effect.message
            if isinstance(effect, Reject) and effect.token == token:
                return effect
        raise AssertionError("no answer")

    def gossip(self, *records: Record, sender: int = 1) -> Message | Reject:
        return self.ask(sender, Gossip(Incarnation(BOOT_MS, 0), records))

    def state(self, number: int) -> str:
        view = self.core.member(KEYS[number].node_id, self.now)
        return "unknown" if view is None else view.state

    def kinds(self, number: int) -> list[str]:
        return [event.kind for event in self.events if event.member.id == KEYS[number].node_id]


# Alive


def test_a_newcomer_is_told_once() -> None:
    bench = Bench()
    for _ in range(3):
        bench.gossip(record(6))
    assert bench.state(6) == "alive"
    assert bench.kinds(6) == ["joined"]


def test_a_newer_record_updates_and_an_older_one_doesnt() -> None:
    bench = Bench()
    bench.gossip(record(1, 2, address="10.9.9.9:1"))
    bench.gossip(record(1, 1, address="10.8.8.8:1"))
    view = bench.core.member(KEYS[1].node_id, 0.0)
    assert view is not None
    assert view.address == "10.9.9.9:1"
    assert bench.kinds(1) == ["updated"]


def test_the_same_key_at_a_new_address_is_taken_at_once() -> None:
    bench = Bench()
    moved = record(1, incarnation=Incarnation(BOOT_MS + 5, 0), address="10.9.9.9:1")
    bench.gossip(moved)
    view = bench.core.member(KEYS[1].node_id, 0.0)
    assert view is not None
    assert (view.address, view.state) == ("10.9.9.9:1", "alive")
    assert bench.events[-1].reason == "restarted at 10.9.9.9:1"


def test_a_forged_alive_or_left_is_refused_and_changes_nothing() -> None:
    bench = Bench()
    for changes in ({"state": "left"}, {"address": "6.6.6.6:6"}):
        forged = msgspec.structs.replace(record(1), incarnation=Incarnation(BOOT_MS, 9), **changes)
        answer = bench.gossip(forged)
        assert isinstance(answer, Reject)
        assert answer.status == 403
    assert bench.state(1) == "alive"
    assert bench.core.refused_records == 2
    assert bench.events == []


def test_an_incarnation_far_in_the_future_is_refused() -> None:
    bench = Bench()
    answer = bench.gossip(record(6, incarnation=Incarnation(BOOT_MS + 700_000, 0)))
    assert isinstance(answer, Reject)
    assert answer.status == 400
    assert bench.state(6) == "unknown"


def test_addresses_that_mustnt_be_dialled_are_refused() -> None:
    bench = Bench()
    for address in ("169.254.169.254:80", "127.0.0.1:7600"):
        answer = bench.ask(6, Join(record(6, address=address)), told_by="10.0.0.6")
        assert isinstance(answer, Reject)
        assert answer.status == 400
    assert bench.state(6) == "unknown"


def test_a_full_view_takes_nobody_but_in_place_of_a_tombstone() -> None:
    bench = Bench(others=4, max_members=4)
    answer = bench.ask(6, Join(record(6)))
    assert isinstance(answer, Reject)
    assert answer.status == 429
    bench.gossip(record(1, 1, state="left"))
    assert isinstance(bench.ask(6, Join(record(6))), Welcome)
    assert (bench.state(1), bench.state(6)) == ("unknown", "alive")


# Suspect


def test_a_suspicion_then_two_more_then_death_at_the_minimum() -> None:
    bench = Bench()
    bench.down[1] = "timeout"
    bench.gossip(suspicion(1, 2), suspicion(1, 3), suspicion(1, 4))
    assert bench.state(1) == "suspect"
    view = bench.core.member(KEYS[1].node_id, bench.now)
    assert view is not None
    assert len(view.suspected_by) == 3
    assert view.state_reason == "n2 says: no answer (0 s ago)"
    bench.run(3.9)
    assert bench.state(1) == "suspect"
    bench.run(2.0)
    assert bench.state(1) == "dead"
    assert bench.kinds(1) == ["suspect", "dead"]


def test_a_lone_accuser_waits_for_the_maximum() -> None:
    bench = Bench(second_opinions=0, probe_interval_s=1.0)
    bench.gossip(suspicion(1, 2))
    bench.gossip(suspicion(1, 2))  # the same accuser counts once
    view = bench.core.member(KEYS[1].node_id, bench.now)
    assert view is not None
    assert view.suspected_by == (KEYS[2].node_id,)


def test_old_and_forged_suspicions_are_ignored() -> None:
    bench = Bench()
    bench.gossip(record(1, 3))
    bench.gossip(suspicion(1, 2, counter=2))
    assert bench.state(1) == "alive"
    forged = msgspec.structs.replace(suspicion(1, 2, counter=3), accuser=KEYS[3].node_id)
    assert isinstance(bench.gossip(forged), Reject)
    bench.gossip(suspicion(1, 7, counter=3))  # an accuser that nobody knows
    assert bench.state(1) == "alive"


def test_a_stale_accuser_is_corrected_in_the_answer() -> None:
    bench = Bench()
    newer = record(1, 3)
    bench.gossip(newer)
    answer = bench.gossip(suspicion(1, 2, counter=2))
    assert isinstance(answer, Ack)
    assert newer in answer.records


def test_a_refutation_clears_the_suspicion() -> None:
    bench = Bench()
    bench.gossip(suspicion(1, 2), suspicion(1, 3), suspicion(1, 4))
    bench.gossip(record(1, 1))
    bench.run(30.0)
    assert bench.state(1) == "alive"
    assert bench.kinds(1) == ["suspect", "alive"]


def test_a_stale_suspicion_timer_never_kills_a_node_suspected_anew() -> None:
    """The timer of the first suspicion runs out while a second, younger one stands."""
    bench = Bench(second_opinions=0, probe_interval_s=1.0)
    bench.down[1] = "timeout"
    bench.gossip(suspicion(1, 2), suspicion(1, 3), suspicion(1, 4))  # would kill at 4.0 s
    bench.now = 3.5
    bench.gossip(record(1, 1))
    bench.gossip(*(suspicion(1, accuser, counter=1) for accuser in (2, 3, 4)))  # kills at 7.5 s
    assert bench.state(1) == "suspect"
    for bench.now in (3.9, 4.1, 4.5, 6.0, 7.4):
        bench.feed(Tick())
        bench.sent.clear()
        assert bench.state(1) == "suspect", f"killed at {bench.now} by a stale timer"
    bench.run(3.0)
    assert bench.state(1) == "dead"


def test_a_dead_verdict_of_another_is_only_a_suspicion() -> None:
    bench = Bench()
    bench.gossip(suspicion(1, 2, verdict="dead"))
    assert bench.state(1) == "suspect"
    bench.run(2.0)
    assert bench.state(1) in ("suspect", "alive")


def test_enough_dead_verdicts_make_us_look_at_once() -> None:
    bench = Bench()
    bench.down[1] = "unreachable"
    bench.gossip(*(suspicion(1, accuser, verdict="dead") for accuser in (2, 3, 4)))
    bench.run(0.1)
    assert bench.state(1) == "dead"
    quick = Bench()
    quick.gossip(*(suspicion(1, accuser, verdict="dead") for accuser in (2, 3, 4)))
    quick.run(0.1)
    assert quick.state(1) == "suspect"  # it answered us


def test_a_suspect_that_answers_the_last_look_isnt_dead() -> None:
    bench = Bench()
    bench.gossip(suspicion(1, 2), suspicion(1, 3), suspicion(1, 4))
    bench.run(30.0)
    assert "dead" not in bench.kinds(1)


# Dead


def kill(bench: Bench, number: int = 1) -> None:
    bench.down[number] = "unreachable"
    bench.run(30.0)
    assert bench.state(number) == "dead"


def test_a_refused_connection_is_evidence_at_once_and_says_so() -> None:
    bench = Bench()
    kill(bench)
    view = bench.core.member(KEYS[1].node_id, bench.now)
    assert view is not None
    assert view.state_reason.startswith("it was unreachable (")
    assert bench.kinds(1) == ["suspect", "dead"]


def test_old_records_and_suspicions_dont_wake_the_dead() -> None:
    bench = Bench()
    kill(bench)
    bench.gossip(record(1, 0))
    bench.gossip(suspicion(1, 2))
    assert bench.state(1) == "dead"


def test_dead_then_alive_then_the_replay_of_its_death() -> None:
    bench = Bench()
    kill(bench)
    bench.down.clear()
    bench.gossip(record(1, 1))
    assert bench.state(1) == "alive"
    bench.gossip(suspicion(1, 2, counter=0, verdict="dead"))
    assert bench.state(1) == "alive"


def test_the_dead_that_ping_are_told_so_that_they_can_refute() -> None:
    bench = Bench()
    kill(bench)
    answer = bench.ask(1, Ping(Incarnation(BOOT_MS, 0), bench.core.me.incarnation))
    assert isinstance(answer, Ack)
    told = [item for item in answer.records if isinstance(item, Suspicion)]
    assert any(item.subject == KEYS[1].node_id and item.verdict == "dead" for item in told)


def test_the_dead_are_tried_again_and_taken_back() -> None:
    bench = Bench(others=2)
    kill(bench, 1)
    kill(bench, 2)
    bench.run(1.0)
    pings: list[Send] = []
    while not pings:
        due = bench.core.next_wakeup()
        assert due is not None
        bench.now = due
        bench.feed(Tick())
        pings = [send for send in bench.sent if isinstance(send.message, Ping)]
    send = pings[0]
    number = 1 if send.target_id == KEYS[1].node_id else 2
    bench.feed(Answered(send.call_id, Ack(Incarnation(BOOT_MS, 1), (record(number, 1),))))
    assert bench.state(number) == "alive"
    assert any(
        isinstance(send.message, Sync) and send.target_id == KEYS[number].node_id for send in bench.sent
    )


def test_tombstones_are_forgotten() -> None:
    bench = Bench(dead_tombstone_s=100.0, left_tombstone_s=50.0)
    bench.gossip(record(2, 1, state="left"))
    kill(bench)
    bench.run(90.0)
    assert (bench.state(2), bench.state(1)) == ("unknown", "dead")
    bench.run(100.0)
    assert bench.state(1) == "unknown"


# Ourselves


def test_we_refute_and_trust_ourselves_less() -> None:
    bench = Bench()
    answer = bench.gossip(suspicion(0, 2))
    assert bench.core.me.incarnation == Incarnation(BOOT_MS, 1)
    assert bench.core.health == 1
    assert isinstance(answer, Ack)
    assert bench.core.me in answer.records
    bench.gossip(suspicion(0, 3))  # about the incarnation that we have left behind
    assert bench.core.me.incarnation == Incarnation(BOOT_MS, 1)


def test_an_echo_of_an_earlier_life_is_outdone() -> None:
    bench = Bench()
    bench.gossip(record(0, 7, state="left"))
    assert bench.core.me.incarnation == Incarnation(BOOT_MS, 8)
    assert bench.core.me.state == "alive"


def test_a_twin_with_our_key_is_reported_and_not_fought() -> None:
    bench = Bench()
    bench.gossip(record(0, incarnation=Incarnation(BOOT_MS + 1, 0), address="10.7.7.7:1"))
    assert TwinFound("10.7.7.7:1") in bench.other_effects
    assert bench.core.me.incarnation == Incarnation(BOOT_MS, 0)


def test_being_held_up_accuses_nobody() -> None:
    bench = Bench()
    bench.gossip(suspicion(1, 2), suspicion(1, 3), suspicion(1, 4))
    bench.now = 2.0
    bench.feed(Tick())
    bench.now = 32.0  # stopped for 30 s
    bench.feed(Tick())
    assert bench.core.health >= 1
    assert bench.state(1) == "suspect"
    bench.run(0.5)
    assert [event.kind for event in bench.events] == ["suspect"]


def test_leaving_is_signed_told_to_three_and_final() -> None:
    bench = Bench()
    effects = bench.core.leave(0.0)
    told = [effect for effect in effects if isinstance(effect, Send)]
    assert len(told) == 3
    for send in told:
        assert isinstance(send.message, Gossip)
        (goodbye,) = send.message.records
        assert isinstance(goodbye, MemberRecord)
        assert goodbye.state == "left"
        Verifier("swarm", verify).check_member(goodbye, WALL_S)
    assert bench.core.next_wakeup() is None
    bench.gossip(suspicion(0, 1, counter=1))
    assert bench.core.me.state == "left"
    assert bench.core.leave(1.0) == []


def test_left_then_back_in_another_role() -> None:
    bench = Bench()
    bench.gossip(record(1, 1, state="left"))
    assert bench.state(1) == "left"
    bench.gossip(record(1, 0))  # an old record doesn't bring it back
    assert bench.state(1) == "left"
    bench.gossip(record(1, incarnation=Incarnation(BOOT_MS + 9, 0), tags={"role": "server"}))
    view = bench.core.member(KEYS[1].node_id, 0.0)
    assert view is not None
    assert (view.state, view.tags) == ("alive", {"role": "server"})
    assert bench.kinds(1) == ["left", "joined"]


def test_new_tags_raise_the_incarnation_and_spread() -> None:
    bench = Bench()
    bench.core.update_self(0.0, tags={"role": "x"})
    assert bench.core.me.incarnation.counter == 1
    answer = bench.ask(1, Ping(Incarnation(BOOT_MS, 0), Incarnation(BOOT_MS, 0)))
    assert isinstance(answer, Ack)
    assert bench.core.me in answer.records
    assert bench.core.update_self(0.0, tags={"role": "x"}) == []


# Probes


def first_ping(bench: Bench) -> Send:
    while not any(isinstance(send.message, Ping) for send in bench.sent):
        due = bench.core.next_wakeup()
        assert due is not None
        bench.now = due
        bench.feed(Tick())
    return next(send for send in bench.sent if isinstance(send.message, Ping))


def test_a_good_probe_measures_and_heals() -> None:
    bench = Bench()
    bench.core._kernel.awareness.add(1)
    send = first_ping(bench)
    bench.now += 0.02
    bench.feed(Answered(send.call_id, Ack(Incarnation(BOOT_MS, 0))))
    view = bench.core.member(send.target_id, bench.now)
    assert view is not None
    assert view.rtt_s == pytest.approx(0.02)
    assert view.last_seen_s == 0.0
    assert bench.core.health == 0


def test_a_timeout_asks_relays_and_counts_their_nacks() -> None:
    bench = Bench()
    send = first_ping(bench)
    bench.sent.clear()
    bench.now += 0.5
    bench.feed(Tick())
    asked = [sent for sent in bench.sent if isinstance(sent.message, PingReq)]
    assert len(asked) == 3
    assert all(sent.target_id != send.target_id for sent in asked)
    bench.feed(Answered(asked[0].call_id, Nack("no answer")))
    bench.feed(Answered(asked[1].call_id, Nack("no answer")))
    bench.feed(Failed(asked[2].call_id, "timeout", "no answer within 0.5 s"))
    bench.feed(Failed(send.call_id, "timeout", "no answer within 1 s"))
    view = bench.core.member(send.target_id, bench.now)
    assert view is not None
    assert view.state == "suspect"
    assert view.state_reason == "no answer to probe; 2 of 3 relays could not reach it either (0 s ago)"
    assert bench.core.health == 1  # one nack is missing: maybe it is us


def test_a_relay_that_reaches_it_saves_it() -> None:
    bench = Bench()
    first_ping(bench)
    bench.sent.clear()
    bench.now += 0.5
    bench.feed(Tick())
    asked = [sent for sent in bench.sent if isinstance(sent.message, PingReq)]
    bench.feed(Answered(asked[0].call_id, Ack(Incarnation(BOOT_MS, 0))))
    bench.run(2.0)
    assert bench.events == []


def test_a_refusal_shows_life_unless_somebody_else_gives_it() -> None:
    bench = Bench()
    send = first_ping(bench)
    bench.feed(Failed(send.call_id, "refused", "it answered 429: busy", 429))
    assert bench.events == []
    bench.sent.clear()
    send = first_ping(bench)
    bench.feed(Failed(send.call_id, "refused", "it answered 403: another node lives here", 403))
    assert [event.kind for event in bench.events] == ["suspect"]


def test_our_own_trouble_accuses_nobody_at_once() -> None:
    bench = Bench()
    send = first_ping(bench)
    bench.feed(Failed(send.call_id, "local", "out of file descriptors"))
    assert bench.core.health == 1
    assert bench.events == []


def test_a_suspect_is_probed_with_the_accusation() -> None:
    bench = Bench(others=1)
    bench.core.assume([record(2)], 0.0)
    accusation = suspicion(1, 2)
    bench.gossip(accusation, sender=2)
    bench.sent.clear()
    while True:
        send = first_ping(bench)
        bench.sent.clear()
        if send.target_id == KEYS[1].node_id:
            break
    assert isinstance(send.message, Ping)
    assert accusation in send.message.records


def test_we_relay_only_to_addresses_that_we_know() -> None:
    bench = Bench()
    answer = bench.ask(1, PingReq(KEYS[7].node_id, Incarnation(BOOT_MS, 0)))
    assert isinstance(answer, Nack)
    bench.sent.clear()
    token = 10**7
    bench.feed(Request(token, KEYS[1].node_id, PingReq(KEYS[2].node_id, Incarnation(BOOT_MS, 0))))
    (send,) = [sent for sent in bench.sent if isinstance(sent.message, Ping)]
    assert send.to == "10.0.0.2:7600"
    assert send.deadline_s == pytest.approx(0.4)  # the nack comes at 80 % of the timeout
    bench.feed(Failed(send.call_id, "timeout", "no answer within 0.4 s"))
    assert Respond(token, Nack("no answer within 0.4 s")) in bench.other_effects


def test_who_doesnt_know_us_asks_and_is_told() -> None:
    bench = Bench()
    send = first_ping(bench)
    bench.sent.clear()
    bench.feed(Answered(send.call_id, Ack(Incarnation(BOOT_MS, 0), (), True)))
    (introduction,) = [sent for sent in bench.sent if isinstance(sent.message, Gossip)]
    assert isinstance(introduction.message, Gossip)
    assert bench.core.me in introduction.message.records


# Push-pull


def exchange(asks: Bench, asked: Bench, asked_number: int) -> None:
    """Run one push-pull from ``asks`` to ``asked``."""
    while True:
        syncs = [send for send in asks.sent if isinstance(send.message, Sync | Delta)]
        if not syncs:
            return
        for send in syncs:
            asks.sent.remove(send)
            answer = asked.ask(0, send.message)
            assert not isinstance(answer, Reject)
            asks.feed(Answered(send.call_id, answer))


def test_push_pull_merges_two_views() -> None:
    left, right = Bench(others=3), Bench(others=3)
    left.gossip(record(5), record(1, 4))
    right.gossip(record(6), record(2, 4), record(3, 1, state="left"))
    left.feed(Welcomed(KEYS[1].node_id, "10.0.0.1:7600", Welcome(())))
    exchange(left, right, 1)
    for bench in (left, right):
        assert [bench.state(number) for number in (1, 2, 3, 5, 6)] == [
            "alive",
            "alive",
            "left",
            "alive",
            "alive",
        ]
    left.sent.clear()
    left.feed(Welcomed(KEYS[1].node_id, "10.0.0.1:7600", Welcome(())))
    (sync,) = [send for send in left.sent if isinstance(send.message, Sync)]
    assert right.ask(0, sync.message) == Digest(True)


def test_push_pull_tells_of_deaths_but_hands_no_tombstones_round() -> None:
    left, right = Bench(others=4), Bench(others=3)
    kill(left, 1)
    kill(left, 4)
    left.sent.clear()
    left.feed(Welcomed(KEYS[2].node_id, "10.0.0.2:7600", Welcome(())))
    exchange(left, right, 2)
    assert right.state(4) == "unknown"
    left.gossip(record(6))
    assert right.state(1) in ("alive", "suspect")


# Joining and settings


def test_a_join_is_answered_with_the_whole_view_and_the_settings() -> None:
    bench = Bench()
    bench.core.propose("mode", {"name": "adpsgd"}, 0.0)
    answer = bench.ask(6, Join(record(6)), told_by="10.0.0.6")
    assert isinstance(answer, Welcome)
    ids = {item.id for item in answer.records if isinstance(item, MemberRecord)}
    assert ids == {KEYS[number].node_id for number in (0, 1, 2, 3, 4, 6)}
    assert answer.observed_host == "10.0.0.6"
    newcomer = Bench(others=0)
    newcomer.feed(Welcomed(KEYS[1].node_id, "10.0.0.1:7600", answer))
    assert newcomer.core.swarm.value("mode") == {"name": "adpsgd"}
    assert any(isinstance(effect, SwarmChanged) for effect in newcomer.other_effects)


def test_a_dead_member_that_joins_in_the_same_incarnation_is_told_to_refute() -> None:
    bench = Bench()
    kill(bench)
    answer = bench.ask(1, Join(record(1)))
    assert isinstance(answer, Welcome)
    assert any(isinstance(item, Suspicion) for item in answer.records)


def test_settings_spread_and_the_last_writer_wins() -> None:
    one, two = Bench(), Bench()
    setting, _ = one.core.propose("mode", 1, 0.0)
    two.gossip(setting)
    two.gossip(setting)
    assert two.core.swarm.value("mode") == 1
    assert two.other_effects.count(SwarmChanged(setting)) == 1


def test_what_isnt_a_request_is_refused() -> None:
    answer = Bench().ask(1, Nack("hello"))
    assert isinstance(answer, Reject)
    assert answer.status == 400


def test_late_and_unknown_answers_are_ignored() -> None:
    bench = Bench()
    send = first_ping(bench)
    for _ in range(2):
        bench.feed(Answered(send.call_id, Ack(Incarnation(BOOT_MS, 0))))
    bench.feed(Failed(999_999, "timeout", "?"))
    assert bench.events == []
