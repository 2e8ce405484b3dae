from __future__ import annotations

import pytest

from p2pdrl.membership.records import AddressPolicy


@pytest.mark.parametrize(
    ("address", "told_by", "words"),
    [
        ("169.254.169.254:80", "10.0.0.1", "link-local"),
        ("[::ffff:169.254.169.254]:80", "10.0.0.1", "link-local"),
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
    refusal = AddressPolicy().refuse(address, told_by)
    assert refusal is not None
    assert words in refusal


def test_what_is_fine() -> None:
    policy = AddressPolicy()
    assert policy.refuse("127.0.0.1:7600", "127.0.0.1") is None
    assert policy.refuse("127.0.0.1:7600", "") is None
    assert policy.refuse("10.1.2.3:7600", "10.0.0.1") is None
    assert policy.refuse("node7.cluster.local:7600", "10.0.0.1") is None


def test_allowed_networks() -> None:
    policy = AddressPolicy(("10.0.0.0/8",))
    assert policy.refuse("10.9.9.9:1", "10.0.0.1") is None
    assert "outside" in (policy.refuse("192.168.0.1:1", "10.0.0.1") or "")
