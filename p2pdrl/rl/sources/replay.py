"""Batches from a replay memory: unrolls go in raw, transitions come out scaled.

Unrolls come from the same sources as everybody's, inline or from actor processes; `ReplayFeeder` stands where
on-policy algorithms have an ``UnrollScaler``. Observations and rewards are stored as the environments gave
them and scaled when they are drawn, by what the whole swarm has counted by then.

Shape suffixes: B transitions, X the observation's own dimensions.
"""

# ruff: noqa: N815 (fields carry shape suffixes)
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from p2pdrl.config.task import ReplayOptions
from p2pdrl.errors import LayoutMismatchError
from p2pdrl.replay.memory import ReplayLayout, ReplayMemory
from p2pdrl.rl.envs import EnvSpec
from p2pdrl.rl.normalize import RewardScaler, RunningNormalizer
from p2pdrl.rl.rollout import RawUnroll
from p2pdrl.rl.sources.source import Batch, on_device

__all__ = ["ReplayBatch", "ReplayFeeder", "Transitions", "replay_memory"]

Array = npt.NDArray[Any]

_BYTES_AT_ONCE = 1 << 20
"""Of observations that are drawn at once for several gradients: they stay in the cache."""


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


@dataclass(frozen=True)
class ReplayBatch(Batch):
    """What is new, and the memory that it went into."""

    feeder: ReplayFeeder

    @property
    def stored(self) -> int:
        """Transitions in the memory that can be drawn."""
        return self.feeder.memory.count

    def enough(self, least: int) -> bool:
        """Whether at least so many are `stored`, or as many as there will ever be."""
        # resets and newest steps take places too, so a full memory has fewer that can be drawn
        return self.stored >= max(least, 1) or (self.stored > 0 and self.feeder.memory.full)

    def draw(self, rows: int, *, beta: float = 0.0) -> Transitions:
        """Draw ``rows`` transitions, with replacement.

        Args:
            rows: B.
            beta: exponent of the importance weights (Schaul 2016, section 3.4).

        Raises:
            TensorError: nothing is `stored` yet.
        """
        return self.feeder.draw(rows, beta)

    def draws(self, rows: int, times: int, *, beta: float = 0.0) -> Iterator[Transitions]:
        """Draw ``rows`` transitions several times; arguments and errors as in ``blocks``."""
        for block in self.blocks(rows, times, beta=beta):
            yield from block.parts(rows)

    def blocks(self, rows: int, times: int, *, beta: float = 0.0) -> Iterator[Transitions]:
        """Draw ``rows`` transitions several times, and yield some such minibatches one behind the other.

        As many at once as stay in the cache; one, where priorities change in between.

        Args:
            times: how often, 0 or more.
            beta: as in ``draw``, like what it raises.
        """
        return self.feeder.blocks(rows, times, beta)

    def update_priorities(self, drawn: Transitions, errors_B: Tensor) -> None:
        """Set the priorities of drawn rows by their |TD errors|; no effect where all are drawn alike."""
        self.feeder.update_priorities(drawn, errors_B)


def replay_memory(config: ReplayOptions, spec: EnvSpec, streams: int) -> ReplayMemory:
    """Return an empty memory for a learner with so many environments; it stores single frames."""
    layout = ReplayLayout(
        obs_shape=spec.obs_shape if spec.frame_stack == 1 else spec.obs_shape[1:],
        obs_dtype=spec.obs_dtype,
        action_shape=spec.action.shape,
        action_dtype=spec.action.dtype,
        streams=streams,
        capacity=config.buffer_size,
        frame_stack=spec.frame_stack,
        alpha=config.alpha if config.prioritized else None,
    )
    return ReplayMemory(layout, n_step=config.n_step)


class ReplayFeeder:
    """Appends unrolls to a replay memory, and draws from it.

    Args:
        device: where the algorithm wants its transitions.
        discount: γ.
        seed: of what is drawn.
        normalizer: of observations; None leaves them as they are.
        reward_scaler: of rewards; None likewise.
    """

    def __init__(
        self,
        memory: ReplayMemory,
        device: torch.device,
        *,
        discount: float,
        seed: int,
        normalizer: RunningNormalizer | None = None,
        reward_scaler: RewardScaler | None = None,
    ) -> None:
        self.memory = memory
        self._device = device
        self._discount = discount
        self._rng = np.random.default_rng(seed)
        self._normalizer = normalizer
        self._reward_scaler = reward_scaler

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
        if self._normalizer is not None:
            self._normalizer.update(raw.obs_T1BX[:-1][raw.valid_TB])
        if self._reward_scaler is not None:
            ends_TB = raw.terminated_TB | raw.truncated_TB
            self._reward_scaler.scale(
                raw.rewards_TB, ends_TB, raw.valid_TB, columns_B=raw.columns_B, restarts_B=raw.restarts_B
            )
        return ReplayBatch(int(raw.valid_TB.sum()), raw.episodes, self)

    def draw(self, rows: int, beta: float, *, times: int = 1) -> Transitions:
        """See ``ReplayBatch.draw``; ``times`` draws one behind the other, where all rows are drawn alike."""
        found = self.memory.sample(rows, self._rng, discount=self._discount, beta=beta, times=times)
        returns_B = found.returns_N
        if self._reward_scaler is not None:
            returns_B = returns_B * np.float32(self._reward_scaler.statistics.in_use[1])
        return Transitions(
            obs_BX=self._observations(found.obs_NX),
            actions_B=self._tensor(found.actions),
            returns_B=self._tensor(returns_B),
            discounts_B=self._tensor(found.discounts_N),
            next_obs_BX=self._observations(found.next_obs_NX),
            weights_B=self._tensor(found.weights_N),
            indices_B=found.indices_N,
            serials_B=found.serials_N,
        )

    def blocks(self, rows: int, times: int, beta: float) -> Iterator[Transitions]:
        """See ``ReplayBatch.blocks``."""
        layout = self.memory.layout
        row_bytes = 2 * math.prod(layout.sampled_shape) * np.dtype(layout.obs_dtype).itemsize
        at_once = 1 if layout.alpha is not None else max(1, _BYTES_AT_ONCE // (rows * row_bytes))
        for begin in range(0, times, at_once):
            yield self.draw(rows, beta, times=min(at_once, times - begin))

    def update_priorities(self, drawn: Transitions, errors_B: Tensor) -> None:
        """See ``ReplayBatch.update_priorities``."""
        if self.memory.layout.alpha is not None:
            self.memory.update_priorities(drawn.indices_B, drawn.serials_B, errors_B.numpy(force=True))

    def _observations(self, obs_BX: Array) -> Tensor:
        return self._tensor(obs_BX if self._normalizer is None else self._normalizer.normalize(obs_BX))

    def _tensor(self, array: Array) -> Tensor:
        return on_device(torch.from_numpy(array), self._device)
