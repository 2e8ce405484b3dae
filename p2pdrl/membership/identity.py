"""Who a node is: an Ed25519 key in its data folder; the node id is the hash of its public half.

`Signer` is what the core needs of it, so that the simulator can sign for free.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2pdrl.atomic import write_beside
from p2pdrl.errors import StorageError
from p2pdrl.ids import node_id_from_public_key
from p2pdrl.transport.certificates import Credentials
from p2pdrl.transport.tls import SwarmTls

__all__ = ["Identity", "Signer", "Verify", "verify"]

KEY_FILE = "identity.key"


class Signer(Protocol):
    """Signs in a node's name."""

    @property
    def node_id(self) -> str:
        """32 hex digits that follow from the public key."""

    @property
    def public_key(self) -> bytes:
        """32 raw bytes."""

    def sign(self, data: bytes) -> bytes:
        """Return a signature of ``data``."""


Verify = Callable[[bytes, bytes, bytes], bool]
"""``(public_key, signature, data)`` -> whether the owner of the key made that signature of the data."""


class Identity:
    """A node's own key pair, from the 32 raw bytes of an Ed25519 private key."""

    def __init__(self, private_key: bytes) -> None:
        self._private_key = private_key
        self._key = Ed25519PrivateKey.from_private_bytes(private_key)
        self._public_key = self._key.public_key().public_bytes(
            serialization.Encoding.Raw, serialization.PublicFormat.Raw
        )
        self._node_id = node_id_from_public_key(self._public_key)

    @classmethod
    def load_or_create(cls, folder: Path) -> Identity:
        """Return the identity kept in ``folder``, made at the first call.

        Raises:
            StorageError: the file can't be read or written, is damaged, or others may read it.
        """
        path = folder / KEY_FILE
        try:
            if not path.exists():
                _write_new(path, secrets.token_bytes(32))
            if path.stat().st_mode & 0o077:
                raise StorageError(f"{path} can be read by others; run: chmod 600 {path}")
            raw = path.read_bytes()
        except OSError as error:
            raise StorageError(f"can't read or write {path}: {error}; choose another --data-dir") from error
        if len(raw) != 32:
            raise StorageError(
                f"{path} holds {len(raw)} bytes in place of 32; move it away to get a new identity"
            )
        return cls(raw)

    @property
    def node_id(self) -> str:
        """32 hex digits that follow from the public key."""
        return self._node_id

    @property
    def public_key(self) -> bytes:
        """32 raw bytes."""
        return self._public_key

    def tls(self, credentials: Sequence[bytes] | Credentials) -> SwarmTls:
        """Return our half of connections between members; see `SwarmTls` for what proves that we are one."""
        return SwarmTls(self._private_key, credentials)

    def sign(self, data: bytes) -> bytes:
        """Return the 64-byte signature of ``data``."""
        return self._key.sign(data)


def verify(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """True when ``signature`` of ``data`` was made by the owner of ``public_key``."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _write_new(path: Path, content: bytes) -> None:
    """Create ``path`` whole or not at all; the first of two writers wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = write_beside(path, (content,))
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
