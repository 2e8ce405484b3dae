"""Rows of a data set, drawn at random or taken in sequence: what a regression learns from.

Shape suffixes: R rows, F features, B rows of a batch.
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
from p2pdrl.rl.regression_data import DataRows, sequence_batch
from p2pdrl.rl.sources.source import Batch, Source
from p2pdrl.tensors.sidecar import SidecarItem

__all__ = ["RowBatch", "RowSource"]

UPDATES = "regression.updates"


@dataclass(frozen=True)
class RowBatch(Batch):
    """Inputs with their targets; a row counts as an environment step."""

    inputs_BF: Tensor
    targets_B: Tensor


class RowSource(Source[RowBatch]):
    """Draws batches of a regression's rows; its place is the number of updates made.

    Args:
        config: how rows are drawn.
        seed: of this learner's batches.
        rows: to draw from.
        device: where batches are to be.

    Attributes:
        inputs_RF: of all rows.
        targets_R: likewise.
    """

    def __init__(self, config: RegressionConfig, seed: int, rows: DataRows, device: torch.device) -> None:
        self._config = config
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._updates = 0
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
        return self._rng.integers(config.rows, size=config.batch_size)

    def commit(self) -> None:
        """Go on to the next batch of the sequence."""
        self._updates += 1

    @property
    def place(self) -> int:
        """Updates made, which is the place in the sequence."""
        return self._updates

    @place.setter
    def place(self, place: int) -> None:
        self._updates = min(max(place, 0), MAX_COUNT)

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
        self.place = int(updates)
