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
from p2pdrl.strategies.calling import CallDeadline, outcome_of


def test_the_deadline_follows_calls_that_went_well():
    deadline = CallDeadline(2.0)
    assert deadline.seconds == 2.0
    for _ in range(10):
        deadline.note("ok", 0.1)
    assert deadline.seconds == pytest.approx(0.3)


def test_it_doubles_with_each_call_in_a_row_that_ran_out_of_time():
    deadline, seen = CallDeadline(2.0), []
    for _ in range(10):
        deadline.note("ok", 0.1)
    for _ in range(4):
        deadline.note("timeout", deadline.seconds)
        seen.append(deadline.seconds)
    assert seen == pytest.approx([0.6, 1.2, 2.0, 2.0])
    deadline.note("busy", 0.01)
    assert deadline.seconds == 2.0
    deadline.note("ok", 0.1)
    assert deadline.seconds == pytest.approx(0.3)


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
