"""The history of a swarm's figures: even samples, bounded, whoever comes and goes."""

from __future__ import annotations

import itertools
import math

from p2pdrl.node.accounting.report_table import PeerReport
from p2pdrl.node.status.history import MOST_NODES, MOST_SAMPLES, MetricHistory


def report(node, mean_return, steps_per_s=10.0):
    return PeerReport(id=node * 32, boot=1, seq=1, mean_return=mean_return, steps_per_s=steps_per_s)


def test_samples_are_five_seconds_apart_and_columns_equally_long():
    history = MetricHistory()
    for second in range(21):
        reports = [report("a", float(second))] + ([report("b", None)] if second >= 10 else [])
        history.sample(1000.0 + second, 100 * second, reports, {"a" * 32: "ann"})
    document = history.document()
    assert document["times"] == [1000.0, 1005.0, 1010.0, 1015.0, 1020.0]
    assert document["env_steps"] == [0, 500, 1000, 1500, 2000]
    assert document["steps_per_s"] == [10.0, 10.0, 20.0, 20.0, 20.0]
    ann, other = (document["nodes"][node * 32] for node in "ab")
    assert (ann["name"], ann["mean_return"]) == ("ann", [0.0, 5.0, 10.0, 15.0, 20.0])
    assert (other["name"], other["mean_return"]) == ("bbbbbbbb", [None] * 5)
    assert other["steps_per_s"] == [None, None, 10.0, 10.0, 10.0]


def test_it_is_bounded_in_samples_and_spans_the_whole_run():
    history = MetricHistory()
    for at in range(5 * MOST_SAMPLES):
        history.sample(10.0 * at, at, [report("a", 1.0)], {})
    document = history.document()
    times = document["times"]
    assert MOST_SAMPLES // 2 <= len(times) < MOST_SAMPLES
    distances = {later - earlier for earlier, later in itertools.pairwise(times)}
    assert len(distances) == 1
    assert times[0] <= 100.0
    assert times[-1] >= 10.0 * 5 * MOST_SAMPLES - 2 * distances.pop()
    [curve] = document["nodes"].values()
    columns = (document["env_steps"], document["steps_per_s"], curve["mean_return"], curve["steps_per_s"])
    assert [len(column) for column in columns] == [len(times)] * 4


def test_it_is_bounded_in_nodes_and_forgets_those_long_gone():
    history = MetricHistory()
    many = [PeerReport(id=f"{number:032x}", boot=1, seq=1) for number in range(3 * MOST_NODES)]
    history.sample(0.0, 0, many, {})
    assert len(history.document()["nodes"]) == MOST_NODES
    for at in range(1, 3 * MOST_SAMPLES):
        history.sample(20.0 * at, 0, [report("a", 1.0)], {})
    assert list(history.document()["nodes"]) == ["a" * 32]


def test_numbers_that_are_none_and_a_clock_that_goes_back():
    history = MetricHistory()
    history.sample(100.0, 1, [report("a", math.inf)], {})
    history.sample(50.0, 2, [report("a", 1.0)], {})
    history.sample(105.0, 3, [report("a", 2.0)], {})
    document = history.document()
    assert document["times"] == [100.0, 105.0]
    assert document["nodes"]["a" * 32]["mean_return"] == [None, 2.0]
