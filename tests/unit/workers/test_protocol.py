from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.config.learner_mode import LearnerMode
from p2pdrl.errors import WireError
from p2pdrl.pipeline.layers import Layer
from p2pdrl.pipeline.plan import Rendezvous, StageNews, StageOrder
from p2pdrl.pipeline.trace import TraceSpan
from p2pdrl.transport.pipe.ticket import PipeTicket
from p2pdrl.workers.pipeline.protocol import Blocks, Finish, Measure, News, StartStage, Trace, Traced
from p2pdrl.workers.protocol import (
    MAX_FRAME_BYTES,
    Attach,
    ChildFailed,
    FrameBuffer,
    Hello,
    JoinHogwild,
    LearnerPace,
    Others,
    PostedRequest,
    Progress,
    Report,
    RequestAnswer,
    Start,
    Stop,
    WorkMode,
    decode_from_learner,
    decode_to_learner,
    frame,
)

ORDER = StageOrder(
    generation=3,
    rank=1,
    blocks=4,
    cuts=(2,),
    schedule="1f1b",
    microbatches=4,
    ranks=2,
    timeout_s=10.0,
    idle_timeout_s=60.0,
    state_every=10,
)
TO = [
    Start(b"{}", 7, "cpu", 1, False),
    Start(b"{}", 7, "cpu", 1, False, microbatches="auto", activation_limit_bytes=1 << 40),
    Attach(4096, True),
    JoinHogwild(4096),
    WorkMode(LearnerMode("gradients", every=2, ahead=1, steps=False, clip="before"), 2**60, 4096, 0),
    RequestAnswer(7, 2**60, "replace", 3),
    Others({"observations": b"\x01"}),
    Progress(0.5),
    LearnerPace(True, 2.5),
    Stop(),
    StartStage(
        ORDER, (("previous", PipeTicket((b"k" * 32, b"q" * 32), b"left")), ("next", PipeTicket(None, b"")))
    ),
    StartStage(ORDER, (("next", PipeTicket((b"k" * 32, b"q" * 32), hides=False)),)),
    StartStage(msgspec.structs.replace(ORDER, backend="torch", meeting=Rendezvous("127.0.0.1", 0))),
    Finish(3),
    Measure(4),
    Trace(1, 2.0),
]
FROM = [
    Hello("cpu", b"spec"),
    Report(3, 2, 100, 4, [1.0, -2.0], {"loss": float("inf")}, {"returns": b"x"}),
    PostedRequest(7, 2**60, "gradients", 1, 1000, 128),
    ChildFailed("no such environment", True),
    Blocks(4, (Layer("dense 0", 1e-3, 2e-3, 4096, 512, 2048), Layer("heads", 1e-3, 2e-3, 64, 8)), "cpu"),
    Blocks(4, (), "cpu", "one block can't be cut"),
    Blocks(4, (), "cuda:0", usable_bytes=10**11, gpu="41ab-7"),
    News(StageNews(3, "broken", side="next", why="gone")),
    News(StageNews(3, "meeting", port=4711)),
    Traced(1, 4.0, 5.0, (TraceSpan("forward", 1.0, 2.0, 1, 3, 7), TraceSpan("step", 2.0, 2.5))),
]


def cut(data: bytes, points: list[int]) -> list[bytes]:
    ends = sorted({point % (len(data) + 1) for point in points} | {len(data)})
    return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("message", TO)
def test_to_the_learner_and_back(message):
    (body,) = FrameBuffer().feed(frame(message))
    assert decode_to_learner(body) == message


@pytest.mark.parametrize("message", FROM)
def test_from_the_learner_and_back(message):
    (body,) = FrameBuffer().feed(frame(message))
    assert decode_from_learner(body) == message


@pytest.mark.parametrize("message", FROM)
def test_the_directions_have_their_own_messages(message):
    with pytest.raises(WireError, match="can't be read"):
        decode_to_learner(msgspec.msgpack.encode(message))


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b"junk", msgspec.msgpack.encode({"type": "dance"})])
def test_rubbish_is_a_wire_error(body):
    for decode in (decode_to_learner, decode_from_learner):
        with pytest.raises(WireError, match="can't be read"):
            decode(body)


@given(
    st.lists(st.sampled_from(TO), max_size=6),
    st.lists(st.integers(0, 10_000), max_size=20),
)
def test_frames_survive_any_cut(messages, points):
    buffer, found = FrameBuffer(), []
    for piece in cut(b"".join(frame(message) for message in messages), points):
        found += buffer.feed(piece)
    assert [decode_to_learner(body) for body in found] == messages
    assert buffer.feed(b"") == []


@given(st.binary(max_size=200))
def test_any_bytes_give_bodies_or_a_wire_error(data):
    try:
        bodies = FrameBuffer().feed(data)
    except WireError:
        return
    assert sum(4 + len(body) for body in bodies) <= len(data)


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 2**31, 2**32 - 1])
def test_a_hostile_length_is_refused_before_it_is_waited_for(length):
    buffer = FrameBuffer()
    with pytest.raises(WireError, match=f"says {length} bytes"):
        buffer.feed(struct.pack("<I", length))


def test_the_longest_frame_is_waited_for():
    assert FrameBuffer().feed(struct.pack("<I", MAX_FRAME_BYTES) + b"x") == []


def test_an_empty_body_is_a_frame():
    assert FrameBuffer().feed(bytes(8)) == [b"", b""]
