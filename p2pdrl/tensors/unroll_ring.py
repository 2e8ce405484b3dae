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
without knowing more. A lane may be another node's actor's: then the daemon writes what came from there
(`UnrollLane.fill`), after it has looked at every number that the learner would trust.

Shapes: those of the items; one dimension of each is B, the environments of the actor, at most the lane's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import LayoutMismatchError, PoisonedVectorError, WireError
from p2pdrl.tensors.layout import check_rows, check_text
from p2pdrl.tensors.shared_memory import SharedRegion, fence

__all__ = [
    "Assignment",
    "Committed",
    "UnrollItem",
    "UnrollLane",
    "UnrollRing",
    "UnrollSpec",
    "assignments",
    "shares_of",
]

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
"""Words that the daemon writes; the actor counts a life more where it begins anew with other environments."""
_ASSIGNED = 13
"""A word that the daemon writes: an `Assignment`, in three numbers of so many bits; 0 before there is one."""
_NUMBER_BITS = 21
_SERIAL, _LIFE, _VERSION, _ENDED, _VALID, _COLUMNS, _COUNTED = range(7)
"""Words of a slot."""


@dataclass(frozen=True)
class UnrollItem:
    """One array of an unroll.

    Args:
        shape: with one dimension of -1, which stands for B.
        choices: of whole numbers: they are 0 … this - 1; 0 has them be any that aren't negative.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    choices: int = 0

    def shape_of(self, environments: int) -> tuple[int, ...]:
        """Its shape for so many environments."""
        return tuple(environments if n == ENVIRONMENTS else n for n in self.shape)

    def nbytes_of(self, environments: int) -> int:
        """Bytes of the array for so many environments, up to a whole cache line."""
        size = math.prod(self.shape_of(environments)) * np.dtype(self.dtype).itemsize
        return -(-size // _LINE_BYTES) * _LINE_BYTES


class _Sizes(NamedTuple):
    """Bytes of an unroll: all, and those that are looked at."""

    content: int
    checked: int


@dataclass(frozen=True)
class UnrollSpec:
    """What unrolls are made of, and who makes them.

    Args:
        items: in the order in which they lie in a slot.
        shares: environments of each lane; the most that they may be where its actor is on another node.
        slots: of each lane: unrolls that an actor may have finished ahead of the learner, and one.
        remote: how many lanes, the last ones, are for actors of other nodes.

    Raises:
        LayoutMismatchError: an item can't be, or there are no actors, environments or slots.
    """

    items: tuple[UnrollItem, ...]
    shares: tuple[int, ...]
    slots: int
    remote: int = 0

    def __post_init__(self) -> None:
        names = {item.name for item in self.items}
        if not self.items or len(names) != len(self.items) or len(self.items) > MAX_ITEMS:
            raise LayoutMismatchError(f"an unroll has 1 to {MAX_ITEMS} items of different names")
        for item in self.items:
            others = [n for n in item.shape if n != ENVIRONMENTS]
            fits = len(others) == len(item.shape) - 1 and all(0 < n <= MAX_DIMENSION for n in others)
            if item.dtype not in DTYPES or not fits or item.choices < 0:
                raise LayoutMismatchError(f"unrolls can't hold {item.name!r}: {item.dtype} {item.shape}")
        if not self.shares or min(self.shares) < 1 or self.slots < 1:
            raise LayoutMismatchError(f"{self.slots} slots for shares of {self.shares} environments")
        if not 0 <= self.remote <= len(self.shares):
            raise LayoutMismatchError(f"{self.remote} of {len(self.shares)} lanes can't be for other nodes")

    @property
    def local(self) -> int:
        """How many lanes, the first ones, are for actors of this node."""
        return len(self.shares) - self.remote

    def content_nbytes(self, environments: int) -> int:
        """Bytes of one unroll of so many environments, without the words before it."""
        return self._sizes(environments).content

    def checked_nbytes(self, environments: int) -> int:
        """Bytes that `check` looks at: all but pictures, whose bytes can't be wrong."""
        return self._sizes(environments).checked

    def _sizes(self, environments: int) -> _Sizes:
        """Return both; computed once, as every look at a lane asks for them."""
        known = self._known_sizes.get(environments)
        if known is None:
            nbytes = [item.nbytes_of(environments) for item in self.items]
            checked = [n for n, item in zip(nbytes, self.items, strict=True) if item.dtype != "uint8"]
            known = self._known_sizes[environments] = _Sizes(sum(nbytes), sum(checked))
        return known

    @cached_property
    def _known_sizes(self) -> dict[int, _Sizes]:
        return {}

    def views(self, content: memoryview, environments: int) -> dict[str, Array]:
        """Return the arrays of an unroll of so many environments that lies in ``content``, by name."""
        arrays, at = {}, 0
        for item in self.items:
            shape = item.shape_of(environments)
            arrays[item.name] = np.frombuffer(content, item.dtype, math.prod(shape), at).reshape(shape)
            at += item.nbytes_of(environments)
        return arrays

    def check(self, arrays: Mapping[str, Array]) -> None:
        """Look at all numbers of an unroll that came from another node.

        Raises:
            PoisonedVectorError: one isn't finite, isn't among its item's choices, or is no truth value.
        """
        for item in self.items:
            array = arrays[item.name]
            if item.dtype == "bool":
                good = int(array.view(np.uint8).max()) <= 1
            elif item.dtype.startswith("float"):
                good = bool(np.isfinite(array).all())
            elif item.dtype == "int64":
                good = int(array.min()) >= 0 and (not item.choices or int(array.max()) < item.choices)
            else:
                good = True
            if not good:
                raise PoisonedVectorError(f"{item.name} of an unroll holds what can't be")

    @cached_property
    def slot_nbytes(self) -> int:
        """Bytes of one slot: that of the largest share."""
        return _LINE_BYTES + self.content_nbytes(max(self.shares))

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
        items = [[item.name, item.dtype, list(item.shape), item.choices] for item in self.items]
        numbers = {"slots": self.slots, "remote": self.remote}
        return {"items": items, "shares": list(self.shares), **numbers}

    @classmethod
    def from_wire(cls, obj: object) -> UnrollSpec:
        """Rebuild a spec from what `to_wire` made.

        Raises:
            WireError: it isn't of that form.
            LayoutMismatchError: it is, and can't be.
        """
        if not isinstance(obj, dict) or obj.keys() != {"items", "shares", "slots", "remote"}:
            raise WireError("an unroll's spec holds items, shares, slots and remote lanes")
        rows = check_rows(obj["items"], MAX_ITEMS, width=4, what="unroll spec")
        items = tuple(
            UnrollItem(check_text(name), check_text(dtype), _whole(shape), _whole([choices])[0])
            for name, dtype, shape, choices in rows
        )
        slots, remote = _whole([obj["slots"], obj["remote"]])
        return cls(items, _whole(obj["shares"]), slots, remote)


class Committed(NamedTuple):
    """One unroll that is there to be read.

    Args:
        serial: of the unroll in its lane, from 1.
        life: which of the lane's processes made it, from 1.
        policy_version: of the parameters that acted.
        episodes: how many ended in it.
        env_steps: valid steps in it.
        environments: B.
        counted: whether the node that made it counts its steps and episodes itself.
        arrays: by name, views that stay as they are until it is consumed.
        content: the bytes that they are views of.
    """

    serial: int
    life: int
    policy_version: int
    episodes: int
    env_steps: int
    environments: int
    counted: bool
    arrays: dict[str, Array]
    content: memoryview


class Assignment(NamedTuple):
    """Which of the swarm's environments an actor acts in.

    Args:
        environments: how many.
        first: number of the first one.
        total: of all actors that work for the same learners.
    """

    environments: int
    first: int
    total: int


class UnrollLane:
    """One actor's slots. The actor calls what is said to be its own, the learner and the daemon likewise."""

    def __init__(self, buffer: memoryview, spec: UnrollSpec, environments: int) -> None:
        self._words: npt.NDArray[np.uint64] = np.frombuffer(buffer, np.uint64, _HEADER_BYTES // 8)
        self._spec = spec
        self.environments = environments
        self._heads: list[npt.NDArray[np.uint64]] = []
        self._contents: list[memoryview] = []
        for number in range(spec.slots):
            at = _HEADER_BYTES + number * spec.slot_nbytes
            self._heads.append(np.frombuffer(buffer, np.uint64, _LINE_BYTES // 8, at))
            self._contents.append(buffer[at + _LINE_BYTES : at + spec.slot_nbytes])
        self._views: dict[tuple[int, int], dict[str, Array]] = {}

    def _arrays(self, serial: int, environments: int) -> dict[str, Array]:
        key = (serial - 1) % self._spec.slots, environments
        arrays = self._views.get(key)
        if arrays is None:
            arrays = self._views[key] = self._spec.views(self._contents[key[0]], environments)
        return arrays

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

    @property
    def assignment(self) -> Assignment | None:
        """What the daemon assigned last; None before that, which means all of the lane."""
        word, mask = self._word(_ASSIGNED), (1 << _NUMBER_BITS) - 1
        if not word:
            return None
        return Assignment(word & mask, word >> _NUMBER_BITS & mask, word >> 2 * _NUMBER_BITS)

    def begin(self, environments: int | None = None) -> dict[str, Array]:
        """Begin the next unroll, of all the lane's environments or so many; return what is to be filled."""
        return self._arrays(self._begin(), environments or self.environments)

    def fill(self, environments: int) -> memoryview:
        """Begin the next unroll, of so many environments; return where its content goes (another node's)."""
        serial = self._begin()
        return self._contents[(serial - 1) % self._spec.slots][: self._spec.content_nbytes(environments)]

    def filled(self, environments: int) -> dict[str, Array]:
        """Return the arrays of the unroll that was begun by `fill`."""
        return self._arrays(self._word(_BEGUN), environments)

    def _begin(self) -> int:
        serial = self._word(_COMMITTED) + 1
        self._words[_BEGUN] = serial
        fence()
        return serial

    def commit(
        self,
        *,
        policy_version: int,
        episodes: int,
        env_steps: int,
        environments: int | None = None,
        counted: bool = False,
    ) -> None:
        """Let the learner have the unroll that was begun last; its arrays are the learner's from now on.

        Args:
            environments: of the unroll; None stands for all of the lane.
            counted: whether another node counts its steps.
        """
        serial = self._word(_BEGUN)
        head = self._heads[(serial - 1) % self._spec.slots]
        head[_SERIAL], head[_LIFE], head[_VERSION] = serial, self._word(_LIVES), policy_version
        head[_ENDED], head[_VALID] = episodes, env_steps
        head[_COLUMNS] = self.environments if environments is None else environments
        head[_COUNTED] = counted
        self._words[_STEPS] += np.uint64(env_steps)
        self._words[_EPISODES] += np.uint64(episodes)
        fence()
        self._words[_COMMITTED] = serial

    # the learner

    @property
    def waiting(self) -> int:
        """How many unrolls are there to be read."""
        return self._word(_COMMITTED) - self._word(_CONSUMED)

    @property
    def waiting_environments(self) -> int:
        """Environments of the oldest unroll that is there to be read; 0 when there is none."""
        found = self.peek()
        return 0 if found is None else found.environments

    def peek(self) -> Committed | None:
        """Return the oldest unroll that isn't consumed; the same one until it is."""
        serial = self._word(_CONSUMED) + 1
        if serial > self._word(_COMMITTED):
            return None
        fence()
        slot = (serial - 1) % self._spec.slots
        head = self._heads[slot]
        found = int(head[_SERIAL])
        if found != serial:
            raise LayoutMismatchError(f"the slot of unroll {serial} holds unroll {found}")
        life, version, episodes, steps, columns, counted = (
            int(head[n]) for n in (_LIFE, _VERSION, _ENDED, _VALID, _COLUMNS, _COUNTED)
        )
        content = self._contents[slot][: self._spec.content_nbytes(columns)]
        arrays = self._arrays(serial, columns)
        return Committed(serial, life, version, episodes, steps, columns, bool(counted), arrays, content)

    def consume(self) -> None:
        """Give up the unroll that `peek` returned; its slot is written again once that is granted."""
        fence()
        self._words[_CONSUMED] = self._word(_CONSUMED) + 1

    def grant(self, ahead: int) -> None:
        """Let the actor begin the unroll after those consumed, and ``ahead`` more, as far as slots go."""
        fence()
        self._words[_GRANTED] = self._word(_CONSUMED) + min(1 + ahead, self._spec.slots)

    # the daemon

    def started(self) -> None:
        """A process that makes unrolls for this lane begins, or all of its environments do."""
        self._words[_LIVES] += np.uint64(1)

    def assign(self, assignment: Assignment) -> None:
        """Have the actor act in those environments, all that the lane has or fewer, from its next unroll on.

        Raises:
            LayoutMismatchError: there are none, more than the lane has, or not so many in all.
        """
        environments, first, total = assignment
        fits = 0 < environments <= self.environments and 0 <= first <= total - environments
        if not fits or total >> _NUMBER_BITS:
            raise LayoutMismatchError(f"{assignment} for a lane of {self.environments} environments")
        self._words[_ASSIGNED] = environments | first << _NUMBER_BITS | total << 2 * _NUMBER_BITS

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


def assignments(shares: Sequence[int], rank: int, nodes: int) -> list[Assignment]:
    """Return what a node's actors act in, if several nodes make a batch's environments together.

    Each node has 1/n of as many as it would have alone, so that each of its unrolls takes n times less time,
    and the policy is that much newer when it is learned from. No actor has fewer than one.

    Args:
        shares: environments of each of its actors alone.
        rank: of the node among the ``nodes``, from 0.
    """
    parts = [max(part, len(shares)) for part in shares_of(sum(shares), nodes)]
    first, found = sum(parts[:rank]), []
    for environments in shares_of(parts[rank], len(shares)):
        found.append(Assignment(environments, first, sum(parts)))
        first += environments
    return found


def _whole(numbers: object) -> tuple[int, ...]:
    if not isinstance(numbers, list) or not all(type(n) is int and -1 <= n <= MAX_DIMENSION for n in numbers):
        raise WireError("an unroll's spec has whole numbers for shapes, shares and slots")
    return tuple(numbers)
