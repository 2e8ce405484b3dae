"""One end of a pipe when the other reads nothing, breaks the protocol or goes away."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, WireError
from p2pdrl.transport.limits import PIECE_BYTES, PipeBounds
from p2pdrl.transport.pipe.end import PipeEnd
from p2pdrl.transport.pipe.frames import HEAD_BYTES

from .pipe_filling import SMALL, fill, threads
from .pipes import KEYS, LONG_S, Writer, anywhere, end_and_socket, tcp_pair, two_ends, until


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("keys", "hides"), [(None, False), (KEYS, False), (KEYS, True)], ids=["in the open", "proven", "hidden"]
)
def test_whoever_reads_nothing_is_lost(seed: int, keys: tuple[bytes, bytes] | None, hides: bool) -> None:
    """Callers that come and go, so that the turn to read passes between them and the thread at any time."""
    count, sizes = 300, (0, 10, 5000, 70_000, 700_000)

    def talk(end: PipeEnd, rng: random.Random) -> None:
        for kind in range(count):
            vector = memoryview(bytes([kind % 251]) * rng.choice(sizes))
            end.send(kind, str(len(vector)).encode(), vector, deadline_s=LONG_S)
            if rng.random() < 0.3:
                time.sleep(rng.choice((0.0, 0.0005, 0.001, 0.0015)))

    def listen(end: PipeEnd, rng: random.Random) -> int:
        kind, late = 0, 0
        while kind < count:
            try:
                message = end.receive(deadline_s=rng.choice((0.0, 0.0003, 0.001, 0.002, LONG_S)))
            except PeerTimeoutError:
                late += 1
            else:
                assert message.kind == kind
                assert len(message.vector or b"") == int(message.meta)
                assert message.vector is None or message.vector[0] == message.vector[-1] == kind % 251
                kind += 1
            if rng.random() < 0.3:
                time.sleep(rng.choice((0.0, 0.0005, 0.001, 0.0015)))
        return late

    with two_ends(keys, SMALL, hides=hides) as (one, other), threads(4) as pool:
        tasks = [
            pool.submit(work, end, random.Random(10 * seed + index))
            for index, (work, end) in enumerate([(talk, one), (talk, other), (listen, one), (listen, other)])
        ]
        for task in tasks:
            task.result()


Breaking = Callable[[PipeEnd, socket.socket], None]

BREAKS: dict[str, tuple[Breaking, str]] = {
    "closed by the peer": (lambda _end, peer: peer.close(), "closed the pipe|broke"),
    "shut by the peer": (lambda _end, peer: peer.shutdown(socket.SHUT_WR), "closed the pipe"),
    "reset by the peer": (lambda _end, peer: reset(peer), "broke"),
    "closed by us": (lambda end, _peer: end.close(), "our end"),
}


def reset(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    peer.close()


@pytest.mark.parametrize("name", BREAKS)
def test_an_end_wakes_everybody_who_waits(name: str) -> None:
    breaking, word = BREAKS[name]
    with end_and_socket(bounds=SMALL) as (end, peer), threads(4) as pool:
        vector = memoryview(bytes(PIECE_BYTES))
        fill(end)
        waiting = [
            pool.submit(end.receive, deadline_s=LONG_S),
            pool.submit(end.receive, deadline_s=LONG_S),
            pool.submit(end.send, 1, b"", vector, deadline_s=LONG_S),
            pool.submit(end.flush, deadline_s=LONG_S),
        ]
        time.sleep(0.02)
        started_s = time.monotonic()
        breaking(end, peer)
        for task in waiting:
            with pytest.raises(PeerUnreachableError, match=word):
                task.result()
        assert time.monotonic() - started_s < LONG_S / 4
        assert not end.open
        calls: list[Callable[[], object]] = [
            lambda: end.receive(deadline_s=LONG_S),
            lambda: end.send(1, deadline_s=LONG_S),
            lambda: end.flush(deadline_s=LONG_S),
        ]
        for call in calls:
            with pytest.raises(PeerUnreachableError, match=word):
                call()


def test_whole_messages_outlive_their_sender() -> None:
    with end_and_socket() as (end, peer):
        writer = Writer()
        peer.sendall(b"".join(writer.message(kind, vector=bytes(50_000)) for kind in range(3)))
        peer.sendall(writer.message(3, vector=bytes(50_000))[:-1])
        peer.close()
        assert [end.receive(deadline_s=LONG_S).kind for _ in range(3)] == [0, 1, 2]
        with pytest.raises(PeerUnreachableError):
            end.receive(deadline_s=LONG_S)


@pytest.mark.parametrize("waiting", [True, False], ids=["while somebody waits", "while nobody does"])
def test_what_breaks_the_protocol_ends_the_pipe(waiting: bool) -> None:
    with end_and_socket() as (other, peer), threads(1) as pool:
        task = pool.submit(other.receive, deadline_s=LONG_S) if waiting else None
        peer.sendall(bytes(HEAD_BYTES))
        if task is None:
            until(lambda: not other.open)
            task = pool.submit(other.receive, deadline_s=LONG_S)
        with pytest.raises(WireError, match="head of a message"):
            task.result()
        with pytest.raises(WireError, match="head of a message"):
            other.send(1, deadline_s=LONG_S)
        peer.settimeout(LONG_S)
        with contextlib.suppress(ConnectionResetError):
            assert peer.recv(1) == b""


def test_an_unwanted_vector_ends_the_pipe() -> None:
    with end_and_socket(into=lambda *_: None) as (end, peer):
        peer.sendall(Writer().message(vector=b"vector"))
        with pytest.raises(WireError, match="isn't wanted"):
            end.receive(deadline_s=LONG_S)
        assert peer.recv(1) == b""


def test_a_bug_of_ours_is_told_as_one() -> None:
    def into(*_: object) -> memoryview:
        raise KeyError("buffers")

    with end_and_socket(into=into) as (end, peer):
        peer.sendall(Writer().message(vector=b"vector"))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="our end") as info:
                end.receive(deadline_s=LONG_S)
            assert isinstance(info.value.__cause__, KeyError)
        with pytest.raises(RuntimeError):
            end.send(1, deadline_s=LONG_S)


def test_what_cannot_be_sent_costs_no_number() -> None:
    with two_ends() as (one, other):
        for kind, meta in ((-1, b""), (65536, b""), (1, bytes(65537))):
            with pytest.raises(ValueError, match="message"):
                one.send(kind, meta, deadline_s=LONG_S)
        with pytest.raises(ValueError, match="contiguous"):
            one.send(1, vector=memoryview(np.zeros((4, 4), np.float32)[:, ::2]), deadline_s=LONG_S)
        assert one.send(1, deadline_s=LONG_S) == 1
        assert other.receive(deadline_s=LONG_S).kind == 1


def test_closing_ends_both_threads_and_can_be_repeated() -> None:
    before = set(threading.enumerate())
    one, other = tcp_pair()
    end = PipeEnd(one, None, into=anywhere)
    ours = set(threading.enumerate()) - before
    assert {thread.name for thread in ours} == {"pipe-sender", "pipe-receiver"}
    with other:
        end.send(1, vector=memoryview(bytes(64 * PIECE_BYTES)), deadline_s=LONG_S)
        end.close()
        assert not any(thread.is_alive() for thread in ours)
        end.close()
        assert one.fileno() == -1


def test_closing_while_a_buffer_is_asked_for() -> None:
    """`into` may close the pipe, in the thread as well as in the caller's."""
    for waiting in (True, False):
        ends: list[PipeEnd] = []

        def into(*_: object, ends: list[PipeEnd] = ends) -> None:
            ends[0].close()

        with end_and_socket(into=into) as (end, peer):
            ends.append(end)
            with threads(1) as pool:
                task = pool.submit(end.receive, deadline_s=LONG_S) if waiting else None
                peer.sendall(Writer().message(vector=b"vector"))
                if task is None:
                    until(lambda: not end.open)
                    task = pool.submit(end.receive, deadline_s=LONG_S)
                with pytest.raises(PeerUnreachableError, match="our end"):
                    task.result()


def test_the_kernel_notices_silent_hosts() -> None:
    ours, peer = tcp_pair()
    with ours.dup() as sock, peer, PipeEnd(ours, None, into=anywhere, bounds=PipeBounds(silence_s=8.0)):
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        values = [sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
        assert values == [2, 2, 3, 8000]
