"""One replay memory in several shards, each on a node of its own: a batch is drawn from them as from one.

    shard k ──mass M_k = Σ p^α, count──► learner: n_k ~ multinomial(N, q), q_k = M_k / Σ M
            ◄──n_k──                              ──► N rows, each with its chance P(i) = q_k p_i^α / M_k

Row i of shard k has the chance that it would have in one memory of all rows. A shard's mass may have moved by
the time that it draws: then P(i) is what the chance really was, with the share q_k that the learner drew by
and the mass M_k that the shard drew by, so importance weights (N P)^−β stay right (Schaul 2016, arXiv
1511.05952, section 3.4; replay apart from learner and actors: Horgan 2018, arXiv 1803.00933).

Samples travel as the arrays of `sample_items`, raw, rows first; what comes back are `PRIORITIES`.

Shape suffixes: N rows of a sample, X the observation's own dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pdrl.replay.memory import MAX_FRAMES, ReplayLayout, ReplaySample
from p2pdrl.replay.sum_tree import Float64Array
from p2pdrl.tensors.unroll_ring import ENVIRONMENTS, UnrollItem, UnrollSpec

__all__ = [
    "ERRORS",
    "PRIORITIES",
    "InsertLimiter",
    "ReplayShards",
    "ShardState",
    "observations_of",
    "pack_sample",
    "sample_items",
]

Array = npt.NDArray[Any]

ROWS = ENVIRONMENTS
"""Stands for N in a shape."""
PRIORITIES = UnrollSpec(
    (
        UnrollItem("indices", "int64", (ROWS,)),
        UnrollItem("serials", "int64", (ROWS,)),
        UnrollItem("errors", "float32", (ROWS,)),
    ),
    shares=(1,),
    slots=1,
)
"""TD errors of rows, on their way back to the shard that they are of."""
ERRORS = (UnrollItem("errors", "float32", (ROWS,)),)
"""The same on their way from the learner to its daemon: of a whole sample, NaN where none was computed."""


def sample_items(layout: ReplayLayout, n_step: int, choices: int = 0) -> tuple[UnrollItem, ...]:
    """Return the arrays of N rows; frames that both observations of a row show are there once.

    Args:
        choices: of discrete actions; 0 for others.
    """
    if _frames_once(layout, n_step):
        stacked = layout.stacked(layout.frame_stack + 1)
        observations = [UnrollItem("both", layout.obs_dtype, (ROWS, *stacked))]
    else:
        shape = (ROWS, *layout.sampled_shape)
        observations = [UnrollItem(name, layout.obs_dtype, shape) for name in ("obs", "next_obs")]
    return (
        *observations,
        UnrollItem("actions", layout.action_dtype, (ROWS, *layout.action_shape), choices),
        UnrollItem("returns", "float32", (ROWS,)),
        UnrollItem("discounts", "float32", (ROWS,)),
        UnrollItem("indices", "int64", (ROWS,)),
        UnrollItem("serials", "int64", (ROWS,)),
        UnrollItem("chances", "float64", (ROWS,)),
    )


def _frames_once(layout: ReplayLayout, n_step: int) -> bool:
    return n_step == 1 and 1 < layout.frame_stack < MAX_FRAMES


def pack_sample(sample: ReplaySample, mass: float, arrays: Mapping[str, Array]) -> None:
    """Copy a sample into the arrays of `sample_items`; ``chances`` are those within this shard.

    Args:
        mass: Σ p^α over all rows of the shard, as it was when the sample was drawn.
    """
    if "both" in arrays:
        np.copyto(arrays["both"], sample.both_NX)  # type: ignore[arg-type]
    else:
        np.copyto(arrays["obs"], sample.obs_NX)
        np.copyto(arrays["next_obs"], sample.next_obs_NX)
    np.copyto(arrays["actions"], sample.actions)
    np.copyto(arrays["returns"], sample.returns_N)
    np.copyto(arrays["discounts"], sample.discounts_N)
    np.copyto(arrays["indices"], sample.indices_N)
    np.copyto(arrays["serials"], sample.serials_N)
    np.divide(sample.masses_N, mass, out=arrays["chances"])


def observations_of(arrays: Mapping[str, Array], stack_axis: int) -> tuple[Array, Array]:
    """Return observations and next observations, NX, of a sample's arrays: views."""
    if "obs" in arrays:
        return arrays["obs"], arrays["next_obs"]
    both_NX = arrays["both"]
    last = both_NX.ndim - 1 if stack_axis == -1 else 1
    earlier, later = ((slice(None),) * last + (part,) for part in (slice(None, -1), slice(1, None)))
    return both_NX[earlier], both_NX[later]


@dataclass(frozen=True)
class ShardState:
    """What a shard tells of itself.

    Args:
        boot: of its node; rows of an earlier one are gone.
        mass: Σ p^α over the rows that may be drawn; their count, where all are drawn alike.
        count: how many these are.
        appended: rows that ever came.
        full: whether each new row takes the place of an old one.
    """

    boot: int
    mass: float
    count: int
    appended: int
    full: bool


class InsertLimiter:
    """Has those who act wait for those who learn: rows come only while enough are drawn for them.

    As Reverb's rate limiter (Cassirer 2021, arXiv 2102.04736, section 3.2), one side of it; the other is the
    learner's (`node.experience.sampler`). Rows that learners couldn't draw any more, as one died, would hold
    everybody up for ever: after `FORGET_S` without a draw what is missing is forgotten.

    Args:
        samples_per_insert: rows to be drawn for each that comes; 0 never has anybody wait.
        ahead: rows that may come before any is drawn.
        slack: rows drawn that may be missing.
    """

    FORGET_S = 1.0

    def __init__(self, samples_per_insert: float, *, ahead: int, slack: int) -> None:
        self._per_insert = samples_per_insert
        self._ahead = float(ahead)
        self._slack = slack
        self._missing = 0.0
        self._drawn_s: float | None = None

    def may_insert(self, now_s: float) -> bool:
        """Whether rows may come."""
        if self._missing <= self._slack:
            return True
        if self._drawn_s is None:
            self._drawn_s = now_s
        if now_s - self._drawn_s < self.FORGET_S:
            return False
        self._missing, self._drawn_s = float(self._slack), now_s
        return True

    def inserted(self, rows: int) -> None:
        """Rows came."""
        early = min(self._ahead, rows)
        self._ahead -= early
        self._missing += (rows - early) * self._per_insert

    def drawn(self, rows: int, now_s: float) -> None:
        """Rows were drawn."""
        self._missing = max(self._missing - rows, -self._slack)
        self._drawn_s = now_s


class ReplayShards:
    """The shards that a learner draws from, as it knows them. Pure: who asks them is `node.experience`.

    Args:
        rng: which shards rows come from.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._states: dict[str, ShardState] = {}
        self._seen: dict[str, tuple[int, int]] = {}

    @property
    def states(self) -> Mapping[str, ShardState]:
        """What is known of each shard that can be drawn from, by name."""
        return self._states

    @property
    def count(self) -> int:
        """Rows of all of them that may be drawn: the N of importance weights."""
        return sum(state.count for state in self._states.values())

    @property
    def full(self) -> bool:
        """Whether one of them is: more rows than there are now may never come."""
        return any(state.full for state in self._states.values())

    def heard(self, shard: str, state: ShardState) -> int:
        """Note what a shard told; return how many rows came to it since it was heard of, 0 at first."""
        boot, appended = self._seen.get(shard, (state.boot, state.appended))
        self._seen[shard] = state.boot, state.appended
        self._states[shard] = state
        return max(state.appended - (appended if boot == state.boot else 0), 0)

    def lost(self, shard: str) -> bool:
        """Draw from a shard no more, until it is `heard`; tell whether it was there."""
        return self._states.pop(shard, None) is not None

    def shares(self) -> dict[str, float]:
        """Return q_k by shard: what share of the rows each is to give; empty while there are none."""
        masses = {
            shard: state.mass for shard, state in self._states.items() if state.count and state.mass > 0
        }
        total = sum(masses.values())
        return {shard: mass / total for shard, mass in masses.items()}

    def split(self, rows: int, shares: Mapping[str, float]) -> dict[str, int]:
        """Draw how many of ``rows`` come from which shard; those that give none are left out."""
        names = list(shares)
        weights: Float64Array = np.array([shares[name] for name in names])
        counts = self._rng.multinomial(rows, weights / weights.sum())
        return {name: int(n) for name, n in zip(names, counts, strict=True) if n}
