"""Two ends of a pipe, and what goes over it, as tests need them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from p2pdrl.transport.cipher import Cipher
from p2pdrl.transport.framing import batches
from p2pdrl.transport.limits import PipeBounds
from p2pdrl.transport.pipe.end import PipeEnd
from p2pdrl.transport.pipe.frames import pack_head
from p2pdrl.transport.pipe.ticket import Pipe

OURS, THEIRS = bytes(range(32)), bytes(range(100, 132))
KEYS = (OURS, THEIRS)
LONG_S = 20.0
"""A deadline that nothing meets unless it is broken."""


def anywhere(_kind: int, _meta: bytes, nbytes: int) -> memoryview:
    """Give a new buffer."""
    return memoryview(bytearray(nbytes))


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        return one, listening.accept()[0]


@contextmanager
def two_ends(
    keys: tuple[bytes, bytes] | None = KEYS, bounds: PipeBounds | None = None, *, hides: bool = True
) -> Iterator[tuple[PipeEnd, PipeEnd]]:
    one, other = tcp_pair()
    theirs = keys[::-1] if keys is not None else None
    with (
        PipeEnd(one, keys, hides=hides, into=anywhere, bounds=bounds) as first,
        PipeEnd(other, theirs, hides=hides, into=anywhere, bounds=bounds) as second,
    ):
        yield first, second


@contextmanager
def end_and_socket(
    keys: tuple[bytes, bytes] | None = KEYS,
    bounds: PipeBounds | None = None,
    into: Callable[[int, bytes, int], memoryview | None] = anywhere,
) -> Iterator[tuple[PipeEnd, socket.socket]]:
    """One end, and the bare connection of its peer, which has the other keys."""
    one, other = tcp_pair()
    with other, PipeEnd(one, keys, into=into, bounds=bounds) as end:
        yield end, other


def end_of(pipe: Pipe) -> PipeEnd:
    """Use a pipe in this process."""
    sock, ticket = socket.socket(fileno=os.dup(pipe.fd)), pipe.ticket
    end = PipeEnd(sock, ticket.keys, ticket.leftover, hides=ticket.hides, into=anywhere)
    pipe.detach()
    return end


class Writer:
    """Writes messages as bytes.

    Args:
        key: of the way they go; None for nothing sealed.
        hides: encrypt.
    """

    def __init__(self, key: bytes | None = THEIRS, *, hides: bool = True) -> None:
        self.cipher = Cipher(key, hides=hides)
        self.number = 0

    def message(
        self, kind: int = 1, meta: bytes = b"", vector: bytes = b"", head: bytes | None = None
    ) -> bytes:
        self.number += 1
        if head is None:
            head = pack_head(kind, self.number, len(meta), len(vector))
        lists = batches(head, meta, [memoryview(vector)] if vector else [], self.cipher)
        return b"".join(bytes(buffer) for batch in lists for buffer in batch)


def until(true: Callable[[], bool]) -> None:
    """Wait for another thread, which tells nobody."""
    for _ in range(4000):
        if true():
            return
        time.sleep(0.005)
    raise AssertionError("it never came true")
