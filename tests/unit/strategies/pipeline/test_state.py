"""Whose parameters count."""

from __future__ import annotations

import numpy as np
import pytest

from p2pdrl.strategies.pipeline.forming import newest, read_state
from p2pdrl.strategies.pipeline.messages import RankOffer
from p2pdrl.tensors.board import BoardSpec, DaemonBoard
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.shared_memory import SharedRegion


def offer(version: int, lineage: str = "aa", steps: int = 100) -> RankOffer:
    return RankOffer(lineage, steps, version, b"", 0, 1.0, 6, "cpu", False)


@pytest.mark.parametrize(
    ("offers", "wins"),
    [
        ({"b": offer(5), "a": offer(5), "c": offer(5)}, "b"),
        ({"b": offer(5), "a": offer(6), "c": offer(6)}, "a"),
        ({"b": offer(5), "a": offer(4), "c": offer(9)}, "c"),
        ({"b": offer(900), "a": offer(1, "zz", 101)}, "a"),
        ({"b": offer(1, "ab"), "a": offer(9, "ac")}, "b"),
        # In one lineage members know more or fewer of its steps.
        ({"b": offer(3, "zz", 50), "a": offer(2, "zz", 500), "c": offer(9, "yy", 400)}, "b"),
    ],
)
def test_the_newest(offers, wins):
    assert newest("b", offers) == wins


async def test_a_digest_tells_what_is_on_a_board_with_what_was_posted():
    spec = BoardSpec(Layout((TensorEntry("x", (4,)),)))
    region = SharedRegion.create(spec.nbytes, "state")
    board = DaemonBoard(region, spec)
    board.seed(np.arange(4, dtype=np.float32), None, 7)
    first = await read_state(board, 4)
    assert first.policy_version == 7
    assert await read_state(board, 4) == first
    board.post_delta(np.full(4, 0.5, np.float32), 8)
    second = await read_state(board, 4)
    assert second.digest != first.digest
    board.post_set(np.arange(4, dtype=np.float32), None, 7)
    assert await read_state(board, 4) == first
    region.close()
