"""A coordinator's planning: long ones don't hold up the event loop."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from p2pdrl.errors import ConfigError
from p2pdrl.group.view import ViewKey
from p2pdrl.pipeline.layers import FREE, PeerLink
from p2pdrl.strategies.pipeline import forming
from p2pdrl.strategies.pipeline.connections import Unformed
from p2pdrl.strategies.pipeline.layout import PipelineMembers
from p2pdrl.strategies.pipeline.messages import RankOffer
from p2pdrl.testing.fake_stages import blocks_of

from .swarms import CONFIG


def coordinator(ranks: int, blocks: int) -> forming.Coordinator:
    swarm = SimpleNamespace(node_id="0", name_of=str)
    parts = SimpleNamespace(
        context=SimpleNamespace(swarm=swarm, minibatches=1, rows=0),
        config=CONFIG,
        side=SimpleNamespace(layers=blocks_of(blocks)),
        links=SimpleNamespace(between=free),
    )
    pipeline = PipelineMembers(0, tuple(str(number) for number in range(ranks)))
    return forming.Coordinator(
        parts, SimpleNamespace(address=None), ViewKey(1, 2, "0"), pipeline, offer_s=1.0
    )


async def free(_, members) -> dict[tuple[int, int], PeerLink]:
    others = range(1, len(members))
    return {pair: FREE for other in others for pair in ((0, other), (other, 0))}


def offers(ranks: int, memory_bytes: int = 0) -> dict[str, RankOffer]:
    return {
        str(number): RankOffer("aa", 0, 0, b"", 0, 0.1, 6, "cpu", False, memory_bytes)
        for number in range(ranks)
    }


@pytest.mark.parametrize(("ranks", "blocks", "apart"), [(2, 6, False), (2, 40, False), (6, 40, True)])
async def test_what_takes_long_is_planned_in_a_thread(monkeypatch, ranks: int, blocks: int, apart: bool):
    threads = []
    design = forming.design

    def noted(*args, **more):
        threads.append(threading.current_thread())
        return design(*args, **more)

    monkeypatch.setattr(forming, "design", noted)
    planned = await coordinator(ranks, blocks).plan(offers(ranks))
    assert planned.plan.ranks == ranks
    assert [thread is not threading.main_thread() for thread in threads] == [apart]


async def test_whoever_waits_for_a_long_plan_no_more_goes_at_once(monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def long(*_, **__):
        begun.set()
        go_on.wait(10.0)
        raise ConfigError("nobody hears this")

    monkeypatch.setattr(forming, "design", long)
    planning = asyncio.create_task(coordinator(6, 40).plan(offers(6)))
    await asyncio.to_thread(begun.wait, 10.0)
    planning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await planning
    go_on.set()


async def test_a_model_that_fits_nowhere_is_no_use_to_try_again_soon():
    with pytest.raises(Unformed, match="doesn't fit one peer alone") as unformed:
        await coordinator(1, 6).plan(offers(1, memory_bytes=5_000))
    assert (unformed.value.suspect, unformed.value.for_s) == ("", forming.UNFIT_S)
