"""How many blocks a task's model is cut into at most, from its configuration alone.

``rl.sequential`` and ``rl.algorithms.regression`` make the blocks; this counts them without torch, so that a
pipeline of more stages than blocks is refused before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec.structs import replace

from p2pdrl.config.task import NetworkConfig, RegressionConfig, TaskConfig

__all__ = ["as_built", "block_count"]

IMPALA_RESIDUALS = 2
"""Residual blocks of each section of the ResNet (Espeholt 2018)."""
NATURE_CONVOLUTIONS = 3
CONVOLUTIONS = "trunk.convolutions."
"""Parameters that the Nature CNN has, and no network of vectors."""


def block_count(task: TaskConfig) -> tuple[int, int]:
    """Return the least and the greatest number of blocks that the model may have.

    They differ where ``network.kind = auto`` leaves it to the observations, which only the environment knows.
    """
    algorithm, network = task.algorithm, task.network
    if isinstance(algorithm, RegressionConfig):
        count = len(algorithm.hidden) + 1 if algorithm.kind == "classifier" else 1
        return count, count
    kinds = ("mlp", "nature_cnn") if network.kind == "auto" else (network.kind,)
    counts = [_trunk(kind, network) + (network.core != "none") + 1 for kind in kinds]
    return min(counts), max(counts)


def as_built(task: TaskConfig, parameter_names: Iterable[str]) -> TaskConfig:
    """Return the task with the network's kind that ``auto`` has become, by the names of its parameters."""
    network = task.network
    if network.kind != "auto" or isinstance(task.algorithm, RegressionConfig):
        return task
    pictures = any(name.startswith(CONVOLUTIONS) for name in parameter_names)
    kind: Literal["nature_cnn", "mlp"] = "nature_cnn" if pictures else "mlp"
    return replace(task, network=replace(network, kind=kind))


def _trunk(kind: str, network: NetworkConfig) -> int:
    """Blocks before the memory and the heads."""
    given = network.hidden != NetworkConfig().hidden
    behind = len(network.hidden) if given else 1  # the papers have one dense layer behind the convolutions
    match kind:
        case "nature_cnn":
            return NATURE_CONVOLUTIONS + behind
        case "impala_resnet":
            return len(network.channels) * (1 + IMPALA_RESIDUALS) + behind
        case "transformer":
            return 1 + 2 * network.layers + 1
    return max(len(network.hidden), 1)
