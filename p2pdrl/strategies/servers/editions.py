"""A shard's parameters as they go out: each version in a buffer of its own until nobody sends it any more.

The server goes on with the next version while slow connections still send an older one, so what is being
sent is never written to. Buffers are used again.

Shapes: every vector is flat, of the shard's length; names carry no suffix.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from p2pdrl.tensors.layout import Float32Array

__all__ = ["Edition", "Editions"]


class Edition:
    """One version of the parameters, kept while somebody holds it.

    Attributes:
        version: of the parameters.
        vector: the parameters: unchanged while it is held.
        delta: encoded difference to the version before, where there is one.
    """

    def __init__(self, size: int, delta_nbytes: int, free: Callable[[Edition], None]) -> None:
        self.version = -1
        self.vector: Float32Array = np.empty(size, np.float32)
        self.room = memoryview(bytearray(delta_nbytes))
        self.delta: memoryview | None = None
        self._free = free
        self._held = 0

    def hold(self) -> Edition:
        """Keep it until as many `release`s have come."""
        self._held += 1
        return self

    def release(self) -> None:
        """Hold it no more."""
        self._held -= 1
        if not self._held:
            self._free(self)


class Editions:
    """The newest edition, and those before it that are still being sent.

    Args:
        size: entries of the shard.
        delta_nbytes: longest encoded difference; 0 when differences aren't sent.
    """

    def __init__(self, size: int, delta_nbytes: int = 0) -> None:
        self._size = size
        self._delta_nbytes = delta_nbytes
        self._idle: list[Edition] = []
        self._newest: Edition | None = None

    @property
    def newest(self) -> Edition | None:
        """What goes out now; None before the first."""
        return self._newest

    def blank(self) -> Edition:
        """Return a buffer to write the next edition into."""
        edition = self._idle.pop() if self._idle else Edition(self._size, self._delta_nbytes, self._free)
        edition.delta = None
        return edition

    def put(self, edition: Edition, version: int) -> None:
        """Make what was written the newest."""
        edition.version = version
        before, self._newest = self._newest, edition.hold()
        if before is not None:
            before.release()

    def _free(self, edition: Edition) -> None:
        if len(self._idle) < 2:
            self._idle.append(edition)
