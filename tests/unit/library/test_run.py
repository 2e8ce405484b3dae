"""`p2pdrl.train` with a program in the node's place that only pretends: real processes, real signals."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import psutil
import pytest

import p2pdrl
from p2pdrl.errors import ConfigError, UnhealthyError, UsageError, WorkerError
from p2pdrl.library import names
from p2pdrl.tensors.checkpoint import Checkpoint, to_bytes

FAKE = """
import json, os, pathlib, signal, sys, threading

given = sys.argv[2:]
def value(name):
    return given[given.index(name) + 1]
plan = json.loads(os.environ["FAKE_PLAN"])
folder = pathlib.Path(value("--data-dir"))
seen = {"pid": os.getpid(), "argv": given, "path": os.environ.get("PYTHONPATH")}
(folder / "given.json").write_text(json.dumps(seen))
if "says" in plan:
    print(plan["says"], file=sys.stderr)
    sys.exit(plan["code"])
if "hangs" in plan:
    threading.Event().wait()
import p2pdrl.testing.fake_node as testing
from p2pdrl.cli.node import _watch_parent
over = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=over.set).start())
_watch_parent(int(value("--leave-with")), over.set)
host, port = value("--listen").split(":")
real = testing.web.TCPSite
testing.web.TCPSite = lambda runner, h, p: real(runner, host, int(port))
node = testing.FakeNode("run")
node.state.update(pid=os.getpid(), state=plan.get("state", "training"))
with testing.ServedNode(node):
    over.wait(plan.get("seconds"))
    if "dies" in plan:
        os.kill(os.getpid(), signal.SIGKILL)
node.state.update(state="stopping", stop={"reached": True, "reason": "solved"})
(folder / "summary.json").write_text(
    json.dumps({"status": node.status(), "evaluations": node.last_evaluations[:1]})
)
"""

# `p2pdrl.train` takes port 7700, or the next; so do nodes of the tests with real ones.
pytestmark = pytest.mark.xdist_group("real processes")


@pytest.fixture
def plan(monkeypatch, tmp_path):
    """Put the fake in the node's place; returns a function that sets what it does."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr("p2pdrl.library.node_process.PROGRAM", (sys.executable, str(script)))

    def set_plan(**what):
        monkeypatch.setenv("FAKE_PLAN", json.dumps(what))

    set_plan()
    return set_plan


def given(run):
    return json.loads((run.data_dir / "given.json").read_text())


def test_it_is_followed_until_it_is_done(plan, tmp_path):
    plan(seconds=1.0)
    with p2pdrl.train("cartpole", data_dir=tmp_path / "data", interval_s=0.2) as run:
        assert run.running
        assert run.status().state == "training"
        np.testing.assert_array_equal(run.curve().env_steps, [50_000, 100_000])
        seen = list(run)
    assert len(seen) > 2
    assert [status.done for status in seen[:-1]] == [False] * (len(seen) - 1)
    assert (seen[-1].done, seen[-1].stop.reason) == (True, "solved")
    assert run.wait(0).done
    curve = run.curve()
    np.testing.assert_array_equal(curve.mean_return, [200.0])
    assert (len(curve), curve.env_steps.dtype, run.running) == (1, np.int64, False)
    assert (tmp_path / "data" / "node.log").exists()
    assert "ended with 0" in repr(run)


def test_waiting_may_take_too_long_and_stopping_ends_it(plan):
    run = p2pdrl.train(interval_s=0.1)
    with pytest.raises(TimeoutError, match=r"isn't done after 0\.3 s"):
        run.wait(0.3)
    assert run.running
    run.stop()
    run.stop()
    assert run.status().state == "stopping"
    folder = run.data_dir
    assert folder.exists(), "its policy may still be wanted"
    del run
    gc.collect()
    assert not folder.exists()


def test_a_forgotten_run_ends(plan):
    run = p2pdrl.train()
    pid = given(run)["pid"]
    assert psutil.pid_exists(pid)
    del run
    gc.collect()
    assert not psutil.pid_exists(pid)


def test_it_may_be_used_where_a_loop_runs(plan):
    async def cell():
        with p2pdrl.train() as run:
            return run.status()

    assert asyncio.run(cell()).name == "run"


def test_what_is_given_reaches_the_node(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(names, "_environments", {})
    monkeypatch.setattr(names, "_networks", {})
    (tmp_path / "own_pole.py").write_text("class Pole: pass\nclass Net: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    p2pdrl.register_env("Pole-v0", "own_pole:Pole")
    p2pdrl.register_network("net", "own_pole:Net")
    config = {"task": {"env": {"id": "Pole-v0", "kwargs": {"gravity": 0.5}}, "stop": {"env_steps": 5}}}
    more = {"task__env__num_envs": np.int64(3), "task__network__own": "net", "node__actors__count": 1}
    old = tmp_path / "last.safetensors"
    old.write_bytes(to_bytes(Checkpoint(np.zeros(5, np.float32), {}, {"layout": [["w", [5], "float32"]]})))
    with p2pdrl.train(["ppo", config], peers="127.0.0.1:1", name="own", start_from=tmp_path, **more) as run:
        argv = given(run)["argv"]
        sets = [after for word, after in itertools.pairwise(argv) if word == "--set"]
        path = given(run)["path"]
    assert path.split(":")[0] == str(tmp_path)
    assert sets == [
        'task.env.id="own_pole:Pole"',
        "task.env.kwargs.gravity=0.5",
        "task.stop.env_steps=5",
        "task.env.num_envs=3",
        'task.network.own="own_pole:Net"',
        "node.actors.count=1",
        'task.network.kind="own"',
        'node.imports=["own_pole:Net", "own_pole:Pole"]',
    ]
    assert argv[argv.index("--config") + 1] == "ppo"
    assert argv[argv.index("--peers") + 1] == "127.0.0.1:1"
    assert argv[argv.index("--name") + 1] == "own"
    assert argv[argv.index("--from") + 1] == str(tmp_path)


def test_a_name_in_a_file_stands_for_what_is_registered(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(names, "_environments", {})
    (tmp_path / "own_rod.py").write_text("class Rod: pass\n")
    (tmp_path / "rod.toml").write_text('[task.env]\nid = "Rod-v0"\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    p2pdrl.register_env("Rod-v0", "own_rod:Rod")
    with p2pdrl.train(tmp_path / "rod.toml") as run:
        argv = given(run)["argv"]
    assert 'task.env.id="own_rod:Rod"' in argv
    assert 'node.imports=["own_rod:Rod"]' in argv


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"config": "cartpol"}, "cartpole"),
        ({"task__env__num_env": 3}, "task.env.num_envs"),
        ({"task__env__num_envs": 0}, "num_envs"),
        ({"task__env__id": "CartPole-v7"}, "CartPole-v1"),
        ({"task__env__id": "own_pole:Pole"}, "imports a Python module"),
        ({"node__name": "x"}, "name="),
        ({"start_from": "nothing.safetensors"}, "--from nothing.safetensors: there is no checkpoint"),
        ({"node__start_from": "x"}, "start_from="),
        ({"task__env__max_episode_steps": None}, "leave it out"),
    ],
)
def test_a_bad_configuration_is_told_before_anything_starts(plan, options, word):
    with pytest.raises(UsageError, match=word) as caught:
        p2pdrl.train(**options)
    assert word != "cartpole" or isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("says", "code", "kind", "words"),
    [
        ("p2pdrl: 2 problems:\n  one\n  two", 2, UsageError, "^2 problems: one two$"),
        ("Traceback\nValueError: no", 1, WorkerError, "ended with 1: ValueError: no"),
    ],
)
def test_a_node_that_doesnt_start_says_why(plan, says, code, kind, words):
    plan(says=says, code=code)
    with pytest.raises(kind, match=words):
        p2pdrl.train()


@pytest.mark.parametrize("doing", [{"hangs": True}, {"state": "joining"}, {"state": "fetching"}])
def test_a_node_that_never_trains_is_ended(plan, doing):
    plan(**doing)
    with pytest.raises(UnhealthyError, match=r"doesn't train after 0\.5 s"):
        p2pdrl.train(start_timeout_s=0.5)


def test_a_node_that_is_killed_is_told(plan):
    plan(seconds=0.5, dies=True)
    with p2pdrl.train(interval_s=0.1) as run, pytest.raises(WorkerError, match="ended by SIGKILL"):
        for _ in run:
            pass
    with pytest.raises(WorkerError, match="ended by SIGKILL"):
        run.curve()


@pytest.mark.parametrize("ending", ["pass", "os.kill(os.getpid(), 9)"])
def test_the_node_leaves_when_its_parent_ends(plan, tmp_path, ending):
    code = f"""
        import os, sys
        import p2pdrl.library.node_process as node_process
        node_process.PROGRAM = (sys.executable, {str(tmp_path / "fake.py")!r})
        import p2pdrl
        run = p2pdrl.train(data_dir={str(tmp_path / "data")!r})
        {ending}
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert done.returncode == (0 if ending == "pass" else -signal.SIGKILL)
    end = time.monotonic() + 10
    while not (tmp_path / "data" / "summary.json").exists():  # which it writes as it leaves
        assert time.monotonic() < end
        time.sleep(0.05)
