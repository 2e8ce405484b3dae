"""What counts as unwell, and scripts/peer_health.py."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "peer_health.py"
GOOD = {"name": "n", "address": "h:1", "state": "alive", "healthy": True, "reasons": [], "report_age_s": 1.0}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, None),
        ({"state": "left"}, None),
        ({"state": "dead", "state_reason": "no answer"}, "n at h:1: dead (no answer)"),
        ({"state": "suspect"}, "n at h:1: suspect"),
        ({"healthy": False}, "n at h:1: says that it is unwell"),
        ({"healthy": False, "reasons": ["a", "b"]}, "n at h:1: a; b"),
        ({"report_age_s": 300.0}, "n at h:1: its numbers are 5 min old"),
        ({"report_age_s": None}, "n at h:1: has sent no numbers yet"),
        ({"report_age_s": None, "self": True}, None),
        ({"name": "\x1b[2J", "state": "dead"}, "?[2J at h:1: dead"),
    ],
)
def test_problems(monkeypatch, change, found):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    problems = importlib.import_module("peer_health").problems
    assert problems([{**GOOD, **change}]) == ([found] if found else [])


def script(*args):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *args], capture_output=True, text=True, check=False, timeout=60
    )


def test_the_first_that_answers_tells_about_all(served, free_address):
    done = script("--peers", f"{free_address},{served.address}", "--json")
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert document["asked"] == served.address
    assert document["healthy"] is True
    assert free_address in done.stderr


def test_something_unwell_is_4_and_told(served):
    served.node.members[1].update(healthy=False, reasons=["the learner is down"])
    done = script("--peers", served.address)
    assert done.returncode == 4
    assert "the learner is down" in done.stdout


def test_nobody_is_3(free_address):
    done = script("--peers", free_address)
    assert done.returncode == 3
    assert done.stdout == ""
    assert script("--peers", "a:b").returncode == 2
    assert script("--peers", "").returncode == 2


@pytest.mark.parametrize("option", ["--watch", "--timeout"])
@pytest.mark.parametrize("text", ["nan", "inf", "0"])
def test_what_is_no_time_is_2(free_address, option, text):
    done = script("--peers", free_address, option, text)
    assert done.returncode == 2
    assert f"{option} takes a number of at least 0.1" in done.stderr
