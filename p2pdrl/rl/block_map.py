"""Where the parameters of a policy's blocks lie in its flat vector.

``sequential`` makes it. Whoever holds some blocks alone holds a vector of their parameters alone; whoever
puts the whole policy together again (for actors, checkpoints, peers that come later) copies it back by the
same map.

Shape suffixes: D parameters, P parameters of some blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import LayoutMismatchError
from p2pdrl.tensors.layout import Layout

__all__ = ["BlockMap", "Span"]

Vector = npt.NDArray[np.float32]
Span = tuple[int, int]
"""Start and stop in the flat vector."""


@dataclass(frozen=True)
class BlockMap:
    """From blocks to pieces of the flat vector.

    The vector of some blocks is made of their parameters one after the other, in the order of their numbers:
    as ``FlatModule(nn.ModuleList(those_blocks), device)`` lays them out. What has one number per
    parameter, such as Adam's moments, is cut and put together alike.

    Attributes:
        layout: of the whole policy.
        names: of each block's parameters, in the block's own order.
    """

    layout: Layout
    names: tuple[tuple[str, ...], ...]

    def size(self, numbers: Sequence[int]) -> int:
        """Return P."""
        return sum(stop - start for start, stop in self.spans(numbers))

    def chosen(self, numbers: Sequence[int]) -> list[str]:
        """Return the names of some blocks' parameters.

        Raises:
            LayoutMismatchError: there is no block of such a number, or one is named twice.
        """
        known = range(len(self.names))
        if len(set(numbers)) < len(numbers) or not all(number in known for number in numbers):
            raise LayoutMismatchError(
                f"blocks are numbered 0 to {len(self.names) - 1} and taken once, not {list(numbers)}"
            )
        return [name for number in numbers for name in self.names[number]]

    def spans(self, numbers: Sequence[int]) -> tuple[Span, ...]:
        """Return the pieces of the flat vector that put together are some blocks' own; few and long."""
        merged: list[Span] = []
        for name in self.chosen(numbers):
            start, stop = self._places[name]
            if merged and merged[-1][1] == start:
                merged[-1] = merged[-1][0], stop
            else:
                merged.append((start, stop))
        return tuple(merged)

    def take(self, vector_D: Vector, numbers: Sequence[int]) -> Vector:
        """Return a copy of some blocks' numbers.

        Raises:
            LayoutMismatchError: the vector isn't the whole policy's.
        """
        _check_length(vector_D, self.layout.size)
        return np.concatenate([vector_D[:0], *(vector_D[slice(*span)] for span in self.spans(numbers))])

    def put(self, vector_P: Vector, vector_D: Vector, numbers: Sequence[int]) -> None:
        """Write some blocks' numbers to where they belong in the whole.

        Raises:
            LayoutMismatchError: one of the vectors has another length.
        """
        _check_length(vector_D, self.layout.size)
        _check_length(vector_P, self.size(numbers))
        at = 0
        for start, stop in self.spans(numbers):
            vector_D[start:stop] = vector_P[at : at + stop - start]
            at += stop - start

    @property
    def titles(self) -> tuple[str, ...]:
        """What the names of each block's parameters have in common, for people: ``actor.0 + critic.0``."""
        return tuple(_title(names) for names in self.names)

    @cached_property
    def _places(self) -> dict[str, Span]:
        entries = self.layout.entries
        stops = accumulate(entry.size for entry in entries)
        return {entry.name: (stop - entry.size, stop) for entry, stop in zip(entries, stops, strict=True)}


def _check_length(vector: npt.NDArray[Any], size: int) -> None:
    """Check that ``vector`` is flat and has ``size`` numbers.

    Raises:
        LayoutMismatchError: it isn't.
    """
    if vector.shape != (size,):
        raise LayoutMismatchError(f"a vector of {size} numbers is wanted, not of shape {vector.shape}")


def _title(names: Sequence[str]) -> str:
    """Return the longest common path of each network's names."""
    common: dict[str, list[str]] = {}
    for name in names:
        path = name.split(".")[:-1] or [name]
        shared = common.setdefault(path[0], path)
        same = [one == other for one, other in zip(shared, path, strict=False)]
        common[path[0]] = shared[: same.index(False) if False in same else len(same)]
    return " + ".join(".".join(path) for path in common.values()) or "no parameters"
