"""Nodes come, leave and die every few seconds, and the swarm solves its task all the same."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

NODES = 4
EVERY_S = 2.0
CHANGES = 12
"""On a machine so busy that they take long to start, nodes wouldn't get anywhere with ever more of them."""
WITHIN_S = 90.0
TASK = ["--config", "cartpole", "--set", "node.learner.step_delay_s=0.005"]
"""Slow environments, so that it takes a while."""


def ended(node):
    """Whether it has; one that came when all had gone looks for them yet, until it is told to leave."""
    if "goes on trying" in node.text().rsplit('"kind": "started"', 1)[-1]:
        node.signal(signal.SIGTERM)
        node.wait(15)
    return node.process.poll() is not None


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_cartpole_is_solved_under_churn(swarm, wait_until, seed):
    """Seeded kills, leaves and joins; at least two nodes stay up at any time."""
    rng = random.Random(seed)
    up, down = [], []
    first = ["kill", "stop", "join"]

    def start(name, data=None):
        # Whoever comes back has its data folder; of those that are up any one may be asked to take it in.
        peers = rng.choice(up) if up else None
        up.append(swarm.start(name, *TASK, peers=peers, data=data))

    for number in range(NODES):
        start(f"n{number}")
        if number == 0:
            swarm.training(up[0])
    start_s = time.monotonic()
    happened = []
    while time.monotonic() - start_s < WITHIN_S:
        time.sleep(EVERY_S * rng.uniform(0.7, 1.3))
        if any("the swarm is done" in node.text() for node in up):
            break
        if len(happened) == CHANGES:
            continue
        what = first.pop(0) if first else rng.choice(["kill", "stop", "join"])
        if what == "join" and down:
            gone = down.pop(rng.randrange(len(down)))
            start(gone.name, gone.data)
        elif what != "join" and len(up) > 2:
            node = up.pop(rng.randrange(len(up)))
            if what == "kill":
                node.kill9()
            else:
                wait_until(node.status, 30, f"{node.name} is up: {node.text()[-2000:]}")
                node.signal(signal.SIGTERM)
                assert node.wait(15) == 0, node.text()[-3000:]
            down.append(node)
        else:
            continue
        happened.append(what)
    assert {"kill", "stop", "join"} <= set(happened), happened
    for node in up:
        wait_until(lambda node=node: ended(node), 30, f"{node.name} ends: {node.text()[-2000:]}")
        assert node.process.returncode == 0, node.text()[-3000:]
    results = [event["path"] for node in up for event in node.told() if event["kind"] == "result"]
    assert results
    assert all(Path(path).is_file() for path in results)
    assert time.monotonic() - start_s < WITHIN_S + 30
    print(f"{happened} in {time.monotonic() - start_s:.0f} s")
