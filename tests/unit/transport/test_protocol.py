"""Addresses and route names."""

from __future__ import annotations

import pytest

from p2pdrl.errors import UsageError
from p2pdrl.transport.protocol import DEFAULT_PORT, Address, check_route


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:80", Address("10.0.0.1", 80)),
        ("node", Address("node", DEFAULT_PORT)),
        (" node.lan:0 ", Address("node.lan", 0)),
        ("[::1]:65535", Address("::1", 65535)),
        ("[fe80::1%eth0]", Address("fe80::1%eth0", DEFAULT_PORT)),
        ("[fe80::1%eth0.100]:1", Address("fe80::1%eth0.100", 1)),
        ("[::ffff:10.0.0.1]:1", Address("::ffff:10.0.0.1", 1)),
        ("node.lan.:1", Address("node.lan.", 1)),
        ("gpu_node-1.my_lab:1", Address("gpu_node-1.my_lab", 1)),
        (f"{'a' * 63}.b:1", Address("a" * 63 + ".b", 1)),
        (f"{'a.' * 126}a:1", Address("a." * 126 + "a", 1)),
    ],
)
def test_addresses_are_read_and_written(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":80",
        "a:",
        "a:b",
        "a:65536",
        "a:-1",
        "a:٣",
        "::1",
        "[::1",
        "[::1]80",
        "a b:1",
        "http://a",
        "a/b:1",
        "a:1:2",
        "a..b:1",
        ".a:1",
        ".:1",
        "a..:1",
        f"{'a' * 64}:1",
        f"b.{'a' * 70}.c:1",
        f"[{'a' * 70}]:1",
        "[::1..]:1",
        f"{'a.' * 127}a:1",
        "a\n:1",
    ],
)
def test_what_is_not_an_address(text: str) -> None:
    with pytest.raises(UsageError):
        Address.parse(text)


def test_addresses_hash_and_sort() -> None:
    assert sorted({Address("b", 1), Address("a", 2), Address("a", 1), Address("a", 1)}) == [
        Address("a", 1),
        Address("a", 2),
        Address("b", 1),
    ]


def test_route_names() -> None:
    assert check_route("swim/push-pull/v1") == "swim/push-pull/v1"
    for bad in ("", "/", "a/", "/a", "a//b", "A", "a.b", "..", "a/b/c/d/e", "a" * 33, "a\n"):
        with pytest.raises(ValueError, match="route"):
            check_route(bad)
