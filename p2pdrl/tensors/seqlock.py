"""One writer, many readers, two copies: a sequence lock whose writer may be killed at any instruction.

The writer fills the copy that nobody is sent to and then turns the readers over by one 8-byte store, so a
writer that dies half-way leaves the copy before it whole and readable. Readers never block the writer; a
reader starts again only when the writer has come round to the copy it was reading.
This is the "latch" form of Linux's sequence counters (Documentation/locking/seqlock.rst, `seqcount_latch_t`).

Used by `board_memory` for what the learner publishes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from p2pdrl.tensors.shm import fence

__all__ = ["SeqLock"]

T = TypeVar("T")

_BEGUN, _DONE = 0, 1


class SeqLock:
    """Counts the writes begun and done; write ``n`` goes to copy ``n % 2``.

    Args:
        words: two aligned uint64 in shared memory, zero at first; aligned 8-byte stores are atomic.

    Example:
        >>> import numpy as np
        >>> lock, copies = SeqLock(np.zeros(2, np.uint64)), np.zeros((2, 3))
        >>> with lock.write() as copy:
        ...     copies[copy] = 7
        >>> lock.read(lambda copy: copies[copy].sum())
        np.float64(21.0)
    """

    def __init__(self, words: npt.NDArray[np.uint64]) -> None:
        self._words = words

    @property
    def writes(self) -> int:
        """How many writes are done; 0 means that there is nothing to read."""
        return int(self._words[_DONE])

    @contextmanager
    def write(self) -> Iterator[int]:
        """Give the copy (0 or 1) to fill; readers see it once the block ends without an exception."""
        number = self.writes + 1
        self._words[_BEGUN] = number
        fence()
        yield number % 2
        fence()
        self._words[_DONE] = number

    def read(self, take: Callable[[int], T], attempts: int = 1000) -> T | None:
        """Call ``take(copy)`` until the copy stood still meanwhile; return what it gave, or raise its error.

        ``take`` may see a copy in mid-write, in an attempt whose result or error is then thrown away.

        Returns:
            None when nothing has been written, or when no attempt went undisturbed.
        """
        for _ in range(attempts):
            number = self.writes
            if number == 0:
                return None
            fence()
            try:
                result = take(number % 2)
            except Exception:
                if self._still(number):
                    raise
                continue
            if self._still(number):
                return result
        return None

    def _still(self, number: int) -> bool:
        """Whether the copy of write ``number`` has stood still since."""
        fence()
        return int(self._words[_BEGUN]) <= number + 1
