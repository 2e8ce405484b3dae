"""What an algorithm is: a list of losses, target copies, and one update that reads from top to bottom.

``trainer`` holds one and hands it a batch at a time. Each loss has an objective, an optimizer, and a span of
the flat vector that it steps; PPO, A2C and the regression are the case of one loss over the whole vector.

Shape suffix: D parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple

from torch import Tensor

from p2pdrl.rl.algorithms.targets import TargetNetwork
from p2pdrl.rl.flat import FlatSpan
from p2pdrl.rl.gradients import GradientEngine, Minibatch
from p2pdrl.rl.objectives.objective import Objective, Outputs
from p2pdrl.rl.optimizers import Optimizer
from p2pdrl.rl.sources.source import BatchT
from p2pdrl.rl.stepping import OwnStepper, Stepper

__all__ = ["Algorithm", "Loss", "Stepped"]


class Stepped(NamedTuple):
    """What came of one gradient.

    Args:
        terms: of the objective, as means over the rows.
        norm: of the gradient before it was clipped; infinite or NaN when the step was skipped.
    """

    terms: Tensor
    norm: float


class Loss(Generic[Outputs]):
    """One loss: what is minimised, over which parameters, by which optimizer, how often.

    Args:
        objective: what is minimised.
        optimizer: over the span's tensors.
        span: of the flat vector: gradients elsewhere are computed where the model asks for it, and not used.
        engine: computes gradients of the whole vector.
        max_grad_norm: bound on the norm of the span's gradient.
        name: of the loss, where there are several: its optimizer's state is ``optimizer.NAME.…`` in the
            sidecar. Empty for the only one, whose state is ``optimizer.…``.
        every: how many calls of ``due`` make one step of it.

    Attributes:
        objective: as given.
        optimizer: as given; its state travels in the sidecar.
        span: as given.
        engine: as given; may be replaced between updates.
        stepper: gets each gradient; may be replaced between updates.
        name: as given.
    """

    def __init__(
        self,
        objective: Objective[Outputs],
        optimizer: Optimizer,
        span: FlatSpan,
        engine: GradientEngine[Outputs],
        *,
        max_grad_norm: float,
        name: str = "",
        every: int = 1,
    ) -> None:
        self.objective = objective
        self.optimizer = optimizer
        self.span = span
        self.engine = engine
        self.stepper: Stepper = OwnStepper()
        self.name = name
        self._max_grad_norm = max_grad_norm
        self._every = every
        self._asked = 0
        if name:
            optimizer.name = f"optimizer.{name}"

    def due(self) -> bool:
        """Count one opportunity to step; tell whether this one is to be used."""
        self._asked += 1
        return self._asked % self._every == 0

    def step(self, batch: Minibatch, learning_rate: float, *, left: int = 0) -> Stepped:
        """Compute the mean gradient over a minibatch and step with it; arguments as in its two halves."""
        terms = self.gradients(batch)
        return Stepped(terms, self.apply(learning_rate, samples=batch.rows, left=left))

    def gradients(self, batch: Minibatch) -> Tensor:
        """Compute the mean gradient over a minibatch; return the objective's terms, as means over its rows.

        Args:
            batch: with the objective's targets.
        """
        return self.engine.gradients(batch, self.objective)

    def apply(self, learning_rate: float, *, samples: int, left: int = 0) -> float:
        """Hand the gradient to the stepper; return its norm, infinite or NaN when the step was skipped.

        Args:
            learning_rate: after annealing.
            samples: rows that the gradient is the mean over.
            left: gradients of the same update that come after this one; see ``Stepper.step``.
        """
        return self.stepper.step(
            self.span,
            self.optimizer,
            learning_rate=learning_rate,
            max_grad_norm=self._max_grad_norm,
            samples=samples,
            left=left,
        )


class Algorithm(ABC, Generic[BatchT]):
    """Improves the parameters on one batch after the other.

    Attributes:
        losses: in the order in which their optimizers' state lies in the sidecar; names differ.
        targets: target networks, whose parameters travel in the sidecar.
        progress: 0 … 1, how far the swarm is towards its last environment step; set before updates.
        env_steps: that the whole swarm has made, as far as known; set before updates.
        policy_version: of the parameters as an update begins; set before each.
    """

    losses: Sequence[Loss[Any]]
    targets: Sequence[TargetNetwork] = ()
    progress: float = 0.0
    env_steps: int = 0
    policy_version: int = 0

    @abstractmethod
    def update(self, batch: BatchT) -> dict[str, float]:
        """Improve the parameters in place, and return what the monitors plot."""

    @property
    def exploration(self) -> float:
        """How far whoever acts is to stray from the policy: ε; 0 where the policy is random itself."""
        return 0.0
