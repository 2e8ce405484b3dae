"""Optimizers over one flat tensor.

``algorithms`` own one each. torch.optim walks lists of tensors, which for a small policy costs more than
the arithmetic; over one flat vector the formulas below are the whole of it, and their state is
plain vectors that travel beside the parameters. On the CPU a step walks through long vectors in pieces that
stay in the cache, since its five or so operations would else read and write main memory each.

Shape suffixes: D parameters, K those of them that move. Pieces of vectors have none.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from p2pdrl.errors import LayoutMismatchError
from p2pdrl.tensors.sidecar import SidecarItem

__all__ = [
    "MAX_COUNT",
    "SGD",
    "Adagrad",
    "Adam",
    "Momentum",
    "Optimizer",
    "RMSProp",
    "clip_gradients",
    "gradient_norm",
    "sum_of_squares",
]

Arrays = dict[str, npt.NDArray[Any]]

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


class Optimizer(ABC):
    """State shared by all: named vectors of D elements and a count of steps.

    Attributes:
        name: before the names of its arrays in the sidecar; optimizers of one algorithm have one each.
    """

    name = "optimizer"

    def __init__(self, parameters_D: Tensor, gradients_D: Tensor, names: tuple[str, ...]) -> None:
        self._parameters_D = parameters_D
        self._gradients_D = gradients_D
        self._vectors = {name: torch.zeros_like(parameters_D) for name in names}
        self._steps = 0
        self._scratch = parameters_D.new_empty(0)
        self._aside: Arrays | None = None

    @abstractmethod
    def step(self, learning_rate: float) -> None:
        """Move the parameters against the gradients."""

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return self._steps if self._aside is None else int(self._aside[f"{self.name}.steps"])

    def _pieces(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield pieces of the parameters, the gradients and each vector in order: together the whole.

        Other devices than CPUs do best with one operation over all.
        """
        whole = (self._parameters_D, self._gradients_D, *self._vectors.values())
        size = _PIECE * torch.get_num_threads()
        if self._parameters_D.device.type != "cpu" or self._parameters_D.numel() <= size:
            yield whole
        else:
            yield from zip(*(torch.split(vector, size) for vector in whole), strict=True)

    def _root(self, v: Tensor) -> Tensor:
        """Return √v of a piece, to be changed at will; valid until the next call.

        Its memory is kept on the CPU, where fresh memory costs more than the root. Other devices' allocators
        keep theirs.
        """
        if v.device.type != "cpu":
            return v.sqrt()
        if self._scratch.numel() < v.numel():
            self._scratch = torch.empty_like(v)
        return torch.sqrt(v, out=self._scratch[: v.numel()])

    def over(self, parameters_D: Tensor, gradients_D: Tensor) -> Self:
        """Return an optimizer with the same settings over other tensors, before its first step.

        All of them treat each entry by itself: optimizers of a vector's pieces do what the whole one's does.
        """
        other = copy.copy(self)
        Optimizer.__init__(other, parameters_D, gradients_D, tuple(self._vectors))
        return other

    def set_aside(self, *, aside: bool) -> None:
        """Give up the state's memory while others step, or have the state where the parameters are again.

        Set aside, it lies in arrays of others (`refer`), at first in copies on the host. It can be read and
        replaced as ever, but not stepped with.
        """
        if aside and self._aside is None:
            self._aside = self.state()
            self._vectors = {name: self._parameters_D.new_empty(0) for name in self._vectors}
            self._scratch = self._parameters_D.new_empty(0)
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


class SGD(Optimizer):
    """Stochastic gradient descent (Robbins and Monro 1951).

    Args:
        parameters_D: moved in place.
        gradients_D: read at each step.
        sparse: write only where the gradient isn't zero, as Hogwild asks for (Recht 2011, arXiv
            1106.5730, section 3): processes that share the parameters then collide only where they
            move the same entry. A dense step also writes back what it doesn't move.
    """

    def __init__(self, parameters_D: Tensor, gradients_D: Tensor, *, sparse: bool = False) -> None:
        super().__init__(parameters_D, gradients_D, ())
        self._sparse = sparse

    def step(self, learning_rate: float) -> None:
        """Move by −lr · g."""
        self._steps += 1
        if not self._sparse:
            self._parameters_D.add_(self._gradients_D, alpha=-learning_rate)
            return
        where_K = self._gradients_D.nonzero().squeeze(1)
        self._parameters_D.index_add_(0, where_K, self._gradients_D[where_K], alpha=-learning_rate)


class Momentum(Optimizer):
    """Gradient descent with momentum (Polyak 1964; Sutskever 2013), in the form that torch has.

    Args:
        parameters_D: moved in place.
        gradients_D: read at each step.
        momentum: μ, share of the last move that goes on.
        nesterov: look ahead by one move.
    """

    def __init__(
        self, parameters_D: Tensor, gradients_D: Tensor, momentum: float = 0.9, *, nesterov: bool = False
    ) -> None:
        super().__init__(parameters_D, gradients_D, ("m",))
        self._momentum = momentum
        self._nesterov = nesterov

    def step(self, learning_rate: float) -> None:
        """Move by −lr · m with m ← μ m + g; with Nesterov by −lr · (g + μ m)."""
        self._steps += 1
        for x, g, m in self._pieces():
            m.mul_(self._momentum).add_(g)
            if self._nesterov:
                x.add_(g, alpha=-learning_rate)
                x.add_(m, alpha=-learning_rate * self._momentum)
            else:
                x.add_(m, alpha=-learning_rate)


class Adagrad(Optimizer):
    """Adagrad (Duchi 2011, JMLR 12, with diagonal matrices).

    Args:
        parameters_D: moved in place.
        gradients_D: read at each step.
        eps: added to the denominator.
    """

    def __init__(self, parameters_D: Tensor, gradients_D: Tensor, eps: float = 1e-10) -> None:
        super().__init__(parameters_D, gradients_D, ("v",))
        self._eps = eps

    def step(self, learning_rate: float) -> None:
        """Move by −lr · g / (√Σg² + ε)."""
        self._steps += 1
        for x, g, v in self._pieces():
            v.addcmul_(g, g)
            x.addcdiv_(g, self._root(v).add_(self._eps), value=-learning_rate)


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, arXiv 1412.6980, algorithm 1).

    Args:
        parameters_D: moved in place.
        gradients_D: read at each step.
        eps: added to the denominator.
    """

    BETA_1 = 0.9
    BETA_2 = 0.999

    def __init__(self, parameters_D: Tensor, gradients_D: Tensor, eps: float = 1e-5) -> None:
        super().__init__(parameters_D, gradients_D, ("m", "v"))
        self._eps = eps

    def step(self, learning_rate: float) -> None:
        """Move by −lr · m̂ / (√v̂ + ε)."""
        self._steps += 1
        scale = math.sqrt(1.0 - self.BETA_2**self._steps)
        step_size = learning_rate / (1.0 - self.BETA_1**self._steps)
        for x, g, m, v in self._pieces():
            m.lerp_(g, 1.0 - self.BETA_1)
            v.mul_(self.BETA_2).addcmul_(g, g, value=1.0 - self.BETA_2)
            denominator = self._root(v).div_(scale).add_(self._eps)
            x.addcdiv_(m, denominator, value=-step_size)


class RMSProp(Optimizer):
    """RMSProp without momentum (Hinton 2012, lecture 6), as A3C uses it (Mnih 2016, section 4).

    Args:
        parameters_D: moved in place.
        gradients_D: read at each step.
        alpha: decay of the average of squared gradients.
        eps: added to the denominator, outside the root.
    """

    def __init__(self, parameters_D: Tensor, gradients_D: Tensor, alpha: float, eps: float) -> None:
        super().__init__(parameters_D, gradients_D, ("v",))
        self._alpha = alpha
        self._eps = eps

    def step(self, learning_rate: float) -> None:
        """Move by −lr · g / (√v + ε)."""
        self._steps += 1
        for x, g, v in self._pieces():
            v.mul_(self._alpha).addcmul_(g, g, value=1.0 - self._alpha)
            x.addcdiv_(g, self._root(v).add_(self._eps), value=-learning_rate)
