"""The configuration's count of blocks is the number that there are."""

from __future__ import annotations

import pytest

from p2pdrl.config.checks import as_built, block_count
from p2pdrl.config.task import NetworkConfig, RegressionConfig, TaskConfig
from p2pdrl.rl.envs import Discrete, EnvSpec
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.registry import build_trainer
from p2pdrl.rl.sequential import blocks

VECTOR = EnvSpec((4,), "float32", Discrete(2))
IMAGE = EnvSpec((84, 84, 4), "uint8", Discrete(2))
BOARD = EnvSpec((10, 10, 4), "bool", Discrete(2), 1.0)


@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
@pytest.mark.parametrize(
    ("spec", "network"),
    [
        (VECTOR, {"kind": "mlp"}),
        (VECTOR, {"kind": "mlp", "hidden": ()}),
        (VECTOR, {"kind": "mlp", "hidden": (8, 8, 8)}),
        (IMAGE, {"kind": "nature_cnn"}),
        (IMAGE, {"kind": "nature_cnn", "hidden": (8, 8)}),
        (IMAGE, {"kind": "nature_cnn", "hidden": ()}),
        (IMAGE, {"kind": "impala_resnet"}),
        (BOARD, {"kind": "minatar_cnn"}),
        (BOARD, {"kind": "minatar_cnn", "hidden": (8, 8)}),
        (BOARD, {"kind": "mlp", "hidden": (8, 8)}),
        (IMAGE, {"kind": "impala_resnet", "channels": (4, 4), "hidden": (8, 8)}),
        (VECTOR, {"kind": "transformer", "layers": 3, "width": 8}),
        (IMAGE, {"kind": "transformer", "layers": 1, "width": 8}),
    ],
)
def test_policies(spec, network, core):
    config = NetworkConfig(**network, core=core)
    count = len(blocks(ActorCritic(spec, config, None)))
    assert block_count(TaskConfig(network=config)) == (count, count)


@pytest.mark.parametrize("spec", [VECTOR, IMAGE, BOARD])
@pytest.mark.parametrize("hidden", [(64, 64), (), (8, 8, 8)])
@pytest.mark.parametrize("core", ["none", "lstm"])
def test_auto_is_within_bounds_and_known_once_it_is_built(spec, hidden, core):
    config = NetworkConfig(hidden=hidden, core=core)
    least, most = block_count(TaskConfig(network=config))
    assert least < most
    policy = ActorCritic(spec, config, None)
    count = len(blocks(policy))
    assert least <= count <= most
    built = as_built(TaskConfig(network=config), [name for name, _ in policy.named_parameters()])
    assert block_count(built) == (count, count)


@pytest.mark.parametrize("fields", [{}, {"kind": "classifier"}, {"kind": "classifier", "hidden": (4, 4)}])
def test_regressions(fields):
    task = TaskConfig(algorithm=RegressionConfig(**fields))
    count = len(build_trainer(task, 1, "cpu").parts().blocks)
    assert block_count(task) == (count, count)
