"""What is said of an error, whatever the error is."""

from __future__ import annotations

import msgspec
import pytest

from p2pdrl.workers.child import LONGEST_MESSAGE, LONGEST_TRACE, crash_of
from p2pdrl.workers.protocol import Crashed, decode_from_learner, frame


class OddError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def caught(raised: BaseException) -> Crashed:
    with pytest.raises(type(raised)) as info:
        raise raised
    return crash_of(info.value)


def test_an_error_is_told_with_its_place():
    crash = caught(ValueError("bad action"))
    assert (crash.kind, crash.message) == ("ValueError", "bad action")
    assert crash.where.startswith(__file__)
    assert crash.where.endswith("in caught")
    assert crash.trace.splitlines()[-1] == "ValueError: bad action"
    assert caught(OddError()).kind.endswith("test_crash.OddError")


@pytest.mark.parametrize(
    "error",
    [OddError(), ValueError("\udcff"), ValueError("x" * 10**6), ValueError(), ValueError("a\n" * 10**4)],
)
def test_any_error_fits_into_a_message(error):
    crash = caught(error)
    assert decode_from_learner(frame(crash)[4:]) == crash
    assert len(crash.message) <= LONGEST_MESSAGE + 10
    assert len(crash.trace) <= LONGEST_TRACE + 10


def test_a_deep_stack_is_cut_at_its_beginning():
    def deeper(level: int) -> None:
        if level:
            deeper(level - 1)
        for name in ("a", "b"):
            msgspec.json.decode(name)

    with pytest.raises(msgspec.DecodeError) as info:
        deeper(900)
    crash = crash_of(info.value)
    assert crash.kind == "msgspec.DecodeError"
    assert crash.trace.splitlines()[-1].startswith("msgspec.DecodeError: ")
