"""What environment ids ask of a machine: which package brings them, and which of them are no more.

Read without gymnasium, so that a daemon can refuse a task before a learner runs. Nothing is imported: whether
a package is there is asked by its top-level name.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from p2pdrl.config.fields import Problem
from p2pdrl.config.root import Config
from p2pdrl.config.task import RegressionConfig, TaskConfig
from p2pdrl.errors import ConfigError

__all__ = [
    "EnvFamily",
    "environment_problems",
    "family_of",
    "import_problems",
    "imports_of",
    "install_hint",
    "is_atari",
    "require_environment",
    "require_runnable",
    "successor_of",
]


@dataclass(frozen=True)
class EnvFamily:
    """Environments that one package brings.

    Attributes:
        extra: of p2pdrl, which installs the package.
        packages: top-level modules that must be there.
        pattern: of the ids.
    """

    extra: str
    packages: tuple[str, ...]
    pattern: re.Pattern[str]


BOX2D = {"LunarLander": 3, "LunarLanderContinuous": 3, "BipedalWalker": 3, "BipedalWalkerHardcore": 3}
"""Names, and the only version that gymnasium still has."""
BOX2D_DRAWN = {"CarRacing": 3}
"""What observes its own pictures."""
MUJOCO = dict.fromkeys(
    (
        "Ant",
        "HalfCheetah",
        "Hopper",
        "Humanoid",
        "HumanoidStandup",
        "InvertedDoublePendulum",
        "InvertedPendulum",
        "Pusher",
        "Reacher",
        "Swimmer",
        "Walker2d",
    ),
    5,
)
"""Names, and their newest version; the one before it is there too, older ones need packages of their own."""
OTHERS = {"Pendulum": 1, "Acrobot": 1, "CartPole": 1, "FrozenLake": 1, "Taxi": 4, "Blackjack": 1}
NEWEST = BOX2D | BOX2D_DRAWN | MUJOCO | OTHERS
STILL_THERE = {(name, 4) for name in MUJOCO} | {("CartPole", 0)}
_VERSION = re.compile(r"(\w+)-v(\d+)")


def _versions(names: dict[str, int]) -> re.Pattern[str]:
    return re.compile(f"({'|'.join(names)})-v\\d+")


FAMILIES = (
    EnvFamily("atari", ("ale_py",), re.compile(r"ALE/.*|\w+NoFrameskip-v[04]")),
    EnvFamily("minatar", ("minatar",), re.compile(r"MinAtar/.*")),
    EnvFamily("minigrid", ("minigrid",), re.compile(r"(MiniGrid|BabyAI)-.*")),
    EnvFamily("box2d", ("Box2D",), _versions(BOX2D)),
    EnvFamily("box2d", ("Box2D", "pygame"), _versions(BOX2D_DRAWN)),
    EnvFamily("mujoco", ("mujoco",), _versions(MUJOCO)),
)


def family_of(env_id: str) -> EnvFamily | None:
    """Return what brings an environment; None for gymnasium itself and whatever isn't known here."""
    return next((family for family in FAMILIES if family.pattern.fullmatch(env_id)), None)


def is_atari(env_id: str) -> bool:
    """Whether it is a game that the options of ``task.env.atari`` are for."""
    family = family_of(env_id)
    return family is not None and family.extra == "atari"


def install_hint(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install 'p2pdrl[{extra}]'"


def successor_of(env_id: str) -> str | None:
    """Return the id to take instead of one whose version is no more; None if nothing is known against it."""
    match = _VERSION.fullmatch(env_id)
    if match is None or match[1] not in NEWEST:
        return None
    name, version = match[1], int(match[2])
    newest = NEWEST[name]
    return None if version == newest or (name, version) in STILL_THERE else f"{name}-v{newest}"


def imports_of(task: TaskConfig) -> dict[str, str]:
    """Return what a task imports as ``module:name``, by the key that says so."""
    if isinstance(task.algorithm, RegressionConfig):
        return {}
    named = {"task.env.id": task.env.id, "task.network.own": task.network.own}
    return {key: name for key, name in named.items() if ":" in name}


def import_problems(task: TaskConfig, config: Config) -> Iterator[Problem]:
    """What ``task`` imports and the owner of this node hasn't allowed.

    Args:
        task: this node's own, or one that a peer brings.
        config: of this node.
    """
    allowed = set(config.node.imports)
    if config.node.allow_import:
        allowed.update(imports_of(config.task).values())
    for key, name in imports_of(task).items():
        if name not in allowed:
            alone = " (--allow-import is for what its own options name)" if config.node.allow_import else ""
            yield Problem(
                key,
                f"{name} imports a Python module, which runs its code; if you trust it start the node with "
                f"--set 'node.imports=[\"{name}\"]'{alone}",
            )


def require_runnable(task: TaskConfig, config: Config) -> None:
    """Check that a task can run on this machine, and may.

    Raises:
        ConfigError: it can't, or imports what isn't allowed; the message says what to do.
    """
    for problem in itertools.chain(environment_problems(task), import_problems(task, config)):
        raise ConfigError(f"{problem.key}: {problem.message}")


def require_environment(task: TaskConfig) -> None:
    """Check that a task's environment can run on this machine.

    Raises:
        ConfigError: it can't; the message says what to install, or what to take instead.
    """
    for problem in environment_problems(task):
        raise ConfigError(f"{problem.key}: {problem.message}")


def environment_problems(task: TaskConfig) -> Iterator[Problem]:
    """What keeps a task's environment from running on this machine."""
    if isinstance(task.algorithm, RegressionConfig):
        return
    env_id = task.env.id
    successor = successor_of(env_id)
    if successor is not None:
        yield Problem(
            "task.env.id",
            f"there is no {env_id} in this release of gymnasium; take {successor} (returns of different "
            "versions aren't comparable)",
        )
        return
    family = family_of(env_id)
    if family is None:
        return
    missing = [name for name in family.packages if importlib.util.find_spec(name) is None]
    if missing:
        yield Problem(
            "task.env.id",
            f"{env_id} needs {' and '.join(missing)}, which isn't installed here; "
            f"run: {install_hint(family.extra)}",
        )
