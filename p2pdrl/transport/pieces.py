"""Cuts vectors into pieces of 1 MiB, the last of which may be shorter, each followed by its MAC.

Calls, streams and pipes send vectors this way; `filling` puts what arrives together again. Without a
swarm key there are no MACs. Imports little: learner processes use it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from p2pdrl.transport.auth import MAC_BYTES, SerialMac
from p2pdrl.transport.limits import PIECE_BYTES

__all__ = [
    "Buffer",
    "Views",
    "batches",
    "body_nbytes",
    "cut",
    "join_views",
    "pieces_of",
    "unsent",
    "views_of",
]

_MAX_BUFFERS = 64

Buffer = bytes | bytearray | memoryview
Views = Sequence[memoryview] | memoryview | None


def views_of(vector: Views) -> list[memoryview]:
    """Return the vector as byte views, empty ones left out.

    Raises:
        ValueError: a view isn't contiguous.
    """
    if isinstance(vector, memoryview) and vector.ndim == 1 and vector.format == "B" and vector.contiguous:
        return [vector] if vector.nbytes else []
    views = [vector] if isinstance(vector, memoryview) else list(vector or ())
    if not all(view.c_contiguous for view in views):
        raise ValueError("a vector has to be contiguous")
    return [view.cast("B") for view in views if view.nbytes]


def join_views(vector: Views) -> bytes:
    """Return a copy of the whole vector."""
    return b"".join(views_of(vector))


def cut(views: Sequence[memoryview], piece_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
    """Yield the concatenation of ``views`` in pieces.

    A piece inside one view is a view of it; only one that spans two is copied.
    """
    spill = bytearray()
    for view in views:
        start = 0
        if spill:
            start = min(piece_bytes - len(spill), len(view))
            spill += view[:start]
            if len(spill) < piece_bytes:
                continue
            yield memoryview(spill)
            spill = bytearray()
        while len(view) - start >= piece_bytes:
            yield view[start : start + piece_bytes]
            start += piece_bytes
        spill += view[start:]
    if spill:
        yield memoryview(spill)


def body_nbytes(meta_nbytes: int, vector_nbytes: int, with_macs: bool) -> int:
    """Return the length of a whole body."""
    macs = 1 + pieces_of(vector_nbytes) if with_macs else 0
    return meta_nbytes + vector_nbytes + macs * MAC_BYTES


def pieces_of(vector_nbytes: int) -> int:
    """Return how many pieces a vector has."""
    return -(-vector_nbytes // PIECE_BYTES)


def batches(first: bytes, views: Sequence[memoryview], mac: SerialMac | None) -> Iterator[list[Buffer]]:
    """Yield a frame as lists of buffers, each list to be sent by one system call.

    A list is about one piece long, so that no call holds the event loop for long; what comes first
    travels with the first piece, so that a short frame is one list. Nothing is copied but pieces that
    need a MAC and span two views. MACs are made when their turn comes.

    Args:
        first: head, route and metadata, without their MAC.
        views: the vector.
        mac: makes MACs; None without a swarm key.
    """
    batch: list[Buffer] = [first]
    if mac is not None:
        batch.append(mac.of(first))
        for piece in cut(views):
            batch += (piece, mac.of(piece))
            yield batch
            batch = []
    else:
        nbytes = 0
        for view in views:
            for start in range(0, len(view), PIECE_BYTES):
                part = view[start : start + PIECE_BYTES]
                batch.append(part)
                nbytes += len(part)
                if nbytes >= PIECE_BYTES or len(batch) == _MAX_BUFFERS:
                    yield batch
                    batch, nbytes = [], 0
    if batch:
        yield batch


def unsent(batch: Sequence[Buffer], sent_nbytes: int) -> list[Buffer]:
    """Return what is left of a list of buffers when the first ``sent_nbytes`` were sent."""
    for index, buffer in enumerate(batch):
        if sent_nbytes < len(buffer):
            return [memoryview(buffer)[sent_nbytes:], *batch[index + 1 :]]
        sent_nbytes -= len(buffer)
    return []
