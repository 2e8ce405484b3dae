"""A member of an averaging group is killed or frozen: the others go on; the frozen comes back."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

AGAIN_S = 3.0
"""From the moment that a survivor knows of the loss until its learner steps again."""


def group_of(nodes, wait_until, protocol, timeout_s=60):
    def all_work():
        return all(
            (node.json("/v1/mode") or {}).get("facts", {}).get("members") == len(nodes)
            and node.rounds_in(protocol) > 3
            for node in nodes
        )

    wait_until(all_work, timeout_s, f"a group of {len(nodes)}")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("protocol", ["grad_average", "param_average"])
def test_members_go_on_when_one_is_frozen_and_when_one_is_killed(
    swarm, small_updates, wait_until, make_recovery, protocol
):
    nodes = swarm.start_team(4, small_updates | {"task.strategy.name": protocol})
    group_of(nodes, wait_until, protocol)
    time.sleep(1)

    frozen, killed, *others = nodes[::-1]
    learner = frozen.learner_pid()
    recovery = make_recovery([killed, *others], frozen, protocol)

    def freeze():
        frozen.signal(signal.SIGSTOP)
        subprocess.run(["kill", "-STOP", str(learner)], check=True)

    recovery.lose(freeze)
    told(f"{protocol}, frozen", recovery, recovery.wait(40))
    recovery.nothing_lost()

    before = others[0].status()["policy_version"]
    subprocess.run(["kill", "-CONT", str(learner)], check=True)
    frozen.signal(signal.SIGCONT)
    group_of(nodes, wait_until, protocol)
    wait_until(lambda: frozen.status()["policy_version"] > before, 20, "the frozen one is back among them")
    assert frozen.status()["learner"]["restarts"] == 0

    recovery = make_recovery([frozen, *others], killed, protocol)
    recovery.lose(killed.kill9)
    told(f"{protocol}, killed", recovery, recovery.wait(40))
    recovery.nothing_lost()


def told(what, recovery, took):
    known = {name: round(at - recovery.lost_at, 2) for name, at in recovery.known_at.items()}
    print(f"{what}: known after {known} s, steps again {took} s later", flush=True)
    assert max(took.values()) <= AGAIN_S
