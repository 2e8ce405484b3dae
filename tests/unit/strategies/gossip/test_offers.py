from __future__ import annotations

import numpy as np

from p2pdrl.strategies.gossip.adpsgd import GradientOffers
from p2pdrl.strategies.protocol import LearnerRequest


class Learner:
    def __init__(self) -> None:
        self.answers: list[tuple[int, str]] = []

    def answer(self, post: LearnerRequest, kind: str) -> None:
        self.answers.append((post.number, kind))


def post(number: int) -> LearnerRequest:
    return LearnerRequest(number, "gradients", 1, 1, np.zeros(2, np.float32))


def test_a_newer_gradient_drives_out_the_older():
    learner = Learner()
    offers = GradientOffers(learner)
    offers.put(post(1))
    assert offers.open
    offers.put(post(2))
    assert learner.answers == [(1, "none")]
    assert offers.take().number == 2
    assert offers.take() is None
    assert not offers.open


def test_what_an_exchange_couldnt_use_is_offered_again_unless_there_is_a_newer_one():
    learner = Learner()
    offers = GradientOffers(learner)
    offers.put(post(1))
    taken = offers.take()
    offers.back(taken)
    assert offers.take() is taken
    offers.put(post(2))
    offers.back(taken)
    assert learner.answers == [(1, "none")]
    assert offers.take().number == 2


def test_only_gradients_are_offered():
    learner = Learner()
    offers = GradientOffers(learner)
    offers.put(LearnerRequest(1, "parameters", 1, 1, None))
    assert learner.answers == [(1, "none")]
    assert not offers.open
