"""What a policy's network says about some observations: enough to judge any action there.

``policy`` fills it, or whoever runs its last block; ``objectives`` turn it into losses. The distribution is
built from it where it is needed, so that nothing but tensors passes between them.

Shape suffixes: … leading dimensions (N rows, or B environments and T steps), A actions or their dimensions.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from p2pdrl.rl.distributions import Categorical, DiagonalGaussian, Distribution

__all__ = ["PolicyOutputs", "distribution"]


class PolicyOutputs(NamedTuple):
    """The heads' outputs, each row of them for one observation."""

    policy: Tensor
    """…A: logits of discrete actions, or means of continuous ones."""
    values: Tensor
    """…: v(s)."""
    log_std: Tensor | None = None
    """A: a parameter, the same for every row; None where actions are discrete."""

    def distribution(self) -> Distribution:
        """Return π(·|s) of each row."""
        return distribution(self.policy, self.log_std)


def distribution(policy: Tensor, log_std: Tensor | None) -> Distribution:
    """Return what a policy head's outputs stand for; see ``PolicyOutputs``."""
    return Categorical(policy) if log_std is None else DiagonalGaussian(policy, log_std)
