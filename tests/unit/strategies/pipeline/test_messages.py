"""What may be in an order."""

from __future__ import annotations

import msgspec
import pytest

from p2pdrl.group.view import ViewKey
from p2pdrl.strategies.pipeline.messages import Form, as_reason


def encoded(why: str) -> bytes:
    form = {
        "type": "form",
        "key": msgspec.to_builtins(ViewKey(1, 2, "a")),
        "generation": 9,
        "members": ["a", "b"],
        "blocks": 6,
        "cuts": [2],
        "microbatches": 4,
        "lineage": "aa",
        "policy_version": 0,
        "digest": b"",
        "why": why,
    }
    return msgspec.msgpack.encode(form)


@pytest.mark.parametrize("why", ["", "2.4 ms a step", "µ" * 500, as_reason("\x1b[2J" + "x" * 1000)])
def test_a_reason_travels(why):
    assert msgspec.msgpack.decode(encoded(why), type=Form).why == why


@pytest.mark.parametrize("why", ["x" * 501, "\x1b[2Jgone", "two\nlines", "\u202e"])
def test_a_reason_that_could_do_harm_is_refused(why):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encoded(why), type=Form)
