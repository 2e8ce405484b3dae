"""The objective of advantage actor-critic (Mnih 2016, arXiv 1602.01783, section 4).

``algorithms.a2c`` makes it and fills its targets.

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

__all__ = ["A2CObjective"]


@dataclass(frozen=True)
class A2CObjective(Summed):
    """Policy gradient with a baseline, value error and entropy bonus.

    Targets: ``actions``, ``advantages``, ``returns``.

    Attributes:
        target_names: their names.
        terms: how many it returns.
        value_coef: weight of the value loss.
        entropy_coef: weight of the entropy bonus.
    """

    target_names: ClassVar[tuple[str, ...]] = ("actions", "advantages", "returns")
    terms: ClassVar[int] = 3

    value_coef: float
    entropy_coef: float

    def __call__(self, outputs: PolicyOutputs, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return loss and terms: policy loss, value loss, entropy; all summed."""
        policy = outputs.distribution()
        policy_loss = -self.total(targets["advantages"] * policy.log_prob(targets["actions"]), targets)
        value_loss = 0.5 * self.total((outputs.values - targets["returns"]).square(), targets)
        entropy = self.total(policy.entropy(), targets)
        loss = policy_loss + self.value_coef * value_loss - self.entropy_coef * entropy
        return loss, torch.stack((policy_loss, value_loss, entropy)).detach()
