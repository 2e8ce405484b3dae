"""What every strategy does with messages that nobody honest sends."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from p2pdrl.strategies.protocol import ROUTES
from p2pdrl.testing.virtual_swarm import SimNode
from p2pdrl.transport.framing import join_views
from p2pdrl.transport.protocol import Incoming, Reply

from .crowd import SIZE, Crowd, Sent, moved
from .promises import Case, every_and_staged, every_tried, tried_and_staged

pytestmark = pytest.mark.looptime

POISONS = {
    "nan": lambda vector: np.full(len(vector) // 4, np.nan, np.float32).tobytes(),
    "huge": lambda vector: np.full(len(vector) // 4, 1e30, np.float32).tobytes(),
    "far": lambda vector: np.full(len(vector) // 4, 9e5, np.float32).tobytes(),
    "short": lambda vector: vector[:-4],
    "long": lambda vector: vector + bytes(4),
    "empty": lambda vector: b"",
}


async def with_a_liar(case: Case) -> tuple[Crowd, SimNode, list[SimNode]]:
    """Four nodes that learn nothing, one of which is going to lie; rounds happen."""
    crowd = Crowd(case, learning_rate=0.0)
    await crowd.start()
    await crowd.rounds(2)
    liar = max(crowd.nodes, key=lambda node: len(said(crowd, node)))  # not all of them call others
    return crowd, liar, [node for node in crowd.nodes if node is not liar]


def said(crowd: Crowd, node: SimNode) -> list[Sent]:
    """What a node sent with a vector on the strategy's own route."""
    return [sent for sent in node.transport.sent if sent.route == crowd.case.route and sent.vector]


@every_tried
async def test_poison_moves_nobody(case: Case):
    crowd, liar, honest = await with_a_liar(case)
    async with crowd:
        crowd.strikes = 6
        kinds = [kind for kind in POISONS if case.guarded or kind != "far"]
        turns = itertools.cycle(kinds)
        most, told = crowd.most(), []

        def tampered(sent: Sent) -> Sent:
            if sent.route != case.route or not sent.vector:
                return sent
            told.append(next(turns))
            return sent._replace(vector=POISONS[told[-1]](sent.vector))

        liar.transport.tamper = tampered
        before = {node.id: moved(node, case) for node in honest}
        await asyncio.sleep(12)
        xs, statuses = crowd.xs(honest), liar.transport.statuses
        assert set(told) == set(kinds)
        # Averages of what honest nodes had: nothing else came in.
        assert np.isfinite(xs).all()
        assert np.abs(xs).max() <= most * (1 + 1e-4)
        assert 0 not in statuses, list(zip(told, statuses, strict=False))
        assert set(statuses) <= {-1, 400, 403, 408, 409, 422, 423, 503}, statuses
        assert {400, 422} & set(statuses)
        # Messages of ±τ hold no numbers: what can't be read is malformed, and no strike.
        assert any(liar.id in node.swarm.strikes for node in honest) or case.route == "relay"
        assert all(set(node.swarm.strikes) <= {liar.id} for node in honest)
        for node in honest:
            assert moved(node, case) >= before[node.id] + 3, node.strategy.outcomes


@every_tried
async def test_poisoned_answers_move_nobody(case: Case):
    async with Crowd(case, learning_rate=0.0, seed=4) as crowd:
        crowd.strikes = 6
        answers = {node.id: 0 for node in crowd.nodes}
        lying: dict[str, Iterator[str]] = {}
        for node in crowd.nodes:
            node.answer = answering(node, answers, lying)
        await crowd.start()
        await crowd.rounds(2)
        liar = max(crowd.nodes, key=lambda node: answers[node.id])
        if not answers[liar.id] or case.route == "relay":
            assert case.route in ("push", "relay")  # who is pushed to answers without a vector
            return
        honest = [node for node in crowd.nodes if node is not liar]
        most, before = crowd.most(), {node.id: moved(node, case) for node in honest}
        lying[liar.id] = itertools.cycle(("short", "nan", "huge"))
        await asyncio.sleep(12)
        assert answers["lies"] > 2
        xs = crowd.xs(honest)
        assert np.isfinite(xs).all()
        assert np.abs(xs).max() <= most * (1 + 1e-4)
        assert all(set(node.swarm.strikes) <= {liar.id} for node in honest)
        assert any(liar.id in node.swarm.strikes for node in honest)
        for node in honest:
            assert moved(node, case) >= before[node.id] + 3, node.strategy.outcomes


def answering(node: SimNode, answers: dict[str, int], lying: dict[str, Iterator[str]]) -> Any:
    """Serves a node's calls; answers with vectors are counted, and poisoned when it lies."""

    async def answer(incoming: Incoming) -> Reply:
        reply = await node.strategy.answer(incoming)
        vector = join_views(reply.vector)
        if not vector:
            return reply
        answers[node.id] += 1
        if node.id in lying:
            answers["lies"] = answers.get("lies", 0) + 1
            vector = POISONS[next(lying[node.id])](bytes(vector))
        return Reply(reply.meta, memoryview(vector), on_end=reply.on_end)

    return answer


@every_tried
async def test_what_cannot_be_read_is_malformed(case: Case):
    crowd, liar, honest = await with_a_liar(case)
    async with crowd:
        honestly = said(crowd, liar)[-1]
        for meta in (b"", b"\xc1", b"\x80", bytes(300), honestly.meta[:-1], honestly.meta + b"\x00"):
            assert await liar.transport.say(honestly._replace(meta=meta)) == 400, meta
        assert all(not node.swarm.strikes for node in honest)
        await crowd.rounds(2, honest)


@every_and_staged
async def test_routes_of_other_strategies_are_refused(case: Case):
    async with Crowd(case, nodes=2) as crowd:
        await crowd.start()
        await asyncio.sleep(3)
        one, other = crowd.nodes
        own = {sent.route for node in crowd.nodes for sent in node.transport.sent} | {case.route}
        if case.serves:
            own.add("shard")
        for route in sorted(set(ROUTES) - own):
            for vector in (b"", bytes(4 * SIZE)):
                sent = Sent(other.address, other.id, route, b"\x80", vector)
                assert await one.transport.say(sent) == 409, route
        if case.route:
            await crowd.rounds(2)


@tried_and_staged
async def test_another_mode_epoch_is_refused_on_both_sides(case: Case):
    async with Crowd(case, nodes=3, learning_rate=0.0) as crowd:
        stranger = crowd.add(epoch=2)
        crowd.swarm.introduce()
        await crowd.start()
        await crowd.rounds(3, crowd.nodes[:3])
        start = stranger.learner.now().copy()
        await asyncio.sleep(3)
        assert np.array_equal(stranger.learner.now(), start) or case.grouped or case.still_rate
        for node in crowd.nodes:
            merged = {one.peer for report in node.swarm.rounds for one in report.merged}
            assert (stranger.id in merged) == (node is stranger and bool(merged))
            assert node.swarm.strikes == []
            assert case.adopts or not node.swarm.adoptions
        spoken = [sent for sent in stranger.transport.sent if sent.route in (case.route, "group")]
        to = next(node for node in crowd.nodes[:3] if node.id != spoken[0].peer)
        assert await stranger.transport.say(spoken[0]._replace(to=to.address, peer=to.id)) == 409


@every_tried
async def test_what_was_said_in_another_generation_counts_no_more(case: Case):
    crowd, liar, _ = await with_a_liar(case)
    async with crowd:
        old = said(crowd, liar)[-1]
        late = crowd.add()
        await crowd.start([late])
        crowd.swarm.introduce()
        await crowd.rounds(3)
        target = next(node for node in crowd.nodes if node.address == old.to)
        before = target.learner.now()
        weights = math.fsum(getattr(node.strategy, "weight", 0.0) for node in crowd.nodes)
        status = await liar.transport.say(old)
        if case.grouped:
            assert status == 409
        else:
            # Told again what became of it; or it was never to be said by this one.
            assert status in (0, 403, 409, 422, 423)
        assert np.abs(target.learner.now() - before).max() <= np.ptp(crowd.xs())
        assert math.fsum(getattr(node.strategy, "weight", 0.0) for node in crowd.nodes) <= weights + 0.6
        assert all(not node.swarm.strikes for node in crowd.nodes)


@every_tried
async def test_the_quarantined_are_refused(case: Case):
    crowd, liar, honest = await with_a_liar(case)
    async with crowd:
        message = said(crowd, liar)[-1]
        target = next(node for node in crowd.nodes if node.address == message.to)
        for node in honest:
            node.swarm.held.add(liar.id)
        assert await liar.transport.say(message) == 403
        await crowd.rounds(3, honest)
        assert liar.id not in {merged.peer for merged in target.swarm.rounds[-1].merged}


@tried_and_staged
async def test_nobody_without_a_state_is_asked_twice(case: Case):
    """A node that has nothing to mix yet refuses, and the others go on without it."""
    async with Crowd(case, nodes=4, seed=5) as crowd:
        empty = crowd.nodes[1]
        says, empty.swarm.says = empty.swarm.says, None
        await crowd.start()
        others = [node for node in crowd.nodes if node is not empty]
        await crowd.rounds(3, others)
        empty.swarm.says = says
        await crowd.rounds(3)
        assert all(not node.swarm.strikes for node in crowd.nodes)
