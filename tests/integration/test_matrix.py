"""What the matrix allows runs: of each algorithm, two live nodes walk through all strategies it goes with."""

from __future__ import annotations

import numpy as np
import pytest

from p2pdrl.config.matrix import combinations

UPDATES = 3
UNROLLS = ("task.env.num_envs=2", "task.algorithm.unroll_steps=8", "task.network.hidden=[16]")
REPLAY = (
    "task.env.num_envs=2",
    "task.network.hidden=[16]",
    "task.algorithm.unroll_steps=2",
    "task.algorithm.learning_starts=32",
    "task.algorithm.batch_size=8",
    "task.algorithm.buffer_size=2000",
)
PENDULUM = (*REPLAY, "task.env.id=Pendulum-v1")
CASES = {
    "ppo": (*UNROLLS, "task.algorithm.epochs=1", "task.algorithm.minibatches=2"),
    "a2c": UNROLLS,
    "impala": UNROLLS,
    "dqn": REPLAY,
    "one_step_q": UNROLLS,
    "one_step_sarsa": UNROLLS,
    "n_step_q": UNROLLS,
    "ddpg": PENDULUM,
    "ddpg joint": (*PENDULUM, "task.algorithm.joint=true"),
    "td3": PENDULUM,
    "sac": PENDULUM,
    "sac_discrete": REPLAY,
    "regression": ("task.algorithm.kind=classifier", "task.algorithm.hidden=[8]", "task.algorithm.rows=256"),
}
"""By algorithm and variant: what makes it small."""
OPTIONS = {"pipeline": ("microbatches=2",), "federated": ("participation=1",)}
WALKS = {}
"""By algorithm and placement: the strategies, with the mode that each is found under."""
for cell in combinations():
    name, strategy, placement = cell.names
    if cell.problem is None and placement in ("inline", "actors"):
        WALKS.setdefault((name, placement), []).append((cell.strategy.modes[0], strategy))


def updates(node, strategy):
    """How many updates a node has made, once it works by that strategy."""
    status = node.status()
    return status["updates"] if (status.get("strategy") or {}).get("name") == strategy else None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("algorithm", "placement"), WALKS, ids=list(map("-".join, WALKS)))
def test_two_nodes_walk_through_all_that_is_allowed(swarm, wait_until, algorithm, placement):
    options = {
        "task.algorithm.name": algorithm.split()[0],
        **dict(text.split("=", 1) for text in CASES[algorithm]),
        "task.strategy.name": "local",
        "task.evaluation.every": 0,
        "node.actors.count": int(placement == "actors"),
        "node.learner.max_updates_per_s": 20,
        "node.checkpoint.every_s": 0,
    }
    nodes = swarm.start_team(2, options)
    wait_until(lambda: all(len(node.view()) == 2 for node in nodes), 60, "both see both")
    for mode, strategy in WALKS[algorithm, placement]:
        nodes[0].set_mode(mode, f"protocol={strategy}", *OPTIONS.get(strategy, ()))
        began: dict[str, int] = {}

        def went_on(strategy=strategy, began=began):
            for node in nodes:
                now = updates(node, strategy)
                if now is None:
                    return False
                began.setdefault(node.name, now)
            made = [updates(node, strategy) - began[node.name] for node in nodes]
            return max(made) >= UPDATES and (strategy == "pipeline" or min(made) >= UPDATES)

        logs = "\n".join(node.text()[-1500:] for node in nodes)
        wait_until(went_on, 60, f"{UPDATES} updates of {algorithm} under {strategy}:\n{logs}")
    for node in nodes:
        assert "Traceback" not in node.text()
        assert node.status()["learner"]["restarts"] == 0
        assert np.isfinite(node.params()).all()
