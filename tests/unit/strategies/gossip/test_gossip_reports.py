"""Each exchange is told in figures, in both roles; weights and clipping by hand."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from p2pdrl.strategies.gossip.adpsgd import ExchangeHead, Freshness, fresh_weight
from p2pdrl.strategies.protocol import Merged

pytestmark = pytest.mark.looptime


async def meet(swarm, **options):
    """Two nodes after one exchange that the first began."""
    config = msgspec.structs.replace(swarm.config, **options)
    a, b = await swarm.grow(2, config)
    return a, b


async def begin(a, seconds: float = 0.5) -> None:
    a.strategy.updated(1)
    await asyncio.sleep(seconds)


async def test_both_sides_report_who_was_merged_and_what_changed(swarm):
    a, b = await meet(swarm, weight=0.25)
    b.say(policy_version=25)
    distance = float(np.linalg.norm(a.now() - b.now()))
    await begin(a)
    (mine,), (theirs,) = a.swarm.rounds, b.swarm.rounds
    assert (mine.outcome, theirs.outcome) == ("ok", "answered")
    assert mine.merged == (Merged(a.id, 0.75), Merged(b.id, 0.25, -15))
    assert theirs.merged == (Merged(b.id, 0.75), Merged(a.id, 0.25, 15))
    for report in (mine, theirs):
        assert report.changed == pytest.approx(0.25 * distance, rel=1e-5)
        assert report.distance == pytest.approx(distance, rel=1e-5)
        assert (report.bytes_in, report.bytes_out) == (64, 64)
        assert (report.waited_s, report.missing, report.error) == (0.0, (), "")
    assert (mine.round_trips, theirs.round_trips) == (1, 0)
    assert mine.seconds == pytest.approx(0.02)


async def test_equal_vectors_are_fine(swarm):
    a, b = await meet(swarm)
    b.own.publish(a.x_D, None, b.version)
    await begin(a)
    assert a.strategy.outcomes == {"ok": 1}
    assert (a.swarm.rounds[0].changed, a.swarm.rounds[0].distance) == (0.0, 0.0)


async def test_a_step_that_changes_nothing_isnt_ok(swarm):
    a, b = await meet(swarm)
    a.swarm.trusts[b.swarm.node_id] = 0.0
    await begin(a)
    assert a.strategy.outcomes == {"unchanged": 1}
    assert not a.moved()
    assert "nothing" in a.swarm.rounds[0].error


async def test_a_failure_is_told_in_words(swarm, network):
    a, b = await meet(swarm)
    network.cut(a.id, b.id)
    await begin(a, 1.5)
    report = a.swarm.rounds[0]
    assert (report.outcome, report.missing, report.merged) == ("timeout", (b.id,), ())
    assert "within 1 s" in report.error


async def test_the_deadline_tunes_itself(swarm, network):
    a, b = await meet(swarm)
    for _ in range(6):
        await begin(a)
    network.freeze(b.id)
    await begin(a, 0.3)
    assert a.strategy.outcomes == {"ok": 6, "timeout": 1}
    assert a.swarm.rounds[-1].seconds == pytest.approx(0.25)
    network.thaw(b.id)


async def test_fresh_weights_follow_steps_and_lag(swarm):
    a, b = await meet(swarm, merge_weights="fresh")
    a.swarm.steps, b.swarm.steps = 99, 299
    b.say(policy_version=60)
    a0_D, b0_D = a.now(), b.now()
    to_a = fresh_weight(0.5, Freshness(99, 10), Freshness(299, 60))
    await begin(a)
    assert np.allclose(a.now(), a0_D + to_a * (b0_D - a0_D), atol=1e-6)
    assert np.allclose(a.now(), b.now(), atol=1e-6)
    moved_D = (a.now() + b.now() - a0_D - b0_D) / 2
    assert np.allclose(moved_D, (2 * to_a - 1) * (b0_D - a0_D) / 2, atol=1e-6)
    assert a.swarm.rounds[0].merged[1].weight == pytest.approx(to_a)
    assert b.swarm.rounds[0].merged[1].weight == pytest.approx(1 - to_a)
    told = listen(a), listen(b)
    for node in (a, b):
        node.strategy.updated(1)
        await asyncio.sleep(0.5)
    assert [[head.fresh_steps for head in heads] for heads in told] == [[0], [0]]


def listen(node) -> list[ExchangeHead]:
    """Heads of the exchanges that a node begins from now on."""
    call, heads = node.transport.call, []

    async def listening(to, peer, route, meta, **options):
        heads.append(msgspec.msgpack.decode(meta, type=ExchangeHead))
        return await call(to, peer, route, meta, **options)

    node.transport.call = listening
    return heads


async def test_steps_made_during_an_exchange_count_for_the_next(swarm, network):
    a, b = await meet(swarm, merge_weights="fresh")
    a.swarm.steps = 50
    network.cut(a.id, b.id)
    await begin(a, 1.2)
    told = listen(a)
    network.heal()
    a.strategy.updated(1)
    await asyncio.sleep(0.505)
    a.swarm.steps += 7
    await asyncio.sleep(1)
    assert a.strategy.outcomes["ok"] == 1
    await begin(a, 1)
    assert sum(head.fresh_steps for head in told) == 57  # the 50 came to nothing before


async def test_clipping_bounds_the_step(swarm):
    a, b = await meet(swarm, mixing="clipped", clip_distance=0.5)
    a0_D, b0_D = a.now(), b.now()
    b.own.publish(b0_D * 100, None, b.version)
    b0_D = b.now()
    await begin(a)
    apart_D = b0_D - a0_D
    longest = 0.5 * 0.1 * np.linalg.norm(a0_D)  # half of what one peer counts for at first
    assert np.allclose(a.now(), a0_D + 0.5 * longest * apart_D / np.linalg.norm(apart_D), atol=1e-5)
    assert np.linalg.norm(b.now() - b0_D) <= 0.5 * 0.5 * 0.1 * np.linalg.norm(b0_D) * (1 + 1e-5)
    assert a.swarm.rounds[0].changed == pytest.approx(longest / 2, rel=1e-5)
    assert a.swarm.rounds[0].distance == pytest.approx(np.linalg.norm(apart_D), rel=1e-5)


async def test_stop_waits_for_an_exchange_that_a_peer_began(swarm):
    a, b = await meet(swarm)
    a.strategy.updated(1)
    await asyncio.sleep(0.015)  # b has answered; its answer is under way
    began_s = asyncio.get_running_loop().time()
    await b.strategy.stop(1.0)
    assert 0.001 < asyncio.get_running_loop().time() - began_s < 0.1
    assert b.strategy.outcomes == {"answered": 1}
    assert np.allclose(a.now(), b.now(), atol=1e-6)


async def test_stop_waits_no_longer_than_it_may(swarm, network):
    a, b = await meet(swarm)
    a.strategy.updated(1)
    await asyncio.sleep(0.015)
    network.freeze(a.id)  # b's answer is under way for ever
    began_s = asyncio.get_running_loop().time()
    await b.strategy.stop(0.5)
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(0.5)
    network.thaw(a.id)


async def test_after_stop_nothing_touches_the_board(swarm):
    a, b = await meet(swarm)
    a.strategy.updated(1)
    await asyncio.sleep(0.015)
    await b.strategy.stop(0.0)
    await asyncio.sleep(0.5)
    assert b.strategy.outcomes == {"unsure": 1}
    assert not b.moved()
