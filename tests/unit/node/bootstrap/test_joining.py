from __future__ import annotations

import socket

import msgspec
import pytest

from p2pdrl.config.task import A2CConfig, EnvConfig, TaskConfig, task_hash
from p2pdrl.errors import UsageError, WireError
from p2pdrl.node.bootstrap.joining import JoinInfo, decode_info, refuse_task
from p2pdrl.node.bootstrap.startup import advertised, direct, moved_to, seed_address
from p2pdrl.transport.protocol import Address

TASK = TaskConfig()
HASH = task_hash(TASK)
INFO = JoinInfo(TASK, HASH, "ab" * 8, 42, 1000.0)


def test_the_swarms_task_arrives():
    assert decode_info(msgspec.msgpack.encode(INFO)) == INFO


def without_hash(info: JoinInfo) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(info, task_hash="0" * 32))


def of_a_newer_release() -> bytes:
    plain = msgspec.to_builtins(INFO)
    plain["task"]["env"]["gravity"] = 9.81
    return msgspec.msgpack.encode(plain)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "another release"),
        (b"\xc1", "another release"),
        (of_a_newer_release(), "another release"),
        (without_hash(INFO), "doesn't have the hash"),
    ],
)
def test_a_task_that_cant_be_trusted(data, words):
    with pytest.raises(WireError, match=words):
        decode_info(data)


def test_who_is_let_in():
    other = TaskConfig(env=EnvConfig(id="Acrobot-v1"), algorithm=A2CConfig())
    assert refuse_task("", TASK, HASH) is None
    assert refuse_task(HASH, TASK, HASH) is None
    why = refuse_task(HASH, other, task_hash(other))
    assert why is not None
    assert "Acrobot-v1 with a2c" in why
    assert HASH[:8] in why


@pytest.mark.parametrize(
    ("given", "bound", "seeds", "expected"),
    [
        (None, "127.0.0.1:7701", (), "127.0.0.1:7701"),
        (None, "10.0.0.5:7701", ("10.0.0.1:1",), "10.0.0.5:7701"),
        ("node5.example", "0.0.0.0:7701", (), "node5.example:7701"),
        ("node5.example:80", "0.0.0.0:7701", (), "node5.example:80"),
        (None, "0.0.0.0:7701", ("127.0.0.1:7700",), "127.0.0.1:7701"),
        (None, "0.0.0.0:7701", ("[::1]:7700",), "127.0.0.1:7701"),
    ],
)
def test_the_address_that_others_are_told(given, bound, seeds, expected):
    assert str(advertised(given, Address.parse(bound), seeds)) == expected


def test_a_wildcard_without_seeds_becomes_some_address():
    told = advertised(None, Address("0.0.0.0", 7701), ())
    assert told.port == 7701
    assert told.host != "0.0.0.0"


def test_on_a_network_that_leads_nowhere_it_is_the_address_of_an_interface():
    found = advertised(
        None, Address("0.0.0.0", 7701), (), source_ip=lambda *_: None, own_ips=lambda _: ["10.77.0.1"]
    )
    assert str(found) == "10.77.0.1:7701"
    alone = advertised(None, Address("0.0.0.0", 7701), (), source_ip=lambda *_: None, own_ips=lambda _: [])
    assert str(alone) == "127.0.0.1:7701"


def test_a_bad_advertised_address_is_told():
    with pytest.raises(UsageError, match="isn't an address"):
        advertised("not an address", Address("0.0.0.0", 7701), ())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, True),
        ("127.0.0.1:7700", True),
        ("localhost", True),
        (f"{socket.gethostname().upper()}:9", True),
        ("192.0.2.7:7700", False),
        ("[2001:db8::7]:7700", False),
        ("0.0.0.0:7700", False),
        ("rig.example.org:7700", False),
    ],
)
def test_a_machine_is_reached_itself_where_what_people_say_is_its_own(given, expected: bool):
    assert direct(given) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("nonsense", "nohost.invalid:7700", "swarm_1.default.svc.", "3com.example:1", "x" * 63),
        *("10.0.0.1", "10.0.0.1:7700", "[::1]:7700", "[fe80::1%eth0]:7700"),
    ],
)
def test_what_may_be_a_peer(text):
    assert seed_address(text) == Address.parse(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("7700", "a port alone: write HOST:PORT"),
        ("300.1.1.1:7700", "neither an IP address"),
        ("10.0.0:7700", "neither an IP address"),
        ("a..b:7700", "isn't an address"),
        (".", "isn't an address"),
        ("-rf:7700", "neither an IP address"),
        ("x" * 64, "isn't an address"),
        ("eth0%1:7700", "neither an IP address"),
        ("[12345::]:7700", "neither an IP address"),
        ("host:0", "port 0"),
        ("host:http", "no good port"),
        ("http://host:7700", "isn't an address"),
        ("two words", "isn't an address"),
    ],
)
def test_what_cant_be_a_peer(text, why):
    with pytest.raises(UsageError, match=why):
        seed_address(text)


NOW = Address("192.168.1.20", 7700)
PEER, NAMED = Address("192.168.1.1", 7700), Address("box.local", 7700)


def test_nobody_moves_while_the_address_is_the_machine_s():
    assert moved_to(NOW, [PEER], ours=lambda ip: True, source_ip=lambda peer: "10.0.0.9") is None


def test_a_lost_address_is_replaced_by_the_one_that_faces_a_peer():
    ways = {PEER: None, Address("10.0.0.1", 1): "10.0.0.9"}
    found = moved_to(NOW, [NAMED, *ways], ours=lambda ip: ip != NOW.host, source_ip=ways.__getitem__)
    assert found == Address("10.0.0.9", 7700)


@pytest.mark.parametrize("way", [None, "127.0.0.1"])
def test_without_a_network_the_old_address_stays(way):
    assert moved_to(NOW, [PEER], ours=lambda ip: False, source_ip=lambda peer: way) is None


def test_this_machine_has_its_loopback_and_not_a_documentation_address():
    assert moved_to(Address("127.0.0.1", 1), [PEER]) is None
    assert moved_to(Address("192.0.2.7", 1), [NAMED]) is None
