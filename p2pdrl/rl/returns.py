"""Advantages of an unroll.

``algorithms`` call this once per update, on the full batch, before it is split.

Shape suffixes: T unroll, T1 unroll with the bootstrap step (T+1), B environments.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gae"]


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
