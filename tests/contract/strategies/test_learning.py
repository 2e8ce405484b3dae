"""What every strategy does in good weather and in bad: rounds that are told, and learners that learn."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from .crowd import PERIOD_S, Crowd, moved, now
from .promises import Case, every, every_and_staged, every_swarming

pytestmark = pytest.mark.looptime


@every_and_staged
async def test_the_swarm_learns_the_mean_of_its_targets(case: Case):
    async with Crowd(case) as crowd:
        await crowd.start()
        await asyncio.sleep(8)
        goal, scale = crowd.goal(), crowd.scale()
        means = []
        for _ in range(10):  # pairwise strategies wander around it
            means.append(crowd.mean())
            await asyncio.sleep(PERIOD_S)
        assert np.linalg.norm(np.mean(means, axis=0) - goal) <= case.off * scale, crowd.outcomes()
        if case.close is not None:
            assert crowd.spread() <= case.close * scale, crowd.outcomes()
        for node in crowd.nodes:
            assert node.swarm.strikes == node.swarm.heals == []
            assert case.adopts or not node.swarm.adoptions


@every_swarming
async def test_rounds_are_told_with_their_figures(case: Case):
    async with Crowd(case) as crowd:
        await crowd.start()
        await asyncio.sleep(4)
        members = {node.id for node in crowd.nodes}
        for node in crowd.nodes:
            reports = [report for report in node.swarm.rounds if report.outcome in case.moved]
            assert len(reports) >= 5, node.strategy.outcomes
            assert len(reports) == moved(node, case)
            for report in reports:
                weights = {merged.peer: merged.weight for merged in report.merged}
                assert len(weights) == len(report.merged) >= 1
                assert set(weights) <= members
                assert not set(weights) & set(report.missing)
                assert all(0 < weight <= 1 for weight in weights.values()), weights
                assert sum(weights.values()) == pytest.approx(1) or not case.names_all
                assert 0 <= report.seconds <= case.deadline_s
                assert 0 <= report.waited_s <= case.deadline_s
                assert np.isfinite(report.changed)
                assert report.error == ""
            assert sum(report.changed for report in reports) > 0
            named = {merged.peer for report in reports for merged in report.merged}
            assert len(named) > 1 or not case.names_all
            figures = [
                (report.bytes_in, report.bytes_out, report.round_trips) for report in node.swarm.rounds
            ]
            assert min(min(figure) for figure in figures) >= 0
        # What is sent is told by who sends it, and by who receives it, unless it is refused unread.
        everything = [report for node in crowd.nodes for report in node.swarm.rounds]
        sent = sum(len(message.vector) for node in crowd.nodes for message in node.transport.sent)
        assert sum(report.bytes_out for report in everything) >= 0.8 * sent > 0
        assert sum(report.bytes_in for report in everything) >= 0.5 * sent
        assert sum(report.round_trips for report in everything) > 0


@every
async def test_learners_wait_exactly_as_long_as_is_told(case: Case):
    async with Crowd(case) as crowd:
        await crowd.start()
        await asyncio.sleep(4)
        for node in crowd.nodes:
            told_s = sum(report.waited_s for report in node.swarm.rounds)
            if not case.waits:
                assert told_s == 0
                assert node.learner.updates >= 0.95 * now() / PERIOD_S - 2
                continue
            # What isn't told: the wait under way, and posts that were answered while there was no group.
            assert told_s <= node.learner.waited_s + 1e-6
            assert told_s >= node.learner.waited_s - 1.0
            assert told_s > 0


@every_swarming
async def test_loss_and_repetition_cost_rounds_and_nothing_else(case: Case):
    async with Crowd(case, seed=1) as crowd:
        crowd.network.loss, crowd.network.duplicate = case.loss, 0.1
        crowd.network.delay_s = (0.001, 0.02)
        await crowd.start()
        await asyncio.sleep(15)
        assert crowd.spread() <= 2 * case.close * crowd.scale(), crowd.outcomes()
        for node in crowd.nodes:
            assert moved(node, case) >= 8, node.strategy.outcomes
            assert node.swarm.strikes == node.swarm.heals == []
            assert np.linalg.norm(node.learner.now() - crowd.goal()) <= crowd.scale() * 1.2


@every_swarming
async def test_a_node_alone_trains_as_if_there_was_no_strategy(case: Case):
    async with Crowd(case, nodes=1) as crowd:
        await crowd.start()
        await asyncio.sleep(0.6 / crowd.nodes[0].learner.learning_rate)
        assert np.linalg.norm(crowd.mean() - crowd.goal()) < 0.1
        (node,) = crowd.nodes
        assert node.learner.updates >= 0.7 * now() / PERIOD_S
        assert all(message.route == "group" or not message.vector for message in node.transport.sent)
