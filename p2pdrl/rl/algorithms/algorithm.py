"""What an algorithm is: a list of losses, target networks, and one update that reads from top to bottom.

``trainer`` holds one and hands it a batch at a time. Each loss has an objective, an optimizer, and a span of
the flat vector that it steps; PPO, A2C and the regression are the case of one loss over the whole vector.

An algorithm with target networks lets them ``follow`` at the beginning of each update, and ``track`` after
each step. Their parameters travel in the sidecar by rule ``copy``: an exchange with a peer leaves them alone,
a state transfer brings them along.

Shape suffix: D parameters.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from p2pdrl.errors import ConfigError, LayoutMismatchError
from p2pdrl.rl.flat import FlatModule, FlatSpan
from p2pdrl.rl.gradients import GradientEngine, Minibatch, Objective, Outputs, OwnStepper, Stepper, cut
from p2pdrl.rl.noise_scale import PARTS, NoiseScale
from p2pdrl.rl.optimizers import Optimizer
from p2pdrl.rl.sources.source import BatchT
from p2pdrl.tensors.optimizers import Adam, RMSProp, UpdateRule
from p2pdrl.tensors.sidecar import SidecarItem

__all__ = [
    "Algorithm",
    "HardCopy",
    "LinearSchedule",
    "Loss",
    "SoftCopy",
    "Stepped",
    "TargetNetwork",
    "annealed",
    "rmsprop_or_adam",
]


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
        rule: of its optimizer, whose state travels in the sidecar.
        span: of the flat vector: gradients elsewhere are computed where the model asks for it, and not used.
        engine: computes gradients of the whole vector.
        max_grad_norm: bound on the norm of the span's gradient.
        name: of the loss, where there are several: its optimizer's state is ``optimizer.NAME.…`` in the
            sidecar. Empty for the only one, whose state is ``optimizer.…``.
        every: how many calls of ``due`` make one step of it.

    Attributes:
        optimizer: steps the span.
        engine: may be replaced between updates.
        stepper: gets each gradient; may be replaced between updates.
    """

    def __init__(
        self,
        objective: Objective[Outputs],
        rule: UpdateRule,
        span: FlatSpan,
        engine: GradientEngine[Outputs],
        *,
        max_grad_norm: float,
        name: str = "",
        every: int = 1,
    ) -> None:
        self.objective = objective
        self.optimizer = Optimizer(rule, span, f"optimizer.{name}" if name else "optimizer")
        self.engine = engine
        self.stepper: Stepper = OwnStepper()
        self.name = name
        self._noise_scale = NoiseScale()
        self._max_grad_norm = max_grad_norm
        self._every = every
        self._asked = 0

    def due(self) -> bool:
        """Count one opportunity to step; tell whether this one is to be used."""
        self._asked += 1
        return self._asked % self._every == 0

    def step(self, batch: Minibatch, learning_rate: float, *, left: int = 0) -> Stepped:
        """Compute the mean gradient over a minibatch and step with it; arguments as in its two halves."""
        terms = self.gradients(batch)
        return Stepped(terms, self.apply(learning_rate, samples=batch.rows, left=left))

    def gradients(self, batch: Minibatch) -> Tensor:
        """Compute the mean gradient; return the objective's terms, as means over the batch's rows."""
        if not getattr(self.engine, "scattered", False) and self._noise_scale.due():
            self._look_at_parts(batch)
        return self.engine.gradients(batch, self.objective)

    def _look_at_parts(self, batch: Minibatch) -> None:
        """Compute the gradients of a minibatch's parts by themselves, for the noise between them."""
        parts: list[tuple[float, float]] = []
        sums_D: list[Tensor] = []
        for part in cut(batch, PARTS):
            self.engine.gradients(part, self.objective)  # its share of the mean over the whole
            gradients_D = [piece_D for _, piece_D in self.optimizer.span.pieces]
            share = len(part.inputs) / len(batch.inputs)
            parts.append((_square(gradients_D) / share**2, share * batch.rows))
            if not sums_D:
                sums_D = [piece_D.clone() for piece_D in gradients_D]
            else:
                for sum_D, piece_D in zip(sums_D, gradients_D, strict=True):
                    sum_D.add_(piece_D)
        self._noise_scale.note(parts, _square(sums_D))

    def metrics(self) -> dict[str, float]:
        """Return the engine's metrics, and the critical batch in rows once it is known."""
        rows = self._noise_scale.rows
        name = f"gradient_noise_scale.{self.name}" if self.name else "gradient_noise_scale"
        return self.engine.metrics() | ({} if rows is None else {name: rows})

    def spoil(self) -> None:
        """Have the gradient that was computed left out: as one that isn't finite, which no stepper uses.

        The stepper still gets it, for others may wait for a word of this learner's.
        """
        for _, gradients_D in self.optimizer.span.pieces:
            gradients_D.fill_(float("nan"))

    def apply(self, learning_rate: float, *, samples: int, left: int = 0) -> float:
        """Hand the gradient to the stepper; return its norm, infinite or NaN when the step was skipped.

        Args:
            learning_rate: after annealing.
            samples: rows that the gradient is the mean over.
            left: gradients of the same update that come after this one; see ``Stepper.step``.
        """
        return self.stepper.step(
            self.optimizer,
            learning_rate=learning_rate,
            max_grad_norm=self._max_grad_norm,
            samples=samples,
            left=left,
        )


def _square(vectors: Sequence[Tensor]) -> float:
    """Squared norm of a vector in pieces."""
    return float(torch.stack([vector.square().sum() for vector in vectors]).sum())


class Algorithm(ABC, Generic[BatchT]):
    """Improves the parameters on one batch after the other.

    Attributes:
        losses: in the order in which their optimizers' state lies in the sidecar; names differ.
        targets: target networks, whose parameters travel in the sidecar.
        progress: 0 … 1, how far the swarm is towards its last environment step; set before updates.
        env_steps: that the whole swarm has made, as far as known; set before updates.
        policy_version: of the parameters as an update begins; set before each.
        rate_factor: times what the configuration says is the learning rate; set before updates.
        minibatches: that each pass over an unroll is cut into, as the configuration says.
        epochs: passes over each unroll, likewise.
        cuts: into how many shorter ones an update is cut, each with as many times fewer minibatches; set
            before updates.
        reset_optimizer: optimizers begin anew with each update on parameters that peers changed, as the
            configuration says.
    """

    losses: Sequence[Loss[Any]]
    targets: Sequence[TargetNetwork] = ()
    progress: float = 0.0
    env_steps: int = 0
    policy_version: int = 0
    rate_factor: float = 1.0
    minibatches: int = 1
    cuts: float = 1.0
    epochs: int = 1
    reset_optimizer: bool = False

    def learning_rate(self, configured: float, anneal: Literal["none", "linear"]) -> float:
        """Return the learning rate at the swarm's progress and size."""
        return self.rate_factor * annealed(configured, anneal, self.progress)

    @abstractmethod
    def update(self, batch: BatchT) -> dict[str, float]:
        """Improve the parameters in place, and return what the monitors plot."""

    def count_of(self, what: Literal["env_steps", "versions"]) -> int:
        """Return how far the swarm, or this policy, is: what target networks are copied by."""
        return self.env_steps if what == "env_steps" else self.policy_version

    @property
    def exploration(self) -> float:
        """ε of an ε-greedy behaviour policy; 0 where the policy is stochastic itself."""
        return 0.0


def rmsprop_or_adam(
    name: Literal["rmsprop", "adam"], alpha: float, eps: float, *, eps_in_root: bool = False
) -> UpdateRule:
    """Return RMSProp with decay ``alpha``, or Adam, which has decays of its own; ``eps`` is either's.

    Args:
        eps_in_root: where RMSProp adds it; see there.
    """
    return RMSProp(alpha, eps, eps_in_root) if name == "rmsprop" else Adam(eps=eps)


def annealed(start: float, how: Literal["none", "linear"], progress: float) -> float:
    """Return ``start``, or ``start`` falling linearly to zero with the swarm's progress (0 … 1)."""
    return start * (1.0 - progress if how == "linear" else 1.0)


@dataclass(frozen=True)
class LinearSchedule:
    """Linear interpolation from ``start`` to ``end`` over the swarm's environment steps, constant afterwards.

    Attributes:
        steps: environment steps of the whole swarm.
    """

    start: float
    end: float
    steps: int

    def at(self, env_steps: int) -> float:
        """Return its value when the swarm has made ``env_steps``."""
        if env_steps >= self.steps:
            return self.end
        return self.start + (self.end - self.start) * (max(env_steps, 0) / self.steps)


@dataclass(frozen=True)
class HardCopy:
    """θ⁻ ← θ whenever ⌊count / every⌋ changes (Mnih 2015): counts of a swarm skip multiples."""

    every: int


@dataclass(frozen=True)
class SoftCopy:
    """θ⁻ ← τ θ + (1 − τ) θ⁻ after each step (Lillicrap 2016, arXiv 1509.02971, algorithm 1).

    Attributes:
        tau: τ.
        at_fetches: instead, each time θ was fetched from a parameter server.
    """

    tau: float
    at_fetches: bool = False


class TargetNetwork:
    """A copy of one part of a model.

    Args:
        name: in the sidecar: ``target.`` and this.
        module: the part; of several, an ``nn.Sequential`` of them in the order of the vector; the whole model
            where the parts share a trunk.
        span: its parameters in the model's flat vector.
        rule: how the copy follows.

    Attributes:
        module: the copy; nothing differentiates through its parameters.
    """

    def __init__(self, name: str, module: nn.Module, span: FlatSpan, rule: HardCopy | SoftCopy) -> None:
        self._item = SidecarItem(f"target.{name}", (span.size,), "float32", "copy")
        self._rule = rule
        self._period: int | None = None
        self.module = copy.deepcopy(module).requires_grad_(False)
        self._flat = FlatModule(self.module, span.device)
        self._flat.drop_gradients()
        if self._flat.size != span.size:
            raise ConfigError(f"target {name!r} has {self._flat.size} parameters, its span {span.size}")
        sizes = [parameters.numel() for parameters, _ in span.pieces]
        online = [parameters for parameters, _ in span.pieces]
        self._pairs = list(zip(torch.split(self._flat.parameters_D, sizes), online, strict=True))
        self.reset()

    def follow(self, count: int) -> None:
        """Before an update: copy the parameters, if that is the rule and it is time.

        Args:
            count: of what the rule counts: the swarm's environment steps, or policy versions.
        """
        if not isinstance(self._rule, HardCopy):
            return
        period = count // self._rule.every
        if self._period not in (None, period):
            self.reset()
        self._period = period

    def track(self) -> None:
        """After a step: move towards the parameters, if that is the rule."""
        if isinstance(self._rule, SoftCopy) and not self._rule.at_fetches:
            self._move(self._rule.tau)

    def fetched(self) -> None:
        """After the parameters were fetched from a server: move towards them, if that is the rule."""
        if isinstance(self._rule, SoftCopy) and self._rule.at_fetches:
            self._move(self._rule.tau)

    def _move(self, tau: float) -> None:
        for own, online in self._pairs:
            own.lerp_(online, tau)

    def reset(self) -> None:
        """Copy the parameters, whatever the rule."""
        for own, online in self._pairs:
            own.copy_(online)

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
