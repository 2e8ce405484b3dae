"""Who may write which of a swarm's records."""

from __future__ import annotations

import msgspec
import pytest

from p2pdrl.ids import founded_by, new_lineage
from p2pdrl.membership.events import Request, Respond, Send
from p2pdrl.membership.identity import Identity, verify
from p2pdrl.membership.messages import GossipMessage, Sync
from p2pdrl.membership.operators import Ban, BansSetting, Operator, OperatorsSetting
from p2pdrl.membership.records import (
    MAX_FIRST_EPOCH,
    BadRecordError,
    Incarnation,
    SwarmRecord,
    Verifier,
    sign_swarm_record,
)
from p2pdrl.membership.swarm_records import MAX_CLAIM_EPOCH, SwarmRecords, records_told

from .bench import BOOT_MS, KEYS, Bench, suspicion
from .bench import record as member

ROOT, NAMED, FOUNDER, MEMBER = (Identity(bytes([number]) * 32) for number in (1, 2, 3, 4))
ALICE, BOB = Operator(ROOT.public_key, "alice"), Operator(NAMED.public_key, "bob")
LINEAGE = new_lineage(FOUNDER.public_key)


def store(*roots: Operator) -> SwarmRecords:
    made = SwarmRecords(Verifier("swarm", verify), roots or (ALICE,))
    made.follow(LINEAGE)
    return made


def record(
    by: Identity, key: str, epoch: int, value: object = 1, *, lineage: str | None = None, swarm: str = "swarm"
) -> SwarmRecord:
    home = "" if key in ("operators", "bans") else LINEAGE
    plain = SwarmRecord(
        key, epoch, by.node_id, msgspec.msgpack.encode(value), by.public_key,
        lineage=home if lineage is None else lineage,
    )  # fmt: skip
    return sign_swarm_record(by, swarm, plain)


def named(epoch: int, *operators: Operator, by: Identity = ROOT) -> SwarmRecord:
    return record(by, "operators", epoch, OperatorsSetting(operators))


def refusal(held: SwarmRecords, bad: SwarmRecord) -> int:
    before = held.all()
    with pytest.raises(BadRecordError) as caught:
        held.merge(bad)
    with pytest.raises(BadRecordError):
        held.merge(bad, trusted=True)
    assert held.all() == before
    return caught.value.status


@pytest.mark.parametrize("key", ["mode", "stop", "pause"])
def test_what_isnt_signed_by_an_operator_is_refused(key) -> None:
    held = store()
    assert refusal(held, record(MEMBER, key, 5)) == 403
    in_her_name = msgspec.structs.replace(record(MEMBER, key, 5), proposer=ALICE.id)
    assert refusal(held, in_her_name) == 403
    with_her_key = msgspec.structs.replace(in_her_name, public_key=ALICE.public_key)
    assert refusal(held, with_her_key) == 403
    assert refusal(held, record(ROOT, key, 5, swarm="another")) == 403
    assert held.merge(record(ROOT, key, 5))


def test_an_older_record_doesnt_come_back_and_no_other_lineages_counts() -> None:
    held = store()
    first = record(ROOT, "pause", 2, True)
    assert held.merge(first)
    assert held.merge(record(ROOT, "pause", 3, False))
    assert not held.merge(first)
    other = new_lineage(FOUNDER.public_key)
    assert other != LINEAGE
    assert not held.merge(record(ROOT, "mode", 9, lineage=other))
    moved = msgspec.structs.replace(record(ROOT, "mode", 9, lineage=other), lineage=LINEAGE)
    assert refusal(held, moved) == 403


def test_the_founders_first_mode_and_stop_condition_need_no_operator() -> None:
    held = store()
    assert founded_by(LINEAGE, FOUNDER.public_key)
    assert not founded_by(LINEAGE, MEMBER.public_key)
    assert refusal(held, record(MEMBER, "mode", 1)) == 403, "another member's lineage it isn't"
    assert refusal(held, record(FOUNDER, "pause", 1)) == 403
    for key in ("mode", "stop"):
        assert held.merge(record(FOUNDER, key, 1, "first"))
        assert not held.merge(record(FOUNDER, key, 1, "second")), "once"
        assert refusal(held, record(FOUNDER, key, 2, "second")) == 403
        assert held.value(key) == "first"
        assert held.merge(record(ROOT, key, 2))
        assert not held.merge(record(FOUNDER, key, 1, "third"))


def test_an_operator_composes_what_beats_the_founders() -> None:
    held = store()
    early = held.compose("mode", "hers", ROOT)
    assert early.epoch == 2
    held.merge(record(FOUNDER, "mode", 1))
    assert held.merge(early)


def test_a_members_halt_is_held_and_stands_below_an_operators() -> None:
    held = store()
    assert held.merge(record(MEMBER, "halt", 5))
    assert held.operator(held.get("halt").proposer) is None
    assert held.merge(record(ROOT, "halt", 2)), "whatever the epoch that somebody has thought of"
    assert not held.merge(record(MEMBER, "halt", 900))
    other = store()
    other.merge(record(ROOT, "halt", 2))
    lower = store()
    lower.merge(record(MEMBER, "halt", 900))
    assert lower.compare(other.digest()) == ((), ("halt",))
    assert [one.proposer for one in other.compare(lower.digest())[0]] == [ALICE.id]
    assert refusal(store(), record(MEMBER, "halt", MAX_CLAIM_EPOCH + 1)) == 409


def test_root_operators_name_others_who_name_nobody() -> None:
    held = store()
    assert refusal(held, named(1, BOB, by=MEMBER)) == 403
    assert refusal(held, record(NAMED, "mode", 2)) == 403
    assert held.merge(named(1, BOB))
    assert held.operators == (ALICE, BOB)
    assert held.merge(record(NAMED, "mode", 2))
    carol = Operator(MEMBER.public_key, "carol")
    assert refusal(held, named(2, BOB, carol, by=NAMED)) == 403
    assert held.follow(new_lineage(FOUNDER.public_key))
    assert held.operators == (ALICE, BOB), "they are of no lineage"


def test_who_is_removed_commands_no_more_nor_does_what_he_wrote() -> None:
    held = store()
    held.merge(named(1, BOB))
    his = record(NAMED, "pause", 7, True)
    held.merge(his)
    held.merge(record(NAMED, "mode", 2))
    again = held.compose("mode", 1, ROOT)
    held.merge(again)
    assert held.merge(named(2))
    assert held.get("pause") is None
    assert held.get("mode") == again, "a root operator had signed it anew"
    assert refusal(held, record(NAMED, "pause", 9)) == 403
    assert held.compose("pause", True, ROOT).epoch == 8


def test_roots_come_and_go_with_the_key_file() -> None:
    held = store(ALICE, BOB)
    held.merge(record(NAMED, "pause", 2))
    assert not held.use_roots((ALICE, BOB))
    assert held.use_roots((ALICE,))
    assert held.get("pause") is None
    assert refusal(held, record(NAMED, "pause", 3)) == 403


def test_lists_that_cant_be_read_are_refused() -> None:
    held = store()
    for key in ("operators", "bans"):
        assert (
            refusal(held, record(ROOT, key, 1, {"operators": [{"name": "x"}], "bans": [{"id": "x"}]})) == 400
        )
    too_many = OperatorsSetting(tuple(Operator(bytes([n]) * 32, "x") for n in range(17)))
    assert refusal(held, record(ROOT, "operators", 1, too_many)) == 400


def test_what_has_had_its_effect_has_none_again() -> None:
    held = store()
    held.pass_over("halt", 4)
    assert not held.merge(record(ROOT, "halt", 4))
    assert held.compose("halt", 1, ROOT).epoch == 5
    other = store()
    other.merge(record(ROOT, "halt", 4))
    assert held.compare(other.digest()) == ((), ())


def test_without_operators_every_member_writes_all_but_a_list_of_them() -> None:
    held = SwarmRecords(Verifier("swarm", verify))
    held.follow(LINEAGE)
    for key in ("mode", "stop", "pause", "halt"):
        assert held.merge(record(MEMBER, key, 3))
    ban = BansSetting((Ban(FOUNDER.node_id),))
    assert held.merge(record(MEMBER, "bans", 1, ban))
    assert set(held.bans) == {FOUNDER.node_id}
    assert refusal(held, named(1, BOB, by=MEMBER)) == 403


def test_what_a_node_tells_is_checked_before_it_is_signed_upon() -> None:
    held = store()
    held.merge(named(1, BOB))
    held.merge(record(NAMED, "mode", 4))
    told = held.document()
    mine = records_told(told, (ALICE,), verify)
    assert (mine.all(), mine.operators, mine.lineage) == (held.all(), (ALICE, BOB), LINEAGE)
    with pytest.raises(BadRecordError):
        records_told(told, (Operator(MEMBER.public_key, "other"),), verify)
    told["records"][1]["record"] = told["records"][0]["record"][:-8]
    with pytest.raises(Exception, match=r"swarm record|padding"):
        records_told(told, (ALICE,), verify)
    with pytest.raises(ValueError, match="no records"):
        records_told({}, (), verify)


# Bans, in the core


def ban(number: int, epoch: int, *, by: int = 2) -> SwarmRecord:
    value = BansSetting((Ban(KEYS[number].node_id, f"n{number}", "floods", "n2"),) if number else ())
    return record(KEYS[by], "bans", epoch, value)


def states(bench: Bench) -> dict[str, str]:
    return {view.name: view.state for view in bench.core.members(bench.now)}


def test_who_is_banned_is_no_member_until_it_is_banned_no_more() -> None:
    bench = Bench()
    bench.feed(Request(1, KEYS[2].node_id, GossipMessage(Incarnation(BOOT_MS, 0), (ban(1, 1),))))
    assert states(bench)["n1"] == "banned"
    (event,) = [event for event in bench.events if event.kind == "banned"]
    assert event.reason == "banned from this swarm by n2: floods"
    bench.run(30.0)
    newer = member(1, 5)
    bench.feed(Request(2, KEYS[2].node_id, GossipMessage(Incarnation(BOOT_MS, 0), (newer, suspicion(1, 2)))))
    assert states(bench)["n1"] == "banned", "nothing about it is taken"
    bench.feed(Request(3, KEYS[2].node_id, GossipMessage(Incarnation(BOOT_MS, 0), (suspicion(3, 1),))))
    assert states(bench)["n3"] == "alive", "nor what it says of others"
    assert not any(send.target_id == KEYS[1].node_id for send in bench.sent)
    bench.feed(Request(4, KEYS[2].node_id, GossipMessage(Incarnation(BOOT_MS, 0), (ban(0, 2),))))
    assert states(bench)["n1"] == "alive"
    bench.down[1] = "timeout"
    bench.run(60.0)
    assert states(bench)["n1"] == "dead", "it is probed like any other"


def test_who_is_banned_is_told_and_left_out_of_digests() -> None:
    bench = Bench()
    effects = bench.core.submit(ban(1, 1), 0.0)
    told = {effect.target_id for effect in effects if isinstance(effect, Send)}
    assert told == {KEYS[number].node_id for number in (1, 2, 3, 4)}
    bench.feed(Request(1, KEYS[2].node_id, Sync(bytes(16))))
    (answer,) = [one.message for one in bench.other_effects if isinstance(one, Respond)]
    assert bytes.fromhex(KEYS[1].node_id) not in {entry.id for entry in answer.members}
    assert len(answer.members) == 4
    with pytest.raises(BadRecordError):
        bench.core.submit(msgspec.structs.replace(ban(3, 2), epoch=3), 1.0)


def test_a_named_operators_record_travels_with_the_list_that_names_him() -> None:
    bench = Bench()
    bench.core.use_roots((ALICE,), 0.0)
    bench.core.submit(named(1, BOB), 0.0)
    bench.core.submit(record(NAMED, "mode", 2, lineage=""), 0.0)
    other = Bench(roots=(ALICE,))
    for send in bench.core.submit(record(NAMED, "pause", 2, lineage=""), 0.0):
        if isinstance(send, Send):
            other.feed(Request(1, KEYS[2].node_id, send.message))
    assert other.core.swarm.operators == (ALICE, BOB)
    assert other.core.swarm.get("pause") is not None
    assert other.core.refused_records == 0


@pytest.mark.parametrize("key", ["bans", "mode"])
def test_nobody_can_write_the_last_record(key) -> None:
    """An operator who writes the highest epoch that is taken, and is removed for it, has a successor."""
    held = store()
    value = BansSetting() if key == "bans" else 1
    assert held.merge(named(1, BOB))
    assert held.merge(record(NAMED, key, MAX_FIRST_EPOCH, value))
    hers = held.compose(key, value, ROOT)
    assert held.merge(hers)
    newcomer = store()
    assert newcomer.merge(hers, trusted=True)
    assert held.merge(named(2))
    assert held.get(key) == hers
    other = store()
    other.merge(named(1, BOB))
    other.merge(record(NAMED, key, MAX_FIRST_EPOCH, value))
    other.merge(named(2))
    assert other.get(key) is None
    assert other.merge(hers)


def test_what_was_dropped_with_its_author_is_followed_by_who_may_command() -> None:
    """A command is composed elsewhere, by what a node tells of its records."""
    held = store(ALICE, BOB)
    assert held.merge(record(NAMED, "mode", 50))
    assert held.use_roots((ALICE,))
    assert held.get("mode") is None
    elsewhere = records_told(held.document(), (ALICE,), verify)
    assert held.merge(elsewhere.compose("mode", 2, ROOT))
    assert held.value("mode") == 2
    for passed in ({"mode": 2**60}, {"mode": "x"}, [1]):
        with pytest.raises(ValueError, match="no records"):
            records_told({**held.document(), "passed": passed}, (ALICE,), verify)
