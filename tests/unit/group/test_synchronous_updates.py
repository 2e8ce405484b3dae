"""Who leads a round, and whether its update ends."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from p2pdrl.errors import WireError
from p2pdrl.group.round_collector import UpdatePosition, leader_ends
from p2pdrl.group.view import ViewKey
from p2pdrl.strategies.allreduce.averager import ReduceAnswer, ReduceRequest
from p2pdrl.strategies.servers.messages import GradientPush, ServerAnswer
from p2pdrl.transport import codec


@pytest.mark.parametrize(
    ("places", "ends"),
    [
        ([], False),
        ([UpdatePosition("a", 1.0, 0)], True),
        ([UpdatePosition("a", 1.0, 3)], False),
        ([UpdatePosition("a", 1.0, 0), UpdatePosition("b", 1.0, 3)], True),
        ([UpdatePosition("a", 1.0, 3), UpdatePosition("b", 1.0, 0)], False),
        (
            [UpdatePosition("a", 0.0, 3), UpdatePosition("b", 1.0, 0), UpdatePosition("c", 9.0, 2)],
            True,
        ),  # a gave nothing
        ([UpdatePosition("a", 0.0, 0), UpdatePosition("b", 1.0, 1)], False),
        ([UpdatePosition("a", 0.0, 0), UpdatePosition("b", 0.0, 0)], False),
    ],
)
def test_the_smallest_id_that_gave_something_leads_in_any_order(places, ends):
    for order in itertools.permutations(places):
        assert leader_ends(order) is ends


KEY = ViewKey(1, 2, "b" * 32)


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (ReduceRequest("part", KEY, 3), "left", 15),
        (ReduceAnswer(3), "ends_update", True),
        (GradientPush(KEY, 0, "step", 3), "left", 15),
        (ServerAnswer(3), "ends_update", True),
    ],
)
def test_messages_carry_it(message, field, value):
    changed = msgspec.structs.replace(message, **{field: value})
    read = codec.decode(msgspec.msgpack.encode(changed), type(message), "message")
    assert read == changed
    assert getattr(read, field) == value
    assert not getattr(message, field)


@pytest.mark.parametrize("message", [ReduceRequest("part", KEY, 3), GradientPush(KEY, 0, "step", 3)])
def test_less_than_nothing_cant_be_left(message):
    bad = msgspec.msgpack.encode(msgspec.structs.replace(message, left=-1))
    with pytest.raises(WireError):
        codec.decode(bad, type(message), "message")
