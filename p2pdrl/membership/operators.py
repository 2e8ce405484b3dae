"""Operators: the people who may command a swarm, by the Ed25519 keys that they hold.

Root operators stand in the file of the swarm's key, where no member can change them for others. They sign the
record ``operators``, which names more; those name nobody. What an operator signs is a `SwarmRecord` whose
proposer follows from its key as a node's id does, so one rule checks both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdrl.ids import find_called, node_id_from_public_key, short

__all__ = [
    "MAX_BANS",
    "MAX_OPERATORS",
    "Ban",
    "BansSetting",
    "Operator",
    "OperatorsSetting",
    "find_operators",
    "operator_name",
]

MAX_OPERATORS = 16
"""Most root operators of a key file, and most others that they name."""
MAX_BANS = 64

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,32}$")]
_Text = Annotated[str, Meta(max_length=100)]


def operator_name(text: str) -> str | None:
    """Return ``text`` if it can be an operator's name; None otherwise."""
    return text if _NAME.fullmatch(text) else None


class Operator(msgspec.Struct, frozen=True):
    """Who may command: a public key, and what people call its owner."""

    public_key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    name: _Name

    @property
    def id(self) -> str:
        """The proposer of what this operator signs: 32 hex digits."""
        return node_id_from_public_key(self.public_key)

    @property
    def words(self) -> str:
        """``operator alice (1a2b3c4d)``; names alone may be taken twice."""
        return f"operator {self.name} ({short(self.id)})"


def find_operators(text: str, known: Iterable[Operator]) -> list[Operator]:
    """Return those of a name, else those whose id begins so, with four digits or more."""
    return find_called(text, known, lambda one: (one.name, one.id))


class OperatorsSetting(msgspec.Struct, frozen=True):
    """The operators whom root operators have named."""

    operators: Annotated[tuple[Operator, ...], Meta(max_length=MAX_OPERATORS)] = ()


class Ban(msgspec.Struct, frozen=True):
    """One node that every member refuses."""

    id: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    name: Annotated[str, Meta(max_length=64)] = ""
    """What it was called when it was banned."""
    reason: _Text = ""
    by: _Text = ""
    """Who banned it, in words."""

    @property
    def words(self) -> str:
        """``banned from this swarm by operator alice (1a2b3c4d): floods``."""
        text = f"banned from this swarm{f' by {self.by}' if self.by else ''}"
        text += f": {self.reason}" if self.reason else ""
        return "".join(c if c.isprintable() else " " for c in text)


class BansSetting(msgspec.Struct, frozen=True):
    """All nodes that are banned."""

    bans: Annotated[tuple[Ban, ...], Meta(max_length=MAX_BANS)] = ()
