"""Messages as bytes, and bytes that aren't messages."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.errors import PeerUnreachableError, WireError
from p2pdrl.rl.gradients import Minibatch, cut
from p2pdrl.rl.pipeline.links import FramedLinks
from p2pdrl.rl.pipeline.messages import (
    Activation,
    Gradient,
    Message,
    Opening,
    Slice,
    StepMessage,
    Sums,
    TensorSlot,
    UpdateOver,
    Whole,
    bytes_of,
    decode,
    encode,
    fill,
)

from .pipelines import framed_ring

OPENING = Opening(generation=1, step=2, rows=3, length=3, parts=2, precision="bf16", objective=b"\x80")
MESSAGES = [
    Activation(1, 2),
    Activation(1, 0, OPENING),
    Gradient(0, 3),
    Sums(4, 1.5, (0.25, -1.0)),
    StepMessage(4, 2.5, 1e-3, 0.5),
    UpdateOver(4, state=True, spread=False),
    Slice(2, 4, 3),
    Whole(4, 3),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_come_back(message):
    frame = encode(message, [])
    assert frame.tensors == []
    assert decode(frame.message, Message) == message


def test_a_frame_to_the_byte():
    tensors = [torch.tensor([1.0, -2.0], dtype=torch.bfloat16), torch.tensor([[7]]), torch.tensor([True])]
    message, views = encode(Gradient(1, 2), tensors)
    assert message == b"\x83\xa4type\xa8gradient\xa5stage\x01\xaamicrobatch\x02"
    assert [bytes(view) for view in views] == [b"\x80\x3f\x00\xc0", b"\x07" + 7 * b"\x00", b"\x01"]


@pytest.mark.parametrize(("length", "parts"), [(0, 1), (1, 1), (7, 3), (8, 4), (11, 8)])
def test_sizes_are_those_of_the_cut(length, parts):
    opening = msgspec.structs.replace(OPENING, length=length, parts=parts)
    batches = cut(Minibatch(torch.zeros(length, 2), {}, length), parts)
    assert opening.sizes == tuple(len(batch.inputs) for batch in batches)


def test_views_are_the_tensors_own_memory():
    tensor = torch.zeros(3, 2)
    encode(Gradient(0, 0), [tensor]).tensors[0][:4] = b"\x00\x00\x80\x3f"
    assert tensor[0, 0] == 1.0
    assert bytes_of(torch.zeros(0, 5)).nbytes == 0


@given(st.binary(max_size=40))
def test_no_bytes_raise_anything_else(data):
    try:
        decode(data, Message)
    except WireError:
        pass


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (Activation(1, 0), "stage", -1),
        (Activation(1, 0), "stage", 1 << 40),
        (Activation(1, 0), "microbatch", 1.5),
        (Activation(1, 0, OPENING), "opening", {"generation": 1}),
        (StepMessage(4, 2.5, 1e-3, 0.5), "step", 1 << 60),
        (Sums(4, 1.5, ()), "terms", [0.0] * 65),
        (Whole(4, 3), "more", 1),
    ],
)
def test_fields_have_bounds(message, field, value):
    plain = msgspec.to_builtins(message) | {field: value}
    with pytest.raises(WireError, match="can't be read"):
        decode(msgspec.msgpack.encode(plain), Message)


@pytest.mark.parametrize(
    ("dtype", "below", "numbers"),
    [
        (torch.int64, 3, [0, 3]),
        (torch.int64, 3, [-1, 2]),
        (torch.int64, 3, [1, 1 << 62]),
        (torch.bool, None, [0, 2]),
        (torch.bool, None, [255, 1]),
    ],
)
def test_numbers_that_would_do_harm_are_refused(dtype, below, numbers):
    sent = torch.tensor(numbers, dtype=torch.uint8 if dtype == torch.bool else dtype)
    with pytest.raises(WireError, match="isn't in 0"):
        fill([TensorSlot(torch.zeros(2, dtype=dtype), below)], bytes_of(sent))


@pytest.mark.parametrize(
    ("numbers", "below"),
    [
        (torch.tensor([0, 2]), 3),
        (torch.tensor([-5, 1 << 62]), None),
        (torch.tensor([], dtype=torch.int64), 3),
        (torch.tensor([True, False]), None),
    ],
)
def test_other_numbers_are_not(numbers, below):
    into = torch.empty_like(numbers)
    fill([TensorSlot(into, below)], bytes_of(numbers))
    assert torch.equal(into, numbers)


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
    assert second.receive("down", lambda _: [TensorSlot(tensor) for tensor in into], 1.0) == Activation(1, 0)
    assert all(torch.equal(*pair) for pair in zip(into, TENSORS, strict=True))
    assert second.receive("down", lambda _: [], 1.0) == Gradient(1, 0)


@pytest.mark.parametrize("rows", [0, 2, 4])
def test_tensors_of_another_length_are_refused(rows):
    first, second = framed_ring(2)
    first.send("down", Activation(1, 0), [torch.ones(3, 4)])
    into = torch.zeros(rows, 4)
    with pytest.raises(WireError, match=f"48 bytes of tensors should have {16 * rows}"):
        second.receive("down", lambda _: [TensorSlot(into)], 1.0)
    assert not into.any()


def test_indices_are_checked_on_arrival():
    first, second = framed_ring(2)
    first.send("down", Activation(1, 0), [torch.tensor([5])])
    with pytest.raises(WireError, match=r"isn't in 0 … 4"):
        second.receive("down", lambda _: [TensorSlot(torch.tensor([0]), 5)], 1.0)


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


def _frame(*tensors):
    return memoryview(b"".join(bytes(view) for view in encode(Gradient(0, 0), tensors).tensors))


@pytest.mark.parametrize("device", ["meta", "cuda"])
@pytest.mark.parametrize("writable", [True, False])
def test_other_devices_get_what_came_where_it_lies(device, writable):
    """Also where one doesn't begin at a multiple of its numbers' length. `meta` has no memory to look at."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    sent = [torch.tensor([True]), torch.tensor([[1.5, -2.0]]), torch.tensor([7, 2]), torch.zeros(0, 3)]
    data = _frame(*sent)
    if writable:
        data = memoryview(bytearray(data))
    got = [torch.empty_like(tensor, device=device) for tensor in sent]
    fill([TensorSlot(tensor, below=8 if tensor.dtype == torch.int64 else None) for tensor in got], data)
    if device != "meta":
        assert all(torch.equal(one.cpu(), other) for one, other in zip(got, sent, strict=True))
    with pytest.raises(WireError, match="isn't in 0 … 6"):
        fill([TensorSlot(tensor, below=7 if tensor.dtype == torch.int64 else None) for tensor in got], data)
