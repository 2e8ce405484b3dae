"""Messages between the daemon and its group process."""

from __future__ import annotations

import pytest

from p2pdrl.errors import WireError
from p2pdrl.workers.protocol import FrameBuffer
from p2pdrl.workers.torch_group.protocol import (
    Broken,
    GroupReduced,
    Host,
    Hosting,
    Joined,
    JoinGroup,
    Ready,
    Reduce,
    Row,
    decode_from_group,
    decode_to_group,
    frame,
    memory_nbytes,
)


@pytest.mark.parametrize(
    "message",
    [
        Host(("10.0.0.2", "b.example"), 15.0),
        JoinGroup(rank=1, size=3, host="10.0.0.1", port=4711, timeout_s=15.0),
        Reduce(
            number=7,
            weight=64.0,
            policy_version=9,
            learning_rate=0.5,
            max_abs=1e6,
            bf16=True,
            spread=False,
            left=15,
        ),
    ],
    ids=lambda message: type(message).__name__,
)
def test_orders_arrive_as_they_were_sent(message):
    (body,) = FrameBuffer().feed(frame(message))
    assert decode_to_group(body) == message


@pytest.mark.parametrize(
    "message",
    [
        Ready("cpu"),
        Hosting(65535),
        Joined("gloo"),
        GroupReduced((Row(1.5, 3, 0.5, 0.25, 15), Row(0.0, 0, 0.0, 0.0)), 2.0, sound=True),
        Broken("somebody is gone"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_answers_arrive_as_they_were_sent(message):
    (body,) = FrameBuffer().feed(frame(message))
    assert decode_from_group(body) == message


@pytest.mark.parametrize("port", [-1, 0, 65536])
def test_a_port_that_there_isnt_is_refused(port):
    (body,) = FrameBuffer().feed(frame(Hosting(port)))
    with pytest.raises(WireError, match="port"):
        decode_from_group(body)


@pytest.mark.parametrize("decode", [decode_to_group, decode_from_group])
@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa4what"])
def test_what_isnt_a_message_is_refused(decode, body):
    with pytest.raises(WireError):
        decode(body)


def test_the_memory_holds_two_vectors_of_floats():
    assert memory_nbytes(1000) == 8000
