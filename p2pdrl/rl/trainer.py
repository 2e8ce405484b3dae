"""One learner in one object: environments, policy, normalisers and algorithm.

The learner process builds one and calls ``step`` for ever; between steps it lets the swarm in: deltas
of the parameters, whole states, other nodes' normaliser counters, the swarm's progress.

Shape suffix: D parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from p2pdrl.config.task import RegressionConfig, TaskConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.algorithms.registry import build
from p2pdrl.rl.engines import DEFAULT, EngineOptions, make_engine
from p2pdrl.rl.envs import make_vector_env
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.forward import policy_forward
from p2pdrl.rl.gradients import GradientEngine
from p2pdrl.rl.normalize import RewardScaler, RunningNormalizer
from p2pdrl.rl.outputs import PolicyOutputs
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.rollout import Collector
from p2pdrl.rl.stages.parts import Parts, policy_parts
from p2pdrl.rl.stages.split_engine import SplitEngine, split_engine
from p2pdrl.rl.stepping import Stepper
from p2pdrl.tensors.layout import Layout
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout

__all__ = ["StepStats", "Trainer", "resolve_device"]

Vector = npt.NDArray[np.float32]
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class StepStats:
    """What one unroll and one update amounted to.

    Attributes:
        env_steps: environment steps taken; resets don't count.
        episodes: (return from raw rewards, length in steps) of those that ended, in order of time.
        metrics: the algorithm's own numbers, by name, and its engine's.
        seconds: duration of the whole step.
    """

    env_steps: int
    episodes: list[tuple[float, int]]
    metrics: dict[str, float]
    seconds: float


class Trainer:
    """Trains one copy of the swarm's policy.

    Args:
        task: the swarm's task; its seed gives the initial weights, equal on every node.
        seed: of this learner's environments, actions and shuffles; another one on every node and actor.
        device: ``cpu``, ``cuda``, ``cuda:1`` … or ``auto``, which takes a GPU where there is one.
        allow_import: permit environment ids that import a module.
        step_delay_s: seconds slept at each step of the environments.
        engine: how this node computes its gradients.
        clock: seconds, monotonic; only ``StepStats.seconds`` depends on it.

    Attributes:
        policy: the module; its parameters are views of one vector.
        layout: how the parameters lie in that vector.
        sidecar_layout: what travels beside it: optimizer state by rule ``copy``, and for each running
            normaliser (``observations``, ``returns``) ``.count``, ``.mean`` and ``.m2`` by rule ``moments``.
        observation_normalizer: None unless the task asks for it.

    Raises:
        ConfigError: environment, network or device don't exist or don't fit together.

    Example:
        >>> from p2pdrl.config.task import TaskConfig
        >>> trainer = Trainer(TaskConfig(), seed=1, device="cpu")
        >>> 900 < trainer.step().env_steps <= 1024
        True
    """

    def __init__(
        self,
        task: TaskConfig,
        seed: int,
        device: str = "auto",
        *,
        allow_import: bool = False,
        step_delay_s: float = 0.0,
        engine: EngineOptions = DEFAULT,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        algorithm = task.algorithm
        if isinstance(algorithm, RegressionConfig):
            raise ConfigError("a regression has neither environment nor policy")
        env_seed, action_seed = (int(word) for word in np.random.SeedSequence(seed).generate_state(2))
        torch_device = resolve_device(device)
        generator = torch.Generator(torch_device).manual_seed(action_seed)
        self._clock = clock
        self._algorithm_config = algorithm
        self._precision = task.gradients.precision
        self._env = make_vector_env(task.env, env_seed, allow_import=allow_import, step_delay_s=step_delay_s)
        self.policy = ActorCritic(self._env.spec, task.network, task.seed)
        self._flat = FlatModule(self.policy, torch_device)
        forward = policy_forward(
            self.policy, task.gradients.precision, checkpoint_activations=engine.checkpoint_activations
        )
        self._algorithm = build(algorithm, self._flat, make_engine(engine, self._flat, forward), generator)

        self._statistics: dict[str, RunningNormalizer] = {}
        self.observation_normalizer: RunningNormalizer | None = None
        if task.env.normalize_observations:
            if self._env.spec.is_image:
                raise ConfigError(
                    "env.normalize_observations is for vectors; images are scaled to 0…1 anyway"
                )
            self.observation_normalizer = RunningNormalizer(self._env.spec.obs_shape)
            self._statistics["observations"] = self.observation_normalizer
        scaler = None
        if task.env.normalize_returns:
            scaler = RewardScaler(self._env.num_envs, algorithm.discount)
            self._statistics["returns"] = scaler.statistics
        self._collector = Collector(
            self._env,
            self.policy,
            algorithm.unroll_steps,
            generator,
            normalizer=self.observation_normalizer,
            reward_scaler=scaler,
        )
        self.layout: Layout = self._flat.layout
        self.sidecar_layout = SidecarLayout(
            (*self._algorithm.optimizer.items(), *_moments_items(self._statistics))
        )
        self._split: SplitEngine[PolicyOutputs] | None = None
        if engine.split_devices:
            self.engine = self._split = split_engine(self._flat, self.parts(), engine)

    def step(self) -> StepStats:
        """Collect one unroll and improve the policy on it."""
        start = self._clock()
        unroll = self._collector.collect()
        metrics = {**self._algorithm.update(unroll), **self.engine.metrics()}
        return StepStats(unroll.env_steps, unroll.episodes, metrics, self._clock() - start)

    @property
    def flat(self) -> Vector:
        """The D parameters: a view on the CPU (changed by ``step``), a copy from any other device."""
        return self._flat.numpy()

    @property
    def engine(self) -> GradientEngine[PolicyOutputs]:
        """What computes each gradient; may be replaced between two calls of ``step``."""
        return self._algorithm.engine

    @engine.setter
    def engine(self, engine: GradientEngine[PolicyOutputs]) -> None:
        self._algorithm.engine = engine

    @property
    def stepper(self) -> Stepper:
        """What each gradient is handed to; may be replaced between two calls of ``step``."""
        return self._algorithm.stepper

    @stepper.setter
    def stepper(self, stepper: Stepper) -> None:
        self._algorithm.stepper = stepper

    @property
    def place(self) -> int:
        """0: experience has no order that others could go on with."""
        return 0

    @place.setter
    def place(self, updates: int) -> None:
        """Do nothing."""

    def parts(self) -> Parts[PolicyOutputs]:
        """Return what a pipeline over several devices is made of: this trainer's model as it is now."""
        config, recurrent = self._algorithm_config, self.policy.core is not None
        envs = self._env.num_envs
        return policy_parts(
            self.policy,
            self._algorithm.objective,
            self._algorithm.optimizer,
            steps=config.unroll_steps,
            most_rows=envs if recurrent else envs * config.unroll_steps,
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
        self._algorithm.optimizer.set_aside(aside=aside)

    def refer(self, sidecar: Mapping[str, npt.NDArray[Any]]) -> None:
        """Set aside, let the optimizer's state be what lies in this sidecar; see ``Optimizer.refer``."""
        self._algorithm.optimizer.refer(sidecar)

    def rebind(self, buffer_D: Vector, *, write: bool) -> None:
        """Let the parameters live in ``buffer_D`` from now on; see ``FlatModule.rebind``."""
        self._flat.rebind(buffer_D, write=write)

    def add_delta(self, delta_D: Vector) -> None:
        """Add what exchanges with peers changed; the optimizer's state stays.

        Raises:
            LayoutMismatchError: the delta has another length.
        """
        self._flat.add_(delta_D)

    def set_state(
        self, vector_D: Vector, sidecar: Mapping[str, npt.NDArray[Any]] | None, *, own: bool = False
    ) -> None:
        """Take over parameters, and the optimizer's state when a sidecar comes along.

        Args:
            vector_D: the parameters.
            sidecar: arrays by name, as ``sidecar`` returned them here or on another node.
            own: this learner's own state comes back (restart, checkpoint), so its normalisers go on
                counting from it. Another node's counters must come by ``set_other_moments`` instead.

        Raises:
            LayoutMismatchError: an array is missing or has another shape.
        """
        self._flat.set_(vector_D)
        if sidecar is None:
            return
        self._algorithm.optimizer.load(sidecar)
        if own:
            for name, statistics in self._statistics.items():
                parts = (np.array(sidecar[f"{name}.{part}"]) for part in ("count", "mean", "m2"))
                count, mean, m2 = parts
                statistics.set_own(Moments(float(count), mean, m2))

    def sidecar(self) -> Arrays:
        """Return the arrays of ``sidecar_layout`` by name; some are views that ``step`` changes."""
        arrays = self._algorithm.optimizer.state()
        for name, moments in self.own_moments().items():
            arrays[f"{name}.count"] = np.array(moments.count)
            arrays[f"{name}.mean"] = moments.mean
            arrays[f"{name}.m2"] = moments.m2
        return arrays

    def own_moments(self) -> dict[str, Moments]:
        """Return what this learner's normalisers have counted themselves, by name."""
        return {name: statistics.own for name, statistics in self._statistics.items()}

    def set_other_moments(self, moments: Mapping[str, Moments]) -> None:
        """Replace what all other nodes counted, merged to one entry per normaliser."""
        for name, statistics in self._statistics.items():
            if name in moments:
                statistics.set_others(moments[name])

    def set_progress(self, fraction: float) -> None:
        """Tell how far the swarm is, 0 … 1, towards its last environment step (for annealing)."""
        self._algorithm.progress = min(max(fraction, 0.0), 1.0)

    def close(self) -> None:
        """Close the environments, and end what other devices do."""
        self._env.close()
        if self._split is not None:
            self._split.close()


def resolve_device(name: str) -> torch.device:
    """Return the device that ``name`` stands for.

    Raises:
        ConfigError: there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} can't be used here ({reason}); try 'cpu' or 'auto'") from error
    return device


def _moments_items(statistics: Mapping[str, RunningNormalizer]) -> list[SidecarItem]:
    items = []
    for name, normalizer in statistics.items():
        shape = normalizer.own.mean.shape
        items.append(SidecarItem(f"{name}.count", (), "float64", "moments"))
        items.append(SidecarItem(f"{name}.mean", shape, "float64", "moments"))
        items.append(SidecarItem(f"{name}.m2", shape, "float64", "moments"))
    return items
