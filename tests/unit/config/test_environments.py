"""What environment ids ask of a machine."""

from __future__ import annotations

import importlib.util
from importlib.metadata import metadata

import msgspec
import pytest

from p2pdrl.config import environments
from p2pdrl.config.checks import task_problems
from p2pdrl.config.environments import (
    FAMILIES,
    environment_problems,
    family_of,
    import_problems,
    imports_of,
    is_atari,
    require_environment,
    require_runnable,
    successor_of,
)
from p2pdrl.config.node import NodeConfig
from p2pdrl.config.root import Config
from p2pdrl.config.task import EnvConfig, NetworkConfig, RegressionConfig, TaskConfig
from p2pdrl.errors import ConfigError

EXTRAS = {
    "ALE/Pong-v5": "atari",
    "BreakoutNoFrameskip-v4": "atari",
    "MinAtar/Breakout-v1": "minatar",
    "MiniGrid-Empty-8x8-v0": "minigrid",
    "BabyAI-GoToObj-v0": "minigrid",
    "LunarLander-v3": "box2d",
    "CarRacing-v3": "box2d",
    "HalfCheetah-v5": "mujoco",
    "Ant-v4": "mujoco",
}


def missing(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        environments.importlib.util, "find_spec", lambda name: None if name in names else find(name)
    )


@pytest.mark.parametrize(("env_id", "extra"), EXTRAS.items())
def test_a_missing_package_is_told_with_the_command_that_installs_it(
    env_id: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = family_of(env_id)
    assert family is not None
    missing(monkeypatch, family.packages)
    [problem] = environment_problems(TaskConfig(env=EnvConfig(id=env_id)))
    assert problem.key == "task.env.id"
    assert problem.message.endswith(f"run: pip install 'p2pdrl[{extra}]'")
    with pytest.raises(ConfigError, match=rf"task\.env\.id: .*p2pdrl\[{extra}\]"):
        require_environment(TaskConfig(env=EnvConfig(id=env_id)))


def test_extras_that_are_named_are_there() -> None:
    declared = set(metadata("p2pdrl").get_all("Provides-Extra") or [])
    if not {"minatar", "minigrid"} <= declared:
        pytest.skip("the package that is installed is of an older pyproject.toml")
    assert {family.extra for family in FAMILIES} | {"environments"} <= declared


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "my_module:Own-v0"])
def test_others_ask_for_nothing(env_id: str) -> None:
    assert list(environment_problems(TaskConfig(env=EnvConfig(id=env_id)))) == []


@pytest.mark.parametrize(
    ("env_id", "successor"),
    [
        ("LunarLander-v2", "LunarLander-v3"),
        ("HalfCheetah-v3", "HalfCheetah-v5"),
        ("Walker2d-v2", "Walker2d-v5"),
        ("CarRacing-v2", "CarRacing-v3"),
        ("Pendulum-v0", "Pendulum-v1"),
        ("LunarLander-v3", None),
        ("HalfCheetah-v4", None),
        ("CartPole-v0", None),
        ("Unknown-v0", None),
    ],
)
def test_versions_that_are_no_more_name_what_to_take(env_id: str, successor: str | None) -> None:
    assert successor_of(env_id) == successor
    if successor is not None:
        with pytest.raises(ConfigError, match=f"take {successor}"):
            require_environment(TaskConfig(env=EnvConfig(id=env_id)))


def test_a_regression_has_no_environment() -> None:
    task = TaskConfig(env=EnvConfig(id="LunarLander-v2"), algorithm=RegressionConfig())
    assert list(environment_problems(task)) == []


def test_games_of_atari_are_known_by_their_names() -> None:
    assert is_atari("ALE/MsPacman-v5")
    assert is_atari("PongNoFrameskip-v4")
    assert not is_atari("MinAtar/Breakout-v1")
    assert not is_atari("CartPole-v1")


def test_nothing_is_imported_to_find_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    before = set(sys.modules)
    for env_id in EXTRAS:
        list(environment_problems(TaskConfig(env=EnvConfig(id=env_id))))
    assert not {"ale_py", "minatar", "minigrid", "Box2D", "mujoco", "gymnasium"} & (set(sys.modules) - before)


def test_gymnasium_has_what_is_taken_for_there() -> None:
    gym = pytest.importorskip("gymnasium")
    for name, version in environments.NEWEST.items():
        assert f"{name}-v{version}" in gym.registry
        others = [key for key in gym.registry if key.startswith(f"{name}-v")]
        assert max(int(key.rpartition("-v")[2]) for key in others) == version


POLE = TaskConfig(env=EnvConfig(id="my_pole:Pole"))
WIDE = TaskConfig(env=EnvConfig(), network=NetworkConfig(kind="own", own="my_network:Wide"))


def node(**options: object) -> NodeConfig:
    return msgspec.convert(options, NodeConfig)


@pytest.mark.parametrize(
    ("task", "config", "allowed"),
    [
        (POLE, Config(), False),
        (POLE, Config(task=POLE), False),
        (POLE, Config(task=POLE, node=node(allow_import=True)), True),
        (POLE, Config(node=node(allow_import=True)), False),  # a peer's task, and nothing of ours
        (POLE, Config(task=WIDE, node=node(allow_import=True)), False),
        (POLE, Config(node=node(imports=["my_pole:Pole"])), True),
        (POLE, Config(node=node(imports=["my_pole"])), False),
        (POLE, Config(node=node(imports=["my_pole:Other"])), False),
        (WIDE, Config(node=node(imports=["my_pole:Pole"])), False),
        (WIDE, Config(node=node(imports=["my_network:Wide"])), True),
        (WIDE, Config(task=WIDE, node=node(allow_import=True)), True),
        (TaskConfig(), Config(), True),
    ],
)
def test_a_task_imports_what_the_nodes_owner_has_allowed_by_name(
    task: TaskConfig, config: Config, allowed: bool
) -> None:
    problems = list(import_problems(task, config))
    assert (not problems) == allowed
    if not allowed:
        [name] = imports_of(task).values()
        assert name in problems[0].message
        with pytest.raises(ConfigError, match=name):
            require_runnable(task, config)


def test_an_own_network_is_named_and_chosen() -> None:
    for network in (NetworkConfig(kind="own"), NetworkConfig(own="a:b")):
        keys = [problem.key for problem in task_problems(TaskConfig(network=network))]
        assert keys == ["task.network.own"]
    assert not list(task_problems(WIDE))
    assert not list(import_problems(TaskConfig(network=WIDE.network, algorithm=RegressionConfig()), Config()))
