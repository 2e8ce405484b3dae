"""The daemon's end of the board, while the learner publishes in the middle of what it does."""

from __future__ import annotations

import numpy as np
import pytest

from p2pdrl.errors import TensorError
from p2pdrl.tensors import board
from p2pdrl.tensors.board import BoardSpec, DaemonBoard, LearnerBoard
from p2pdrl.tensors.shared_memory import SharedRegion


def vec(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.fixture
def learner(region: SharedRegion, spec: BoardSpec) -> LearnerBoard:
    learner = LearnerBoard(region, spec)
    learner.publish(vec(1, 2, 3), None, 1)
    return learner


@pytest.fixture
def daemon(region: SharedRegion, spec: BoardSpec) -> DaemonBoard:
    return DaemonBoard(region, spec)


def twice(learner: LearnerBoard, version: int) -> None:
    """Publish so that a copy which is being read is written over."""
    for _ in range(2):
        learner.publish(vec(version, version, version), None, version)


def test_what_is_done_with_each_piece_may_change_it(
    learner: LearnerBoard, daemon: DaemonBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "WALK", 2)
    daemon.post_delta(vec(1, 1, 1), 4)
    out, spans = np.empty(3, np.float32), []

    def each(span: slice) -> None:
        spans.append((span.start, span.stop))
        out[span] *= 10

    assert daemon.now(out, each).policy_version == 4
    assert (out.tolist(), spans) == ([20, 30, 40], [(0, 2), (2, 3)])


def test_each_piece_is_done_again_when_the_learner_came_round(
    learner: LearnerBoard, daemon: DaemonBoard
) -> None:
    out, seen = np.empty(3, np.float32), []

    def each(span: slice) -> None:
        seen.append(out.tolist())
        if len(seen) == 1:
            twice(learner, 5)

    assert daemon.now(out, each).policy_version == 5
    assert (out.tolist(), seen) == ([5] * 3, [[1, 2, 3], [5] * 3])


def test_a_learner_that_publishes_faster_than_pieces_are_worked_on_keeps_nobody_waiting(
    learner: LearnerBoard, daemon: DaemonBoard
) -> None:
    out, calls = np.empty(3, np.float32), []

    def each(span: slice) -> None:
        calls.append(out.tolist())
        twice(learner, 10 + len(calls))

    snapshot = daemon.now(out, each)
    assert len(calls) < 10
    assert out.tolist() == calls[-1] == [snapshot.policy_version] * 3


def test_an_error_about_what_the_learner_wrote_over_meanwhile_is_nobodys(
    learner: LearnerBoard, daemon: DaemonBoard
) -> None:
    """A delta counts twice in a copy that the learner has added it to since: it may be out of bounds."""
    out, tries = np.empty(3, np.float32), []

    def each(span: slice) -> None:
        tries.append(out.tolist())
        if len(tries) == 1:
            twice(learner, 5)
            raise TensorError("out of bounds")

    def fails(span: slice) -> None:
        raise ZeroDivisionError

    daemon.now(out, each)
    assert out.tolist() == [5] * 3
    with pytest.raises(ZeroDivisionError):
        daemon.now(out, fails)


def test_what_is_posted_and_published_while_facts_are_read_is_not_missed(
    learner: LearnerBoard, daemon: DaemonBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.post_delta(vec(1, 0, 0), 2)
    assert not daemon.absorbed
    published, calls = daemon._memory.published, []  # noqa: SLF001 - a moment within a read

    def late(copy: int) -> object:
        calls.append(copy)
        if len(calls) == 1:
            daemon.post_delta(vec(0, 1, 0), 7)  # gathered, for the slot is in use ...
            learner.take()
            learner.publish(vec(2, 2, 3), None, 3)  # ... until now
        return published(daemon._memory.lock.writes % 2)  # noqa: SLF001 - a moment within a read

    monkeypatch.setattr(daemon._memory, "published", late)  # noqa: SLF001 - a moment within a read
    assert not daemon.absorbed, "at no time was all that was posted published"
    assert daemon.policy_version == 7
