"""The layout of a model's parameters inside one flat float32 vector, and the hash two peers compare.

Made by the learner from its module, sent to the daemon and to joining peers, checked by everything
that touches a vector: two vectors may be mixed only when their layouts' hashes are equal.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import LayoutMismatchError, WireError

__all__ = [
    "MAX_ENTRIES",
    "MAX_NAME_CHARS",
    "MAX_SIZE",
    "Float32Array",
    "Layout",
    "TensorEntry",
    "check_vector",
]

Float32Array = npt.NDArray[np.float32]

MAX_ENTRIES = 10_000
MAX_SIZE = 1 << 31
"""Largest D: 8 GiB of float32."""
MAX_NAME_CHARS = 200
_MAX_DIMENSIONS = 8


@dataclass(frozen=True)
class TensorEntry:
    """One parameter tensor.

    Args:
        shape: at most 8 dimensions, each at least 1; ``()`` is a scalar.
        dtype: always ``"float32"`` in this version; recorded so that the hash covers it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """An ordered list of parameter tensors, laid end to end.

    Raises:
        LayoutMismatchError: an entry, their number or their total is out of bounds.

    Example:
        >>> layout = Layout((TensorEntry("w", (2, 3)), TensorEntry("b", (3,))))
        >>> layout.size, layout.offsets
        (9, (0, 6))
    """

    entries: tuple[TensorEntry, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", tuple(self.entries))
        if not 1 <= len(self.entries) <= MAX_ENTRIES:
            raise LayoutMismatchError(f"a layout has 1 to {MAX_ENTRIES} entries, not {len(self.entries)}")
        names: set[str] = set()
        total = 0
        for entry in self.entries:
            check_name_and_shape(entry.name, entry.shape)
            if entry.dtype != "float32":
                raise LayoutMismatchError(
                    f"parameter {entry.name!r} is {entry.dtype!r}; only float32 is exchanged"
                )
            if entry.name in names:
                raise LayoutMismatchError(f"parameter {entry.name!r} occurs twice in the layout")
            names.add(entry.name)
            total += entry.size
        if total > MAX_SIZE:
            raise LayoutMismatchError(f"a layout holds at most {MAX_SIZE} floats, not {total}")

    @cached_property
    def size(self) -> int:
        """D: the number of float32 elements."""
        return sum(entry.size for entry in self.entries)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Element offset of each entry."""
        return tuple(accumulate((entry.size for entry in self.entries[:-1]), initial=0))

    @cached_property
    def hash(self) -> str:
        """32 hex digits: SHA-256 over names, shapes and dtypes, in order."""
        return hash_of("p2pdrl layout", self.to_wire())

    def views(self, flat: Float32Array) -> dict[str, Float32Array]:
        """Return one shaped view into ``flat`` per parameter, by name; nothing is copied."""
        check_vector(flat, self.size, "the vector")
        return {
            entry.name: flat[at : at + entry.size].reshape(entry.shape)
            for entry, at in zip(self.entries, self.offsets, strict=True)
        }

    def to_wire(self) -> list[list[object]]:
        """Return plain JSON types: ``[[name, [dimension, …], dtype], …]``."""
        return [[entry.name, list(entry.shape), entry.dtype] for entry in self.entries]

    @classmethod
    def from_wire(cls, obj: object) -> Layout:
        """Rebuild a layout from what `to_wire` made.

        Raises:
            WireError: it isn't of that form.
            LayoutMismatchError: it is, and breaks a bound.
        """
        rows = check_rows(obj, MAX_ENTRIES, width=3, what="layout")
        return cls(
            tuple(TensorEntry(check_text(row[0]), check_shape(row[1]), check_text(row[2])) for row in rows)
        )


def check_vector(vector: Float32Array, size: int, what: str) -> None:
    """Check that ``vector`` is a contiguous float32 vector of ``size`` elements.

    Raises:
        LayoutMismatchError: it isn't.
    """
    if vector.dtype != np.float32 or vector.shape != (size,) or not vector.flags.c_contiguous:
        raise LayoutMismatchError(
            f"{what} must be a contiguous float32 vector of {size} elements, "
            f"not {vector.dtype} {vector.shape}"
        )


def check_name_and_shape(name: str, shape: tuple[int, ...]) -> None:
    """Check one tensor's name and shape against the bounds.

    Raises:
        LayoutMismatchError: one of them is out of bounds.
    """
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise LayoutMismatchError(
            f"a name has 1 to {MAX_NAME_CHARS} characters: {name[:40]!r} has {len(name)}"
        )
    if len(shape) > _MAX_DIMENSIONS or any(not 1 <= n <= MAX_SIZE for n in shape):
        raise LayoutMismatchError(
            f"{name[:40]!r}: at most {_MAX_DIMENSIONS} dimensions of at least 1, not {shape}"
        )


def check_rows(obj: object, most: int, *, width: int, what: str) -> list[list[object]]:
    """Return ``obj`` as rows of ``width`` columns.

    Raises:
        WireError: it isn't a list of at most ``most`` such rows.
    """
    if not isinstance(obj, (list, tuple)) or len(obj) > most:
        raise WireError(f"{what}: expected a list of at most {most} rows")
    rows: list[list[object]] = []
    for row in obj:
        if not isinstance(row, (list, tuple)) or len(row) != width:
            raise WireError(f"{what}: expected rows of {width} columns")
        rows.append(list(row))
    return rows


def check_text(obj: object) -> str:
    """Return ``obj`` when it is a string that UTF-8 can carry.

    Raises:
        WireError: it isn't.
    """
    if not isinstance(obj, str) or any("\ud800" <= char <= "\udfff" for char in obj[: MAX_NAME_CHARS + 1]):
        raise WireError("expected a text")
    return obj


def check_shape(obj: object) -> tuple[int, ...]:
    """Return ``obj`` as a shape.

    Raises:
        WireError: it isn't a short list of integers.
    """
    if not isinstance(obj, (list, tuple)) or len(obj) > _MAX_DIMENSIONS:
        raise WireError(f"expected a shape of at most {_MAX_DIMENSIONS} dimensions")
    dimensions: list[int] = []
    for dimension in obj:
        if type(dimension) is not int:  # bool is an int too, and no dimension
            raise WireError("expected a shape of integers")
        dimensions.append(dimension)
    return tuple(dimensions)


def hash_of(domain: str, obj: object) -> str:
    """Return 32 hex digits of SHA-256 over the canonical JSON of ``obj``, apart from other domains."""
    text = json.dumps(obj, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(f"{domain}\0{text}".encode()).hexdigest()[:32]
