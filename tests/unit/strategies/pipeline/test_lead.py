"""A head's planning: long ones don't hold up the event loop."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.layers import FREE, Link
from p2pdrl.strategies.group.view import ViewKey
from p2pdrl.strategies.pipeline import lead
from p2pdrl.strategies.pipeline.calls import Unformed
from p2pdrl.strategies.pipeline.layout import Place
from p2pdrl.strategies.pipeline.messages import Offered
from p2pdrl.strategies.testing.stages import blocks_of

from .swarms import CONFIG


def head(ranks: int, blocks: int) -> lead.Lead:
    swarm = SimpleNamespace(node_id="0", name_of=str)
    return lead.Lead(
        SimpleNamespace(swarm=swarm, minibatches=1, rows=0),
        CONFIG,
        pipes=None,
        side=SimpleNamespace(layers=blocks_of(blocks)),
        peers=None,
        links=SimpleNamespace(between=free),
        key=ViewKey(1, 2, "0"),
        place=Place(0, tuple(str(number) for number in range(ranks))),
        offer_s=1.0,
        trial=None,
    )


async def free(_, members) -> dict[tuple[int, int], Link]:
    others = range(1, len(members))
    return {pair: FREE for other in others for pair in ((0, other), (other, 0))}


def offers(ranks: int, memory_bytes: int = 0) -> dict[str, Offered]:
    return {
        str(number): Offered("aa", 0, 0, b"", 0, 0.1, 6, "cpu", False, memory_bytes)
        for number in range(ranks)
    }


@pytest.mark.parametrize(("ranks", "blocks", "apart"), [(2, 6, False), (2, 40, False), (6, 40, True)])
async def test_what_takes_long_is_planned_in_a_thread(monkeypatch, ranks: int, blocks: int, apart: bool):
    threads = []
    design = lead.design

    def noted(*args, **more):
        threads.append(threading.current_thread())
        return design(*args, **more)

    monkeypatch.setattr(lead, "design", noted)
    planned = await head(ranks, blocks).plan(offers(ranks))
    assert planned.plan.ranks == ranks
    assert [thread is not threading.main_thread() for thread in threads] == [apart]


async def test_whoever_waits_for_a_long_plan_no_more_goes_at_once(monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def long(*_, **__):
        begun.set()
        go_on.wait(10.0)
        raise ConfigError("nobody hears this")

    monkeypatch.setattr(lead, "design", long)
    planning = asyncio.create_task(head(6, 40).plan(offers(6)))
    await asyncio.to_thread(begun.wait, 10.0)
    planning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await planning
    go_on.set()


async def test_a_model_that_fits_nowhere_is_no_use_to_try_again_soon():
    with pytest.raises(Unformed, match="doesn't fit one peer alone") as unformed:
        await head(1, 6).plan(offers(1, memory_bytes=5_000))
    assert (unformed.value.suspect, unformed.value.for_s) == ("", lead.UNFIT_S)
