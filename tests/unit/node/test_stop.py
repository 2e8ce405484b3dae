from __future__ import annotations

import pytest

from p2pdrl.config.task import StopConfig
from p2pdrl.node.accounting.evaluations import Evaluation, EvaluationLog
from p2pdrl.node.accounting.report_table import PeerReport
from p2pdrl.node.stop import judge, returns_ready


def report(number: int, mean_return: float | None, episodes: int = 100, **fields) -> PeerReport:
    return PeerReport(
        id=f"{number:032x}",
        boot=1,
        seq=1,
        **{"state": "training", "device": "cpu", **fields},
        mean_return=mean_return,
        episodes_in_window=episodes,
    )


def test_without_conditions_it_never_stops():
    assert judge(StopConfig(), 10**12, 1e9, [report(1, 1e9)]) is None


def test_env_steps():
    stop = StopConfig(env_steps=1000)
    assert judge(stop, 999, 0.0, []) is None
    reached = judge(stop, 1000, 0.0, [])
    assert reached is not None
    assert reached.kind == "env_steps"
    assert "1000 of 1000" in reached.reason


def test_time():
    stop = StopConfig(time_s=60.0)
    assert judge(stop, 0, 59.9, []) is None
    reached = judge(stop, 0, 60.0, [])
    assert reached is not None
    assert reached.kind == "time_s"


def test_mean_return_wants_every_training_node():
    stop = StopConfig(mean_return=475.0)
    reached = judge(stop, 0, 0.0, [report(1, 480.0), report(2, 475.0)])
    assert reached is not None
    assert reached.kind == "mean_return"
    assert "all 2 nodes" in reached.reason
    assert "475" in reached.reason


@pytest.mark.parametrize(
    "other",
    [report(2, 474.9), report(2, 480.0, episodes=99), report(2, None, episodes=0)],
)
def test_one_node_that_is_not_there_yet_keeps_all_going(other):
    assert judge(StopConfig(mean_return=475.0), 0, 0.0, [report(1, 480.0), other]) is None


def test_lower_stages_of_a_pipeline_have_no_returns_to_judge():
    stop = StopConfig(mean_return=475.0)
    below = report(2, 20.0, trains=False)
    reached = judge(stop, 0, 0.0, [report(1, 480.0), below])
    assert reached is not None
    assert "the node that trains" in reached.reason
    assert judge(stop, 0, 0.0, [below]) is None


@pytest.mark.parametrize("state", ["joining", "starting"])
def test_a_node_that_comes_up_is_waited_for(state):
    coming = report(2, None, 0, state=state)
    assert judge(StopConfig(mean_return=475.0), 0, 0.0, [report(1, 480.0), coming]) is None
    assert judge(StopConfig(env_steps=10), 10, 0.0, [report(1, 480.0), coming]) is not None


def test_a_paused_node_is_not_waited_for():
    idle = report(2, None, 0, state="paused")
    assert judge(StopConfig(mean_return=475.0), 0, 0.0, [report(1, 480.0), idle]) is not None
    assert judge(StopConfig(mean_return=475.0), 0, 0.0, [idle]) is None
    assert judge(StopConfig(mean_return=475.0), 0, 0.0, []) is None


def test_returns_ready_is_one_nodes_part():
    stop = StopConfig(mean_return=0.0, window=10)
    assert returns_ready(stop, 10, 0.0)
    assert not returns_ready(stop, 9, 0.0)
    assert not returns_ready(stop, 10, None)
    assert not returns_ready(StopConfig(), 10, 5.0)


def test_where_there_are_evaluations_they_count_and_nothing_else():
    stop = StopConfig(mean_return=475.0)
    log = EvaluationLog()
    assert judge(stop, 0, 0.0, [report(1, 500.0)], log) is None
    for steps, mean in [(10, 500.0), (20, 476.5)]:
        assert judge(stop, 0, 0.0, [report(1, 500.0)], log) is None
        log.add("a" * 32, Evaluation(steps, 1, 30, mean, 5.0, 9.0, 1.0))
    assert judge(stop, 0, 0.0, [report(1, 500.0), report(2, 500.0)], log) is None, "by one of two"
    assert judge(stop, 0, 0.0, [], log) is None
    reached = judge(stop, 0, 0.0, [report(1, 20.0)], log)
    assert reached.kind == "mean_return"
    assert "475 is reached: 500 and 476.5 in the last two evaluations, of 30 episodes each" in reached.reason
    assert judge(StopConfig(), 0, 0.0, [], log) is None
