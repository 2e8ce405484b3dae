"""What compression leaves out is neither lost nor counted twice."""

from __future__ import annotations

import numpy as np
import pytest

from p2pdrl.errors import PoisonedVectorError
from p2pdrl.strategies.feedback import FeedbackEncoder

D = 200
KINDS = ("none", "bf16", "int8", "topk", "threshold")


def encoder(kind: str) -> FeedbackEncoder:
    return FeedbackEncoder(kind, D, keep=0.1, threshold=0.5, max_abs=1e6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_peer_decodes_what_the_sender_takes_it_for(kind):
    one = encoder(kind)
    one.encode(np.random.default_rng(0).standard_normal(D, dtype=np.float32))
    seen_D = np.empty(D, np.float32)
    encoder(kind).decode(memoryview(bytes(one.message)), seen_D)
    assert np.array_equal(seen_D, one.sent_D)


@pytest.mark.parametrize("kind", ["int8", "topk", "threshold"])
def test_what_was_sent_and_what_is_kept_add_up(kind):
    rng, one = np.random.default_rng(1), encoder(kind)
    given_D, sent_D = np.zeros(D), np.zeros(D)
    for turn in range(60):
        gradient_D = rng.standard_normal(D, dtype=np.float32)
        one.encode(gradient_D)
        if turn % 3:  # the others reached nobody, and are their learner's own
            one.delivered()
            given_D += gradient_D
            sent_D += one.sent_D
    for _ in range(100):  # what is kept goes out in the end, but for what is below the threshold
        one.encode(np.zeros(D, np.float32))
        one.delivered()
        sent_D += one.sent_D
    assert np.allclose(sent_D, given_D, atol=0.5 if kind == "threshold" else 1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 2e6])
def test_poison_is_neither_sent_nor_kept(kind, bad):
    one, poison_D = encoder(kind), np.zeros(D, np.float32)
    poison_D[7] = bad
    with pytest.raises(PoisonedVectorError):
        one.encode(poison_D)
    assert not len(one.message)
    one.encode(np.ones(D, np.float32))
    assert np.isfinite(one.sent_D).all()
