"""What a loss is to whoever computes gradients: sums over rows, so that parts of a batch add up exactly.

``algorithms`` make one and hand it to their gradient engine (``gradients``) with each batch. An engine may
run the model on the whole batch, on one microbatch after the other, or have a peer run the last of the model
and the objective with it: an objective depends on the model's outputs and on targets alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from torch import Tensor

__all__ = ["VALID", "Objective", "Outputs", "Summed"]

Outputs = TypeVar("Outputs")
"""What a model gives for a batch: a tensor, or a tuple of tensors such as ``outputs.PolicyOutputs``."""
_Outputs_contra = TypeVar("_Outputs_contra", contravariant=True)

VALID = "valid"
"""Name of the target that masks rows (bool): where it is given, rows that are false have no part."""


class Objective(Protocol[_Outputs_contra]):
    """A loss that is a sum over rows.

    Targets are fixed numbers by name, rows first like the outputs. What needs more than its own row
    (returns, normalised advantages, the outputs of a second network) is computed on the full batch before
    it becomes a target.
    """

    @property
    def target_names(self) -> tuple[str, ...]:
        """The targets that every row must have; a mask may be among them beside these."""
        ...

    @property
    def terms(self) -> int:
        """How many there are in the vector that it returns."""
        ...

    def __call__(self, outputs: _Outputs_contra, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of the loss over the rows, and what it is made of.

        Returns:
            A scalar to differentiate, and a vector of terms for the monitors, without gradient: sums over
            rows too.
        """
        ...

    def over(self, rows: int) -> Self:
        """Return the same objective with its sums divided by ``rows``: those of the full batch.

        Loss and terms of the batch's parts then add up to its means.
        """
        ...


@dataclass(frozen=True)
class Summed:
    """Base of objectives: how rows are summed.

    Attributes:
        rows: what sums are divided by, before anything else is done with them: so the gradient of a whole
            batch is, to the last bit, that of a loss written with means.
    """

    rows: int = dataclasses.field(default=1, kw_only=True)

    def over(self, rows: int) -> Self:
        """See ``Objective.over``."""
        return dataclasses.replace(self, rows=rows)

    def total(self, values: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Return the sum of ``values`` over the rows that count, divided by ``rows``.

        Rows that don't count add nothing and get no gradient, provided that their own values are finite.
        """
        valid = targets.get(VALID)
        return (values if valid is None else values.where(valid, 0.0)).sum() / self.rows
