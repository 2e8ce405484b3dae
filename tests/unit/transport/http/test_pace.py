"""When a connection is too slow; times in seconds."""

from __future__ import annotations

from p2pdrl.transport.http.listener import ConnectionPace
from p2pdrl.transport.limits import TransportLimits

LIMITS = TransportLimits(header_deadline_s=8.0, stall_deadline_s=8.0, min_body_bytes_s=100.0)


def slow(pace: ConnectionPace, now_s: float, body_open: bool = False, unsent_bytes: int = 0) -> bool:
    return pace.verdict(now_s, body_open=body_open, unsent_bytes=unsent_bytes) is not None


def test_a_header_has_a_deadline_that_bytes_do_not_move() -> None:
    pace = ConnectionPace(LIMITS, 0.0)
    for second in range(8):
        pace.arrived(10, float(second))
        assert not slow(pace, float(second))
    assert slow(pace, 8.0)


def test_an_idle_connection_may_wait_but_its_next_header_may_not() -> None:
    pace = ConnectionPace(LIMITS, 0.0)
    pace.request_started(1.0)
    pace.request_ended()
    assert not slow(pace, 70.0)
    pace.arrived(1, 70.0)
    assert not slow(pace, 77.9)
    assert slow(pace, 78.0)


def test_a_handler_may_take_its_time() -> None:
    pace = ConnectionPace(LIMITS, 0.0)
    pace.request_started(1.0)
    assert not any(slow(pace, float(second)) for second in range(2, 1000))


def test_a_body_has_to_move() -> None:
    pace = ConnectionPace(LIMITS, 0.0)
    pace.request_started(0.0)
    for second in range(1, 100):
        pace.arrived(100, float(second))
        assert not slow(pace, float(second), body_open=True)
    assert not slow(pace, 103.9, body_open=True)
    assert slow(pace, 104.0, body_open=True)


def test_a_trickle_counts_as_stalled() -> None:
    pace = ConnectionPace(LIMITS, 0.0)
    pace.request_started(0.0)
    verdicts = []
    for second in range(1, 9):
        pace.arrived(99, float(second))
        verdicts.append(slow(pace, float(second), body_open=True))
    assert verdicts == [False] * 7 + [True]


def test_time_in_which_we_do_not_read_is_not_held_against_the_peer() -> None:
    pace = ConnectionPace(LIMITS, 0.0)
    pace.request_started(0.0)
    for second in range(1, 30):
        assert not slow(pace, float(second), body_open=second > 25)
    assert slow(pace, 33.0, body_open=True)


def test_a_peer_that_does_not_read_its_answer_is_cut() -> None:
    pace = ConnectionPace(LIMITS, 0.0)
    pace.request_started(0.0)
    assert not slow(pace, 1.0, unsent_bytes=500)
    assert not slow(pace, 8.9, unsent_bytes=500)
    assert not slow(pace, 8.95, unsent_bytes=499)
    assert slow(pace, 17.0, unsent_bytes=499)
