"""Frames of a stream, without sockets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.errors import WireError
from p2pdrl.transport.framing import HEAD_BYTES, AnswerFrame, CallFrame


@given(st.integers(1, 131), st.integers(0, 2**32 - 1), st.integers(0, 10**15))
def test_heads_of_calls_go_there_and_back(route: int, meta: int, vector: int) -> None:
    frame = CallFrame(route, meta, vector)
    assert len(frame.encode()) == HEAD_BYTES
    assert CallFrame.decode(frame.encode()) == frame


@given(st.just(200) | st.integers(400, 599), st.integers(0, 2**32 - 1), st.integers(0, 10**15), st.booleans())
def test_heads_of_answers_go_there_and_back(status: int, meta: int, vector: int, last: bool) -> None:
    frame = AnswerFrame(status, meta, vector, last)
    assert len(frame.encode()) == HEAD_BYTES
    assert AnswerFrame.decode(frame.encode()) == frame


@pytest.mark.parametrize("frame", [CallFrame(1, 2**32, 0), CallFrame(1, 0, 10**15 + 1)])
def test_what_a_head_cannot_say(frame: CallFrame) -> None:
    with pytest.raises(ValueError, match="too long"):
        frame.encode()
    with pytest.raises(ValueError, match="too long"):
        AnswerFrame(200, frame.meta_nbytes, frame.vector_nbytes, False).encode()


marks = st.sampled_from([b"pC", b"pA"])
heads = st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES)


@given(heads | st.builds(lambda mark, rest: mark + rest[2:], marks, heads))
def test_any_bytes_are_a_sound_head_or_a_wire_error(data: bytes) -> None:
    try:
        call = CallFrame.decode(data)
    except WireError:
        pass
    else:
        assert 1 <= call.route_nbytes <= 131
        assert call.vector_nbytes <= 10**15
        assert call.encode() == data
    try:
        answer = AnswerFrame.decode(data)
    except WireError:
        pass
    else:
        assert answer.status == 200 or 400 <= answer.status <= 599
        assert answer.encode() == data
