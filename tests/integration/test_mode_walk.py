"""A live swarm walks through the modes while it trains: nothing starts anew or is lost, nobody waits long.

The bound of the walk is the one that people are promised: `STEPS_S` after the command every member has
stepped under the new strategy.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

from p2pdrl.config.task import TaskConfig
from p2pdrl.rl.registry import build_trainer

STEPS_S = 5.0
WALK = [
    ("server-async", "server_async", ()),
    ("server-sync", "server_sync", ("servers=2",)),
    ("allreduce", "grad_average", ()),
    ("gossip", "sgp", ("protocol=sgp",)),
    ("gossip", "adpsgd", ()),
]


def meet(nodes, wait_until, timeout_s=30):
    wanted = {node.name for node in nodes}
    wait_until(
        lambda: all({n for n, state in node.view().items() if state == "alive"} >= wanted for node in nodes),
        timeout_s,
        "all see all",
    )


class Walk:
    """Switches modes, measures how long each member takes to step, and that nothing goes back."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.pids = {node.name: (node.process.pid, node.learner_pid()) for node in nodes}
        self.last = {}
        self.check()

    def switch(self, through, mode, protocol, options, limit_s, *, rounds=True):
        """Change the mode; return the seconds until each member has stepped in it."""
        began_s = time.monotonic()
        before = {node.name: node.rounds_in(protocol) for node in self.nodes}
        began_s = time.monotonic()
        through.set_mode(mode, *options)
        entered, took = {}, {}
        while len(took) < len(self.nodes):
            for node in self.nodes:
                if node.name in took:
                    continue
                status = node.status()
                if (status.get("strategy") or {}).get("name") != protocol:
                    continue
                entered.setdefault(node.name, status["updates"])
                went_well = not rounds or node.rounds_in(protocol) > before[node.name]
                if status["updates"] > entered[node.name] and went_well:
                    took[node.name] = round(time.monotonic() - began_s, 2)
            assert time.monotonic() - began_s < limit_s, (
                f"{protocol}: after {limit_s} s only {took} stepped, entered: {entered}\n"
                + "\n".join(f"{node.name}: {node.text()[-1500:]}" for node in self.nodes)
            )
            time.sleep(0.05)
        self.check()
        return took

    def check(self):
        for node in self.nodes:
            status = node.status()
            assert (node.process.pid, status["learner"]["pid"]) == self.pids[node.name]
            assert status["learner"]["restarts"] == 0
            now = (status["env_steps"], status["updates"], status["policy_version"])
            before = self.last.get(node.name, (0, 0, 0))
            assert all(a >= b for a, b in zip(now, before, strict=True)), (node.name, before, now)
            self.last[node.name] = now


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_live_swarm_walks_through_the_modes_and_solves_its_task(swarm, wait_until, no_orphans):
    options = {
        "task.env.num_envs": 8,
        "task.env.normalize_returns": "true",
        "task.algorithm.learning_rate": 1e-3,
        "task.algorithm.unroll_steps": 64,
        "task.stop.mean_return": 475,
        "task.stop.window": 50,
        "node.learner.max_updates_per_s": 2,
    }
    nodes = swarm.start_team(5, options)
    meet(nodes, wait_until)
    walk = Walk(nodes)
    for number, (mode, protocol, sets) in enumerate(WALK):
        took = walk.switch(nodes[(2 * number + 1) % 5], mode, protocol, sets, 30)
        print(f"{protocol}: {max(took.values())} s, {took}", flush=True)
        assert max(took.values()) <= STEPS_S
    ends = [node.wait(300) for node in nodes]
    assert ends == [0] * 5, nodes[0].text()[-3000:]
    summaries = [node.summary() for node in nodes]
    for summary in summaries:
        assert [step["protocol"] for step in summary["modes"]][1:] == [protocol for _, protocol, _ in WALK]
        assert "return" in summary["reason"]


# The mean of all members

STILL = {
    "task.algorithm.learning_rate": 0,
    "task.env.num_envs": 1,
    "task.algorithm.unroll_steps": 16,
    "task.algorithm.epochs": 1,
    "task.algorithm.minibatches": 1,
    "node.debug.perturb_start": 1.0,
    "node.learner.max_updates_per_s": 10,
    "node.checkpoint.every_s": 0,
}
"""Parameters move by averaging alone."""
FLOAT32 = "compression=none"


def consensus(vectors_ND):
    """sqrt(mean over nodes of ‖x_i − x̄‖²)."""
    return float(np.sqrt(((vectors_ND - vectors_ND.mean(0)) ** 2).sum(1).mean()))


def moved(now_ND, before_ND):
    """How far the mean has moved, relative to its norm."""
    mean_D = before_ND.mean(0)
    return float(np.linalg.norm(now_ND.mean(0) - mean_D) / np.linalg.norm(mean_D))


def params(nodes):
    return np.array([node.params() for node in nodes])


def first_params(count):
    """What the nodes of seeds 0 … begin with: the task's weights plus noise of their own."""
    trainer = build_trainer(msgspec.structs.replace(TaskConfig(), seed=0), seed=0, device="cpu")
    first_D = trainer.flat.astype(np.float64)
    trainer.close()
    noise = [np.random.default_rng(seed).normal(0, 1.0, first_D.size) for seed in range(count)]
    return first_D + np.array(noise, np.float32).astype(np.float64)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_mean_is_kept_through_a_walk_and_all_step_soon_after_each_command(swarm, wait_until):
    """The pairs meet seldom, so that replicas still differ when the servers take over."""
    gossip = {
        "task.strategy.compression": "none",
        "task.strategy.every_updates": 0,
        "task.strategy.every_s": 30,
    }
    nodes = swarm.start_team(5, STILL | gossip)
    meet(nodes, wait_until)
    walk, first_ND = Walk(nodes), first_params(5)
    assert consensus(params(nodes)) > 0.01 * consensus(first_ND)
    for number, (mode, protocol, sets) in enumerate(WALK):
        took = walk.switch(nodes[(2 * number + 1) % 5], mode, protocol, (*sets, FLOAT32), 30)
        off = moved(params(nodes), first_ND)
        print(f"{protocol}: {max(took.values())} s, mean moved {off:.1e}", flush=True)
        assert off < 1e-5
        assert max(took.values()) <= STEPS_S


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mode", "protocol", "options"),
    [
        ("server-async", "server_async", ()),
        ("server-sync", "server_sync", ("servers=2",)),
        ("allreduce", "grad_average", ()),
        ("allreduce", "param_average", ("protocol=param_average", "weighting=equal")),
        ("gossip", "dsgd", ("protocol=dsgd",)),
        ("gossip", "adpsgd", ()),
        ("gossip", "sgp", ("protocol=sgp",)),
    ],
    ids=lambda value: value if isinstance(value, str) and "_" in value else None,
)
def test_the_mean_of_replicas_that_differ_is_kept_from_switch_to_switch(
    swarm, wait_until, mode, protocol, options
):
    nodes = swarm.start_team(5, STILL | {"task.strategy.name": "local"})
    meet(nodes, wait_until)
    walk, first_ND = Walk(nodes), params(nodes)
    walk.switch(nodes[1], mode, protocol, (*options, FLOAT32), 30)
    if protocol == "sgp":  # keeps the mean by weight; the plain mean is the same once replicas agree
        wait_until(lambda: consensus(params(nodes)) < 1e-7 * consensus(first_ND), 40, "consensus")
    halfway_ND = params(nodes)
    walk.switch(nodes[2], "local", "local", (), 30, rounds=False)
    last_ND = params(nodes)
    print(
        f"{protocol}: mean moved {moved(last_ND, first_ND):.1e}, "
        f"consensus {consensus(first_ND):.2e} -> {consensus(halfway_ND):.1e} -> {consensus(last_ND):.1e}",
        flush=True,
    )
    assert moved(last_ND, first_ND) < 1e-5
