"""The script as a person runs it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "plan_swarm.py"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=120, check=False
    )


def test_table_and_recommendation():
    done = run("--nodes", "3", "--seconds", "5", "--slow", "1x10")
    assert done.returncode == 0, done.stderr
    assert "param_average" in done.stdout
    assert "Take adpsgd" in done.stdout


def test_a_file_and_json(tmp_path):
    file = tmp_path / "swarm.toml"
    file.write_text('nodes = 3\nsize = 500\nlinks = "wan"\n[[machines]]\nupdate_s = 0.2\n')
    done = run("--file", str(file), "--seconds", "5", "--strategy", "sgp", "--strategy", "local", "--json")
    found = json.loads(done.stdout)
    assert [one["label"] for one in found["strategies"]] == ["sgp", "local"]
    assert found["strategies"][1]["speedup"] == 1.0
    assert found["swarm"]["size"] == 500


@pytest.mark.slow
def test_the_real_strategies():
    words = ("--nodes", "3", "--seconds", "4", "--strategy", "adpsgd", "--strategy", "grad_average", "--json")
    real, said = (json.loads(run(*words, *more).stdout)["strategies"] for more in (["--real"], []))
    for one, other in zip(real, said, strict=True):
        assert abs(one["forecast"]["rounds_s"] / other["forecast"]["rounds_s"] - 1) < 0.15
        assert abs(one["speedup"] / other["speedup"] - 1) < 0.15
    assert real != said


def test_a_picture(tmp_path):
    picture = tmp_path / "plan.svg"
    done = run(
        "--nodes",
        "3",
        "--seconds",
        "5",
        "--strategy",
        "adpsgd",
        "--strategy",
        "local",
        "--plot",
        str(picture),
    )
    assert done.returncode == 0, done.stderr
    assert picture.read_text().lstrip().startswith("<?xml")


def test_mistakes_are_told(monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("plan_swarm", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for words, why in (
        (("--link", "moon"), "MBPS"),
        (("--strategy", "adpsdg"), "did you mean adpsgd?"),
        (("--strategy", "pipeline"), "see `p2pdrl pipeline plan`"),
        (("--strategy", "adpsgd", "--strategy", "amb_pp"), "see `p2pdrl pipeline plan`"),
        (("--nodes", "0"), "nodes"),
        (("--nodes", "4", "--slow", "9x2"), "COUNTxFACTOR"),
        (("--file", "/nowhere.toml"), "nowhere"),
        (("--nodes", "17", "--real"), "at most 16 nodes"),
        (("--seconds", "0"), "seconds"),
        (("--plot", "plan.gif"), ".png"),
        (("--plot", "/nowhere/plan.png"), "folder"),
    ):
        monkeypatch.setattr(sys, "argv", ["plan_swarm.py", *words])
        with pytest.raises(SystemExit) as ended:
            script.main()
        said = capsys.readouterr().err
        if isinstance(ended.value.code, str):  # which the interpreter prints as it ends
            said += ended.value.code
        assert ended.value.code not in (None, 0)
        assert why in said, words
