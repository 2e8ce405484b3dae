"""One exchange at a time: what both sides do, and what they refuse."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from p2pdrl.errors import PeerRefusedError
from p2pdrl.strategies.gossip.adpsgd import ROUTE, ExchangeHead
from p2pdrl.strategies.local import LocalStrategy
from p2pdrl.transport.protocol import Reply

pytestmark = pytest.mark.looptime


async def offer(sender, target, exchange_id="e1", vector_D=None, meta=None, **changes):
    """Call ``target``'s exchange by hand; return the answer and its vector."""
    summary = msgspec.structs.replace(sender.swarm.says, **changes)
    head = ExchangeHead(exchange_id=exchange_id, wire="float32", summary=summary)
    mine_D = sender.now() if vector_D is None else vector_D
    answer_D = np.empty(mine_D.size, np.float32)
    answer = await sender.transport.call(
        target.address,
        target.id,
        ROUTE,
        msgspec.msgpack.encode(head) if meta is None else meta,
        vector=mine_D.data.cast("B"),
        into=lambda *_: answer_D.data.cast("B"),
        deadline_s=1.0,
        lane="bulk",
    )
    return msgspec.msgpack.decode(answer.meta, type=ExchangeHead), answer_D


async def refusal(*arguments, **options) -> int:
    with pytest.raises(PeerRefusedError) as caught:
        await offer(*arguments, **options)
    return caught.value.status


async def test_an_update_begins_an_exchange(swarm):
    a, b = await swarm.grow(2)
    before_D = (a.now() + b.now()) / 2
    b.say(policy_version=25)
    a.strategy.updated(1)
    await asyncio.sleep(0.5)
    assert a.strategy.outcomes == {"ok": 1}
    assert b.strategy.outcomes == {"answered": 1}
    assert np.allclose(a.now(), before_D)
    assert np.allclose(b.now(), before_D)
    assert a.board.policy_version == b.board.policy_version == 25
    assert a.swarm.seen == [("ok", pytest.approx(0.02))]
    assert b.swarm.seen == []


async def test_without_updates_nothing_happens(swarm):
    a, b = await swarm.grow(2)
    await asyncio.sleep(5)
    assert a.strategy.outcomes == b.strategy.outcomes == {}
    assert a.strategy.consensus_distance is None


async def test_the_distance_is_estimated_from_pairs(swarm):
    a, b = await swarm.grow(2)
    true = np.linalg.norm(a.now() - b.now()) / 2
    a.strategy.updated(1)
    await asyncio.sleep(0.5)
    assert a.strategy.consensus_distance == pytest.approx(true, rel=1e-5)
    assert b.strategy.consensus_distance == pytest.approx(true, rel=1e-5)
    a.strategy.updated(1)
    await asyncio.sleep(0.5)
    assert a.strategy.consensus_distance < true


async def test_no_more_exchanges_than_allowed(swarm):
    a, _ = await swarm.grow(2, max_exchanges=2)
    for _ in range(10):
        a.strategy.updated(1)
        await asyncio.sleep(0.5)
    assert a.strategy.outcomes == {"ok": 2}


async def test_none_before_enough_members(swarm):
    a, b, c = await swarm.grow(3, start_at_members=3)
    del a.swarm.peers[c.id]
    a.strategy.updated(1)
    await asyncio.sleep(1)
    assert a.strategy.outcomes == {}
    a.swarm.peers[c.id] = c.address
    await asyncio.sleep(1)
    assert a.strategy.outcomes == {"ok": 1}
    a.swarm.peers = {b.id: b.address}
    a.strategy.updated(1)
    await asyncio.sleep(1)
    assert a.strategy.outcomes == {"ok": 2}


@pytest.mark.parametrize(
    ("changes", "theirs", "outcome"),
    [
        ({"lineage": "bb", "lineage_steps": 500}, "them", "ahead"),
        ({"lineage": "bb", "lineage_steps": 5}, "us", "behind"),
        ({"policy_version": 5000}, "them", "ahead"),
        ({"policy_version": 5}, "us", "behind"),
    ],
)
async def test_one_of_two_lineages_or_ages_is_adopted(swarm, changes, theirs, outcome):
    a, b = await swarm.grow(2)
    b.say(policy_version=2000)
    a.say(**({"policy_version": 2000} | changes))
    a.strategy.updated(1)
    await asyncio.sleep(0.2)
    assert a.strategy.outcomes[outcome] >= 1
    adopter, donor = (b, a) if theirs == "them" else (a, b)
    assert adopter.swarm.adoptions[0][0] == donor.id
    assert ("lineage" in adopter.swarm.adoptions[0][1]) is ("lineage" in changes)
    assert donor.swarm.adoptions == []
    assert not a.moved()
    assert not b.moved()


@pytest.mark.parametrize("changes", [{"task_hash": "x"}, {"layout_hash": "x"}, {"mode_epoch": 2}])
async def test_another_task_or_mode_is_refused(swarm, changes):
    a, b = await swarm.grow(2)
    b.say(**changes)
    a.strategy.updated(1)
    await asyncio.sleep(0.2)
    assert a.strategy.outcomes == {"refused": 1}
    assert await refusal(a, b) == 409
    assert a.swarm.adoptions == b.swarm.adoptions == []


async def test_a_replayed_exchange_is_refused(swarm):
    a, b = await swarm.grow(2)
    await offer(a, b, "e1")
    after_D = b.now()
    assert await refusal(a, b, "e1") == 409
    await offer(a, b, "e2")
    assert b.strategy.outcomes == {"answered": 2}
    assert not np.array_equal(b.now(), after_D)


async def test_what_is_remembered_of_exchanges_is_bounded(swarm):
    a, b = await swarm.grow(2)
    for number in range(1025):
        await offer(a, b, f"e{number}")
    assert await refusal(a, b, "e1024") == await refusal(a, b, "e1") == 409
    await offer(a, b, "e0")


async def test_poison_is_a_strike_and_moves_nothing(swarm):
    a, b = await swarm.grow(2)
    for number, bad in enumerate([np.nan, np.inf, 2e6]):
        poison_D = np.zeros(a.now().size, np.float32)
        poison_D[3] = bad
        assert await refusal(a, b, f"e{number}", poison_D) == 422
    assert b.swarm.strikes == [a.id] * 3
    assert not b.moved()
    await offer(a, b, "good")
    assert b.strategy.outcomes == {"answered": 1}


async def test_our_own_poison_is_kept_to_ourselves_and_healed(swarm):
    a, b = await swarm.grow(2)
    good_D = a.x_D
    a.own.publish(np.full(a.x_D.size, np.nan, np.float32), None, a.version)
    a.strategy.updated(1)
    await asyncio.sleep(0.2)
    assert a.strategy.outcomes == {"failed": 1}
    assert await refusal(b, a, "e1", np.zeros(a.x_D.size, np.float32)) == 503
    assert (len(a.swarm.heals), a.swarm.strikes, b.swarm.strikes) == (2, [], [])
    assert b.strategy.outcomes == {}
    assert not b.moved()
    a.own.publish(good_D, None, a.version)
    await offer(b, a, "e2")
    assert a.strategy.outcomes == {"failed": 1, "answered": 1}


async def test_a_poisoned_answer_is_a_strike_and_moves_nothing(swarm):
    a, b = await swarm.grow(2)

    async def poison(incoming):
        head = msgspec.msgpack.decode(incoming.meta, type=ExchangeHead)
        bad = np.full(a.now().size, np.nan, np.float32)
        return Reply(msgspec.msgpack.encode(head), vector=bad.data.cast("B"))

    b.strategy.answer = poison
    a.strategy.updated(1)
    await asyncio.sleep(0.2)
    assert a.strategy.outcomes == {"poisoned": 1}
    assert a.swarm.strikes == [b.id]
    assert not a.moved()


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (lambda head: b"\xff nonsense", "failed"),
        (lambda head: msgspec.msgpack.encode(msgspec.structs.replace(head, exchange_id="other")), "failed"),
        (lambda head: msgspec.msgpack.encode(msgspec.structs.replace(head, verdict="dance")), "failed"),
        (msgspec.msgpack.encode, "failed"),
    ],
)
async def test_a_broken_answer_costs_the_round(swarm, answer, outcome):
    a, b = await swarm.grow(2)

    async def broken(incoming):
        return Reply(answer(msgspec.msgpack.decode(incoming.meta, type=ExchangeHead)))

    b.strategy.answer = broken
    a.strategy.updated(1)
    await asyncio.sleep(0.2)
    assert a.strategy.outcomes == {outcome: 1}
    assert not a.moved()


async def test_an_answer_of_another_length_is_unsure(swarm):
    a, b = await swarm.grow(2)

    async def long(incoming):
        return Reply(incoming.meta, vector=memoryview(bytes(7)))

    b.strategy.answer = long
    a.strategy.updated(1)
    await asyncio.sleep(0.2)
    assert a.strategy.outcomes == {"unsure": 1}
    assert not a.moved()


async def test_the_quarantined_are_neither_met_nor_answered(swarm):
    a, b = await swarm.grow(2)
    b.swarm.held.add(a.id)
    assert await refusal(a, b) == 403
    b.strategy.updated(1)
    await asyncio.sleep(1)
    assert b.strategy.outcomes == {}
    b.swarm.held.clear()
    await asyncio.sleep(1)
    assert b.strategy.outcomes == {"ok": 1}


async def test_other_formats_are_refused(swarm):
    a, b = await swarm.grow(2)
    assert await refusal(a, b, vector_D=np.zeros(3, np.float32)) == 422
    assert await refusal(a, b, meta=b"") == 400
    assert await refusal(a, b, meta=b"\xc1") == 400
    assert await refusal(a, b, meta=msgspec.msgpack.encode({"exchange_id": 7})) == 400
    assert not b.moved()


async def test_without_a_state_there_is_nothing_to_mix(swarm):
    a, b = await swarm.grow(2)
    head = a.swarm.says
    b.swarm.says = a.swarm.says = None
    a.strategy.updated(1)
    await asyncio.sleep(0.5)
    assert a.strategy.outcomes == {}
    a.swarm.says = head
    assert await refusal(a, b) == 503


async def test_stopping_refuses_and_finishes_what_is_in_flight(swarm):
    a, b = await swarm.grow(2)
    a.strategy.updated(1)
    await asyncio.sleep(0.015)
    await a.strategy.stop(1.0)
    assert a.strategy.outcomes == {"ok": 1}
    assert await refusal(b, a) == 503
    a.strategy.updated(1)
    await asyncio.sleep(1)
    assert a.strategy.outcomes == {"ok": 1}


async def test_stopping_gives_up_an_exchange_that_takes_too_long(swarm, network):
    a, b = await swarm.grow(2)
    network.freeze(b.id)
    a.strategy.updated(1)
    await asyncio.sleep(0.1)
    began_s = asyncio.get_running_loop().time()
    await a.strategy.stop(0.3)
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(0.3)
    network.thaw(b.id)


async def test_local_never_agrees():
    local = LocalStrategy()
    await local.start()
    local.updated(5)
    await local.stop(1.0)
    assert (local.mode, local.outcomes, local.consensus_distance) == ("local", {}, None)
