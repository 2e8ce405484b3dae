"""Rows of a made-up data set: what a regression learns from.

The data are the same on every node that is given the same seed; batches are drawn at random or taken in
sequence, of all rows or of those in a learner's shards.

Shape suffixes: R rows, F features, C classes, B rows of a batch.
"""

# ruff: noqa: N815 (fields carry shape suffixes)
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from p2pdrl.config.task import RegressionConfig
from p2pdrl.errors import LayoutMismatchError
from p2pdrl.rl.optimizers import MAX_COUNT
from p2pdrl.rl.sources.source import Batch, Source
from p2pdrl.tensors.sidecar import SidecarItem

__all__ = [
    "EVALUATION_ROWS",
    "DataRows",
    "RowBatch",
    "RowSource",
    "make_rows",
    "sequence_batch",
    "shard_batch",
]


EVALUATION_ROWS = 1024
"""The most rows that are kept for the evaluation."""


@dataclass(frozen=True)
class DataRows:
    """Inputs with their targets.

    Attributes:
        inputs_RF: float32.
        targets_R: float32 of ``least_squares``, int64 class numbers of ``classifier``.
    """

    inputs_RF: npt.NDArray[np.float32]
    targets_R: npt.NDArray[Any]


def make_rows(config: RegressionConfig, seed: int) -> tuple[DataRows, DataRows]:
    """Draw the rows to train on, and those to evaluate on.

    ``least_squares``: x from N(0, 1), kept with probability ``density``, else 0; y = x·w* + noise, with w*
    so that x·w* has deviation 1. The evaluation's targets are without noise: its loss is half the squared
    distance from w* (where x has unit covariance), zero at the truth.
    ``classifier``: a centre for each class at distance 1 from the origin, x = centre + noise.
    """
    rng = np.random.default_rng(seed)
    size = (config.rows, min(config.rows, EVALUATION_ROWS))
    if config.kind == "classifier":
        centres_CF = rng.standard_normal((config.classes, config.features), dtype=np.float32)
        centres_CF /= np.linalg.norm(centres_CF, axis=1, keepdims=True)
        return _clusters(config, centres_CF, size[0], rng), _clusters(config, centres_CF, size[1], rng)
    truth_F = rng.standard_normal(config.features, dtype=np.float32)
    truth_F /= np.float32(np.sqrt(config.features * config.density))
    train = _linear(config, truth_F, size[0], rng)
    noise_R = rng.standard_normal(size[0], dtype=np.float32) * np.float32(config.noise)
    return DataRows(train.inputs_RF, train.targets_R + noise_R), _linear(config, truth_F, size[1], rng)


def _linear(
    config: RegressionConfig, truth_F: npt.NDArray[np.float32], rows: int, rng: np.random.Generator
) -> DataRows:
    inputs_RF = rng.standard_normal((rows, config.features), dtype=np.float32)
    if config.density < 1.0:
        inputs_RF *= rng.random((rows, config.features), dtype=np.float32) < config.density
    return DataRows(inputs_RF, inputs_RF @ truth_F)


def _clusters(
    config: RegressionConfig, centres_CF: npt.NDArray[np.float32], rows: int, rng: np.random.Generator
) -> DataRows:
    labels_R = rng.integers(config.classes, size=rows)
    noise_RF = rng.standard_normal((rows, config.features), dtype=np.float32)
    return DataRows(centres_CF[labels_R] + noise_RF * np.float32(config.noise), labels_R)


def sequence_batch(config: RegressionConfig, seed: int, update: int) -> npt.NDArray[np.int64]:
    """Return the rows, by number, of one batch of ``sample = "sequence"``.

    Batch k = ``update`` · ``workers`` + ``seed`` mod ``workers`` holds rows k·B … k·B + B − 1, modulo R. So
    the batches of n workers with seeds 0 … n − 1 in one update, put together, are the batch of a single
    worker (``workers = 1``) with n·B rows in the same update.

    Args:
        config: the task's.
        seed: of the learner.
        update: how many updates came before.
    """
    batch = update * config.workers + seed % config.workers
    numbers_B = np.arange(config.batch_size, dtype=np.int64)
    return (batch * config.batch_size % config.rows + numbers_B) % config.rows


def shard_batch(config: RegressionConfig, rank: int, learners: int, update: int) -> npt.NDArray[np.int64]:
    """Return the rows, by number, of one batch of ``sample = "shards"``.

    Shard k of M holds rows ⌊k·R/M⌋ … ⌊(k + 1)·R/M⌋ − 1, whose number is m_k; its batch of the update has the
    next B of them, (update · B + 0 … B − 1) mod m_k, or all if B ≥ m_k. A learner's batch is those of its
    shards put together, k = rank, rank + n, …, and may be empty. So in one update the batches of n learners
    are disjoint, and together the same for every n.

    Args:
        config: the task's.
        rank: of the learner, from 0.
        learners: n.
        update: how many updates came before.
    """
    size = config.batch_size
    parts = [np.empty(0, dtype=np.int64)]
    for shard in range(rank, config.shards, learners):
        first, end = (number * config.rows // config.shards for number in (shard, shard + 1))
        rows = end - first
        numbers = np.arange(min(size, rows), dtype=np.int64)
        parts.append(first + (numbers if size >= rows else (update * size % rows + numbers) % rows))
    return np.concatenate(parts)


UPDATES = "regression.updates"


@dataclass(frozen=True)
class RowBatch(Batch):
    """Inputs with their targets; a row counts as an environment step."""

    inputs_BF: Tensor
    targets_B: Tensor


class RowSource(Source[RowBatch]):
    """Draws batches of a regression's rows; its position is the number of updates made.

    Args:
        seed: of this learner's batches.
    """

    def __init__(self, config: RegressionConfig, seed: int, rows: DataRows, device: torch.device) -> None:
        self._config = config
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._updates = 0
        self._share = (0, 1)
        self.inputs_RF = torch.from_numpy(rows.inputs_RF).to(device)
        self.targets_R = torch.from_numpy(rows.targets_R).to(device)

    def next(self) -> RowBatch:
        """Draw a batch."""
        rows_B = torch.from_numpy(self._numbers())
        return RowBatch(len(rows_B), [], self.inputs_RF[rows_B], self.targets_R[rows_B])

    def _numbers(self) -> npt.NDArray[np.int64]:
        config = self._config
        if config.sample == "sequence":
            return sequence_batch(config, self._seed, self._updates)
        if config.sample == "shards":
            return shard_batch(config, *self._share, self._updates)
        return self._rng.integers(config.rows, size=config.batch_size)

    def share(self, rank: int, learners: int, part: float, cuts: int = 1) -> None:
        """See ``Source.share``; only shards are shared so. Each makes a whole batch."""
        del part, cuts
        self._share = rank, learners

    def metrics(self) -> dict[str, float]:
        """See ``Source.metrics``: how many shards are this learner's."""
        if self._config.sample != "shards":
            return {}
        return {"shards": float(len(range(self._share[0], self._config.shards, self._share[1])))}

    def commit(self) -> None:
        """Advance to the next batch of the sequence."""
        self._updates += 1

    @property
    def position(self) -> int:
        """Updates made, which is the position in the sequence."""
        return self._updates

    @position.setter
    def position(self, position: int) -> None:
        self._updates = min(max(position, 0), MAX_COUNT)

    def items(self) -> tuple[SidecarItem, ...]:
        """See ``Source.items``."""
        return (SidecarItem(UPDATES, (), "int64", "copy"),)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """See ``Source.state``."""
        return {UPDATES: np.array(self._updates, dtype=np.int64)}

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """See ``Source.load``."""
        updates = arrays.get(UPDATES)
        if updates is None or updates.shape != ():
            raise LayoutMismatchError(f"{UPDATES} should be one number")
        self.position = int(updates)
