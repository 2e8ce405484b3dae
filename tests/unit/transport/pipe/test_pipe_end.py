"""One end of a pipe: messages both ways, bounds, deadlines."""

from __future__ import annotations

import random
import socket
import time

import numpy as np
import pytest

from p2pdrl.errors import PeerTimeoutError, WireError
from p2pdrl.transport.cipher import TAG_BYTES
from p2pdrl.transport.limits import PIECE_BYTES, PipeBounds
from p2pdrl.transport.pipe.end import PipeEnd
from p2pdrl.transport.pipe.frames import HEAD_BYTES

from ..pipe_filling import SMALL, fill, threads
from ..pipes import KEYS, LONG_S, Writer, anywhere, end_and_socket, tcp_pair, two_ends, until

EACH_WAY = pytest.mark.parametrize(
    ("keys", "hides"),
    [(None, False), (KEYS, False), (KEYS, True)],
    ids=["in the open", "proven", "hidden"],
)


@EACH_WAY
@pytest.mark.parametrize("nbytes", [0, 1, 16 << 10, 600_000, PIECE_BYTES, 3 * PIECE_BYTES + 17])
def test_messages_go_both_ways(keys: tuple[bytes, bytes] | None, hides: bool, nbytes: int) -> None:
    vector = np.random.default_rng(nbytes).bytes(nbytes)
    with two_ends(keys, hides=hides) as (one, other):
        for number in range(1, 4):
            for end, peer in ((one, other), (other, one)):
                assert end.send(number, b"meta", memoryview(vector), deadline_s=LONG_S) == number
                message = peer.receive(deadline_s=LONG_S)
                assert (message.kind, message.meta) == (number, b"meta")
                assert bytes(message.vector or b"") == vector
        one.flush(deadline_s=LONG_S)
        tags = 1 + -(-nbytes // PIECE_BYTES) if keys is not None else 0
        expected = 3 * (HEAD_BYTES + 4 + nbytes + tags * TAG_BYTES)
        assert one.bytes_out == other.bytes_in == expected
        assert one.open
        assert other.open


def test_vectors_in_parts_and_of_floats() -> None:
    parts = [np.arange(count, dtype=np.float32) for count in (3, 0, 300_000, 5)]
    out = np.zeros(sum(part.size for part in parts), np.float32)
    with (
        end_and_socket(None, into=lambda *_: memoryview(out)) as (end, sock),
        PipeEnd(sock.dup(), None, into=anywhere) as peer,
    ):
        peer.send(1, vector=[memoryview(part) for part in parts], deadline_s=LONG_S)
        end.receive(deadline_s=LONG_S)
        assert np.array_equal(out, np.concatenate(parts))


@EACH_WAY
@pytest.mark.parametrize("nbytes", [5, 500])
def test_vectors_in_more_parts_than_a_system_call_takes(
    keys: tuple[bytes, bytes] | None, hides: bool, nbytes: int
) -> None:
    parts = [bytes([index % 251]) * nbytes for index in range(5000)]
    with two_ends(keys, hides=hides) as (one, other):
        one.send(1, vector=[memoryview(part) for part in parts], deadline_s=LONG_S)
        assert other.receive(deadline_s=LONG_S).vector == b"".join(parts)


@pytest.mark.parametrize(("ours", "theirs"), [(True, False), (False, True)])
def test_both_ends_have_to_do_the_same(ours: bool, theirs: bool) -> None:
    one, other = tcp_pair()
    with (
        PipeEnd(one, KEYS, hides=ours, into=anywhere) as first,
        PipeEnd(other, KEYS[::-1], hides=theirs, into=anywhere) as second,
    ):
        first.send(1, b"meta", memoryview(b"vector"), deadline_s=LONG_S)
        with pytest.raises(WireError, match="isn't authentic"):
            second.receive(deadline_s=LONG_S)


def test_vectors_are_hidden_or_not() -> None:
    for hides in (True, False):
        one, other = tcp_pair()
        with other, PipeEnd(one, KEYS, hides=hides, into=anywhere) as end:
            end.send(1, b"a word to be found", memoryview(b"a vector to be found"), deadline_s=LONG_S)
            end.flush(deadline_s=LONG_S)
            got = other.recv(end.bytes_out, socket.MSG_WAITALL)
            assert (b"word to be" in got, b"vector to be" in got) == (not hides, not hides)


def test_bytes_that_were_read_already_come_first() -> None:
    one, other = tcp_pair()
    writer = Writer()
    raw = writer.message(1, b"first", b"vector") + writer.message(2, b"second")
    with other, PipeEnd(one, KEYS, raw[:-10], into=anywhere) as end:
        assert end.receive(deadline_s=LONG_S).meta == b"first"
        other.sendall(raw[-10:])
        assert end.receive(deadline_s=LONG_S).meta == b"second"


def test_messages_are_read_before_anybody_asks() -> None:
    with two_ends() as (one, other):
        vector = memoryview(bytes(5 * PIECE_BYTES))
        for kind in range(5):
            one.send(kind, vector=vector, deadline_s=LONG_S)
        one.flush(deadline_s=LONG_S)
        until(lambda: other.bytes_in == one.bytes_out)
        assert [other.receive(deadline_s=LONG_S).kind for _ in range(5)] == list(range(5))


def test_no_more_is_read_ahead_than_the_bound() -> None:
    with two_ends(bounds=SMALL) as (one, other):

        def send() -> None:
            for kind in range(40):
                one.send(kind, vector=memoryview(bytes(PIECE_BYTES)), deadline_s=LONG_S)

        with threads(1) as pool:
            sending = pool.submit(send)
            until(lambda: other.bytes_in >= 2 * PIECE_BYTES)
            time.sleep(0.05)
            assert other.bytes_in < 4 * PIECE_BYTES
            assert not sending.done()
            assert [other.receive(deadline_s=LONG_S).kind for _ in range(40)] == list(range(40))
            sending.result()


def test_empty_messages_are_bounded_too() -> None:
    bounds = PipeBounds(prefetched_bytes=10_000)
    with end_and_socket(bounds=bounds) as (end, peer):
        writer = Writer()
        peer.sendall(b"".join(writer.message() for _ in range(2000)))
        until(lambda: end.bytes_in > 0)
        time.sleep(0.02)
        assert end._receiver._ahead.qsize() <= 11  # noqa: SLF001 - memory shows nowhere else
        for _ in range(2000):
            end.receive(deadline_s=LONG_S)


def test_sending_waits_for_nobody_until_too_much_is_queued() -> None:
    with end_and_socket(bounds=SMALL) as (end, peer):
        vector = memoryview(bytes(PIECE_BYTES))
        count = fill(end)
        assert count >= 2
        with pytest.raises(PeerTimeoutError, match="waiting bytes"):
            end.send(1, vector=vector, deadline_s=0.01)
        with pytest.raises(PeerTimeoutError):
            end.flush(deadline_s=0.01)
        assert end.open
        with threads(1) as pool:
            waiting = pool.submit(end.send, 1, b"", vector, deadline_s=LONG_S)
            got = 0
            while not waiting.done() or got < end.bytes_out:
                got += len(peer.recv(1 << 20))
            assert waiting.result() == count + 1, "what timed out wasn't queued"
            drain(peer)
            end.flush(deadline_s=LONG_S)


def drain(peer: socket.socket) -> None:
    peer.settimeout(0.05)
    try:
        while peer.recv(1 << 20):
            pass
    except TimeoutError:
        pass


def test_a_message_beyond_the_bounds_passes_alone() -> None:
    bounds = PipeBounds(queued_bytes=1000, prefetched_bytes=1000)
    with two_ends(bounds=bounds) as (one, other):
        for _ in range(3):
            one.send(1, vector=memoryview(bytes(3 * PIECE_BYTES)), deadline_s=LONG_S)
            assert other.receive(deadline_s=LONG_S).vector == bytes(3 * PIECE_BYTES)


def test_flush_tells_when_a_vector_may_be_changed() -> None:
    with end_and_socket(None) as (end, peer):
        vector = bytearray(16 * PIECE_BYTES)
        number = end.send(1, vector=memoryview(vector), deadline_s=LONG_S)
        with pytest.raises(PeerTimeoutError):
            end.flush(number, deadline_s=0.01)
        with threads(1) as pool:
            flushing = pool.submit(end.flush, number, deadline_s=LONG_S)
            got = 0
            while got < HEAD_BYTES + len(vector):
                got += len(peer.recv(1 << 20))
            flushing.result()
        end.send(2, deadline_s=LONG_S)
        end.flush(number, deadline_s=0)


def test_deadlines_and_what_comes_later() -> None:
    with end_and_socket() as (end, peer):
        for deadline_s in (0, 0.01, -1):
            with pytest.raises(PeerTimeoutError, match="no whole message"):
                end.receive(deadline_s=deadline_s)
        vector = np.random.default_rng(3).bytes(2 * PIECE_BYTES)
        raw = Writer().message(1, b"meta", vector)
        for start in range(0, len(raw), 300_000):
            peer.sendall(raw[start : start + 300_000])
            if start + 300_000 < len(raw):
                with pytest.raises(PeerTimeoutError):
                    end.receive(deadline_s=random.Random(start).choice((0, 0.002, 0.01)))
        assert end.receive(deadline_s=LONG_S).vector == vector, "a deadline costs nothing but time"


def test_several_callers_share_what_comes() -> None:
    with two_ends() as (one, other), threads(4) as pool:
        waiting = [pool.submit(other.receive, deadline_s=LONG_S) for _ in range(4)]
        for kind in range(4):
            one.send(kind, deadline_s=LONG_S)
        assert sorted(task.result().kind for task in waiting) == list(range(4))
        waiting = [pool.submit(other.receive, deadline_s=0.01) for _ in range(4)]
        for task in waiting:
            with pytest.raises(PeerTimeoutError):
                task.result()
