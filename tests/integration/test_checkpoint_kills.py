"""A daemon killed at any step of writing its files comes back, with a whole checkpoint and its counts.

The daemon is the real one, with a learner that only counts. A ``sitecustomize`` of its own counts what it
does to the files of one folder (open, each half of each write, fsync, link, rename, unlink, mkdir) and kills
the process right before the one that is asked for. The next daemon, on the same folder, is killed at the next
one; so each has to come up from what its predecessor left.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from pathlib import Path

import pytest

from p2pdrl.node.state.checkpoints import load

FAKE_LEARNER = Path(__file__).parents[1] / "unit" / "node" / "fake_learner.py"
EVERY_S = 0.3
KEEP = 2
OPTIONS = [
    f"--set=node.checkpoint.every_s={EVERY_S}",
    f"--set=node.checkpoint.keep={KEEP}",
    "--set=task.evaluation.every=0",
]

COUNTER = """
import os, signal, sys

sys.executable = os.environ["KILLS_PYTHON"]
_folder, _at, _log = os.environ["KILLS_FOLDER"], int(os.environ["KILLS_AT"]), os.environ["KILLS_LOG"]
_paths, _steps = {}, 0
_open, _fdopen, _fsync, _write = os.open, os.fdopen, os.fsync, os.write
_log_fd = _open(_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _count(word, path):
    global _steps
    if not os.fspath(path).startswith(_folder):
        return
    _steps += 1
    _write(_log_fd, f"{_steps} {word} {os.path.basename(path)}\\n".encode())
    if _steps == _at:
        os.kill(os.getpid(), signal.SIGKILL)


def _opened(path, flags, *more, **options):
    if flags & os.O_CREAT:
        _count("open", path)
    found = _open(path, flags, *more, **options)
    _paths[found] = os.fspath(path)
    return found


class _File:
    def __init__(self, file, path):
        self._file, self._path = file, path

    def write(self, data):
        data = memoryview(data).cast("B")
        for half in (data[: data.nbytes // 2], data[data.nbytes // 2 :]):
            _count("write", self._path)
            self._file.write(half)
            self._file.flush()

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self._file, name)


def _fdopened(descriptor, mode="r", *more, **options):
    file = _fdopen(descriptor, mode, *more, **options)
    path = _paths.get(descriptor, "")
    return _File(file, path) if path.startswith(_folder) and "b" in mode else file


def _fsynced(descriptor):
    _count("fsync", _paths.get(descriptor, ""))
    return _fsync(descriptor)


def _patched(name, which):
    real = getattr(os, name)

    def call(*paths, **options):
        _count(name, paths[which])
        return real(*paths, **options)

    setattr(os, name, call)


os.open, os.fdopen, os.fsync = _opened, _fdopened, _fsynced
for _name, _which in (("rename", 1), ("replace", 1), ("link", 1), ("unlink", 0), ("remove", 0), ("mkdir", 0)):
    _patched(_name, _which)
"""


class Mortal:
    """Starts daemons that die at a step, all on one data folder."""

    def __init__(self, swarm, folder, watched):
        self.swarm, self.folder, self.watched = swarm, folder, watched
        self.code = folder / "code"
        self.code.mkdir()
        (self.code / "sitecustomize.py").write_text(COUNTER)
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE_LEARNER}" "$@"\n')
        self.python.chmod(self.python.stat().st_mode | stat.S_IXUSR)
        self.plan = folder / "plan"
        self.plan.write_text("train")
        self.boots = 0

    @property
    def data(self):
        return self.folder / "data"

    def start(self, at):
        """A daemon that is killed at its step ``at``; 0 lets it live."""
        self.boots += 1
        self.steps_log = self.folder / f"steps-{self.boots}"
        path = os.pathsep.join(filter(None, [str(self.code), os.environ.get("PYTHONPATH")]))
        env = {
            "PYTHONPATH": path,
            "KILLS_PYTHON": str(self.python),
            "KILLS_FOLDER": str(self.watched),
            "KILLS_AT": str(at),
            "KILLS_LOG": str(self.steps_log),
            "FAKE_LEARNER_PLAN": str(self.plan),
        }
        return self.swarm.start(f"mortal-{self.boots}", *OPTIONS, data=self.data, env=env)

    def steps(self):
        return self.steps_log.read_text().splitlines() if self.steps_log.exists() else []

    def saved(self):
        """The newest checkpoint; the test fails when that can't be read."""
        found = list(self.data.rglob("last.safetensors"))
        return load(found[0]) if found else None

    def died(self, node, wait_until):
        wait_until(
            lambda: node.process.poll() is not None, 300, f"it dies: {node.text()[-2000:]}", every_s=0.02
        )
        assert node.process.returncode == -signal.SIGKILL, node.text()[-3000:]


def resumed(node, before):
    """Whoever trained has gone on from that checkpoint."""
    told = {event["kind"]: event for event in node.told()}
    assert "checkpoint-skipped" not in told
    if "training" in told:
        found = told["resumed-checkpoint"]
        assert found["policy_version"] == before.meta["policy_version"]
        assert found["params_hash"] == before.meta["params_hash"]


def resumes(node, wait_until, before):
    """``node`` trains, from a whole checkpoint if there was one."""
    wait_until(
        lambda: node.process.poll() is not None or node.status().get("state") == "training",
        300,
        f"it trains: {node.text()[-3000:]}",
        every_s=0.05,
    )
    assert node.process.poll() is None, node.text()[-3000:]
    if before is not None:
        resumed(node, before)
        assert node.status()["env_steps"] >= before.meta["env_steps"]
        assert node.status()["lineage"] == before.meta["lineage"]


def lives_on(mortal, wait_until, identity):
    """The last daemon of a test comes back whole, saves, and ends properly."""
    before = mortal.saved()
    node = mortal.start(0)
    resumes(node, wait_until, before)
    if identity:
        assert node.status()["id"] == identity
    wait_until(lambda: node.status()["last_checkpoint"]["age_s"] is not None, 20, "it saves")
    node.signal(signal.SIGTERM)
    assert node.wait(20) == 0, node.text()[-3000:]
    assert not list(mortal.data.rglob("*.tmp"))
    assert len(list(mortal.data.glob("checkpoints/*/checkpoint-*"))) == KEEP


@pytest.fixture
def make_mortal(swarm, tmp_path):
    def make(watched):
        return Mortal(swarm, tmp_path, tmp_path / "data" / watched)

    return make


def settle(mortal, wait_until):
    """Let a daemon save until its history is full, and once more; return its id and that save's steps."""
    node = mortal.start(0)
    resumes(node, wait_until, None)

    def saves():
        lines = [line.split(" ", 1)[1] for line in mortal.steps()]
        ends = [number for number, line in enumerate(lines) if line == "replace last.safetensors"]
        return lines, ends

    wait_until(lambda: len(saves()[1]) >= KEEP + 3, 60, "it has saved some", every_s=0.05)
    identity = node.status()["id"]
    node.kill9()
    lines, ends = saves()
    return identity, lines[ends[-2] + 1 : ends[-1] + 1]


@pytest.mark.parametrize(
    "which", [pytest.param("some", id="some"), pytest.param("all", id="all", marks=pytest.mark.slow)]
)
def test_a_daemon_killed_at_any_step_of_a_checkpoint_resumes(make_mortal, wait_until, which):
    mortal = make_mortal("checkpoints")
    identity, steps = settle(mortal, wait_until)
    assert {line.split()[0] for line in steps} >= {"open", "write", "fsync", "link", "replace", "unlink"}
    # on the way up nothing is written there but mkdir and what clears leftovers away: at most two steps more
    every = range(1, len(steps) + 3)
    for at in every if which == "all" else (every[len(steps) // 2], every[-3]):
        before = mortal.saved()
        node = mortal.start(at)
        mortal.died(node, wait_until)
        resumed(node, before)
        after = mortal.saved()
        assert after.meta["env_steps"] >= before.meta["env_steps"]
        assert after.meta["lineage"] == before.meta["lineage"]
    lives_on(mortal, wait_until, identity)
    print(f"{len(steps)} steps of a checkpoint: {', '.join(steps)}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_daemon_killed_at_any_step_from_its_first_start_on_comes_up(make_mortal, wait_until):
    """Whatever it writes to its data folder: identity, token, members, settings, checkpoints."""
    mortal = make_mortal("")
    at, deadline_s = 0, time.monotonic() + 1700
    while time.monotonic() < deadline_s:
        at += 1
        node = mortal.start(at)
        mortal.died(node, wait_until)
        mortal.saved()
        if any(line.endswith(" replace last.safetensors") for line in mortal.steps()[:-1]):
            break  # it was killed past a whole one
    else:
        pytest.fail("it never saved a checkpoint")
    print(f"killed at {at} steps")
    lives_on(mortal, wait_until, "")
