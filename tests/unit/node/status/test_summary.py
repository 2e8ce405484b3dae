"""What a node leaves behind about its run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2pdrl.config.strategy import LocalConfig
from p2pdrl.node.accounting.counters import Counts
from p2pdrl.node.shutdown import shutdown
from p2pdrl.node.status.meters import NAME, write_summary
from p2pdrl.node.status.reporter import StatusReporter
from p2pdrl.strategies.protocol import RoundReport


@pytest.fixture
def figures(parts, training) -> StatusReporter:
    parts.training = training
    parts.step_accounting.follow(training.lineage)
    parts.step_accounting.credit(Counts(800, 4, 2))
    training.accounting.round(RoundReport("ok", bytes_in=5, changed=float("nan")))
    training.accounting.entered(LocalConfig(), 2)
    training.supervisor.returns.extend([10.0, 20.0])
    return StatusReporter(parts)


async def test_it_tells_the_whole_run(parts, figures, clock):
    clock.advance(60.0)
    await write_summary(parts, figures, "the swarm is done")
    found = json.loads((Path(parts.data_dir) / NAME).read_bytes())
    assert (found["name"], found["reason"], found["boot"]) == ("me", "the swarm is done", 5)
    assert [step["protocol"] for step in found["modes"]] == ["adpsgd", "local"]
    assert found["accounting"]["adpsgd"]["rounds"] == {"ok": 1}
    assert (found["env_steps"], found["mean_return"], found["episodes"]) == (800, 15.0, 4)
    assert found["ended"] - found["began"] == pytest.approx(60.0)
    assert found["status"]["pid"] == os.getpid()


async def test_a_node_that_never_trained_has_one_too(parts):
    await write_summary(parts, StatusReporter(parts), "asked to")
    found = json.loads((Path(parts.data_dir) / NAME).read_bytes())
    assert (found["modes"], found["accounting"]) == ([], {})


async def test_a_disk_that_doesnt_take_it_is_told(parts, figures, kinds):
    parts.data_dir = "/nowhere/at/all"
    await write_summary(parts, figures, "asked to")
    assert kinds() == ["summary-failed"]


async def test_it_is_written_when_a_node_leaves(parts, kinds):
    async def leave(timeout_s):
        return 0

    parts.membership = SimpleNamespace(
        leave=leave, members=parts.membership.members, records=parts.membership.records
    )
    parts.halted = "100 of 100 steps are done"
    await shutdown(parts, StatusReporter(parts), "the swarm is done")
    found = json.loads((Path(parts.data_dir) / NAME).read_bytes())
    assert found["reason"] == "100 of 100 steps are done"
    assert kinds() == ["leaving", "left"]
