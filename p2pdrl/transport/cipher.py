"""Seals what goes over a stream or a pipe: AES-256-GCM (NIST SP 800-38D) per message and per piece.

A connection has one key for each direction, which nobody else has: the node that is dialled makes both, and
tells them over TLS. GCM must never see one (key, nonce) twice, so both ends count what they seal and the
count is the nonce; nothing can be repeated, left out or put in another order.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from p2pdrl.errors import WireError

__all__ = ["KEY_BYTES", "OPEN", "TAG_BYTES", "Cipher", "new_keys"]

KEY_BYTES = 32
"""Length of the key of one direction."""

TAG_BYTES = 16
"""What sealing adds: GCM's tag."""

_PIECE = 1 << 95
"""Set in the nonces of pieces, so that none is taken for a message."""

_Buffer = bytes | bytearray | memoryview


def new_keys() -> tuple[bytes, bytes]:
    """Return fresh keys for a connection: of what its caller sends, and of what its callee sends."""
    return secrets.token_bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES)


class Cipher:
    """One direction of one connection; either end has one, and uses it in the order of the bytes.

    Args:
        key: `KEY_BYTES` that no other direction or connection uses. Without one nothing is sealed, and
            everything is good.
        hides: encrypt. Else what goes can be read and not changed: tags alone are made, three times as fast.

    Attributes:
        nbytes: what sealing adds to a message or piece: `TAG_BYTES`, or 0 without a key.
        hides: whether it encrypts.
    """

    def __init__(self, key: bytes | None, *, hides: bool = True) -> None:
        self._gcm = AESGCM(key) if key is not None else None
        self.nbytes = TAG_BYTES if key is not None else 0
        self.hides = hides and key is not None
        self._next = 1
        self._sealed = memoryview(b"")

    def seal(self, message: bytes, head: bytes = b"") -> bytes:
        """Return a message as it is sent; ``head``, which goes before it, is proven with it, not hidden."""
        if self._gcm is None:
            return message
        if self.hides:
            return self._gcm.encrypt(self._nonce(), message, head)
        return message + self._gcm.encrypt(self._nonce(), b"", head + message)

    def unseal(self, sealed: bytes, head: bytes, what: str) -> bytes:
        """Return a message that came.

        Raises:
            WireError: it isn't what the other end sealed; ``what`` names it in the error.
        """
        if self._gcm is None:
            return sealed
        try:
            if self.hides:
                return self._gcm.decrypt(self._nonce(), sealed, head)
            message = sealed[:-TAG_BYTES]
            self._gcm.decrypt(self._nonce(), sealed[-TAG_BYTES:], head + message)
        except InvalidTag:
            raise WireError(f"{what} isn't authentic") from None
        return message

    def seal_piece(self, piece: _Buffer) -> Sequence[_Buffer]:
        """Return a piece of a vector as buffers to be sent; they hold until the next piece is sealed."""
        if self._gcm is None:
            return (piece,)
        if not self.hides:
            return (piece, self._gcm.encrypt(self._nonce(_PIECE), b"", piece))
        nbytes = len(piece) + TAG_BYTES
        if len(self._sealed) < nbytes:
            self._sealed = memoryview(bytearray(nbytes))
        sealed = self._sealed[:nbytes]
        self._gcm.encrypt_into(self._nonce(_PIECE), piece, None, sealed)
        return (sealed,)

    def unseal_piece(self, piece: memoryview, tag: memoryview) -> bool:
        """Tell in constant time whether a piece that came in the open belongs to its tag."""
        if self._gcm is None:
            return True
        try:
            self._gcm.decrypt(self._nonce(_PIECE), bytes(tag), piece)
        except InvalidTag:
            return False
        return True

    def decrypt_piece(self, sealed: memoryview, out: memoryview) -> bool:
        """Write the piece in ``sealed``, tag included, to ``out``; tell whether it is authentic."""
        if self._gcm is None:
            raise ValueError("nothing is hidden without a key")
        try:
            self._gcm.decrypt_into(self._nonce(_PIECE), sealed, None, out)
        except InvalidTag:
            return False
        return True

    def skip(self, count: int) -> None:
        """Pass over ``count`` messages or pieces that nobody looks at."""
        self._next += count

    def _nonce(self, kind: int = 0) -> bytes:
        self._next += 1
        return (kind | (self._next - 1)).to_bytes(12, "big")


OPEN = Cipher(None)
"""For bytes that nothing of ours protects: TLS does, or they never leave the machine."""
