"""Target networks: copies of a part of the model that follow it slowly.

An algorithm with targets lets them ``follow`` at the beginning of each update, and ``track`` after each step.
Their parameters travel in the sidecar by rule ``copy``: an exchange with a peer leaves them alone, a state
transfer brings them along.

Shape suffix: D parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from p2pdrl.errors import LayoutMismatchError
from p2pdrl.rl.flat import FlatModule, FlatSpan
from p2pdrl.tensors.sidecar import SidecarItem

__all__ = ["HardCopy", "SoftCopy", "TargetNetwork"]


@dataclass(frozen=True)
class HardCopy:
    """θ⁻ ← θ whenever ⌊policy version / every⌋ changes (Mnih 2015): Lamport versions skip multiples.

    Attributes:
        every: policy versions between two copies.
    """

    every: int


@dataclass(frozen=True)
class SoftCopy:
    """θ⁻ ← τ θ + (1 − τ) θ⁻ after each step (Lillicrap 2016, arXiv 1509.02971, algorithm 1).

    Attributes:
        tau: τ, share of the new parameters.
    """

    tau: float


class TargetNetwork:
    """A copy of one part of a model.

    Args:
        name: in the sidecar: ``target.`` and this.
        module: the part.
        span: its parameters in the model's flat vector.
        rule: how the copy follows.

    Attributes:
        module: the copy; nothing differentiates through its parameters.
    """

    def __init__(self, name: str, module: nn.Module, span: FlatSpan, rule: HardCopy | SoftCopy) -> None:
        self._item = SidecarItem(f"target.{name}", (span.parameters_D.numel(),), "float32", "copy")
        self._span = span
        self._rule = rule
        self._period: int | None = None
        self.module = copy.deepcopy(module).requires_grad_(False)
        self._flat = FlatModule(self.module, span.device)
        self._flat.drop_gradients()
        self._flat.parameters_D.copy_(span.parameters_D)

    def follow(self, version: int) -> None:
        """Before an update: copy the parameters, if the rule counts versions and it is time."""
        if not isinstance(self._rule, HardCopy):
            return
        period = version // self._rule.every
        if self._period not in (None, period):
            self._flat.parameters_D.copy_(self._span.parameters_D)
        self._period = period

    def track(self) -> None:
        """After a step: move towards the parameters, if that is the rule."""
        if isinstance(self._rule, SoftCopy):
            self._flat.parameters_D.lerp_(self._span.parameters_D, self._rule.tau)

    def items(self) -> tuple[SidecarItem, ...]:
        """Return how its parameters are laid out in the sidecar."""
        return (self._item,)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return its parameters by name: a view on the CPU."""
        return {self._item.name: self._flat.numpy()}

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over what ``state`` returned, here or on another node.

        Raises:
            LayoutMismatchError: it is missing or has another shape.
        """
        found = arrays.get(self._item.name)
        if found is None or found.shape != self._item.shape:
            raise LayoutMismatchError(f"{self._item.name} should be of shape {self._item.shape}")
        self._flat.set_(np.array(found, dtype=np.float32))
        self._period = None
