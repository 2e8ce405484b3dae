"""What a node leaves behind about its run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2pdrl.config.strategy import LocalConfig
from p2pdrl.node.counting.counters import Counts
from p2pdrl.node.farewell import farewell
from p2pdrl.node.showing.figures import Figures
from p2pdrl.node.showing.summary import NAME, write_summary
from p2pdrl.strategies.protocol import RoundReport


@pytest.fixture
def figures(parts, training) -> Figures:
    parts.training = training
    parts.ledger.follow(training.lineage)
    parts.ledger.credit(Counts(800, 4, 2))
    training.accounting.round(RoundReport("ok", bytes_in=5, changed=float("nan")))
    training.accounting.entered(LocalConfig(), 2)
    training.supervisor.returns.extend([10.0, 20.0])
    return Figures(parts)


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
    await write_summary(parts, Figures(parts), "asked to")
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
    await farewell(parts, Figures(parts), "the swarm is done")
    found = json.loads((Path(parts.data_dir) / NAME).read_bytes())
    assert found["reason"] == "100 of 100 steps are done"
    assert kinds() == ["leaving", "left"]
