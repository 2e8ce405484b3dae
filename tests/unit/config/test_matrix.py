"""Every algorithm with every strategy in every placement: matrix and configurations are told the same."""

from __future__ import annotations

from typing import get_args

import pytest

from p2pdrl.config.checks import problems
from p2pdrl.config.matrix import PLACEMENTS, combinations
from p2pdrl.config.node import ActorsConfig, LearnerConfig, NodeConfig
from p2pdrl.config.root import Config
from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.config.task import AlgorithmConfig, RegressionConfig, TaskConfig

CELLS = list(combinations())
NODES = {
    "inline": NodeConfig(actors=ActorsConfig(count=0)),
    "actors": NodeConfig(actors=ActorsConfig(count=1)),
    "actor_nodes": NodeConfig(roles=("learner",)),
    "replay_nodes": NodeConfig(roles=("replay",), peers=("127.0.0.1:7000",)),
    "stages": NodeConfig(),
    "learners": NodeConfig(),
    "split_devices": NodeConfig(learner=LearnerConfig(split_devices=("cpu", "cpu"))),
}
ONLY_ACTS = NodeConfig(roles=("actor",), peers=("127.0.0.1:7000",))


def told(cell, node):
    task = TaskConfig(
        algorithm=RegressionConfig(kind="classifier", hidden=(8,))
        if isinstance(cell.algorithm, RegressionConfig)
        else cell.algorithm,
        strategy=cell.strategy,
        stop=TaskConfig().stop.__class__(env_steps=1000),
    )
    return problems(Config(task=task, node=node))


def test_no_combination_is_missing():
    algorithms, strategies = (
        [str(one.__struct_config__.tag) for one in get_args(union)]
        for union in (AlgorithmConfig, StrategyConfig)
    )
    algorithms.insert(algorithms.index("ddpg") + 1, "ddpg joint")
    expected = [(a, s, p) for a in algorithms for s in strategies for p in PLACEMENTS]
    assert [cell.names for cell in CELLS] == expected


def differences(cell):
    """Where a configuration of the cell is told something else than the matrix says."""
    if cell.problem is not None and not cell.problem.key:
        return  # no configuration can ask for it
    nodes = [NODES[cell.placement]]
    if cell.placement == "actor_nodes":
        # a learner's node may say so with a regression, which has nobody to act
        nodes = [ONLY_ACTS] if isinstance(cell.algorithm, RegressionConfig) else [*nodes, ONLY_ACTS]
    for node in nodes:
        found = told(cell, node)
        agree = found == [] if cell.problem is None else cell.problem in found
        if not agree or (cell.problem is not None and len(cell.problem.message) <= 30):
            yield f"{' · '.join(cell.names)}: the matrix says {cell.problem}, a configuration is told {found}"


def test_what_the_matrix_says_is_what_a_configuration_is_told():
    wrong = [difference for cell in CELLS for difference in differences(cell)]
    assert not wrong, "\n".join(["", *wrong])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_something_runs_in_each_placement(placement):
    assert any(cell.problem is None for cell in CELLS if cell.placement == placement)
