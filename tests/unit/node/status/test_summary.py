"""What a node leaves behind about its run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2pdrl.config.strategy import LocalConfig
from p2pdrl.node.accounting.counters import Counts
from p2pdrl.node.daemon import shutdown
from p2pdrl.node.status.meters import NAME, write_summary
from p2pdrl.node.status.reporter import StatusReporter
from p2pdrl.strategies.protocol import RoundReport


@pytest.fixture
def figures(context, training) -> StatusReporter:
    context.training = training
    context.progress_tracker.follow(training.lineage)
    context.progress_tracker.credit(Counts(800, 4, 2))
    training.accounting.round(RoundReport("ok", bytes_in=5, changed=float("nan")))
    training.accounting.entered(LocalConfig(), 2)
    training.supervisor.returns.extend([10.0, 20.0])
    return StatusReporter(context)


async def test_it_tells_the_whole_run(context, figures, clock):
    clock.advance(60.0)
    await write_summary(context, figures, "the swarm is done")
    found = json.loads((Path(context.data_dir) / NAME).read_bytes())
    assert (found["name"], found["reason"], found["boot"]) == ("me", "the swarm is done", 5)
    assert [step["protocol"] for step in found["modes"]] == ["adpsgd", "local"]
    assert found["accounting"]["adpsgd"]["rounds"] == {"ok": 1}
    assert (found["env_steps"], found["mean_return"], found["episodes"]) == (800, 15.0, 4)
    assert found["ended"] - found["began"] == pytest.approx(60.0)
    assert found["status"]["pid"] == os.getpid()


async def test_a_node_that_never_trained_has_one_too(context):
    await write_summary(context, StatusReporter(context), "asked to")
    found = json.loads((Path(context.data_dir) / NAME).read_bytes())
    assert (found["modes"], found["accounting"]) == ([], {})


async def test_a_disk_that_doesnt_take_it_is_told(context, figures, kinds):
    context.data_dir = "/nowhere/at/all"
    await write_summary(context, figures, "asked to")
    assert kinds() == ["summary-failed"]


async def test_it_is_written_when_a_node_leaves(context, kinds):
    async def leave(timeout_s):
        return 0

    context.membership = SimpleNamespace(
        leave=leave, members=context.membership.members, records=context.membership.records
    )
    context.halted = "100 of 100 steps are done"
    await shutdown(context, StatusReporter(context), "the swarm is done")
    found = json.loads((Path(context.data_dir) / NAME).read_bytes())
    assert found["reason"] == "100 of 100 steps are done"
    assert kinds() == ["leaving", "left"]
