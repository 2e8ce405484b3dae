from __future__ import annotations

import pytest

from p2pdrl.errors import (
    PeerRefusedError,
    PeerTimeoutError,
    PeerUnreachableError,
    PoisonedVectorError,
    TensorError,
    WireError,
)
from p2pdrl.strategies.call_timeouts import CallDeadline, outcome_of


def test_the_deadline_follows_calls_that_went_well():
    deadline, seen = CallDeadline(2.0), []
    assert deadline.seconds == 1.0
    for _ in range(4):
        deadline.note("ok", 0.1)
        seen.append(deadline.seconds)
    assert seen == pytest.approx([0.4, 0.4, 0.4, 0.3])


def test_before_anything_went_well_each_fourth_is_waited_for_long():
    deadline, seen = CallDeadline(5.0), []
    for _ in range(7):
        deadline.note("timeout", deadline.seconds)
        seen.append(deadline.seconds)
    assert seen == [1.0, 1.0, 5.0, 1.0, 1.0, 1.0, 5.0]
    assert CallDeadline(0.3).seconds == 0.3


def test_mere_answers_are_a_first_measure():
    deadline = CallDeadline(5.0)
    deadline.note("busy", 0.01)
    assert deadline.seconds == 0.25
    deadline.note("refused", 0.1)
    assert deadline.seconds == pytest.approx(0.8)
    deadline.note("ok", 0.5)
    assert deadline.seconds == 2.0


def test_a_network_that_became_slow_at_once_is_found_out():
    deadline, took_s = CallDeadline(2.0), 0.1
    for _ in range(64):
        deadline.note("ok", took_s)
    took_s, good = 1.5, 0
    for _ in range(40):
        given_s = deadline.seconds
        deadline.note("ok" if given_s >= took_s else "timeout", min(took_s, given_s))
        good += given_s >= took_s
    assert good >= 20
    assert deadline.seconds == 2.0


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (PeerTimeoutError("late"), "timeout"),
        (PeerRefusedError(423, "engaged"), "busy"),
        (PeerRefusedError(409, "other"), "refused"),
        (PoisonedVectorError("nan"), "poisoned"),
        (PeerUnreachableError("gone"), "failed"),
        (WireError("cut off"), "unsure"),
        (TensorError("unreadable"), "failed"),
    ],
)
def test_each_failure_has_its_word(error, outcome):
    assert outcome_of(error) == outcome
