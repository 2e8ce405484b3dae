"""What a node may take of its machine, kept by real nodes."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from p2pdrl.node.bootstrap.datadir import RATES_FILE

LARGE = [
    *("--config", "ppo", "--set", "task.network.hidden=[1024,1024]", "--set", "task.strategy.deadline_s=20"),
    *("--set", "task.algorithm.unroll_steps=8", "--set", "task.algorithm.epochs=1"),
    *("--set", "task.algorithm.minibatches=1", "--set", "node.checkpoint.every_s=0"),
]
"""A node that sends vectors of 4.2 MB as often as it can: tens of megabytes a second."""


def bytes_out(node) -> float:
    lines = (node.get("/metrics") or b"").decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("p2pdrl_bytes_out_total"))


@pytest.mark.slow
def test_nodes_send_no_more_than_they_may_and_use_one_processor(swarm, wait_until, no_orphans):
    bytes_s = 4_000_000
    limits = [f"--set=node.limits.upload_bytes_s={bytes_s}", "--set=node.limits.cpus=1"]
    first = swarm.found("first", *LARGE, *limits)
    second = swarm.start("second", *LARGE, *limits, peers=first)
    swarm.training(first, second)
    wait_until(lambda: first.rounds_in("adpsgd") >= 1, 90, "they average")
    time.sleep(5.0)  # what follows is no longer the state that the second one fetched
    before, began_s = [bytes_out(node) for node in (first, second)], time.monotonic()
    time.sleep(20.0)
    passed_s = time.monotonic() - began_s
    for node, count in zip((first, second), before, strict=True):
        moved = bytes_out(node) - count
        # The counter moves by a whole vector, when that has left.
        assert 0.2 * bytes_s * passed_s < moved < bytes_s * passed_s + 5_000_000
        assert node.view() == {"first": "alive", "second": "alive"}
        assert not node.events("member-suspect")
        processes = [psutil.Process(node.process.pid), *node.children()]
        assert {len(process.cpu_affinity()) for process in processes} == {1}
        assert len({tuple(process.cpu_affinity()) for process in processes}) == 1
        assert (node.data / RATES_FILE).is_file()
    for node in (first, second):
        node.signal(signal.SIGTERM)
        assert node.wait(20) == 0


ENVIRONMENT = '''
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv


class Hoarding(CartPoleEnv):
    """Keeps half a megabyte of each step."""

    kept = []

    def step(self, action):
        Hoarding.kept.append(bytearray(b"x") * 500_000)
        return super().step(action)


gymnasium.register("Hoarding-v0", Hoarding)
'''


@pytest.mark.slow
def test_a_node_that_takes_too_much_memory_saves_leaves_and_says_so(swarm, tmp_path, no_orphans):
    (tmp_path / "hoarding.py").write_text(ENVIRONMENT)
    node = swarm.start(
        "n",
        *("--allow-import", "--set=task.env.id=hoarding:Hoarding-v0", "--set=node.learner.step_delay_s=0.01"),
        *("--set=node.limits.memory_bytes=1500000000", "--set=node.checkpoint.every_s=0"),
        env={"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))},
    )
    assert node.wait(120) == 1
    last = node.text().splitlines()[-1]
    assert last.startswith("p2pdrl: this node took ")
    assert "the most of it the learner (process " in last
    assert "more than node.limits.memory_bytes = 1500000000 (1.50 GB). Raise that, or need less" in last
    told = [event["kind"] for event in node.told()]
    assert "training" in told
    assert told[-1] == "left"
    assert node.summary()["reason"] == "it takes too much memory"
    assert list(node.data.rglob("last.safetensors"))


@pytest.mark.slow
def test_a_replay_memory_that_wouldnt_fit_is_refused_at_the_start(swarm, no_orphans):
    options = ["--config", "dqn", "--set=task.algorithm.buffer_size=10000000"]
    node = swarm.start("n", *options, "--set=node.limits.memory_bytes=280000000")
    assert node.wait(90) == 2
    last = node.text().splitlines()[-1]
    assert "the replay memory alone takes " in last
    assert "lower task.algorithm.buffer_size" in last


@pytest.mark.slow
def test_a_learner_without_address_space_is_told_as_want_of_memory(swarm, no_orphans):
    node = swarm.start("n", "--set=node.learner.restart_min_s=0.1")
    psutil.Process(node.process.pid).rlimit(psutil.RLIMIT_AS, (400_000 * 1024,) * 2)
    assert node.wait(90) == 1
    last = node.text().splitlines()[-1]
    assert "died of want of memory, by ImportError: " in last
    assert "`ulimit -v`" in last
