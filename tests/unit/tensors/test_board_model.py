"""Any interleaving of the board's calls, crashes included, against a model of lists."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from p2pdrl.tensors.board import BoardSpec, DaemonBoard, LearnerBoard
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.shared_memory import SharedRegion

SPEC = BoardSpec(Layout((TensorEntry("x", (3,)),)))
# Whole numbers, so that float32 sums are exact whatever their order.
vectors = st.lists(st.integers(-50, 50), min_size=3, max_size=3).map(lambda x: np.array(x, np.float32))
versions = st.integers(0, 100)
Change = tuple[str, np.ndarray, int]


def apply(changes: list[Change], vector: np.ndarray, version: int) -> tuple[np.ndarray, int]:
    for kind, change, its_version in changes:
        if kind == "set":
            vector, version = change, its_version
        else:
            vector, version = vector + change, max(version, its_version)
    return vector, version


class Board(RuleBasedStateMachine):
    """The real board beside what it should hold: published, the slot's changes, those gathered after."""

    def __init__(self) -> None:
        super().__init__()
        self.region = SharedRegion.create(SPEC.nbytes, "model")
        self.daemon = DaemonBoard(self.region, SPEC)
        self.published: tuple[np.ndarray, int] = (np.zeros(3, np.float32), 1)
        self.daemon.seed(*self.published[:1], None, 1)
        self.slot: list[Change] = []
        self.gathered: list[Change] = []
        self.start_learner()

    def start_learner(self) -> None:
        self.learner = LearnerBoard(self.region, SPEC)
        restored = self.learner.restore()
        assert restored is not None
        self.mine = (restored.vector.copy(), restored.policy_version)
        self.holds_slot = False
        np.testing.assert_array_equal(self.mine[0], self.published[0])
        assert self.mine[1] == self.published[1]

    @rule()
    def take(self) -> None:
        taken = self.learner.take()
        assert (taken is not None) == (bool(self.slot) and not self.holds_slot)
        if taken is not None:
            self.mine = apply([(taken.kind, taken.vector.copy(), taken.policy_version)], *self.mine)
            self.holds_slot = True

    @rule(update=vectors)
    def publish(self, update: np.ndarray) -> None:
        if self.holds_slot:
            expected = apply(self.slot, *self.published)
            np.testing.assert_array_equal(self.mine[0], expected[0])
            assert self.mine[1] == expected[1]
            self.slot, self.holds_slot = [], False
        self.mine = (self.mine[0] + update, self.mine[1] + 1)
        self.learner.publish(self.mine[0], None, self.mine[1])
        self.published = self.mine

    @rule()
    def learner_is_killed_and_another_started(self) -> None:
        self.start_learner()

    @rule(delta=vectors, version=versions)
    def post_delta(self, delta: np.ndarray, version: int) -> None:
        assert self.daemon.post_delta(delta, version)
        self.gathered.append(("delta", delta, version))
        self.move()

    @rule(vector=vectors, version=versions)
    def post_set(self, vector: np.ndarray, version: int) -> None:
        self.daemon.post_set(vector, None, version)
        self.gathered = [("set", vector, version)]
        self.move()

    @rule()
    def flush(self) -> None:
        could = bool(self.gathered) and not self.slot
        assert self.daemon.flush() == could
        self.move()

    @precondition(lambda self: self.gathered)
    @rule()
    def everything_arrives(self) -> None:
        expected, _ = apply(self.slot + self.gathered, *self.published)
        for _ in range(2):
            self.take()
            self.publish(np.zeros(3, np.float32))
            self.flush()
        self.take()
        self.publish(np.zeros(3, np.float32))
        np.testing.assert_array_equal(self.published[0], expected)
        assert self.daemon.absorbed

    def move(self) -> None:
        if not self.slot:
            self.slot, self.gathered = self.gathered, []

    @invariant()
    def now_is_what_the_model_says(self) -> None:
        out = np.empty(3, np.float32)
        vector, version = apply(self.slot + self.gathered, *self.published)
        snapshot = self.daemon.now(out)
        np.testing.assert_array_equal(out, vector)
        assert snapshot.policy_version == self.daemon.policy_version == version
        assert self.daemon.pending == bool(self.gathered)
        self.daemon.published(out)
        np.testing.assert_array_equal(out, self.published[0])

    def teardown(self) -> None:
        self.region.close()


TestBoard = Board.TestCase
TestBoard.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
