"""Members that come, fall behind or lost their place: each takes the last result, or another's state."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import numpy as np
import pytest

from p2pdrl.config.strategy import GradAverageConfig
from p2pdrl.errors import PeerRefusedError, PeerTimeoutError
from p2pdrl.strategies.allreduce import reduce_scatter
from p2pdrl.strategies.allreduce.averager import ROUTE, ReduceRequest
from p2pdrl.transport.protocol import Refusal

from .bowls import GRADIENTS, PARAMETERS, SIZE, Bowls, now, pieces_of, rounds_of, stall_s, together, until
from .rounds_tried import BOTH, CALM_S

pytestmark = [pytest.mark.looptime, pytest.mark.usefixtures("owners")]

LEFT = pytest.mark.parametrize("left", [1, 2, 3])


@BOTH
async def test_who_joins_has_the_others_state_from_then_on(config):
    async with Bowls(config, nodes=3, period_s=CALM_S) as bowls:
        await bowls.start()
        await asyncio.sleep(4)
        at_s = now()
        newcomer = bowls.add()
        bowls.swarm.introduce()
        await bowls.start(nodes=[newcomer])
        await asyncio.sleep(6)
        assert together(bowls.nodes)
        assert max(stall_s(node, at_s) for node in bowls.nodes[:3]) < 2.0
        assert len(newcomer.swarm.rounds[-1].merged) == 4
        assert bool(newcomer.swarm.adoptions) == (config is GRADIENTS)


@BOTH
async def test_momentum_of_the_outer_optimizer_comes_with_the_state(config):
    if config is GRADIENTS:
        pytest.skip("nothing outer")
    config = msgspec.structs.replace(config, outer_momentum=0.9, outer_learning_rate=0.7)
    async with Bowls(config, nodes=2, period_s=CALM_S) as bowls:
        await bowls.start()
        await asyncio.sleep(2)
        bowls.add()
        bowls.swarm.introduce()
        await bowls.start(nodes=bowls.nodes[2:])
        await asyncio.sleep(4)
        assert together(bowls.nodes)


@BOTH
@LEFT
async def test_a_round_that_only_some_completed_is_taken_from_them(config, left):
    """Some don't get the last answers of a round before a member dies: they fetch its result afterwards."""
    async with Bowls(config, period_s=CALM_S) as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        adoptions = sum(len(node.swarm.adoptions) for node in bowls.nodes)
        number = rounds_of(bowls.nodes[0]) + 3
        held = [hold_answers(node, number) for node in bowls.nodes[:left]]
        await until(lambda: any(held))
        await asyncio.sleep(0.02)
        at_s = now()
        await bowls.swarm.kill(bowls.nodes[3])
        await asyncio.sleep(5)
        rest = bowls.swarm.living
        assert together(rest)
        assert max(stall_s(node, at_s) for node in rest) < 3.0
        rounds = {len([r for r in node.swarm.rounds if r.outcome == "ok"]) for node in rest}
        assert max(rounds) - min(rounds) <= 1
        assert sum(len(node.swarm.adoptions) for node in bowls.nodes) == adoptions
        if left < 3 and reduce_scatter.LEAST_PIECE == 1:
            assert sum(node.fetched for node in bowls.nodes[:left]) >= 1


async def test_what_compression_lost_of_a_round_counts_though_its_result_came_afterwards(monkeypatch):
    """The part of who missed the last answers is in the result: its next part mustn't have that again."""
    counted, count = Counter(), reduce_scatter.PieceWriter.counted

    def counting(writer):
        counted[writer] += 1
        count(writer)

    monkeypatch.setattr(reduce_scatter.PieceWriter, "counted", counting)
    lossy = msgspec.structs.replace(GRADIENTS, compression="int8")
    async with Bowls(lossy, period_s=CALM_S) as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        late = bowls.nodes[0]
        held = hold_answers(late, rounds_of(late) + 3)
        await until(lambda: held)
        await asyncio.sleep(0.02)
        await bowls.swarm.kill(bowls.nodes[3])
        await asyncio.sleep(5)
        assert together(bowls.swarm.living)
        assert late.fetched >= 1
        assert sorted(counted.values()) == sorted(rounds_of(node) for node in bowls.nodes)


def hold_answers(node, number) -> list[bytes]:
    """Let the answers to a node's parts of one round never come in; the list fills when that happens."""
    call, held = node.transport.call, []

    async def holding(to, target, route, meta, **options):
        answer = await call(to, target, route, meta, **options)
        if route == ROUTE:
            ask = msgspec.msgpack.decode(meta, type=ReduceRequest)
            node.fetched = getattr(node, "fetched", 0) + (ask.what == "result")
            if ask.what == "part" and ask.number == number and (not held or ask.key == held[0]):
                held.append(ask.key)
                await asyncio.Event().wait()
        return answer

    node.transport.call = holding
    return held


async def test_who_asks_before_the_other_has_begun_with_their_view_asks_again():
    """Two are left; the one that has the last round's result comes to the new view a moment later."""
    async with Bowls(nodes=3) as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        # Where one owns all, nobody answers him.
        owners = {piece.owner for piece in pieces_of(bowls)}
        behind, ahead, lost = sorted(bowls.nodes, key=lambda node: owners == {node.id})
        adoptions = len(behind.swarm.adoptions)
        held = hold_answers(behind, rounds_of(behind) + 3)
        begin_late(ahead)
        await until(lambda: held)
        await asyncio.sleep(0.02)
        await bowls.swarm.kill(lost)
        await asyncio.sleep(4)
        assert together([behind, ahead])
        assert len(behind.swarm.adoptions) == adoptions
        assert behind.fetched >= 1


def begin_late(node, pause_s=0.3) -> None:
    """Let a node say for a while, from the first question on, that it hasn't begun with the view."""
    asked_s = []

    async def late(incoming):
        if (
            incoming.route == ROUTE
            and msgspec.msgpack.decode(incoming.meta, type=ReduceRequest).what == "result"
        ):
            asked_s.append(now())
            if now() < asked_s[0] + pause_s:
                raise Refusal(409, "not begun yet")
        return await node.strategy.answer(incoming)

    node.answer = late


async def test_who_missed_a_round_of_one_alone_takes_its_state():
    """Alone it stepped with its own gradient as it is, which the round's result isn't."""
    async with Bowls(GradAverageConfig(deadline_s=4.0), nodes=2) as bowls:
        here, away = bowls.nodes
        await bowls.start()
        await asyncio.sleep(3)
        ask_late(away)
        here.learner.period_s = 0.3  # one round, and it is found again
        await asyncio.sleep(1)
        number = rounds_of(here)
        bowls.network.freeze(away.id)
        here.swarm.peers = {}
        await until(lambda: rounds_of(here) > number)
        bowls.network.thaw(away.id)
        bowls.swarm.introduce()
        assert (rounds_of(here), rounds_of(away)) == (number + 1, number)
        await asyncio.sleep(5)
        assert abs(rounds_of(here) - rounds_of(away)) <= 1
        assert together(bowls.nodes)


def ask_late(node) -> None:
    """Let who has a round's result be in the new view before ``node`` asks for it."""
    call = node.transport.call

    async def late(to, target, route, meta, **options):
        if route == ROUTE and msgspec.msgpack.decode(meta, type=ReduceRequest).what == "result":
            await asyncio.sleep(0.05)
        return await call(to, target, route, meta, **options)

    node.transport.call = late


async def test_who_took_a_state_has_no_result_to_give():
    async with Bowls() as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        taker, asker = bowls.nodes[:2]
        assert await result_of(taker, asker) == 0
        for node in bowls.nodes:
            node.learner.period_s = 1.0
        adoptions = len(taker.swarm.adoptions)
        taker.learner.restart()
        await until(lambda: len(taker.swarm.adoptions) > adoptions)
        await asyncio.sleep(0.1)  # before the next round
        assert await result_of(taker, asker) == 410
        await asyncio.sleep(3)
        assert await result_of(taker, asker) == 0


async def result_of(giver, asker) -> int:
    """Ask for the last round's result by hand; return the status of the refusal, 0 for an answer."""
    room = memoryview(bytearray(4 * SIZE))
    try:
        await asker.transport.call(
            giver.address,
            giver.id,
            ROUTE,
            msgspec.msgpack.encode(ReduceRequest("result", giver.group.view.key, rounds_of(giver))),
            into=lambda *_: room,
            deadline_s=4.0,
        )
    except PeerRefusedError as refusal:
        return refusal.status
    return 0


@pytest.mark.parametrize("ends", ["view", "strategy"])
async def test_who_fetches_a_result_is_free_when_that_is_over(ends):
    """The one who has the last round's result goes silent: nobody waits for it longer than its view lasts."""
    async with Bowls(PARAMETERS) as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        behind = bowls.nodes[0]
        held, asking = hold_answers(behind, rounds_of(behind) + 3), []
        call = behind.transport.call

        async def silent(to, target, route, meta, **options):
            ask = msgspec.msgpack.decode(meta, type=ReduceRequest) if route == ROUTE else None
            if ask is not None and ask.what == "result":
                asking.append(ask.key)
                await asyncio.sleep(options["deadline_s"])
                raise PeerTimeoutError("it went silent")
            return await call(to, target, route, meta, **options)

        behind.transport.call = silent
        await until(lambda: held)
        await bowls.swarm.kill(bowls.nodes[3])
        await until(lambda: asking)
        at_s, key = now(), behind.group.view.key
        if ends == "strategy":
            await behind.strategy.stop(1.0)
        else:
            behind.group.renew(key, "the test says so")
            await until(lambda: asking[-1] > key)  # in the new view it asks anew
        assert now() - at_s < 1.5


async def test_a_learner_that_starts_again_takes_a_members_state():
    async with Bowls() as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        node = bowls.nodes[0]
        before = len(node.swarm.adoptions)
        node.learner.restart()
        node.learner.x = node.learner.x + 1
        await asyncio.sleep(3)
        assert len(node.swarm.adoptions) == before + 1
        assert together(bowls.nodes)


async def test_the_state_of_another_member_than_asked_for_isnt_taken_for_the_right_one():
    """A donor that serves enough others sends askers on: what comes then is looked at."""
    async with Bowls(nodes=3) as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        newcomer = bowls.add()
        take, wrong = newcomer.swarm.take, []

        async def elsewhere(donor):
            if len(wrong) < 2:
                wrong.append(donor)
                newcomer.learner.board.post_set(np.ones(SIZE, np.float32), None, 5)
                return True
            return await take(donor)

        newcomer.swarm.take = elsewhere
        bowls.swarm.introduce()
        await bowls.start(nodes=[newcomer])
        await asyncio.sleep(4)
        assert len(newcomer.swarm.adoptions) == 3
        assert together(bowls.nodes)


async def test_a_state_that_the_node_replaced_is_noticed():
    async with Bowls() as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        node = bowls.nodes[1]
        before = len(node.swarm.adoptions)
        node.learner.board.post_set(np.ones(SIZE, np.float32), None, 99)
        await asyncio.sleep(3)
        assert len(node.swarm.adoptions) == before + 1
        assert together(bowls.nodes)


@BOTH
async def test_another_lineage_adopts_before_it_takes_part(config):
    async with Bowls(config, nodes=3, period_s=CALM_S) as bowls:
        stranger = bowls.nodes[1]
        stranger.swarm.says = msgspec.structs.replace(stranger.swarm.says, lineage="bb", lineage_steps=50)

        async def take(donor, take=stranger.swarm.take):
            stranger.swarm.says = msgspec.structs.replace(stranger.swarm.says, lineage="aa")
            return await take(donor)

        stranger.swarm.take = take
        await bowls.start()
        await asyncio.sleep(5)
        assert stranger.swarm.adoptions
        assert stranger.swarm.says.lineage == "aa"
        assert together(bowls.nodes)


async def test_alone_it_goes_on_by_itself_and_takes_others_in():
    async with Bowls(nodes=1) as bowls:
        await bowls.start()
        await asyncio.sleep(2)
        assert bowls.nodes[0].strategy.outcomes["ok"] > 40
        bowls.add()
        bowls.swarm.introduce()
        await bowls.start(nodes=bowls.nodes[1:])
        await asyncio.sleep(4)
        assert together(bowls.nodes)
