"""Batches of observations for the inference process of a node, and its answers, in shared memory.

`InferenceSlots` are for who asks from outside, `StepLanes` for the node's own actors.

The daemon copies the observations of a batch into a free slot and names the slot in a short message; the
process reads them where they lie, writes its answers beside them and names the slot again. Who owns a slot is
said by those messages (`workers.protocol`): the process from ``Infer`` until its ``Inferred``, else the
daemon. Torch-free: both sides, and the API, which checks what callers send, read `InferenceSpec`.

Actors ask without the daemon, once a step (`workers.actor`):

    actor i ──observations, noise, state; asked += 1──► rows of lane i ──► inference process
            ◄──actions, …, state; answered = asked──── (a doorbell each way)

One word counts what a lane has asked, another what was answered; each has one writer. An actor writes its
rows before its word and nothing until it is answered, so a process that died over a batch has lost nothing:
its successor finds the lanes that wait. A lane whose actor was killed in mid-question is answered, too, and
its successor, which counts on, takes no notice. Rows of a batch don't depend on each other, so what a dying
actor left half written is nobody else's harm.

Shape suffixes: N observations, B environments of a lane, E of all lanes, X one observation's own dimensions,
A one action's, S a recurrent state's.
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
from p2pdrl.tensors.shared_memory import SharedRegion, fence

__all__ = [
    "InferenceEntry",
    "InferenceSlot",
    "InferenceSlots",
    "InferenceSpec",
    "PolicyAnswer",
    "StepItem",
    "StepLane",
    "StepLanes",
    "StepSpec",
]

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


class StepItem(msgspec.Struct, frozen=True):
    """One array of what actors ask with, or are answered by."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of one environment's part."""


class StepSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a step of the node's actors is made of: declared by who builds the policy."""

    asked: tuple[StepItem, ...]
    """``obs``, ``noise``, and ``state`` of a recurrent policy."""
    answered: tuple[StepItem, ...]
    """``actions``, ``log_probs``, ``values``, and ``taken`` and ``state`` where there are such."""
    shares: tuple[int, ...]
    """Environments of each actor."""

    @property
    def environments(self) -> int:
        """E."""
        return sum(self.shares)

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that all lanes take."""
        items = (*self.asked, *self.answered)
        return _LANE_BYTES * len(self.shares) + sum(_section(_nbytes(item, self)) for item in items)


_LANE_BYTES = 2 * _SECTION_BYTES
_ASKED, _ACTING = 0, 1
"""Words that the actor writes; the daemon clears the second where an actor died."""
_ANSWERED, _VERSION = 8, 9
"""Words that the inference process writes."""


class StepLane:
    """The rows of one actor, and its words."""

    def __init__(
        self, words: npt.NDArray[np.uint64], asked: dict[str, Array], answered: dict[str, Array]
    ) -> None:
        self._words = words
        self.asked = asked
        self.answered = answered

    @property
    def acting(self) -> bool:
        """Whether its actor is within an unroll, and asks soon."""
        return bool(self._words[_ACTING])

    @acting.setter
    def acting(self, acting: bool) -> None:
        self._words[_ACTING] = int(acting)

    def ask(self) -> None:
        """Say that the rows of ``asked`` hold a new question."""
        fence()
        self._words[_ASKED] += np.uint64(1)

    @property
    def waits(self) -> bool:
        """Whether the last question isn't answered yet; what is read after it isn't is the answer."""
        waits = bool(self._words[_ANSWERED] != self._words[_ASKED])
        fence()
        return waits

    @property
    def version(self) -> int:
        """Policy version of the last answer."""
        return int(self._words[_VERSION])


class StepLanes:
    """All lanes side by side, so that questions of all actors are one batch as they lie there.

    Args:
        region: shared memory, of ``spec.nbytes`` bytes at least, zero at first.

    Attributes:
        lanes: one of each actor.
        asked: arrays of all E environments, by name; ``answered`` likewise.
        rows: where each lane's are.

    Raises:
        LayoutMismatchError: the region is too small.
    """

    def __init__(self, region: SharedRegion, spec: StepSpec) -> None:
        if region.nbytes < spec.nbytes:
            raise LayoutMismatchError(f"steps take {spec.nbytes} bytes, the region has {region.nbytes}")
        count = len(spec.shares)
        words: npt.NDArray[np.uint64] = np.frombuffer(region.buf, np.uint64, count * _LANE_BYTES // 8)
        self._words = words.reshape(count, _LANE_BYTES // 8)
        at = words.nbytes
        self.asked: dict[str, Array] = {}
        self.answered: dict[str, Array] = {}
        for items, arrays in ((spec.asked, self.asked), (spec.answered, self.answered)):
            for item in items:
                shape = (spec.environments, *item.shape)
                found: Array = np.frombuffer(region.buf, item.dtype, math.prod(shape), at)
                arrays[item.name] = found.reshape(shape)
                at += _section(found.nbytes)
        ends = np.cumsum(spec.shares).tolist()
        self.rows = tuple(slice(end - share, end) for end, share in zip(ends, spec.shares, strict=True))
        self.lanes = tuple(
            StepLane(
                self._words[number],
                {name: array[rows] for name, array in self.asked.items()},
                {name: array[rows] for name, array in self.answered.items()},
            )
            for number, rows in enumerate(self.rows)
        )

    @property
    def questions(self) -> list[int]:
        """How many each lane has asked; 0 for those that wait for no answer."""
        asked, answered = self._words[:, _ASKED].tolist(), self._words[:, _ANSWERED].tolist()
        fence()
        return [0 if one == other else one for one, other in zip(asked, answered, strict=True)]

    @property
    def acting(self) -> list[bool]:
        """Which lanes' actors are within an unroll."""
        return [word != 0 for word in self._words[:, _ACTING].tolist()]

    def answer(self, number: int, question: int, version: int) -> None:
        """Say that the rows of a lane's ``answered`` hold the answer.

        Args:
            question: which one, as `questions` said before its rows were read.
        """
        fence()
        self._words[number, _VERSION] = version
        self._words[number, _ANSWERED] = question


def _nbytes(item: StepItem, spec: StepSpec) -> int:
    return spec.environments * math.prod(item.shape) * np.dtype(item.dtype).itemsize
