"""Which state counts, how pipelines agree, what is refused, and how modes change."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from p2pdrl.config.strategy import AdpsgdConfig, PipelineConfig
from p2pdrl.errors import ConfigError, PeerRefusedError
from p2pdrl.group.view import ViewKey
from p2pdrl.strategies.pipeline.messages import Leave, PipeHead, RankRequest
from p2pdrl.strategies.pipeline.port import PIPE_ROUTE
from p2pdrl.strategies.registry import build
from p2pdrl.testing.fake_stages import blocks_of

from .forms import make_form
from .swarms import CONFIG, strategy, swarm_of

pytestmark = pytest.mark.looptime


async def test_two_pipelines_agree():
    async with swarm_of(4) as swarm:
        await swarm.working("01", "23")
        heads = swarm.nodes[0], swarm.nodes[2]

        def apart() -> float:
            one, other = (node.learner.now() for node in heads)
            return float(np.linalg.norm(one - other))

        first = apart()
        await swarm.until(lambda: apart() < 0.3 * first, 30.0)
        for head in heads:
            assert head.strategy.outcomes["ok"] > 2
            assert head.strategy.consensus_distance is not None
            merged = {one.peer for report in head.swarm.rounds for one in report.merged}
            assert {node.id for node in heads} <= merged
        for head, rank in zip(heads, (swarm.nodes[1], swarm.nodes[3]), strict=True):
            copied = [report for report in rank.swarm.rounds if report.outcome == "ok"]
            assert {one.peer for one in copied[-1].merged} == {head.id, rank.id}
            assert "answered" not in rank.strategy.outcomes


@pytest.mark.parametrize("newest", [0, 1, 2])
async def test_the_newest_state_wins(newest: int):
    async with swarm_of(3, msgspec.structs.replace(CONFIG, stages=3), start=False) as swarm:
        for node in swarm.nodes:
            node.learner.version = 40 if node is swarm.nodes[newest] else 20
            node.learner.publish()
        want = swarm.nodes[newest].learner.now()
        await swarm.start()
        await swarm.working("012")
        for node in swarm.nodes:
            assert np.array_equal(node.stages.began[0].vector, want)
            assert node.stages.began[0].policy_version == 40


async def test_the_lineage_with_most_steps_wins_over_versions():
    async with swarm_of(2, start=False) as swarm:
        old, new = swarm.nodes
        old.learner.version = 900
        old.learner.publish()
        new.swarm.says = msgspec.structs.replace(new.swarm.says, lineage="bb", lineage_steps=5000)
        take = old.swarm.take

        async def taken(donor: str) -> bool:
            old.swarm.says = msgspec.structs.replace(old.swarm.says, lineage="bb", lineage_steps=5000)
            return await take(donor)

        old.swarm.take = taken
        want = new.learner.now()
        await swarm.start()
        await swarm.working("01")
        assert all(np.array_equal(node.stages.began[0].vector, want) for node in swarm.nodes)


async def test_when_a_head_meets_a_greater_lineage_its_ranks_follow_it():
    """Its exchange with another head adopted that lineage's state, which a state copy brings to all ranks."""
    async with swarm_of(2) as swarm:
        await swarm.working("01")
        head, rank = swarm.nodes
        take = rank.swarm.take

        async def taken(donor: str) -> bool:
            rank.swarm.says = msgspec.structs.replace(rank.swarm.says, lineage="bb")
            return await take(donor)

        rank.swarm.take = taken
        theirs = np.full_like(head.learner.x, 7.0)
        head.learner.board.post_set(theirs, None, head.learner.version + 40)
        head.swarm.says = msgspec.structs.replace(head.swarm.says, lineage="bb", lineage_steps=5000)
        await swarm.until(lambda: rank.swarm.says.lineage == "bb", what="the rank stays behind")
        await swarm.working("01")
        assert len(rank.stages.began) == 2
        assert all(node.stages.began[-1].policy_version >= 50 for node in swarm.nodes)
        assert not [r for node in swarm.nodes for r in node.swarm.rounds if r.outcome != "ok"]
        swarm.begun_alike()


async def test_a_slow_pipeline_is_refused_with_numbers_and_all_compute_by_themselves():
    slow = msgspec.structs.replace(CONFIG, backend="auto")
    async with swarm_of(2, slow, start=False) as swarm:
        swarm.network.delay_s = (0.04, 0.04)
        for node in swarm.nodes:
            node.stages.layers = blocks_of(6, seconds=0.0001)
        await swarm.start()
        await swarm.until(lambda: all(strategy(node).figures.alone for node in swarm.nodes))
        kinds = dict(swarm.nodes[0].swarm.told)
        assert "would take" in kinds["pipeline-refused"]
        assert "ms" in kinds["pipeline-refused"]
        assert dict(swarm.nodes[1].swarm.told)["pipeline-refused"] == kinds["pipeline-refused"]
        assert "would take" in strategy(swarm.nodes[1]).figures.why
        orders = [node.stages.order for node in swarm.nodes]
        assert [(order.rank, order.ranks, order.cuts) for order in orders] == [(0, 1, ())] * 2
        await swarm.progress()
        await swarm.until(lambda: all(n.strategy.outcomes.get("ok", 0) > 3 for n in swarm.nodes))
        assert any("answered" in node.strategy.outcomes for node in swarm.nodes), "they gossip"
        assert {strategy(node).figures.role for node in swarm.nodes} == {"alone"}
        (more,) = swarm.add(1, slow)
        await swarm.start([more])
        await swarm.until(lambda: strategy(more).figures.standby)
        assert all(len(node.stages.began) == 1 for node in swarm.nodes[:2]), "they go on"


async def test_where_all_pipelines_are_refused_all_nodes_agree():
    """Directly or by way of others: those of another pipeline know its head only, until the next view."""
    slow = msgspec.structs.replace(CONFIG, backend="auto")
    async with swarm_of(4, slow, start=False) as swarm:
        swarm.network.delay_s = (0.04, 0.04)
        for node in swarm.nodes:
            node.stages.layers = blocks_of(6, seconds=0.0001)
        await swarm.start()
        await swarm.until(lambda: all(strategy(node).figures.alone for node in swarm.nodes))
        await asyncio.sleep(20.0)
        everybody = np.array([node.learner.now() for node in swarm.nodes])
        assert np.linalg.norm(everybody - everybody.mean(axis=0), axis=1).max() < 1.0


async def test_a_fast_pipeline_is_taken():
    fast = msgspec.structs.replace(CONFIG, backend="auto", microbatches="auto")
    async with swarm_of(2, fast) as swarm:
        await swarm.working("01")
        order = swarm.nodes[0].stages.order
        assert (order.microbatches, order.tune, order.backend) == (8, True, "stream")
        figures = strategy(swarm.nodes[1]).figures
        assert (figures.rank, figures.blocks, figures.pipelines) == (1, (3, 4, 5), 1)
        assert figures.step_s > 0
        assert 0 < figures.bubble < 1


async def test_cuts_made_by_hand_are_taken_as_given():
    async with swarm_of(2, msgspec.structs.replace(CONFIG, cuts=(1,))) as swarm:
        await swarm.working("01")
        assert [node.stages.order.cuts for node in swarm.nodes] == [(1,), (1,)]


async def test_an_interleaved_schedule_closes_the_circle():
    config = msgspec.structs.replace(CONFIG, schedule="interleaved", chunks=2, stages=3, microbatches=6)
    async with swarm_of(3, config) as swarm:
        await swarm.working("012")
        assert [node.pipes.opened for node in swarm.nodes] == [1, 1, 1]
        assert len(swarm.nodes[0].stages.order.cuts) == 5
        assert strategy(swarm.nodes[2]).figures.stages == (2, 5)


async def test_torch_meets_at_the_heads_store():
    config = msgspec.structs.replace(CONFIG, backend="torch")
    async with swarm_of(2, config, start=False, trusted=True) as swarm:
        await swarm.start()
        await swarm.until(lambda: all(node.stages.order is not None for node in swarm.nodes))
        head, rank = (node.stages.order for node in swarm.nodes)
        assert (head.backend, head.meeting.port, head.timeout_s) == ("torch", 0, 10.0)
        assert (rank.meeting.host, rank.meeting.port) == ("10.0.0.1", 4242)
        assert [node.pipes.opened for node in swarm.nodes] == [0, 0]


def test_torch_wants_a_trusted_network_and_a_learner_for_stages():
    async def refused() -> None:
        async with swarm_of(1, start=False) as swarm:
            context = swarm.nodes[0].context()
            with pytest.raises(ConfigError, match="trusted_network"):
                build(PipelineConfig(backend="torch"), context)
            with pytest.raises(ConfigError, match="no learner"):
                build(PipelineConfig(), replace(context, stages=None))

    asyncio.run(refused())


async def test_what_is_stale_or_not_for_us_is_refused():
    async with swarm_of(3) as swarm:
        await swarm.working("01")
        head, rank, other = swarm.nodes
        key = rank.group.view.key
        generation = rank.stages.order.generation
        form = make_form(key=key, generation=generation + 5, members=(head.id, rank.id))
        old = ViewKey(key.epoch, key.generation - 1, key.proposer)
        another = ViewKey(key.epoch + 1, key.generation, key.proposer)
        cases = [
            (head, RankRequest(old)),
            (head, RankRequest(another)),
            (other, RankRequest(key)),
            (other, form),
            (head, msgspec.structs.replace(form, generation=generation)),
            (head, msgspec.structs.replace(form, members=(head.id, other.id))),
            (head, msgspec.structs.replace(form, blocks=7)),
            (head, msgspec.structs.replace(form, port=99)),
            (other, Leave(key, generation)),
            (rank, Leave(key, generation + 1)),
        ]
        for sender, message in cases:
            target = rank if sender is not rank else head
            with pytest.raises(PeerRefusedError) as refused:
                await sender.transport.call(
                    target.address, target.id, PIPE_ROUTE, msgspec.msgpack.encode(message), deadline_s=3.0
                )
            assert refused.value.status == 409, message
        meta = msgspec.msgpack.encode(PipeHead(key, generation, 0))
        with pytest.raises(PeerRefusedError) as refused:
            await other.pipes.open_pipe(rank.address, rank.id, PIPE_ROUTE, meta, deadline_s=3.0)
        assert refused.value.status in (409, 503)
        assert len(rank.stages.began) == 1
        await swarm.progress()


async def test_from_gossip_to_a_pipeline_and_back():
    gossip = AdpsgdConfig(deadline_s=1.0)
    async with swarm_of(4, gossip) as swarm:
        await swarm.until(lambda: all(node.strategy.outcomes.get("ok", 0) > 2 for node in swarm.nodes))
        await asyncio.gather(*(node.switch(CONFIG, 2) for node in swarm.nodes))
        await swarm.working("01", "23")
        await asyncio.gather(*(node.switch(gossip, 3) for node in swarm.nodes))
        for one, other in (("0", "1"), ("2", "3")):
            pair = [swarm.nodes[int(one)], swarm.nodes[int(other)]]
            assert abs(pair[0].learner.version - pair[1].learner.version) <= 1
        before = [node.learner.updates for node in swarm.nodes]
        await swarm.until(
            lambda: all(n.learner.updates > u for n, u in zip(swarm.nodes, before, strict=True))
        )


@pytest.mark.parametrize(("rows", "batches", "parts"), [(0, 1, 4), (64, 8, 32), (2, 8, 16)])
async def test_what_is_measured_is_a_microbatch_of_a_minibatch(rows: int, batches: int, parts: int):
    """The learner cuts its longest batch, of which a minibatch is a part."""
    async with swarm_of(1, start=False) as swarm:
        node = swarm.nodes[0]
        asked, measure = [], node.stages.measure

        async def noted(microbatches: int, **more):
            asked.append(microbatches)
            return await measure(microbatches, **more)

        node.stages.measure = noted
        node.strategy = build(CONFIG, replace(node.context(), rows=rows, batches=batches))
        await swarm.start()
        await swarm.working("0")
        assert set(asked) == {parts}


async def test_a_policy_that_cannot_be_cut_is_told():
    async with swarm_of(1, start=False) as swarm:
        swarm.nodes[0].stages.layers = ()
        await swarm.start()
        await swarm.until(lambda: bool(swarm.nodes[0].swarm.told))
        assert "can't be cut" in dict(swarm.nodes[0].swarm.told)["pipeline-refused"]


async def test_pipelines_of_one_where_more_were_asked_for_are_told_to_all():
    config = msgspec.structs.replace(CONFIG, schedule="interleaved", chunks=2)
    async with swarm_of(2, config, start=False) as swarm:
        for node in swarm.nodes:
            node.stages.layers = blocks_of(3)
        await swarm.start()
        await swarm.until(lambda: all(node.stages.order is not None for node in swarm.nodes))
        await swarm.until(
            lambda: all("task.strategy.chunks" in strategy(n).figures.limit for n in swarm.nodes)
        )
        assert [node.stages.order.ranks for node in swarm.nodes] == [1, 1]
        for node in swarm.nodes:
            told = dict(node.swarm.told)["pipeline-refused"]
            assert (
                "task.strategy.chunks: interleaved with chunks = 2 on stages = 2 peers needs 4 blocks" in told
            )
