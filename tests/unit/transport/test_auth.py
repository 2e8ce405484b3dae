"""Signed requests to the API, and the replay guard."""

from __future__ import annotations

import pytest

from p2pdrl.clock import ManualClock
from p2pdrl.transport.auth import (
    ReplayGuard,
    format_time,
    is_nonce,
    new_nonce,
    parse_time,
    prove_target,
    sign_api,
    target_proven,
    verify_api,
)

NONCE = "0" * 32


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


def test_a_node_proves_which_it_is() -> None:
    proof = prove_target(b"key", "a.1", NONCE)
    assert target_proven(b"key", "a.1", NONCE, proof)
    others = [
        target_proven(b"other", "a.1", NONCE, proof),
        target_proven(b"key", "b.1", NONCE, proof),
        target_proven(b"key", "a.1", "1" * 32, proof),
        target_proven(b"key", "a.1", NONCE, ""),
        target_proven(b"key", "a.1", NONCE, "\udcff" * 64),
    ]
    assert not any(others)
