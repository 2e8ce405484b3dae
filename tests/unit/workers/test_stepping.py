"""The stepper against numpy, with a strategy that answers by a script while the learner listens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

from p2pdrl.config.regime import FREE, Regime
from p2pdrl.config.task import EnvConfig, PPOConfig, TaskConfig
from p2pdrl.rl import trainer as real
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.optimizers import SGD
from p2pdrl.tensors.board import BoardSpec, DaemonBoard, LearnerBoard
from p2pdrl.tensors.gradient_ring import GradientRing
from p2pdrl.tensors.shm import SharedRegion
from p2pdrl.workers import posts as posts_module
from p2pdrl.workers.posts import Posts
from p2pdrl.workers.protocol import Answer, Posted, Work
from p2pdrl.workers.replica import Replica
from p2pdrl.workers.stepping import PostingStepper

SIZE = 3
EPOCH = 9
WAIT = Regime("gradients")
SERVED = Regime("gradients", steps=False, clip="before")

Script = Callable[[Posted, np.ndarray], str | None]


class Trainer:
    """As much of one as a replica needs."""

    def __init__(self) -> None:
        module = nn.Linear(SIZE, 1, bias=False)
        self.module = FlatModule(module, torch.device("cpu"))
        self.module.set_(np.zeros(SIZE, np.float32))
        self.optimizer = SGD(self.module.parameters_D, self.module.gradients_D)

    @property
    def flat(self) -> np.ndarray:
        return self.module.numpy()

    def sidecar(self) -> None:
        return None

    def set_state(self, vector: np.ndarray, sidecar: object) -> None:
        self.module.set_(vector)

    def add_delta(self, delta: np.ndarray) -> None:
        self.module.add_(delta)


class Rig:
    """A learner under one regime, and its strategy."""

    def __init__(self, regime: Regime, script: Script) -> None:
        self.trainer = Trainer()
        self.script = script
        self.said: list[Posted] = []
        self.seen: list[np.ndarray] = []
        self.waiting: list[Posted] = []
        self.told_rate: float | None = None
        self.ends_at: int | None = None
        """Number of the post whose answer ends the update."""
        self.now_s = 0.0
        self.paused = False
        spec = BoardSpec(self.trainer.module.layout)
        ring_nbytes = GradientRing.nbytes_of(regime.slots, SIZE)
        self.regions = [SharedRegion.create(n, "test") for n in (spec.nbytes, ring_nbytes)]
        self.board = DaemonBoard(self.regions[0], spec)
        self.ring = GradientRing(self.regions[1], regime.slots, SIZE)
        self.replica = Replica(self.trainer, LearnerBoard(self.regions[0], spec))
        self.posts = Posts(
            Work(regime, EPOCH),
            first=1,
            say=self.say,
            listen=self.listen,
            paused=lambda: self.paused,
            clock=lambda: self.now_s,
        )
        self.stepper = PostingStepper(
            regime, self.posts, self.replica, GradientRing(self.regions[1], regime.slots, SIZE)
        )

    def say(self, posted: Posted) -> None:
        self.said.append(posted)
        self.waiting.append(posted)
        self.seen.append(self.ring.slot(posted.slot).copy())

    def listen(self, timeout_s: float) -> None:
        self.now_s += timeout_s
        for posted in list(self.waiting):
            kind = self.script(posted, self.ring.slot(posted.slot))
            if kind is not None:
                self.waiting.remove(posted)
                content = self.board.content_id
                ends = posted.number == self.ends_at
                self.posts.hear(Answer(posted.number, EPOCH, kind, content, self.told_rate, end_update=ends))
        self.board.flush()

    def step(
        self,
        gradient: object,
        *,
        samples: int = 1,
        rate: float = 1.0,
        bound: float = 1e9,
        left: int = 0,
    ) -> float:
        self.trainer.module.gradients_D.copy_(torch.as_tensor(gradient, dtype=torch.float32))
        return self.stepper.step(
            self.trainer.module,
            self.trainer.optimizer,
            learning_rate=rate,
            max_grad_norm=bound,
            samples=samples,
            left=left,
        )

    @property
    def x(self) -> list[float]:
        return self.trainer.flat.tolist()

    @property
    def publications(self) -> int:
        return self.board.published(np.empty(SIZE, np.float32)).publications


@pytest.fixture
def rig() -> Iterator[Callable[[Regime, Script], Rig]]:
    made: list[Rig] = []

    def make(regime: Regime, script: Script) -> Rig:
        made.append(Rig(regime, script))
        return made[-1]

    yield make
    for each in made:
        for region in each.regions:
            region.close()


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
    def double(_: Posted, vector: np.ndarray) -> str:
        vector *= 2
        return "replace"

    it = rig(WAIT, double)
    assert it.step([1, 2, 2], samples=5) == 6.0
    assert it.x == [-2.0, -4.0, -4.0]
    assert it.said == [Posted(1, EPOCH, "gradients", 0, 0, 5)]
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
    alone, posting = (real.Trainer(task, seed=5, device="cpu") for _ in range(2))
    size, spec = alone.layout.size, BoardSpec(alone.layout, alone.sidecar_layout)
    regions = [SharedRegion.create(n, "test") for n in (spec.nbytes, GradientRing.nbytes_of(1, size))]
    samples: list[int] = []

    def answer(posted: Posted) -> None:
        samples.append(posted.samples)
        posts.hear(Answer(posted.number, EPOCH, kind))

    posts = Posts(Work(WAIT, EPOCH), first=1, say=answer, listen=lambda _: None, paused=lambda: False)
    replica = Replica(posting, LearnerBoard(regions[0], spec))
    posting.stepper = PostingStepper(WAIT, posts, replica, GradientRing(regions[1], 1, size))
    for _ in range(2):
        ours, theirs = alone.step(), posting.step()
        assert ours.metrics == theirs.metrics
    np.testing.assert_array_equal(alone.flat, posting.flat)
    assert len(samples) == 2 * 4 * 4
    for trainer in (alone, posting):
        trainer.close()
    for region in regions:
        region.close()


@pytest.mark.parametrize("regime", [WAIT, SERVED])
def test_an_answer_may_end_the_update(rig, regime):
    it = rig(regime, lambda *_: "replace" if regime.steps else "set")
    it.ends_at = 2
    ended = []
    for left in (3, 2, 1):
        it.step([1, 1, 1], left=left)
        ended.append(it.stepper.ends_update)
    assert ended == [False, True, False]
    assert it.x == [-3.0 if regime.steps else 0.0] * 3  # it steps with the gradient all the same
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
    trainer = real.Trainer(task, seed=5, device="cpu")
    size, spec = trainer.layout.size, BoardSpec(trainer.layout, trainer.sidecar_layout)
    regions = [SharedRegion.create(n, "test") for n in (spec.nbytes, GradientRing.nbytes_of(1, size))]
    said: list[int] = []

    def answer(posted: Posted) -> None:
        said.append(posted.left)
        posts.hear(Answer(posted.number, EPOCH, "replace", end_update=posted.number == 3))

    posts = Posts(Work(WAIT, EPOCH), first=1, say=answer, listen=lambda _: None, paused=lambda: False)
    replica = Replica(trainer, LearnerBoard(regions[0], spec))
    trainer.stepper = PostingStepper(WAIT, posts, replica, GradientRing(regions[1], 1, size))
    assert [trainer.step().metrics["gradient_steps"] for _ in range(2)] == [3, 16]
    assert said == [15, 14, 13, *range(15, -1, -1)]
    trainer.close()
    for region in regions:
        region.close()


@pytest.mark.parametrize(("kind", "x"), [("none", -1.0), ("add", -1.5), ("set", -1.0)])
def test_what_an_answer_does(rig, kind, x):
    def answer(_: Posted, vector: np.ndarray) -> str:
        vector[:] = 0.5
        return kind

    it = rig(WAIT, answer)
    it.step([1, 1, 1])
    assert it.x == [x] * 3


def test_a_server_steps_for_it(rig):
    def serve(posted: Posted, vector: np.ndarray) -> str:
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


def test_several_gradients_go_out_as_one_mean_weighted_by_samples(rig):
    regime = Regime("gradients", every=3, ahead=1, steps=True, clip="before")
    it = rig(regime, lambda *_: "none")
    rng = np.random.default_rng(1)
    gradients, samples = rng.normal(size=(6, SIZE)), [1, 2, 3, 4, 5, 6]
    for gradient, count in zip(gradients, samples, strict=True):
        it.step(gradient, samples=count, rate=0.5)
    assert [posted.samples for posted in it.said] == [6, 15]
    for sent, part in zip(it.seen, (slice(0, 3), slice(3, 6)), strict=True):
        np.testing.assert_allclose(
            sent, np.average(gradients[part], axis=0, weights=samples[part]), rtol=1e-5
        )
    np.testing.assert_allclose(it.x, -0.5 * gradients.sum(axis=0), rtol=1e-5)


def test_it_runs_ahead_and_adds_what_comes_to_the_next_gradient(rig):
    held: list[int] = []

    def answer(posted: Posted, vector: np.ndarray) -> str | None:
        if posted.number not in held:
            return None
        vector[:] = 100.0
        return "add"

    it = rig(Regime("gradients", ahead=2), answer)
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
    def triple(_: Posted, vector: np.ndarray) -> str:
        vector *= 3
        return "replace"

    it = rig(Regime("gradients", clip=clip), triple)
    assert it.step([0, 3, 4], bound=1.0) == pytest.approx(3 * sent)
    assert np.linalg.norm(it.seen[0]) == pytest.approx(sent)
    assert np.linalg.norm(it.x) == pytest.approx(moved)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_isnt_finite_stays_but_nobody_waits_in_vain(rig, bad):
    kinds = iter(["none", "replace"])

    def answer(_: Posted, vector: np.ndarray) -> str:
        vector[:] = 1.0
        return next(kinds)

    it = rig(WAIT, answer)
    assert not math.isfinite(it.step([1, bad, 1], samples=7))
    assert (it.said[0].samples, it.seen[0].tolist(), it.x) == (0, [0.0] * 3, [0.0] * 3)
    it.step([1, bad, 1], samples=7)
    assert it.x == [-1.0] * 3  # the same step as everybody's


def test_what_isnt_finite_isnt_posted_where_nobody_waits(rig):
    it = rig(Regime("gradients", ahead=1), lambda *_: "none")
    assert math.isnan(it.step([1, math.nan, 1]))
    assert (it.said, it.x) == ([], [0.0] * 3)


def test_a_bad_merge_isnt_stepped_with(rig):
    it = rig(WAIT, lambda posted, vector: np.copyto(vector, np.nan) or "replace")
    assert math.isnan(it.step([1, 1, 1]))
    assert it.x == [0.0] * 3


@pytest.mark.parametrize(
    ("heir", "x", "norm"),
    [(FREE, -1.0, math.sqrt(3)), (SERVED, 0.0, math.nan), (None, 0.0, math.nan)],
    ids=["free", "served", "stop"],
)
def test_another_regime_ends_the_wait(rig, heir, x, norm):
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
    it.posts.post("gradients", 0, 0, 1)
    it.posts.hear(Answer(1, EPOCH + 1, "replace"))
    it.posts.hear(Answer(2, EPOCH, "replace"))
    assert it.posts.crowded
