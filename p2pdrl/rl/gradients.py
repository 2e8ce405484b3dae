"""From a batch to its mean gradient: one seam between the algorithms and whoever runs the model.

``algorithms`` compute all that needs the full batch (returns, normalised advantages), then ask their engine
for the gradient of an objective over it, once per minibatch, and hand that to their stepper. Engines differ
in how they get there; the gradient is the same but for rounding:

| engine | the batch |
|---|---|
| ``WholeBatch`` | goes through the model at once |
| ``Accumulated`` | is cut into microbatches, one after the other: less memory for activations |
| ``tuned_gradients.Tuned`` | as ``Accumulated``, in the number of microbatches that proves fastest |
| ``pipeline.rank.Pipelined`` | is cut, and so is the model: several devices, each a stage of it |

With g_m the mean gradient over the n_m rows of microbatch m, the full batch's is Σ_m n_m/n · g_m. Objectives
are sums over rows, so it is enough to divide each by the n of the full batch (``Objective.over``): uneven
cuts need no weights.

Shape suffix: D parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.networks.lstm import NO_CONTEXT, RecurrentContext
from p2pdrl.rl.objectives.objective import Objective, Outputs

__all__ = ["Accumulated", "Forward", "GradientEngine", "Minibatch", "WholeBatch", "accumulate", "cut"]

_Outputs_co = TypeVar("_Outputs_co", covariant=True)

Forward = Callable[[Tensor, RecurrentContext], Outputs]
"""Runs the model on a batch's inputs and context; see ``forward``."""


class Minibatch(NamedTuple):
    """What a gradient is computed from.

    All tensors have the same first dimension, which is where a batch is cut: rows, or environments where
    rows follow each other in time and a model remembers (time is never cut).
    """

    inputs: Tensor
    """What the model sees."""
    targets: Mapping[str, Tensor]
    """What the objective compares its outputs with."""
    rows: int
    """Rows that count in the full batch: what sums are divided by, in every part of it."""
    context: RecurrentContext = NO_CONTEXT
    """What a model that remembers is told beside the inputs."""


class GradientEngine(Protocol[_Outputs_co]):
    """Computes mean gradients. The model runs in here and nowhere else while an algorithm learns."""

    def gradients(self, batch: Minibatch, objective: Objective[_Outputs_co]) -> Tensor:
        """Leave the mean gradient over ``batch.rows`` in the flat vector of gradients.

        Returns:
            The objective's terms as means over the rows, without gradient.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Return what the monitors plot about the engine itself."""
        ...


class WholeBatch(Generic[Outputs]):
    """One pass over the whole batch.

    Args:
        flat: gets the gradients.
        forward: runs the model.
    """

    def __init__(self, flat: FlatModule, forward: Forward[Outputs]) -> None:
        self._flat = flat
        self._forward = forward

    def gradients(self, batch: Minibatch, objective: Objective[Outputs]) -> Tensor:
        """See ``GradientEngine.gradients``."""
        self._flat.gradients_D.zero_()
        return _add_gradients(self._forward, batch, objective)

    def metrics(self) -> dict[str, float]:
        """Return nothing: there is nothing to tell."""
        return {}


class Accumulated(Generic[Outputs]):
    """One pass per microbatch; gradients add up in the flat vector.

    Args:
        flat: gets the gradients.
        forward: runs the model.
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
