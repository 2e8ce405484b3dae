"""This node's films: when one is made, what stays of them, and what becomes of one that fails."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from p2pdrl.config.node import VideoConfig
from p2pdrl.errors import ConfigError, UsageError, WorkerError
from p2pdrl.node.accounting.counters import Counts
from p2pdrl.node.videos import Videos, require_video
from p2pdrl.tensors.checkpoint import Checkpoint, from_bytes
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.workers.protocol import Filmed

pytestmark = pytest.mark.looptime

LAYOUT = Layout((TensorEntry("w", (5,)),))


class FakeProcess:
    """Films within two seconds what the test has planned; a planned error is raised."""

    def __init__(self, plan):
        self.plan = list(plan)
        self.asked = []
        self.running = False

    async def film(self, checkpoint, path, *, seed):
        self.running = True
        self.asked.append(from_bytes(b"".join(checkpoint)))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
        await asyncio.sleep(2.0)
        found = self.plan.pop(0) if self.plan else 5.0
        if isinstance(found, Exception):
            raise found
        path.write_bytes(b"film")
        return Filmed(found, 2.0)

    async def stop(self):
        self.running = False


class FakeCheckpointer:
    async def snapshot(self):
        return Checkpoint(np.full(5, 1.5, np.float32), {}, {"layout": LAYOUT.to_wire()})


@pytest.fixture
async def node(context, training, clock):
    """Makes a node's `Videos`, whose swarm makes 50 steps a second, and starts it."""
    tasks = []
    context.training, context.checkpointer, context.state = training, FakeCheckpointer(), "training"
    context.progress_tracker.follow("lineage")

    async def steps():
        while True:
            context.progress_tracker.credit(Counts(int(50 * (clock.monotonic() - 100.0))))
            await asyncio.sleep(0.5)
            clock.advance(0.5)

    def begin(*plan, every=1000, keep=10):
        process = FakeProcess(plan)
        made = Videos(context, VideoConfig(every=every, keep=keep), process)
        tasks.extend([asyncio.create_task(made.run()), asyncio.create_task(steps())])
        return SimpleNamespace(process=process, context=context, tasks=tasks)

    yield begin
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def films(tmp_path):
    return sorted(int(path.stem.removeprefix("step-")) for path in (tmp_path / "videos").glob("*.mp4"))


async def test_it_films_at_each_mark_and_keeps_the_newest(node, kinds, tmp_path):
    one = node(every=2000, keep=2)
    await asyncio.sleep(180.0)
    assert len(one.process.asked) == 4
    assert one.process.asked[0].params.tolist() == [1.5] * 5
    found = films(tmp_path)
    assert [step // 2000 for step in found] == [3, 4]
    assert kinds() == ["filmed"] * 4
    assert not one.process.running, "it takes no memory between two"
    assert not (tmp_path / "videos" / ".unfinished").exists()


async def test_a_swarm_that_is_faster_than_films_leaves_some_out(node, tmp_path):
    node(every=50)
    await asyncio.sleep(65.0)
    assert len(films(tmp_path)) == 3, "nine tenths of the time it rests"


async def test_none_is_made_without_being_asked_for_or_while_paused(node, tmp_path):
    one = node(every=0)
    await asyncio.sleep(100.0)
    assert one.process.asked == []
    paused = node()
    paused.context.state = "paused"
    await asyncio.sleep(100.0)
    assert paused.process.asked == []


async def test_one_that_fails_is_told_and_the_next_made(node, kinds, tmp_path):
    node(WorkerError("the evaluator is gone"), 7.0)
    await asyncio.sleep(50.0)
    assert kinds() == ["video-failed", "filmed"]
    assert len(films(tmp_path)) == 1


async def test_where_none_can_be_made_that_is_told_once(node, kinds, tmp_path):
    one = node(ConfigError("this environment draws nothing"))
    await asyncio.sleep(100.0)
    assert kinds() == ["video-failed"]
    assert len(one.process.asked) == 1
    assert not (tmp_path / "videos" / ".unfinished").exists()


async def test_one_that_is_cut_short_leaves_nothing(node, tmp_path):
    one = node()
    while not one.process.running:  # noqa: ASYNC110 - virtual time
        await asyncio.sleep(0.1)
    for task in one.tasks:
        task.cancel()
    await asyncio.gather(*one.tasks, return_exceptions=True)
    assert not list((tmp_path / "videos").iterdir())


def test_a_missing_extra_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'p2pdrl\[video\]'"):
        require_video(VideoConfig(every=1000))
    require_video(VideoConfig())
