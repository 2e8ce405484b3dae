"""``p2pdrl pipeline plan``: pictures, figures, and words about what doesn't fit."""

from __future__ import annotations

import json

import pytest

PLAN = ("pipeline", "plan")


@pytest.fixture(autouse=True)
def _width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def test_a_plan_is_drawn_with_its_figures(p2pdrl):
    result = p2pdrl(*PLAN, "--stages", "2", "--microbatches", "4", "--forward-s", "0.5", "--backward-s", "1")
    assert result.exit_code == 0
    assert result.stdout == (
        "1f1b: 4 microbatches through 2 stages\n"
        "\n"
        "rank 0  F1 F2 ......B1--- F3 B2--- F4 B3--- ...B4--- \n"
        "rank 1  ...F1 B1--- F2 B2--- F3 B3--- F4 B4--- ......\n"
        "        0                                       7.5 s\n"
        "F1--: forward of microbatch 1, as long as it takes; B: backward; dots: waiting\n"
        "\n"
        "step      7.5 s; one device takes 12 s\n"
        "speed-up  1.60 of 2; with equal stages and free messages 1.60\n"
        "\n"
        "rank   computes   bubble   stored activations\n"
        "   0        6 s    20.0%                    2\n"
        "   1        6 s    20.0%                    1\n"
    )


def test_it_is_as_wide_as_the_terminal(p2pdrl, monkeypatch):
    widths = []
    for columns in ["60", "160"]:
        monkeypatch.setenv("COLUMNS", columns)
        lines = p2pdrl(*PLAN, "--stages", "4", "--microbatches", "12").stdout.splitlines()
        widths.append(max(len(line) for line in lines if line.startswith("rank 0")))
    assert 50 < widths[0] <= 60 < 130 < widths[1] <= 160


def test_signs_of_several_stages_a_rank_are_explained_too(p2pdrl):
    args = ["--stages", "4", "--microbatches", "4", "--schedule", "interleaved", "--ranks", "2"]
    lines = p2pdrl(*PLAN, *args).stdout.splitlines()
    assert "F1a--: forward of microbatch 1, stage a of the rank; B: backward; dots: waiting" in lines


def test_json_has_every_action(p2pdrl):
    args = ["--stages", "4", "--microbatches", "4", "--schedule", "interleaved", "--ranks", "2", "--json"]
    result = p2pdrl(*PLAN, *args)
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert (document["schedule"], document["stages"], document["ranks"]) == ("interleaved", 4, 2)
    assert (document["step_s"], document["one_device_s"]) == (27.0, 48.0)
    assert document["speedup"] == pytest.approx(document["ideal_speedup"]) == pytest.approx(16 / 9)
    assert [rank["stages"] for rank in document["per_rank"]] == [[0, 2], [1, 3]]
    assert [rank["bubble"] for rank in document["per_rank"]] == pytest.approx([1 / 9, 1 / 9])
    assert [rank["stored_activations"] for rank in document["per_rank"]] == [5, 3]
    first = {"kind": "forward", "stage": 0, "microbatch": 0, "start_s": 0.0, "end_s": 1.0}
    assert document["per_rank"][0]["actions"][0] == first


def test_each_stage_and_message_may_differ(p2pdrl):
    args = ["--schedule", "gpipe", "--stages", "3", "--microbatches", "1", "--json"]
    times = ["--forward-s", "1,2,3", "--backward-s", "4,5,6"]
    links = ["--latency-s", "0.5", "--bandwidth", "10", "--activation-bytes", "10,20"]
    document = json.loads(p2pdrl(*PLAN, *args, *times, *links).stdout)
    assert document["step_s"] == 21 + 2 * (0.5 + 1 + 0.5 + 2)
    assert document["one_device_s"] == 21


def test_one_stage_needs_no_messages(p2pdrl):
    result = p2pdrl(
        *PLAN, "--stages", "1", "--microbatches", "2", "--activation-bytes", "1e6", "--latency-s", "9"
    )
    assert result.exit_code == 0
    assert "step      6 s; one device takes 6 s" in result.stdout


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--forward-s", "1,2"], "--forward-s 1,2: give one number, or 4 with commas"),
        (["--backward-s", "x"], "--backward-s x: give one number, or 4 with commas"),
        (["--activation-bytes", "1,2,3,4"], "--activation-bytes 1,2,3,4: give one number, or 3 with commas"),
        (["--forward-s", "-1"], "the seconds of a stage must be finite and not negative"),
        (["--forward-s", "0"], "at least one stage must take more than 0 seconds"),
        (["--forward-s", "nan"], "not nan"),
        (["--bandwidth", "0"], "the bandwidth of a link must be positive"),
        (["--bandwidth", "nan"], "the bandwidth of a link must be positive"),
        (["--latency-s", "-1"], "the latency of a link in seconds must be"),
        (["--ranks", "2"], "1f1b runs one stage per rank, not 4 on 2: take interleaved for more"),
        (
            ["--schedule", "interleaved"],
            "interleaved needs --ranks, each of which holds several stages; 2 can",
        ),
        (["--schedule", "interleaved", "--ranks", "3"], "4 don't fit 3 ranks so: take 6 or 9 stages"),
        (["--schedule", "interleaved", "--stages", "5"], "no number of them can share 5 stages"),
        (["--stages", "65"], "--stages 65: 1f1b has a rank for each, and there are at most 64"),
        (["--schedule", "interleaved", "--ranks", "2", "--stages", "18"], "on 2 ranks there are at most 16"),
        (["--schedule", "interleaved", "--ranks", "2", "--microbatches", "7"], "(6 or 8), or fewer than 4"),
    ],
)
def test_what_doesnt_fit_is_told_in_one_line_and_ends_with_2(p2pdrl, args, why):
    result = p2pdrl(*PLAN, "--stages", "4", "--microbatches", "4", *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert why in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "args",
    [
        ["--stages", "2"],
        ["--stages", "0", "--microbatches", "1"],
        ["--schedule", "x"],
        ["--stages", "128", "--ranks", "65", "--microbatches", "1"],
    ],
)
def test_a_bad_command_line_ends_with_2(p2pdrl, args):
    result = p2pdrl(*PLAN, *args)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


def test_the_predicted_schedule_is_written_as_a_trace(p2pdrl, tmp_path):
    path = tmp_path / "trace.json"
    result = p2pdrl(*PLAN, "--stages", "2", "--microbatches", "4", "--trace", str(path))
    assert result.exit_code == 0
    assert result.stdout.startswith("1f1b: 4 microbatches")
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"forward 1", "backward 4"}
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") == 15e6


def test_a_trace_that_can_t_be_written(p2pdrl, tmp_path):
    path = tmp_path / "nowhere" / "trace.json"
    result = p2pdrl(*PLAN, "--stages", "2", "--microbatches", "4", "--trace", str(path))
    assert result.exit_code != 0
    assert "No such file or directory" in result.stderr


def test_planning_imports_nothing_heavy():
    import subprocess
    import sys

    code = (
        "import sys\n"
        "from p2pdrl.cli import main\n"
        "args = ['pipeline', 'plan', '--stages', '2', '--microbatches', '2']\n"
        "assert main.run_command(main.cli, 'p2pdrl', args) == 0\n"
        "heavy = {'aiohttp', 'numpy', 'torch', 'msgspec'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_what_a_live_pipeline_did_is_written(p2pdrl, served, tmp_path):
    path = tmp_path / "out.json"
    served.node.timeline["otherData"] = {"missing": {"rank 1: n\x1b1": "it isn't known to be alive"}}
    result = p2pdrl("pipeline", "trace", "-o", str(path), "--seconds", "3", "--api", served.address)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"1 boxes are in {path}\n"
    assert result.stderr == "without rank 1: n?1: it isn't known to be alive\n"
    written = json.loads(path.read_text("utf-8"))
    assert (written["seconds"], len(written["traceEvents"])) == (3.0, 1)


def test_what_each_rank_covers_is_told(p2pdrl, served, tmp_path):
    full = {"boxes": 4096, "began_s_ago": 2.41, "ended_s_ago": 0.02, "remembers_no_more": True}
    served.node.timeline["otherData"] = {"told": {"rank 0: n0": full, "rank 1: n1": {"boxes": 0}}}
    path = tmp_path / "out.json"
    result = p2pdrl("pipeline", "trace", "-o", str(path), "--seconds", "5", "--api", served.address)
    assert result.stdout.splitlines()[1:] == [
        "  rank 0: n0: 4,096 boxes, from 2.4 s to 0.0 s ago; it remembers no more",
        "  rank 1: n1: no boxes",
    ]


def test_a_trace_may_go_to_standard_output(p2pdrl, served, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = p2pdrl("pipeline", "trace", "-o", "-", "--api", served.address)
    assert result.exit_code == 0
    assert len(json.loads(result.stdout)["traceEvents"]) == 1
    assert result.stderr == "1 boxes are in standard output\n"
    assert not list(tmp_path.glob("-"))


@pytest.mark.parametrize(
    ("missing", "why"), [({}, "is training paused"), ({"rank 1: n1": "it is gone"}, "rank 1: n1: it is gone")]
)
def test_a_trace_without_boxes_is_a_failure(p2pdrl, served, tmp_path, missing, why):
    served.node.timeline = {"traceEvents": [], "otherData": {"missing": missing}}
    result = p2pdrl("pipeline", "trace", "-o", str(tmp_path / "g.json"), "--api", served.address)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "did anything in the last 2 s" in result.stderr
    assert why in result.stderr
    assert not (tmp_path / "g.json").exists()


def test_without_a_live_pipeline_there_is_no_trace(p2pdrl, served, tmp_path):
    served.node.timeline = None
    result = p2pdrl("pipeline", "trace", "-o", str(tmp_path / "out.json"), "--api", served.address)
    assert result.exit_code == 2
    assert "in no pipeline" in result.stderr
    assert not (tmp_path / "out.json").exists()
