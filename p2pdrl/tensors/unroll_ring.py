"""Unrolls on their way from actor processes to the learner, in shared memory.

    actor i ──begin, views, commit──► lane i: k slots ──peek, consume──► learner
                      ▲ grant ─────────────────────────────────────────────┘

Each actor has a lane of its own: one writer, one reader, no locks, so that any of them may be killed at any
instruction. Unrolls of a lane are numbered by serials that go on from one process to the next. A slot's
unroll counts once its serial is committed, by one 8-byte store after everything else; what a killed actor had
begun is dropped and counted by its successor (`UnrollLane.enter`). The learner says up to which serial an
actor may begin: that is the back-pressure, and the lockstep. What it has read stays until it is consumed, so
a learner that is killed during an update leaves the unrolls to its successor.

The learner declares what an unroll is made of (`UnrollSpec`); the daemon makes the memory and moves unrolls
without knowing more.

Shapes: those of the items; one dimension of each is B, the environments of the actor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import LayoutMismatchError, WireError
from p2pdrl.tensors.layout import check_rows, check_text
from p2pdrl.tensors.shared_memory import SharedRegion, fence

__all__ = ["Committed", "UnrollItem", "UnrollLane", "UnrollRing", "UnrollSpec", "shares_of"]

Array = npt.NDArray[Any]

ENVIRONMENTS = -1
"""Stands for B in a shape."""
DTYPES = ("bool", "uint8", "int64", "float32", "float64")
MAX_ITEMS = 64
MAX_DIMENSION = 1 << 40
_LINE_BYTES = 64
_HEADER_BYTES = 2 * _LINE_BYTES
_GRANTED, _CONSUMED = 0, 1
"""Words that the learner writes."""
_BEGUN, _COMMITTED, _STEPS, _EPISODES, _TORN = 8, 9, 10, 11, 12
"""Words that the actor writes."""
_LIVES, _RUNNING = 14, 15
"""Words that the daemon writes."""
_SERIAL, _LIFE, _VERSION, _ENDED, _VALID = range(5)
"""Words of a slot."""


@dataclass(frozen=True)
class UnrollItem:
    """One array of an unroll.

    Args:
        shape: with one dimension of -1, which stands for B.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def shape_of(self, environments: int) -> tuple[int, ...]:
        """Its shape for so many environments."""
        return tuple(environments if n == ENVIRONMENTS else n for n in self.shape)

    def nbytes_of(self, environments: int) -> int:
        """Bytes of the array for so many environments, up to a whole cache line."""
        size = math.prod(self.shape_of(environments)) * np.dtype(self.dtype).itemsize
        return -(-size // _LINE_BYTES) * _LINE_BYTES


@dataclass(frozen=True)
class UnrollSpec:
    """What unrolls are made of, and who makes them.

    Args:
        items: in the order in which they lie in a slot.
        shares: environments of each actor.
        slots: of each lane: unrolls that an actor may have finished ahead of the learner, and one.

    Raises:
        LayoutMismatchError: an item can't be, or there are no actors, environments or slots.
    """

    items: tuple[UnrollItem, ...]
    shares: tuple[int, ...]
    slots: int

    def __post_init__(self) -> None:
        names = {item.name for item in self.items}
        if not self.items or len(names) != len(self.items) or len(self.items) > MAX_ITEMS:
            raise LayoutMismatchError(f"an unroll has 1 to {MAX_ITEMS} items of different names")
        for item in self.items:
            others = [n for n in item.shape if n != ENVIRONMENTS]
            fits = len(others) == len(item.shape) - 1 and all(0 < n <= MAX_DIMENSION for n in others)
            if item.dtype not in DTYPES or not fits:
                raise LayoutMismatchError(f"unrolls can't hold {item.name!r}: {item.dtype} {item.shape}")
        if not self.shares or min(self.shares) < 1 or self.slots < 1:
            raise LayoutMismatchError(f"{self.slots} slots for shares of {self.shares} environments")

    @cached_property
    def slot_nbytes(self) -> int:
        """Bytes of one slot: that of the largest share."""
        return _LINE_BYTES + sum(item.nbytes_of(max(self.shares)) for item in self.items)

    @property
    def lane_nbytes(self) -> int:
        """Bytes of one lane."""
        return _HEADER_BYTES + self.slots * self.slot_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all lanes."""
        return len(self.shares) * self.lane_nbytes

    def to_wire(self) -> dict[str, object]:
        """Return plain JSON types."""
        items = [[item.name, item.dtype, list(item.shape)] for item in self.items]
        return {"items": items, "shares": list(self.shares), "slots": self.slots}

    @classmethod
    def from_wire(cls, obj: object) -> UnrollSpec:
        """Rebuild a spec from what `to_wire` made.

        Raises:
            WireError: it isn't of that form.
            LayoutMismatchError: it is, and can't be.
        """
        if not isinstance(obj, dict) or obj.keys() != {"items", "shares", "slots"}:
            raise WireError("an unroll's spec holds items, shares and slots")
        rows = check_rows(obj["items"], MAX_ITEMS, width=3, what="unroll spec")
        items = tuple(
            UnrollItem(check_text(name), check_text(dtype), _whole(shape)) for name, dtype, shape in rows
        )
        return cls(items, _whole(obj["shares"]), _whole([obj["slots"]])[0])


class Committed(NamedTuple):
    """One unroll that is there to be read.

    Args:
        serial: of the unroll in its lane, from 1.
        life: which of the lane's processes made it, from 1.
        policy_version: of the parameters that acted.
        episodes: how many ended in it.
        env_steps: valid steps in it.
        arrays: by name, views that stay as they are until it is consumed.
    """

    serial: int
    life: int
    policy_version: int
    episodes: int
    env_steps: int
    arrays: dict[str, Array]


class UnrollLane:
    """One actor's slots. The actor calls what is said to be its own, the learner and the daemon likewise."""

    def __init__(self, buffer: memoryview, spec: UnrollSpec, environments: int) -> None:
        self._words: npt.NDArray[np.uint64] = np.frombuffer(buffer, np.uint64, _HEADER_BYTES // 8)
        self._slots: list[tuple[npt.NDArray[np.uint64], dict[str, Array]]] = []
        self.environments = environments
        for number in range(spec.slots):
            at = _HEADER_BYTES + number * spec.slot_nbytes
            head: npt.NDArray[np.uint64] = np.frombuffer(buffer, np.uint64, _LINE_BYTES // 8, at)
            at += _LINE_BYTES
            arrays = {}
            for item in spec.items:
                shape = item.shape_of(environments)
                array = np.frombuffer(buffer, item.dtype, math.prod(shape), at)
                arrays[item.name] = array.reshape(shape)
                at += item.nbytes_of(environments)
            self._slots.append((head, arrays))

    def _word(self, number: int) -> int:
        return int(self._words[number])

    # the actor

    def enter(self) -> bool:
        """Go on where the lane's last process ended; tell whether it left a half unroll, which is dropped."""
        begun, committed = self._word(_BEGUN), self._word(_COMMITTED)
        if begun <= committed:
            return False
        self._words[_TORN] += np.uint64(1)
        fence()
        self._words[_BEGUN] = committed
        return True

    @property
    def may_begin(self) -> bool:
        """Whether the learner lets the actor begin its next unroll."""
        return self._word(_COMMITTED) < self._word(_GRANTED)

    def begin(self) -> dict[str, Array]:
        """Begin the next unroll; return the arrays to be filled."""
        serial = self._word(_COMMITTED) + 1
        self._words[_BEGUN] = serial
        fence()
        return self._slots[(serial - 1) % len(self._slots)][1]

    def commit(self, *, policy_version: int, episodes: int, env_steps: int) -> None:
        """Let the learner have the unroll that was begun last; its arrays are the learner's from now on."""
        serial = self._word(_BEGUN)
        head = self._slots[(serial - 1) % len(self._slots)][0]
        head[_SERIAL], head[_LIFE], head[_VERSION] = serial, self._word(_LIVES), policy_version
        head[_ENDED], head[_VALID] = episodes, env_steps
        self._words[_STEPS] += np.uint64(env_steps)
        self._words[_EPISODES] += np.uint64(episodes)
        fence()
        self._words[_COMMITTED] = serial

    # the learner

    @property
    def waiting(self) -> int:
        """How many unrolls are there to be read."""
        return self._word(_COMMITTED) - self._word(_CONSUMED)

    def peek(self) -> Committed | None:
        """Return the oldest unroll that isn't consumed; the same one until it is."""
        serial = self._word(_CONSUMED) + 1
        if serial > self._word(_COMMITTED):
            return None
        fence()
        head, arrays = self._slots[(serial - 1) % len(self._slots)]
        found = int(head[_SERIAL])
        if found != serial:
            raise LayoutMismatchError(f"the slot of unroll {serial} holds unroll {found}")
        life, version, episodes, steps = (int(head[n]) for n in (_LIFE, _VERSION, _ENDED, _VALID))
        return Committed(serial, life, version, episodes, steps, arrays)

    def consume(self) -> None:
        """Give up the unroll that `peek` returned; its slot is written again once that is granted."""
        fence()
        self._words[_CONSUMED] = self._word(_CONSUMED) + 1

    def grant(self, ahead: int) -> None:
        """Let the actor begin the unroll after those consumed, and ``ahead`` more, as far as slots go."""
        fence()
        self._words[_GRANTED] = self._word(_CONSUMED) + min(1 + ahead, len(self._slots))

    # the daemon

    def started(self) -> None:
        """A process that makes unrolls for this lane begins."""
        self._words[_LIVES] += np.uint64(1)

    @property
    def running(self) -> bool:
        """Whether a process makes unrolls for this lane, as far as the daemon knows."""
        return bool(self._words[_RUNNING])

    @running.setter
    def running(self, running: bool) -> None:
        self._words[_RUNNING] = int(running)

    # everybody

    @property
    def lives(self) -> int:
        """How many processes there have been; 0 before the first."""
        return self._word(_LIVES)

    @property
    def committed(self) -> int:
        """Serial of the last unroll that was committed."""
        return self._word(_COMMITTED)

    @property
    def env_steps(self) -> int:
        """Environment steps in all unrolls that were committed."""
        return self._word(_STEPS)

    @property
    def episodes(self) -> int:
        """Episodes that ended in them."""
        return self._word(_EPISODES)

    @property
    def torn(self) -> int:
        """Half unrolls of killed processes, all dropped."""
        return self._word(_TORN)


class UnrollRing:
    """The lanes of all actors.

    Args:
        region: shared memory, of at least ``spec.nbytes`` bytes, zero at first.
    """

    def __init__(self, region: SharedRegion, spec: UnrollSpec) -> None:
        if region.nbytes < spec.nbytes:
            raise LayoutMismatchError(f"unrolls take {spec.nbytes} bytes, the region has {region.nbytes}")
        size = spec.lane_nbytes
        self.lanes = tuple(
            UnrollLane(region.buf[n * size : (n + 1) * size], spec, share)
            for n, share in enumerate(spec.shares)
        )


def shares_of(environments: int, actors: int) -> tuple[int, ...]:
    """Return how many of the environments each actor has: as equal as can be, the first ones more."""
    least, more = divmod(environments, actors)
    return tuple(least + (number < more) for number in range(actors))


def _whole(numbers: object) -> tuple[int, ...]:
    if not isinstance(numbers, list) or not all(type(n) is int and -1 <= n <= MAX_DIMENSION for n in numbers):
        raise WireError("an unroll's spec has whole numbers for shapes, shares and slots")
    return tuple(numbers)
