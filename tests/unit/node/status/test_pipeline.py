"""What is told of a node's part in a pipeline: order, figures, and whom health spares."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from p2pdrl.config.learner_mode import FREE, LearnerMode
from p2pdrl.node.status.meters import Meters
from p2pdrl.node.status.pipeline import pipeline_bubble, pipeline_document, stage_words, trains
from p2pdrl.node.status.reporter import StatusReporter as NodeFigures
from p2pdrl.pipeline.plan import StageOrder
from p2pdrl.strategies.local import LocalStrategy
from p2pdrl.strategies.pipeline.events import PipelineStatus
from p2pdrl.strategies.pipeline.strategy import PipelineStrategy

STAGES = LearnerMode(stages=True)
FIGURES = PipelineStatus(
    pipeline=1, pipelines=2, rank=1, ranks=("a", "b"), stages=(1,), why="it pays", step_s=0.2, bubble=0.3,
    copies=4, from_version=70,
)  # fmt: skip


def order(rank: int, **fields) -> StageOrder:
    given = {"blocks": 5, "cuts": (2,), "schedule": "1f1b", "microbatches": 4, "ranks": 2} | fields
    return StageOrder(generation=3, rank=rank, timeout_s=10.0, idle_timeout_s=60.0, state_every=10, **given)


class Rank(PipelineStrategy):
    """A strategy that stands where it is told to."""

    consensus_distance, facts, figures = 0.25, {}, FIGURES

    def __init__(self, figures: PipelineStatus) -> None:
        self.figures = figures


@pytest.fixture
def figures(talking, training) -> NodeFigures:
    talking.training, talking.state = training, "training"
    return NodeFigures(talking)


@pytest.fixture
def enter(training):
    """Puts the learner at a rank, or (None) lets it stand by, with these figures."""

    def put(which: StageOrder | None, **metrics: float) -> None:
        learner = training.supervisor
        learner.requests, learner.stages = SimpleNamespace(learner_mode=STAGES), SimpleNamespace(order=which)
        learner.metrics = {f"pipeline_{name}": value for name, value in metrics.items()}
        training.mode.strategy = Rank(
            FIGURES if which is not None else PipelineStatus(standby=True, pipelines=1)
        )

    return put


def test_in_another_mode_there_is_nothing_to_tell(training):
    assert training.supervisor.requests.learner_mode is FREE
    assert (trains(training), stage_words(training), pipeline_bubble(training)) == (True, "", None)
    assert pipeline_document(training) is None


def test_a_stage_tells_its_order_and_its_figures(training, enter):
    enter(order(1), generation=3.0, rank=1.0, stages=2.0, microbatches=2.0, bubble=0.25, step_s=0.1)
    assert (trains(training), stage_words(training), pipeline_bubble(training)) == (False, "2/2", 0.25)
    document = pipeline_document(training)
    assert document == {
        "role": "pipeline 1 rank 1", "pipeline": 1, "pipelines": 2, "peers": ["a", "b"], "alone": False,
        "why": "it pays", "limit": "", "copies": 4, "from_version": 70, "predicted_step_s": 0.2,
        "predicted_bubble": 0.3,
        "generation": 3, "rank": 1, "ranks": 2, "stage": [2],
        "stages": 2, "blocks": [[2, 4]], "schedule": "1f1b", "microbatches": 2.0, "backend": "stream",
        "state_every": 10, "bubble": 0.25, "step_s": 0.1,
        "experience": "makes no experience: it has no actors (node.actors.count)",
    }  # fmt: skip
    msgspec.json.encode(document)


@pytest.mark.parametrize(
    ("rank", "actors", "lent", "words"),
    [
        (0, 0, None, "makes the experience in its learner's process"),
        (0, 2, None, "takes unrolls of its 2 actors"),
        (0, 1, False, "takes unrolls of its 1 actor and of the other ranks'"),
        (1, 1, True, "its 1 actor works for rank 0"),
        (1, 2, False, "its 2 actors wait for rank 0 to take unrolls"),
        (
            1,
            2,
            None,
            "makes no experience: ppo learns from unrolls of the newest policy only, so from rank 0's",
        ),
    ],
)
def test_who_makes_the_experience(figures, training, enter, rank, actors, lent, words):
    """Without lanes for other ranks (``lent`` is None) a later rank has nobody to act for."""
    enter(order(rank))
    if actors:
        training.actors = SimpleNamespace(spec=SimpleNamespace(local=actors), figures=list, pids=())
    if lent is not None:
        sender = SimpleNamespace(steps_per_s=50.0)
        training.lent_actors = SimpleNamespace(working=lent, sender=sender)
        training.receiver = SimpleNamespace(figures=dict)
    assert pipeline_document(training)["experience"] == words
    report = figures.report()
    assert (report.acts, report.steps_per_s) == (bool(lent), 0.0 if lent is None else 50.0)
    status = figures.status()
    assert status["collects"] == (rank == 0 or bool(lent))
    assert status["swarm_steps_per_s"] == (report.steps_per_s if status["collects"] else 0.0)


def test_several_stages_of_one_rank(training, enter):
    enter(order(0, cuts=(1, 2, 3), schedule="interleaved"))
    assert (trains(training), stage_words(training)) == (True, "1+3/4")
    assert pipeline_document(training)["blocks"] == [[0, 0], [2, 2]]


def test_figures_of_an_earlier_pipeline_arent_told(training, enter):
    enter(order(0), generation=2.0, bubble=0.5, activation_bytes=float("nan"))
    assert pipeline_bubble(training) is None
    enter(order(0), generation=3.0, bubble=0.5, activation_bytes=float("nan"))
    assert pipeline_bubble(training) == 0.5
    assert "activation_bytes" not in pipeline_document(training)


def test_who_stands_by_tells_only_what_the_strategy_knows(training, enter):
    enter(None, bubble=0.5)
    assert (trains(training), stage_words(training), pipeline_bubble(training)) == (False, "", None)
    document = pipeline_document(training)
    assert (document["role"], document["pipelines"], document["peers"]) == ("standby", 1, [])
    assert "rank" not in document
    training.mode.strategy = LocalStrategy()
    assert pipeline_document(training) == {}


@pytest.mark.parametrize(("rank", "stalled"), [(0, True), (1, False)])
async def test_only_the_first_rank_owes_updates(figures, training, enter, clock, rank, stalled):
    enter(order(rank), bubble=0.125)
    training.supervisor.reported_s = clock.monotonic()
    clock.advance(100.0)
    assert any("no update" in reason for reason in figures.health()[1]) == stalled
    report = figures.report()
    assert (report.trains, report.stage, report.bubble) == (stalled, f"{rank + 1}/2", 0.125)
    status = figures.status()
    assert (status["collects"], status["stage"], status["bubble"]) == (stalled, f"{rank + 1}/2", 0.125)
    assert figures.status()["pipeline"]["rank"] == rank
    row = figures.peers()[0]
    assert (row["stage"], row["bubble"]) == (f"{rank + 1}/2", 0.125)


async def test_only_the_first_rank_has_returns(figures, training, enter):
    training.supervisor.returns.extend([10.0, 20.0])
    for at, mean in ((order(0), 15.0), (order(1), None), (None, None)):
        enter(at)
        report = figures.report()
        assert (report.mean_return, report.episodes_in_window) == (mean, 2 if mean else 0)
        assert figures.peers()[0]["mean_return"] == mean
        assert figures.peers()[0]["collects"] == (mean is not None)
    enter(order(1))
    training.supervisor.stages.order = None
    training.mode.strategy = Rank(FIGURES)  # it ends, or forms anew: nobody knows yet
    assert figures.report().mean_return == 15.0


async def test_what_was_measured_stands_beside_what_was_predicted(figures, training, enter):
    enter(order(0), generation=3.0, bubble=0.77, step_s=0.0021, activation_bytes=9.0)
    training.mode.strategy.facts = {"predicted_step_s": 0.00114, "predicted_bubble": 0.336}
    assert figures.mode()["facts"] == {
        "predicted_step_s": 0.00114, "predicted_bubble": 0.336, "measured_step_s": 0.0021,
        "measured_bubble": 0.77,
    }  # fmt: skip


async def test_the_metrics_page(figures, training, enter, context):
    meters = Meters(context, figures, None)
    assert "p2pdrl_pipeline_rank NaN" in meters.render().decode()
    enter(order(1), generation=3.0, bubble=0.25, activation_bytes=4096.0)
    page = meters.render().decode()
    for line in ("rank 1.0", "stages 2.0", "generation 3.0", "bubble_ratio 0.25", "activation_bytes 4096.0"):
        assert f"p2pdrl_pipeline_{line}" in page
    enter(None)
    assert "p2pdrl_pipeline_rank NaN" in meters.render().decode()


def test_a_pipeline_of_one_runs_over_nothing(training, enter):
    enter(order(0, ranks=1, cuts=()))
    document = pipeline_document(training)
    assert (document["backend"], document["ranks"], document["stage"]) == ("none", 1, [1])
