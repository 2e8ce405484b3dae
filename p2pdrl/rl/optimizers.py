"""An algorithm's optimizer: an update rule over one flat tensor, with its state; norms and clipping.

torch.optim walks lists of tensors, which for a small policy costs more than the arithmetic; over one flat
vector the rules of `tensors.optimizers` are the whole of it, and their state is plain vectors that travel
beside the parameters. On the CPU a step walks through long vectors in pieces that stay in the cache.

Shape suffixes: D parameters, K those of them that move. Pieces of vectors have none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from p2pdrl.errors import LayoutMismatchError
from p2pdrl.tensors.optimizers import Arrays, UpdateRule
from p2pdrl.tensors.sidecar import SidecarItem

__all__ = [
    "MAX_COUNT",
    "Optimizer",
    "clip_gradients",
    "gradient_norm",
    "sum_of_squares",
]

MAX_COUNT = 1 << 53
"""Where a count that a peer sends is cut: what is added to it must still fit in an int64."""

_NORM_SPAN = 1 << 20
"""Elements whose squares are added up in float32; the sums are added up in float64."""

_PIECE = 1 << 18
"""Elements of each thread's part of a piece: of five vectors, 5 MiB in float32."""


def sum_of_squares(gradients_D: Tensor) -> float:
    """Return the sum of the squares of all gradients, to five digits or so however many they are.

    On the CPU torch adds the squares up one after another in float32: of 33 million it loses 0.2 %, and the
    parts of a vector don't give what the whole gives.
    """
    if gradients_D.device.type != "cpu" or gradients_D.numel() <= _NORM_SPAN:
        norm = float(torch.linalg.vector_norm(gradients_D))
        return norm * norm
    norms = [torch.linalg.vector_norm(span) for span in torch.split(gradients_D, _NORM_SPAN)]
    return float(torch.stack(norms).double().square().sum())


def gradient_norm(gradients_D: Tensor) -> float:
    """Return the Euclidean norm of all gradients, as exactly as `sum_of_squares`."""
    return math.sqrt(sum_of_squares(gradients_D))


def clip_gradients(gradients_D: Tensor, max_norm: float) -> float:
    """Scale the gradients in place to a norm of at most ``max_norm`` and return the norm they had."""
    norm = gradient_norm(gradients_D)
    if norm > max_norm and math.isfinite(norm):
        gradients_D.mul_(max_norm / norm)
    return norm


class _TorchOps:
    """`VectorOps` on tensors.

    On the CPU the memory of roots is kept, since fresh memory costs more there than the root. Other devices'
    allocators keep theirs.
    """

    def __init__(self) -> None:
        self._scratch = torch.empty(0)

    def accumulate(self, m: Tensor, g: Tensor, decay: float) -> None:
        m.mul_(decay).add_(g)

    def average(self, m: Tensor, g: Tensor, decay: float) -> None:
        m.lerp_(g, 1.0 - decay)

    def add_squares(self, v: Tensor, g: Tensor) -> None:
        v.addcmul_(g, g)

    def average_squares(self, v: Tensor, g: Tensor, decay: float) -> None:
        v.mul_(decay).addcmul_(g, g, value=1.0 - decay)

    def descend(self, x: Tensor, d: Tensor, rate: float) -> None:
        x.add_(d, alpha=-rate)

    def descend_sparse(self, x: Tensor, d: Tensor, rate: float) -> None:
        where_K = d.nonzero().squeeze(1)
        x.index_add_(0, where_K, d[where_K], alpha=-rate)

    def descend_scaled(
        self,
        x: Tensor,
        m: Tensor,
        v: Tensor,
        *,
        rate: float,
        eps: float,
        m_bias: float = 1.0,
        root_bias: float = 1.0,
    ) -> None:
        denominator = self._root(v)
        if root_bias != 1.0:
            denominator.div_(root_bias)
        x.addcdiv_(m, denominator.add_(eps), value=-(rate / m_bias))

    def _root(self, v: Tensor) -> Tensor:
        """Return √v, to be changed at will; valid until the next call."""
        if v.device.type != "cpu":
            return v.sqrt()
        if self._scratch.dtype != v.dtype or self._scratch.numel() < v.numel():
            self._scratch = torch.empty_like(v)
        return torch.sqrt(v, out=self._scratch[: v.numel()])


class Optimizer:
    """A rule over flat tensors, with its state: named vectors of D elements and a count of steps.

    Args:
        rule: formula.
        parameters_D: moved in place.
        gradients_D: read at each step.

    Attributes:
        name: before the names of its arrays in the sidecar; optimizers of one algorithm have one each.
    """

    def __init__(self, rule: UpdateRule, parameters_D: Tensor, gradients_D: Tensor) -> None:
        self.name = "optimizer"
        self._rule = rule
        self._parameters_D = parameters_D
        self._gradients_D = gradients_D
        self._vectors = {name: torch.zeros_like(parameters_D) for name in rule.slots}
        self._steps = 0
        self._ops = _TorchOps()
        self._aside: Arrays | None = None

    def step(self, learning_rate: float) -> None:
        """Move the parameters against the gradients."""
        self._steps += 1
        for x, g, *slots in self._pieces():
            self._rule.step(self._ops, x, g, tuple(slots), rate=learning_rate, count=self._steps)

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return self._steps if self._aside is None else int(self._aside[f"{self.name}.steps"])

    def _pieces(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield pieces of the parameters, the gradients and each slot in order: together the whole.

        Rules without state pass over the vectors once, and devices other than CPUs do best with one operation
        over all.
        """
        whole = (self._parameters_D, self._gradients_D, *self._vectors.values())
        size = _PIECE * torch.get_num_threads()
        cached = self._parameters_D.device.type == "cpu" and self._vectors
        if not cached or self._parameters_D.numel() <= size:
            yield whole
        else:
            yield from zip(*(torch.split(vector, size) for vector in whole), strict=True)

    def over(self, parameters_D: Tensor, gradients_D: Tensor) -> Optimizer:
        """Return an optimizer with the same rule and name over other tensors, before its first step.

        Optimizers of a vector's pieces do what the whole one's does.
        """
        other = Optimizer(self._rule, parameters_D, gradients_D)
        other.name = self.name
        return other

    def set_aside(self, *, aside: bool) -> None:
        """Give up the state's memory while others step, or have the state where the parameters are again.

        Set aside, it lies in arrays of others (`refer`), at first in copies on the host. It can be read and
        replaced as ever, but not stepped with.
        """
        if aside and self._aside is None:
            self._aside = self.state()
            self._vectors = {name: self._parameters_D.new_empty(0) for name in self._vectors}
            self._ops = _TorchOps()
        elif not aside and self._aside is not None:
            arrays, self._aside = self._aside, None
            self._vectors = {name: torch.empty_like(self._parameters_D) for name in self._vectors}
            self.load(arrays)

    def refer(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Set aside, let the state be what lies in these arrays, which nobody changes until there are others.

        Raises:
            LayoutMismatchError: an array is missing or has another shape.
        """
        if self._aside is None:
            raise RuntimeError("an optimizer that steps has its state in memory of its own")
        self._check(arrays)
        self._aside = {item.name: arrays[item.name] for item in self.items()}

    def items(self) -> tuple[SidecarItem, ...]:
        """Return how the state is laid out in the sidecar."""
        size = self._parameters_D.numel()
        vectors = [SidecarItem(f"{self.name}.{name}", (size,), "float32", "copy") for name in self._vectors]
        return (*vectors, SidecarItem(f"{self.name}.steps", (), "int64", "copy"))

    def state(self) -> Arrays:
        """Return the state by name; vectors are views where the device is the CPU."""
        if self._aside is not None:
            return dict(self._aside)
        arrays: Arrays = {f"{self.name}.{name}": v.cpu().numpy() for name, v in self._vectors.items()}
        arrays[f"{self.name}.steps"] = np.array(self._steps, dtype=np.int64)
        return arrays

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over a state that ``state`` returned, here or on another node; set aside, without copying it.

        Raises:
            LayoutMismatchError: an array is missing or has another shape.
        """
        if self._aside is not None:
            self.refer(arrays)
            return
        self._check(arrays)
        for name, vector_D in self._vectors.items():
            vector_D.copy_(torch.from_numpy(np.array(arrays[f"{self.name}.{name}"], dtype=np.float32)))
            if name == "v":
                vector_D.clamp_(min=0.0)  # squares: below zero, as a peer may send them, they give NaN
        self._steps = min(max(int(arrays[f"{self.name}.steps"]), 0), MAX_COUNT)

    def _check(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        for item in self.items():
            found = arrays.get(item.name)
            if found is None or found.shape != item.shape:
                shape = None if found is None else found.shape
                raise LayoutMismatchError(f"{item.name} should be of shape {item.shape}, is {shape}")
