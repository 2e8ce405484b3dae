from __future__ import annotations

import errno

import pytest

from p2pdrl.errors import PeerRefusedError, PeerTimeoutError, PeerUnreachableError, TransportError, WireError
from p2pdrl.membership.service import failed


def caused(error: TransportError, number: int) -> TransportError:
    error.__cause__ = OSError(number, "why")
    return error


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (PeerUnreachableError("nothing listens"), "unreachable", "connection refused"),
        (caused(PeerUnreachableError("x"), errno.ECONNREFUSED), "unreachable", "connection refused"),
        (caused(PeerUnreachableError("x"), errno.ECONNRESET), "timeout", "broke"),
        (caused(PeerUnreachableError("x"), errno.EHOSTUNREACH), "timeout", "no route"),
        (caused(PeerUnreachableError("x"), errno.EMFILE), "local", "EMFILE"),
        (caused(PeerUnreachableError("x"), errno.ENETUNREACH), "local", "ENETUNREACH"),
        (PeerTimeoutError("x"), "timeout", "no answer within 1 s"),
        (PeerRefusedError(403, "another node"), "refused", "it answered 403: another node"),
        (WireError("odd"), "timeout", "strange"),
    ],
)
def test_what_each_error_means(error: TransportError, kind: str, words: str) -> None:
    outcome = failed(7, error, took_s=0.5, deadline_s=1.0, lag_s=0.25)
    assert (outcome.call_id, outcome.kind) == (7, kind)
    assert words in outcome.reason


def test_a_timeout_that_came_late_was_held_up_here() -> None:
    outcome = failed(7, PeerTimeoutError("x"), took_s=21.0, deadline_s=1.0, lag_s=0.25)
    assert outcome.kind == "local"
    assert "held up for 20.0 s" in outcome.reason


def test_a_refusal_keeps_its_status() -> None:
    assert failed(1, PeerRefusedError(429, "busy"), 0.1, 1.0, 0.25).status == 429
