"""Queues between threads."""

from __future__ import annotations

import pytest
import torch

from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, WireError
from p2pdrl.rl.pipeline.links import ring
from p2pdrl.rl.pipeline.messages import Activation, Gradient, TensorSlot


def test_each_way_has_its_own_order():
    first, second = ring(2)
    for number in range(3):
        first.send("down", Activation(1, number), [torch.full((2,), float(number))])
        first.send("up", Gradient(0, number))
    into = torch.empty(2)
    for number in range(3):
        assert second.receive("down", lambda _: [TensorSlot(into)], 0.0) == Activation(1, number)
        assert into.tolist() == [number, number]
    assert [second.receive("up", lambda _: [], 0.0).microbatch for _ in range(3)] == [0, 1, 2]


def test_down_is_a_ring_and_up_is_its_reverse():
    links = ring(3)
    for rank in range(3):
        links[rank].send("down", Activation(rank, 0))
        links[rank].send("up", Gradient(rank, 0))
    heard = [
        (
            links[rank].receive("down", lambda _: [], 0.0).stage,
            links[rank].receive("up", lambda _: [], 0.0).stage,
        )
        for rank in range(3)
    ]
    assert heard == [(2, 1), (0, 2), (1, 0)]


def test_what_was_received_is_a_copy():
    first, second = ring(2)
    sent, into = torch.ones(2), torch.zeros(2)
    first.send("down", Activation(1, 0), [sent])
    second.receive("down", lambda _: [TensorSlot(into)], 0.0)
    sent.zero_()
    assert into.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "slots",
    [
        [],
        [TensorSlot(torch.zeros(3))],
        [TensorSlot(torch.zeros(2, dtype=torch.float64))],
        [TensorSlot(torch.zeros(2)), TensorSlot(torch.zeros(2))],
    ],
)
def test_tensors_of_another_number_shape_or_type_are_refused(slots):
    first, second = ring(2)
    first.send("down", Activation(1, 0), [torch.ones(2)])
    with pytest.raises(WireError):
        second.receive("down", lambda _: slots, 0.0)


def test_a_late_message_raises():
    with pytest.raises(PeerTimeoutError, match=r"0\.001 s"):
        ring(2)[0].receive("up", lambda _: [], 0.001)


def test_closed_links_say_so_for_ever_on_both_sides_and_both_ways():
    links = ring(3)
    links[0].send("down", Activation(1, 0))
    links[0].close()
    assert links[1].receive("down", lambda _: [], 0.0) == Activation(1, 0)  # sent before
    for _ in range(2):
        for rank, way in ((0, "down"), (0, "up"), (1, "down"), (2, "up")):
            with pytest.raises(PeerUnreachableError):
                links[rank].receive(way, lambda _: [], 0.0)
    with pytest.raises(PeerUnreachableError):
        links[0].send("down", Activation(1, 0))
    with pytest.raises(PeerTimeoutError):
        links[1].receive("up", lambda _: [], 0.0)  # the third rank hasn't closed anything
