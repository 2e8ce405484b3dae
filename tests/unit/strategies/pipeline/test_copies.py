"""What one state copy moves, at each rank; what goes out at one comes in at its neighbours."""

from __future__ import annotations

import msgspec
import pytest

from p2pdrl.pipeline.layers import Layer
from p2pdrl.pipeline.plan import StageOrder
from p2pdrl.strategies.pipeline.generation import CopyBytes, copy_bytes, state_vectors
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout

from .swarms import CONFIG, swarm_of

LAYERS = [Layer(f"{size}", 0.1, 0.1, size, 1.0) for size in (100.0, 20.0, 3.0, 400.0)]


def moved(ranks: int, cuts: tuple[int, ...], schedule: str = "1f1b", vectors: int = 1) -> list[CopyBytes]:
    orders = [
        StageOrder(7, rank, 4, cuts, schedule, 4, ranks, 1.0, 1.0, 10)  # type: ignore[arg-type]
        for rank in range(ranks)
    ]
    return [copy_bytes(order, LAYERS, vectors) for order in orders]


def test_one_rank_moves_nothing():
    assert moved(1, ()) == [(0, 0)]


def test_of_two_the_last_sends_its_slice_and_gets_the_whole():
    assert moved(2, (1,)) == [(523, 423), (423, 523)]


def test_of_three_the_one_between_passes_all_on():
    # slices of 100, 23 and 400
    assert moved(3, (1, 3)) == [(523, 423), (423 + 523, 400 + 523), (400, 523)]
    assert moved(3, (1, 3), vectors=3)[2] == (1200, 3 * 523)


def test_an_interleaved_rank_has_several_stages():
    # slices of 100 + 3 and 20 + 400
    assert moved(2, (1, 2, 3), "interleaved") == [(523, 420), (420, 523)]


@pytest.mark.parametrize("cuts", [(1, 2), (1, 3), (2, 3)])
def test_what_goes_out_comes_in(cuts):
    each = moved(3, cuts)
    assert sum(one.bytes_out for one in each) == sum(one.bytes_in for one in each)


def test_the_state_has_the_optimizers_vectors():
    items = [("optimizer.m", (6,)), ("optimizer.v", (6,)), ("optimizer.steps", ()), ("moments.mean", (6,))]
    sidecar = SidecarLayout(tuple(SidecarItem(name, shape, "float32", "copy") for name, shape in items))
    assert state_vectors(BoardSpec(Layout((TensorEntry("w", (2, 3)),)), sidecar)) == 3
    assert state_vectors(BoardSpec(Layout((TensorEntry("w", (6,)),)))) == 1


@pytest.mark.looptime
async def test_rounds_of_a_pipeline_tell_their_bytes():
    async with swarm_of(3, msgspec.structs.replace(CONFIG, stages=3)) as swarm:
        await swarm.working("012")
        await swarm.until(lambda: all(node.strategy.outcomes.get("ok") for node in swarm.nodes))
        # 6 blocks of 1,000 bytes, two at each rank
        told = [(node.swarm.rounds[-1].bytes_out, node.swarm.rounds[-1].bytes_in) for node in swarm.nodes]
        assert told == [(6000, 4000), (10_000, 8000), (2000, 6000)]
