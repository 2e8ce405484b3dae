"""What steps turned out to be worth: advantages and value targets from rewards and values, backwards in time.

Algorithms call them with an unroll's arrays, objectives with those of a batch. An unroll goes on over the
ends of episodes, and the step after an end only resets; so functions are told two things of a step. Its
discount is zero where the episode terminated: nothing is worth anything after that. It continues where the
next row belongs to the same episode. Where an episode was truncated it doesn't, but the discount stays: the
last state keeps its value, and nothing leaks back from the episode that follows. The numbers of the reset
step itself mean nothing, and no other step's depend on them.

Shape suffixes: T unroll, T1 unroll with the bootstrap step (T+1), B environments.
"""

# ruff: noqa: N815 (fields carry shape suffixes)
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["VTrace", "gae", "n_step_returns", "vtrace"]


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
    return _decaying_sums(deltas_TB, decays_TB)


def n_step_returns(
    rewards_TB: Tensor, bootstraps_TB: Tensor, discounts_TB: Tensor, continues_TB: Tensor
) -> Tensor:
    """Return forward-view returns (Mnih 2016, arXiv 1602.01783, algorithm S2): R ← r_t + γ_t R, backwards.

    Each step gets the longest return that there is: R_t = r_t + γ_t R_{t+1} where the next step goes on with
    it, else R_t = r_t + γ_t V_{t+1}. With no step that goes on they are one-step targets.

    Args:
        rewards_TB: r.
        bootstraps_TB: V_{t+1}, of the state after each step; where the return goes on it isn't looked at.
        discounts_TB: γ, zero where the episode terminated.
        continues_TB: zero where the return ends with a bootstrap; the last row counts as zero.
    """
    continues_TB = torch.cat((continues_TB[:-1], torch.zeros_like(continues_TB[-1:])))
    ends_TB = discounts_TB * (1.0 - continues_TB)
    return _decaying_sums(rewards_TB + ends_TB * bootstraps_TB, discounts_TB * continues_TB)


class VTrace(NamedTuple):
    """What V-trace gives for each step, both without gradient."""

    values_TB: Tensor
    """v_s: what the value function should say."""
    advantages_TB: Tensor
    """ρ_s (r_s + γ_s v_{s+1} − V(x_s)): what the gradient of log π is weighted by."""


@torch.no_grad()
def vtrace(
    log_ratios_TB: Tensor,
    rewards_TB: Tensor,
    values_T1B: Tensor,
    discounts_TB: Tensor,
    continues_TB: Tensor | None = None,
    *,
    rho_clip: float | None = 1.0,
    c_clip: float | None = 1.0,
    pg_rho_clip: float | None = 1.0,
    lambda_: float = 1.0,
) -> VTrace:
    """Return V-trace's targets and advantages (Espeholt 2018, arXiv 1802.01561, section 4).

    With the ratio π/μ of the target policy to the behaviour policy, the target of the value function is

        v_s = V(x_s) + Σ_{t=s}^{s+n−1} γ^{t−s} (Π_{i=s}^{t−1} c_i) δ_t V                         (1)
        δ_t V = ρ_t (r_t + γ V(x_{t+1}) − V(x_t)),  ρ_t = min(ρ̄, π/μ),  c_i = λ min(c̄, π/μ)

    which without clips in force and with λ = 1 is on-policy (π = μ) the n-step return

        v_s = Σ_{t=s}^{s+n−1} γ^{t−s} r_t + γ^n V(x_{s+n}).                                      (2)

    It is computed backwards, v_s − V(x_s) = δ_s V + γ c_s (v_{s+1} − V(x_{s+1})) (remark 1). ρ̄ decides
    what is learned: the value of a policy between μ and π,

        π_ρ̄(a|x) ∝ min(ρ̄ μ(a|x), π(a|x));                                                       (3)

    c̄ only how far differences travel. The policy gradient, of E_μ[π/μ ∇log π q_s],                (4)
    takes q_s = r_s + γ v_{s+1} and V(x_s) as its baseline, with a clip of its own.

    Args:
        log_ratios_TB: log π(a|x) − log μ(a|x) of the actions taken.
        rewards_TB: r.
        values_T1B: V; the last row is the bootstrap. The row after an end is the true final observation's.
        discounts_TB: γ, zero where the episode terminated.
        continues_TB: zero where t+1 belongs to another episode: traces are cut there, and x_{t+1} is worth
            V(x_{t+1}), not v_{t+1}. None means one everywhere.
        rho_clip: ρ̄; None doesn't clip, nor in the others.
        c_clip: c̄, at most ρ̄ in the paper.
        pg_rho_clip: the policy gradient's ρ̄.
        lambda_: λ (remark 2): below 1, targets lean on the value function, with less variance.
    """
    ratios_TB = log_ratios_TB.exp()
    values_TB, next_values_TB = values_T1B[:-1], values_T1B[1:]
    deltas_TB = rewards_TB + discounts_TB * next_values_TB - values_TB
    deltas_TB = _clipped(ratios_TB, rho_clip) * deltas_TB
    traces_TB = lambda_ * _clipped(ratios_TB, c_clip)
    if continues_TB is not None:
        traces_TB = traces_TB * continues_TB
    corrections_TB = _decaying_sums(deltas_TB, discounts_TB * traces_TB)  # v_s − V(x_s)

    next_corrections_TB = torch.cat((corrections_TB[1:], torch.zeros_like(corrections_TB[:1])))
    if continues_TB is not None:
        next_corrections_TB = next_corrections_TB * continues_TB
    advantages_TB = rewards_TB + discounts_TB * (next_values_TB + next_corrections_TB) - values_TB
    return VTrace(values_TB + corrections_TB, _clipped(ratios_TB, pg_rho_clip) * advantages_TB)


def _clipped(ratios_TB: Tensor, bound: float | None) -> Tensor:
    return ratios_TB if bound is None else ratios_TB.clamp(max=bound)


def _decaying_sums(terms_TB: Tensor, decays_TB: Tensor) -> Tensor:
    """Return S_t = x_t + d_t S_{t+1}, with nothing after the last step."""
    sums_TB = torch.empty_like(terms_TB)
    sum_B = torch.zeros_like(terms_TB[0])
    rows = zip(terms_TB.unbind(), decays_TB.unbind(), sums_TB.unbind(), strict=True)
    for term_B, decay_B, out_B in reversed(list(rows)):
        sum_B = torch.addcmul(term_B, decay_B, sum_B, out=out_B)
    return sums_TB
