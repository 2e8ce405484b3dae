"""Identifiers: how each is made, and how it is written.

| name | made from | written as |
|---|---|---|
| node id | SHA-256 of the Ed25519 public key | 32 hex digits |
| swarm id | SHA-256 of the swarm key, or of the swarm's name when there is no key | 16 hex digits |
| lineage | 8 random digits, then SHA-256 of them and its founder's Ed25519 public key | 32 hex digits |
| exchange id | random per exchange | 16 hex digits |
| boot id | wall clock at start of the daemon, milliseconds | integer |
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterable
from typing import TypeVar

__all__ = [
    "find_called",
    "founded_by",
    "is_node_id",
    "new_exchange_id",
    "new_lineage",
    "node_id_from_public_key",
    "short",
    "swarm_id_from_key",
    "swarm_id_from_name",
]

_NONCE_DIGITS = 8
_FEWEST_DIGITS = 4
"""Of an id that people begin to write: fewer may be anybody's."""
_NODE_ID = re.compile(r"[0-9a-f]{32}")

T = TypeVar("T")


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


def new_lineage(founder_key: bytes) -> str:
    """Return a fresh lineage id, which shows whose it is: the node with this public key founds it."""
    return _lineage(secrets.token_hex(_NONCE_DIGITS // 2), founder_key)


def founded_by(lineage: str, public_key: bytes) -> bool:
    """Tell whether the node with this public key founded ``lineage``."""
    return lineage == _lineage(lineage[:_NONCE_DIGITS], public_key)


def _lineage(nonce: str, founder_key: bytes) -> str:
    """Whoever wants the same id for another key has to find it among 2⁹⁶."""
    return nonce + hashlib.sha256(b"p2pdrl lineage\0" + nonce.encode() + founder_key).hexdigest()[:24]


def new_exchange_id() -> str:
    """Return a fresh exchange id."""
    return secrets.token_hex(8)


def short(node_id: str) -> str:
    """Return the first eight digits: what people see in tables and logs."""
    return node_id[:8]


def find_called(text: str, known: Iterable[T], names: Callable[[T], tuple[object, object]]) -> list[T]:
    """Return those whom people may mean: of that name, else those whose id begins so.

    Args:
        text: a name, or four digits or more of an id.
        names: the name and the id of one.

    Example:
        >>> find_called("1a2b", [("alice", "1a2b3c4d"), ("bob", "1a2c3c4d")], lambda one: one)
        [('alice', '1a2b3c4d')]
    """
    everybody = [(one, *names(one)) for one in known]
    called = [one for one, name, _ in everybody if text and name == text]
    if called or len(text) < _FEWEST_DIGITS:
        return called
    return [one for one, _, id_ in everybody if str(id_).startswith(text)]
