from __future__ import annotations

import numpy as np
import pytest

from p2pdrl.tensors.shared_memory import SeqLock


@pytest.fixture
def words() -> np.ndarray:
    return np.zeros(2, np.uint64)


def test_nothing_is_read_before_the_first_write(words: np.ndarray) -> None:
    assert SeqLock(words).read(lambda copy: copy) is None


def test_writes_alternate_between_the_copies(words: np.ndarray) -> None:
    lock, seen = SeqLock(words), []
    for _ in range(4):
        with lock.write() as copy:
            seen.append(copy)
        assert lock.read(lambda copy: copy) == copy
    assert seen == [1, 0, 1, 0]
    assert lock.writes == 4


def test_a_write_that_dies_leaves_the_one_before_and_the_next_writer_starts_over(words: np.ndarray) -> None:
    lock, copies = SeqLock(words), [0, 0]
    with lock.write() as copy:
        copies[copy] = 1

    def die() -> None:
        with lock.write() as copy:
            copies[copy] = 99
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        die()
    successor = SeqLock(words)
    assert successor.read(lambda copy: copies[copy]) == 1
    with successor.write() as copy:
        copies[copy] = 2
    assert successor.read(lambda copy: copies[copy]) == 2


def test_a_reader_tries_again_when_the_writer_came_round_to_its_copy(words: np.ndarray) -> None:
    lock, copies, attempts = SeqLock(words), [0, 0], []

    def write(value: int) -> None:
        with lock.write() as copy:
            copies[copy] = value

    def slow(copy: int) -> int:
        attempts.append(copy)
        result = copies[copy]
        if len(attempts) == 1:
            write(2)
            write(3)
        return result

    write(1)
    assert lock.read(slow) == 3
    assert len(attempts) == 2


def test_one_write_meanwhile_does_not_disturb_a_reader(words: np.ndarray) -> None:
    lock, copies = SeqLock(words), [0, 0]
    with lock.write() as copy:
        copies[copy] = 1

    def slow(copy: int) -> int:
        with lock.write() as other:
            copies[other] = 2
        return copies[copy]

    assert lock.read(slow, attempts=1) == 1


def test_a_reader_gives_up_after_its_attempts(words: np.ndarray) -> None:
    lock = SeqLock(words)

    def overtaken(_: int) -> int:
        for _ in range(2):
            with lock.write():
                pass
        return 1

    with lock.write():
        pass
    assert lock.read(overtaken, attempts=3) is None
    assert lock.writes == 7


def test_an_error_counts_only_in_an_attempt_that_went_undisturbed(words: np.ndarray) -> None:
    lock, copies, attempts = SeqLock(words), [0, 0], []

    def write(value: int) -> None:
        with lock.write() as copy:
            copies[copy] = value

    def torn(copy: int) -> int:
        attempts.append(copy)
        if len(attempts) == 1:
            write(2)
            write(3)
            raise ValueError("half of one, half of the other")
        return copies[copy]

    write(1)
    assert lock.read(torn) == 3
    with pytest.raises(ZeroDivisionError):
        lock.read(lambda copy: 1 // 0)
