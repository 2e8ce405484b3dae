"""From an unroll to what gradients are computed from: advantages, the full batch, and minibatches of it.

A policy without memory learns from valid steps: rows of the batch, in any order. A recurrent one needs whole
unrolls: the batch's first dimension is environments, its second time, and steps that don't count stay where
they are, masked.

Shape suffixes: T unroll, T1 unroll with the bootstrap step (T+1), B environments, N rows or environments, M
those of a minibatch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from p2pdrl.rl.gradients import VALID, Minibatch
from p2pdrl.rl.networks.lstm import RecurrentContext
from p2pdrl.rl.rollout import Unroll

__all__ = ["full_batch", "gae", "minibatch", "normalized", "with_normalized"]


def gae(
    rewards_TB: Tensor,
    values_T1B: Tensor,
    discounts_TB: Tensor,
    lambda_: float,
    continues_TB: Tensor | None = None,
) -> Tensor:
    """Return generalized advantage estimates (Schulman 2016, arXiv 1506.02438, equation 16).

    δ_t = r_t + γ_t v(s_{t+1}) − v(s_t) and A_t = δ_t + γ_t λ c_t A_{t+1}.

    Args:
        rewards_TB: r.
        values_T1B: v; the last row is the bootstrap.
        discounts_TB: γ, zero where the episode terminated: nothing is worth anything after that.
        lambda_: λ.
        continues_TB: c, zero where t+1 belongs to another episode. A truncated episode has c = 0 and
            γ > 0: its last state keeps its value, and nothing leaks back from the next episode.
            None means one everywhere.
    """
    deltas_TB = rewards_TB + discounts_TB * values_T1B[1:] - values_T1B[:-1]
    decays_TB = discounts_TB * lambda_
    if continues_TB is not None:
        decays_TB = decays_TB * continues_TB
    advantages_TB = torch.empty_like(deltas_TB)
    advantage_B = torch.zeros_like(values_T1B[0])
    rows = zip(deltas_TB.unbind(), decays_TB.unbind(), advantages_TB.unbind(), strict=True)
    for delta_B, decay_B, out_B in reversed(list(rows)):
        advantage_B = torch.addcmul(delta_B, decay_B, advantage_B, out=out_B)
    return advantages_TB


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
