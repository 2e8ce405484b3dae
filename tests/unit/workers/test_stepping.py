"""Learners that post gradients in the middle of an update: when they wait, and for how long."""

from __future__ import annotations

import math

import numpy as np
import pytest

from p2pdrl.config.learner_mode import FREE, LearnerMode
from p2pdrl.workers import learner_modes as posts_module
from p2pdrl.workers.protocol import PostedRequest, RequestAnswer

from .rigs import EPOCH, SERVED, SIZE, WAIT


def test_it_runs_ahead_and_adds_what_comes_to_the_next_gradient(rig):
    held: list[int] = []

    def answer(posted: PostedRequest, vector: np.ndarray) -> str | None:
        if posted.number not in held:
            return None
        vector[:] = 100.0
        return "add"

    it = rig(LearnerMode("gradients", ahead=2), answer)
    it.step([1, 1, 1])
    it.step([1, 1, 1])
    assert it.x == [-2.0] * 3
    assert sorted(posted.slot for posted in it.said) == [0, 1]
    held.append(1)  # the third waits until one of three is answered
    it.step([1, 1, 1])
    assert it.x == [-103.0] * 3
    assert [posted.slot for posted in it.said] == [0, 1, 2]
    held += [2, 3]
    it.step([0, 0, 0])
    assert (it.said[-1].slot, it.x) == (0, [-303.0] * 3)


@pytest.mark.parametrize(("clip", "sent", "moved"), [("before", 1.0, 3.0), ("after", 5.0, 1.0)])
def test_clipping_before_or_after(rig, clip, sent, moved):
    def triple(_: PostedRequest, vector: np.ndarray) -> str:
        vector *= 3
        return "replace"

    it = rig(LearnerMode("gradients", clip=clip), triple)
    assert it.step([0, 3, 4], bound=1.0) == pytest.approx(3 * sent)
    assert np.linalg.norm(it.seen[0]) == pytest.approx(sent)
    assert np.linalg.norm(it.x) == pytest.approx(moved)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_isnt_finite_stays_but_nobody_waits_in_vain(rig, bad):
    kinds = iter(["none", "replace"])

    def answer(_: PostedRequest, vector: np.ndarray) -> str:
        vector[:] = 1.0
        return next(kinds)

    it = rig(WAIT, answer)
    assert not math.isfinite(it.step([1, bad, 1], samples=7))
    assert (it.said[0].samples, it.seen[0].tolist(), it.x) == (0, [0.0] * 3, [0.0] * 3)
    it.step([1, bad, 1], samples=7)
    assert it.x == [-1.0] * 3  # the same step as everybody's


def test_what_isnt_finite_isnt_posted_where_nobody_waits(rig):
    it = rig(LearnerMode("gradients", ahead=1), lambda *_: "none")
    assert math.isnan(it.step([1, math.nan, 1]))
    assert (it.said, it.x) == ([], [0.0] * 3)


@pytest.mark.parametrize(
    ("heir", "x", "norm"),
    [(FREE, -1.0, math.sqrt(3)), (SERVED, 0.0, math.nan), (None, 0.0, math.nan)],
    ids=["free", "served", "stop"],
)
def test_another_mode_ends_the_wait(rig, heir, x, norm):
    def switch(*_: object) -> None:
        it.posts.end(heir)

    it = rig(WAIT, switch)
    for steps in (1, 2):  # the rest of the update too
        assert it.step([1, 1, 1]) == pytest.approx(norm, nan_ok=True)
        assert it.x == [steps * x] * 3
    assert len(it.said) == 1
    assert it.now_s < 1.0


def test_a_strategy_that_never_answers(rig, capsys):
    answers: list[str] = []
    it = rig(WAIT, lambda *_: answers.pop() if answers else None)
    it.step([1, 1, 1])
    assert it.now_s == pytest.approx(posts_module.BACKSTOP_S, abs=0.1)
    assert "goes on alone" in capsys.readouterr().err
    it.step([1, 1, 1])  # the slot isn't its own again: nothing is posted, and nothing waited for
    assert (it.now_s, len(it.said), it.x) == (pytest.approx(posts_module.BACKSTOP_S, abs=0.1), 1, [-2.0] * 3)
    answers += ["none", "replace"]
    it.listen(0.0)  # too late to replace anything
    it.step([1, 1, 1])
    assert (len(it.said), it.x) == (2, [-3.0] * 3)
    answers += ["none"]
    it.step([1, 1, 1])
    assert [posted.alone for posted in it.said] == [False, True, False]


def test_a_pause_doesnt_count_as_waiting(rig):
    def answer(*_: object) -> str | None:
        it.paused = it.now_s < 3 * posts_module.BACKSTOP_S
        return None if it.paused else "none"

    it = rig(WAIT, answer)
    it.step([1, 1, 1])
    assert it.now_s >= 3 * posts_module.BACKSTOP_S
    assert len(it.said) == 1


@pytest.mark.parametrize("resumed", [True, False])
def test_a_held_learner_posts_nothing_in_the_middle_of_an_update(rig, resumed):
    it = rig(WAIT, lambda *_: "none")
    listen = it.posts._listen

    def wait(timeout_s: float) -> None:
        listen(timeout_s)
        if it.paused and it.now_s > 3 * posts_module.BACKSTOP_S:
            assert not it.said
            it.paused = not resumed
            if not resumed:
                it.posts.end(None)

    it.posts._listen = wait
    it.paused = True
    it.step([1, 1, 1])
    assert len(it.said) == resumed
    assert it.x == [-float(resumed)] * 3


def test_a_set_that_had_to_wait_for_room_on_the_board(rig):
    def answer(*_: object) -> str:
        it.board.post_delta(np.full(SIZE, 7.0, np.float32), 1)  # takes the slot
        it.board.post_set(np.full(SIZE, 50.0, np.float32), None, 60)
        return "set"

    it = rig(SERVED, answer)
    it.step([1, 1, 1])
    assert (it.x, it.replica.version) == ([50.0] * 3, 60)
    assert it.board.absorbed
    assert (it.reports, it.now_s) == (1, posts_module.POLL_S)  # it waits for the answer, not for room


def test_deltas_are_taken_after_the_step(rig):
    def answer(*_: object) -> str:
        it.board.post_delta(np.full(SIZE, 0.5, np.float32), 30)
        return "none"

    it = rig(WAIT, answer)
    it.step([1, 1, 1])
    assert (it.x, it.replica.version) == ([-0.5] * 3, 30)
    it.step([1, 1, 1])
    assert it.said[1].policy_version == 30
    out = np.empty(SIZE, np.float32)
    it.board.published(out)
    assert out.tolist() == [-0.5] * 3  # what the second gradient was computed on


def test_answers_of_another_epoch_are_passed_over(rig):
    it = rig(WAIT, lambda *_: None)
    it.posts.send("gradients", 0, 0, 1)
    it.posts.hear(RequestAnswer(1, EPOCH + 1, "replace"))
    it.posts.hear(RequestAnswer(2, EPOCH, "replace"))
    assert it.posts.full
