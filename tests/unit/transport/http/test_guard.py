"""Host and Origin rules."""

from __future__ import annotations

import pytest

from p2pdrl.transport.http.guard import host_of, judge


@pytest.mark.parametrize(
    ("authority", "host"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1:7600", "127.0.0.1"),
        ("[::1]:7600", "::1"),
        ("NODE.lan.:1", "node.lan"),
        ("", None),
        (":7600", None),
        ("a@b", None),
        ("a/b", None),
        ("a?b", None),
        ("a#b", None),
        ("a b", None),
        ("a:port", None),
        ("a:99999", None),
        ("[::1", None),
    ],
)
def test_the_host_of_an_authority(authority: str, host: str | None) -> None:
    assert host_of(authority) == host


def allowed(hosts: list[str], origin: str | None = None, own: bool = True) -> bool:
    return judge(hosts, origin, {"node.lan"}, own_origin_allowed=own) is None


def test_hosts() -> None:
    for good in (
        "10.0.0.1:7600",
        "[2001:db8::1]:7600",
        "localhost",
        "localhost:1",
        "node.lan",
        "Node.LAN:7600",
    ):
        assert allowed([good])
    for bad in (
        "evil.example",
        "node.lan.evil.example",
        "127.0.0.1.nip.io",
        "localhost.evil",
        "127.1",
        "0x7f000001",
    ):
        assert not allowed([bad])
    assert not allowed([])
    assert not allowed(["localhost", "localhost"])


def test_origins() -> None:
    assert allowed(["node.lan:7600"], "http://node.lan:7600")
    assert allowed(["node.lan"], "https://node.lan")
    assert not allowed(["node.lan:7600"], "http://node.lan:7600", own=False)
    for bad in (
        "http://node.lan",
        "http://node.lan:76001",
        "null",
        "",
        "http://evil",
        "file://node.lan:7600",
        "several",
    ):
        assert not allowed(["node.lan:7600"], bad)


def test_the_reason_tells_what_to_do() -> None:
    verdict = judge(["evil.example"], None, set(), own_origin_allowed=True)
    assert verdict is not None
    assert "advertised address" in verdict
