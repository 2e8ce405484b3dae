"""Typed state that goes beside the parameter vector: optimizer moments, normalisers, target nets, buffers.

Each item says by which rule two nodes' copies are brought together:

| rule | meaning |
|---|---|
| ``copy`` | kept in an ordinary exchange; copied with a state transfer or a `set` |
| ``moments`` | count, mean or M2 of a running normaliser: merged from cumulative counters (`moments`) |

The learner declares the layout, the board holds the bytes, state transfer and checkpoints carry them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import LayoutMismatchError
from p2pdrl.tensors.layout import check_name_and_shape, check_rows, check_shape, check_text, hash_of

__all__ = ["MAX_ITEMS", "MAX_NBYTES", "AnyArray", "MergeRule", "SidecarDtype", "SidecarItem", "SidecarLayout"]

AnyArray = npt.NDArray[Any]
SidecarDtype = Literal["float32", "float64", "int64"]
MergeRule = Literal["copy", "moments"]

MAX_ITEMS = 10_000
MAX_NBYTES = 1 << 36
"""Two float32 optimizer moments of the largest vector take 2^34."""
_ALIGNMENT = 8


@dataclass(frozen=True)
class SidecarItem:
    """One array of the sidecar.

    Args:
        name: unique within the sidecar, at most 200 characters.
        shape: at most 8 dimensions; ``()`` is a scalar.
        rule: how two nodes' values are brought together; ``moments`` takes float64.
    """

    name: str
    shape: tuple[int, ...]
    dtype: SidecarDtype = "float32"
    rule: MergeRule = "copy"

    @property
    def nbytes(self) -> int:
        """Bytes of the array itself, without padding."""
        return math.prod(self.shape) * (4 if self.dtype == "float32" else 8)


@dataclass(frozen=True)
class SidecarLayout:
    """An ordered list of items, each at an offset that is a multiple of 8 bytes.

    Args:
        items: in the order in which they lie in the buffer; none at all is fine.

    Raises:
        LayoutMismatchError: an item, their number or their total is out of bounds.

    Example:
        >>> sidecar = SidecarLayout((SidecarItem("adam.m", (3,)), SidecarItem("adam.step", (), "int64")))
        >>> sidecar.offsets, sidecar.nbytes
        ((0, 16), 24)
    """

    items: tuple[SidecarItem, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "items", tuple(self.items))
        if len(self.items) > MAX_ITEMS:
            raise LayoutMismatchError(f"a sidecar has at most {MAX_ITEMS} items, not {len(self.items)}")
        names: set[str] = set()
        for item in self.items:
            check_name_and_shape(item.name, item.shape)
            if item.dtype not in get_args(SidecarDtype) or item.rule not in get_args(MergeRule):
                raise LayoutMismatchError(
                    f"sidecar {item.name!r}: dtype {item.dtype!r} or rule {item.rule!r} unknown"
                )
            if item.rule == "moments" and item.dtype != "float64":
                raise LayoutMismatchError(f"sidecar {item.name!r}: moments are float64, not {item.dtype}")
            if item.name in names:
                raise LayoutMismatchError(f"sidecar item {item.name!r} occurs twice")
            names.add(item.name)
        if self.nbytes > MAX_NBYTES:
            raise LayoutMismatchError(f"a sidecar takes at most {MAX_NBYTES} bytes, not {self.nbytes}")

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each item."""
        ends = accumulate((_aligned(item.nbytes) for item in self.items), initial=0)
        return tuple(ends)[: len(self.items)]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole, padding included."""
        return sum(_aligned(item.nbytes) for item in self.items)

    def under(self, name: str) -> SidecarLayout:
        """Return a layout of those items alone that are called ``name.…``, in the same order."""
        return SidecarLayout(tuple(item for item in self.items if item.name.startswith(f"{name}.")))

    @cached_property
    def hash(self) -> str:
        """32 hex digits: SHA-256 over names, shapes, dtypes and rules, in order."""
        return hash_of("p2pdrl sidecar", self.to_wire())

    def views(self, buffer: memoryview | bytearray | bytes) -> dict[str, AnyArray]:
        """Return one shaped view into ``buffer`` per item, by name; writable when the buffer is."""
        have = memoryview(buffer).nbytes
        if have != self.nbytes:
            raise LayoutMismatchError(f"the sidecar takes {self.nbytes} bytes, the buffer has {have}")
        return {
            item.name: np.frombuffer(buffer, item.dtype, math.prod(item.shape), at).reshape(item.shape)
            for item, at in zip(self.items, self.offsets, strict=True)
        }

    def check(self, values: Mapping[str, AnyArray]) -> None:
        """Check that ``values`` has exactly the items of this layout.

        Raises:
            LayoutMismatchError: a name, shape or dtype differs.
        """
        if values.keys() != {item.name for item in self.items}:
            raise LayoutMismatchError(f"sidecar names differ: {sorted(values)[:10]}")
        for item in self.items:
            value = values[item.name]
            if value.shape != item.shape or value.dtype != item.dtype:
                raise LayoutMismatchError(
                    f"sidecar {item.name!r}: expected {item.dtype} {item.shape}, "
                    f"not {value.dtype} {value.shape}"
                )

    def write(self, values: Mapping[str, AnyArray], into: Mapping[str, AnyArray]) -> None:
        """Copy ``values`` into the views ``into`` (made by `views`).

        Raises:
            LayoutMismatchError: a name, shape or dtype differs; nothing has been written then.
        """
        self.check(values)
        for name, view in into.items():
            np.copyto(view, values[name])

    def to_wire(self) -> list[list[object]]:
        """Return plain JSON types: ``[[name, [dimension, …], dtype, rule], …]``."""
        return [[item.name, list(item.shape), item.dtype, item.rule] for item in self.items]

    @classmethod
    def from_wire(cls, obj: object) -> SidecarLayout:
        """Rebuild a layout from what `to_wire` made.

        Raises:
            WireError: it isn't of that form.
            LayoutMismatchError: it is, and breaks a bound.
        """
        rows = check_rows(obj, MAX_ITEMS, width=4, what="sidecar layout")
        return cls(
            tuple(
                SidecarItem(
                    check_text(row[0]),
                    check_shape(row[1]),
                    cast("SidecarDtype", check_text(row[2])),
                    cast("MergeRule", check_text(row[3])),
                )
                for row in rows
            )
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
