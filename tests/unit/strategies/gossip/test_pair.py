from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from p2pdrl.errors import PoisonedVectorError
from p2pdrl.strategies.gossip.adpsgd import ParameterQuantity
from p2pdrl.strategies.gossip.pair_average import Bounds
from p2pdrl.tensors import mix
from p2pdrl.tensors.board import DaemonBoard
from p2pdrl.tensors.wire import encode, encoded_nbytes, round_trip

WIRES = ("float32", "bf16")
D = 12
floats = hnp.arrays(np.float32, D, elements=st.floats(-1e5, 1e5, width=32))
# Multiples of 2^-6 below 2: exact in bfloat16, and so are all their sums and halves in float32.
dyadic = hnp.arrays(np.float32, D, elements=st.integers(-127, 127).map(lambda n: n / 64))


class StillBoard:
    """A board that holds one vector; what is posted is kept apart."""

    def __init__(self, vector_D: np.ndarray) -> None:
        self.vector_D = vector_D.copy()

    def now(self, out: np.ndarray, each):
        np.copyto(out, self.vector_D)
        each(slice(0, out.size))
        return type("Snapshot", (), {"sets": 0})

    def post_delta(self, delta: np.ndarray, policy_version: int, *, sets: int) -> bool:
        self.vector_D = self.vector_D + delta
        return sets == 0


def side_of(board, wire="float32", **bounds) -> ParameterQuantity:
    limits = Bounds(bounds.get("max_abs", 1e6), bounds.get("max_distance", float("inf")))
    return ParameterQuantity(board, D, wire, limits)


def receive(side: ParameterQuantity, message) -> None:
    """The peer's vector arrives."""
    side.room(len(message))[:] = message


def encoded(vector_D: np.ndarray, wire: str = "float32") -> bytearray:
    message = bytearray(encoded_nbytes(vector_D.size, wire))
    encode(vector_D, wire, memoryview(message))
    return message


def exchange(a_D: np.ndarray, b_D: np.ndarray, wire: str, weight: float = 0.5):
    """Both boards, sides and deltas after one exchange."""
    boards = StillBoard(a_D), StillBoard(b_D)
    sides = [side_of(board, wire) for board in boards]
    for side in sides:
        side.load()
    messages = [bytes(side.outgoing) for side in sides]
    receive(sides[0], messages[1])
    receive(sides[1], messages[0])
    deltas = [side.mix(weight, "peer") for side in sides]
    for side in sides:
        assert side.commit(1)
    return boards, sides, deltas


@pytest.mark.parametrize("wire", WIRES)
@given(a_D=floats, b_D=floats, weight=st.sampled_from([0.5, 0.25, 0.1]))
def test_what_one_side_gains_the_other_loses_bit_for_bit(wire, a_D, b_D, weight):
    _, sides, (to_a, to_b) = exchange(a_D, b_D, wire, weight)
    assert np.array_equal(to_a, -to_b)
    assert sides[0].step.distance == sides[1].step.distance


@pytest.mark.parametrize("wire", WIRES)
@given(a_D=dyadic, b_D=dyadic)
def test_the_pairs_sum_is_kept_bit_for_bit(wire, a_D, b_D):
    boards, _, _ = exchange(a_D, b_D, wire)
    assert np.array_equal(boards[0].vector_D + boards[1].vector_D, a_D + b_D)
    assert np.array_equal(boards[0].vector_D, (a_D + b_D) / 2)
    assert np.array_equal(boards[0].vector_D, boards[1].vector_D)


def test_bf16_mixes_what_the_peer_sees():
    rng = np.random.default_rng(0)
    a_D, b_D = rng.standard_normal((2, D), dtype=np.float32)
    boards, _, (to_a, _) = exchange(a_D, b_D, "bf16")
    seen_a, seen_b = np.empty_like(a_D), np.empty_like(b_D)
    round_trip(a_D, "bf16", seen_a)
    round_trip(b_D, "bf16", seen_b)
    assert np.array_equal(to_a, (seen_b - seen_a) * np.float32(0.5))
    # The parts of our parameters that the wire can't carry stay ours.
    assert np.allclose(boards[0].vector_D, a_D + (b_D - a_D) / 2, atol=0.02)


def test_the_distance_is_that_of_the_two():
    a_D, b_D = np.zeros(D, np.float32), np.full(D, 2.0, np.float32)
    _, sides, _ = exchange(a_D, b_D, "float32", 0.25)
    assert sides[0].step.distance == pytest.approx(mix.distance(a_D, b_D))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2e6, -2e6])
def test_poisoned_vectors_are_refused(wire, bad):
    mine, poison_D = side_of(StillBoard(np.ones(D, np.float32)), wire), np.zeros(D, np.float32)
    mine.load()
    poison_D[7] = bad
    receive(mine, encoded(poison_D, wire))
    with pytest.raises(PoisonedVectorError):
        mine.mix(0.5, "peer")


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2e6])
def test_our_own_poison_isnt_loaded(wire, bad):
    mine_D = np.ones(D, np.float32)
    mine_D[3] = bad
    with pytest.raises(PoisonedVectorError):
        side_of(StillBoard(mine_D), wire).load()


def test_a_norm_out_of_proportion_is_refused():
    mine = side_of(StillBoard(np.zeros(D, np.float32)), max_distance=10.0)
    mine.load()
    theirs_D = np.zeros(D, np.float32)
    theirs_D[0] = 10.0
    receive(mine, encoded(theirs_D))
    mine.mix(0.5, "peer")
    theirs_D[0] = 10.1
    receive(mine, encoded(theirs_D))
    with pytest.raises(PoisonedVectorError, match="norm"):
        mine.mix(0.5, "peer")


def test_a_delta_is_dropped_after_a_set(make_board):
    board: DaemonBoard = make_board(np.zeros(D))
    mine = side_of(board)
    mine.load()
    receive(mine, encoded(np.ones(D, np.float32)))
    mine.mix(0.5, "peer")
    board.post_set(np.full(D, 9.0, np.float32), None, 5)
    assert not mine.commit(6)
    now_D = np.empty(D, np.float32)
    assert board.now(now_D).policy_version == 5
    assert np.array_equal(now_D, np.full(D, 9.0))


def test_a_delta_raises_the_version(make_board):
    board: DaemonBoard = make_board(np.zeros(D))
    mine = side_of(board)
    mine.load()
    receive(mine, encoded(np.ones(D, np.float32)))
    mine.mix(0.5, "peer")
    assert mine.commit(7)
    now_D = np.empty(D, np.float32)
    assert board.now(now_D).policy_version == 7
    assert np.array_equal(now_D, np.full(D, 0.5))


@pytest.mark.parametrize(("wire", "width"), [("float32", 4), ("bf16", 2)])
def test_the_length_on_the_wire(wire, width):
    side = side_of(StillBoard(np.zeros(D, np.float32)), wire)
    assert len(side.outgoing) == D * width
    assert side.room(D * width) is not None
    assert side.room(D * width + 1) is None
