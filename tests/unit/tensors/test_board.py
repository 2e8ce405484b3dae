"""The board's two ends in one process: contents, versions, crashes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from p2pdrl.errors import LayoutMismatchError, TensorError, WireError
from p2pdrl.tensors.board import BoardSpec, DaemonBoard, InboxSlot, LearnerBoard
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout


def vec(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def side(value: float, step: int) -> dict[str, np.ndarray]:
    return {"m": np.full(3, value, np.float32), "step": np.array(step)}


def read(daemon: DaemonBoard) -> list[float]:
    out = np.empty(3, np.float32)
    daemon.now(out)
    return [float(x) for x in out]


@pytest.fixture
def learner(region: SharedRegion, spec: BoardSpec) -> LearnerBoard:
    return LearnerBoard(region, spec)


@pytest.fixture
def daemon(region: SharedRegion, spec: BoardSpec) -> DaemonBoard:
    return DaemonBoard(region, spec)


def test_nothing_can_be_read_before_the_first_publication(learner: LearnerBoard, daemon: DaemonBoard) -> None:
    out = np.empty(3, np.float32)
    assert not daemon.published_once
    for method in (daemon.now, daemon.published):
        with pytest.raises(TensorError, match="hasn't published"):
            method(out)
    assert daemon.sidecar() is None
    assert daemon.policy_version == 0
    assert (learner.take(), learner.restore()) == (None, None)


def test_now_contains_a_delta_before_while_and_after_the_learner_takes_it(
    learner: LearnerBoard, daemon: DaemonBoard
) -> None:
    x = vec(1, 2, 3)
    learner.publish(x, None, 5)
    daemon.post_delta(vec(10, 0, 0), 7)
    assert read(daemon) == [11, 2, 3]
    taken = learner.take()
    assert taken is not None
    assert (taken.kind, taken.policy_version, taken.sidecar) == ("delta", 7, None)
    x += taken.vector
    assert learner.take() is None
    assert read(daemon) == [11, 2, 3]
    learner.publish(x, None, 8)
    assert read(daemon) == [11, 2, 3]
    assert daemon.absorbed


def test_a_publication_without_a_take_contains_nothing(learner: LearnerBoard, daemon: DaemonBoard) -> None:
    learner.publish(vec(0, 0, 0), None, 1)
    daemon.post_delta(vec(1, 1, 1), 1)
    learner.publish(vec(5, 5, 5), None, 2)
    assert read(daemon) == [6, 6, 6]
    assert not daemon.absorbed


def test_more_deltas_gather_until_the_slot_is_free(learner: LearnerBoard, daemon: DaemonBoard) -> None:
    x = vec(0, 0, 0)
    learner.publish(x, None, 1)
    for n in range(3):
        daemon.post_delta(vec(1, n, 0), 1)
    assert (daemon.pending, daemon.flush()) == (True, False)
    first = learner.take()
    assert first is not None
    assert first.vector.tolist() == [1, 0, 0]
    x += first.vector
    assert not daemon.flush(), "the learner may still read the slot"
    learner.publish(x, None, 2)
    assert (daemon.flush(), daemon.pending, daemon.flush()) == (True, False, False)
    second = learner.take()
    assert second is not None
    assert second.vector.tolist() == [2, 3, 0]
    assert second.id == first.id + 1


def test_a_set_replaces_what_is_gathered_and_later_deltas_add_to_it(
    learner: LearnerBoard, daemon: DaemonBoard
) -> None:
    learner.publish(vec(0, 0, 0), side(1, 1), 50)
    daemon.post_delta(vec(1, 1, 1), 50)
    daemon.post_delta(vec(1, 1, 1), 50)
    daemon.post_set(vec(7, 7, 7), side(2, 2), 9)
    daemon.post_delta(vec(0, 0, 1), 10)
    assert read(daemon) == [7, 7, 8]
    assert daemon.policy_version == 10
    sidecar = daemon.sidecar()
    assert sidecar is not None
    assert int(sidecar["step"]) == 2
    assert learner.take() is not None
    learner.publish(vec(1, 1, 1), None, 51)
    assert daemon.flush()
    assert read(daemon) == [7, 7, 8]
    taken = learner.take()
    assert taken is not None
    assert (taken.kind, taken.vector.tolist(), taken.policy_version) == ("set", [7, 7, 8], 10)
    assert taken.sidecar is not None
    assert taken.sidecar["m"].tolist() == [2, 2, 2]
    learner.publish(taken.vector.copy(), taken.sidecar, 11)
    assert daemon.policy_version == 11
    np.testing.assert_array_equal((daemon.sidecar() or {})["m"], [2, 2, 2])


def test_a_set_is_readable_before_anything_was_published(learner: LearnerBoard, daemon: DaemonBoard) -> None:
    daemon.post_set(vec(1, 2, 3), None, 4)
    assert read(daemon) == [1, 2, 3]
    taken = learner.take()
    assert taken is not None
    assert (taken.kind, taken.sidecar) == ("set", None)


def test_a_delta_mixed_before_a_set_is_dropped(learner: LearnerBoard, daemon: DaemonBoard) -> None:
    learner.publish(vec(0, 0, 0), None, 1)
    before = daemon.now(np.empty(3, np.float32))
    daemon.post_set(vec(5, 5, 5), None, 9)
    assert not daemon.post_delta(vec(1, 1, 1), 2, sets=before.sets)
    assert read(daemon) == [5, 5, 5]
    after = daemon.now(np.empty(3, np.float32))
    assert daemon.post_delta(vec(1, 1, 1), 2, sets=after.sets)
    assert read(daemon) == [6, 6, 6]


def test_snapshot_tells_versions_and_publications(learner: LearnerBoard, daemon: DaemonBoard) -> None:
    out = np.empty(3, np.float32)
    learner.publish(vec(0, 0, 0), None, 3)
    learner.publish(vec(0, 0, 0), None, 4)
    daemon.post_delta(vec(1, 0, 0), 9)
    assert daemon.now(out) == (9, 4, 2, 0)
    assert daemon.published(out) == (4, 4, 2, 0)
    assert out.tolist() == [0, 0, 0]
    assert daemon.policy_version == 9


def test_facts_can_be_read_while_another_thread_copies(
    learner: LearnerBoard, daemon: DaemonBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner.publish(vec(1, 2, 3), None, 5)
    memory, copying, go_on = daemon._memory, threading.Event(), threading.Event()  # noqa: SLF001 - a moment within a copy
    write_slot = memory.write_slot

    def slow(slot: InboxSlot) -> None:
        copying.set()
        assert go_on.wait(10)
        write_slot(slot)

    def facts() -> tuple[object, ...]:
        return daemon.policy_version, daemon.content_id, daemon.absorbed, daemon.pending, daemon.flush()

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr(memory, "write_slot", slow)
        posting = threads.submit(daemon.post_delta, vec(1, 0, 0), 9)
        try:
            assert copying.wait(10)
            assert threads.submit(facts).result(10) == (5, 0, True, False, False)
        finally:
            go_on.set()
        assert posting.result(10)
    assert facts() == (9, 1, False, False, False)
    assert daemon.post_delta(vec(0, 1, 0), 11)
    assert facts() == (11, 2, False, True, False)
    learner.take()
    learner.publish(vec(2, 2, 3), None, 10)
    assert facts() == (11, 2, False, True, True)
    assert facts() == (11, 2, False, False, False)
    learner.take()
    learner.publish(vec(2, 3, 3), None, 12)
    assert facts() == (12, 2, True, False, False)


def test_a_sidecar_stays_until_another_is_published(learner: LearnerBoard, daemon: DaemonBoard) -> None:
    learner.publish(vec(0, 0, 0), side(1, 1), 1)
    for version in range(2, 5):
        learner.publish(vec(0, 0, 0), None, version)
        assert int((daemon.sidecar() or {})["step"]) == 1
    learner.publish(vec(0, 0, 0), side(2, 2), 5)
    copies = daemon.sidecar() or {}
    learner.publish(vec(0, 0, 0), side(3, 3), 6)
    learner.publish(vec(0, 0, 0), side(4, 4), 7)
    assert copies["m"].tolist() == [2, 2, 2]


def test_the_learner_starts_from_the_seed(
    learner: LearnerBoard, daemon: DaemonBoard, spec: BoardSpec
) -> None:
    daemon.seed(vec(1, 2, 3), side(4, 5), 6)
    with pytest.raises(TensorError, match="post a set"):
        daemon.seed(vec(0, 0, 0), None, 7)
    assert read(daemon) == [1, 2, 3]


def test_restore_gives_vector_sidecar_and_version(
    region: SharedRegion, spec: BoardSpec, daemon: DaemonBoard
) -> None:
    daemon.seed(vec(1, 2, 3), side(4, 5), 6)
    learner = LearnerBoard(region, spec)
    restored = learner.restore()
    assert restored is not None
    vector, sidecar, policy_version = restored
    assert (vector.tolist(), policy_version) == ([1, 2, 3], 6)
    assert sidecar is not None
    assert int(sidecar["step"]) == 5
    learner.publish(vec(9, 9, 9), None, 7)
    again = LearnerBoard(region, spec).restore()
    assert again is not None
    assert (again.vector.tolist(), again.policy_version) == ([9, 9, 9], 7)
    assert int((again.sidecar or {})["step"]) == 5


def test_what_a_learner_took_and_never_published_its_successor_takes_again(
    region: SharedRegion, spec: BoardSpec, daemon: DaemonBoard
) -> None:
    daemon.seed(vec(0, 0, 0), None, 1)
    daemon.post_delta(vec(1, 0, 0), 1)
    victim = LearnerBoard(region, spec)
    assert victim.take() is not None
    for _ in range(2):
        successor = LearnerBoard(region, spec)
        restored, taken = successor.restore(), successor.take()
        assert restored is not None
        assert taken is not None
        assert (restored.vector + taken.vector).tolist() == [1, 0, 0]
    successor.publish(restored.vector + taken.vector, None, 2)
    third = LearnerBoard(region, spec)
    assert third.take() is None
    assert (third.restore() or taken).vector.tolist() == [1, 0, 0]
    assert read(daemon) == [1, 0, 0]
    assert daemon.absorbed


def test_a_learner_that_dies_while_it_publishes_leaves_the_publication_before(
    region: SharedRegion, spec: BoardSpec, daemon: DaemonBoard
) -> None:
    learner = LearnerBoard(region, spec)
    learner.publish(vec(1, 1, 1), side(1, 1), 1)
    daemon.post_delta(vec(1, 0, 0), 1)
    assert learner.take() is not None

    class Dies:
        """A sidecar value that passes the check and then fails half-way through the copy."""

        shape, dtype = (), np.dtype(np.int64)

        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learner.publish(vec(9, 9, 9), {"m": np.full(3, 9, np.float32), "step": Dies()}, 2)  # type: ignore[dict-item]
    assert read(daemon) == [2, 1, 1]
    assert (daemon.sidecar() or {})["m"].tolist() == [1, 1, 1]
    successor = LearnerBoard(region, spec)
    restored, taken = successor.restore(), successor.take()
    assert restored is not None
    assert taken is not None
    successor.publish(restored.vector + taken.vector, None, 2)
    assert read(daemon) == [2, 1, 1]


def test_what_is_not_as_the_spec_says_is_refused_and_changes_nothing(
    learner: LearnerBoard, daemon: DaemonBoard
) -> None:
    learner.publish(vec(1, 2, 3), side(1, 1), 1)
    half = {"m": np.zeros(3, np.float32)}
    for wrong in (vec(1, 2), np.zeros(3), np.zeros((3, 1), np.float32)):
        for call in (
            lambda v: learner.publish(v, None, 2),
            lambda v: daemon.post_delta(v, 2),
            lambda v: daemon.post_set(v, None, 2),
            lambda v: daemon.seed(v, None, 2),
            daemon.now,
            daemon.published,
        ):
            with pytest.raises(LayoutMismatchError):
                call(wrong)
    with pytest.raises(LayoutMismatchError):
        learner.publish(vec(0, 0, 0), half, 2)
    with pytest.raises(LayoutMismatchError):
        daemon.post_set(vec(0, 0, 0), half, 2)
    assert read(daemon) == [1, 2, 3]
    assert daemon.policy_version == 1


def test_both_ends_must_have_the_same_spec(
    region: SharedRegion, spec: BoardSpec, daemon: DaemonBoard
) -> None:
    others = (
        BoardSpec(Layout((TensorEntry("w", (2,)), TensorEntry("c", ()))), spec.sidecar),
        BoardSpec(spec.layout, SidecarLayout((SidecarItem("m", (3,)), SidecarItem("steps", (), "int64")))),
        BoardSpec(Layout((TensorEntry("w", (1000,)),)), spec.sidecar),
    )
    for other in others:
        with pytest.raises(LayoutMismatchError):
            LearnerBoard(region, other)


def test_spec_round_trip(spec: BoardSpec) -> None:
    assert BoardSpec.from_wire(spec.to_wire()) == spec
    for wrong in (None, {}, {"layout": [], "sidecar": [], "more": 1}):
        with pytest.raises(WireError):
            BoardSpec.from_wire(wrong)
