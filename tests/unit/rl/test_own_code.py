"""The examples of docs/own_code.md, and who may import what."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from p2pdrl.config.task import EnvConfig, NetworkConfig, PPOConfig, TaskConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.envs import make_vector_env
from p2pdrl.rl.evaluate import evaluate
from p2pdrl.rl.registry import build_trainer
from p2pdrl.rl.rollout_worker import RolloutWorker
from p2pdrl.tensors.shared_policy import ActingPolicy

DOCS = Path(__file__).parents[3] / "docs" / "own_code.md"
POLE = EnvConfig(id="my_pole:Pole", num_envs=2, max_episode_steps=50)
RESIDUAL = NetworkConfig(kind="own", own="my_network:Residual", hidden=(16,))


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """The modules of the document, where Python finds them."""
    found = re.findall(r"```python (\w+)\.py\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    assert [name for name, _ in found] == ["my_pole", "my_network"]
    for name, text in found:
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name, _ in found:
        sys.modules.pop(name, None)


def task(env: EnvConfig = POLE, network: NetworkConfig = RESIDUAL) -> TaskConfig:
    return TaskConfig(env=env, network=network, algorithm=PPOConfig(unroll_steps=64, epochs=1, minibatches=2))


def test_the_examples_train_act_and_are_evaluated(examples):
    trainer = build_trainer(task(), 0, "cpu", allow_import=True)
    assert trainer.step().episodes
    result = evaluate(trainer.policy, POLE, 3, greedy=True, seed=0, allow_import=True)
    assert max(result.lengths) <= 50
    worker = RolloutWorker(task(), 0, 1, allow_import=True)
    worker.collect(ActingPolicy(1, 0.0, np.zeros(0), np.zeros(0)))
    worker.close()


def test_every_node_begins_with_the_same_weights(examples):
    one, other = (build_trainer(task(), seed, "cpu", allow_import=True) for seed in (1, 2))
    np.testing.assert_array_equal(one.flat, other.flat)
    assert one.flat.any()


def test_a_module_may_register_its_ids(examples):
    text = "\nimport gymnasium\ngymnasium.register('OwnPole-v0', Pole, max_episode_steps=7)\n"
    with (examples / "my_pole.py").open("a") as file:
        file.write(text)
    config = EnvConfig(id="my_pole:OwnPole-v0", num_envs=1, kwargs={"gravity": 0.0})
    env = make_vector_env(config, 0, allow_import=True)
    env.reset()
    ends = [env.step(np.zeros(1, np.int64))[3][0] for _ in range(7)]
    assert ends == [False] * 6 + [True]
    env.close()


def test_arguments_and_seeds_reach_the_environment(examples):
    config = EnvConfig(id="my_pole:Pole", num_envs=5, kwargs={"gravity": 0.5})
    env = make_vector_env(config, 2**32 - 1, allow_import=True)
    assert {copy.gravity for copy in env._env.envs} == {0.5}
    assert all(0 <= seed < 2**31 for seed in env._seeds)
    first = env.reset().copy()
    np.testing.assert_array_equal(first, env.reset())
    assert len(np.unique(first, axis=0)) == 5


@pytest.mark.parametrize(
    "refused",
    [task(network=NetworkConfig()), task(env=EnvConfig()), task(env=EnvConfig(id="my_pole:Pole-v0"))],
)
def test_nothing_is_imported_without_permission(refused, examples):
    for build in (lambda: build_trainer(refused, 0, "cpu"), lambda: RolloutWorker(refused, 0, 1)):
        with pytest.raises(ConfigError, match="--allow-import"):
            build()
    assert not {"my_pole", "my_network"} & set(sys.modules)


def test_what_there_is_not_is_told(examples):
    for env_id, word in [
        ("no_such_module:Pole", "PYTHONPATH"),
        ("my_pole:Rod", "Rod"),
        ("my_pole:np", "np"),
    ]:
        with pytest.raises(ConfigError, match=word):
            make_vector_env(EnvConfig(id=env_id), 0, allow_import=True)


def test_arguments_that_are_refused_are_told(examples):
    config = EnvConfig(id="my_pole:Pole", kwargs={"mass": 1})
    with pytest.raises(ConfigError, match=r"env\.kwargs.*mass"):
        make_vector_env(config, 0, allow_import=True)


def test_what_makes_no_environment_or_trunk_is_refused(examples):
    (examples / "my_network.py").write_text(
        "from torch import nn\nfrom p2pdrl.rl.networks.layers import Trunk\n"
        "def Residual(obs_shape, config):\n    return nn.Identity()\n"
        "class Undrawn(Trunk):\n    features = 2\n"
        "    def __init__(self, obs_shape, config):\n"
        "        super().__init__()\n        self.layer = nn.Linear(2, 2)\n"
        "def maker():\n    return 3\n"
    )
    with pytest.raises(ConfigError, match="isn't a Trunk"):
        build_trainer(task(), 0, "cpu", allow_import=True)
    undrawn = NetworkConfig(kind="own", own="my_network:Undrawn")
    with pytest.raises(ConfigError, match="draw"):
        build_trainer(task(network=undrawn), 0, "cpu", allow_import=True)
    with pytest.raises(ConfigError, match=r"no gymnasium\.Env"):
        make_vector_env(EnvConfig(id="my_network:maker"), 0, allow_import=True)
