"""Batches from a replay memory: unrolls go in raw, transitions come out scaled.

Unrolls come from the same sources as everybody's, inline or from actor processes; `ReplayFeeder` stands where
on-policy algorithms have an ``UnrollScaler``. Observations and rewards are stored as the environments gave
them and scaled when they are drawn, by what the whole swarm has counted by then.

Shape suffixes: B transitions, X the observation's own dimensions.
"""

# ruff: noqa: N815 (fields carry shape suffixes)
from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from p2pdrl.config.task import ReplayOptions
from p2pdrl.errors import LayoutMismatchError
from p2pdrl.replay.memory import ReplayLayout, ReplayMemory
from p2pdrl.replay.shards import observations_of, sample_items
from p2pdrl.rl.envs import EnvSpec
from p2pdrl.rl.normalize import CLIP, RewardScaler, RunningNormalizer
from p2pdrl.rl.rollout import RawUnroll
from p2pdrl.rl.sources.source import Batch, on_device
from p2pdrl.tensors.unroll_ring import UnrollSpec

__all__ = [
    "Replay",
    "ReplayBatch",
    "ReplayFeeder",
    "SampledRows",
    "TransitionScaler",
    "Transitions",
    "replay_layout",
    "replay_memory",
    "sample_spec",
]

Array = npt.NDArray[Any]

_BYTES_AT_ONCE = 1 << 20
"""Of observations that are drawn at once for several gradients: they stay in the cache."""
_SAMPLE_BYTES = 8 << 20
"""Of a sample that comes from shards on other nodes; one minibatch at least."""
SAMPLES_AHEAD = 4
"""Samples that wait for the learner, at most."""


@dataclass(frozen=True)
class Transitions:
    """What is drawn from the memory for one gradient, on the algorithm's device.

    Attributes:
        obs_BX: s, normalised.
        actions_B: int64 B, or float32 B x A.
        returns_B: Σ γ^i r_{t+i} over the n steps, or as many as the episode had left; scaled.
        discounts_B: γ^k of what comes after them; 0 where the episode terminated.
        next_obs_BX: the observation after them.
        weights_B: importance weights, at most 1; ones where all rows are drawn alike.
        indices_B: where the rows lie in the memory, with their ``serials_B``.
    """

    obs_BX: Tensor
    actions_B: Tensor
    returns_B: Tensor
    discounts_B: Tensor
    next_obs_BX: Tensor
    weights_B: Tensor
    indices_B: Array
    serials_B: Array

    def parts(self, rows: int) -> Iterator[Transitions]:
        """Yield them in minibatches of so many rows: views."""
        for begin in range(0, len(self.indices_B), rows):
            yield self._rows(slice(begin, begin + rows))

    def _rows(self, part: slice) -> Transitions:
        return Transitions(
            obs_BX=self.obs_BX[part],
            actions_B=self.actions_B[part],
            returns_B=self.returns_B[part],
            discounts_B=self.discounts_B[part],
            next_obs_BX=self.next_obs_BX[part],
            weights_B=self.weights_B[part],
            indices_B=self.indices_B[part],
            serials_B=self.serials_B[part],
        )


class Replay(ABC):
    """What transitions are drawn from: a memory in this process, or a sample of shards elsewhere."""

    @property
    @abstractmethod
    def stored(self) -> int:
        """Transitions that can be drawn."""

    @property
    @abstractmethod
    def full(self) -> bool:
        """Whether each new one takes the place of an old one."""

    def updates(self, wanted: int) -> int:
        """How many gradients it is for, of as many as are ``wanted`` after each unroll."""
        return wanted

    @abstractmethod
    def blocks(self, rows: int, times: int, beta: float) -> Iterator[Transitions]:
        """See `ReplayBatch.blocks`."""

    @abstractmethod
    def update_priorities(self, drawn: Transitions, errors_B: Tensor) -> None:
        """See `ReplayBatch.update_priorities`."""


@dataclass(frozen=True)
class ReplayBatch(Batch):
    """What is new, and what is drawn from now."""

    replay: Replay

    @property
    def stored(self) -> int:
        """Transitions that can be drawn."""
        return self.replay.stored

    def enough(self, least: int) -> bool:
        """Whether at least so many are `stored`, or as many as there will ever be."""
        # resets and newest steps take places too, so a full memory has fewer that can be drawn
        return self.stored >= max(least, 1) or (self.stored > 0 and self.replay.full)

    def updates(self, wanted: int) -> int:
        """How many gradients to make now, of ``gradient_steps``."""
        return self.replay.updates(wanted)

    def draw(self, rows: int, *, beta: float = 0.0) -> Transitions:
        """Draw ``rows`` transitions once; arguments and errors as in ``blocks``."""
        return next(self.blocks(rows, 1, beta=beta))

    def draws(self, rows: int, times: int, *, beta: float = 0.0) -> Iterator[Transitions]:
        """Draw ``rows`` transitions several times; arguments and errors as in ``blocks``."""
        for block in self.blocks(rows, times, beta=beta):
            yield from block.parts(rows)

    def blocks(self, rows: int, times: int, *, beta: float = 0.0) -> Iterator[Transitions]:
        """Draw ``rows`` transitions several times, and yield some such minibatches one behind the other.

        As many at once as stay in the cache; one, where priorities change in between.

        Args:
            rows: B of each minibatch, drawn with replacement.
            times: how often, 0 or more.
            beta: exponent of the importance weights (Schaul 2016, section 3.4).

        Raises:
            TensorError: nothing is `stored` yet.
        """
        return self.replay.blocks(rows, times, beta)

    def update_priorities(self, drawn: Transitions, errors_B: Tensor) -> None:
        """Set the priorities of drawn rows by their |TD errors|; no effect where all are drawn alike."""
        self.replay.update_priorities(drawn, errors_B)


def replay_layout(config: ReplayOptions, spec: EnvSpec, streams: int) -> ReplayLayout:
    """Return what a memory for so many environments is made of; it stores single frames."""
    return ReplayLayout(
        obs_shape=spec.obs_shape if spec.frame_stack == 1 else spec.obs_shape[1:],
        obs_dtype=spec.obs_dtype,
        action_shape=spec.action.shape,
        action_dtype=spec.action.dtype,
        streams=streams,
        capacity=config.buffer_size,
        frame_stack=spec.frame_stack,
        alpha=config.alpha if config.prioritized else None,
    )


def replay_memory(config: ReplayOptions, spec: EnvSpec, streams: int) -> ReplayMemory:
    """Return an empty memory for a learner with so many environments."""
    return ReplayMemory(replay_layout(config, spec, streams), n_step=config.n_step)


def sample_spec(config: ReplayOptions, spec: EnvSpec) -> UnrollSpec:
    """Return what samples from shards are made of, the same on all nodes: some minibatches."""
    items = sample_items(replay_layout(config, spec, 1), config.n_step, spec.action.choices)
    one = UnrollSpec(items, (config.batch_size,), SAMPLES_AHEAD).content_nbytes(config.batch_size)
    minibatches = min(max(_SAMPLE_BYTES // one, 1), config.gradient_steps)
    return UnrollSpec(items, (minibatches * config.batch_size,), SAMPLES_AHEAD)


class TransitionScaler:
    """Makes transitions of raw rows: scaled by what the whole swarm has counted, on the algorithm's device.

    Args:
        device: where the algorithm wants them.
        normalizer: of observations; None leaves them as they are.
        reward_scaler: of rewards; None likewise.
        n_step: rewards that a return has at most; as one alone is cut at ±10, it is at so many times that.
    """

    def __init__(
        self,
        device: torch.device,
        normalizer: RunningNormalizer | None = None,
        reward_scaler: RewardScaler | None = None,
        n_step: int = 1,
    ) -> None:
        self.device = device
        self._bound = n_step * CLIP
        self.normalizer = normalizer
        self.reward_scaler = reward_scaler

    def scaled(self, returns_N: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return what raw returns are as the algorithm sees them."""
        if self.reward_scaler is None:
            return returns_N
        scaled_N = returns_N * np.float32(self.reward_scaler.statistics.in_use[1])
        return np.clip(scaled_N, -self._bound, self._bound, out=scaled_N)

    def transitions(
        self,
        *,
        obs_NX: Array,
        actions_N: Array,
        returns_N: npt.NDArray[np.float32],
        discounts_N: Array,
        next_obs_NX: Array,
        weights_N: Array,
        indices_N: Array,
        serials_N: Array,
    ) -> Transitions:
        """Return N rows, all raw, as transitions."""
        return Transitions(
            obs_BX=self._observations(obs_NX),
            actions_B=self._tensor(actions_N),
            returns_B=self._tensor(self.scaled(returns_N)),
            discounts_B=self._tensor(discounts_N),
            next_obs_BX=self._observations(next_obs_NX),
            weights_B=self._tensor(weights_N),
            indices_B=indices_N,
            serials_B=serials_N,
        )

    def _observations(self, obs_BX: Array) -> Tensor:
        return self._tensor(obs_BX if self.normalizer is None else self.normalizer.normalize(obs_BX))

    def _tensor(self, array: Array) -> Tensor:
        return on_device(torch.from_numpy(array), self.device)


class ReplayFeeder(Replay):
    """Appends unrolls to a replay memory, and draws from it.

    Args:
        scaler: of what is drawn.
        discount: γ.
        seed: of what is drawn.
        samples: what is drawn for learners elsewhere is made of.
    """

    def __init__(
        self,
        memory: ReplayMemory,
        scaler: TransitionScaler,
        *,
        discount: float,
        seed: int,
        samples: UnrollSpec | None = None,
    ) -> None:
        self.memory = memory
        self._samples = samples
        self.scaler = scaler
        self.discount = discount
        self._rng = np.random.default_rng(seed)
        self._taken_nS = np.full((memory.n_step - 1, memory.layout.streams), np.nan)

    @property
    def samples(self) -> UnrollSpec:
        """What samples for learners elsewhere are made of.

        Raises:
            LayoutMismatchError: there are to be none.
        """
        if self._samples is None:
            raise LayoutMismatchError("nothing is drawn here for learners elsewhere")
        return self._samples

    @property
    def stored(self) -> int:
        """Transitions in the memory that can be drawn."""
        return self.memory.count

    @property
    def full(self) -> bool:
        """Whether each new row takes the place of an old one."""
        return self.memory.full

    def keep(self, buffer: memoryview) -> bool:
        """Keep rows in ``buffer`` from now on, and go on with those that lie there already.

        Those of the memory so far are forgotten: to be called before the first unroll.

        Args:
            buffer: at least ``memory.layout.nbytes`` bytes, writable; zeros, or what another process left.

        Returns:
            Whether what lay there could be taken up; rows of another layout are wiped.
        """
        layout, n_step = self.memory.layout, self.memory.n_step
        try:
            self.memory = ReplayMemory(layout, n_step=n_step, buffer=buffer)
        except LayoutMismatchError:
            np.frombuffer(buffer, np.uint8)[:] = 0
            self.memory = ReplayMemory(layout, n_step=n_step, buffer=buffer)
            return False
        return True

    def read(self, raw: RawUnroll) -> ReplayBatch:
        """Append an unroll, and count it."""
        stacked = self.memory.layout.frame_stack > 1
        columns_B = np.arange(raw.rewards_TB.shape[1]) if raw.columns_B is None else np.asarray(raw.columns_B)
        had_B = self.memory.rows_of(columns_B)
        self.memory.append(
            raw.obs_T1BX[:, :, -1] if stacked else raw.obs_T1BX,
            raw.actions.numpy(force=True),
            raw.rewards_TB,
            terminated_TB=raw.terminated_TB,
            truncated_TB=raw.truncated_TB,
            valid_TB=raw.valid_TB,
            columns_B=raw.columns_B,
            restarts_B=raw.restarts_B,
        )
        if raw.taken_TB is not None and self.memory.layout.alpha is not None:
            went_on_B = self.memory.rows_of(columns_B) == had_B + len(raw.rewards_TB)
            self._first_priorities(raw, raw.taken_TB.numpy(force=True), columns_B, went_on_B)
        scaler = self.scaler
        if scaler.normalizer is not None:
            scaler.normalizer.update(raw.obs_T1BX[:-1][raw.valid_TB])
        if scaler.reward_scaler is not None:
            ends_TB = raw.terminated_TB | raw.truncated_TB
            scaler.reward_scaler.scale(
                raw.rewards_TB, ends_TB, raw.valid_TB, columns_B=raw.columns_B, restarts_B=raw.restarts_B
            )
        return ReplayBatch(int(raw.valid_TB.sum()), raw.episodes, self)

    def _first_priorities(self, raw: RawUnroll, taken_TB: Array, columns_B: Array, went_on_B: Array) -> None:
        """Give rows whose n steps are there by now the priorities that their actor's values tell.

        δ = R + γ^k V(s_{t+k}) − Q(s_t, a_t), as the learner's at equal parameters (Horgan 2018, section 3): R
        of rewards as they are scaled now, V the value of the best action. Rows of the unroll before, whose
        steps reach into this one, are among them; rows that wait for the next keep the greatest priority.

        Args:
            went_on_B: whether nothing is missing between the unroll before and this one.
        """
        memory, n = self.memory, self.memory.n_step
        T = len(taken_TB)
        before_nB = np.where(went_on_B, self._taken_nS[:, columns_B], np.nan)
        taken_RB = np.concatenate((before_nB, taken_TB))  # rows of time −(n − 1) … T − 1
        self._taken_nS[:, columns_B] = taken_RB[T:]
        row_N, column_N = np.nonzero(~np.isnan(taken_RB))
        rows = memory.newest(columns_B[column_N], T + n - 1 - row_N, discount=self.discount)
        behind_N = row_N - (n - 1) + rows.lengths_N  # the time of s_{t+k} in this unroll
        here_N = rows.eligible_N & (behind_N > 0)
        values_N = raw.values_T1B.numpy(force=True)[np.clip(behind_N, 0, T), column_N]
        errors_N = (
            self.scaler.scaled(rows.returns_N) + rows.discounts_N * values_N - taken_RB[row_N, column_N]
        )
        self._set_priorities(rows.indices_N[here_N], rows.serials_N[here_N], errors_N[here_N])

    def draw(self, rows: int, beta: float = 0.0, *, times: int = 1) -> Transitions:
        """Draw ``rows`` transitions; ``times`` one behind the other, where all rows are drawn alike.

        Raises:
            TensorError: nothing is `stored` yet.
        """
        found = self.memory.sample(rows, self._rng, discount=self.discount, beta=beta, times=times)
        return self.scaler.transitions(
            obs_NX=found.obs_NX,
            actions_N=found.actions,
            returns_N=found.returns_N,
            discounts_N=found.discounts_N,
            next_obs_NX=found.next_obs_NX,
            weights_N=found.weights_N,
            indices_N=found.indices_N,
            serials_N=found.serials_N,
        )

    def blocks(self, rows: int, times: int, beta: float) -> Iterator[Transitions]:
        """See `ReplayBatch.blocks`."""
        layout = self.memory.layout
        row_bytes = 2 * math.prod(layout.sampled_shape) * np.dtype(layout.obs_dtype).itemsize
        at_once = 1 if layout.alpha is not None else max(1, _BYTES_AT_ONCE // (rows * row_bytes))
        for begin in range(0, times, at_once):
            yield self.draw(rows, beta, times=min(at_once, times - begin))

    def update_priorities(self, drawn: Transitions, errors_B: Tensor) -> None:
        """See `ReplayBatch.update_priorities`."""
        if self.memory.layout.alpha is not None:
            self._set_priorities(drawn.indices_B, drawn.serials_B, errors_B.numpy(force=True))

    def _set_priorities(self, indices_N: Array, serials_N: Array, errors_N: Array) -> None:
        """Set priorities by errors; a row whose error isn't finite has the least, lest it is drawn on."""
        errors_N = np.where(np.isfinite(errors_N), errors_N, 0.0)
        self.memory.update_priorities(indices_N, serials_N, errors_N)


class SampledRows(Replay):
    """Rows that were drawn from shards on other nodes: each is used once.

    Args:
        arrays: of `replay.shards.sample_items`; ``chances`` are N·P(i), 1 where all rows are drawn alike.
        stored: rows of all shards that could be drawn.
        layout: of one shard.
        rng: of the order in which they are used: those of one shard lie side by side.
        minibatches: that they are for.

    Attributes:
        errors_N: TD errors of the rows as they lie in ``arrays``, NaN where none was computed.
    """

    def __init__(
        self,
        arrays: Mapping[str, Array],
        stored: int,
        layout: ReplayLayout,
        scaler: TransitionScaler,
        *,
        rng: np.random.Generator,
        minibatches: int,
    ) -> None:
        self._arrays = arrays
        self._stored = stored
        self._layout = layout
        self._scaler = scaler
        self._order_N = rng.permutation(len(arrays["returns"]))
        self._minibatches = minibatches
        self.errors_N = np.full(len(self._order_N), np.nan, np.float32)

    @property
    def stored(self) -> int:
        """Rows of all shards that could be drawn."""
        return self._stored

    @property
    def full(self) -> bool:
        """Always: nothing is drawn before there are enough."""
        return True

    def updates(self, wanted: int) -> int:
        """As many as there are rows for: the next sample is for further ones."""
        return min(wanted, self._minibatches)

    def blocks(self, rows: int, times: int, beta: float) -> Iterator[Transitions]:
        """See `ReplayBatch.blocks`; fewer where rows run out."""
        arrays = self._arrays
        obs_NX, next_obs_NX = observations_of(arrays, self._layout.stack_axis)
        for number in range(min(times, len(self._order_N) // rows)):
            part_B = self._order_N[number * rows : (number + 1) * rows]
            weights_B = np.power(arrays["chances"][part_B], -beta)
            yield self._scaler.transitions(
                obs_NX=obs_NX[part_B],
                actions_N=arrays["actions"][part_B],
                returns_N=arrays["returns"][part_B],
                discounts_N=arrays["discounts"][part_B],
                next_obs_NX=next_obs_NX[part_B],
                weights_N=(weights_B / weights_B.max()).astype(np.float32),
                indices_N=part_B,
                serials_N=part_B,
            )

    def update_priorities(self, drawn: Transitions, errors_B: Tensor) -> None:
        """Note them: they go back to the shards with the next sample."""
        self.errors_N[drawn.indices_B] = errors_B.numpy(force=True)
