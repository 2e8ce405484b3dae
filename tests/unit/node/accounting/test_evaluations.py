"""The swarm's learning curve: who evaluates when, and what the curve says."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from p2pdrl.node.accounting.evaluations import Evaluation, EvaluationLog, Turns

A, B, C = ("a" * 32, "b" * 32, "c" * 32)


def evaluation(steps: int, mean: float, std: float = 1.0, episodes: int = 30) -> Evaluation:
    return Evaluation(steps, steps // 10, episodes, mean, std, 10.0, 2.0)


def log_of(
    *means: float, std: float = 1.0, every: int = 100, nodes: tuple[str, ...] = (A, B)
) -> EvaluationLog:
    log = EvaluationLog()
    for number, mean in enumerate(means, 1):
        log.add(nodes[number % len(nodes)], evaluation(number * every, mean, std))
    return log


def test_entries_are_in_the_order_of_steps_whatever_order_they_are_heard_in():
    log = EvaluationLog()
    rng = random.Random(3)
    given = [(node, evaluation(steps, steps)) for steps in range(1, 40) for node in (A, B)]
    rng.shuffle(given)
    assert {log.add(*one) for one in given} == {True}
    assert {log.add(*one) for one in given} == {False}
    steps = [entry.evaluation.env_steps for entry in log.entries]
    assert steps == sorted(steps)
    assert len(log) == 78
    assert (log.newest.node, log.newest.evaluation.env_steps) == (B, 39)
    assert (log.best.node, log.best.evaluation.mean) == (A, 39)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_isn_t_finite_is_passed_over(bad):
    log = EvaluationLog()
    assert not log.add(A, evaluation(1, bad))
    assert not log.add(A, evaluation(1, 0.0, std=bad))
    assert (len(log), log.newest, log.best, log.fall(), log.reached(0.0)) == (0, None, None, None, None)


def test_a_long_curve_is_thinned_where_it_is_old():
    log = log_of(*range(2500), every=1)
    assert 500 <= len(log) <= 1000
    steps = [entry.evaluation.env_steps for entry in log.entries]
    assert steps == sorted(set(steps))
    assert steps[-400:] == list(range(2101, 2501))
    assert not any(log.add(entry.node, entry.evaluation) for entry in log.entries)


def test_a_curve_goes_through_a_checkpoint():
    log = log_of(20, 100, 475)
    again = EvaluationLog()
    again.restore(msgspec.json.decode(msgspec.json.encode(log.rows())))
    assert again.rows() == log.rows()
    fallen = log_of(*range(0, 500, 50), *[0] * 12)
    heir = EvaluationLog()
    heir.restore(msgspec.json.decode(msgspec.json.encode(fallen.rows())))
    assert heir.fall() == fallen.fall() is not None
    assert not again.add(B, evaluation(100, 20))
    for damaged in (None, 7, [["a"]], [["a", [1, 2]]], {"a": 1}, [["a", [-1, 0, 1, 0.0, 0.0, 0.0, 0.0]]]):
        other = EvaluationLog()
        other.restore(damaged)
        assert len(other) == 0


def test_a_goal_is_reached_by_two_evaluations_in_a_row():
    assert log_of(480).reached(475) is None
    assert log_of(480, 470).reached(475) is None
    assert log_of(480, 470, 475).reached(475) is None
    first, second = log_of(100, 475, 480).reached(475)
    assert (first.evaluation.mean, second.evaluation.mean) == (475, 480)
    assert log_of(100, 480).unconfirmed(475).evaluation.mean == 480
    assert log_of(480, 480).unconfirmed(475) is None
    assert log_of(480, 100).unconfirmed(475) is None
    assert log_of(480).unconfirmed(None) is None


def test_one_node_alone_never_reaches_a_goal_where_others_train():
    lies = log_of(500, 500, 500, nodes=(A,))
    assert lies.reached(475) is None
    assert lies.unconfirmed(475).node == A
    assert [entry.evaluation.env_steps for entry in lies.reached(475, alone=True)] == [200, 300]
    assert lies.unconfirmed(475, alone=True) is None
    turns = {node: Turns(node, 1000, 300) for node in (A, B)}
    assert [turns[node].mine(301, [A, B], lies, 475.0, 0.0) for node in (A, B)] == [False, True]
    lies.add(B, evaluation(301, 20.0))
    lies.add(A, evaluation(302, 500.0))
    assert lies.reached(475) is None
    lies.add(A, evaluation(303, 500.0))
    lies.add(B, evaluation(304, 476.0))
    assert [entry.node for entry in lies.reached(475)] == [A, B]


def test_each_mark_is_one_node_s_turn_and_all_have_theirs():
    nodes = [C, A, B]
    turns = {node: Turns(node, 100, 0) for node in nodes}
    log = EvaluationLog()
    seen = []
    for steps in range(0, 1300, 50):
        seen += [(steps, node) for node in nodes if turns[node].mine(steps, nodes, log, None, 0.0)]
    assert [steps for steps, _ in seen] == list(range(100, 1300, 100))
    assert sorted(node for _, node in seen) == [A] * 4 + [B] * 4 + [C] * 4


def test_a_swarm_faster_than_its_marks_has_one_turn_each():
    nodes = [A, B]
    turns = {node: Turns(node, 100, 0) for node in nodes}
    assert [turns[node].mine(10_000, nodes, EvaluationLog(), None, 0.0) for node in nodes] == [True, True]
    assert not any(turns[node].mine(10_000, nodes, EvaluationLog(), None, 0.0) for node in nodes)


def test_a_node_that_joins_late_begins_with_the_next_mark():
    turns = Turns(A, 100, 950)
    assert not turns.mine(999, [A], EvaluationLog(), None, 0.0)
    assert turns.mine(1000, [A], EvaluationLog(), None, 0.0)


def test_a_node_that_doesn_t_train_has_no_turn():
    turns = Turns(A, 100, 0)
    assert not turns.mine(100, [B], EvaluationLog(), None, 0.0)
    assert not turns.mine(150, [A], EvaluationLog(), None, 0.0)
    assert turns.mine(200, [A], EvaluationLog(), None, 0.0)


def test_a_node_rests_nine_times_as_long_as_it_played():
    turns = Turns(A, 100, 0)
    assert turns.mine(100, [A], EvaluationLog(), None, 0.0)
    turns.took(2.0, 3.0)
    assert not turns.mine(200, [A], EvaluationLog(), None, 20.9)
    assert turns.mine(300, [A], EvaluationLog(), None, 21.1)


def test_the_next_node_confirms_a_goal_at_once_and_without_rest():
    nodes = [A, B, C]
    log = EvaluationLog()
    log.add(B, evaluation(100, 480.0))
    turns = {node: Turns(node, 1000, 100) for node in nodes}
    for one in turns.values():
        one.took(5.0, 0.0)
    assert [turns[node].mine(101, nodes, log, 475.0, 1.0) for node in nodes] == [False, False, True]
    assert not turns[C].mine(100, nodes, log, 475.0, 1.0)  # not two of the same moment
    assert not turns[C].mine(101, nodes, log, 490.0, 1.0)
    assert Turns(B, 1000, 100).mine(101, [B], log, 475.0, 1.0)  # alone: it does so itself
    assert Turns(A, 1000, 100).mine(101, [A, B], log, 475.0, 1.0)  # round again
    log.add(C, evaluation(101, 470.0))
    assert not turns[C].mine(102, nodes, log, 475.0, 1.0)


def test_a_curve_that_falls_for_long_is_told():
    up = [20.0 * at for at in range(10)]
    assert log_of(*up).fall() is None
    assert log_of(*up, *[60.0] * 9).fall() is None  # not for long yet
    fall = log_of(*up, *[60.0] * 15).fall()
    assert (fall.last, fall.best_steps) == (60.0, 1000)
    assert "has fallen from 140 (at 1,000 steps) to 60" in str(fall)
    assert log_of(*up, *[120.0] * 15).fall() is None  # little was lost
    assert log_of(*up, *[60.0] * 15, std=300.0).fall() is None  # within chance
    assert log_of(*up, *[60.0] * 15, *[200.0] * 10).fall() is None  # it recovered
    assert log_of(*[200.0] * 5, *[50.0] * 15).fall() is not None  # it came from a good checkpoint
    assert log_of(*[5.0] * 40).fall() is None


@pytest.mark.parametrize(("mean", "std"), [(60.0, 1e200), (-1e308, 1e308), (1e308, 0.0)])
def test_numbers_as_great_as_a_peer_may_send_are_survived(mean, std):
    log = log_of(*[20.0 * at for at in range(10)], *[mean] * 15, std=std)
    assert str(log.fall())
    assert log.best.evaluation.mean == max(mean, 180.0)


def test_chance_alone_is_seldom_taken_for_a_fall():
    told = 0
    for seed in range(200):
        rng = random.Random(seed)
        means = [rng.gauss(100.0, 20.0 / math.sqrt(30)) for _ in range(60)]
        told += log_of(*means, std=20.0).fall() is not None
    assert told <= 6
