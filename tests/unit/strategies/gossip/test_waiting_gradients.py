from __future__ import annotations

import numpy as np
import pytest

from p2pdrl.config.strategy import AdpsgdConfig
from p2pdrl.strategies.gossip.adpsgd import GradientQuantity
from p2pdrl.strategies.gossip.pair_average import Bounds
from p2pdrl.strategies.protocol import LearnerRequest


class Learner:
    def __init__(self) -> None:
        self.answers: list[tuple[int, str]] = []

    def answer(self, post: LearnerRequest, kind: str) -> None:
        self.answers.append((post.number, kind))


def post(number: int) -> LearnerRequest:
    return LearnerRequest(number, "gradients", 1, 1, np.zeros(2, np.float32))


@pytest.fixture
def learner():
    return Learner()


@pytest.fixture
def gradients(learner):
    return GradientQuantity(AdpsgdConfig(), learner, 2, Bounds(1e6, 10.0))


def test_a_newer_gradient_drives_out_the_older(learner, gradients):
    gradients.put(post(1))
    assert gradients.waiting
    gradients.put(post(2))
    assert learner.answers == [(1, "none")]
    assert gradients.begin()
    assert not gradients.waiting
    gradients.end(done=True)
    assert learner.answers == [(1, "none"), (2, "add")]
    assert not gradients.begin()


def test_what_an_exchange_couldnt_use_waits_again_unless_there_is_a_newer_one(learner, gradients):
    gradients.put(post(1))
    assert gradients.begin()
    gradients.end(done=False)
    assert gradients.begin()
    gradients.put(post(2))
    gradients.end(done=False)
    assert learner.answers == [(1, "none")]
    assert gradients.begin()
    gradients.end(done=True)
    assert learner.answers == [(1, "none"), (2, "add")]


def test_only_gradients_are_exchanged(learner, gradients):
    gradients.put(LearnerRequest(1, "parameters", 1, 1, None))
    assert learner.answers == [(1, "none")]
    assert not gradients.waiting
