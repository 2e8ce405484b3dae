from __future__ import annotations

import msgspec
import pytest

from p2pdrl.membership.identity import Identity, verify
from p2pdrl.membership.records import (
    MAX_TAG_BYTES,
    BadRecordError,
    Incarnation,
    MemberRecord,
    Suspicion,
    SwarmRecord,
    Verifier,
    approx_bytes,
    refuse_address,
    relays_in,
    sign_member,
    sign_suspicion,
    sign_swarm_record,
    with_relays,
)

ME, OTHER = Identity(b"1" * 32), Identity(b"2" * 32)
VERIFIER = Verifier("swarm", verify)


def record(**changes: object) -> MemberRecord:
    plain = MemberRecord(
        ME.node_id, ME.public_key, "box", "10.0.0.1:7600", Incarnation(1_000, 0), "alive", {"role": "x"}, 1
    )
    return sign_member(ME, "swarm", msgspec.structs.replace(plain, **changes))


def test_a_signed_record_is_accepted() -> None:
    VERIFIER.check_member(record(), wall_s=0.0)


@pytest.mark.parametrize(
    "change",
    [
        {"state": "left"},
        {"address": "10.0.0.2:1"},
        {"incarnation": Incarnation(1_000, 1)},
        {"tags": {}},
        {"name": "b"},
    ],
)
def test_a_changed_record_is_forged(change: dict[str, object]) -> None:
    with pytest.raises(BadRecordError) as caught:
        VERIFIER.check_member(msgspec.structs.replace(record(), **change), wall_s=0.0)
    assert caught.value.status == 403


def test_another_key_or_swarm_is_forged() -> None:
    with pytest.raises(BadRecordError):
        VERIFIER.check_member(record(public_key=OTHER.public_key), wall_s=0.0)
    with pytest.raises(BadRecordError):
        Verifier("other", verify).check_member(record(), wall_s=0.0)


def test_ten_minutes_in_the_future_is_the_bound() -> None:
    VERIFIER.check_member(record(incarnation=Incarnation(600_000, 0)), wall_s=0.0)
    with pytest.raises(BadRecordError, match="minutes in the future") as caught:
        VERIFIER.check_member(record(incarnation=Incarnation(660_000, 0)), wall_s=0.0)
    assert caught.value.status == 400


def test_bounds_on_text() -> None:
    with pytest.raises(BadRecordError, match="printed"):
        VERIFIER.check_member(record(name="a\x1b[2J"), wall_s=0.0)
    with pytest.raises(BadRecordError, match="tag"):
        VERIFIER.check_member(record(tags={"k": "v" * 128}), wall_s=0.0)


def test_suspicions_and_swarm_records_are_signed_too() -> None:
    suspicion = sign_suspicion(
        ME, "swarm", Suspicion(OTHER.node_id, Incarnation(1, 1), ME.node_id, "suspect", "no answer")
    )
    VERIFIER.check_suspicion(suspicion, ME.public_key)
    with pytest.raises(BadRecordError):
        VERIFIER.check_suspicion(msgspec.structs.replace(suspicion, verdict="dead"), ME.public_key)
    with pytest.raises(BadRecordError):
        VERIFIER.check_suspicion(suspicion, OTHER.public_key)
    setting = sign_swarm_record(ME, "swarm", SwarmRecord("mode", 1, ME.node_id, b"\xc0", ME.public_key))
    VERIFIER.check_swarm_record(setting)
    with pytest.raises(BadRecordError):
        VERIFIER.check_swarm_record(msgspec.structs.replace(setting, epoch=2))


def test_the_size_estimate_is_near_the_truth() -> None:
    for item in (record(), record(tags={f"k{i}": "v" * 20 for i in range(60)})):
        size = len(msgspec.msgpack.encode(item))
        assert size <= approx_bytes(item) <= 1.5 * size + 100


# Claimed addresses


@pytest.mark.parametrize(
    ("address", "told_by", "words"),
    [
        ("169.254.169.254:80", "10.0.0.1", "metadata"),
        ("[::ffff:169.254.169.254]:80", "10.0.0.1", "metadata"),
        ("[fd00:ec2::254%eth0]:80", "10.0.0.1", "metadata"),
        ("169.254.7.7:80", "10.0.0.1", "link-local"),
        ("[fd00:ec2::254]:80", "10.0.0.1", "metadata"),
        ("metadata.google.internal:80", "10.0.0.1", "metadata"),
        ("127.0.0.1:7600", "10.0.0.1", "loopback"),
        ("localhost:7600", "10.0.0.1", "loopback"),
        ("[::1]:7600", "10.0.0.1", "loopback"),
        ("0.0.0.0:7600", "10.0.0.1", "unspecified"),
        ("224.0.0.1:7600", "10.0.0.1", "multicast"),
        ("10.0.0.1:0", "10.0.0.1", "no port"),
        ("http://x/", "10.0.0.1", "isn't an address"),
    ],
)
def test_what_is_never_dialled(address: str, told_by: str, words: str) -> None:
    refusal = refuse_address(address, told_by)
    assert refusal is not None
    assert words in refusal


def test_addresses_that_are_fine() -> None:
    assert refuse_address("127.0.0.1:7600", "127.0.0.1") is None
    assert refuse_address("127.0.0.1:7600", "") is None
    assert refuse_address("10.1.2.3:7600", "10.0.0.1") is None
    assert refuse_address("node7.cluster.local:7600", "10.0.0.1") is None


def test_tags_tell_how_a_member_is_reached() -> None:
    relays = [f"{number:032x}" for number in range(5)]
    tags = with_relays({"roles": "learner"}, relays)
    assert relays_in(tags) == tuple(relays[:3])
    assert tags["roles"] == "learner"
    assert all(len(key) + len(value) <= MAX_TAG_BYTES for key, value in tags.items())
    assert relays_in(with_relays(tags, [])) == ()
    assert with_relays(tags, None) == {"roles": "learner"}
    assert relays_in({}) is None
    assert relays_in({"relays": relays[0]}) is None
    assert relays_in({"reach": "outbound-only", "relays": f"{relays[1]},../x,{relays[1]},"}) == (relays[1],)
