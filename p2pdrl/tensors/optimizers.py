"""Optimizers on NumPy vectors: what a parameter server applies to the shard that it holds.

Called by the server strategies, in a thread for long shards. In place, and in pieces that stay in the
cache: the five or so passes of a step then cost about as much as reading and writing each vector once.
Results are those of `torch.optim`, but for the rounding; ε is where `rl.optimizers` has it.

Shapes: every vector is flat, of D elements (all of the shard); names carry no suffix.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import LayoutMismatchError
from p2pdrl.tensors.wire import spans

__all__ = [
    "Arrays",
    "NumpyAdagrad",
    "NumpyAdam",
    "NumpyMomentum",
    "NumpyRMSProp",
    "NumpySGD",
    "OptimizerName",
    "ShardOptimizer",
    "make_optimizer",
]

OptimizerName = Literal["sgd", "momentum", "rmsprop", "adagrad", "adam"]
FloatVector = npt.NDArray[np.floating[Any]]
Arrays = dict[str, npt.NDArray[Any]]

_PIECE = 1 << 15
"""Elements of a piece: four vectors and two of scratch stay in the cache, in float64 too."""


class ShardOptimizer(ABC):
    """A step rule, its named vectors of D elements, and a count of steps.

    Gradients are taken as they are: whether they are finite is for the caller to check. Not for several
    threads at once.

    Args:
        size: D.
        dtype: float32 or float64, of the parameters, gradients and state.
        names: of the vectors; one named ``v`` holds sums or means of squares.
    """

    def __init__(self, size: int, dtype: npt.DTypeLike, names: tuple[str, ...]) -> None:
        self._size = size
        self._dtype = np.dtype(dtype)
        if self._dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise ValueError(f"optimizers step in float32 or float64, not {self._dtype}")
        self._vectors: dict[str, FloatVector] = {name: np.zeros(size, self._dtype) for name in names}
        self._steps = 0
        self._scratch: FloatVector = np.empty((2, min(_PIECE, size)), self._dtype)

    @property
    def steps(self) -> int:
        """Steps made, those of earlier holders of the state included."""
        return self._steps

    def step(self, parameters: FloatVector, gradient: FloatVector, learning_rate: float) -> None:
        """Move ``parameters`` against ``gradient``, in place.

        Args:
            parameters: D elements.
            gradient: D elements; unchanged.
            learning_rate: of this step.

        Raises:
            LayoutMismatchError: a vector's length or type differs.
        """
        for what, vector in (("parameters", parameters), ("gradient", gradient)):
            if vector.dtype != self._dtype or vector.shape != (self._size,):
                raise LayoutMismatchError(
                    f"the {what} must be {self._dtype} of {self._size} elements, "
                    f"not {vector.dtype} {vector.shape}"
                )
        self._steps += 1
        for span in spans(self._size, _PIECE):
            self._step_piece(parameters[span], gradient[span], learning_rate, span)

    @abstractmethod
    def _step_piece(self, x: FloatVector, g: FloatVector, rate: float, span: slice) -> None:
        """Move ``x``, the piece ``span`` of the parameters, against ``g``, that of the gradient."""

    def state(self) -> Arrays:
        """Return the state by name: views of the vectors, valid until the next step, and ``steps``."""
        return {**self._vectors, "steps": np.array(self._steps, np.int64)}

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over what `state` returned, here or on another node; it is copied.

        Means of squares below zero, which a peer may send, count as zero: they would give NaN.

        Raises:
            LayoutMismatchError: an array is missing or has another shape or type, or holds NaN or infinity;
                nothing has been taken over then.
        """
        wanted = {name: (vector.dtype, vector.shape) for name, vector in self._vectors.items()}
        for name, form in {**wanted, "steps": (np.dtype(np.int64), ())}.items():
            found = state.get(name)
            if found is None or (found.dtype, found.shape) != form:
                have = None if found is None else (found.dtype, found.shape)
                raise LayoutMismatchError(f"optimizer state {name!r} should be {form}, is {have}")
            if not all(np.isfinite(found[span]).all() for span in spans(found.size) if found.shape):
                raise LayoutMismatchError(f"optimizer state {name!r} holds NaN or infinity")
        for name, vector in self._vectors.items():
            np.copyto(vector, state[name])
            if name == "v":
                np.maximum(vector, 0.0, out=vector)
        self._steps = max(0, int(state["steps"]))


class NumpySGD(ShardOptimizer):
    """x −= lr · g (Robbins and Monro 1951)."""

    def __init__(self, size: int, *, dtype: npt.DTypeLike = np.float32) -> None:
        super().__init__(size, dtype, ())

    def _step_piece(self, x: FloatVector, g: FloatVector, rate: float, span: slice) -> None:
        a = self._scratch[0, : x.size]
        np.multiply(g, rate, out=a)
        np.subtract(x, a, out=x)


class NumpyMomentum(ShardOptimizer):
    """m = μ m + g; x −= lr · m (Polyak 1964), without dampening.

    Args:
        size: D.
        momentum: μ.
        dtype: of all vectors.
    """

    def __init__(self, size: int, *, momentum: float = 0.9, dtype: npt.DTypeLike = np.float32) -> None:
        super().__init__(size, dtype, ("m",))
        self._momentum = momentum

    def _step_piece(self, x: FloatVector, g: FloatVector, rate: float, span: slice) -> None:
        a = self._scratch[0, : x.size]
        m = self._vectors["m"][span]
        np.multiply(m, self._momentum, out=m)
        np.add(m, g, out=m)
        np.multiply(m, rate, out=a)
        np.subtract(x, a, out=x)


class NumpyRMSProp(ShardOptimizer):
    """v = α v + (1 − α) g²; x −= lr · g / (√v + ε) (Hinton 2012, lecture 6); ε is outside the root.

    Args:
        size: D.
        decay: α.
        eps: ε.
        dtype: of all vectors.
    """

    def __init__(
        self, size: int, *, decay: float = 0.99, eps: float = 1e-5, dtype: npt.DTypeLike = np.float32
    ) -> None:
        super().__init__(size, dtype, ("v",))
        self._decay = decay
        self._eps = eps

    def _step_piece(self, x: FloatVector, g: FloatVector, rate: float, span: slice) -> None:
        a = self._scratch[0, : x.size]
        v = self._vectors["v"][span]
        _average_squares(v, g, self._decay, a)
        np.sqrt(v, out=a)
        np.add(a, self._eps, out=a)
        np.divide(g, a, out=a)
        np.multiply(a, rate, out=a)
        np.subtract(x, a, out=x)


class NumpyAdagrad(ShardOptimizer):
    """v += g²; x −= lr · g / (√v + ε) (Duchi 2011), as DistBelief's servers step (Dean 2012, section 4.1).

    Args:
        size: D.
        eps: ε.
        dtype: of all vectors.
    """

    def __init__(self, size: int, *, eps: float = 1e-5, dtype: npt.DTypeLike = np.float32) -> None:
        super().__init__(size, dtype, ("v",))
        self._eps = eps

    def _step_piece(self, x: FloatVector, g: FloatVector, rate: float, span: slice) -> None:
        a = self._scratch[0, : x.size]
        v = self._vectors["v"][span]
        np.multiply(g, g, out=a)
        np.add(v, a, out=v)
        np.sqrt(v, out=a)
        np.add(a, self._eps, out=a)
        np.divide(g, a, out=a)
        np.multiply(a, rate, out=a)
        np.subtract(x, a, out=x)


class NumpyAdam(ShardOptimizer):
    """Adam (Kingma and Ba 2015, arXiv 1412.6980, algorithm 1): x −= lr · m̂ / (√v̂ + ε).

    Args:
        size: D.
        momentum: β₁.
        decay: β₂.
        eps: ε.
        dtype: of all vectors.
    """

    def __init__(
        self,
        size: int,
        *,
        momentum: float = 0.9,
        decay: float = 0.999,
        eps: float = 1e-5,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        super().__init__(size, dtype, ("m", "v"))
        if not (momentum < 1 and decay < 1):
            raise ValueError(f"Adam's momentum and decay are below 1, not {momentum} and {decay}")
        self._momentum = momentum
        self._decay = decay
        self._eps = eps

    def _step_piece(self, x: FloatVector, g: FloatVector, rate: float, span: slice) -> None:
        a, b = self._scratch[:, : x.size]
        m, v = self._vectors["m"][span], self._vectors["v"][span]
        np.subtract(g, m, out=a)
        np.multiply(a, 1.0 - self._momentum, out=a)
        np.add(m, a, out=m)
        _average_squares(v, g, self._decay, a)
        # lr m̂ / (√v̂ + ε) with both corrections drawn out of the vectors, which saves two passes.
        root = math.sqrt(1.0 - self._decay**self._steps)
        np.sqrt(v, out=a)
        np.add(a, self._eps * root, out=a)
        np.divide(m, a, out=b)
        np.multiply(b, rate * root / (1.0 - self._momentum**self._steps), out=b)
        np.subtract(x, b, out=x)


def make_optimizer(
    name: OptimizerName,
    size: int,
    *,
    momentum: float = 0.9,
    decay: float = 0.999,
    eps: float = 1e-5,
    dtype: npt.DTypeLike = np.float32,
) -> ShardOptimizer:
    """Return an optimizer for a shard.

    Args:
        name: see the classes.
        size: D.
        momentum: of ``momentum``; β₁ of ``adam``.
        decay: β₂ of ``adam``; α of ``rmsprop``.
        eps: of the last three.
        dtype: float32 or float64.

    Raises:
        ValueError: ``dtype`` is another, or an average of ``adam`` has no end.
    """
    match name:
        case "sgd":
            return NumpySGD(size, dtype=dtype)
        case "momentum":
            return NumpyMomentum(size, momentum=momentum, dtype=dtype)
        case "rmsprop":
            return NumpyRMSProp(size, decay=decay, eps=eps, dtype=dtype)
        case "adagrad":
            return NumpyAdagrad(size, eps=eps, dtype=dtype)
        case "adam":
            return NumpyAdam(size, momentum=momentum, decay=decay, eps=eps, dtype=dtype)


def _average_squares(v: FloatVector, g: FloatVector, decay: float, scratch: FloatVector) -> None:
    """V = decay · v + (1 − decay) · g²."""
    np.multiply(g, g, out=scratch)
    np.multiply(scratch, 1.0 - decay, out=scratch)
    np.multiply(v, decay, out=v)
    np.add(v, scratch, out=v)
