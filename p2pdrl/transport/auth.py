"""Proof that a request to the API was made by a holder of a key, and was made for us, now.

Who holds the swarm's key or the node's token signs its request with it (HMAC-SHA256 under a key derived by
HKDF-SHA256, RFC 5869), so that neither is ever sent. Peers prove who they are by TLS, see `tls`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from p2pdrl.clock import Clock

__all__ = [
    "OPERATOR_HEADER",
    "ReplayGuard",
    "Verdict",
    "format_time",
    "is_nonce",
    "new_nonce",
    "operator_payload",
    "parse_time",
    "prove_target",
    "sign_api",
    "target_proven",
    "verify_api",
]

OPERATOR_HEADER = "P2PDRL-Operator"
"""An operator's public key and its signature of `operator_payload`, in hex, with a dot between."""

_NONCE = re.compile(r"[0-9a-f]{32}")
_TIME = re.compile(r"[0-9]{1,12}\.[0-9]{3}")

Verdict = str | None
"""Why something isn't acceptable, in plain words; None when it is."""


def new_nonce() -> str:
    """Return 128 fresh random bits as 32 hex digits."""
    return secrets.token_hex(16)


def is_nonce(text: str) -> bool:
    """Tell whether ``text`` is written as a nonce is."""
    return _NONCE.fullmatch(text) is not None


def format_time(wall_s: float) -> str:
    """Write a wall time as the header does: seconds with three decimals."""
    return f"{wall_s:.3f}"


def parse_time(text: str) -> float | None:
    """Read a header's time, or None when it isn't one."""
    return float(text) if _TIME.fullmatch(text) else None


def _derive(swarm_key: bytes, purpose: str) -> bytes:
    return HKDF(SHA256(), 32, salt=None, info=b"p2pdrl v1 " + purpose.encode()).derive(swarm_key)


def _join(fields: tuple[str | bytes, ...]) -> bytes:
    """Put fields together so that no two different lists give the same bytes."""
    parts = [field.encode() if isinstance(field, str) else field for field in fields]
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


class ReplayGuard:
    """Takes each nonce once, and only while its time stamp is fresh.

    A request is fresh while clocks differ by no more than ``window_s``, so a nonce has to be
    kept for two windows. Ask only after the MAC was found good, or strangers could fill it.

    Args:
        clock: wall time for the stamps, monotonic time for forgetting.
        window_s: greatest difference between the sender's wall clock and ours.
        capacity: nonces kept at most.
    """

    def __init__(self, clock: Clock, window_s: float = 60.0, capacity: int = 200_000) -> None:
        self._clock = clock
        self._window_s = window_s
        self._capacity = capacity
        self._seen: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def stale(self, wall_s: float) -> Verdict:
        """Tell why a stamp is not acceptable."""
        ahead_s = wall_s - self._clock.wall()
        if abs(ahead_s) <= self._window_s:
            return None
        side = "ahead of" if ahead_s > 0 else "behind"
        return (
            f"the sender's clock is {abs(ahead_s):.0f} s {side} ours (at most {self._window_s:.0f} s "
            "are allowed): set both clocks by NTP"
        )

    def take(self, nonce: str) -> bool | None:
        """Remember ``nonce``: True when it is new, False for a replay, None when full."""
        now_s = self._clock.monotonic()
        self._forget(now_s - 2 * self._window_s)
        if nonce in self._seen:
            return False
        if len(self._seen) >= self._capacity:
            return None
        self._seen[nonce] = now_s
        return True

    def _forget(self, before_s: float) -> None:
        while self._seen:
            oldest = next(iter(self._seen))
            if self._seen[oldest] >= before_s:
                return
            del self._seen[oldest]


def sign_api(
    key: bytes, method: str, path: str, wall_s: float, nonce: str, *, target: str, body: bytes = b""
) -> str:
    """Return the MAC with which a key holder signs a request to one node's API.

    Args:
        key: the swarm's key, or the node's local token.
        method: in upper case.
        path: with its query, as sent.
        wall_s: wall time of sending; sent along with three decimals.
        nonce: from `new_nonce`; sent along.
        target: the node and the run of it that the request is for, as it has proven by `prove_target`; never
            sent. A request that somebody has listened to is worth nothing to any other node, nor to this one
            once it has restarted and forgotten its nonces.
        body: the whole request body.
    """
    fields = (method, path, format_time(wall_s), nonce, target, hashlib.sha256(body).digest())
    return hmac.digest(_derive(key, "api request"), _join(fields), hashlib.sha256).hex()


def verify_api(
    key: bytes,
    method: str,
    path: str,
    wall_s: float,
    nonce: str,
    *,
    mac: str,
    target: str,
    body: bytes = b"",
) -> bool:
    """Tell in constant time whether `sign_api` gives ``mac``.

    Freshness is a second question: ask a `ReplayGuard` after this said yes.
    """
    expected = sign_api(key, method, path, wall_s, nonce, target=target, body=body)
    return hmac.compare_digest(expected.encode(), mac.encode())


def operator_payload(mac: str) -> bytes:
    """What an operator signs of a request, whose MAC covers all of it and the node that it is for."""
    return b"p2pdrl api request\0" + mac.encode()


def prove_target(key: bytes, target: str, nonce: str) -> str:
    """Return a node's proof that it holds ``key`` and is ``target``, for who has sent a fresh ``nonce``."""
    return hmac.digest(_derive(key, "api target"), _join((target, nonce)), hashlib.sha256).hex()


def target_proven(key: bytes, target: str, nonce: str, proof: str) -> bool:
    """Tell in constant time whether `prove_target` gives ``proof``."""
    expected = prove_target(key, target, nonce)
    return hmac.compare_digest(expected.encode(), proof.encode("utf-8", "surrogateescape"))
