"""Messages as bytes, and bytes that aren't messages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.errors import PeerUnreachableError, WireError
from p2pdrl.rl.stages.framed_links import FramedLinks
from p2pdrl.rl.stages.frames import HEAD_BYTES, Head, bytes_of, check, decode, encode
from p2pdrl.rl.stages.messages import Activation, Gradient, Message, Opening, Over, Slice, Step, Sums, Whole
from p2pdrl.rl.stages.rows import Slot

from .pipelines import framed_ring

OPENING = Opening(generation=1, step=2, rows=3, sizes=(2, 1), precision="bf16", objective=b"\x80")
MESSAGES = [
    Activation(1, 2),
    Activation(1, 0, OPENING),
    Gradient(0, 3),
    Sums(4, 1.5, (0.25, -1.0)),
    Step(4, 2.5, 1e-3, 0.5),
    Over(4, state=True, spread=False),
    Slice(2, 4, 3),
    Whole(4, 3),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_come_back(message):
    frame = encode(message, [])
    head = Head.decode(frame.head[:HEAD_BYTES])
    assert head == (len(frame.head) - HEAD_BYTES, 0)
    assert decode(frame.head[HEAD_BYTES:], Message) == message


def test_a_frame_to_the_byte():
    tensors = [torch.tensor([1.0, -2.0], dtype=torch.bfloat16), torch.tensor([[7]]), torch.tensor([True])]
    head, views = encode(Gradient(1, 2), tensors)
    fields = b"\x83\xa4type\xa8gradient\xa5stage\x01\xaamicrobatch\x02"
    assert head == b"p2S1" + len(fields).to_bytes(4, "big") + (13).to_bytes(8, "big") + fields
    assert [bytes(view) for view in views] == [b"\x80\x3f\x00\xc0", b"\x07" + 7 * b"\x00", b"\x01"]


def test_views_are_the_tensors_own_memory():
    tensor = torch.zeros(3, 2)
    encode(Gradient(0, 0), [tensor]).tensors[0][:4] = b"\x00\x00\x80\x3f"
    assert tensor[0, 0] == 1.0
    assert bytes_of(torch.zeros(0, 5)).nbytes == 0


@given(st.binary(max_size=40))
def test_no_bytes_raise_anything_else(data):
    with pytest.raises(WireError):
        Head.decode(data)
    try:
        decode(data, Message)
    except WireError:
        pass


@pytest.mark.parametrize(
    "data",
    [
        b"p2S2" + 12 * b"\x00",
        b"p2S1" + b"\xff" * 4 + 8 * b"\x00",
    ],
)
def test_heads_of_others_and_long_messages_are_refused(data):
    with pytest.raises(WireError, match="isn't the head"):
        Head.decode(data)


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (Activation(1, 0), "stage", -1),
        (Activation(1, 0), "stage", 1 << 40),
        (Activation(1, 0), "microbatch", 1.5),
        (Activation(1, 0, OPENING), "opening", {"generation": 1}),
        (Step(4, 2.5, 1e-3, 0.5), "step", 1 << 60),
        (Sums(4, 1.5, ()), "terms", [0.0] * 65),
        (Whole(4, 3), "more", 1),
    ],
)
def test_fields_have_bounds(message, field, value):
    import msgspec

    plain = msgspec.to_builtins(message) | {field: value}
    with pytest.raises(WireError, match="can't be read"):
        decode(msgspec.msgpack.encode(plain), Message)


@pytest.mark.parametrize(
    "slot",
    [
        Slot(torch.tensor([0, 3]), 3),
        Slot(torch.tensor([-1, 2]), 3),
        Slot(torch.tensor([0, 2], dtype=torch.uint8).view(torch.bool)),
    ],
)
def test_numbers_that_would_do_harm_are_refused(slot):
    with pytest.raises(WireError, match="isn't in 0"):
        check(slot)


def test_other_numbers_are_not():
    check(Slot(torch.tensor([0, 2]), 3))
    check(Slot(torch.tensor([-5, 2])))
    check(Slot(torch.tensor([], dtype=torch.int64), 3))
    check(Slot(torch.tensor([True, False])))


# --- links of frames -----------------------------------------------------------------------------

TENSORS = [
    torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    torch.tensor([1.5, -0.1], dtype=torch.bfloat16),
    torch.tensor([[True], [False]]),
    torch.tensor([3, -(2**40)]),
    torch.tensor([1, 255], dtype=torch.uint8),
    torch.randn(2, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
]


def test_tensors_arrive_bit_by_bit():
    first, second = framed_ring(2)
    first.send("down", Activation(1, 0), TENSORS)
    first.send("down", Gradient(1, 0))
    into = [torch.zeros_like(tensor) for tensor in TENSORS]
    assert second.receive("down", lambda _: [Slot(tensor) for tensor in into], 1.0) == Activation(1, 0)
    assert all(torch.equal(*pair) for pair in zip(into, TENSORS, strict=True))
    assert second.receive("down", lambda _: [], 1.0) == Gradient(1, 0)


@pytest.mark.parametrize("rows", [0, 2, 4])
def test_tensors_of_another_length_are_refused_before_they_are_read(rows):
    first, second = framed_ring(2)
    first.send("down", Activation(1, 0), [torch.ones(3, 4)])
    into = torch.zeros(rows, 4)
    with pytest.raises(WireError, match=f"48 bytes of tensors should have {16 * rows}"):
        second.receive("down", lambda _: [Slot(into)], 1.0)
    assert not into.any()


def test_indices_are_checked_on_arrival():
    first, second = framed_ring(2)
    first.send("down", Activation(1, 0), [torch.tensor([5])])
    with pytest.raises(WireError, match=r"isn't in 0 … 4"):
        second.receive("down", lambda _: [Slot(torch.tensor([0]), 5)], 1.0)


def test_who_says_where_may_refuse():
    first, second = framed_ring(2)
    first.send("down", Activation(1, 0), [torch.ones(1)])

    def room(message):
        raise WireError(f"not {message.stage}")

    with pytest.raises(WireError, match="not 1"):
        second.receive("down", room, 1.0)


def test_closing_reaches_the_carrier():
    first, second = framed_ring(2)
    first.close()
    with pytest.raises(PeerUnreachableError):
        second.receive("down", lambda _: [], 1.0)
    assert isinstance(first, FramedLinks)
