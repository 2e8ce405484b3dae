"""Stages over real pipes: the same numbers as over queues, and who is to blame when they break."""

from __future__ import annotations

import itertools
import os
import threading
import time

import numpy as np
import pytest
import torch

from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, WireError
from p2pdrl.rl.pipeline.links import FramedLinks, ring
from p2pdrl.transport.cipher import OPEN
from p2pdrl.transport.framing import batches
from p2pdrl.transport.pipe.frames import pack_head
from p2pdrl.transport.pipe.ticket import PipeTicket
from p2pdrl.workers.pipeline import pipe_carrier
from p2pdrl.workers.pipeline.pipe_carrier import PipeCarrier, _BufferPool

from ...rl.pipeline.pipelines import Pipeline, make_case, make_plan, step_with
from ...transport.pipes import KEYS, tcp_pair
from ..pipes import close_all, joined

LONGEST = 1 << 20


@pytest.fixture
def carriers():
    made = []

    def make(ranks, circle=False, keys=KEYS, **options):
        new = [PipeCarrier(pipes, LONGEST, **options) for pipes in joined(ranks, circle, keys)]
        made.extend(new)
        return new

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("keys", [None, KEYS])
@pytest.mark.parametrize(("schedule", "stages", "ranks"), [("1f1b", 3, 3), ("interleaved", 4, 2)])
def test_gradients_and_steps_are_those_of_queues(carriers, keys, schedule, stages, ranks):
    case, parts = make_case("mlp", torch.float32)
    plan = make_plan(parts, stages, 4, schedule, ranks)

    def trained(make_links):
        with Pipeline(parts, plan, make_links) as pipeline:
            for _ in range(3):
                pipeline.head.gradients(case.batch, case.objective)
                step_with(pipeline)
            return pipeline.head.collect(state=True, spread=True)

    expected = trained(ring)
    circle = schedule == "interleaved"
    found = trained(lambda ranks: [FramedLinks(one) for one in carriers(ranks, circle, keys)])
    np.testing.assert_array_equal(found.vector_D, expected.vector_D)
    for name, array in expected.optimizer.items():
        np.testing.assert_array_equal(found.optimizer[name], array)


def test_each_way_has_its_own_side(carriers):
    first, second, third = carriers(3)
    first.send("down", b"a", [memoryview(b"12"), memoryview(b"3")])
    third.send("up", b"b", [])
    assert second.receive("up", 5.0) == (b"b", b"")
    assert second.receive("down", 5.0) == (b"a", b"123")
    with pytest.raises(PeerUnreachableError, match="no pipe to the previous rank"):
        first.send("up", b"c", [])


def test_a_late_neighbour_is_named(carriers):
    _, second, _ = carriers(3)
    with pytest.raises(PeerTimeoutError, match=r"the next rank didn't say a whole message within 0.01 s"):
        second.receive("up", 0.01)
    assert second.side == "next"


@pytest.mark.parametrize(("chunk", "arrives"), [(64 << 10, True), (64, False)])
def test_a_long_message_may_take_longer_unless_it_trickles(chunk, arrives):
    ours, theirs = tcp_pair()
    vector = bytes(8 * chunk)
    data = b"".join(
        b"".join(batch)
        for batch in batches(pack_head(2, 1, 1, len(vector)), b"x", [memoryview(vector)], OPEN)
    )

    def send():
        for begin in range(0, len(data), chunk):
            time.sleep(0.06)
            try:
                theirs.sendall(data[begin : begin + chunk])
            except OSError:
                return

    sender = threading.Thread(target=send)
    carrier = PipeCarrier({"next": (ours.detach(), PipeTicket(None, b""))}, LONGEST)
    sender.start()
    try:
        if arrives:
            assert carrier.receive("up", 0.2) == (b"x", vector)
        else:
            with pytest.raises(PeerTimeoutError):
                carrier.receive("up", 0.2)
    finally:
        carrier.close()
        sender.join()
        theirs.close()


def test_a_neighbour_that_is_gone_is_named_whoever_is_waited_for(carriers):
    first, second, third = carriers(3)
    third.close()
    with pytest.raises(PeerUnreachableError):
        second.receive("up", 5.0)
    assert second.side == "next"
    second.side = None
    with pytest.raises(PeerUnreachableError, match="the pipe to the next rank broke"):
        second.waiting("down", 0.0)
    assert second.side == "next"
    with pytest.raises(PeerUnreachableError, match="the pipe to the next rank broke"):
        second.check()
    first.check()


def test_what_waits_is_received_once(carriers):
    first, second = carriers(2)
    assert not second.waiting("down", 0.0)
    first.send("down", b"x", [memoryview(b"y")])
    assert second.waiting("down", 5.0)
    assert second.waiting("down", 0.0)
    assert second.receive("down", 0.0) == (b"x", b"y")
    assert not second.waiting("down", 0.0)


def test_words_that_came_before_the_end_are_heard(carriers):
    first, second = carriers(2)
    first.send("down", b"last", [memoryview(bytes(300_000))])
    first.flush(5.0)
    first.close()
    assert second.receive("down", 5.0)[0] == b"last"
    with pytest.raises(PeerUnreachableError):
        second.receive("down", 5.0)
    assert second.side == "previous"


def test_the_daemon_is_heard_in_a_long_wait_and_may_end_it(carriers):
    heard = []
    first, _ = carriers(2, listen=lambda: heard.append(time.monotonic()), interrupted=lambda: len(heard) > 3)
    with pytest.raises(PeerUnreachableError, match="another order"):
        first.receive("up", 60.0)
    assert first.side is None
    assert len(heard) == 4
    assert max(later - before for before, later in itertools.pairwise(heard)) < 2.0


@pytest.mark.parametrize("interrupted", [True, False])
def test_the_daemon_is_heard_while_what_was_sent_waits_to_leave(interrupted):
    heard = []
    pipes = joined(2)
    carrier = PipeCarrier(
        pipes[0], LONGEST, listen=lambda: heard.append(1), interrupted=lambda: interrupted and len(heard) > 2
    )
    try:
        carrier.send("down", b"x", [memoryview(bytes(64 << 20))])  # nobody reads it
        if interrupted:
            with pytest.raises(PeerUnreachableError, match="another order"):
                carrier.flush(60.0)
            assert carrier.side is None
        else:
            carrier._moved_s = lambda: 0.0
            with pytest.raises(PeerTimeoutError):
                carrier.flush(0.2)
            assert carrier.side == "next"
            assert len(heard) >= 3
    finally:
        carrier.close()
        close_all(pipes[1:])


def test_the_daemon_is_heard_while_messages_come_all_the_time(carriers):
    now_s, heard = [0.0], []
    first, second = carriers(2, listen=lambda: heard.append(now_s[0]), clock=lambda: now_s[0])
    for _ in range(100):
        now_s[0] += 0.01
        first.send("down", b"x", [])
        second.receive("down", 5.0)
    assert 25 <= len(heard) <= 50


def test_a_vector_that_no_message_has_ends_the_pipe(carriers):
    first, second = carriers(2)
    first.send("down", b"x", [memoryview(bytes(LONGEST + 1))])
    with pytest.raises(WireError, match="announces a vector"):
        second.receive("down", 5.0)
    assert second.side == "previous"


def test_the_wrong_kind_of_message(carriers):
    first, second = carriers(2)
    first._ends["next"].send(2, b"x", deadline_s=1.0)
    with pytest.raises(WireError, match="kind 2"):
        second.receive("down", 5.0)
    assert second.side == "previous"


def test_closing_wakes_whoever_waits(carriers):
    first, _ = carriers(2)
    closer = threading.Timer(0.05, first.close)
    closer.start()
    with pytest.raises(PeerUnreachableError):
        first.receive("up", 60.0)
    closer.join()


def test_memory_is_used_again(carriers):
    sizes = []

    def allocate(nbytes):
        sizes.append(nbytes)
        return np.empty(nbytes, np.uint8)

    first, second = carriers(2, allocate=allocate)
    for turn in range(20):
        for nbytes in (50_000, 40_000, 200):
            first.send("down", b"x", [memoryview(bytes([turn]) * nbytes)])
            assert second.receive("down", 5.0)[1] == bytes([turn]) * nbytes
    assert len(sizes) <= 6  # of 60: one may be read while the one before is in use


def test_a_pool_keeps_so_much():
    pool = _BufferPool(lambda nbytes: np.empty(nbytes, np.uint8), 1 << 20)
    for view in [pool.take(0, b"", 100 + number) for number in range(40)]:
        pool.give(view)
    assert [one.nbytes for one in pool._free] == list(range(108, 140))


def test_a_socket_that_no_pipe_can_be_made_of_is_closed(monkeypatch):
    ours, theirs = joined(2)

    def fails(*_, **__):
        raise OSError("no")

    monkeypatch.setattr(pipe_carrier, "PipeEnd", fails)
    with pytest.raises(OSError, match="no") as caught:  # which holds the frames, and so all in them
        PipeCarrier(ours, LONGEST)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ours["next"][0])
    assert caught
    close_all([theirs])


def test_the_longest_go_while_a_pool_keeps_too_much():
    pool = _BufferPool(lambda nbytes: np.empty(nbytes, np.uint8), 1000)
    for view in [pool.take(0, b"", nbytes) for nbytes in (400, 300, 400, 5000, 100, 900)]:
        pool.give(view)
    assert [one.nbytes for one in pool._free] == [300, 400, 100]
    again = pool.take(0, b"", 400)
    assert [one.nbytes for one in pool._free] == [300, 100]
    pool.give(again)
    assert [one.nbytes for one in pool._free] == [300, 100, 400]


def test_seldom_messages_leave_the_memory_of_frequent_ones(carriers):
    """A slice of the model comes after each few activations, and is ten times as long as two of them."""
    sizes = []

    def allocate(nbytes):
        sizes.append(nbytes)
        return np.empty(nbytes, np.uint8)

    first, second = carriers(2, allocate=allocate, kept_nbytes=160_000)
    for turn in range(5):
        for nbytes in (40_000, 40_000, 40_000, 800_000):
            first.send("down", b"x", [memoryview(bytes([turn]) * nbytes)])
            assert second.receive("down", 5.0)[1] == bytes([turn]) * nbytes
    second.waiting("down", 0.0)
    assert sizes.count(800_000) == 5
    assert sizes.count(40_000) <= 3  # of 15
    kept = [one.nbytes for one in second._pools["previous"]._free]
    assert kept
    assert set(kept) == {40_000}


def test_descriptors_that_are_no_sockets_are_all_closed():
    ours, theirs = joined(2)
    fd, ticket = ours["next"]
    nothing = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(OSError):
        PipeCarrier({"next": (fd, ticket), "previous": (nothing, PipeTicket(None, b""))}, LONGEST)
    for one in (fd, nothing):
        with pytest.raises(OSError):
            os.fstat(one)
    os.close(theirs["previous"][0])
