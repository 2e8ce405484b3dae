"""What the answers to a learner's posts do: they replace, add, set, step for it, or end the update."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from p2pdrl.config.learner_mode import LearnerMode
from p2pdrl.config.task import EnvConfig, PPOConfig, TaskConfig
from p2pdrl.rl.registry import build_trainer
from p2pdrl.tensors.board import BoardSpec, LearnerBoard
from p2pdrl.tensors.shared_memory import GradientRing, SharedRegion
from p2pdrl.workers.learner_modes import ModeRequests
from p2pdrl.workers.protocol import PostedRequest, RequestAnswer, WorkMode
from p2pdrl.workers.replica import Replica
from p2pdrl.workers.request_stepper import RequestStepper

from .rigs import EPOCH, SERVED, SIZE, WAIT, Trainer


def test_what_replaces_the_gradient_is_stepped_with_at_the_rate_that_it_came_with(rig):
    it = rig(WAIT, lambda _posted, _vector: "replace")
    it.told_rate = 0.25
    it.step([1, -2, 4], rate=8.0)
    assert it.x == [-0.25, 0.5, -1.0]
    it.told_rate = None
    it.step([1, -2, 4], rate=1.0)
    assert it.x == [-1.25, 2.5, -5.0]


def test_without_a_replacement_the_algorithms_own_rate_counts(rig):
    it = rig(WAIT, lambda _posted, _vector: "none")
    it.told_rate = 0.25
    it.step([1, -2, 4], rate=2.0)
    assert it.x == [-2.0, 4.0, -8.0]


def test_what_replaces_the_gradient_is_stepped_with(rig):
    def double(_: PostedRequest, vector: np.ndarray) -> str:
        vector *= 2
        return "replace"

    it = rig(WAIT, double)
    assert it.step([1, 2, 2], samples=5) == 6.0
    assert it.x == [-2.0, -4.0, -4.0]
    assert it.said == [PostedRequest(1, EPOCH, "gradients", 0, 0, 5)]
    assert it.seen[0].tolist() == [1.0, 2.0, 2.0]


def test_two_that_replace_by_the_mean_are_one_on_both_batches(rig):
    rng = np.random.default_rng(0)
    rates, batches = [0.5, 0.25, 0.125], rng.normal(size=(3, 2, SIZE)).astype(np.float32)
    alone = Trainer()
    means = [batch.mean(axis=0, dtype=np.float32) for batch in batches]
    pair = [
        rig(WAIT, lambda posted, vector: np.copyto(vector, means[posted.number - 1]) or "replace")
        for _ in range(2)
    ]
    for rate, batch, mean in zip(rates, batches, means, strict=True):
        for each, gradient in zip(pair, batch, strict=True):
            each.step(gradient, rate=rate)
        alone.module.gradients_D.copy_(torch.from_numpy(mean))
        alone.optimizer.step(rate)
    assert pair[0].x == pair[1].x == alone.flat.tolist()


@pytest.mark.parametrize("kind", ["none", "replace"])
def test_ppo_through_it_is_ppo_to_the_bit(kind):
    task = TaskConfig(env=EnvConfig(num_envs=2), algorithm=PPOConfig(unroll_steps=16, anneal="linear"))
    alone, posting = (build_trainer(task, seed=5, device="cpu") for _ in range(2))
    size, spec = alone.layout.size, BoardSpec(alone.layout, alone.sidecar_layout)
    regions = [SharedRegion.create(n, "test") for n in (spec.nbytes, GradientRing.nbytes_of(1, size))]
    samples: list[int] = []

    def answer(posted: PostedRequest) -> None:
        samples.append(posted.samples)
        posts.hear(RequestAnswer(posted.number, EPOCH, kind))

    posts = ModeRequests(
        WorkMode(WAIT, EPOCH),
        first=1,
        say=answer,
        listen=lambda _: None,
        report=lambda: None,
        paused=lambda: False,
    )
    replica = Replica(posting, LearnerBoard(regions[0], spec))
    posting.stepper = RequestStepper(WAIT, posts, replica, GradientRing(regions[1], 1, size))
    for _ in range(2):
        ours, theirs = alone.step(), posting.step()
        assert ours.metrics == theirs.metrics
    np.testing.assert_array_equal(alone.flat, posting.flat)
    assert len(samples) == 2 * 4 * 4
    for trainer in (alone, posting):
        trainer.close()
    for region in regions:
        region.close()


@pytest.mark.parametrize("learner_mode", [WAIT, SERVED])
def test_an_answer_may_end_the_update(rig, learner_mode):
    it = rig(learner_mode, lambda *_: "replace" if learner_mode.steps else "set")
    it.ends_at = 2
    ended = []
    for left in (3, 2, 1):
        it.step([1, 1, 1], left=left)
        ended.append(it.stepper.ends_update)
    assert ended == [False, True, False]
    assert it.x == [-3.0 if learner_mode.steps else 0.0] * 3  # it steps with the gradient all the same
    assert [posted.left for posted in it.said] == [3, 2, 1]


def test_an_answer_that_came_too_late_ends_no_update(rig):
    it = rig(WAIT, lambda *_: None)
    it.ends_at = 1
    it.step([1, 1, 1], left=5)
    it.script = lambda *_: "none"
    it.step([1, 1, 1], left=4)
    assert not it.stepper.ends_update


def test_ppo_leaves_out_what_an_answer_ends(rig):
    """The third of 16 gradients is the last one; the next update is whole."""
    task = TaskConfig(env=EnvConfig(num_envs=2), algorithm=PPOConfig(unroll_steps=16))
    trainer = build_trainer(task, seed=5, device="cpu")
    size, spec = trainer.layout.size, BoardSpec(trainer.layout, trainer.sidecar_layout)
    regions = [SharedRegion.create(n, "test") for n in (spec.nbytes, GradientRing.nbytes_of(1, size))]
    said: list[int] = []

    def answer(posted: PostedRequest) -> None:
        said.append(posted.left)
        posts.hear(RequestAnswer(posted.number, EPOCH, "replace", end_update=posted.number == 3))

    posts = ModeRequests(
        WorkMode(WAIT, EPOCH),
        first=1,
        say=answer,
        listen=lambda _: None,
        report=lambda: None,
        paused=lambda: False,
    )
    replica = Replica(trainer, LearnerBoard(regions[0], spec))
    trainer.stepper = RequestStepper(WAIT, posts, replica, GradientRing(regions[1], 1, size))
    assert [trainer.step().metrics["gradient_steps"] for _ in range(2)] == [3, 16]
    assert said == [15, 14, 13, *range(15, -1, -1)]
    trainer.close()
    for region in regions:
        region.close()


@pytest.mark.parametrize(("kind", "x"), [("none", -1.0), ("add", -1.5), ("set", -1.0)])
def test_what_an_answer_does(rig, kind, x):
    def answer(_: PostedRequest, vector: np.ndarray) -> str:
        vector[:] = 0.5
        return kind

    it = rig(WAIT, answer)
    it.step([1, 1, 1])
    assert it.x == [x] * 3


def test_a_server_steps_for_it(rig):
    def serve(posted: PostedRequest, vector: np.ndarray) -> str:
        x = np.empty(SIZE, np.float32)
        it.board.now(x)
        it.board.post_set(x - vector, None, 100 + posted.number)
        return "set"

    it = rig(SERVED, serve)
    for number in (1, 2, 3):
        it.step([0, 3, 4], bound=1.0)  # clipped before it is sent
        assert it.x == pytest.approx([0.0, -0.6 * number, -0.8 * number])
        assert it.replica.version == 100 + number
    # Published before the first post, and with each set; never twice.
    assert it.publications == 4
    assert [posted.policy_version for posted in it.said] == [0, 101, 102]


def test_no_answer_of_a_server_lets_it_step_by_itself(rig):
    it = rig(SERVED, lambda *_: "none")
    assert it.step([1, 1, 1]) == pytest.approx(math.sqrt(3))
    assert it.x == [0.0] * 3


def test_several_gradients_go_out_as_their_sum(rig):
    learner_mode = LearnerMode("gradients", every=3, ahead=1, steps=True, clip="before")
    it = rig(learner_mode, lambda *_: "none")
    rng = np.random.default_rng(1)
    gradients, samples = rng.normal(size=(6, SIZE)), [1, 2, 3, 4, 5, 6]
    for gradient, count in zip(gradients, samples, strict=True):
        it.step(gradient, samples=count, rate=0.5)
    assert [posted.samples for posted in it.said] == [6, 15]
    for sent, part in zip(it.seen, (slice(0, 3), slice(3, 6)), strict=True):
        np.testing.assert_allclose(sent, gradients[part].sum(axis=0), rtol=1e-5)
    np.testing.assert_allclose(it.x, -0.5 * gradients.sum(axis=0), rtol=1e-5)


def test_what_isnt_finite_adds_nothing_to_a_sum(rig):
    it = rig(LearnerMode("gradients", every=3, ahead=1, steps=True, clip="before"), lambda *_: "none")
    for gradient in ([1, 2, 3], [math.nan, 0, 0], [4, 5, 6]):
        it.step(gradient, samples=2)
    assert ([posted.samples for posted in it.said], it.seen[0].tolist()) == ([4], [5, 7, 9])


@pytest.mark.parametrize(
    ("local_steps", "share", "golden"),
    [(True, 1.0, 0.014780882941434593), (False, 1.0, 0.6**10), (True, 0.25, 0.4069871949618763)],
    ids=["sum", "sum-without-local-steps", "mean"],
)
def test_pushing_each_fourth_gradient_to_a_server_with_sgd(rig, local_steps, share, golden):
    """DistBelief's n_push = n_fetch = 4 on f(w) = w²/2: with local steps it is serial training, 0.9^40.

    Without them, four gradients of the same w make one step four times as long. A server that took the mean
    of what a push adds up would undo most of the local steps: (1 − 0.1 · (1 + 0.9 + 0.9² + 0.9³) / 4)^10.
    """
    rate, server = 0.1, np.ones(SIZE)

    def serve(posted: PostedRequest, vector: np.ndarray) -> str:
        server[:] -= rate * share * vector
        it.board.post_set(server.astype(np.float32), None, posted.number)
        return "set"

    it = rig(LearnerMode("gradients", every=4, steps=local_steps, clip="before"), serve)
    it.trainer.module.set_(np.ones(SIZE, np.float32))
    for _ in range(40):
        it.step(it.x, rate=rate)
    assert it.x == pytest.approx([golden] * SIZE, rel=1e-5)


def test_a_bad_merge_isnt_stepped_with(rig):
    it = rig(WAIT, lambda posted, vector: np.copyto(vector, np.nan) or "replace")
    assert math.isnan(it.step([1, 1, 1]))
    assert it.x == [0.0] * 3
