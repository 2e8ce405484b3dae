from __future__ import annotations

import pytest

from p2pdrl.node.status.health import HealthInputs, judge


def test_the_defaults_are_well():
    assert judge(HealthInputs()) == (True, [])


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (HealthInputs(learner_down_s=16.0), "down for 16 s"),
        (HealthInputs(learner_down_s=1.0, learner_restarts_in_a_row=3), "died 3 times in a row"),
        (HealthInputs(learner_down_s=16.0, learner_death="died of X"), "down for 16 s: it died of X"),
        (HealthInputs(learner_starting_s=61.0), "starting for 61 s"),
        (HealthInputs(learner_stopped_s=4.0), "process has been stopped for 4 s"),
        (HealthInputs(progress_age_s=61.0), "no update for 61 s"),
        (HealthInputs(loop_lag_s=1.5), "1.5 s late"),
        (HealthInputs(storage_error="the disk is full"), "the disk is full"),
        (HealthInputs(seeds_given=True, alone_s=16.0), "none of the peers"),
        (HealthInputs(adopting_s=61.0), "take over"),
        (HealthInputs(quarantined=("bad-node",)), "bad-node"),
    ],
)
def test_each_trouble_is_told_in_words(inputs, words):
    healthy, reasons = judge(inputs)
    assert not healthy
    assert len(reasons) == 1
    assert words in reasons[0]


@pytest.mark.parametrize(
    "inputs",
    [
        HealthInputs(learner_down_s=14.0, learner_restarts_in_a_row=1),
        HealthInputs(progress_age_s=59.0),
        HealthInputs(learner_starting_s=59.0),
        HealthInputs(learner_death="died of X"),
        HealthInputs(loop_lag_s=0.9),
        HealthInputs(seeds_given=False, alone_s=1e6),
        HealthInputs(seeds_given=True, alone_s=14.0),
    ],
)
def test_within_the_limits_is_well(inputs):
    assert judge(inputs) == (True, [])


def test_a_dead_learner_is_not_also_told_as_slow():
    _, reasons = judge(HealthInputs(learner_down_s=100.0, progress_age_s=100.0))
    assert len(reasons) == 1


def test_reasons_are_bounded_and_the_gravest_come_first():
    inputs = HealthInputs(
        learner_down_s=99.0,
        storage_error="x" * 500,
        loop_lag_s=9.0,
        seeds_given=True,
        mode_error="no port",
        adopting_s=99.0,
        quarantined=("q",),
    )
    _, reasons = judge(inputs)
    assert len(reasons) == 5
    assert "learner" in reasons[0]
    assert max(map(len, reasons)) <= 200
