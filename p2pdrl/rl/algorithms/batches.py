"""From an unroll to what gradients are computed from: the full batch, and minibatches of it.

A policy without memory learns from valid steps: rows of the batch, in any order. A recurrent one needs whole
unrolls: the batch's first dimension is environments, its second time, and steps that don't count stay where
they are, masked. So does an objective that looks along time itself, as V-trace does, whatever the policy:
its batches have the bootstrap observation too.

Shape suffixes: T unroll, T1 unroll with the bootstrap step (T+1), B environments, N rows or environments, M
those of a minibatch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from p2pdrl.rl.gradients import VALID, Minibatch
from p2pdrl.rl.networks.lstm import NO_CONTEXT, RecurrentContext
from p2pdrl.rl.rollout import Unroll

__all__ = ["full_batch", "minibatch", "normalized", "whole_unrolls", "with_normalized"]


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


def whole_unrolls(unroll: Unroll, targets_TB: Mapping[str, Tensor]) -> Minibatch:
    """Return the batch of an unroll as environments: B x T+1 observations, targets of B x T….

    The model's outputs have a row more than the targets: that of the bootstrap observation. The mask is
    always among the targets; ``rows`` are valid steps, as in ``full_batch``.

    Args:
        unroll: of a policy with or without memory.
        targets_TB: by name, TB or TB…; zero where a step doesn't count.
    """
    targets = {name: _masked(target_TB, unroll.valid_TB) for name, target_TB in targets_TB.items()}
    targets[VALID] = unroll.valid_TB.T
    context = NO_CONTEXT
    if unroll.state_BS is not None:
        context = RecurrentContext(unroll.starts_T1B.T, unroll.state_BS)
    return Minibatch(unroll.obs_T1BX.transpose(0, 1), targets, unroll.env_steps, context)


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


def with_normalized(part: Minibatch, name: str) -> Minibatch:
    """Return a minibatch one of whose targets is ``normalized``; that of a single row stays as it is."""
    target = part.targets[name]
    valid = part.targets.get(VALID, torch.ones_like(target, dtype=torch.bool))
    if part.rows < 2:
        return part
    return part._replace(targets={**part.targets, name: normalized(target, valid)})


def _masked(target_TB: Tensor, valid_TB: Tensor) -> Tensor:
    """Return a target environments first, zero where it doesn't count: masked rows must be finite."""
    mask_TB = valid_TB.view(*valid_TB.shape, *(1 for _ in target_TB.shape[2:]))
    return target_TB.where(mask_TB, 0).transpose(0, 1)
