from __future__ import annotations

import numpy as np
import pytest

from p2pdrl.errors import PoisonedVectorError
from p2pdrl.strategies.own_vector import read_now
from p2pdrl.tensors.board import BoardSpec, DaemonBoard, LearnerBoard
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.wire import WALK, decode, encoded_nbytes, round_trip

WIRES = ("float32", "bf16")
D = 2 * WALK + 7


@pytest.fixture
def ends():
    spec = BoardSpec(Layout((TensorEntry("w", (D,)),)))
    region = SharedRegion.create(spec.nbytes, "reading")
    yield LearnerBoard(region, spec), DaemonBoard(region, spec)
    region.close()


def message(wire) -> memoryview:
    return memoryview(bytearray(encoded_nbytes(D, wire)))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("posts", [0, 1, 2])
def test_what_is_left_is_what_the_peer_decodes(ends, wire, posts):
    learner, daemon = ends
    rng = np.random.default_rng(posts)
    expected = rng.standard_normal(D).astype(np.float32)
    learner.publish(expected, None, 1)
    deltas = rng.standard_normal((posts, D)).astype(np.float32)
    for delta in deltas:
        daemon.post_delta(delta, 2)
        expected = expected + delta
    out, theirs, sent = np.empty(D, np.float32), np.empty(D, np.float32), message(wire)
    assert read_now(daemon, out, 1e6, wire, sent) == daemon.now(np.empty(D, np.float32))
    decode(sent, wire, theirs)
    round_trip(expected, wire, expected)
    assert out.tobytes() == theirs.tobytes() == expected.tobytes()


def test_without_a_message_float32_stays_as_it_is(ends):
    learner, daemon = ends
    x = np.random.default_rng(0).standard_normal(D).astype(np.float32)
    learner.publish(x, None, 1)
    out = np.empty(D, np.float32)
    read_now(daemon, out, 1e6)
    assert out.tobytes() == x.tobytes()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1010.0])
@pytest.mark.parametrize("at", [0, WALK, D - 1])
def test_what_peers_would_strike_us_for_is_found(ends, wire, bad, at):
    learner, daemon = ends
    x = np.zeros(D, np.float32)
    x[at] = bad
    learner.publish(x, None, 1)
    with pytest.raises(PoisonedVectorError):
        read_now(daemon, np.empty(D, np.float32), 1000.0, wire, message(wire))


def test_the_bound_holds_for_what_the_peer_decodes(ends):
    """Nearest to 9,999,000 in bfloat16 is 10,027,008: what we may have, and they wouldn't take."""
    learner, daemon = ends
    learner.publish(np.full(D, 9_999_000.0, np.float32), None, 1)
    read_now(daemon, np.empty(D, np.float32), 1e7)
    with pytest.raises(PoisonedVectorError):
        read_now(daemon, np.empty(D, np.float32), 1e7, "bf16", message("bf16"))
