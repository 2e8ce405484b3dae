"""The script that compares two commits finds the first number that differs, and nothing where none does."""

from __future__ import annotations

import copy
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = str(Path(__file__).parents[3] / "scripts")
LINE = {
    "case": "ppo",
    "updates": 3,
    "metrics": {"policy_loss": [(0.1).hex(), (0.2).hex(), (0.3).hex()], "kl": [None, (0.0).hex(), "nan"]},
    "env_steps": [4, 4, 3],
    "episodes": [[], [[(9.0).hex(), 9]], []],
    "vector": ["aa", "bb", "cc"],
    "sidecar": {"optimizer.m": "dd", "optimizer.v": "ee"},
}
FAKE = """
import argparse, json, p2pdrl
parser = argparse.ArgumentParser()
parser.add_argument("--updates", type=int)
parser.add_argument("--cases", nargs="+", choices=["ppo", "a2c"], default=["ppo", "a2c"])
options = parser.parse_args()
for case in options.cases:
    losses = [(p2pdrl.START / 2**n).hex() for n in range(options.updates)]
    line = {"case": case, "updates": options.updates, "metrics": {"loss": losses}, "sidecar": {}}
    rows = {name: [0] * options.updates for name in ("env_steps", "episodes", "vector")}
    print(json.dumps({**line, **rows}))
"""


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    yield importlib.import_module("compare_traces")
    sys.modules.pop("compare_traces")


def changed(**values):
    return {**copy.deepcopy(LINE), **values}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (changed(), None),
        (changed(env_steps=[4, 4, 4]), (3, "env_steps", ("3", "4"))),
        (
            changed(
                metrics={**LINE["metrics"], "policy_loss": [(0.1).hex(), "0x1.999999999999bp-3", "0x0p+0"]}
            ),
            (2, "policy_loss", ("0.2", "0.20000000000000004")),
        ),
        (changed(metrics={"policy_loss": LINE["metrics"]["policy_loss"]}), (2, "kl", ("0.0", "missing"))),
        (changed(vector=["ab", "bb", "cc"]), (1, "parameters", ("aa", "ab"))),
        (changed(episodes=[[], [[(8.0).hex(), 9]], []]), (2, "episodes", ("[(9.0, 9)]", "[(8.0, 9)]"))),
        (changed(updates=2), (3, "env_steps", ("3", "missing"))),
        (changed(sidecar={"optimizer.m": "dd"}), (None, "optimizer.v", ("ee", "missing"))),
    ],
)
def test_the_first_difference_is_found(script, other, expected):
    assert script.difference(LINE, other) == expected


def test_cases_that_only_one_has_differ(script):
    rows = script.compare([LINE, changed(case="a2c")], [LINE, changed(case="new")])
    assert [(row.case, row.difference) for row in rows] == [
        ("ppo", None),
        ("a2c", (None, "case", ("there", "missing"))),
        ("new", (None, "case", ("missing", "there"))),
    ]
    text = script.table(rows, ("main", "."))
    assert [line.split()[:3] for line in text.splitlines()[1:2]] == [["ppo", "3", "identical"]]
    assert "case missing (main), there (.)" in text


# --- with commits of a repository ----------------------------------------------------------------


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Three commits: without the script, with it, and with another number; then a change not committed."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def commit(tag):
        who = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")
        for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", tag], ["tag", tag]):
            subprocess.run(["git", *words], check=True)

    package = tmp_path / "p2pdrl" / "__init__.py"
    package.parent.mkdir()
    package.write_text("START = 1.0\n")
    commit("bare")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "loss_traces.py").write_text(FAKE)
    commit("same")
    package.write_text("START = 1.0000000000000002\n")
    commit("other")
    package.write_text("START = 1.0\n")
    return tmp_path


def worktrees():
    listed = subprocess.run(["git", "worktree", "list"], check=True, capture_output=True, text=True)
    return len(listed.stdout.splitlines())


def test_commits_and_the_working_tree_are_compared_each_with_its_own_package(script, repository, capfd):
    assert script.main(["same", ".", "--updates", "3"]) == 0
    assert [line.split() for line in capfd.readouterr().out.splitlines()] == [
        ["case", "updates", "result"],
        ["ppo", "3", "identical"],
        ["a2c", "3", "identical"],
    ]
    assert script.main(["other", "same", "--updates", "3", "--cases", "a2c", "--json"]) == 1
    found = json.loads(capfd.readouterr().out)
    assert not found["identical"]
    assert found["cases"] == [
        {
            "case": "a2c",
            "updates": 3,
            "difference": {"update": 1, "metric": "loss", "values": ["1.0000000000000002", "1.0"]},
        }
    ]
    assert worktrees() == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bare", "same"], "bare has no scripts/loss_traces.py"),
        (["same", "nowhere"], "nowhere"),
        (["same", "other", "--cases", "nonsense"], "ended with status 2"),
    ],
)
def test_what_can_not_be_compared_is_told(script, repository, capfd, words, said):
    assert script.main([*words, "--updates", "1"]) == 2
    assert said in capfd.readouterr().err
    assert worktrees() == 1
