"""One learner in one object: a source of batches, an algorithm, and the parameters that it improves.

The learner process builds one (`rl.registry.build_trainer`) and calls ``step`` for ever; between steps it
lets the swarm in: deltas of the parameters, whole states, other nodes' normaliser counters, its progress.

Shape suffix: D parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from p2pdrl.config.task import LEAST_SPEED
from p2pdrl.errors import ConfigError
from p2pdrl.rl.algorithms.algorithm import Algorithm, Loss
from p2pdrl.rl.engines import EngineOptions
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import GradientEngine, Stepper
from p2pdrl.rl.normalize import RunningNormalizer
from p2pdrl.rl.pipeline.model_split import SplitEngine, split_engine
from p2pdrl.rl.pipeline.parts import ModelParts
from p2pdrl.rl.policy import Policy
from p2pdrl.rl.sources.replay import ReplayFeeder
from p2pdrl.rl.sources.source import NOTHING_ELSEWHERE, CountedElsewhere, Source
from p2pdrl.tensors.layout import Layout
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.sidecar import SidecarItem, SidecarLayout

__all__ = ["PeriodicEvaluation", "Pipelineable", "StepStats", "Trainer"]

LEAST_MINIBATCHES = 4
"""Of a share that is cut further."""
RESET_MINIBATCHES = 16
"""The same where optimizers begin anew with it: their first steps are large."""
Vector = npt.NDArray[np.float32]
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class StepStats:
    """What one batch and one update amounted to.

    Attributes:
        env_steps: environment steps taken; resets don't count.
        episodes: (return from raw rewards, length in steps) of those that ended, in order of time.
        metrics: the algorithm's own numbers, by name, its engines' and the source's.
        seconds: duration of the whole step.
        elsewhere: how much of that other nodes count.
        acted: whether the environments were stepped meanwhile, in this process.
    """

    env_steps: int
    episodes: list[tuple[float, int]]
    metrics: dict[str, float]
    seconds: float
    elsewhere: CountedElsewhere = NOTHING_ELSEWHERE
    acted: bool = False


class PeriodicEvaluation(Protocol):
    """Evaluates the model on data that it is not trained on."""

    figures: dict[str, float]
    """Newest ones, by name."""

    def __call__(self) -> list[tuple[float, int]]:
        """Count an update; return the evaluation's episodes as (return, length), if one was due."""


class Stateful(Protocol):
    """What has arrays of its own in the sidecar: an optimizer, a target network, a source."""

    def items(self) -> tuple[SidecarItem, ...]:
        """Return how its state is laid out."""

    def state(self) -> Arrays:
        """Return its state by name."""

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over a state."""


class Pipelineable(Protocol):
    """A trainer that can be one stage of a pipeline over several nodes, which then computes and steps for it.

    Attributes:
        layout: how the parameters lie in the vector.
        engine: computes each gradient; may be replaced between two calls of ``Trainer.step``.
        stepper: gets each gradient; likewise.
        position: in sequential data; 0 where batches have no order.
    """

    layout: Layout
    engine: GradientEngine[Any]
    stepper: Stepper
    position: int

    @property
    def flat(self) -> Vector:
        """The D parameters: a view on the CPU, a copy from any other device."""

    def sidecar(self) -> Arrays:
        """Return the state beside the parameters, by name."""

    def parts(self) -> ModelParts[Any]:
        """Return what a pipeline is made of."""

    def offload(self) -> None:
        """Free gradients and optimizer state while the pipeline holds them."""

    def offload_to(self, sidecar: Mapping[str, npt.NDArray[Any]]) -> None:
        """While the state is offloaded, read the optimizer's from this sidecar."""

    def reset_targets(self) -> None:
        """Make target networks copies of the parameters: of a learner that made none of their steps."""

    def reload(self) -> None:
        """Allocate gradients and optimizer state again."""


class Trainer:
    """Trains one copy of the swarm's parameters.

    Args:
        flat: the parameters.
        algorithm: improves them.
        source: of its batches; closed with the trainer.
        statistics: running normalisers by name; who scales batches updates them.
        policy: acts; None for a regression.
        parts: returns what a pipeline over several devices is made of, from the only loss.
        evaluation: called after each update; None without one.
        clock: seconds, monotonic; only ``StepStats.seconds`` depends on it.

    Attributes:
        layout: how the parameters lie in that vector.
        sidecar_layout: what travels beside it: optimizers and target networks by rule ``copy``, the source's
            state, and for each running normaliser (``observations``, ``returns``) ``.count``, ``.mean`` and
            ``.m2`` by rule ``moments``.
        policy_version: of the parameters; who holds them keeps it up to date.
        collected: called once a batch is there, before the update: what peers did to the parameters while it
            was collected can be taken in, and the gradients are of the newest.

    Example:
        >>> from p2pdrl.config.task import TaskConfig
        >>> from p2pdrl.rl.registry import build_trainer
        >>> trainer = build_trainer(TaskConfig(), seed=1, device="cpu")
        >>> 900 < trainer.step().env_steps <= 1024
        True
    """

    def __init__(
        self,
        flat: FlatModule,
        algorithm: Algorithm[Any],
        source: Source[Any],
        *,
        statistics: Mapping[str, RunningNormalizer] | None = None,
        policy: Policy | None = None,
        parts: Callable[[Loss[Any]], ModelParts[Any]],
        evaluation: PeriodicEvaluation | None = None,
        replay: ReplayFeeder | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._flat = flat
        self.algorithm = algorithm
        self._statistics = dict(statistics or {})
        self._parts = parts
        self._evaluation = evaluation
        self._replay = replay
        self._clock = clock
        self._split: SplitEngine[Any] | None = None
        self.source = source
        self._policy = policy
        self.policy_version = 0
        self.collected: Callable[[], object] | None = None
        self._speed, self._cuts, self._rate_power = 1.0, 1, 0.0
        self._resets = False
        """Whether an update on mixed parameters is an optimizer's first."""
        self._mixed = False
        """Whether peers changed the parameters since the last update began."""
        self.layout: Layout = flat.layout
        optimizers = (loss.optimizer for loss in algorithm.losses)
        self._stateful: tuple[Stateful, ...] = (*optimizers, *algorithm.targets, source)
        items = (item for part in self._stateful for item in part.items())
        self.sidecar_layout = SidecarLayout((*items, *_moments_items(self._statistics)))

    def step(self) -> StepStats:
        """Take one batch and improve the parameters on it."""
        start = self._clock()
        algorithm = self.algorithm
        self._explore()
        batch = self.source.next()
        self._set_rate()
        if self.collected is not None:
            self.collected()
        algorithm.policy_version = self.policy_version
        if self._resets and self._mixed:
            for loss in algorithm.losses:
                loss.optimizer.reset()
        self._mixed = False
        metrics = algorithm.update(batch)
        self.source.commit()
        episodes = batch.episodes
        if self._evaluation is not None:
            episodes = [*episodes, *self._evaluation()]
            metrics |= self._evaluation.figures
        for loss in algorithm.losses:
            metrics |= loss.metrics()
        metrics |= self.source.metrics()
        if (batch_share := self.source.batch_share) < 1.0:
            metrics["batch_share"] = batch_share
        took_s = self._clock() - start
        return StepStats(batch.env_steps, episodes, metrics, took_s, self.source.elsewhere, self.source.acts)

    @property
    def ready(self) -> bool:
        """Whether ``step`` has a batch without waiting for actors."""
        return self.source.ready

    @property
    def replay_nbytes(self) -> int:
        """Bytes of the memory that the replay's rows lie in; 0 without a replay, or with one elsewhere."""
        return 0 if self._replay is None or not self.source.fills else self._replay.memory.layout.nbytes

    @property
    def replay(self) -> ReplayFeeder:
        """The replay memory of this process.

        Raises:
            ConfigError: the algorithm has no replay.
        """
        if self._replay is None:
            raise ConfigError("this algorithm learns without a replay memory")
        return self._replay

    def keep_replay(self, buffer: memoryview) -> bool:
        """Keep the replay in a buffer of ``replay_nbytes`` from now on; as ``ReplayFeeder.keep``.

        Raises:
            ConfigError: the algorithm has no replay.
        """
        return self.replay.keep(buffer)

    def publish(self) -> None:
        """Hand the current parameters to the actors."""
        self._explore()
        self.source.publish(self.policy_version)

    def _explore(self) -> None:
        policy, exploration = self._policy, self.algorithm.exploration
        if policy is not None and policy.exploration != exploration:
            policy.exploration = exploration

    @property
    def spaces(self) -> dict[str, str]:
        """What observations and actions are, in words; empty for a regression."""
        if self._policy is None:
            return {}
        spec = self._policy.spec
        shape = " x ".join(map(str, spec.obs_shape)) or "1"
        return {"observation": f"{shape} of {spec.obs_dtype}", "action": str(spec.action)}

    @property
    def policy(self) -> Policy:
        """The policy that acts.

        Raises:
            ConfigError: a regression has none.
        """
        if self._policy is None:
            raise ConfigError("a regression has neither environment nor policy")
        return self._policy

    @property
    def observation_normalizer(self) -> RunningNormalizer | None:
        """The normaliser of observations; None unless the task asks for it."""
        return self._statistics.get("observations")

    @property
    def flat(self) -> Vector:
        """The D parameters: a view on the CPU (changed by ``step``), a copy from any other device."""
        return self._flat.numpy()

    @property
    def engine(self) -> GradientEngine[Any]:
        """The engine of the only loss; may be replaced between two calls of ``step``."""
        return self._only_loss.engine

    @engine.setter
    def engine(self, engine: GradientEngine[Any]) -> None:
        self._only_loss.engine = engine

    @property
    def stepper(self) -> Stepper:
        """The stepper of the only loss; may be replaced between two calls of ``step``."""
        return self._only_loss.stepper

    @stepper.setter
    def stepper(self, stepper: Stepper) -> None:
        self._only_loss.stepper = stepper

    @property
    def _only_loss(self) -> Loss[Any]:
        losses = self.algorithm.losses
        if len(losses) != 1:
            names = ", ".join(loss.name for loss in losses)
            raise ConfigError(
                f"gradients of several losses ({names}) can't travel, nor can their model be cut into "
                "stages; take a strategy that exchanges parameters"
            )
        return losses[0]

    @property
    def position(self) -> int:
        """Position in sequential data; 0 where batches have no order."""
        return self.source.position

    @position.setter
    def position(self, position: int) -> None:
        self.source.position = position

    def parts(self) -> ModelParts[Any]:
        """Return what a pipeline over several devices is made of: this trainer's model as it is now.

        Raises:
            ConfigError: there are several losses.
        """
        return self._parts(self._only_loss)

    def split(self, options: EngineOptions) -> None:
        """Cut the model over several devices of this machine.

        Raises:
            ConfigError: a device isn't there, or the model can't be cut like that.
        """
        self.engine = self._split = split_engine(self._flat, self.parts(), options)

    def offload(self) -> None:
        """Free gradients and optimizer state while the pipeline holds them.

        Parameters stay: the policy acts with them. `offload_to` says where the state lies meanwhile.
        """
        self._flat.drop_gradients()
        for loss in self.algorithm.losses:
            loss.optimizer.offload()

    def offload_to(self, sidecar: Mapping[str, npt.NDArray[Any]]) -> None:
        """While the state is offloaded, read it from this sidecar; see ``Optimizer.offload_to``."""
        for loss in self.algorithm.losses:
            loss.optimizer.offload_to(sidecar)

    def reset_targets(self) -> None:
        """Make target networks copies of the parameters: of a learner that made none of their steps."""
        for target in self.algorithm.targets:
            target.reset()

    def reload(self) -> None:
        """Allocate gradients and optimizer state again."""
        self._flat.make_gradients()
        for loss in self.algorithm.losses:
            loss.optimizer.reload()

    def rebind(self, buffer_D: Vector, *, write: bool) -> None:
        """Move the parameters into ``buffer_D``; see ``FlatModule.rebind``."""
        self._flat.rebind(buffer_D, write=write)

    def share_statistics(self, arrays: Mapping[str, npt.NDArray[Any]], *, write: bool) -> None:
        """Have the optimizers' state in memory that other learners step with, too; see `Optimizer.share`."""
        for loss in self.algorithm.losses:
            loss.optimizer.share(arrays, write=write)

    def keep_statistics(self) -> None:
        """Have the optimizers' state in memory of their own again."""
        for loss in self.algorithm.losses:
            loss.optimizer.keep()

    def add_delta(self, delta_D: Vector) -> None:
        """Add what exchanges with peers changed; the optimizers' state stays.

        Raises:
            LayoutMismatchError: the delta has another length.
        """
        self._mixed = True
        self._flat.add_(delta_D)

    def set_state(
        self, vector_D: Vector, sidecar: Mapping[str, npt.NDArray[Any]] | None, *, own: bool = False
    ) -> None:
        """Take over parameters, and the state beside them when a sidecar comes along.

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
            self._mixed = True
            for target in self.algorithm.targets:
                target.fetched()
            return
        for part in self._stateful:
            part.load(sidecar)
        if own:
            for name, statistics in self._statistics.items():
                parts = (np.array(sidecar[f"{name}.{part}"]) for part in ("count", "mean", "m2"))
                count, mean, m2 = parts
                statistics.set_own(Moments(float(count), mean, m2))

    def sidecar(self) -> Arrays:
        """Return the arrays of ``sidecar_layout`` by name; some are views that ``step`` changes."""
        arrays: Arrays = {}
        for part in self._stateful:
            arrays |= part.state()
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

    def set_progress(self, fraction: float, env_steps: int = 0) -> None:
        """Set the swarm's progress.

        Args:
            fraction: 0 … 1, towards its last environment step (for annealing).
            env_steps: of all nodes together (for exploration).
        """
        self.algorithm.progress = min(max(fraction, 0.0), 1.0)
        self.algorithm.env_steps = env_steps

    def share(
        self,
        rank: int,
        learners: int,
        rate_power: float = 0.0,
        speed: float = 1.0,
        total_speed: float = 0.0,
    ) -> None:
        """Take one of the swarm's learners' part in each update.

        Args:
            rank: of this learner, from 0.
            learners: who have a part each.
            rate_power: with batches of 1/n of their length, learning rates are n to this power times those of
                the configuration. Unless it is 0, parameters are averaged, after each update: shares are then
                cut further, up to n times, so that learners are apart for a short time only; a slower
                learner's share has fewer minibatches, of as many rows as the others'; and optimizers begin
                anew with each update on parameters that were mixed, if the algorithm is configured so.
            speed: of this learner, that of the fastest one being 1. Parts are in proportion to it; with 0 its
                learning rate is 0, and what it makes short, but not cut further.
            total_speed: of all of them, the n of these rules; 0 takes all for equally fast.
        """
        algorithm, total = self.algorithm, total_speed or float(learners)
        self._speed, self._rate_power = speed, rate_power
        moves, speed = speed > 0.0, speed or LEAST_SPEED
        part = speed / total
        self._resets = algorithm.reset_optimizer and bool(rate_power) and total > 1.0
        least = RESET_MINIBATCHES if self._resets else LEAST_MINIBATCHES
        cuts = min(round(total), algorithm.minibatches // least, self.source.most_cuts(part))
        self._cuts = max(1, cuts) if rate_power and moves else 1
        algorithm.cuts = self._cuts / speed if rate_power else 1.0
        self.source.share(rank, learners, part, self._cuts)
        self._set_rate()

    def _set_rate(self) -> None:
        """Set the learning rate by how long batches are, which changes where actors' environments do."""
        moves, speed = self._speed > 0.0, self._speed or LEAST_SPEED
        whole = min(1.0, self.source.batch_share * self._cuts / speed)
        self.algorithm.rate_factor = moves * whole**-self._rate_power

    def close(self) -> None:
        """Close the source and the split engine's devices."""
        self.source.close()
        if self._split is not None:
            self._split.close()


def _moments_items(statistics: Mapping[str, RunningNormalizer]) -> list[SidecarItem]:
    items = []
    for name, normalizer in statistics.items():
        shape = normalizer.own.mean.shape
        items.append(SidecarItem(f"{name}.count", (), "float64", "moments"))
        items.append(SidecarItem(f"{name}.mean", shape, "float64", "moments"))
        items.append(SidecarItem(f"{name}.m2", shape, "float64", "moments"))
    return items
