"""From a task to what trains it.

The learner process builds through it and knows no more of its trainer than ``AnyTrainer`` says.

Shape suffix: D parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from p2pdrl.config.task import RegressionConfig, TaskConfig
from p2pdrl.rl.engines import DEFAULT, EngineOptions
from p2pdrl.rl.gradients import GradientEngine
from p2pdrl.rl.regression_trainer import RegressionTrainer
from p2pdrl.rl.stages.parts import Parts
from p2pdrl.rl.stepping import Stepper
from p2pdrl.rl.trainer import StepStats, Trainer
from p2pdrl.tensors.layout import Layout
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.sidecar import SidecarLayout

__all__ = ["AnyTrainer", "build_trainer"]

Vector = npt.NDArray[np.float32]
Arrays = dict[str, npt.NDArray[Any]]


class AnyTrainer(Protocol):
    """What a learner process asks of a trainer; ``Trainer`` says what each means.

    Attributes:
        layout: how the parameters lie in the vector.
        sidecar_layout: what travels beside it.
        engine: computes each gradient; may be replaced between two calls of ``step``.
        stepper: gets each gradient; may be replaced between two calls of ``step``.
    """

    layout: Layout
    sidecar_layout: SidecarLayout

    @property
    def engine(self) -> GradientEngine[Any]:
        """What computes each gradient."""
        ...

    @engine.setter
    def engine(self, engine: GradientEngine[Any]) -> None: ...

    @property
    def stepper(self) -> Stepper:
        """What each gradient is handed to."""
        ...

    @stepper.setter
    def stepper(self, stepper: Stepper) -> None: ...

    @property
    def flat(self) -> Vector:
        """The D parameters: a view on the CPU, a copy from any other device."""
        ...

    @property
    def place(self) -> int:
        """How far it is in data that go on in order; 0 where there is no order."""
        ...

    @place.setter
    def place(self, updates: int) -> None: ...

    def step(self) -> StepStats:
        """Improve the parameters by one update."""
        ...

    def parts(self) -> Parts[Any]:
        """Return what a pipeline is made of."""
        ...

    def set_aside(self, *, aside: bool) -> None:
        """Give up memory while a pipeline's share computes gradients and steps instead, or take it again."""
        ...

    def refer(self, sidecar: Mapping[str, npt.NDArray[Any]]) -> None:
        """Set aside, let the optimizer's state be what lies in this sidecar."""
        ...

    def rebind(self, buffer_D: Vector, *, write: bool) -> None:
        """Let the parameters live in ``buffer_D`` from now on."""
        ...

    def add_delta(self, delta_D: Vector) -> None:
        """Add what exchanges with peers changed."""
        ...

    def set_state(
        self, vector_D: Vector, sidecar: Mapping[str, npt.NDArray[Any]] | None, *, own: bool = False
    ) -> None:
        """Take over parameters, and the optimizer's state when a sidecar comes along."""
        ...

    def sidecar(self) -> Arrays:
        """Return the arrays of ``sidecar_layout`` by name."""
        ...

    def own_moments(self) -> dict[str, Moments]:
        """Return what this learner's normalisers have counted themselves."""
        ...

    def set_other_moments(self, moments: Mapping[str, Moments]) -> None:
        """Replace what all other nodes counted."""
        ...

    def set_progress(self, fraction: float) -> None:
        """Tell how far the swarm is, 0 … 1."""
        ...

    def close(self) -> None:
        """Free what the trainer holds."""
        ...


def build_trainer(
    task: TaskConfig,
    seed: int,
    device: str = "auto",
    *,
    allow_import: bool = False,
    step_delay_s: float = 0.0,
    engine: EngineOptions = DEFAULT,
) -> AnyTrainer:
    """Return the trainer of a task.

    Args:
        task: the swarm's.
        seed: of this learner: its environments, actions, shuffles and batches.
        device: ``cpu``, ``cuda``, ``cuda:1`` … or ``auto``.
        allow_import: permit environment ids that import a module.
        step_delay_s: seconds slept at each step of the environments, or at each update of a regression.
        engine: how this node computes its gradients.

    Raises:
        ConfigError: the task can't be run here as configured.
    """
    if isinstance(task.algorithm, RegressionConfig):
        return RegressionTrainer(task, seed, device, step_delay_s=step_delay_s, engine=engine)
    return Trainer(task, seed, device, allow_import=allow_import, step_delay_s=step_delay_s, engine=engine)
