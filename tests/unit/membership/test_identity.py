from __future__ import annotations

import stat
from pathlib import Path

import pytest

from p2pdrl.errors import StorageError
from p2pdrl.ids import node_id_from_public_key
from p2pdrl.membership.identity import Identity, verify


def test_identity_is_kept_across_loads_and_private(tmp_path: Path) -> None:
    first = Identity.load_or_create(tmp_path / "data")
    again = Identity.load_or_create(tmp_path / "data")
    assert first.node_id == again.node_id == node_id_from_public_key(first.public_key)
    assert stat.S_IMODE((tmp_path / "data" / "identity.key").stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["identity.key"]


def test_signatures_bind_key_and_data() -> None:
    one, other = Identity(bytes(32)), Identity(bytes([1]) * 32)
    signature = one.sign(b"hello")
    assert verify(one.public_key, signature, b"hello")
    assert not verify(one.public_key, signature, b"hullo")
    assert not verify(other.public_key, signature, b"hello")
    assert not verify(b"short", signature, b"hello")


def test_tls_is_of_the_same_node() -> None:
    one = Identity(bytes(32))
    assert one.tls([b"a swarm's key"]).node_id == one.node_id
    assert one.tls([b"a swarm's key", b"its next"]).node_id == one.node_id


def test_readable_by_others_is_refused(tmp_path: Path) -> None:
    Identity.load_or_create(tmp_path)
    (tmp_path / "identity.key").chmod(0o644)
    with pytest.raises(StorageError, match="chmod 600"):
        Identity.load_or_create(tmp_path)


def test_damaged_key_is_told(tmp_path: Path) -> None:
    (tmp_path / "identity.key").write_bytes(b"abc")
    (tmp_path / "identity.key").chmod(0o600)
    with pytest.raises(StorageError, match="3 bytes"):
        Identity.load_or_create(tmp_path)
