"""A few buffers of one length, made when they are first needed and lent one by one."""

from __future__ import annotations

__all__ = ["BufferPool"]


class BufferPool:
    """Lends buffers.

    Args:
        nbytes: length of each.
        most: how many there are at most.
    """

    def __init__(self, nbytes: int, most: int) -> None:
        self.nbytes = nbytes
        self._free: list[memoryview] = []
        self._unmade = most

    @property
    def any_free(self) -> bool:
        """Whether one can be had."""
        return bool(self._free) or self._unmade > 0

    def take(self) -> memoryview | None:
        """Borrow one; None when all are lent."""
        if self._free:
            return self._free.pop()
        if self._unmade <= 0:
            return None
        self._unmade -= 1
        return memoryview(bytearray(self.nbytes))

    def give(self, buffer: memoryview) -> None:
        """Give one back."""
        self._free.append(buffer)
