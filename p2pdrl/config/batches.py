"""What an update computes gradients of: how many batches, and how long they are.

Checks of the configuration ask, the planning of pipelines, and the node's strategies.
"""

from __future__ import annotations

import math

from p2pdrl.config.task import AlgorithmConfig, PPOConfig, RegressionConfig, TaskConfig

__all__ = ["batches_of", "losses_of", "minibatch_rows", "minibatches_of"]


def batches_of(algorithm: AlgorithmConfig) -> int:
    """Return how many minibatches an unroll is cut into."""
    return algorithm.minibatches if isinstance(algorithm, PPOConfig) else 1


def losses_of(algorithm: object) -> int:
    """Return how many losses an algorithm has: ``losses`` of its configuration's type, or else 1."""
    losses: int = getattr(type(algorithm), "losses", 1)
    return losses


def minibatches_of(algorithm: AlgorithmConfig) -> int:
    """Return how many gradients an update has, all passes together."""
    return algorithm.epochs * batches_of(algorithm) if isinstance(algorithm, PPOConfig) else 1


def minibatch_rows(task: TaskConfig) -> tuple[int, str]:
    """Return what each gradient's batch is made of: how many, and what they are."""
    algorithm = task.algorithm
    if isinstance(algorithm, RegressionConfig):
        return algorithm.batch_size, "rows"
    remembers = task.network.core != "none"
    rows = task.env.num_envs * (1 if remembers else algorithm.unroll_steps)
    return math.ceil(rows / batches_of(algorithm)), "environments" if remembers else "steps"
