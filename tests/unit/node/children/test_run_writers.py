"""Writers of figures in processes of their own: real children; a package of the test's in wandb's place."""

from __future__ import annotations

import asyncio
import csv
import os
import signal
import sqlite3
from importlib.util import find_spec
from pathlib import Path

import pytest

from p2pdrl.clock import SystemClock
from p2pdrl.config.node import LogConfig
from p2pdrl.config.task import TaskConfig
from p2pdrl.errors import ConfigError, UsageError
from p2pdrl.node.children.run_writers import MOST_POINTS, RunWriterProcess, RunWriters, run_info

FAKE = """
import json, os, time

plan = os.environ["FAKE_WANDB"]
if plan == "broken":
    raise RuntimeError("no such symbol: libfoo")

class Settings:
    def __init__(self, **given): pass

class Run:
    url, dir = None, "somewhere"
    def __init__(self, given):
        self.file = open(os.path.join(given["dir"], "fake.jsonl"), "a")
        self.write(given)
    def write(self, what):
        self.file.write(json.dumps(what, default=lambda _: "settings") + "\\n")
        self.file.flush()
    def define_metric(self, *given, **named): pass
    def log(self, values):
        if plan == "fails":
            raise OSError("the server is gone")
        self.write(values)
    def finish(self):
        self.write({"finished": True})

def init(**given):
    if plan == "hangs":
        time.sleep(3600)
    return Run(given)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Put a package of ours in wandb's place; returns a function that says what it does."""
    folder = tmp_path / "packages"
    (folder / "wandb").mkdir(parents=True)
    (folder / "wandb" / "__init__.py").write_text(FAKE.replace("\\\\n", "\\n"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr("p2pdrl.node.children.run_writers.require_writer", lambda kind: None)

    def plan(what: str) -> None:
        monkeypatch.setenv("FAKE_WANDB", what)

    plan("works")
    return plan


def info_of(folder: Path):
    return run_info(
        LogConfig(project="mine"), folder, node_id="a" * 32, name="me", swarm_id="s", task=TaskConfig()
    )


def lines(folder: Path) -> list[str]:
    file = folder / "fake.jsonl"
    return file.read_text().splitlines() if file.exists() else []


async def until(condition, what: str) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - a process makes it true
            await asyncio.sleep(0.02)


async def test_points_reach_the_run_and_its_end_is_waited_for(fake, tmp_path, events, kinds):
    process = RunWriterProcess("wandb", SystemClock(), events)
    process.start()
    process.scalars(5, {"early": 1.0})  # before anything is known
    await process.ready()
    process.begin(info_of(tmp_path))
    await until(lambda: "run-writer" in kinds(), "it is open")
    process.scalars(10, {"loss": 0.5})
    await process.close()
    found = lines(tmp_path)
    assert '"project": "mine"' in found[0]
    assert '"task.env.id": "CartPole-v1"' in found[0]
    assert found[1:] == [
        '{"early": 1.0, "env_steps": 5}',
        '{"loss": 0.5, "env_steps": 10}',
        '{"finished": true}',
    ]
    assert kinds() == ["run-writer"]
    assert process.pid is None


async def test_one_that_dies_is_told_and_started_again_with_the_same_run(fake, tmp_path, events, kinds):
    process = RunWriterProcess("wandb", SystemClock(), events, again_s=0.05)
    process.start()
    process.begin(info_of(tmp_path))
    await until(lambda: "run-writer" in kinds(), "it is open")
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: kinds().count("run-writer") == 2, "it is open again")
    process.scalars(10, {"loss": 0.5})
    await process.close()
    found = lines(tmp_path)
    assert found[0] == found[1]
    assert found[-1] == '{"finished": true}'
    failed = [event for event in events.since(0) if event["kind"] == "run-writer-failed"]
    assert len(failed) == 1
    assert "killed by signal 9" in failed[0]["text"]
    assert "training goes on" in failed[0]["text"]


async def test_one_that_always_fails_is_given_up(fake, tmp_path, events, kinds, monkeypatch):
    monkeypatch.setattr("p2pdrl.node.children.run_writers.MOST_STARTS", 2)
    fake("fails")
    process = RunWriterProcess("wandb", SystemClock(), events, again_s=0.05)
    task = process.start()
    process.begin(info_of(tmp_path))
    async with asyncio.timeout(30):
        while not task.done():
            process.scalars(1, {"loss": 0.5})
            await asyncio.sleep(0.05)
    texts = [event["text"] for event in events.since(0) if event["kind"] == "run-writer-failed"]
    assert len(texts) == 2
    assert "the server is gone" in texts[0]
    assert "given up" in texts[1]
    process.scalars(51, {"loss": 0.5})
    await process.close()


async def test_one_that_hangs_holds_nobody_up_and_no_more_than_so_many_points(fake, tmp_path, events, kinds):
    fake("hangs")
    process = RunWriterProcess("wandb", SystemClock(), events, last_s=0.1)
    process.start()
    await process.ready()
    process.begin(info_of(tmp_path))
    big = {f"figure {number}": float(number) for number in range(300)}
    for _ in range(2):
        for step in range(MOST_POINTS):
            process.scalars(step, big)
        await asyncio.sleep(0.05)
    assert kinds() == ["run-writer-slow"]
    pid = process.pid
    async with asyncio.timeout(5):
        await process.close()
    assert kinds() == ["run-writer-slow", "run-writer-failed"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_package_that_can_not_be_imported_is_a_clear_error_at_the_start(fake, tmp_path, events):
    fake("broken")
    writers = RunWriters(LogConfig(writers=("wandb",)), tmp_path, SystemClock(), events)
    writers.start()
    with pytest.raises(ConfigError, match=r"wandb can't be imported.*libfoo.*pip install 'p2pdrl\[wandb\]'"):
        await writers.ready()
    await writers.close()


def test_a_missing_extra_is_refused_before_anything_starts(tmp_path, events):
    if find_spec("wandb") is not None:
        pytest.skip("wandb is installed here")
    with pytest.raises(UsageError, match=r"pip install 'p2pdrl\[wandb\]'"):
        RunWriters(LogConfig(writers=("wandb",)), tmp_path, SystemClock(), events)


async def test_csv_is_written_without_a_process(tmp_path, events):
    writers = RunWriters(LogConfig(), tmp_path, SystemClock(), events)
    writers.start()
    await writers.ready()
    writers.begin(lambda config, folder: info_of(folder))
    writers.scalars(10, {"loss": 0.5})
    await writers.close()
    with (tmp_path / "metrics.csv").open(newline="") as file:
        assert [row["loss"] for row in csv.DictReader(file)] == ["0.5"]


def test_a_run_is_the_same_one_for_the_same_node_and_task(tmp_path):
    one, again = info_of(tmp_path), info_of(tmp_path)
    assert one == again
    other = run_info(LogConfig(), tmp_path, node_id="b" * 32, name="me", swarm_id="s", task=TaskConfig())
    assert other.run_id != one.run_id


@pytest.mark.skipif(find_spec("wandb") is None, reason="wants p2pdrl[wandb]")
async def test_weights_and_biases_offline(tmp_path, events, kinds, monkeypatch):
    config = LogConfig(writers=("wandb",), wandb_mode="offline")
    writers = RunWriters(config, tmp_path, SystemClock(), events)
    await write_some(writers, kinds)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"train/loss" in content
    assert b"task.env.id" in content


@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("mlflow", "sqlalchemy", "alembic")),
    reason="wants p2pdrl[mlflow]",
)
async def test_mlflow_in_a_database_of_its_own(tmp_path, events, kinds, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for _ in range(2):  # the second one goes on with the run
        writers = RunWriters(LogConfig(writers=("mlflow",)), tmp_path, SystemClock(), events)
        await write_some(writers, kinds)
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        rows = database.execute("select key, value, step from metrics").fetchall()
        runs = database.execute("select name, status from runs").fetchall()
    database.close()
    assert rows == [("train/loss", 0.5, 10)] * 2
    assert runs == [("me", "FINISHED")]


async def write_some(writers: RunWriters, kinds) -> None:
    before = kinds().count("run-writer")
    writers.start()
    await writers.ready()
    writers.begin(
        lambda config, folder: run_info(
            config, folder, node_id="a" * 32, name="me", swarm_id="s", task=TaskConfig()
        )
    )
    writers.scalars(10, {"train/loss": 0.5})
    async with asyncio.timeout(120):
        while kinds().count("run-writer") == before:
            assert "run-writer-failed" not in kinds()
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    await writers.close()
    assert "run-writer-failed" not in kinds()
