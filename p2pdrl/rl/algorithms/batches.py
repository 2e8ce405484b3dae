"""From an unroll to what gradients are computed from: the full batch, and minibatches of it.

What a policy without memory learns from is a heap of valid steps: rows of the batch, in any order. One that
remembers needs whole unrolls: the batch's first dimension is environments, its second time, and steps
that don't count stay where they are, masked.

Shape suffixes: T unroll, B environments, N rows or environments, M those of a minibatch.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from p2pdrl.rl.gradients import Minibatch
from p2pdrl.rl.networks.lstm import RecurrentContext
from p2pdrl.rl.objectives.objective import VALID
from p2pdrl.rl.rollout import Unroll

__all__ = ["full_batch", "minibatch", "normalized"]


def full_batch(unroll: Unroll, targets_TB: Mapping[str, Tensor]) -> Minibatch:
    """Return the batch of a whole unroll.

    Args:
        unroll: of a policy with or without memory.
        targets_TB: by name, TB or TB….
    """
    valid_TB = unroll.valid_TB
    if unroll.state_BS is None:
        inputs = unroll.obs_T1BX[:-1][valid_TB]
        targets = {name: target_TB[valid_TB] for name, target_TB in targets_TB.items()}
        return Minibatch(inputs, targets, len(inputs))
    targets = {name: _masked(target_TB, valid_TB) for name, target_TB in targets_TB.items()}
    targets[VALID] = valid_TB.T
    return Minibatch(unroll.obs_T1BX[:-1].transpose(0, 1), targets, unroll.env_steps, unroll.context)


def minibatch(batch: Minibatch, indices_M: Tensor) -> Minibatch:
    """Return some rows of a batch, or some environments of it."""
    targets = {name: target_N[indices_M] for name, target_N in batch.targets.items()}
    valid = targets.get(VALID)
    return Minibatch(
        batch.inputs[indices_M],
        targets,
        len(indices_M) if valid is None else int(valid.sum()),
        RecurrentContext(*(None if part_N is None else part_N[indices_M] for part_N in batch.context)),
    )


def normalized(advantages_TB: Tensor, valid_TB: Tensor) -> Tensor:
    """Return advantages of mean 0 and deviation 1 over the steps that count."""
    advantages_N = advantages_TB[valid_TB]
    return (advantages_TB - advantages_N.mean()) / (advantages_N.std(correction=0) + 1e-8)


def _masked(target_TB: Tensor, valid_TB: Tensor) -> Tensor:
    """Return a target environments first, zero where it doesn't count: masked rows must be finite."""
    mask_TB = valid_TB.view(*valid_TB.shape, *(1 for _ in target_TB.shape[2:]))
    return target_TB.where(mask_TB, 0).transpose(0, 1)
