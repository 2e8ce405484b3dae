from __future__ import annotations

import msgspec
import pytest

from p2pdrl.membership.identity import Identity, verify
from p2pdrl.membership.records import BadRecordError, SwarmRecord, Verifier, sign_swarm_record
from p2pdrl.membership.swarm_records import SwarmRecords

ONE, TWO = sorted((Identity(b"1" * 32), Identity(b"2" * 32)), key=lambda identity: identity.node_id)


def store() -> SwarmRecords:
    return SwarmRecords(Verifier("swarm", verify))


def record(
    identity: Identity, epoch: int, value: object = None, *, lineage: str = "", key: str = "mode"
) -> SwarmRecord:
    plain = SwarmRecord(
        key, epoch, identity.node_id, msgspec.msgpack.encode(value), identity.public_key, lineage=lineage
    )
    return sign_swarm_record(identity, "swarm", plain)


def test_the_last_writer_wins_in_any_order() -> None:
    records = [record(ONE, 1), record(TWO, 1), record(ONE, 2), record(TWO, 3)]
    for order in (records, records[::-1], [records[1], records[3], records[0], records[2]]):
        held = store()
        for item in order:
            held.merge(item)
        assert held.get("mode") == records[3]


def test_equal_epochs_are_decided_by_the_proposer() -> None:
    held = store()
    assert held.merge(record(TWO, 1))
    assert not held.merge(record(ONE, 1))
    assert not held.merge(record(TWO, 1))


def test_a_proposal_beats_what_is_held() -> None:
    held = store()
    held.merge(record(TWO, 7))
    mine = held.compose("mode", {"name": "local"}, ONE)
    assert mine.epoch == 8
    assert held.merge(mine)
    assert held.value("mode") == {"name": "local"}
    assert held.value("stop") is None


def test_forgery_and_jumps_are_refused() -> None:
    held = store()
    held.merge(record(ONE, 1))
    with pytest.raises(BadRecordError) as caught:
        held.merge(msgspec.structs.replace(record(ONE, 2), value=b"\xc3"))
    assert caught.value.status == 403
    with pytest.raises(BadRecordError) as caught:
        held.merge(record(ONE, 1002))
    assert caught.value.status == 409
    assert held.merge(record(ONE, 1001))
    assert held.merge(record(ONE, 9999), trusted=True)


def test_bounds_on_proposals() -> None:
    with pytest.raises(ValueError, match="mode"):
        store().compose("mode", "x" * 9000, ONE)
    with pytest.raises(ValueError, match="MODE"):
        store().compose("MODE", 1, ONE)


def test_digests_find_what_either_side_lacks() -> None:
    left, right = store(), store()
    left.merge(record(ONE, 1))
    right.merge(record(ONE, 2))
    right.merge(right.compose("stop", True, TWO))
    give, want = left.compare(right.digest())
    assert give == ()
    assert sorted(want) == ["mode", "stop"]
    give, want = right.compare(left.digest())
    assert [item.key for item in give] == ["mode", "stop"]
    assert want == ()


def test_records_of_another_lineage_are_passed_over_whoever_is_greater() -> None:
    held = store()
    held.follow("old")
    mine = record(ONE, 1, lineage="old")
    assert held.merge(mine)
    assert not held.merge(record(TWO, 1, lineage="new"))
    assert not held.merge(record(TWO, 999, lineage="new"), trusted=True)
    assert held.get("mode") == mine


def test_the_lineage_is_signed() -> None:
    held = store()
    held.follow("old")
    with pytest.raises(BadRecordError) as caught:
        held.merge(msgspec.structs.replace(record(TWO, 1, lineage="new"), lineage="old"))
    assert caught.value.status == 403


def test_who_adopts_another_lineage_takes_its_records() -> None:
    held, other = store(), store()
    held.follow("new")
    held.merge(record(TWO, 9, lineage="new"))
    other.follow("old")
    other.merge(record(ONE, 2000, lineage="old"))
    assert held.compare(other.digest()) == ((), ())
    assert held.follow("old")
    assert held.all() == ()
    assert held.compare(other.digest()) == ((), ("mode",))
    assert held.merge(other.all()[0])


@pytest.mark.parametrize("key", ["junk", "mode2", "m"])
def test_keys_that_no_swarm_has_are_passed_over(key: str) -> None:
    """A later release may have them."""
    held = store()
    assert not held.merge(record(ONE, 1, key=key), trusted=True)
    assert held.all() == ()
    with pytest.raises(ValueError, match=key):
        held.compose(key, 1, ONE)


def test_no_peer_leaves_a_setting_without_a_next_epoch() -> None:
    held = store()
    with pytest.raises(BadRecordError) as caught:
        held.merge(record(ONE, 2**53 - 1), trusted=True)
    assert caught.value.status == 409
    held.merge(record(ONE, 2**52), trusted=True)
    assert held.merge(held.compose("mode", 1, TWO))
