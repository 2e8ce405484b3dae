from __future__ import annotations

import msgspec
import pytest

from p2pdrl.errors import WireError
from p2pdrl.membership import messages
from p2pdrl.membership.records import Incarnation, MemberRecord, Suspicion, SwarmRecord

ID = "0" * 32
INC = Incarnation(5, 6)
MEMBER = MemberRecord(ID, b"k" * 32, "näme", "h:1", INC, "alive", {"a": "b"}, 1, b"s" * 64)
SUSPICION = Suspicion(ID, INC, "1" * 32, "suspect", "connection refused", b"s" * 64)
SETTING = SwarmRecord("mode", 3, ID, b"\xc0", b"k" * 32, b"s" * 64)
RECORDS = (MEMBER, SUSPICION, SETTING)

ALL: list[messages.Message] = [
    messages.Ping(INC, INC, RECORDS),
    messages.Ack(INC, RECORDS, True),
    messages.PingReq(ID, INC, RECORDS),
    messages.Nack("no answer", RECORDS),
    messages.GossipMessage(INC, RECORDS),
    messages.Sync(b"h" * 16, RECORDS),
    messages.Digest(False, (messages.DigestEntry(b"i" * 16, INC, 2),), (messages.SwarmEntry("mode", 1, ID),)),
    messages.Delta(RECORDS, (ID,), ("mode",)),
    messages.JoinRequest(MEMBER, b"meta"),
    messages.Welcome(RECORDS, b"info", "10.0.0.9"),
]


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_round_trip_and_every_truncation(message: messages.Message) -> None:
    data = messages.encode(message)
    assert messages.decode(data) == message
    for length in range(len(data)):
        with pytest.raises(WireError):
            messages.decode(data[:length])


def test_over_declared_and_foreign_parts_are_refused() -> None:
    encode = msgspec.msgpack.encode
    bad = [
        b"",
        b"\xdd\xff\xff\xff\xff",  # an array that declares 4 billion entries
        b"\x93\xa4ping\xdd\x7f\xff\xff\xff",
        b"\x91" * 20_000,
        encode(["ping", [1, 2], [-1, 0], []]),
        encode(["ping", [1, 2], [2**53, 0], []]),
        encode(["nack", "x" * 201, []]),
        encode(["sync", b"short", []]),
        encode(["ping-req", "NOT-AN-ID", [1, 1], []]),
        encode(["unheard of"]),
        encode(["join", {"id": ID}, b""]),
        encode(["gossip", [1, 1], [["m", ID, b"k" * 32, "n" * 65, "h:1", [1, 1], "alive", {}, 1, b""]]]),
        encode(["gossip", [1, 1], [["m", ID, b"k" * 31, "n", "h:1", [1, 1], "alive", {}, 1, b""]]]),
        encode(["gossip", [1, 1], [["m", ID, b"k" * 32, "n", "h:1", [1, 1], "dead", {}, 1, b""]]]),
        encode(
            [
                "gossip",
                [1, 1],
                [["m", ID, b"k" * 32, "n", "h:1", [1, 1], "alive", {str(i): "" for i in range(65)}, 1, b""]],
            ]
        ),
    ]
    for data in bad:
        with pytest.raises(WireError):
            messages.decode(data)


def test_what_a_later_release_adds_is_passed_over() -> None:
    encode = msgspec.msgpack.encode
    later = ["z", {"of": "another kind"}, [1]]
    longer = [*msgspec.msgpack.decode(encode(MEMBER)), "one more field"]
    assert messages.decode(encode(["gossip", [5, 6], [later, longer, SETTING], "more"])) == (
        messages.GossipMessage(INC, (MEMBER, SETTING))
    )
    assert messages.decode(encode(["welcome", [later], b"info"])) == messages.Welcome((), b"info")
    for bad in ([later, 7], [[]], [[7]], [later, ["m", ID]], {"z": 1}):
        with pytest.raises(WireError):
            messages.decode(encode(["gossip", [5, 6], bad]))


def test_every_request_has_its_route() -> None:
    for message in ALL:
        if type(message) in messages.ROUTES.values():
            assert messages.ROUTES[messages.route_of(message)] is type(message)
