"""Members that come, fall behind or lost their place: each takes the last result, or another's state."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from p2pdrl.config.strategy import GradAverageConfig
from p2pdrl.errors import PeerTimeoutError
from p2pdrl.strategies.averaging import allreduce
from p2pdrl.strategies.averaging.catching_up import CatchingUp
from p2pdrl.strategies.averaging.messages import ROUTE, Ask

from .bowls import GRADIENTS, PARAMETERS, SIZE, Bowls, mark, now, stall_s, together, until
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
        number = mark(bowls.nodes[0])[0] + 3
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
        if left < 3 and allreduce.LEAST_PIECE == 1:
            assert sum(node.fetched for node in bowls.nodes[:left]) >= 1


def hold_answers(node, number) -> list[bytes]:
    """Let the answers to a node's parts of one round never come in; the list fills when that happens."""
    call, held = node.transport.call, []

    async def holding(to, target, route, meta, **options):
        answer = await call(to, target, route, meta, **options)
        if route == ROUTE:
            ask = msgspec.msgpack.decode(meta, type=Ask)
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
        behind, ahead, lost = sorted(bowls.nodes, key=lambda node: not node.strategy._averager._others)
        adoptions = len(behind.swarm.adoptions)
        held = hold_answers(behind, mark(behind)[0] + 3)
        begin_late(ahead)
        await until(lambda: held)
        await asyncio.sleep(0.02)
        await bowls.swarm.kill(lost)
        await asyncio.sleep(4)
        assert together([behind, ahead])
        assert len(behind.swarm.adoptions) == adoptions
        assert behind.fetched >= 1


def begin_late(node, pause_s=0.3) -> None:
    """Let a node come late to each view from now on."""
    begin = node.strategy._in_view

    async def late(active):
        await asyncio.sleep(pause_s)
        await begin(active)

    node.strategy._in_view = late


async def test_who_missed_a_round_of_one_alone_takes_its_state():
    """Alone it stepped with its own gradient as it is, which the round's result isn't."""
    async with Bowls(GradAverageConfig(deadline_s=4.0), nodes=2) as bowls:
        here, away = bowls.nodes
        await bowls.start()
        await asyncio.sleep(3)
        ask_late(away)
        here.learner.period_s = 0.3  # one round, and it is found again
        await asyncio.sleep(1)
        number = mark(here)[0]
        bowls.network.freeze(away.id)
        here.swarm.peers = {}
        await until(lambda: mark(here)[0] > number)
        bowls.network.thaw(away.id)
        bowls.swarm.introduce()
        assert (mark(here)[0], mark(away)[0]) == (number + 1, number)
        await asyncio.sleep(5)
        assert mark(here) == mark(away)
        assert together(bowls.nodes)


def ask_late(node) -> None:
    """Let who has a round's result be in the new view before ``node`` asks for it."""
    call = node.transport.call

    async def late(to, target, route, meta, **options):
        if route == ROUTE and msgspec.msgpack.decode(meta, type=Ask).what == "result":
            await asyncio.sleep(0.05)
        return await call(to, target, route, meta, **options)

    node.transport.call = late


async def test_who_took_a_state_has_no_result_to_give(monkeypatch):
    kept, arrived = [], CatchingUp.arrived

    def note(self):
        before = self.kept
        arrived(self)
        kept.append((before, self.kept))

    async with Bowls() as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        monkeypatch.setattr(CatchingUp, "arrived", note)
        bowls.nodes[0].learner._number = 0
        await asyncio.sleep(3)
    ((before, after),) = kept
    assert before is not None
    assert after is None


@pytest.mark.parametrize("ends", ["view", "strategy"])
async def test_who_fetches_a_result_is_free_when_that_is_over(ends):
    """The one who has the last round's result goes silent: nobody waits for it longer than its view lasts."""
    async with Bowls(PARAMETERS) as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        behind = bowls.nodes[0]
        held, asking = hold_answers(behind, mark(behind)[0] + 3), []
        call = behind.transport.call

        async def silent(to, target, route, meta, **options):
            if route == ROUTE and msgspec.msgpack.decode(meta, type=Ask).what == "result":
                asking.append(target)
                await asyncio.sleep(options["deadline_s"])
                raise PeerTimeoutError("it went silent")
            return await call(to, target, route, meta, **options)

        behind.transport.call = silent
        await until(lambda: held)
        await bowls.swarm.kill(bowls.nodes[3])
        await until(lambda: asking)
        at_s, key = now(), behind.strategy._group.view.key
        if ends == "strategy":
            await behind.strategy.stop(1.0)
        else:
            behind.strategy._group.renew(key, "the test says so")
            await until(lambda: (at := behind.strategy._averager) is not None and at.view.key > key)
        assert now() - at_s < 1.5


async def test_a_learner_that_starts_again_takes_a_members_state():
    async with Bowls() as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        node = bowls.nodes[0]
        before = len(node.swarm.adoptions)
        node.learner._number = 0
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
