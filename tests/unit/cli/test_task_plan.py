"""``p2pdrl pipeline plan --config`` with a child that only pretends to measure."""

from __future__ import annotations

import json
import subprocess

import msgspec
import pytest

from p2pdrl.config.task import TaskConfig
from p2pdrl.pipeline.layers import Layer
from p2pdrl.workers.pipeline.protocol import Blocks

PLAN = ("pipeline", "plan", "--config", "amb_pp")
LAYERS = tuple(Layer(f"layer {number}", 0.01, 0.02, 1e6, 1e5, 5e4) for number in range(3))


def strategy(**options) -> list[str]:
    return [part for key, value in options.items() for part in ("--set", f"task.strategy.{key}={value}")]


@pytest.fixture(autouse=True)
def _width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def child(monkeypatch):
    """Stands in for the block lister; returns what it was called with, and what it will answer."""
    calls = []
    answer = {"code": 0, "error": "", "layers": LAYERS}

    def run(command, *, input, **_options):  # noqa: A002
        calls.append((command[1:], msgspec.json.decode(input, type=TaskConfig)))
        parts = int(command[command.index("--parts") + 1])
        blocks = Blocks(parts, answer["layers"], "cpu", answer["error"])
        return subprocess.CompletedProcess(command, answer["code"], msgspec.json.encode(blocks))

    monkeypatch.setattr("p2pdrl.cli.pipeline_plan.subprocess.run", run)
    return calls, answer


def test_blocks_are_numbered_and_the_plan_of_the_task_is_drawn(p2pdrl, child):
    calls, _ = child
    result = p2pdrl(*PLAN, *strategy(microbatches=4), "--set", "node.learner.threads=2")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == (
        "CartPole-v1: 3 blocks, measured on cpu with 1/4 of a minibatch (256 steps)\n"
        "\n"
        "block  what it is  parameters  output    kept  forward  backward\n"
        "    0  layer 0        1.00 MB  100 kB  150 kB    10 ms     20 ms\n"
        "    1  layer 1        1.00 MB  100 kB  150 kB    10 ms     20 ms\n"
        "    2  layer 2        1.00 MB  100 kB  150 kB    10 ms     20 ms\n"
        "\n"
        "cuts      [1]: rank 0 holds 0; rank 1 holds 1, 2\n"
        "\n"
        "1f1b: 4 microbatches through 2 stages\n"
        "\n"
        "rank 0  F1 F2 ...............B1--- F3 .........B2--- F4 .........B3--- ............B4--- \n"
        "rank 1  ...F1--- B1--------- F2--- B2--------- F3--- B3--------- F4--- B4--------- ......\n"
        "        0                                                                          0.27 s\n"
        "F1--: forward of microbatch 1, as long as it takes; B: backward; dots: waiting\n"
        "\n"
        "step      0.27 s; one device takes 0.36 s\n"
        "speed-up  1.33 of 2; with equal stages and free messages 1.60\n"
        "\n"
        "rank   computes   bubble   stored activations\n"
        "   0     0.12 s    55.6%                    2\n"
        "   1     0.24 s    11.1%                    1\n"
        "\n"
        "bubble    33.3%, the ranks' mean\n"
    )
    ((command, task),) = calls
    assert command[:2] == ["-m", "p2pdrl.workers.pipeline.measure"]
    assert command[command.index("--parts") + 1] == "16", "an unroll has 4 minibatches of 4 microbatches"
    assert command[command.index("--threads") + 1] == "2"
    assert task.strategy.microbatches == 4


def test_json_has_blocks_and_every_action(p2pdrl, child):
    result = p2pdrl(*PLAN, *strategy(stages=3, cuts=[1, 2], microbatches=2), "--json")
    document = json.loads(result.stdout)
    assert [block["number"] for block in document["blocks"]] == [0, 1, 2]
    assert document["blocks"][1]["output_bytes"] == 1e5
    plan = document["plan"]
    assert (plan["cuts"], plan["blocks_per_rank"], plan["microbatches"]) == ([1, 2], [[0], [1], [2]], 2)
    # 1F1B of equal stages: (M + S - 1)(f + b) seconds, and each idles (S - 1)/(M + S - 1) of them
    assert plan["step_s"] == pytest.approx(4 * 0.03)
    assert plan["bubble"] == pytest.approx(0.5)
    assert document["why"] is None, "backend = stream leaves no choice"


def test_links_cost_and_auto_says_whether_it_pays(p2pdrl, child):
    options = [*strategy(backend="auto", stages=3, microbatches=2), "--json"]
    slow = json.loads(p2pdrl(*PLAN, *options, "--latency-s", "1").stdout)
    quick = json.loads(p2pdrl(*PLAN, *options).stdout)
    assert slow["why"].startswith("a pipeline over rank 0, rank 1, rank 2 would take")
    assert slow["plan"]["step_s"] > 1 > quick["plan"]["step_s"]
    assert quick["why"].startswith("a pipeline over rank 0, rank 1, rank 2 takes")


def test_one_stage_holds_all(p2pdrl, child):
    plan = json.loads(p2pdrl(*PLAN, *strategy(stages=1, microbatches=2), "--json").stdout)["plan"]
    assert (plan["cuts"], plan["step_s"], plan["bubble"]) == ([], pytest.approx(2 * 3 * 0.03), 0.0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cuts": [40]}, "task.strategy.cuts (in --set): this model's blocks are numbered"),
        ({"cuts": [3]}, "task.strategy.cuts = [3] must rise from 1 to at most 2"),
        ({"stages": 4}, "task.strategy.stages: 4 stages need as many blocks, and this model has 3"),
        ({"schedule": "interleaved", "chunks": 2}, "task.strategy.chunks: interleaved with chunks = 2"),
    ],
)
def test_blocks_are_listed_where_the_strategy_is_refused(p2pdrl, child, options, says):
    result = p2pdrl(*PLAN, *strategy(**options))
    assert result.exit_code == 2
    assert "    2  layer 2 " in result.stdout
    assert "rank 0" not in result.stdout
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_other_strategies_have_blocks_and_no_plan(p2pdrl, child):
    calls, _ = child
    result = p2pdrl("pipeline", "plan", "--config", "ppo")
    assert result.exit_code == 0
    assert "with a whole minibatch" in result.stdout
    assert "add --set task.strategy.name=pipeline" in result.stdout
    assert calls[0][0][calls[0][0].index("--parts") + 1] == "32"


def test_a_configuration_that_is_wrong_elsewhere_is_refused_at_once(p2pdrl, child):
    calls, _ = child
    result = p2pdrl(*PLAN, *strategy(stages=99), "--set", "task.env.num_envs=0")
    assert result.exit_code == 2
    assert "task.strategy.stages" in result.stderr
    assert "task.env.num_envs" in result.stderr
    assert not calls


@pytest.mark.parametrize("link", [("--bandwidth", "0"), ("--latency-s", "-1")])
def test_a_link_that_cannot_be_is_refused_before_anything_is_measured(p2pdrl, child, link):
    calls, _ = child
    result = p2pdrl(*PLAN, *link)
    assert result.exit_code == 2
    assert "of a link" in result.stderr
    assert not calls


def test_what_the_child_says_ends_the_command(p2pdrl, child):
    _, answer = child
    answer["error"] = "it has no blocks"
    result = p2pdrl(*PLAN)
    assert result.exit_code == 2
    assert "this model can't be cut: it has no blocks" in result.stderr
    answer["code"] = 2
    result = p2pdrl(*PLAN)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--stages", "2"), ("--microbatches", "4"), ("--schedule", "gpipe"), ("--forward-s", "1")],
)
def test_what_a_task_brings_is_not_given_beside_it(p2pdrl, child, option, value):
    result = p2pdrl(*PLAN, option, value)
    assert result.exit_code == 2
    assert f"{option} goes without --config" in result.stderr


def test_the_plan_is_written_as_a_trace(p2pdrl, child, tmp_path):
    path = tmp_path / "trace.json"
    assert p2pdrl(*PLAN, "--trace", str(path)).exit_code == 0
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"forward 1", "backward 8"}
