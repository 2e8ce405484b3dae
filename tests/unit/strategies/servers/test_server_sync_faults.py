"""Synchronous servers when nodes die, freeze, join, leave, lag, lie, or are cut off."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from p2pdrl.config.strategy import ServerSyncConfig
from p2pdrl.errors import PeerRefusedError
from p2pdrl.strategies.servers.messages import GradientPush, Pull

from .swarms import COMMON, SIZE, grow, progress, servers_of

pytestmark = pytest.mark.looptime


def config(**options) -> ServerSyncConfig:
    return ServerSyncConfig(**COMMON | {"learning_rate": 0.01} | options)


def updates(nodes) -> list[int]:
    return [node.learner.updates for node in nodes]


async def same_vectors(nodes) -> bool:
    """Whether the nodes hold the same vector at some moment of the next rounds."""
    for _ in range(200):
        if len({node.learner.now().tobytes() for node in nodes}) == 1:
            return True
        await asyncio.sleep(0.0013)
    return False


def outcomes(nodes) -> dict[str, int]:
    total: dict[str, int] = {}
    for node in nodes:
        for word, count in node.strategy.outcomes.items():
            total[word] = total.get(word, 0) + count
    return total


@pytest.mark.parametrize(
    ("optimizer", "shard"),
    [
        ("sgd", 0),
        ("adam", 1),
        *(pytest.param(*slow, marks=pytest.mark.slow) for slow in (("adam", 0), ("sgd", 1))),
    ],
)
async def test_a_killed_servers_shard_is_taken_over(sim, optimizer, shard):
    nodes = await grow(sim, 5, config(optimizer=optimizer))
    await asyncio.sleep(4.0)
    servers, _ = servers_of(nodes)
    steps = servers[0].strategy.facts["version"]
    norm = float(np.linalg.norm(nodes[0].learner.x))
    await sim.kill(servers[shard])
    left = sim.living
    assert min(await progress(left, sim.detect_s + 3.0)) > 10
    assert await same_vectors(left)
    after = left[0].strategy.facts
    assert after["version"] > steps
    assert servers[shard].id not in str(after["servers"])
    assert servers[1 - shard].id in str(after["servers"])
    # The shard went on from where it was: with a step against x, no entry has grown.
    assert float(np.linalg.norm(left[0].learner.x)) < norm
    took = [node for node in left if node.strategy.facts.get("takeovers")]
    assert len(took) == 1
    assert any("with momenta" in message for _, message in took[0].swarm.told)
    assert [node.swarm.adoptions for node in left] == [[]] * 4


async def test_workers_step_again_soon_after_a_servers_death(sim, network):
    """The refused connection is the news: nobody waits for membership to find out."""
    sim.detect_s = 1.0
    nodes = await grow(sim, 4, config(servers=1))
    (server,), workers = servers_of(nodes)
    await sim.kill(server)
    died_s = asyncio.get_running_loop().time()
    before = updates(workers)
    for _ in range(500):
        if all(now >= then + 3 for now, then in zip(updates(workers), before, strict=True)):
            break
        await asyncio.sleep(0.01)
    assert asyncio.get_running_loop().time() - died_s < sim.detect_s + 1.0


async def test_a_killed_worker_costs_one_round(sim):
    nodes = await grow(sim, 4, config())
    _, workers = servers_of(nodes)
    await sim.kill(workers[0])
    assert min(await progress(sim.living, sim.detect_s + 2.0)) > 10
    assert outcomes(sim.living).get("regrouped", 0) <= 3


async def test_no_loss_is_needed_for_newcomers(sim):
    nodes = await grow(sim, 3, config())
    late = sim.add(config(), np.full(SIZE, 50.0), period_s=0.05)
    sim.introduce()
    await late.start()
    await asyncio.sleep(2.0)
    assert min(await progress([*nodes, late], 1.0)) > 10
    assert await same_vectors([*nodes, late])
    assert float(np.abs(late.learner.x).max()) < 5.0, "its own parameters didn't count"


@pytest.mark.parametrize("role", ["worker", "server"])
async def test_a_frozen_member_is_left_out_and_comes_back(sim, network, role):
    nodes = await grow(sim, 4, config(), period_s=0.1)
    servers, workers = servers_of(nodes)
    frozen = workers[0] if role == "worker" else servers[0]
    others = [node for node in nodes if node is not frozen]
    network.freeze(frozen.id)
    for node in others:
        network.cut(frozen.id, node.id, one_way=True)
    await asyncio.sleep(6.0)
    assert min(await progress(others, 1.0)) > 5
    network.heal()
    network.thaw(frozen.id)
    await asyncio.sleep(8.0)
    assert min(await progress(nodes, 1.0)) > 5
    assert await same_vectors(nodes)


async def test_two_sides_of_a_cut_go_on_and_come_together(sim, network):
    nodes = await grow(sim, 6, config(), period_s=0.1)
    small, large = nodes[:2], nodes[2:]
    for one in small:
        for other in large:
            network.cut(one.id, other.id)
            one.swarm.peers.pop(other.id)
            other.swarm.peers.pop(one.id)
    await asyncio.sleep(5.0)
    assert min(await progress(nodes, 1.0)) > 5
    assert await same_vectors(small)
    assert await same_vectors(large)
    expected = large[0].strategy.facts["version"]
    network.heal()
    sim.introduce()
    await asyncio.sleep(5.0)
    assert await same_vectors(nodes)
    assert nodes[0].strategy.facts["version"] > expected
    assert min(await progress(nodes, 1.0)) > 5


@pytest.mark.parametrize("servers", [1, 2])
async def test_the_side_with_more_work_stays_after_a_cut(sim, network, servers):
    """Alone, a node's rounds are quicker; what counts is how much experience is in the parameters."""
    # The lone one alone would step: it serves nothing while the others are there.
    pinned = tuple(f"{number:032x}" for number in range(1, 1 + servers))
    options = config(learning_rate=0.0, servers=servers, pinned=pinned)
    sim.add(msgspec.structs.replace(options, learning_rate=0.05), np.ones(SIZE), samples=10, period_s=0.1)
    nodes = await grow(sim, 4, options, samples=10, period_s=0.1)
    lone, large = nodes[0], nodes[1:]
    for other in large:
        network.cut(lone.id, other.id)
        lone.swarm.peers.pop(other.id)
        other.swarm.peers.pop(lone.id)
    await asyncio.sleep(4.0)
    before = large[0].learner.now()
    await asyncio.sleep(2.0)
    assert not np.allclose(lone.learner.now(), before)
    assert lone.strategy.facts["version"] > large[0].strategy.facts["version"]
    network.heal()
    sim.introduce()
    await asyncio.sleep(5.0)
    assert np.array_equal(lone.learner.now(), before)


async def test_a_quorum_goes_on_without_the_slow(sim):
    nodes = await grow(sim, 5, config(quorum=0.8), period_s=0.02)
    nodes[4].learner.period_s = 1.5
    await asyncio.sleep(3.0)
    quick = await progress(nodes[:4], 5.0)
    assert min(quick) > 12
    missing = {peer for report in nodes[0].swarm.rounds[-3:] for peer in report.missing}
    assert missing <= {nodes[4].id}


async def test_backup_workers_are_not_waited_for(sim):
    nodes = await grow(sim, 5, config(backups=1))
    nodes[2].learner.period_s = 0.1
    made = await progress(nodes, 5.0)
    quick = [count for number, count in enumerate(made) if number != 2]
    assert min(quick) > 5.0 / 0.06
    assert outcomes([nodes[2]])["late"] + outcomes([nodes[2]]).get("stale", 0) > 5
    assert await same_vectors([nodes[0], nodes[1], nodes[3], nodes[4]])


async def test_without_backups_all_go_at_the_pace_of_the_slowest(sim):
    nodes = await grow(sim, 3, config())
    nodes[2].learner.period_s = 0.1
    await asyncio.sleep(1.0)
    made = await progress(nodes, 5.0)
    assert max(made) - min(made) <= 1
    assert 40 <= made[0] <= 50


async def test_a_paused_learner_holds_nobody_up_and_follows(sim):
    nodes = await grow(sim, 4, config())
    paused = nodes[1]
    await paused.pause()
    others = [node for node in nodes if node is not paused]
    await asyncio.sleep(3.0)
    assert min(await progress(others, 1.0)) > 10
    assert paused.strategy.facts["rounds_without_us"] > 10
    assert paused.strategy.facts["version"] >= others[0].strategy.facts["version"] - 1
    paused.train()
    await asyncio.sleep(1.0)
    assert min(await progress(nodes, 1.0)) > 10
    assert await same_vectors(nodes)


async def test_nobody_steps_while_all_are_paused(sim):
    nodes = await grow(sim, 3, config())
    for node in nodes:
        await node.pause()
    await asyncio.sleep(3.0)
    before = nodes[0].strategy.facts["version"]
    await asyncio.sleep(10.0)
    assert nodes[0].strategy.facts["version"] == before
    assert nodes[0].strategy.facts["workers"] == 3.0


async def test_a_poisoned_gradient_counts_for_nothing(sim):
    nodes = await grow(sim, 4, config(servers=1))
    (server,), workers = servers_of(nodes)
    liar = workers[0]
    call = liar.transport.call

    async def huge(to, peer, route, meta, *, vector=None, **options):
        if vector is not None:
            vector = memoryview(np.array([1e30], np.float32).tobytes() + bytes(vector)[4:])
        return await call(to, peer, route, meta, vector=vector, **options)

    liar.transport.call = huge
    before = server.learner.now()
    made = await progress(nodes, 1.0)
    assert min(made) > 10
    assert float(np.abs(server.learner.now()).max()) <= float(np.abs(before).max())
    assert set(server.swarm.strikes) == {liar.id}
    assert outcomes([liar])["poisoned"] > 5
    assert server.strategy.facts["poisoned"] > 5


async def test_a_nan_of_our_own_is_told_to_nobody(sim):
    nodes = await grow(sim, 3, config())
    nodes[0].learner.gradient = lambda x: np.full_like(x, np.nan)
    assert min(await progress(nodes, 1.0)) > 10
    assert [node.swarm.strikes for node in nodes] == [[], [], []]
    assert np.isfinite(nodes[0].learner.now()).all()
    assert outcomes([nodes[0]])["idle"] > 5


async def test_messages_of_another_view_are_refused(sim, network):
    nodes = await grow(sim, 3, config(servers=1))
    (server,), workers = servers_of(nodes)
    caller = workers[0]
    key = caller.group.view.key
    for route, message in (
        ("push", GradientPush(msgspec.structs.replace(key, generation=key.generation - 1), 0, "fetch", 0)),
        ("push", GradientPush(key, 1, "fetch", 0)),
        ("shard", Pull(msgspec.structs.replace(key, epoch=key.epoch + 1), 0, 1, 0)),
        ("shard", Pull(key, 0, SIZE, 10**9)),
        ("exchange", Pull(key, 0, 1, 0)),
    ):
        with pytest.raises(PeerRefusedError) as refused:
            await caller.transport.call(
                server.address, server.id, route, msgspec.msgpack.encode(message), deadline_s=3.0
            )
        assert refused.value.status == 409
    for meta in (b"", b"\xc1", msgspec.msgpack.encode(Pull(key, 3, 3, 0)), b"\x80" * 9):
        with pytest.raises(PeerRefusedError) as refused:
            await caller.transport.call(server.address, server.id, "shard", meta, deadline_s=3.0)
        assert refused.value.status == 400
    for node in nodes:
        await node.pause()
    for nbytes in (1, 4 * SIZE + 4):
        await asyncio.sleep(1.5)
        bad = GradientPush(key, 0, "step", int(server.strategy.facts["shard_version"]), weight=1.0)
        with pytest.raises(PeerRefusedError) as refused:
            await caller.transport.call(
                server.address,
                server.id,
                "push",
                msgspec.msgpack.encode(bad),
                vector=memoryview(bytes(nbytes)),
                deadline_s=3.0,
            )
        assert refused.value.status == 422
    assert server.swarm.strikes == [caller.id] * 2


async def test_a_server_that_leaves_hands_its_shard_over(sim):
    nodes = await grow(sim, 4, config(optimizer="adam"))
    servers, _ = servers_of(nodes)
    leaver = servers[0]
    shard = leaver.strategy.facts["shard"]
    await leaver.pause()
    await leaver.strategy.stop(3.0)
    leaver.dead = True
    sim.introduce()
    others = [node for node in nodes if node is not leaver]
    assert min(await progress(others, 2.0)) > 10
    took = next(node for node in others if node.strategy.facts.get("takeovers"))
    assert took.strategy.facts["shard"] == shard
    assert any("with momenta" in message for _, message in took.swarm.told)
    assert outcomes(others).get("regrouped", 0) <= 3


async def test_stop_leaves_nothing_behind(sim):
    nodes = await grow(sim, 3, config())
    await asyncio.gather(*(node.strategy.stop(1.0) for node in nodes))
    await asyncio.gather(*(node.strategy.watch() for node in nodes))
    versions = [node.learner.board.policy_version for node in nodes]
    await asyncio.sleep(1.0)
    assert [node.learner.board.policy_version for node in nodes] == versions
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert not names & {"served", "worker", "keeper", "server", "view", "stop", "arithmetic"}


async def test_another_lineage_adopts_before_it_works(sim):
    nodes = await grow(sim, 3, config())
    stray = sim.add(config(), np.full(SIZE, 80.0))
    stray.swarm.says = msgspec.structs.replace(stray.swarm.says, lineage="bb", lineage_steps=1)
    sim.introduce()
    await stray.start()
    await asyncio.sleep(3.0)
    assert stray.swarm.adoptions[0][0] in {node.id for node in nodes}
    assert await same_vectors([*nodes, stray])
    assert float(np.abs(stray.learner.x).max()) < 5.0


async def test_a_node_without_parameters_waits_until_it_has_some(sim):
    node = sim.add(config(), np.ones(SIZE))
    summary, node.swarm.says = node.swarm.says, None
    await node.start()
    await asyncio.sleep(3.0)
    assert node.strategy.facts["role"] == "waiting for a group"
    node.swarm.says = summary
    await asyncio.sleep(1.0)
    assert node.learner.updates > 10
