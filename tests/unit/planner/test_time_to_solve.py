"""`scripts/time_to_solve.py`: virtual swarms of trainers, what they cost, and the table of their rows."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections import Counter
from itertools import accumulate, product
from pathlib import Path

import msgspec
import numpy as np
import pytest

from p2pdrl.config.loader import resolve
from p2pdrl.errors import UsageError
from p2pdrl.planner.description import LAN
from p2pdrl.rl.registry import build_trainer
from p2pdrl.tensors.checkpoint import Checkpoint, chunks

SCRIPTS = Path(__file__).parents[3] / "scripts"
SMALL = (
    "task.env.num_envs=4",
    "task.algorithm.unroll_steps=16",
    "task.algorithm.minibatches=2",
    "task.algorithm.epochs=2",
    "task.stop.mean_return=none",
    "task.stop.env_steps=2000",
    "task.evaluation.every=1000",
    "task.evaluation.episodes=4",
)


def from_scripts(monkeypatch, name):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module(name)


@pytest.fixture
def virtual(monkeypatch):
    yield from_scripts(monkeypatch, "support.virtual_training")
    forget()


@pytest.fixture
def script(monkeypatch):
    yield from_scripts(monkeypatch, "time_to_solve")
    forget()


def forget():
    for name in [one for one in sys.modules if one.partition(".")[0] in {"time_to_solve", "support"}]:
        sys.modules.pop(name)


def task_of(*sets):
    return resolve(files=["cartpole"], sets=[*SMALL, *sets]).config.task


def swarm_of(virtual, nodes, *sets, costs=None, **options):
    costs = virtual.Costs(0.002, 0.001, 0.00001) if costs is None else costs
    return virtual.VirtualTraining(task_of(*sets), nodes, costs, LAN, seed=7, **options)


def test_time_is_what_steps_and_gradients_cost(virtual):
    swarm = swarm_of(virtual, 1)
    seen = []
    learner = None

    async def plan(running):
        nonlocal learner
        (learner,) = running.learners
        while True:
            await asyncio.sleep(0.01)
            seen.append((asyncio.get_running_loop().time(), learner.updates, learner.env_steps))

    assert not swarm.run(1000.0, plan=plan)
    assert learner.gradients - 4 * learner.updates in (0, 4)  # an update may be under way
    # each pass over an update's steps has every one of them in one of its two minibatches
    per_step_s = 0.002 + 2 * 0.00001
    first = next(seconds for seconds, updates, _ in seen if updates == 10)
    steps = next(steps for _, updates, steps in seen if updates == 10)
    assert first == pytest.approx(steps * per_step_s + 10 * 4 * 0.001, abs=0.02)
    assert [one.env_steps // 1000 for one in swarm.judged] == [1, 2]


@pytest.mark.parametrize(
    "strategy",
    ["adpsgd", *(pytest.param(one, marks=pytest.mark.slow) for one in ("grad_average", "server_async"))],
)
def test_a_seed_gives_one_course(virtual, strategy):
    courses = []
    for _ in range(2):
        swarm = swarm_of(virtual, 3, f"task.strategy.name={strategy}", "task.stop.env_steps=1000")
        swarm.run(1000.0)
        courses.append((swarm.judged, [learner.updates for learner in swarm.learners], swarm.bytes_per_node))
    assert courses[0] == courses[1]
    assert courses[0][2] > 0


def test_nodes_see_worlds_of_their_own_and_begin_with_one_policy(virtual):
    swarm = swarm_of(virtual, 3, "task.strategy.name=local")
    starts = []

    async def plan(running):
        starts.extend(learner.now() for learner in running.learners)

    swarm.run(1000.0, plan=plan)
    assert all((one == starts[0]).all() for one in starts)
    ends = [learner.x for learner in swarm.learners]
    assert not np.allclose(ends[0], ends[1])


@pytest.mark.slow
def test_averaged_gradients_keep_replicas_equal(virtual):
    swarm = swarm_of(virtual, 3, "task.strategy.name=grad_average", "task.stop.env_steps=4200")
    apart = []

    async def plan(running):
        await asyncio.sleep(2.0)  # a group is agreed on by then
        while True:
            await asyncio.sleep(0.023)
            vectors = [learner.now() for learner in running.learners]
            apart.append(max(np.abs(vectors[0] - other).max() for other in vectors[1:]))

    swarm.run(1000.0, plan=plan)
    assert len(apart) > 20
    assert np.median(apart) < 1e-6  # now and then one is caught between two gradients


@pytest.mark.slow
def test_a_slow_node_makes_fewer_updates_and_holds_nobody_up_under_gossip(virtual):
    even, uneven = (
        swarm_of(virtual, 3, "task.stop.env_steps=3000", factors=factors)
        for factors in ((), (1.0, 1.0, 10.0))
    )
    even.run(1000.0)
    uneven.run(1000.0)
    quick, *_, slow = [learner.updates for learner in uneven.learners]
    assert quick > 8 * slow
    rate = quick / uneven.judged[-1].seconds
    assert rate == pytest.approx(even.learners[0].updates / even.judged[-1].seconds, rel=0.1)


@pytest.mark.parametrize("strategy", ["adpsgd", pytest.param("grad_average", marks=pytest.mark.slow)])
def test_nodes_come_and_go(virtual, strategy):
    swarm = swarm_of(virtual, 2, f"task.strategy.name={strategy}", "task.stop.env_steps=4000")
    joined, left = [], []

    async def plan(running):
        await asyncio.sleep(1.0)
        donor = running.learners[0].now()
        await running.join()
        joined.append(np.abs(running.learners[2].now() - donor).max())
        await asyncio.sleep(1.0)
        await running.kill(1)
        left.append(running.learners[1].updates)

    swarm.run(1000.0, plan=plan)
    assert joined[0] < 0.1
    updates = [learner.updates for learner in swarm.learners]
    assert updates[1] == left[0]
    assert min(updates[0], updates[2]) > left[0] + 5


def test_a_goal_ends_it_and_is_told(virtual):
    told = []
    swarm = swarm_of(virtual, 1, "task.stop.env_steps=100000", say=told.append)
    assert swarm.run(5.0)
    assert told == swarm.judged
    assert len(told) == 2


def test_costs_are_measured(virtual):
    costs = virtual.measured_costs(task_of())
    assert costs.env_step_s == 0
    assert costs.gradient_s + 32 * costs.row_s > 0
    assert min(costs.gradient_s, costs.row_s) >= 0


def test_a_setting_says_which_nodes_are_slow_and_what_is_told_of_it(script):
    costs = script.Costs()
    setting = script.Setting(
        "slow", "cartpole", ("task.scaling=batch",), 475.0, "lan", costs, ("1x10",), ((60.0, 2),)
    )
    assert setting.factors(3) == (1.0, 1.0, 10.0)
    with pytest.raises(UsageError, match="COUNTxFACTOR"):
        setting.factors(0)
    assert setting.task(3).seed == 3
    told = setting.row(3, 3)
    assert (told["scaling"], told["slow"], told["members"]) == ("batch", "1x10", "60:2")


def test_nodes_come_and_go_while_it_trains(script):
    sets = ("task.evaluation.every=2000", "task.stop.env_steps=8000", "task.evaluation.episodes=1")
    setting = script.Setting(
        "elastic", "cartpole", sets, 500.0, "lan", script.Costs(0.002, 0.001), members=((1.0, 3), (3.0, 1))
    )  # fmt: skip
    row = script.run_virtual(setting, 2, 4)
    curve = json.loads(row["curve"])
    assert row["solved"] == 0
    # 1,000 steps a second of two nodes, 1,500 of three, 500 of one
    assert 1000 * 1 + 1500 * 2 < curve[-1][1] < 9500
    assert curve[-1][0] > 1 + 2 + (8000 - 1000 - 3000) / 500 * 0.8


@pytest.mark.parametrize(
    ("preset", "sets"),
    [
        ("impala", ()),
        pytest.param("apex_dqn", ("task.algorithm.learning_starts=200",), marks=pytest.mark.slow),
    ],
)
def test_one_learns_and_all_act(script, preset, sets):
    sets = (*sets, "task.stop.env_steps=2000", "task.evaluation.every=1000", "task.evaluation.episodes=2")
    rows = []
    for nodes in (1, 4, 4):
        setting = script.Setting("", preset, sets, 500.0, "lan", script.Costs(0.002, 0.0005), learners=1)
        rows.append(script.run_virtual(setting, nodes, 4))
    alone, together, again = rows
    assert together["curve"] == again["curve"], "a seed gives one course"
    assert together["seconds"] == pytest.approx(alone["seconds"] / 4, rel=0.2)
    assert (alone["learners"], alone["mb"]) == (1, 0)
    assert together["mb"] > 0
    assert 0 < alone["learner_busy"] < together["learner_busy"] < 1
    assert together["staleness"] < 8


def row(name, nodes, seed, seconds, samples, *, solved=True, best=500.0):
    values = {"name": name, "preset": "cartpole", "goal": "475.0", "nodes": nodes, "seed": seed,
              "solved": int(solved), "seconds": seconds, "samples": samples, "gradients": 10, "mb": 1.5,
              "waited": 0.02, "best": best, "kind": "virtual"}  # fmt: skip
    return {key: str(value) for key, value in values.items()}


def test_a_sentence_says_what_nodes_bring_and_where_that_is_from(script, tmp_path, monkeypatch, capsys):
    from support.rows import Rows

    file = Rows(tmp_path / "runs.csv", script.FIELDS)
    for seed in (1, 2, 3):
        for name, nodes, seconds in (
            ("plain", 1, 100 + seed),
            ("best", 1, 90 + seed),
            ("plain", 3, 30 + seed),
        ):
            file.add(row(name, nodes, seed, seconds, 50_000) | {"pace_ms": "2.0"})
    for nodes, words in (
        (3, "in 32 s with 3 nodes, in 92 s with one: 2.9 times"),
        (4, "doesn't say what 4 nodes"),
    ):
        arguments = [
            "time_to_solve.py",
            "cartpole",
            "--goal",
            "475",
            "--tell",
            str(nodes),
            "--out",
            str(tmp_path),
        ]
        monkeypatch.setattr(sys, "argv", arguments)
        assert script.main() == 0
        assert words in capsys.readouterr().out


def asked(monkeypatch, script, folder, *options):
    """Ask for two seeds of two nodes on CartPole."""
    wanted = ("--goal", "475", "--nodes", "2", "--seeds", "1", "2", "--gradient-ms", "1", "1")
    command = ["time_to_solve.py", "cartpole", *wanted, "--out", str(folder), *options]
    monkeypatch.setattr(sys, "argv", command)
    return script.main()


def test_what_is_there_isnt_run_again_unless_it_was_made_in_another_way(
    script, tmp_path, monkeypatch, capsys
):
    from support.rows import Rows

    file = Rows(tmp_path / "runs.csv", script.FIELDS)
    for name in ("adpsgd", "adpsgd task.scaling=batch"):
        sets = tuple(name.split()[1:])
        setting = script.Setting(name, "cartpole", sets, 475.0, "lan", script.Costs(0.002, 0.001, 1e-6))
        for seed in (1, 2):
            file.add(row(name, 2, seed, 46, 46_000) | setting.row(2, seed))
    assert asked(monkeypatch, script, tmp_path) == 0
    assert asked(monkeypatch, script, tmp_path, "--set", "task.scaling=batch") == 0
    assert len(file.read()) == 4
    for options, key in (
        (("--slow", "1x10"), "slow is nothing instead of 1x10"),
        (("--real",), "kind is virtual instead of real"),
        (("--pace-ms", "0"), "pace_ms is 2.0 instead of 0.0"),
        (("--name", "adpsgd", "--set", "task.scaling=batch"), "scaling is auto instead of batch"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit, match="2"):
            asked(monkeypatch, script, tmp_path, *options)
        assert f"{key}: say another --name or --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--set", "task.evaluation.every=0"), "never evaluated: --set task.evaluation.every=STEPS"),
        (("--real", "--learners", "1"), "are about virtual swarms"),
        (("--slow", "3x10"), "COUNTxFACTOR"),
    ],
)
def test_what_cant_be_measured_is_refused_before_anything_runs(
    script, tmp_path, monkeypatch, capsys, options, words
):
    with pytest.raises(SystemExit, match="2"):
        asked(monkeypatch, script, tmp_path, *options)
    assert words in capsys.readouterr().err


def test_the_table_compares_with_the_quickest_single_node(script):
    rows = [
        *(row("constant", 1, seed, 100 + seed, 50_000 + 1000 * seed) for seed in (1, 2, 3)),
        *(row("other", 1, seed, 90 + seed, 45_000) for seed in (1, 2, 3)),
        *(row("constant", 2, seed, 46, 46_000) for seed in (1, 2)),
        row("constant", 2, 3, 300, 300_000, solved=False, best=310.0),
        row("constant", 4, 1, 300, 300_000, solved=False, best=200.0),
        row("constant", 4, 2, "", "", solved=False, best=""),  # was stopped, and nothing else is known
    ]
    rows += [row("real", 1, 1, 5, 50_000) | {"pace_ms": "0.0"}]  # nobody's baseline but its own
    lines = script.table(rows)
    two = next(line for line in lines if line.startswith("| constant | 2 |"))
    assert two == (
        "| constant | 2 | 2 of 3 | 46 | 2.00 (0.00 to 2.02) | 46,000 | 1.02 | 10 | 1.5 | 2% |  |  | 310 |"
    )  # fmt: skip
    four = next(line for line in lines if line.startswith("| constant | 4 |"))
    assert four == "| constant | 4 | 0 of 2 |  |  |  |  |  |  |  |  |  | 200 |"
    assert any(line.startswith("| **cartpole, not paced, to 475.0**") for line in lines)
    assert len({line.count("|") for line in lines}) == 1


def test_of_an_even_number_of_seeds_the_median_lies_between_two(script):
    rows = [
        *(row("constant", 1, seed, seconds, 50_000) for seed, seconds in ((1, 100), (2, 140))),
        *(row("constant", 2, seed, seconds, 50_000) for seed, seconds in ((1, 50), (2, 70))),
        row("constant", 4, 1, 20, 50_000),
        row("constant", 4, 2, 300, 300_000, solved=False),
    ]
    lines = script.table(rows)
    two = next(line for line in lines if line.startswith("| constant | 2 |"))
    assert two.startswith("| constant | 2 | 2 of 2 | 60 (50 to 70) | 2.00 |")
    four = next(line for line in lines if line.startswith("| constant | 4 |"))
    assert four.startswith("| constant | 4 | 1 of 2 | 20 |  |"), "half of them solved says nothing"


def test_the_interval_of_a_ratio_is_the_bootstrap_s(script):
    alone, two = (400, 500, 650, 900, 1300), (210, 230, 300, 390, 480)
    rows = [row("constant", 1, seed, seconds, 50_000) for seed, seconds in enumerate(alone)]
    rows += [row("constant", 2, seed, seconds, 50_000) for seed, seconds in enumerate(two)]
    # of five drawn from five the median is each of them as often as all 5^5 ways to draw say
    medians = [Counter(sorted(drawn)[2] for drawn in product(values, repeat=5)) for values in (alone, two)]
    ratios = sorted((a / b, n * m / 5**10) for (a, n), (b, m) in product(*(one.items() for one in medians)))
    below = list(accumulate(share for _, share in ratios))
    low, high = (ratios[next(i for i, part in enumerate(below) if part >= at)][0] for at in (0.05, 0.95))
    lines = script.table(rows)
    line = next(line for line in lines if line.startswith("| constant | 2 |"))
    assert f"| {650 / 300:.2f} ({low:.2f} to {high:.2f}) |" in line
    assert any("| 1.00 |" in line for line in lines), "the quickest single node is not compared with itself"


def checkpoint_of(task, favours=None):
    """A checkpoint's content; of a policy that always takes the action that it ``favours``."""
    trainer = build_trainer(task, seed=1, device="cpu")
    vector = trainer.flat.copy()
    if favours is not None:
        (bias,) = (entry for entry in trainer.layout.entries if entry.shape == (2,))
        trainer.layout.views(vector)[bias.name][favours] = 100.0
    meta = {"layout": trainer.layout.to_wire(), "task": msgspec.to_builtins(task)}
    made = Checkpoint(vector, meta=meta)
    trainer.close()
    return b"".join(bytes(part) for part in chunks(made))


@pytest.mark.parametrize("waits", [False, True])
def test_policies_of_a_real_swarm_are_judged_to_the_second_at_the_goal(script, waits):
    """A cart that is always pushed one way falls after 8 to 10 steps; one at random after 20 and more."""
    sets = ("task.evaluation.episodes=10",)
    setting = script.Setting("real", "cartpole", sets, 12.0, "lan", script.Costs())
    judge = script.Judge(setting, waits=waits)
    falls, random = checkpoint_of(setting.task(0), 1), checkpoint_of(setting.task(0))
    for number, policy in enumerate((random, falls, random, random, falls), 1):
        judge.take(float(number), 1000 * number, policy)
    judge.finish()
    assert judge.solved
    assert [(one.seconds, one.env_steps) for one in judge.judged] == [(n, 1000 * n) for n in range(1, 5)]
    assert [one.value >= 12.0 for one in judge.judged] == [True, False, True, True]
