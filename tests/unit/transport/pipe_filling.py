"""Pipes that are filled and drained."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from p2pdrl.errors import PeerTimeoutError
from p2pdrl.transport.limits import PIECE_BYTES, PipeBounds
from p2pdrl.transport.pipe.end import PipeEnd

SMALL = PipeBounds(queued_bytes=5 << 19, prefetched_bytes=2 << 20, vector_bytes=8 << 20)


@contextmanager
def threads(count: int) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(count, thread_name_prefix="caller") as pool:
        yield pool


def fill(end: PipeEnd) -> int:
    """Send until there's no more room; return how many messages that were."""
    count = 0
    try:
        while True:
            count = end.send(1, vector=memoryview(bytes(PIECE_BYTES)), deadline_s=0.02)
    except PeerTimeoutError:
        return count
