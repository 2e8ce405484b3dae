"""One learner of a regression: the smallest thing that a swarm can train.

It stands where ``trainer.Trainer`` stands, without environments: strategies are measured and checked on it
against serial gradient descent, without the noise of reinforcement learning. Rows used count as
environment steps, and minus the loss on the evaluation's rows as the return of an episode.

Shape suffixes: D parameters, R rows, F features, B rows of a batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from p2pdrl.config.task import RegressionConfig, TaskConfig
from p2pdrl.errors import ConfigError, LayoutMismatchError
from p2pdrl.rl.engines import DEFAULT, EngineOptions, make_engine
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.forward import module_forward
from p2pdrl.rl.gradients import Batch, GradientEngine
from p2pdrl.rl.networks.layers import Dense, initialise, mlp
from p2pdrl.rl.networks.trunk import in_pairs
from p2pdrl.rl.objectives.objective import Objective
from p2pdrl.rl.objectives.regression import TARGETS, CrossEntropy, LeastSquares
from p2pdrl.rl.optimizers import MAX_COUNT, SGD, Adagrad, Adam, Momentum, Optimizer, RMSProp
from p2pdrl.rl.regression_data import Rows, make_rows, sequence_batch
from p2pdrl.rl.stages.parts import Parts, module_parts
from p2pdrl.rl.stages.rows import RowSpec
from p2pdrl.rl.stages.split_engine import SplitEngine, split_engine
from p2pdrl.rl.stepping import OwnStepper, Stepper
from p2pdrl.rl.trainer import StepStats, resolve_device
from p2pdrl.tensors.layout import Layout
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout

__all__ = ["RegressionTrainer"]

Vector = npt.NDArray[np.float32]
Arrays = dict[str, npt.NDArray[Any]]

UPDATES = "regression.updates"


class RegressionTrainer:
    """Trains one copy of the swarm's model; one gradient to each ``step``.

    Args:
        task: ``algorithm`` must be a regression; ``seed`` gives data and initial weights.
        seed: of this learner's batches.
        device: as in ``trainer.Trainer``.
        step_delay_s: seconds slept at each update, on top of ``min_update_s``.
        engine: how this node computes its gradients.
        clock: seconds, monotonic.
        sleep: waits for so many seconds.

    Attributes:
        layout: how the parameters lie in the vector.
        sidecar_layout: optimizer state, and the number of updates made, which is the place in the sequence.
        engine: computes each gradient; may be replaced between two calls of ``step``.
        stepper: gets each gradient; may be replaced between two calls of ``step``.

    Raises:
        ConfigError: the task is no regression, or there is no such device.

    Example:
        >>> from p2pdrl.config.task import RegressionConfig, TaskConfig
        >>> trainer = RegressionTrainer(TaskConfig(algorithm=RegressionConfig()), seed=1, device="cpu")
        >>> trainer.step().env_steps
        32
    """

    def __init__(
        self,
        task: TaskConfig,
        seed: int,
        device: str = "auto",
        *,
        step_delay_s: float = 0.0,
        engine: EngineOptions = DEFAULT,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not isinstance(task.algorithm, RegressionConfig):
            raise ConfigError("the task's algorithm is no regression")
        self._config = config = task.algorithm
        self._precision = task.gradients.precision
        self._seed = seed
        self._step_delay_s = step_delay_s
        self._clock = clock
        self._sleep = sleep
        self._rng = np.random.default_rng(seed)
        torch_device = resolve_device(device)
        train, evaluation = make_rows(config, task.seed)
        self._inputs_RF, self._targets_R = _tensors(train, torch_device)
        self._evaluation = _tensors(evaluation, torch_device)
        self._flat = FlatModule(_model(config, task.seed), torch_device)
        self._optimizer = _optimizer(config, self._flat)
        self._objective: Objective[Tensor] = CrossEntropy() if config.kind == "classifier" else LeastSquares()
        self._progress = 0.0
        self._updates = 0
        self._unseen_updates = 0
        self._evaluated = self._evaluate()
        forward = module_forward(
            _layers(self._flat.module),
            task.gradients.precision,
            checkpoint_activations=engine.checkpoint_activations,
        )
        self.engine: GradientEngine[Tensor] = make_engine(engine, self._flat, forward)
        self.stepper: Stepper = OwnStepper()
        self.layout: Layout = self._flat.layout
        self.sidecar_layout = SidecarLayout(
            (*self._optimizer.items(), SidecarItem(UPDATES, (), "int64", "copy"))
        )
        self._split: SplitEngine[Tensor] | None = None
        if engine.split_devices:
            self.engine = self._split = split_engine(self._flat, self.parts(), engine)

    def step(self) -> StepStats:
        """Compute one gradient and hand it to the stepper."""
        start = self._clock()
        config = self._config
        rows_B = torch.from_numpy(self._next_batch())
        batch = Batch(self._inputs_RF[rows_B], {TARGETS: self._targets_R[rows_B]}, len(rows_B))
        loss = self.engine.gradients(batch, self._objective)
        self._pace(start)
        learning_rate = config.learning_rate * (1.0 - self._progress if config.anneal == "linear" else 1.0)
        norm = self.stepper.step(
            self._flat,
            self._optimizer,
            learning_rate=learning_rate,
            max_grad_norm=config.max_grad_norm,
            samples=config.batch_size,
            left=0,
        )
        self._updates += 1
        self._unseen_updates += 1
        episodes = []
        if self._unseen_updates >= config.evaluate_every:
            self._evaluated = self._evaluate()
            episodes.append((-self._evaluated["evaluation_loss"], self._unseen_updates * config.batch_size))
            self._unseen_updates = 0
        finite = math.isfinite(norm)
        metrics = {
            "loss": float(loss),
            "gradient_norm": norm if finite else 0.0,
            "learning_rate": learning_rate,
            "gradient_steps": float(finite),
            "skipped_steps": float(not finite),
            **self._evaluated,
            **self.engine.metrics(),
        }
        return StepStats(config.batch_size, episodes, metrics, self._clock() - start)

    def _next_batch(self) -> npt.NDArray[np.int64]:
        config = self._config
        if config.sample == "sequence":
            return sequence_batch(config, self._seed, self._updates)
        return self._rng.integers(config.rows, size=config.batch_size)

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        inputs_RF, targets_R = self._evaluation
        outputs = self._flat.module(inputs_RF)
        loss, _ = self._objective.over(len(targets_R))(outputs, {TARGETS: targets_R})
        figures = {"evaluation_loss": float(loss)}
        if self._config.kind == "classifier":
            right_R = outputs.argmax(1) == targets_R
            figures["accuracy"] = float(right_R.to(torch.float32).mean())
        return figures

    def _pace(self, start: float) -> None:
        """Sleep for what the gradient should have taken and hasn't."""
        rest_s = max(self._config.min_update_s - (self._clock() - start), 0.0) + self._step_delay_s
        if rest_s > 0.0:
            self._sleep(rest_s)

    @property
    def flat(self) -> Vector:
        """The D parameters: a view on the CPU (changed by ``step``), a copy from any other device."""
        return self._flat.numpy()

    @property
    def place(self) -> int:
        """Updates made, which is the place in the sequence."""
        return self._updates

    @place.setter
    def place(self, updates: int) -> None:
        self._updates = min(max(updates, 0), MAX_COUNT)

    def parts(self) -> Parts[Tensor]:
        """Return what a pipeline over several devices is made of; see ``Trainer.parts``."""
        config = self._config
        classes = config.classes if config.kind == "classifier" else None
        return module_parts(
            self._flat.module,
            _layers(self._flat.module),
            self._objective,
            self._optimizer,
            inputs=RowSpec(tuple(self._inputs_RF.shape[1:]), self._inputs_RF.dtype),
            targets=RowSpec((), self._targets_R.dtype, classes),
            most_rows=config.batch_size,
            precision=self._precision,
        )

    def set_aside(self, *, aside: bool) -> None:
        """Give up memory while a pipeline's share computes gradients and steps instead, or take it again.

        Gradients go, and so does the optimizer's state, which lies with others then (`refer`). Parameters
        stay: who acts needs them.
        """
        if aside:
            self._flat.drop_gradients()
        else:
            self._flat.make_gradients()
        self._optimizer.set_aside(aside=aside)

    def refer(self, sidecar: Mapping[str, npt.NDArray[Any]]) -> None:
        """Set aside, let the optimizer's state be what lies in this sidecar; see ``Optimizer.refer``."""
        self._optimizer.refer(sidecar)

    def rebind(self, buffer_D: Vector, *, write: bool) -> None:
        """Let the parameters live in ``buffer_D`` from now on; see ``FlatModule.rebind``."""
        self._flat.rebind(buffer_D, write=write)

    def add_delta(self, delta_D: Vector) -> None:
        """Add what exchanges with peers changed.

        Raises:
            LayoutMismatchError: the delta has another length.
        """
        self._flat.add_(delta_D)

    def set_state(
        self, vector_D: Vector, sidecar: Mapping[str, npt.NDArray[Any]] | None, *, own: bool = False
    ) -> None:
        """Take over parameters, and with a sidecar the optimizer's state and the place in the sequence.

        Args:
            vector_D: the parameters.
            sidecar: as ``sidecar`` returned it here or on another node.
            own: makes no difference here: there are no counts of one's own.

        Raises:
            LayoutMismatchError: an array is missing or has another shape.
        """
        self._flat.set_(vector_D)
        if sidecar is None:
            return
        updates = sidecar.get(UPDATES)
        if updates is None or updates.shape != ():
            raise LayoutMismatchError(f"{UPDATES} should be one number")
        self._optimizer.load(sidecar)
        self.place = int(updates)

    def sidecar(self) -> Arrays:
        """Return the arrays of ``sidecar_layout`` by name; some are views that ``step`` changes."""
        return {**self._optimizer.state(), UPDATES: np.array(self._updates, dtype=np.int64)}

    def own_moments(self) -> dict[str, Moments]:
        """Return nothing: a regression has no normalisers."""
        return {}

    def set_other_moments(self, moments: Mapping[str, Moments]) -> None:
        """Do nothing: a regression has no normalisers."""

    def set_progress(self, fraction: float) -> None:
        """Tell how far the swarm is, 0 … 1, towards its last row (for annealing)."""
        self._progress = min(max(fraction, 0.0), 1.0)

    def close(self) -> None:
        """End what other devices do."""
        if self._split is not None:
            self._split.close()


def _tensors(rows: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(rows.inputs_RF).to(device), torch.from_numpy(rows.targets_R).to(device)


def _model(config: RegressionConfig, seed: int) -> nn.Module:
    if config.kind == "classifier":
        widths = (config.features, *config.hidden)
        classifier = nn.Sequential(mlp(widths, "tanh"), Dense(widths[-1], config.classes, 0.01))
        initialise(classifier, torch.Generator().manual_seed(seed))
        return classifier
    model = nn.Linear(config.features, 1, bias=False, device="meta").to_empty(device="cpu")
    nn.init.zeros_(model.weight)
    return model


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the model's dense layers, each with the non-linearity behind it."""
    if isinstance(model, nn.Sequential):
        hidden, last = model
        assert isinstance(hidden, nn.Sequential)  # noqa: S101 - as _model made it
        return [*in_pairs(hidden), last]
    return [model]


def _optimizer(config: RegressionConfig, flat: FlatModule) -> Optimizer:
    tensors = flat.parameters_D, flat.gradients_D
    match config.optimizer:
        case "sgd":
            return SGD(*tensors, sparse=config.kind == "least_squares" and config.density < 1.0)
        case "momentum":
            return Momentum(*tensors, config.momentum, nesterov=config.nesterov)
        case "rmsprop":
            return RMSProp(*tensors, config.decay, config.eps)
        case "adagrad":
            return Adagrad(*tensors, config.eps)
        case "adam":
            return Adam(*tensors, config.eps)
