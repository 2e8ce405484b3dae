"""Rounds of a group when all goes well, and when members come, die, freeze or fall behind."""

from __future__ import annotations

import asyncio
import dataclasses

import msgspec
import numpy as np
import pytest

from p2pdrl.config.strategy import FederatedConfig, GradAverageConfig
from p2pdrl.errors import PeerRefusedError, PeerTimeoutError, PeerUnreachableError
from p2pdrl.strategies.averaging import allreduce
from p2pdrl.strategies.averaging.catching_up import CatchingUp
from p2pdrl.strategies.averaging.messages import ROUTE, Ask
from p2pdrl.strategies.registry import build

from .bowls import GRADIENTS, PARAMETERS, SIZE, Bowls, mark, now, shared, stall_s, together, until

pytestmark = pytest.mark.looptime

BOTH = pytest.mark.parametrize("config", [GRADIENTS, PARAMETERS], ids=["gradients", "parameters"])
LEFT = pytest.mark.parametrize("left", [1, 2, 3])


@pytest.fixture(
    autouse=True, params=[1, pytest.param(1 << 16, marks=pytest.mark.slow)], ids=["all-own", "one-owns"]
)
def owners(request, monkeypatch):
    """Short vectors have one owner; cut as long ones are, all members own a piece."""
    monkeypatch.setattr(allreduce, "LEAST_PIECE", request.param)


@pytest.mark.parametrize(
    "config",
    [
        GRADIENTS,
        GradAverageConfig(),
        GradAverageConfig(compression="int8"),
        GradAverageConfig(compression="topk", keep=0.2),
        GradAverageConfig(mixing="trimmed"),
        GradAverageConfig(mixing="clipped"),
    ],
    ids=lambda config: f"{config.compression}-{config.mixing}",
)
async def test_replicas_stay_equal_bit_for_bit(config):
    async with Bowls(config) as bowls:
        await bowls.start()
        await until(lambda: min(node.strategy.outcomes.get("ok", 0) for node in bowls.nodes) >= 40)
        assert shared(bowls.nodes, 20) >= 19
        assert len({node.strategy.outcomes["ok"] for node in bowls.nodes}) <= 2
        for node in bowls.nodes:
            assert set(node.strategy.outcomes) == {"ok"}
            assert node.strategy.consensus_distance == 0.0
            assert node.swarm.strikes == []


async def test_gradients_are_weighted_by_samples():
    async with Bowls(nodes=0, learning_rate=0.5) as bowls:
        nodes = [bowls.add(samples=samples) for samples in (1, 3)]
        bowls.swarm.introduce()
        await bowls.start()
        await until(lambda: nodes[0].strategy.outcomes.get("ok", 0) > 60)
        expected = (nodes[0].target + 3 * nodes[1].target) / 4
        for node in nodes:
            assert np.allclose(node.learner.x, expected, atol=1e-5)
        merged = nodes[0].swarm.rounds[-1].merged
        assert [part.weight for part in merged] == [0.25, 0.75]


async def test_averaged_gradients_begin_with_everybodys_mean():
    """Whatever mode was before, the mean of all members' parameters is what it was; bf16 gradients too."""
    async with Bowls(GradAverageConfig(), learning_rate=0.0) as bowls:
        starts = np.array([node.learner.x for node in bowls.nodes], np.float64)
        await bowls.start()
        await until(lambda: min(node.strategy.outcomes.get("ok", 0) for node in bowls.nodes) >= 3)
        for node in bowls.nodes:
            assert np.allclose(node.learner.x, starts.mean(axis=0), atol=1e-6)
        assert together(bowls.nodes)
        assert sorted(len(node.swarm.adoptions) for node in bowls.nodes) == [0, 1, 1, 1]


async def test_only_members_of_the_founding_that_stays_count_in_the_beginning():
    async with Bowls(nodes=3, learning_rate=0.0) as bowls:
        foreign = bowls.nodes[1]
        foreign.swarm.says = msgspec.structs.replace(foreign.swarm.says, lineage="bb", lineage_steps=5)
        kept = [bowls.nodes[0].learner.x.copy(), bowls.nodes[2].learner.x.copy()]
        await bowls.start()
        await until(lambda: foreign.strategy.outcomes.get("ok", 0) >= 3)
        for node in bowls.nodes:
            assert np.allclose(node.learner.x, np.mean(kept, axis=0), atol=1e-6)


async def test_who_brings_poison_along_begins_with_the_mean_of_the_others():
    async with Bowls(nodes=3, learning_rate=0.0) as bowls:
        sick = bowls.nodes[0]
        sick.learner.x[3] = np.nan
        sick.learner.publish()
        expected = np.mean([node.learner.x for node in bowls.nodes[1:]], axis=0)
        await bowls.start()
        await until(lambda: min(node.strategy.outcomes.get("ok", 0) for node in bowls.nodes) >= 3)
        for node in bowls.nodes:
            assert np.allclose(node.learner.x, expected, atol=1e-6)
        assert any(kind == "poisoned" for kind, _ in sick.swarm.told)


@pytest.mark.parametrize("at_s", [0.02, 0.05, 0.06, 0.08, 0.1, 0.15, 0.25])
async def test_a_member_may_die_while_the_mean_is_made(at_s):
    async with Bowls(learning_rate=0.0) as bowls:
        starts = np.array([node.learner.x for node in bowls.nodes], np.float64)
        await bowls.start()
        await asyncio.sleep(at_s)
        await bowls.swarm.kill(bowls.nodes[0])
        living = bowls.swarm.living
        await until(lambda: min(node.strategy.outcomes.get("ok", 0) for node in living) >= 5)
        assert together(living)
        means = [starts.mean(axis=0), starts[1:].mean(axis=0)]
        assert any(np.allclose(living[0].learner.x, mean, atol=1e-6) for mean in means)


async def test_parameters_are_agreed_on_from_the_first_round():
    async with Bowls(PARAMETERS) as bowls:
        await bowls.start(4)
        starts = [node.learner.x.astype(np.float64) for node in bowls.nodes]
        await asyncio.gather(*(node.trained() for node in bowls.nodes))
        targets = [node.target.astype(np.float64) for node in bowls.nodes]
        locally = [t + 0.9**4 * (x - t) for x, t in zip(starts, targets, strict=True)]
        for node in bowls.nodes:
            assert np.allclose(node.learner.x, np.mean(locally, axis=0), atol=1e-6)
            assert np.array_equal(node.learner.x, bowls.nodes[0].learner.x)


async def test_the_mean_is_kept():
    """Without steps in between (gradient zero) no round moves the mean."""
    async with Bowls(PARAMETERS, gradient=np.zeros_like) as bowls:
        before = np.mean([node.learner.x for node in bowls.nodes], axis=0, dtype=np.float64)
        await bowls.start(40)
        await asyncio.gather(*(node.trained() for node in bowls.nodes))
        for node in bowls.nodes:
            assert np.allclose(node.learner.x, before, atol=1e-6)


async def test_a_round_is_reported():
    async with Bowls() as bowls:
        await bowls.start()
        await until(lambda: bowls.nodes[0].strategy.outcomes.get("ok", 0) >= 5)
        report = bowls.nodes[0].swarm.rounds[3]
        assert report.outcome == "ok"
        assert [part.peer for part in report.merged] == [node.id for node in bowls.nodes]
        assert sum(part.weight for part in report.merged) == pytest.approx(1.0)
        assert report.missing == ()
        assert 0 < report.seconds < 0.1
        assert report.waited_s >= report.seconds
        assert report.bytes_out > 0
        assert report.changed > 0
        assert bowls.nodes[0].strategy.facts["members"] == 4
        assert bowls.nodes[0].strategy.facts["round"] >= 5


async def test_each_member_moves_what_a_ring_moves(owners):
    if allreduce.LEAST_PIECE != 1:
        pytest.skip("with one owner he moves it all")
    async with Bowls() as bowls:
        await bowls.start()
        await until(lambda: bowls.nodes[0].strategy.outcomes.get("ok", 0) >= 5)
        for node in bowls.nodes:
            report = node.swarm.rounds[3]
            assert report.bytes_out == report.bytes_in == 2 * 4 * SIZE * 3 / 4
            assert report.round_trips == 3


@BOTH
async def test_a_killed_member_costs_less_than_two_seconds(config):
    async with Bowls(config) as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        at_s = now()
        await bowls.swarm.kill(bowls.nodes[2])
        await asyncio.sleep(4)
        rest = bowls.swarm.living
        assert max(stall_s(node, at_s) for node in rest) < 2.0
        assert len({mark(node)[0] for node in rest}) <= 2
        assert together(rest)
        assert len(rest[0].swarm.rounds[-1].merged) == 3


@BOTH
async def test_a_frozen_member_costs_no_more_than_patience_and_a_question(config):
    async with Bowls(config) as bowls:
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
async def test_who_joins_has_the_others_state_from_then_on(config):
    async with Bowls(config, nodes=3) as bowls:
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
    async with Bowls(config, nodes=2) as bowls:
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
    async with Bowls(config) as bowls:
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
        behind, ahead, lost = bowls.nodes
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


@BOTH
async def test_a_broken_connection_is_no_death(config):
    async with Bowls(config) as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        views = {node.strategy._averager.view.key for node in bowls.nodes}
        for node in bowls.nodes[:2]:
            lose_answers(node)
        await asyncio.sleep(1)
        assert {node.strategy._averager.view.key for node in bowls.nodes} == views
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


async def test_a_paused_learner_holds_the_others_up_once():
    async with Bowls() as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        paused, at_s = bowls.nodes[0], now()
        paused.learner.period_s = 20.0
        await asyncio.sleep(15)
        rest = bowls.nodes[1:]
        assert 2.0 < max(stall_s(node, at_s) for node in rest) < 4.5
        assert rest[0].strategy.outcomes["ok"] > 200
        assert rest[0].swarm.rounds[-1].missing == (paused.id,)
        paused.learner.period_s = 0.01
        await asyncio.sleep(15)
        assert together(bowls.nodes)
        assert rest[0].swarm.rounds[-1].missing == ()


@BOTH
@pytest.mark.parametrize("ends", ["stopped", "enough"])
async def test_a_paused_learner_keeps_nobody_from_ending(config, ends, monkeypatch):
    """Excused from rounds, its daemon must not look for a post again and again without a pause."""
    async with Bowls(config) as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        paused = bowls.nodes[0]
        paused.learner.period_s = 1000.0
        await until(lambda: paused.strategy._desk._excused)
        await until(lambda: paused.strategy._averager.busy)
        looks, real = [], paused.strategy._desk.next

        async def look():
            looks.append(now())
            assert len(looks) < 1000, "it looks without end"
            return await real()

        monkeypatch.setattr(paused.strategy._desk, "next", look)
        if ends == "enough":
            enough = paused.strategy.outcomes["ok"] + 5
            paused.strategy._context = dataclasses.replace(paused.strategy._context, max_exchanges=enough)
            await asyncio.sleep(5)
        at_s = now()
        await paused.strategy.stop(3.0)
        await paused.strategy.watch()
        assert now() - at_s < 2.0


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
    async with Bowls(config, nodes=3) as bowls:
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


@BOTH
async def test_halves_of_a_split_group_go_on_and_come_together_again(config):
    async with Bowls(config) as bowls:
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


@BOTH
async def test_a_lossy_network_slows_rounds_and_breaks_nothing(config):
    async with Bowls(config, seed=3) as bowls:
        bowls.network.loss = 0.01
        await bowls.start()
        await asyncio.sleep(30)
        bowls.network.loss = 0.0
        await asyncio.sleep(35)  # somebody doubted time and again comes back after 30 s
        assert together(bowls.nodes)
        assert all(node.swarm.strikes == [] for node in bowls.nodes)


async def part_of(node, to, vector, **changes) -> int:
    """Give a part by hand; return the status of the refusal."""
    view = to.strategy._averager.view
    ask = msgspec.structs.replace(Ask("part", view.key, mark(to)[0] + 1, 1.0, 10), **changes)
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
    for node in bowls.nodes:
        owner = node.strategy._averager._owner
        if owner is not None:
            return node, owner.piece.size
    raise AssertionError("nobody owns anything")


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
        key = owner.strategy._averager.view.key
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


async def test_rounds_begin_with_members_enough_and_end_at_the_bound():
    async with Bowls(nodes=2) as bowls:
        for node in bowls.nodes:
            context = node.context()
            node.strategy = build(
                node.config,
                type(context)(**{**vars(context), "max_exchanges": 5, "start_at_members": 2}),
            )
        bowls.nodes[0].swarm.peers, kept = {}, bowls.nodes[0].swarm.peers
        await bowls.start()
        await asyncio.sleep(1)
        assert bowls.nodes[0].strategy.outcomes == {}
        assert bowls.nodes[0].learner.updates > 10
        bowls.nodes[0].swarm.peers = kept
        await asyncio.sleep(4)
        assert [node.strategy.outcomes["ok"] for node in bowls.nodes] == [5, 5]
        before = bowls.nodes[0].learner.updates
        await asyncio.sleep(1)
        assert bowls.nodes[0].learner.updates > before + 10


@BOTH
async def test_stopping_leaves_nothing_behind(config):
    async with Bowls(config) as bowls:
        await bowls.start()
        await asyncio.sleep(2.005)
        began_s = now()
        await asyncio.gather(*(node.strategy.stop(1.0) for node in bowls.nodes))
        assert now() - began_s < 1.0
        for node in bowls.nodes:
            await node.strategy.watch()
            node._training.cancel()
        held = [node.learner.now() for node in bowls.nodes]
        await asyncio.sleep(2)
        for node, vector in zip(bowls.nodes, held, strict=True):
            assert np.array_equal(node.learner.now(), vector)
    names = {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}
    assert not names


async def test_federated_rounds_tell_what_they_give_away():
    config = FederatedConfig(noise_multiplier=1.0, participation=0.5, every_updates=2, deadline_s=4.0)
    async with Bowls(config) as bowls:
        await bowls.start()
        await until(lambda: bowls.nodes[0].strategy.facts["round"] >= 10)
        facts = bowls.nodes[0].strategy.facts
        assert 0 < facts["epsilon"] < 100
        assert facts["private_rounds"] >= 10
        assert len({node.learner.history[-1].tobytes() for node in bowls.nodes}) <= 4
