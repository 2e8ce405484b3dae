"""Modes proposed at once, and on both sides of a partition: all end in one of them, and train in it."""

from __future__ import annotations

import signal
import subprocess
import threading
import time

import pytest


def send(nodes, *signals):
    for node in nodes:
        for name in signals:
            learner = node.learner_pid() if name == signal.SIGSTOP else node.frozen_learner
            if name == signal.SIGSTOP:
                node.frozen_learner = learner
            node.signal(name)
            subprocess.run(["kill", f"-{int(name)}", str(learner)], check=True)


def agree_and_train(nodes, wait_until, timeout_s=60):
    """Wait until all are in one mode and all have rounds of it; return protocol, epoch and proposer."""

    def one_mode():
        modes = [node.json("/v1/mode") for node in nodes]
        if not all(mode and mode["record"] for mode in modes):
            return None
        found = {(mode["protocol"], mode["epoch"], mode["record"]["proposer_name"]) for mode in modes}
        return found.pop() if len(found) == 1 else None

    def settled():
        found = one_mode()
        if found is None:
            return None
        before = [node.rounds_in(found[0]) for node in nodes]
        time.sleep(1.5)
        after = [node.rounds_in(found[0]) for node in nodes]
        return (
            found if one_mode() == found and all(a > b for a, b in zip(after, before, strict=True)) else None
        )

    return wait_until(settled, timeout_s, f"one mode: {[node.json('/v1/mode') for node in nodes]}")


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_modes_proposed_at_once_and_in_a_partition_end_in_one(swarm, small_updates, wait_until):
    nodes = swarm.start_team(4, small_updates)
    wait_until(lambda: all(len(node.view()) == 4 for node in nodes), 30, "all see all")
    pids = {node.name: (node.process.pid, node.learner_pid()) for node in nodes}

    proposals = [("server-sync", "servers=2"), ("allreduce", "protocol=grad_average")]
    threads = [
        threading.Thread(target=node.set_mode, args=proposal)
        for node, proposal in zip((nodes[0], nodes[3]), proposals, strict=True)
    ]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = agree_and_train(nodes, wait_until)
    print(f"at once: {found} after {time.monotonic() - began_s:.1f} s", flush=True)
    assert found[0] in ("server_sync", "grad_average")

    left, right = nodes[:2], nodes[2:]
    send(right, signal.SIGSTOP)
    time.sleep(1)
    left[0].set_mode("gossip", "protocol=sgp")
    wait_until(
        lambda: all(node.status().get("strategy", {}).get("name") == "sgp" for node in left), 20, "left"
    )
    wait_until(lambda: all(node.rounds_in("sgp") > 0 for node in left), 40, "the left side goes on")
    send(left, signal.SIGSTOP)
    send(right, signal.SIGCONT)
    right[0].set_mode("server-async")
    wait_until(
        lambda: all(node.status().get("strategy", {}).get("name") == "server_async" for node in right),
        20,
        "right",
    )
    wait_until(
        lambda: all(node.rounds_in("server_async") > 0 for node in right), 40, "the right side goes on"
    )
    began_s = time.monotonic()
    send(left, signal.SIGCONT)
    found = agree_and_train(nodes, wait_until)
    print(f"after the partition: {found} after {time.monotonic() - began_s:.1f} s", flush=True)
    assert found[0] in ("sgp", "server_async")
    assert pids == {node.name: (node.process.pid, node.learner_pid()) for node in nodes}
