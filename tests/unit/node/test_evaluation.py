"""This node's evaluations: when it makes one, what becomes of it, and of those that it hears of."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from p2pdrl.config.task import EvaluationConfig, RegressionConfig, StopConfig, TaskConfig
from p2pdrl.errors import ConfigError, WorkerError
from p2pdrl.node.accounting.counters import Counts
from p2pdrl.node.accounting.evaluations import Evaluation
from p2pdrl.node.evaluation import Evaluations
from p2pdrl.tensors.checkpoint import Checkpoint, from_bytes
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.workers.protocol import Played

pytestmark = pytest.mark.looptime

B = "b" * 32
LAYOUT = Layout((TensorEntry("w", (5,)),))


class FakeProcess:
    """Plays what the test has planned; a planned error is raised."""

    def __init__(self, plan):
        self.plan = list(plan)
        self.asked = []
        self.stopped = 0

    async def play(self, checkpoint, episodes, *, greedy, seed):
        content = b"".join(checkpoint)
        self.asked.append((from_bytes(content), episodes, greedy, seed))
        await asyncio.sleep(2.0)
        found = self.plan.pop(0)
        if isinstance(found, Exception):
            raise found
        return Played(found, 3.0, 12.0, 2.0)

    async def stop(self):
        self.stopped += 1


class FakeCheckpointer:
    """Snapshots of a constant, and what was kept as the best."""

    def __init__(self):
        self.kept = []

    async def snapshot(self):
        meta = {"layout": LAYOUT.to_wire(), "policy_version": 42}
        return Checkpoint(np.full(5, 1.5, np.float32), {}, meta)

    async def keep_best(self, checkpoint, mean):
        self.kept.append(mean)
        return True


@pytest.fixture
def node(context, training, clock):
    """Makes an `Evaluations` of a node that trains, whose swarm makes 50 steps a second, and starts it."""
    tasks, reports, heard = [], [], []
    training.swarm.judged = lambda mean: None
    context.training, context.checkpointer, context.state = training, FakeCheckpointer(), "training"
    context.progress_tracker.follow(training.lineage)

    async def steps():
        while True:
            context.progress_tracker.credit(Counts(int(50 * (clock.monotonic() - 100.0))))
            await asyncio.sleep(0.5)
            clock.advance(0.5)

    def begin(*plan, **evaluation):
        task = TaskConfig(evaluation=EvaluationConfig(**{"every": 1000, **evaluation}))
        training.task = msgspec.structs.replace(task, stop=StopConfig(mean_return=100.0))
        training.stop_config = training.task.stop
        process = FakeProcess(plan)
        reporter = SimpleNamespace(reports=lambda: reports)
        made = Evaluations(context, reporter, training, process, heard.append)
        tasks.extend([asyncio.create_task(made.run()), asyncio.create_task(steps())])
        return SimpleNamespace(
            made=made, process=process, reports=reports, heard=heard, context=context, tasks=tasks,
            means=lambda: [entry.evaluation.mean for entry in context.evaluations.entries],
        )  # fmt: skip

    return begin


async def ended(one):
    for task in one.tasks:
        task.cancel()
    await asyncio.gather(*one.tasks, return_exceptions=True)


async def test_it_evaluates_at_each_mark_what_it_holds_then(node, kinds):
    one = node(10.0, 20.0, 15.0, episodes=7, mode="greedy")
    await asyncio.sleep(65.0)
    assert one.means() == [10.0, 20.0, 15.0]
    assert [asked[1:3] for asked in one.process.asked] == [(7, True)] * 3
    assert len({seed for *_, seed in one.process.asked}) == 3
    assert one.process.asked[0][0].params.tolist() == [1.5] * 5
    first = one.context.evaluations.entries[0].evaluation
    assert first.env_steps in range(1000, 1100)
    assert (first.policy_version, first.episodes, first.std, first.length) == (42, 7, 3.0, 12.0)
    assert [one.mean for one in one.context.own_evaluations] == [20.0, 15.0]
    assert one.context.checkpointer.kept == [10.0, 20.0, 15.0]
    assert kinds().count("evaluated") == len(one.heard) == 3
    await ended(one)
    assert one.process.stopped == 1


async def test_a_goal_is_confirmed_at_once(node):
    one = node(120.0, 130.0)
    await asyncio.sleep(27.0)
    assert one.means() == [120.0, 130.0]
    await ended(one)


async def test_a_paused_node_makes_none(node):
    one = node(10.0)
    one.context.state = "paused"
    await asyncio.sleep(60.0)
    assert one.process.asked == []
    await ended(one)


async def test_one_that_failed_is_told_and_the_next_made_later(node, kinds):
    one = node(WorkerError("the evaluator is gone: it was killed"), 20.0)
    await asyncio.sleep(60.0)
    assert (one.means(), kinds()) == ([], ["evaluation-failed"])
    await asyncio.sleep(60.0)
    assert one.means() == [20.0]
    await ended(one)


async def test_where_none_can_be_made_that_is_told_once(node, kinds):
    one = node(ConfigError("there is no such environment"))
    await asyncio.sleep(300.0)
    assert kinds() == ["evaluation-failed"]
    assert len(one.process.asked) == 1
    await ended(one)


async def test_returns_that_are_not_finite_are_told_and_left_out(node, kinds):
    one = node(float("nan"), 20.0)
    await asyncio.sleep(50.0)
    assert one.means() == [20.0]
    assert kinds() == ["evaluation-failed", "evaluated"]
    await ended(one)


async def test_others_are_heard_by_their_reports_and_take_turns(node):
    one = node(10.0, 11.0)
    one.context.progress_tracker.credit(Counts(500))
    theirs = Evaluation(500, 9, 30, 50.0, 1.0, 9.0, 1.0)
    report = {"id": B, "state": "training", "trains": True, "evaluations": (theirs,)}
    one.reports.append(SimpleNamespace(**report, lineage=one.context.training.lineage))
    stranger = {**report, "id": "c" * 32, "trains": False}
    one.reports.append(SimpleNamespace(**stranger, lineage="another"))
    one.made.hear()
    one.made.hear()
    assert [entry.node for entry in one.heard] == [B]
    await asyncio.sleep(85.0)
    assert len(one.process.asked) == 2  # of four marks
    one.context.training.lineage = "cd" * 8
    one.made.hear()
    assert (one.means(), one.context.own_evaluations) == ([], ())
    await ended(one)


async def test_an_evaluation_at_steps_that_nobody_has_made_waits_until_they_are(node):
    one = node()
    theirs = Evaluation(400, 9, 30, 50.0, 1.0, 9.0, 1.0)
    one.reports.append(SimpleNamespace(id=B, lineage=one.context.training.lineage, evaluations=(theirs,)))
    one.made.hear()
    assert one.means() == []
    one.context.progress_tracker.credit(Counts(400))
    one.made.hear()
    assert one.means() == [50.0]
    await ended(one)


async def test_a_curve_that_fell_is_told_once(node, kinds):
    one = node()
    one.context.progress_tracker.credit(Counts(100))
    one.reports.append(SimpleNamespace(id=B, lineage=one.context.training.lineage, evaluations=()))
    means = [*range(0, 200, 20), *[60.0] * 15]
    for number, mean in enumerate(means):
        evaluation = Evaluation(number, 9, 30, float(mean), 1.0, 9.0, 1.0)
        one.reports[0].evaluations = (evaluation,)
        one.made.hear()
    assert kinds() == ["return-falls"]
    await ended(one)


async def test_a_regression_and_a_task_without_evaluations_start_nothing(node, training):
    one = node(10.0, every=0)
    await asyncio.sleep(60.0)
    assert one.process.asked == []
    await ended(one)
    assert not TaskConfig(algorithm=RegressionConfig()).evaluated


async def test_who_is_certified_to_act_alone_says_nothing_of_the_policy(node):
    """Two such would end the training by what they say."""
    one = node(10.0, 20.0)
    actors = {
        B: frozenset({"actor"}),
        "c" * 32: frozenset({"actor", "replay"}),
        "d" * 32: frozenset({"learner"}),
    }
    one.context.transport.roles_of = actors.get
    await asyncio.sleep(2.0)
    lineage = one.context.training.lineage
    for mean, who in enumerate(actors, 200):
        said = (Evaluation(0, 1, 10, float(mean), 0.0, 1.0, 1.0),)
        row = {"id": who, "state": "training", "trains": who[0] != "d", "lineage": lineage}
        one.reports.append(SimpleNamespace(**row, evaluations=said))
    one.made.hear()
    assert [entry.node for entry in one.context.evaluations.entries] == ["d" * 32]
    await asyncio.sleep(60.0)
    assert one.means()[1:] == [10.0, 20.0], "they have no turns"
    await ended(one)
