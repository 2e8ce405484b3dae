"""Members of pipelines are frozen, leave and are killed, at each rank; a run with a loss ends solved."""

from __future__ import annotations

import random
import signal
import subprocess
import time

import pytest

from .pipelines import STREAM, Watch, holder, ranks, whole

AGAIN_S = 5.0
"""From the moment that somebody knows of the loss until updates go on."""
RANKS = [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]
STATE_EVERY = 5
IN_STEPS = 0.8
"""The least share of its time that a first rank spends in steps; about 0.9 was measured."""
DEADLINE_S = 2.0
OPTIONS = {
    "task.env.num_envs": 4,
    "task.algorithm.unroll_steps": 16,
    "task.algorithm.epochs": 12,
    "task.algorithm.minibatches": 1,
    "task.algorithm.learning_rate": 1e-5,
    "task.network.hidden": "[128, 128, 128, 128, 128]",
    "task.strategy.name": "pipeline",
    "task.strategy.backend": "stream",
    "task.strategy.microbatches": 2,
    "task.strategy.state_every": STATE_EVERY,
    "task.strategy.deadline_s": DEADLINE_S,
    "node.checkpoint.every_s": 0,
}
"""So many passes over few rows that updates consist of steps; nothing paces them."""


def stop(node, learner):
    node.signal(signal.SIGSTOP)
    subprocess.run(["kill", "-STOP", str(learner)], check=True)


def thaw(node, learner):
    subprocess.run(["kill", "-CONT", str(learner)], check=True)
    node.signal(signal.SIGCONT)


def in_the_middle(nodes, rng):
    """Wait for a moment at which a loss would show, most likely in the middle of a step.

    There was a copy of the whole state, and the next one comes after two updates: who has nothing newer has
    lost ``STATE_EVERY`` − 2 of them, who has no copy at all more than ``STATE_EVERY``.

    Returns:
        The share of its time that the first rank spends in steps.
    """
    share, changed_s, seen = 0.0, [], (0, 0)
    until_s = time.monotonic() + 60
    while True:
        assert time.monotonic() < until_s, f"no more updates: {ranks(nodes)}\n{nodes[0].text()[-2000:]}"
        time.sleep(0.01)
        head, generation, since = progress(nodes)
        if generation != seen[0]:  # whoever has come back may be heard of only now, and another one begins
            share, changed_s, seen = 0.0, [], (generation, since)
        if since == seen[1]:
            continue
        changed_s.append(time.monotonic())
        seen = generation, since
        if since > STATE_EVERY and not share:
            share = in_steps(head)
        elif since >= 2 * STATE_EVERY - 2 and since % STATE_EVERY == STATE_EVERY - 2 and share:
            break
    update_s = (changed_s[-1] - changed_s[0]) / (len(changed_s) - 1)
    time.sleep(rng.uniform(0.2, 0.8) * update_s)
    return share


def progress(nodes):
    """The first rank, the generation that it works in, and its updates since that began; zeros for none."""
    for node in nodes:
        status = node.status()
        shown = status.get("pipeline") or {}
        if shown.get("rank") == 0 and shown["role"].endswith("rank 0"):  # it is formed
            return node, shown["generation"], status["policy_version"] - shown["from_version"]
    return None, 0, 0


def in_steps(head):
    """The share of the last seconds that the first rank of a pipeline spent in steps, waits included."""
    spans = {}
    for event in head.json("/v1/pipeline/trace?seconds=3")["traceEvents"]:
        if event["ph"] == "X" and event["tid"] == 0:
            step, begin, end = event["args"]["minibatch"], event["ts"], event["ts"] + event["dur"]
            since, until = spans.get(step, (begin, end))
            spans[step] = min(since, begin), max(until, end)
    whole_us = max(end for _, end in spans.values()) - min(begin for begin, _ in spans.values())
    return sum(end - begin for begin, end in spans.values()) / whole_us


def lose(nodes, victim, how, what, stages, *, most, slack_s=0.0):
    """Lose a member; check that the others go on in time and lose no more than promised."""
    survivors = [node for node in nodes if node is not victim]
    stages = min(stages, len(survivors))
    watch = Watch(survivors)
    watch.lose(victim, how)
    took_s = watch.goes_on(40, lambda: whole(survivors, stages, len(survivors) // stages))
    known_s = watch.known_s() or 0.0
    lost = max(0, watch.version - watch.begun_with())
    figures = f"known after {known_s:.2f} s, updates again after {took_s} s"
    print(f"{what}: {figures}, {lost} lost, {watch.told_back()} told", flush=True)
    watch.nobody_began_anew()
    assert lost <= most
    assert took_s - known_s <= AGAIN_S + slack_s
    return watch


BACKENDS = {
    "stream": {},
    "torch": {
        "task.strategy.backend": "torch",
        "task.strategy.deadline_s": 10.0,
        "node.trusted_network": "true",
    },
}
SCHEDULES = {
    "1f1b": {},
    "gpipe": {"task.strategy.schedule": "gpipe"},
    "interleaved": {
        "task.strategy.schedule": "interleaved",
        "task.strategy.chunks": 2,
    },
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("stages", "rank"), RANKS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_rank_is_frozen_leaves_and_is_killed(swarm, no_orphans, stages, rank, schedule, backend):
    """At least 80 % (mostly 90 %) of a first rank's time passes in steps, so that most are lost in one.

    Only the first rank has what became of the updates since the last copy. Over torch.distributed nobody
    notices that another is frozen before the group's timeout.
    """
    options = OPTIONS | {"task.strategy.stages": stages} | SCHEDULES[schedule] | BACKENDS[backend]
    slack_s = options["task.strategy.deadline_s"] if backend == "torch" else 0.0
    most = STATE_EVERY if rank == 0 else 0
    rng = random.Random(10 * stages + rank)
    nodes = swarm.start_team(stages + 1, options)
    Watch(nodes).goes_on(120, lambda: whole(nodes, stages))

    shares = [in_the_middle(nodes, rng)]
    frozen = holder(nodes, rank)
    learner = frozen.learner_pid()
    how = f"rank {rank} of {stages} frozen"
    lose(nodes, frozen, lambda: stop(frozen, learner), how, stages, most=most, slack_s=slack_s)
    thaw(frozen, learner)
    Watch(nodes).goes_on(60, lambda: len(frozen.view()) == len(nodes) and whole(nodes, stages))
    assert frozen.status()["learner"]["restarts"] == 0

    shares.append(in_the_middle(nodes, rng))
    leaver = holder(nodes, rank)
    how = f"rank {rank} of {stages} leaves"
    watch = lose(nodes, leaver, lambda: leaver.signal(signal.SIGTERM), how, stages, most=0)
    assert leaver.wait(20) == 0
    assert watch.begun_with() >= leaver.summary()["status"]["policy_version"]
    nodes = watch.nodes

    shares.append(in_the_middle(nodes, rng))
    killed = holder(nodes, rank)
    nodes = lose(nodes, killed, killed.kill9, f"rank {rank} of {stages} killed", stages, most=most).nodes
    print(f"in steps: {', '.join(f'{share:.0%}' for share in shares)} of the time", flush=True)
    assert min(shares) >= IN_STEPS
    for node in nodes:
        node.signal(signal.SIGTERM)
    assert [node.wait(20) for node in nodes] == [0] * len(nodes)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_nodes_go_through_two_pipelines_with_a_loss_and_end_solved(swarm, wait_until, no_orphans):
    options = {
        "task.env.num_envs": 8,
        "task.env.normalize_returns": "true",
        "task.algorithm.learning_rate": 1e-3,
        "task.algorithm.unroll_steps": 64,
        "task.stop.mean_return": 475,
        "task.stop.window": 50,
        "node.learner.max_updates_per_s": 4,  # it takes more than 100 updates: the walk ends before
    }
    nodes = swarm.start_team(4, options)
    wait_until(lambda: all(node.rounds_in("adpsgd") > 0 for node in nodes), 30, "they gossip")
    watch = Watch(nodes)
    nodes[1].set_mode(
        "pipeline", "stages=2", f"state_every={STATE_EVERY}", f"deadline_s={DEADLINE_S}", *STREAM
    )
    into_s = watch.goes_on(30, lambda: whole(nodes, 2, count=2))
    print(f"gossip to two pipelines: {into_s} s; {ranks(nodes)}", flush=True)
    watch.nothing_lost(0)
    assert into_s <= AGAIN_S
    time.sleep(10)

    killed = holder(nodes, 1)
    how = "the lower stage of one pipeline killed"
    nodes = lose(nodes, killed, killed.kill9, how, 2, most=STATE_EVERY).nodes
    time.sleep(5)

    watch = Watch(nodes)
    nodes[0].set_mode("gossip")
    back_s = watch.goes_on(30, lambda: all(node.status()["strategy"]["name"] == "adpsgd" for node in nodes))
    print(f"pipeline to gossip: {back_s} s", flush=True)
    watch.nothing_lost(0)
    assert back_s <= AGAIN_S
    assert [node.wait(400) for node in nodes] == [0] * 3, nodes[0].text()[-3000:]
    for node in nodes:
        assert "return" in node.summary()["reason"]
