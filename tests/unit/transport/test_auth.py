"""Keys, MACs and the replay guard."""

from __future__ import annotations

import hmac

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.clock import ManualClock
from p2pdrl.transport.auth import (
    MAC_BYTES,
    PieceMac,
    ReplayGuard,
    SwarmKeys,
    format_time,
    is_nonce,
    new_nonce,
    parse_time,
    sign_api,
    verify_api,
)

KEYS = SwarmKeys(b"key")
NONCE = "0" * 32


def test_header_macs_depend_on_key_fields_and_their_borders() -> None:
    mac = KEYS.header_mac("a", "bc")
    assert KEYS.header_good(mac, "a", "bc")
    assert not KEYS.header_good(mac, "ab", "c")
    assert not KEYS.header_good(mac, "a", "bc", "")
    assert not KEYS.header_good("", "a", "bc")
    assert not KEYS.header_good("é" * 64, "a", "bc")
    assert not SwarmKeys(b"other").header_good(mac, "a", "bc")


def test_the_header_mac_is_hmac_over_hkdf() -> None:
    """RFC 5869 and RFC 2104 by hand: nodes of different releases have to agree."""
    extracted = hmac.digest(bytes(32), b"key", "sha256")
    key = hmac.digest(extracted, b"p2pdrl v1 header" + b"\1", "sha256")
    message = b"\0\0\0\7request" + b"\0\0\0\4POST"
    assert KEYS.header_mac("request", "POST") == hmac.digest(key, message, "sha256").hex()


def test_piece_macs_are_bound_to_index_request_direction_and_answer() -> None:
    piece = memoryview(bytearray(b"x" * 1000))
    request = KEYS.request_pieces(NONCE)
    macs = {
        request.of(piece),
        request.of(piece),
        KEYS.request_pieces("1" * 32).of(piece),
        KEYS.answer_pieces(NONCE, NONCE).of(piece),
        KEYS.answer_pieces(NONCE, "1" * 32).of(piece),
        SwarmKeys(b"other").request_pieces(NONCE).of(piece),
        *(way.of(piece) for way in KEYS.stream(NONCE, NONCE)),
        *(PieceMac(key).of(piece) for key in KEYS.pipe(NONCE, NONCE)),
    }
    assert len(macs) == 10
    assert {len(mac) for mac in macs} == {MAC_BYTES}


@given(st.binary(max_size=200), st.integers(0, 2**40), st.data())
def test_a_piece_that_changed_is_found(piece: bytes, index: int, data: st.DataObject) -> None:
    def mac(number: int) -> PieceMac:
        made = KEYS.request_pieces(NONCE)
        made.skip(number)
        return made

    tag = mac(index).of(piece)
    assert mac(index).good(piece, tag)
    assert not mac(index + 1).good(piece, tag)
    assert not mac(index).good(piece + b"\0", tag)
    bit = data.draw(st.integers(0, 127))
    forged = bytearray(tag)
    forged[bit // 8] ^= 1 << bit % 8
    assert not mac(index).good(piece, forged)


def test_a_piece_has_the_gmac_of_its_number() -> None:
    """Against AES-128-GCM itself: bodies count from 0, streams and pipes from 1."""

    def gmac(key: bytes, index: int) -> bytes:
        return AESGCM(key[:16]).encrypt(index.to_bytes(12, "big"), b"", b"piece")

    def key(*fields: str) -> bytes:
        extracted = hmac.digest(bytes(32), b"key", "sha256")
        pieces = hmac.digest(extracted, b"p2pdrl v1 pieces" + b"\1", "sha256")
        message = b"".join(len(field).to_bytes(4, "big") + field.encode() for field in fields)
        return hmac.digest(pieces, message, "sha256")

    ours, theirs = KEYS.stream(NONCE, "1" * 32)
    for mac, fields, first in (
        (KEYS.request_pieces(NONCE), ("request", NONCE), 0),
        (KEYS.answer_pieces(NONCE, "1" * 32), ("answer", NONCE, "1" * 32), 0),
        (ours, ("stream", "calls", NONCE, "1" * 32), 1),
        (theirs, ("stream", "answers", NONCE, "1" * 32), 1),
    ):
        assert [mac.of(b"piece") for _ in range(3)] == [gmac(key(*fields), first + i) for i in range(3)]
    assert KEYS.pipe(NONCE, "1" * 32) == tuple(
        key("pipe", way, NONCE, "1" * 32) for way in ("calls", "answers")
    )


def test_nonces_and_times_are_read_strictly() -> None:
    assert is_nonce(new_nonce())
    assert not any(map(is_nonce, ("", "0" * 31, "G" * 32, "A" * 32, "0" * 32 + "\n")))
    assert parse_time(format_time(1_700_000_000.1234)) == 1_700_000_000.123
    assert [parse_time(text) for text in ("nan", "inf", "1e9", "-1.000", "1.0", "", " 1.000", "1.000\n")] == [
        None
    ] * 8


def test_a_nonce_is_taken_once_and_forgotten_when_it_cannot_be_fresh() -> None:
    clock = ManualClock()
    guard = ReplayGuard(clock, window_s=60)
    assert guard.take(NONCE) is True
    assert guard.take(NONCE) is False
    clock.advance(119)
    assert guard.take(NONCE) is False
    clock.advance(2)
    assert guard.take("1" * 32) is True
    assert len(guard) == 1


def test_a_nonce_from_a_fast_clock_is_kept_as_long_as_it_is_fresh() -> None:
    clock = ManualClock()
    guard = ReplayGuard(clock, window_s=60)
    stamp_s = clock.wall() + 60
    assert guard.stale(stamp_s) is None
    guard.take(NONCE)
    while guard.stale(stamp_s) is None:
        assert guard.take(NONCE) is False
        clock.advance(10)


@pytest.mark.parametrize(("ahead_s", "word"), [(61, "ahead of"), (-61, "behind"), (1e12, "ahead of")])
def test_a_stale_stamp_is_explained(ahead_s: float, word: str) -> None:
    clock = ManualClock()
    verdict = ReplayGuard(clock).stale(clock.wall() + ahead_s)
    assert verdict is not None
    assert word in verdict


def test_a_full_guard_refuses_until_it_forgets() -> None:
    clock = ManualClock()
    guard = ReplayGuard(clock, window_s=1, capacity=2)
    assert [guard.take(str(i)) for i in range(3)] == [True, True, None]
    clock.advance(2.5)
    assert guard.take("9") is True


def test_api_signatures_cover_everything() -> None:
    mac = sign_api(b"key", "POST", "/v1/mode", 12.5, NONCE, target="a.1", body=b"{}")
    assert verify_api(b"key", "POST", "/v1/mode", 12.5, NONCE, mac=mac, target="a.1", body=b"{}")
    others = [
        verify_api(b"other", "POST", "/v1/mode", 12.5, NONCE, mac=mac, target="a.1", body=b"{}"),
        verify_api(b"key", "GET", "/v1/mode", 12.5, NONCE, mac=mac, target="a.1", body=b"{}"),
        verify_api(b"key", "POST", "/v1/stop", 12.5, NONCE, mac=mac, target="a.1", body=b"{}"),
        verify_api(b"key", "POST", "/v1/mode", 12.6, NONCE, mac=mac, target="a.1", body=b"{}"),
        verify_api(b"key", "POST", "/v1/mode", 12.5, "1" * 32, mac=mac, target="a.1", body=b"{}"),
        verify_api(b"key", "POST", "/v1/mode", 12.5, NONCE, mac=mac, target="a.1"),
        verify_api(b"key", "POST", "/v1/mode", 12.5, NONCE, mac=mac, target="b.1", body=b"{}"),
        verify_api(b"key", "POST", "/v1/mode", 12.5, NONCE, mac="", target="a.1", body=b"{}"),
    ]
    assert not any(others)
