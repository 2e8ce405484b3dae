"""A swarm is upgraded node by node: the release before this one and this one train together."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import tarfile
from pathlib import Path

import pytest

from p2pdrl.api.keyfile import write_swarm_key
from p2pdrl.errors import P2PDRLError
from p2pdrl.node.accounting.exchanges import GOOD
from p2pdrl.versions import SPOKEN

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "1b9812041da948a673c7c0dfbbc5915e1cb2d11c"
"""The last commit that speaks protocol 6 alone; stands for the release before, as long as no tag does."""
TASK = ("--set", "task.env.num_envs=4", "--set", "task.algorithm.unroll_steps=64")
PACE = ("--set", "node.learner.step_delay_s=0.01")


def git(*arguments: str) -> bytes:
    """What git says; skips where it can't: in an unpacked source distribution, or a shallow clone."""
    if shutil.which("git") is None:
        pytest.skip("wants git, and the repository's history")
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False, timeout=60)
    if done.returncode:
        pytest.skip(f"wants the repository's history: {done.stderr.decode().strip()[:200]}")
    return done.stdout


@pytest.fixture
def before(tmp_path: Path) -> dict[str, str]:
    """The environment of a node of the release before."""
    commit = os.environ.get("P2PDRL_UPGRADE_FROM")
    if commit is None:
        tags = git("tag", "--merged", "HEAD~1", "--sort=-version:refname", "v*").decode().split()
        commit = tags[0] if tags else BEFORE
    folder = tmp_path / "before"
    archive = git("archive", commit, "p2pdrl", "config", "pyproject.toml")
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("founder", ["before", "now"])
@pytest.mark.parametrize("keyed", [False, True], ids=["open", "keyed"])
def test_a_swarm_is_upgraded_while_it_trains(swarm, no_orphans, wait_until, before, tmp_path, founder, keyed):
    options = PACE
    if keyed:
        write_swarm_key(tmp_path / "swarm.key")
        options += ("--swarm-key-file", str(tmp_path / "swarm.key"))
    env = {"before": before, "now": None}
    first = swarm.start(founder, *TASK, *options, env=env[founder])
    wait_until(lambda: status(first).get("state") == "training", 90, f"it trains:\n{first.text()[-3000:]}")
    other = "now" if founder == "before" else "before"
    second = swarm.start(other, *options, peers=first, env=env[other])
    old, new = (first, second) if founder == "before" else (second, first)
    together(wait_until, old, new, "adpsgd")
    assert "protocols" not in old.ask("/healthz"), "that isn't the release before"
    assert new.ask("/healthz")["protocols"] == SPOKEN.wire
    rows = {row["name"]: row for row in new.ask("/v1/peers")}
    assert (rows["before"]["release"], rows["before"]["protocols"]) == (None, "6")
    assert rows["now"]["protocols"] == SPOKEN.wire
    old.set_mode("gossip", "protocol=dsgd")
    together(wait_until, old, new, "dsgd")
    new.set_mode("allreduce", "protocol=param_average")
    together(wait_until, old, new, "param_average")
    old.signal(signal.SIGTERM)
    assert old.wait(30) == 0, old.text()[-3000:]
    wait_until(lambda: view(new)["before"] == "left", 30, "the other hears that it left")
    upgraded = swarm.start("before", *options, peers=new, data=old.data, port=old.port)
    together(wait_until, upgraded, new, "param_average")
    assert upgraded.ask("/v1/status")["id"] == rows["before"]["id"]
    bad = {"refused", "record-unreadable", "quarantined", "forged", "exchange-failed"}
    for node in (old, new, upgraded):
        assert not [event for event in node.told() if event["kind"] in bad], node.text()[-5000:]
    for node in (new, upgraded):
        node.signal(signal.SIGTERM)
        assert node.wait(30) == 0, node.text()[-3000:]


def status(node):
    return attempt(node, "/v1/status") or {}


def view(node):
    return {row["name"]: row["state"] for row in attempt(node, "/v1/peers") or []}


def attempt(node, path):
    """What it answers; None while it doesn't."""
    try:
        return node.ask(path)
    except P2PDRLError:
        return None


def together(wait_until, one, other, strategy):
    """Both make rounds of a strategy from now on, and updates."""

    def counts():
        found = []
        for node in (one, other):
            told = status(node)
            account = told.get("accounting", {}).get(strategy, {}).get("rounds", {})
            found.append((told.get("updates") or 0, sum(account.get(word, 0) for word in GOOD)))
        return found

    def both():
        grown = zip(counts(), begin, strict=True)
        return all(now > before for pair in grown for now, before in zip(*pair, strict=True))

    begin = counts()
    wait_until(both, 90, f"both make rounds of {strategy}, from {begin}")
