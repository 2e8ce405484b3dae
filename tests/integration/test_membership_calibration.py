"""The membership simulator against eight real daemons: how soon a kill -9 is known, and how many messages go.

Daemons are paused and their learners only count, so that what is measured is the protocol over real sockets.
Both sides do the same: eight members who have met, each of some killed in turn, each other told of it.
"""

from __future__ import annotations

import stat
import statistics
import sys
import time
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from p2pdrl.testing.membership_simulator import SimulatedSwarm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FAKE_LEARNER = Path(__file__).parents[1] / "unit" / "node" / "fake_learner.py"
MEMBERS = 8
KILLS = 4
WITHIN = 0.25
COUNT_S = 60.0
BUSY = 0.85
SWITCH = 'import os, sys\nsys.executable = os.environ["CALIBRATION_PYTHON"]\n'


def last_to_know_s(n: int, seed: int) -> float:
    """Seconds from a kill to the last survivor's verdict."""
    swarm = SimulatedSwarm(n, seed=seed)
    swarm.run(10.0 + 0.37 * seed % 1.0)
    swarm.kill(3)
    took_s = swarm.seconds_until(lambda: swarm.all_see(3, "dead"), 20.0, every_s=0.02)
    assert took_s is not None
    return took_s


def messages_s(n: int, seed: int) -> float:
    """Messages a member a second while nothing happens."""
    swarm = SimulatedSwarm(n, seed=seed)
    swarm.run(20.0)
    before = swarm.messages
    swarm.run(COUNT_S)
    return (swarm.messages - before) / COUNT_S / n


def sent(node) -> float:
    page = node.get("/metrics").decode()
    line = next(line for line in page.splitlines() if line.startswith("p2pdrl_membership_messages_total "))
    return float(line.split()[1])


@pytest.fixture
def daemons(swarm, wait_until, tmp_path):
    """Eight that have met, and are paused."""
    (tmp_path / "sitecustomize.py").write_text(SWITCH)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE_LEARNER}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    plan = tmp_path / "plan"
    plan.write_text("train")
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    env = {"PYTHONPATH": path, "CALIBRATION_PYTHON": str(python), "FAKE_LEARNER_PLAN": str(plan)}
    options = ["--set=node.checkpoint.every_s=0", "--set=task.evaluation.every=0"]
    nodes = [swarm.start("n0", *options, env=env)]
    swarm.training(nodes[0], timeout_s=120)
    nodes[0].hold()
    nodes += [swarm.start(f"n{i}", *options, peers=nodes[0], env=env) for i in range(1, MEMBERS)]
    for node in nodes:
        wait_until(lambda node=node: node.status().get("state") == "paused", 240, f"{node.name} is paused")
    wait_until(lambda: all(len(node.peers()) == MEMBERS for node in nodes), 60, "they have met")
    time.sleep(10.0)
    return nodes


def test_eight_daemons_are_as_quick_and_as_quiet_as_the_simulator(daemons, swarm, wait_until):
    psutil.cpu_percent()
    before, began_s = [sent(node) for node in daemons], time.monotonic()
    time.sleep(COUNT_S)
    took_s = time.monotonic() - began_s
    real_rate = statistics.fmean(sent(node) - one for node, one in zip(daemons, before, strict=True)) / took_s
    busy = psutil.cpu_percent() / 100

    real, simulated, living = [], [], list(daemons)
    for number in range(KILLS):
        simulated += [last_to_know_s(len(living), 100 * number + seed) for seed in range(25)]
        victim = living.pop()
        name = victim.name
        killed_s = time.time()
        victim.kill9()
        wait_until(
            lambda name=name: all(node.view()[name] == "dead" for node in living), 30, f"all know of {name}"
        )
        told = [
            datetime.fromisoformat(event["time"]).timestamp() - killed_s
            for node in living
            for event in node.told()
            if event["kind"] == "member-dead" and f"{name} (" in event["event"]
        ]
        assert len(told) == len(living)
        real.append(max(told))
        time.sleep(2.0)
    rate = statistics.fmean(messages_s(MEMBERS, seed) for seed in range(5))
    words = (
        f"last to know after {statistics.fmean(real):.2f} s ({', '.join(f'{one:.2f}' for one in real)}), "
        f"simulated {statistics.fmean(simulated):.2f} ({min(simulated):.2f} to {max(simulated):.2f}); "
        f"messages a member a second {real_rate:.3f}, simulated {rate:.3f}; machine {busy:.0%} busy"
    )
    print(words)
    if busy > BUSY:
        pytest.skip(f"the machine is too busy to measure on: {words}")
    assert abs(statistics.fmean(real) / statistics.fmean(simulated) - 1) <= WITHIN, words
    assert abs(real_rate / rate - 1) <= WITHIN, words
    assert max(real) <= 8.0
