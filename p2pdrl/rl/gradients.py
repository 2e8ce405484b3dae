"""From a batch to its mean gradient and the step: the seams between algorithms, models and strategies.

Algorithms compute all that needs the full batch (returns, normalised advantages), ask their engine for the
gradient of an objective over it, once per minibatch, and hand that to their stepper. Engines differ in how
they get there; the gradient is the same but for rounding:

| engine | the batch |
|---|---|
| ``WholeBatch`` | goes through the model at once |
| ``Accumulated`` | is cut into microbatches, one after the other: less memory for activations |
| ``tuned_gradients.Tuned`` | as ``Accumulated``, in the number of microbatches that proves fastest |
| a pipeline (``pipeline``) | is cut, and so is the model: several devices, each a stage of it |

With g_m the mean gradient over the n_m rows of microbatch m, the full batch's is Σ_m n_m/n · g_m. Objectives
are sums over rows, so it is enough to divide each by the n of the full batch (``Objective.over``): uneven
cuts need no weights. An objective depends on the model's outputs and on targets alone: a peer may run it
with the last of the model's stages.

Shape suffix: D parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from torch import Tensor

from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.networks.lstm import NO_CONTEXT, RecurrentContext
from p2pdrl.rl.optimizers import Optimizer

__all__ = [
    "VALID",
    "Accumulated",
    "Forward",
    "GradientEngine",
    "Minibatch",
    "Objective",
    "Outputs",
    "OwnStepper",
    "Stepper",
    "Summed",
    "WholeBatch",
    "accumulate",
    "cut",
]

Outputs = TypeVar("Outputs")
"""What a model gives for a batch: a tensor, or a tuple of tensors such as ``PolicyOutputs``."""
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

    @property
    def terms(self) -> int:
        """How many there are in the vector that it returns."""

    def __call__(self, outputs: _Outputs_contra, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of the loss over the rows, and what it is made of.

        Returns:
            A scalar to differentiate, and a vector of terms for the monitors, without gradient: sums over
            rows too.
        """

    def over(self, rows: int) -> Self:
        """Return the same objective with its sums divided by ``rows``: those of the full batch.

        Loss and terms of the batch's parts then add up to its means.
        """


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


_Outputs_co = TypeVar("_Outputs_co", covariant=True)

Forward = Callable[[Tensor, RecurrentContext], Outputs]
"""Runs the model on a batch's inputs and context; ``engines`` makes them."""


class Minibatch(NamedTuple):
    """What a gradient is computed from.

    All tensors have the same first dimension, which is where a batch is cut: rows, or environments where
    rows follow each other in time and the model is recurrent (time is never cut).
    """

    inputs: Tensor
    """What the model sees."""
    targets: Mapping[str, Tensor]
    """What the objective compares its outputs with."""
    rows: int
    """Rows that count in the full batch: what sums are divided by, in every part of it."""
    context: RecurrentContext = NO_CONTEXT
    """Of a recurrent model, beside the inputs."""


class GradientEngine(Protocol[_Outputs_co]):
    """Computes mean gradients. The model runs in here and nowhere else while an algorithm learns.

    One whose gradients stay where they were computed, on other devices or nodes, says so by ``scattered``.
    """

    def gradients(self, batch: Minibatch, objective: Objective[_Outputs_co]) -> Tensor:
        """Leave the mean gradient over ``batch.rows`` in the flat vector of gradients.

        Returns:
            The objective's terms as means over the rows, without gradient.
        """

    def metrics(self) -> dict[str, float]:
        """Return the engine's own metrics."""


class WholeBatch(Generic[Outputs]):
    """One pass over the whole batch."""

    def __init__(self, flat: FlatModule, forward: Forward[Outputs]) -> None:
        self._flat = flat
        self._forward = forward

    def gradients(self, batch: Minibatch, objective: Objective[Outputs]) -> Tensor:
        """See ``GradientEngine.gradients``."""
        self._flat.gradients_D.zero_()
        return _add_gradients(self._forward, batch, objective)

    def metrics(self) -> dict[str, float]:
        """Return none."""
        return {}


class Accumulated(Generic[Outputs]):
    """One pass per microbatch; gradients add up in the flat vector.

    Args:
        microbatches: how many; a batch with fewer rows is cut into its rows.
    """

    def __init__(self, flat: FlatModule, forward: Forward[Outputs], microbatches: int) -> None:
        self._flat = flat
        self._forward = forward
        self._microbatches = microbatches

    def gradients(self, batch: Minibatch, objective: Objective[Outputs]) -> Tensor:
        """See ``GradientEngine.gradients``."""
        return accumulate(self._flat, self._forward, batch, objective, self._microbatches)

    def metrics(self) -> dict[str, float]:
        """Return the number of microbatches."""
        return {"microbatches": float(self._microbatches)}


def accumulate(
    flat: FlatModule,
    forward: Forward[Outputs],
    batch: Minibatch,
    objective: Objective[Outputs],
    microbatches: int,
) -> Tensor:
    """Do what ``GradientEngine.gradients`` does, in some number of microbatches."""
    flat.gradients_D.zero_()
    first, *rest = cut(batch, microbatches)
    terms = _add_gradients(forward, first, objective)
    for part in rest:
        terms = terms + _add_gradients(forward, part, objective)
    return terms


def cut(batch: Minibatch, parts: int) -> list[Minibatch]:
    """Cut a batch along its first dimension; the parts' sizes differ by one at most, and none is empty.

    They are views, and keep ``rows`` of the full batch.
    """
    parts = max(min(parts, len(batch.inputs)), 1)
    inputs = batch.inputs.tensor_split(parts)
    targets = {name: target.tensor_split(parts) for name, target in batch.targets.items()}
    context = [(None,) * parts if part is None else part.tensor_split(parts) for part in batch.context]
    return [
        Minibatch(
            inputs[m],
            {name: pieces[m] for name, pieces in targets.items()},
            batch.rows,
            RecurrentContext(*(pieces[m] for pieces in context)),
        )
        for m in range(parts)
    ]


def _add_gradients(forward: Forward[Outputs], part: Minibatch, objective: Objective[Outputs]) -> Tensor:
    """Add a part's share to the gradients; return its share of the terms."""
    loss, terms = objective.over(part.rows)(forward(part.inputs, part.context), part.targets)
    loss.backward()  # type: ignore[no-untyped-call]
    return terms


class Stepper(Protocol):
    """Clips a gradient and applies it, alone or with peers: algorithms never clip."""

    @property
    def ends_update(self) -> bool:
        """Whether the update is to end with the last gradient: synchronous peers begin theirs anew.

        An algorithm that would go on to further gradients asks after each ``step``.
        """

    def step(
        self,
        optimizer: Optimizer,
        *,
        learning_rate: float,
        max_grad_norm: float,
        samples: int,
        left: int,
    ) -> float:
        """Use the mean gradient in ``optimizer.span``; parameters have moved, or haven't, on return.

        Args:
            optimizer: its span's parameters and gradients may be changed in place.
            learning_rate: after annealing.
            max_grad_norm: bound on the gradient's Euclidean norm.
            samples: rows that the gradient is the mean over: valid environment steps. n gradients of
                n batches weighted by it average to the gradient of the batches put together.
            left: gradients of the same update that come after this one, at least 0.

        Returns:
            The gradient's norm before it was clipped; infinite or NaN when the step was skipped.
        """


class OwnStepper:
    """Clips and steps at once, without peers."""

    ends_update = False

    def step(
        self,
        optimizer: Optimizer,
        *,
        learning_rate: float,
        max_grad_norm: float,
        samples: int,
        left: int,
    ) -> float:
        """See `Optimizer.clipped_step`."""
        return optimizer.clipped_step(learning_rate, max_grad_norm)
