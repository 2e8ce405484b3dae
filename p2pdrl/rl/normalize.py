"""Running normalisation of observations and rewards.

``rollout`` feeds and applies them, ``trainer`` carries their counters to and from the swarm. Each learner
counts only what it saw itself (``own``); what the others counted arrives from outside (``set_others``)
and is never folded into ``own``, so that a repeated merge can't count anything twice.

Shape suffixes: T unroll, B environments, X the observation's own dimensions, N rows of a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import ConfigError
from p2pdrl.rl.envs import EnvSpec
from p2pdrl.tensors.moments import Moments

__all__ = ["CLIP", "EntryNormalizer", "RewardScaler", "RunningNormalizer", "observation_normalizer"]

Array = npt.NDArray[Any]

CLIP = 10.0
"""Normalised values beyond this are cut, as in OpenAI's baselines."""


class RunningNormalizer:
    """Shifts and scales by the mean and deviation of everything seen so far, here and elsewhere (float64).

    Until two rows have been seen it changes nothing (but clips).

    Args:
        shape: of one row; ``()`` for scalars.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._own = Moments.zeros(shape)
        self._others: Moments | None = None
        self._mean = np.zeros(shape)
        self._scale = np.ones(shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is counted."""
        return self._shape

    @property
    def own(self) -> Moments:
        """Cumulative counters of what this learner saw itself."""
        return self._own

    def update(self, rows_NX: Array) -> None:
        """Count a batch of rows."""
        if len(rows_NX):
            self._own.update(rows_NX)
            self._refresh()

    def set_own(self, moments: Moments) -> None:
        """Continue counting from a saved state, after a restart."""
        self._own = moments
        self._refresh()

    def set_others(self, moments: Moments) -> None:
        """Replace what all other nodes counted, merged to one."""
        self._others = moments
        self._refresh()

    def use(self, mean: Array, scale: Array) -> None:
        """Normalise by moments that a learner has merged; for actors, which don't count."""
        self._mean, self._scale = mean, scale

    @property
    def in_use(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The mean that is subtracted, and 1 / deviation."""
        return self._mean, self._scale

    def normalize(self, x: Array) -> Array:
        """Return (x − mean) / deviation (float32), cut at ±10; ``x`` may have any leading dimensions."""
        return np.clip((x - self._mean) * self._scale, -CLIP, CLIP).astype(np.float32)

    def scale(self, x: Array) -> npt.NDArray[np.float32]:
        """Return x / deviation, cut at ±10: for rewards, whose sign and zero must stay."""
        return np.clip(x * self._scale, -CLIP, CLIP).astype(np.float32)

    def _refresh(self) -> None:
        merged = self._own if self._others is None else Moments.merge([self._own, self._others])
        found = merged.standardization
        if found is not None:
            self._mean, self._scale = found


class EntryNormalizer(RunningNormalizer):
    """Shifts and scales the numbers of float32 that rows of bytes begin with; see `observations`.

    Args:
        floats: F, of them.
    """

    def __init__(self, floats: int) -> None:
        super().__init__((floats,))
        self._nbytes = 4 * floats

    def _floats(self, rows: Array) -> Array:
        return rows[..., : self._nbytes].view(np.float32)

    def update(self, rows_NX: Array) -> None:
        """Count a batch of rows."""
        super().update(self._floats(rows_NX))

    def normalize(self, x: Array) -> Array:
        """Return rows (uint8) whose numbers are (x − mean) / deviation, cut at ±10; all else as it is."""
        rows = x.copy()
        floats = self._floats(rows)
        floats[...] = super().normalize(floats)
        return rows


def observation_normalizer(spec: EnvSpec) -> RunningNormalizer:
    """Return a normaliser of observations.

    Raises:
        ConfigError: there is nothing in them to be normalised.
    """
    key = "env.normalize_observations"
    if spec.layout is not None:
        if not spec.layout.floats:
            raise ConfigError(f"{key} is for vectors of floats; there are none in this environment's entries")
        return EntryNormalizer(spec.layout.floats)
    if spec.is_image and (spec.obs_dtype != "float32" or spec.obs_most != 1.0):
        raise ConfigError(f"{key} is for vectors; images are scaled to 0…1 anyway")
    return RunningNormalizer(spec.obs_shape)


class RewardScaler:
    """Divides rewards by the running deviation of the discounted return (Engstrom 2020, arXiv 2005.12729).

    Args:
        num_envs: B.
        discount: γ of the return R ← γ R + r whose deviation is taken.

    Attributes:
        statistics: of R.
    """

    def __init__(self, num_envs: int, discount: float) -> None:
        self.statistics = RunningNormalizer(())
        self._discount = discount
        self._returns_B = np.zeros(num_envs)

    def scale(
        self,
        rewards_TB: Array,
        ends_TB: Array,
        valid_TB: Array,
        *,
        columns_B: Array | None = None,
        restarts_B: Array | None = None,
    ) -> npt.NDArray[np.float32]:
        """Count an unroll's returns, then return its rewards scaled.

        Args:
            rewards_TB: raw.
            ends_TB: whether the episode ended with the step.
            valid_TB: false where the step was a reset.
            columns_B: which of the environments these are; None means all.
            restarts_B: environments whose returns begin at zero here; None means none.
        """
        returns_B = self._returns_B if columns_B is None else self._returns_B[columns_B]
        if restarts_B is not None:
            returns_B = np.where(restarts_B, 0.0, returns_B)
        returns_TB = np.empty(rewards_TB.shape)
        for t, rewards_B in enumerate(rewards_TB):
            returns_B = self._discount * returns_B + rewards_B
            returns_TB[t] = returns_B
            returns_B[ends_TB[t]] = 0.0
        if columns_B is None:
            self._returns_B = returns_B
        else:
            self._returns_B[columns_B] = returns_B
        self.statistics.update(returns_TB[valid_TB])
        return self.statistics.scale(rewards_TB)
