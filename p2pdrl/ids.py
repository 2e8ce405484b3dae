"""Identifiers: how each is made, and how it is written.

| name | made from | written as |
|---|---|---|
| node id | SHA-256 of the Ed25519 public key | 32 hex digits |
| swarm id | SHA-256 of the swarm key, or of the swarm's name when there is no key | 16 hex digits |
| lineage | random at founding | 16 hex digits |
| exchange id | random per exchange | 16 hex digits |
| boot id | wall clock at start of the daemon, milliseconds | integer |
"""

from __future__ import annotations

import hashlib
import re
import secrets

__all__ = [
    "PROTOCOL_VERSION",
    "is_node_id",
    "new_exchange_id",
    "new_lineage",
    "node_id_from_public_key",
    "short",
    "swarm_id_from_key",
    "swarm_id_from_name",
]

PROTOCOL_VERSION = 6
"""Version of the peer protocol; nodes of different versions don't join each other."""

_NODE_ID = re.compile(r"[0-9a-f]{32}")


def node_id_from_public_key(public_key: bytes) -> str:
    """Return the node id that belongs to a raw 32-byte Ed25519 public key."""
    return hashlib.sha256(b"p2pdrl node\0" + public_key).hexdigest()[:32]


def is_node_id(text: str) -> bool:
    """Tell whether ``text`` is written as a node id is."""
    return _NODE_ID.fullmatch(text) is not None


def swarm_id_from_key(swarm_key: bytes) -> str:
    """Return the id of the swarm whose members hold ``swarm_key``."""
    return hashlib.sha256(b"p2pdrl swarm key\0" + swarm_key).hexdigest()[:16]


def swarm_id_from_name(name: str) -> str:
    """Return the id of a keyless swarm, which lives on one machine's loopback only."""
    return hashlib.sha256(b"p2pdrl swarm name\0" + name.encode()).hexdigest()[:16]


def new_lineage() -> str:
    """Return a fresh lineage id."""
    return secrets.token_hex(8)


def new_exchange_id() -> str:
    """Return a fresh exchange id."""
    return secrets.token_hex(8)


def short(node_id: str) -> str:
    """Return the first eight digits: what people see in tables and logs."""
    return node_id[:8]
