"""`scripts/compare_systems.py`: what a row says of a course, its table, its picture, and that it goes on."""

from __future__ import annotations

import csv
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2pdrl.config.loader import preset_names, resolve

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module("compare_systems")
    for name in [one for one in sys.modules if one.partition(".")[0] in {"compare_systems", "support"}]:
        sys.modules.pop(name)


@pytest.fixture
def yard(script):
    return script.Yardstick(
        "CartPole-v1", 475.0, 3, pace_s=0.002, budget_s=60, after_s=5, every=10_000, episodes=20
    )


def course_of(script, evaluations):
    """A course sampled every second, 1,000 steps and 300 bytes to each; evaluations (second, steps, mean)."""
    course = script.Course()
    for second, steps, mean in evaluations:
        course.see(second, [{"node": f"n{steps % 3}", "env_steps": steps, "mean": mean}])
    for second in range(1, 11):
        figures = {"seconds": float(second), "bytes": 300.0 * second, "cpu_s": second / 2}
        course.samples.append(figures | {"swarm_env_steps": 1000 * second})
    return course


def test_every_system_has_a_preset_that_goes_with_the_task(script, yard):
    for system in script.SYSTEMS.values():
        assert system.preset in preset_names()
        command = script.command_of(system, 7, yard)
        assert command[:2] == ["--config", system.preset]
        sets = [word.removeprefix("--set=") for word in command[2:]]
        found = resolve(files=[system.preset], sets=sets).config
        assert (found.task.seed, found.task.stop.mean_return) == (7, None)
        assert (found.task.evaluation.every, found.task.evaluation.mode) == (10_000, "sampled")


def test_a_node_makes_as_many_steps_a_second_with_any_number_of_environments_and_learners(script, yard):
    def delay_s(name):
        *_, last = script.command_of(script.SYSTEMS[name], 7, yard)
        return float(last.removeprefix("--set=node.learner.step_delay_s="))

    assert delay_s("sgp") == 8 * 0.002  # 8 environments
    assert delay_s("gala") == 16 * 0.002
    assert delay_s("hogwild") == 2 * 8 * 0.002  # two learners with 8 each


def test_who_does_what(script):
    assert script.SYSTEMS["impala"].placement(3) == "1 learner + 2 actor"
    assert script.SYSTEMS["rapid"].placement(5) == "1 learner + 4 actor"
    assert script.SYSTEMS["sgp"].placement(3) == "3 all"


def test_the_goal_is_two_evaluations_in_a_row_in_the_order_of_their_steps(script):
    def place(*means):
        return script.reached([(0.0, number, mean) for number, mean in enumerate(means)], 475.0)

    assert place(480, 470, 475, 475, 100) == 3
    assert place(480, 470, 480) is None
    assert place(480) is None
    assert place() is None


def test_a_row_tells_figures_up_to_the_goal_and_the_worst_after_it(script):
    # An evaluation that is heard of late, at second 6, is the first of the two.
    course = course_of(script, [(2.0, 1500, 90), (4.0, 3200, 490), (6.0, 3100, 480), (8.0, 5000, 300)])
    assert [mean for _, _, mean in course.points] == [90, 480, 490, 300]
    row = script.summary(course, 475.0, nodes=3)
    assert (row["goal_s"], row["goal_steps"]) == ("6.0", "3200")
    assert (row["bytes_per_node"], row["cpu_s"]) == (600, 3.0)
    assert (row["worst_after"], row["best"], row["last"]) == (300, 490, 300)
    assert (row["seconds"], row["env_steps"]) == (10.0, 10_000)
    assert json.loads(row["curve"])[1] == [6.0, 3100, 480.0]
    assert json.loads(row["course"])[-1] == [10.0, 10_000, 1000]


def test_an_evaluation_counts_once_and_from_when_it_was_first_seen(script):
    course = script.Course()
    one = {"node": "a", "env_steps": 10, "mean": 5.0}
    course.see(1.0, [one])
    course.see(2.0, [one, one | {"env_steps": 20}])
    assert course.points == [(1.0, 10, 5.0), (2.0, 20, 5.0)]


def test_a_row_of_a_system_that_does_not_get_there_has_figures_to_the_end(script):
    row = script.summary(course_of(script, [(3.0, 2000, 480.0)]), 475.0, nodes=2)
    assert (row["goal_s"], row["goal_steps"], row["worst_after"]) == ("", "", "")
    assert (row["bytes_per_node"], row["cpu_s"], row["best"]) == (1500, 5.0, 480.0)


def test_staleness_is_a_mean_over_nodes_and_of_unrolls_apart(script):
    stale = script.Staleness()
    assert stale.row() == {"staleness": "", "unroll_staleness": ""}
    stale.see("a", {"accounting": {"sgp": {"staleness": {"0": 9, "1": 9}}}})
    stale.see("a", {"accounting": {"sgp": {"staleness": {"0": 2, "1": 1}}}})  # counts are since the start
    stale.see("b", {"accounting": {"sgp": {"staleness": {"4": 1, ">1024": 0}}}}, [
        "# TYPE p2pdrl_unroll_staleness_versions histogram",
        'p2pdrl_unroll_staleness_versions_bucket{le="1"} 3',
        "p2pdrl_unroll_staleness_versions_sum 14.0",
        "p2pdrl_unroll_staleness_versions_count 4.0",
        "p2pdrl_other_sum 9",
    ])  # fmt: skip
    assert stale.row() == {"staleness": 1.25, "unroll_staleness": 3.5}


def row_of(script, name, seed, **changed):
    course = course_of(script, [(2.0, 1500, 480.0), (5.0, 3000, 490.0), (7.0, 6000, 440.0)])
    system = script.SYSTEMS[name]
    row = {"system": name, "preset": system.preset, "task": "CartPole-v1", "seed": seed, "goal": 475.0}
    row |= {"nodes": 3, "roles": system.placement(3), "staleness": 0.5, "unroll_staleness": "", "busy": 0.4}
    row |= script.summary(course, 475.0, nodes=3)
    return {key: str(value) for key, value in (row | changed).items()}


def test_the_table_has_the_quickest_first_and_leaves_no_system_out(script):
    never = {"goal_s": "", "goal_steps": "", "worst_after": "", "best": 120.0, "seconds": 60.2}
    rows = [
        row_of(script, "impala", 51, **never),
        row_of(script, "sgp", 51, goal_s="20.0"),
        row_of(script, "gala", 51),
        row_of(script, "gala", 52, goal_s="9.0", worst_after="200.0"),
        row_of(script, "sgp", 52, **never),
    ]
    _, _, *lines = script.table(rows)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [line[0] for line in cells] == ["gala", "sgp", "impala"]
    assert cells[0][2:5] == ["51, 52", "5 to 9", "3,000"]
    assert cells[0][9] == "200"
    assert cells[1][3] == "20 (1 of 2)"
    assert cells[2][1] == "1 learner + 2 actor"
    assert cells[2][3:5] == ["not in 60 s", "not in 10,000"]
    assert cells[2][9:11] == ["–", "120"]


def test_the_picture_has_a_line_of_panels_for_each_family(script, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row_of(script, "impala", 51), row_of(script, "sgp", 51), row_of(script, "sgp", 52)]
    script.draw(rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 5000


def test_any_preset_may_take_part_and_nothing_else(script):
    assert list(script.chosen(["impala", "pendulum"])) == ["impala", "pendulum"]
    assert script.chosen(["pendulum"])["pendulum"].placement(3) == "3 all"
    assert script.chosen(None) == script.SYSTEMS
    with pytest.raises(ValueError, match="neither a system nor a preset: impalla"):
        script.chosen(["impalla"])


def test_what_is_there_is_not_run_again_and_what_does_not_come_up_is_passed_over(
    script, yard, tmp_path, monkeypatch
):
    file = script.Rows(tmp_path / "runs.csv", script.FIELDS)
    asked = []

    def run(name, system, seed, yard):
        asked.append((name, seed))
        if name == "gala":
            raise SystemExit("after 300 s still not: all nodes are there")
        return row_of(script, name, seed) | {"env_steps": 10_000, "seconds": 10.0, "busy": 0.4}

    monkeypatch.setattr(script, "run", run)
    systems = {name: script.SYSTEMS[name] for name in ("sgp", "gala", "impala")}
    assert script.measure(file, {"sgp": systems["sgp"]}, [51], yard) == []
    assert script.measure(file, systems, [51, 52], yard) == ["gala", "gala"]
    assert asked == [("sgp", 51), ("gala", 51), ("impala", 51), ("sgp", 52), ("gala", 52), ("impala", 52)]
    rows = file.read()
    assert [(row["system"], row["seed"]) for row in rows] == [
        ("sgp", "51"), ("impala", "51"), ("sgp", "52"), ("impala", "52"),
    ]  # fmt: skip
    assert all(row["commit"] and row["command"].startswith("python ") for row in rows)


def test_a_node_waits_once_it_is_held_sees_all_others_and_its_learner_is_up(script):
    learner = {"pid": 7, "starting_s": None}
    held = {"state": "paused", "members": {"alive": 3}, "learner": learner}
    assert script.waits(held, 3)
    assert script.waits(held | {"learner": None}, 3)  # it only acts
    assert not script.waits(held, 4)
    assert not script.waits(held | {"state": "training"}, 3)
    assert not script.waits(held | {"learner": learner | {"pid": None}}, 3)
    assert not script.waits(held | {"learner": learner | {"starting_s": 0.5}}, 3)
    assert not script.waits({}, 3)  # it doesn't answer


def test_rows_of_other_terms_do_not_mix(script, yard):
    row = row_of(script, "sgp", 51, pace_ms=2.0)
    assert yard.measured(row)
    assert not yard.measured(row | {"pace_ms": "1.0"})
    assert not yard.measured(row | {"nodes": "4"})
    assert not yard.measured(row | {"goal": "195.0"})
    assert yard.measured(row | {"task": "Acrobot-v1", "pace_ms": "1.0"})
    assert yard.measured(row_of(script, "one node", 51, pace_ms=2.0, nodes=1))


@pytest.mark.slow
def test_a_system_is_run_once_and_then_read(tmp_path):
    options = "--only impala --nodes 2 --budget-s 15 --goal 1 --after-s 1 --every 500 --episodes 2"
    command = [sys.executable, SCRIPTS / "compare_systems.py", *options.split(), "--out", tmp_path]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=250,
            env=os.environ | {"PYTHONPATH": str(SCRIPTS.parent)},
        )  # fmt: skip

    first = run()
    with (tmp_path / "runs.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["system"], row["seed"], row["roles"]) == ("impala", "51", "1 learner + 1 actor")
    # the only node that acts makes 500 a second, and a little was on its way
    assert 0 < int(row["env_steps"]) <= 600 * float(row["seconds"])
    assert int(row["bytes_per_node"]) > 1000
    assert float(row["cpu_s"]) > 0
    assert "| impala | 1 learner + 1 actor | 51 |" in first.stdout
    assert (tmp_path / "table.md").read_text() == first.stdout
    again = run()
    assert again.stdout == first.stdout
    assert again.stderr == ""
