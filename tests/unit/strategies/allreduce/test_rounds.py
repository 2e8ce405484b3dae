"""Rounds of a group when all goes well: how they begin, what they do and tell, how they end."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from p2pdrl.config.strategy import FederatedConfig, GradAverageConfig
from p2pdrl.strategies.allreduce import reduce_scatter
from p2pdrl.strategies.allreduce.federated import Privacy, SecretNoise
from p2pdrl.strategies.allreduce.param_average import AveragedParameters
from p2pdrl.strategies.allreduce.rounds import GroupRounds
from p2pdrl.strategies.registry import build

from .bowls import GRADIENTS, PARAMETERS, SIZE, Bowls, now, shared, together, until
from .rounds_tried import BOTH

pytestmark = [pytest.mark.looptime, pytest.mark.usefixtures("owners")]


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
    if reduce_scatter.LEAST_PIECE != 1:
        pytest.skip("with one owner he moves it all")
    async with Bowls() as bowls:
        await bowls.start()
        await until(lambda: bowls.nodes[0].strategy.outcomes.get("ok", 0) >= 5)
        for node in bowls.nodes:
            report = node.swarm.rounds[3]
            assert report.bytes_out == report.bytes_in == 2 * 4 * SIZE * 3 / 4
            assert report.round_trips == 3


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
            await node.pause()
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


async def test_what_federated_rounds_agree_on_carries_noise_of_deviation_z_s_over_n():
    """Beside the mean of the clipped changes, and anew in each round; bounds are five standard errors."""
    z, bound, rounds, size = 1.5, 0.5, 6, 20_000
    config = FederatedConfig(
        noise_multiplier=z,
        clip_norm=bound,
        participation=1.0,
        every_updates=1,
        compression="none",
        deadline_s=4.0,
    )
    async with Bowls(config, size=size, gradient=np.ones_like) as bowls:
        for node in bowls.nodes:
            context = node.context()
            privacy = Privacy(config, context.epoch, node.id, SecretNoise(node.id.encode()))
            node.strategy = GroupRounds(config, context, AveragedParameters(config, context, privacy))
        await bowls.start()
        await until(lambda: min(node.strategy.outcomes.get("ok", 0) for node in bowls.nodes) > rounds)
        for node in bowls.nodes:
            assert [len(report.merged) for report in node.swarm.rounds[: rounds + 1]] == [1] + [4] * rounds
        agreed, *others = (np.array(node.learner.history[: rounds + 1], np.float64) for node in bowls.nodes)
    assert all(np.array_equal(agreed, other) for other in others)
    noise = np.diff(agreed, axis=0) + bound / size**0.5  # each went downhill by S, the same way
    deviation = z * bound / 4
    assert np.abs(noise.mean(axis=1)).max() < 5 * deviation / size**0.5
    assert np.abs(noise.std(axis=1) / deviation - 1).max() < 5 / (2 * size) ** 0.5
    assert np.abs((noise[1:] * noise[:-1]).mean(axis=1)).max() < 5 * deviation**2 / size**0.5
