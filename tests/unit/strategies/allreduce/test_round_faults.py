"""Rounds of a group when members die, freeze, pause, are cut off, or send what can't be right."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter

import msgspec
import numpy as np
import pytest

from p2pdrl.errors import PeerRefusedError, PeerUnreachableError
from p2pdrl.strategies.allreduce import reduce_scatter
from p2pdrl.strategies.allreduce.averager import ROUTE, ReduceRequest
from p2pdrl.strategies.registry import build

from .bowls import Bowls, now, pieces_of, rounds_of, shared, stall_s, together, until
from .rounds_tried import BOTH, CALM_S

pytestmark = [pytest.mark.looptime, pytest.mark.usefixtures("owners")]


@BOTH
async def test_a_killed_member_costs_less_than_two_seconds(config):
    async with Bowls(config, period_s=CALM_S) as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        at_s = now()
        await bowls.swarm.kill(bowls.nodes[2])
        await asyncio.sleep(4)
        rest = bowls.swarm.living
        assert max(stall_s(node, at_s) for node in rest) < 2.0
        assert len({rounds_of(node) for node in rest}) <= 2
        assert together(rest)
        assert len(rest[0].swarm.rounds[-1].merged) == 3


@BOTH
async def test_a_frozen_member_costs_no_more_than_patience_and_a_question(config):
    async with Bowls(config, period_s=CALM_S) as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        at_s = now()
        bowls.network.freeze(bowls.nodes[1].id)
        await asyncio.sleep(5)
        rest = [node for node in bowls.nodes if node is not bowls.nodes[1]]
        assert max(stall_s(node, at_s) for node in rest) < 2.5
        bowls.network.thaw(bowls.nodes[1].id)
        await asyncio.sleep(5)
        assert together(bowls.nodes)
        assert len(rest[0].swarm.rounds[-1].merged) == 4


@BOTH
async def test_a_broken_connection_is_no_death(config):
    async with Bowls(config, period_s=CALM_S) as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        views = {node.group.view.key for node in bowls.nodes}
        for node in bowls.nodes[:2]:
            lose_answers(node)
        await asyncio.sleep(1)
        assert {node.group.view.key for node in bowls.nodes} == views
        assert together(bowls.nodes)


def lose_answers(node) -> None:
    """Let connections break before the answers to a node's parts of one round, once each."""
    call, lost = node.transport.call, set()

    async def losing(to, target, route, meta, **options):
        answer = await call(to, target, route, meta, **options)
        if route == ROUTE and target not in lost:
            lost.add(target)
            raise PeerUnreachableError("the connection broke")
        return answer

    node.transport.call = losing


@pytest.mark.slow
async def test_a_paused_learner_holds_the_others_up_once():
    async with Bowls(period_s=CALM_S) as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        paused, at_s = bowls.nodes[0], now()
        paused.learner.period_s = 20.0
        await asyncio.sleep(15)
        rest = bowls.nodes[1:]
        assert 2.0 < max(stall_s(node, at_s) for node in rest) < 4.5
        assert rest[0].strategy.outcomes["ok"] > 80
        assert rest[0].swarm.rounds[-1].missing == (paused.id,)
        paused.learner.period_s = 0.01
        await asyncio.sleep(15)
        assert together(bowls.nodes)
        assert rest[0].swarm.rounds[-1].missing == ()


@BOTH
@pytest.mark.parametrize("ends", ["stopped", "enough"])
async def test_a_paused_learner_keeps_nobody_from_ending(config, ends):
    """Excused from rounds, its daemon must not look for a post again and again without a pause."""
    enough = 40
    async with Bowls(config, period_s=CALM_S) as bowls:
        paused, other, *_ = bowls.nodes
        if ends == "enough":
            context = dataclasses.replace(paused.context(), max_exchanges=enough)
            paused.strategy = build(paused.config, context)
        await bowls.start()
        await until(lambda: paused.strategy.outcomes.get("ok", 0) >= 3)
        paused.learner.period_s = 1000.0
        await until(lambda: other.swarm.rounds[-1].missing == (paused.id,))
        if ends == "enough":
            await until(lambda: paused.strategy.outcomes["ok"] == enough)
            await asyncio.sleep(5)
            assert paused.strategy.outcomes["ok"] == enough
        at_s = now()
        await paused.strategy.stop(3.0)
        await paused.strategy.watch()
        assert now() - at_s < 2.0


@BOTH
async def test_halves_of_a_split_group_go_on_and_come_together_again(config):
    async with Bowls(config, period_s=CALM_S) as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        halves = bowls.nodes[:2], bowls.nodes[2:]
        for a in halves[0]:
            for b in halves[1]:
                bowls.network.cut(a.id, b.id)
        for half in halves:
            for node in half:
                node.swarm.peers = {other.id: other.address for other in half if other is not node}
        await asyncio.sleep(10)
        assert together(halves[0])
        assert together(halves[1])
        assert shared(bowls.nodes) == 0
        bowls.network.heal()
        bowls.swarm.introduce()
        await asyncio.sleep(10)
        assert together(bowls.nodes)
        assert len(bowls.nodes[0].swarm.rounds[-1].merged) == 4


@pytest.mark.slow
@BOTH
async def test_a_lossy_network_slows_rounds_and_breaks_nothing(config):
    async with Bowls(config, seed=3, period_s=CALM_S) as bowls:
        bowls.network.loss = 0.01
        await bowls.start()
        await asyncio.sleep(30)
        bowls.network.loss = 0.0
        await asyncio.sleep(35)  # somebody doubted time and again comes back after 30 s
        assert together(bowls.nodes)
        assert all(node.swarm.strikes == [] for node in bowls.nodes)


async def part_of(node, to, vector, **changes) -> int:
    """Give a part by hand; return the status of the refusal."""
    view = to.group.view
    ask = msgspec.structs.replace(ReduceRequest("part", view.key, rounds_of(to) + 1, 1.0, 10), **changes)
    with pytest.raises(PeerRefusedError) as caught:
        await node.transport.call(
            to.address,
            to.id,
            ROUTE,
            msgspec.msgpack.encode(ask),
            vector=vector.data.cast("B"),
            deadline_s=3.0,
            lane="bulk",
        )
    return caught.value.status


def owner_of(bowls):
    """A node that owns a piece, and how long that is."""
    sizes = {piece.owner: piece.size for piece in pieces_of(bowls)}
    owner = next(node for node in bowls.nodes if node.id in sizes)
    return owner, sizes[owner.id]


async def test_a_poisoned_part_is_refused_its_sender_struck_and_the_rest_go_on():
    async with Bowls() as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        owner, size = owner_of(bowls)
        bad = next(node for node in bowls.nodes if node is not owner)
        bad.learner.period_s = 1.0  # so that its own part doesn't come first
        await asyncio.sleep(1.1)
        at_s = now()
        assert await part_of(bad, owner, np.full(size, np.nan, np.float32)) == 422
        assert owner.swarm.strikes == [bad.id]
        await asyncio.sleep(5)
        assert max(stall_s(node, at_s) for node in bowls.nodes if node is not bad) < 3.0
        assert all(np.isfinite(node.learner.x).all() for node in bowls.nodes)


async def test_other_views_strangers_and_wrong_lengths_are_refused():
    async with Bowls() as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        owner, size = owner_of(bowls)
        other = next(node for node in bowls.nodes if node is not owner)
        good = np.zeros(size, np.float32)
        key = owner.group.view.key
        stale = msgspec.structs.replace(key, generation=key.generation - 1)
        assert await part_of(other, owner, good, key=stale) == 409
        assert await part_of(other, owner, good, key=msgspec.structs.replace(key, epoch=7)) == 409
        assert await part_of(other, owner, good, number=10**6) == 409
        assert await part_of(other, owner, good, weight=0.0) == 400
        assert await part_of(other, owner, good[:0], weight=1.0) == 400
        other.learner.period_s = 1.0
        await asyncio.sleep(1.1)
        assert await part_of(other, owner, np.zeros(size + 1, np.float32)) == 400
        owner.swarm.held = {other.id}
        assert await part_of(other, owner, good) == 403


async def test_an_owner_that_answers_rubbish_is_struck():
    async with Bowls(nodes=3) as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        owner, _ = owner_of(bowls)
        others = [node for node in bowls.nodes if node is not owner]
        for node in others:
            spoil_answers(node, owner.id)
        await asyncio.sleep(3)
        assert all(owner.id in node.swarm.strikes for node in others)
        assert all(np.isfinite(node.learner.x).all() for node in others)


def spoil_answers(node, owner) -> None:
    """Let what one owner answers be NaN, once."""
    call, done = node.transport.call, []

    async def spoiling(to, target, route, meta, *, into=None, **options):
        def room(meta, nbytes):
            rooms.append(into(meta, nbytes))
            return rooms[-1]

        rooms = []
        answer = await call(to, target, route, meta, into=into and room, **options)
        if route == ROUTE and target == owner and rooms and not done:
            done.append(True)
            np.frombuffer(rooms[-1], np.float32)[:] = np.nan
        return answer

    node.transport.call = spoiling


async def test_a_learner_whose_gradient_is_nan_spoils_nobodys():
    async with Bowls() as bowls:
        bad = bowls.nodes[3]
        good = bad.learner.gradient
        await bowls.start()
        await asyncio.sleep(3)
        bad.learner.gradient = lambda x: np.full_like(x, np.nan)
        await asyncio.sleep(2)
        bad.learner.gradient = good
        await asyncio.sleep(3)
        assert together(bowls.nodes)
        assert all(np.isfinite(node.learner.x).all() for node in bowls.nodes)
        assert "poisoned" in dict(bad.swarm.told)
        assert not any(node.swarm.strikes for node in bowls.nodes)


@BOTH
async def test_a_view_that_ends_as_its_round_does_ends_for_the_owner_too(config, monkeypatch):
    """The result counts no longer; the owner has all parts of it, and must not look again for ever."""
    monkeypatch.setattr(reduce_scatter, "LEAST_PIECE", 1 << 16)  # one owner
    async with Bowls(config, nodes=2, period_s=CALM_S) as bowls:
        views = Counter()
        for node in bowls.nodes:
            renew_as_parts_come(node, views)
        await bowls.start()
        await until(lambda: len(views) >= 2 * STEPS, 120)
        for node in bowls.nodes:
            node.answer = node.strategy.answer
        await until(lambda: together(bowls.nodes))


STEPS = 24
"""In how many steps of its loop, at most, an owner comes from the last part to the end of a round."""


def renew_as_parts_come(node, views: Counter) -> None:
    """Ask for a new view so many steps after the second part of each came to its owner: 0, 1, 2 …"""

    async def answer(incoming):
        if incoming.route == ROUTE:
            view = node.group.view
            ask = msgspec.msgpack.decode(incoming.meta, type=ReduceRequest)
            if ask.what == "part" and view is not None and ask.key == view.key:
                views[view.key] += 1
                if views[view.key] == 2:
                    after(len(views) % STEPS, lambda: node.group.renew(view.key, "for the test"))
        return await node.strategy.answer(incoming)

    node.answer = answer


def after(steps: int, work) -> None:
    """Do ``work`` when the loop has gone round so often."""
    if steps:
        asyncio.get_running_loop().call_soon(after, steps - 1, work)
    else:
        work()
