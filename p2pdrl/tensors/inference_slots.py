"""Batches of observations for the inference process of a node, and its answers, in shared memory.

The daemon copies the observations of a batch into a free slot and names the slot in a short message; the
process reads them where they lie, writes its answers beside them and names the slot again. Who owns a slot is
said by those messages (`workers.protocol`): the process from ``Infer`` until its ``Inferred``, else the
daemon. Torch-free: both sides, and the API, which checks what callers send, read `InferenceSpec`.

Shape suffixes: N observations, X one observation's own dimensions, A one action's, S a recurrent state's.
"""

# ruff: noqa: N815 (fields carry shape suffixes)
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from p2pdrl.errors import LayoutMismatchError
from p2pdrl.tensors.shared_memory import SharedRegion

__all__ = ["InferenceEntry", "InferenceSlot", "InferenceSlots", "InferenceSpec", "PolicyAnswer"]

Array = npt.NDArray[Any]

_SECTION_BYTES = 64


class InferenceEntry(msgspec.Struct, frozen=True):
    """One entry of observations that have several, or of which only some actions are allowed.

    ``rl.observations.ObservationEntry`` says the same where environments are.
    """

    path: tuple[str | int, ...]
    """Keys and indices that lead to it."""
    shape: tuple[int, ...]
    dtype: str
    """``float32``, ``int32``, ``uint8`` or ``bool``, as it lies in a row."""
    offset: int
    """Of its first byte in a row."""
    sizes: tuple[int, ...] = ()
    """Of choices: how many each has; else empty."""
    start: tuple[int, ...] = ()
    """Of choices: the number of the first of each."""

    @property
    def name(self) -> str:
        """For people; empty where it is all there is."""
        return ".".join(str(key) for key in self.path)

    def __str__(self) -> str:
        """What it wants, in words."""
        if self.sizes:
            last = [first + size - 1 for first, size in zip(self.start, self.sizes, strict=True)]
            one = f"a whole number from {self.start[0]} to {last[0]}"
            return one if len(last) == 1 else f"{len(last)} whole numbers, from {self.start} to {tuple(last)}"
        return f"{self.dtype} of shape {list(self.shape)}"


class InferenceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy takes and gives."""

    obs_shape: tuple[int, ...]
    """X, of a row in memory."""
    obs_dtype: str
    entries: tuple[InferenceEntry, ...] = ()
    """Of observations that are packed into rows of bytes; else empty."""
    mask: InferenceEntry | None = None
    """Of actions, in those rows."""
    info_mask: bool = False
    """Whether the mask comes beside the observation, not in it."""
    several: Literal["", "dict", "tuple"] = ""
    """What observations of several entries are."""
    action_shape: tuple[int, ...]
    """A, as the environment's ``step`` takes it."""
    action_dtype: str
    has_values: bool
    """Whether there is a value function, v(s)."""

    @property
    def row_nbytes(self) -> int:
        """Bytes of one observation."""
        return math.prod(self.obs_shape) * np.dtype(self.obs_dtype).itemsize

    @property
    def action_nbytes(self) -> int:
        """Bytes of one action."""
        return math.prod(self.action_shape) * np.dtype(self.action_dtype).itemsize


class PolicyAnswer(NamedTuple):
    """What a policy says to N observations.

    Args:
        actions_NA: as the environment's ``step`` takes them.
        log_probs_N: of these actions, float32; zeros where the policy has no probabilities.
        values_N: v(s), float32; None where there is no value function.
        policy_version: of the parameters that answered.
    """

    actions_NA: Array
    log_probs_N: Array
    values_N: Array | None
    policy_version: int


@dataclass(frozen=True)
class InferenceSlot:
    """Views of one slot, for as many observations as a batch may have."""

    obs_NX: Array
    actions_NA: Array
    log_probs_N: npt.NDArray[np.float32]
    values_N: npt.NDArray[np.float32]


class InferenceSlots:
    """Cuts the memory into slots.

    Args:
        region: shared memory, of at least `nbytes_of` bytes.
        rows: N, the most that a slot holds.

    Raises:
        LayoutMismatchError: the region is too small.
    """

    def __init__(self, region: SharedRegion, spec: InferenceSpec, rows: int, slots: int) -> None:
        needed = self.nbytes_of(spec, rows, slots)
        if region.nbytes < needed:
            raise LayoutMismatchError(f"{slots} slots take {needed} bytes, the region has {region.nbytes}")
        at = 0

        def view(dtype: str, shape: tuple[int, ...]) -> Array:
            nonlocal at
            count = rows * math.prod(shape)
            found: Array = np.frombuffer(region.buf, dtype, count, at).reshape(rows, *shape)
            at += _section(count * np.dtype(dtype).itemsize)
            return found

        self._slots = tuple(
            InferenceSlot(
                view(spec.obs_dtype, spec.obs_shape),
                view(spec.action_dtype, spec.action_shape),
                view("float32", ()),
                view("float32", ()),
            )
            for _ in range(slots)
        )

    @staticmethod
    def nbytes_of(spec: InferenceSpec, rows: int, slots: int) -> int:
        """Bytes of shared memory that they take."""
        sections = (rows * spec.row_nbytes, rows * spec.action_nbytes, 4 * rows, 4 * rows)
        return slots * sum(_section(nbytes) for nbytes in sections)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, number: int) -> InferenceSlot:
        return self._slots[number]


def _section(nbytes: int) -> int:
    return -(-max(nbytes, 1) // _SECTION_BYTES) * _SECTION_BYTES
