"""DD-PPO's preemption between real nodes: one whose environments are ten times slower holds nobody up long.

That the others keep nine tenths of their updates is shown where nobody shares a processor
(``tests/sim/test_collecting_together.py``); on two cores they kept 1.33 of 1.33 updates a second,
and 0.73 of 1.07 while other work kept both busy.
Waiting for the slow one would leave them less than 0.2 a second: its unroll alone takes 5.1 s.
"""

from __future__ import annotations

import time

import pytest

STEP_S = 0.004
SPAN_S = 15.0


def rate(nodes, span_s=SPAN_S):
    """Updates a second of the first node."""
    before, began_s = nodes[0].status()["updates"], time.monotonic()
    time.sleep(span_s)
    return (nodes[0].status()["updates"] - before) / (time.monotonic() - began_s)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_ten_times_slower_leaves_the_others_most_of_their_rate(swarm):
    options = ["--config", "ddppo", "--set", "task.evaluation.every=0", "--set", "task.stop.mean_return=none"]
    delay = "node.learner.step_delay_s"
    first = swarm.found("n0", *options, "--set", f"{delay}={STEP_S}")
    others = [
        swarm.start(name, "--set", f"{delay}={step_s}", peers=first)
        for name, step_s in (("n1", STEP_S), ("n2", STEP_S))
    ]
    swarm.training(first, *others)
    time.sleep(5.0)
    alike = rate([first])
    others[1].kill9()
    slow = swarm.start("slow", "--set", f"{delay}={10 * STEP_S}", peers=first)
    swarm.training(slow)
    time.sleep(10.0)
    with_slow = rate([first])
    print(f"{alike:.2f} updates a second, with a slow node {with_slow:.2f}")
    assert slow.status()["updates"] > 0
    assert with_slow >= 0.6 * alike
