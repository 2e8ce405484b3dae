"""Facts about a node, signed by that node: its counts, its normaliser moments, its report.

Others carry a fact unchanged, byte for byte, and look at its signature once, when it is news to them. So a
member can be silent about another, and repeat what that one has said, but can't say anything in its name.
The signature covers the swarm, the kind of fact and its table (the lineage, the stream of moments), so that
a fact means nothing elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from p2pdrl.errors import WireError
from p2pdrl.ids import node_id_from_public_key
from p2pdrl.membership.identity import Signer, Verify, verify

__all__ = ["FactSigner", "ForgedFactError", "SignedFact", "TooManyFactsError"]

MAX_BODY_BYTES = 1 << 20

Kind = Literal["counts", "moments", "report"]


class ForgedFactError(WireError):
    """A fact that isn't signed by the node that it is about: no honest member passes it on."""


class TooManyFactsError(WireError):
    """More facts had to be checked than the teller may have us check by now; the rest may come again."""


class SignedFact(msgspec.Struct, frozen=True, array_like=True):
    """What one node says of itself."""

    public_key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    body: Annotated[bytes, Meta(max_length=MAX_BODY_BYTES)]
    """msgpack of whatever the fact is."""
    signature: Annotated[bytes, Meta(max_length=64)]

    @property
    def node(self) -> str:
        """Id of the node that says so."""
        return node_id_from_public_key(self.public_key)


class FactSigner:
    """Signs this node's facts, and checks those of others.

    Args:
        signer: our key.
        verify: checks a signature.
    """

    def __init__(self, signer: Signer, swarm_id: str, verify: Verify = verify) -> None:
        self._signer = signer
        self._swarm_id = swarm_id
        self._verify = verify
        self.forged = 0
        """Facts that were refused."""
        self._left = math.inf

    @property
    def node_id(self) -> str:
        """Our own id."""
        return self._signer.node_id

    def sign(self, kind: Kind, table: str, body: bytes) -> SignedFact:
        """Say something of ourselves."""
        signature = self._signer.sign(self._payload(kind, table, body))
        return SignedFact(self._signer.public_key, body, signature)

    @contextmanager
    def at_most(self, checks: float) -> Iterator[Callable[[], float]]:
        """Check so many facts meanwhile, and no more; gives what tells how many may be checked yet."""
        self._left = checks
        try:
            yield lambda: self._left
        finally:
            self._left = math.inf

    def check(self, kind: Kind, table: str, fact: SignedFact) -> None:
        """Accept a fact, or raise.

        Raises:
            ForgedFactError: its signature isn't of that node, or not for this kind, table and swarm.
            TooManyFactsError: see `at_most`.
        """
        if self._left < 1.0:
            raise TooManyFactsError("these are more facts than this node checks at a time")
        self._left -= 1.0
        if not self._verify(fact.public_key, fact.signature, self._payload(kind, table, fact.body)):
            self.forged += 1
            raise ForgedFactError(f"{kind} in the name of {fact.node[:8]} aren't signed by it")

    def _payload(self, kind: Kind, table: str, body: bytes) -> bytes:
        return msgspec.msgpack.encode(("p2pdrl fact", self._swarm_id, kind, table, body))
