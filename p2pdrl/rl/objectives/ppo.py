"""The clipped surrogate objective of proximal policy optimization (Schulman 2017, arXiv 1707.06347).

``algorithms.ppo`` makes it and fills its targets.

Shape suffix: N rows (or B environments and T steps).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from p2pdrl.rl.objectives.objective import Summed
from p2pdrl.rl.outputs import PolicyOutputs

__all__ = ["PPOObjective"]


@dataclass(frozen=True)
class PPOObjective(Summed):
    """Equation 9: policy, value and entropy together.

    Targets: ``actions``, ``log_probs`` and ``values`` of the policy that acted, ``advantages``
    (normalised already), ``returns``.

    Attributes:
        target_names: their names.
        terms: how many it returns.
        clip: ε: how far the probability ratio may move before its gradient is cut.
        value_clip: bound on the value's move; None leaves it free.
        value_coef: weight of the value loss.
        entropy_coef: weight of the entropy bonus.
    """

    target_names: ClassVar[tuple[str, ...]] = ("actions", "log_probs", "values", "advantages", "returns")
    terms: ClassVar[int] = 5

    clip: float
    value_clip: float | None
    value_coef: float
    entropy_coef: float

    def __call__(self, outputs: PolicyOutputs, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return loss and terms: policy loss, value loss, entropy, KL, clip fraction; all summed."""
        policy = outputs.distribution()
        advantages_N = targets["advantages"]

        # equation 7: L = E[min(ρ A, clip(ρ, 1 − ε, 1 + ε) A)]
        log_ratio_N = policy.log_prob(targets["actions"]) - targets["log_probs"]
        ratio_N = log_ratio_N.exp()
        clipped_N = ratio_N.clamp(1.0 - self.clip, 1.0 + self.clip)
        policy_loss = -self.total(torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N), targets)
        value_loss = 0.5 * self.total(self._errors(outputs.values, targets), targets)
        entropy = self.total(policy.entropy(), targets)

        loss = policy_loss + self.value_coef * value_loss - self.entropy_coef * entropy
        with torch.no_grad():
            # KL(old | new) without its bias and with less variance: E[(ρ − 1) − log ρ] (Schulman 2020)
            kl = self.total(ratio_N - 1.0 - log_ratio_N, targets)
            clipped = self.total((ratio_N != clipped_N).to(kl.dtype), targets)
            return loss, torch.stack((policy_loss, value_loss, entropy, kl, clipped))

    def _errors(self, values_N: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Return squared errors of the values, the larger ones of free and clipped."""
        returns_N, old_N = targets["returns"], targets["values"]
        errors_N = (values_N - returns_N).square()
        if self.value_clip is None:
            return errors_N
        near_N = old_N + (values_N - old_N).clamp(-self.value_clip, self.value_clip)
        return torch.maximum(errors_N, (near_N - returns_N).square())
