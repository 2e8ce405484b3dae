"""Optimizers: the formula of each once, and what a parameter server steps its shard with.

An `UpdateRule` is a formula with its hyper-parameters and the names of its state. It is written in the
operations of `VectorOps`, which has two implementations: NumPy here, for shards (`ShardOptimizer`, called by
the server strategies, in a thread where shards are long), and torch in `rl.optimizers`, for learners.

All rules treat each entry by itself, so vectors may be stepped in pieces that stay in the cache: the five or
so passes of a step then cost about as much as reading and writing each vector once.

Shapes: every vector is flat, of D elements (all of the shard), or a piece of that; names carry no suffix.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import LayoutMismatchError
from p2pdrl.tensors.mix import all_finite
from p2pdrl.tensors.wire import spans

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Arrays",
    "Momentum",
    "OptimizerName",
    "RMSProp",
    "ShardOptimizer",
    "UpdateRule",
    "VectorOps",
    "update_rule",
]

V = TypeVar("V")
V_contra = TypeVar("V_contra", contravariant=True)
OptimizerName = Literal["sgd", "momentum", "rmsprop", "adagrad", "adam"]
FloatVector = npt.NDArray[np.floating[Any]]
Arrays = dict[str, npt.NDArray[Any]]

_PIECE_BYTES = 1 << 18
"""Of each vector's piece: four vectors and one of scratch stay in the cache."""


class VectorOps(Protocol[V_contra]):
    """What update rules are written in; everything in place."""

    def accumulate(self, m: V_contra, g: V_contra, decay: float) -> None:
        """M ← decay · m + g."""

    def average(self, m: V_contra, g: V_contra, decay: float) -> None:
        """M ← decay · m + (1 − decay) · g."""

    def add_squares(self, v: V_contra, g: V_contra) -> None:
        """V ← v + g²."""

    def average_squares(self, v: V_contra, g: V_contra, decay: float) -> None:
        """V ← decay · v + (1 − decay) · g²."""

    def descend(self, x: V_contra, d: V_contra, rate: float) -> None:
        """X ← x − rate · d."""

    def descend_sparse(self, x: V_contra, d: V_contra, rate: float) -> None:
        """X ← x − rate · d, which writes only where d isn't zero."""

    def descend_scaled(
        self,
        x: V_contra,
        m: V_contra,
        v: V_contra,
        *,
        rate: float,
        eps: float,
        m_bias: float = 1.0,
        root_bias: float = 1.0,
        root_eps: float = 0.0,
    ) -> None:
        """X ← x − rate · (m / m_bias) / (√(v + root_eps) / root_bias + ε)."""


class UpdateRule(ABC):
    """A formula by which parameters move.

    Attributes:
        slots: names of its state's vectors; one named ``v`` holds sums or means of squares.
    """

    slots: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def step(self, by: VectorOps[V], x: V, g: V, slots: tuple[V, ...], *, rate: float, count: int) -> None:
        """Move ``x`` against ``g``: step number ``count``, from 1."""


@dataclass(frozen=True)
class SGD(UpdateRule):
    """Stochastic gradient descent (Robbins and Monro 1951).

    Attributes:
        sparse: write only where the gradient isn't zero, as Hogwild asks for (Recht 2011, arXiv
            1106.5730, section 3): processes that share the parameters then collide only where they
            move the same entry. A dense step also writes back what it doesn't move.
    """

    sparse: bool = False

    def step(self, by: VectorOps[V], x: V, g: V, slots: tuple[V, ...], *, rate: float, count: int) -> None:
        """X ← x − lr · g."""
        (by.descend_sparse if self.sparse else by.descend)(x, g, rate)


@dataclass(frozen=True)
class Momentum(UpdateRule):
    """Gradient descent with momentum (Polyak 1964; Sutskever 2013), without dampening, as torch has it.

    Attributes:
        momentum: μ, share of the last move that goes on.
        nesterov: look ahead by one move.
    """

    slots = ("m",)
    momentum: float = 0.9
    nesterov: bool = False

    def step(self, by: VectorOps[V], x: V, g: V, slots: tuple[V, ...], *, rate: float, count: int) -> None:
        """M ← μ m + g; x ← x − lr · m, with Nesterov x ← x − lr · (g + μ m)."""
        (m,) = slots
        by.accumulate(m, g, self.momentum)
        if self.nesterov:
            by.descend(x, g, rate)
            by.descend(x, m, rate * self.momentum)
        else:
            by.descend(x, m, rate)


@dataclass(frozen=True)
class RMSProp(UpdateRule):
    """RMSProp without momentum (Hinton 2012, lecture 6), as A3C uses it (Mnih 2016, section 4).

    Attributes:
        decay: α, of the mean of squared gradients.
        eps: ε.
        eps_in_root: x ← x − lr · g / √(v + ε) instead, as A3C's equation S2 (and TensorFlow) has it.
    """

    slots = ("v",)
    decay: float = 0.99
    eps: float = 1e-5
    eps_in_root: bool = False

    def step(self, by: VectorOps[V], x: V, g: V, slots: tuple[V, ...], *, rate: float, count: int) -> None:
        """V ← α v + (1 − α) g²; x ← x − lr · g / (√v + ε)."""
        (v,) = slots
        by.average_squares(v, g, self.decay)
        if self.eps_in_root:
            by.descend_scaled(x, g, v, rate=rate, eps=0.0, root_eps=self.eps)
        else:
            by.descend_scaled(x, g, v, rate=rate, eps=self.eps)


@dataclass(frozen=True)
class Adagrad(UpdateRule):
    """Adagrad (Duchi 2011, diagonal matrices), as DistBelief's servers step (Dean 2012, section 4.1)."""

    slots = ("v",)
    eps: float = 1e-10

    def step(self, by: VectorOps[V], x: V, g: V, slots: tuple[V, ...], *, rate: float, count: int) -> None:
        """V ← v + g²; x ← x − lr · g / (√v + ε)."""
        (v,) = slots
        by.add_squares(v, g)
        by.descend_scaled(x, g, v, rate=rate, eps=self.eps)


@dataclass(frozen=True)
class Adam(UpdateRule):
    """Adam (Kingma and Ba 2015, arXiv 1412.6980, algorithm 1)."""

    slots = ("m", "v")
    beta_1: float = 0.9
    beta_2: float = 0.999
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if not (self.beta_1 < 1 and self.beta_2 < 1):
            raise ValueError(f"Adam's momentum and decay are below 1, not {self.beta_1} and {self.beta_2}")

    def step(self, by: VectorOps[V], x: V, g: V, slots: tuple[V, ...], *, rate: float, count: int) -> None:
        """M ← β₁ m + (1 − β₁) g; v ← β₂ v + (1 − β₂) g²; x ← x − lr · m̂ / (√v̂ + ε).

        m̂ = m / (1 − β₁ᵗ) and v̂ = v / (1 − β₂ᵗ).
        """
        m, v = slots
        by.average(m, g, self.beta_1)
        by.average_squares(v, g, self.beta_2)
        m_bias, root_bias = 1.0 - self.beta_1**count, math.sqrt(1.0 - self.beta_2**count)
        by.descend_scaled(x, m, v, rate=rate, eps=self.eps, m_bias=m_bias, root_bias=root_bias)


def update_rule(
    name: OptimizerName, *, momentum: float = 0.9, decay: float = 0.999, eps: float = 1e-5
) -> UpdateRule:
    """Return a server's rule.

    Args:
        name: see the classes.
        momentum: of ``momentum``; β₁ of ``adam``.
        decay: β₂ of ``adam``; α of ``rmsprop``.
        eps: of the last three.
    """
    match name:
        case "sgd":
            return SGD()
        case "momentum":
            return Momentum(momentum)
        case "rmsprop":
            return RMSProp(decay, eps)
        case "adagrad":
            return Adagrad(eps)
        case "adam":
            return Adam(momentum, decay, eps)


class _NumpyOps:
    """`VectorOps` on NumPy vectors of at most ``size`` elements, without allocating any."""

    def __init__(self, size: int, dtype: npt.DTypeLike) -> None:
        self._scratch: FloatVector = np.empty(size, dtype)

    def accumulate(self, m: FloatVector, g: FloatVector, decay: float) -> None:
        np.multiply(m, decay, out=m)
        np.add(m, g, out=m)

    def average(self, m: FloatVector, g: FloatVector, decay: float) -> None:
        a = self._scratch[: m.size]
        np.subtract(g, m, out=a)
        np.multiply(a, 1.0 - decay, out=a)
        np.add(m, a, out=m)

    def add_squares(self, v: FloatVector, g: FloatVector) -> None:
        a = self._scratch[: v.size]
        np.multiply(g, g, out=a)
        np.add(v, a, out=v)

    def average_squares(self, v: FloatVector, g: FloatVector, decay: float) -> None:
        a = self._scratch[: v.size]
        np.multiply(g, g, out=a)
        np.multiply(a, 1.0 - decay, out=a)
        np.multiply(v, decay, out=v)
        np.add(v, a, out=v)

    def descend(self, x: FloatVector, d: FloatVector, rate: float) -> None:
        a = self._scratch[: x.size]
        np.multiply(d, rate, out=a)
        np.subtract(x, a, out=x)

    def descend_sparse(self, x: FloatVector, d: FloatVector, rate: float) -> None:
        where = np.flatnonzero(d)
        x[where] -= rate * d[where]

    def descend_scaled(
        self,
        x: FloatVector,
        m: FloatVector,
        v: FloatVector,
        *,
        rate: float,
        eps: float,
        m_bias: float = 1.0,
        root_bias: float = 1.0,
        root_eps: float = 0.0,
    ) -> None:
        # The corrections are drawn out of the vectors, which saves two passes.
        a = self._scratch[: x.size]
        if root_eps:
            v = np.add(v, root_eps, out=a)
        np.sqrt(v, out=a)
        np.add(a, eps * root_bias, out=a)
        np.divide(m, a, out=a)
        np.multiply(a, rate * root_bias / m_bias, out=a)
        np.subtract(x, a, out=x)


class ShardOptimizer:
    """A rule over NumPy vectors, with its state and a count of steps.

    Gradients are taken as they are: whether they are finite is for the caller to check. Not for several
    threads at once.

    Args:
        dtype: float32 or float64, of the parameters, gradients and state.
    """

    def __init__(self, rule: UpdateRule, size: int, dtype: npt.DTypeLike = np.float32) -> None:
        self._rule = rule
        self._size = size
        self._dtype = np.dtype(dtype)
        if self._dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise ValueError(f"optimizers step in float32 or float64, not {self._dtype}")
        self._vectors: dict[str, FloatVector] = {name: np.zeros(size, self._dtype) for name in rule.slots}
        self._steps = 0
        self._piece = _PIECE_BYTES // self._dtype.itemsize
        self._ops = _NumpyOps(min(self._piece, size), self._dtype)

    @property
    def steps(self) -> int:
        """Steps made, those of earlier holders of the state included."""
        return self._steps

    def step(self, parameters: FloatVector, gradient: FloatVector, learning_rate: float) -> None:
        """Move ``parameters`` against ``gradient``, which stays as it is."""
        for what, vector in (("parameters", parameters), ("gradient", gradient)):
            if vector.dtype != self._dtype or vector.shape != (self._size,):
                raise LayoutMismatchError(
                    f"the {what} must be {self._dtype} of {self._size} elements, "
                    f"not {vector.dtype} {vector.shape}"
                )
        self._steps += 1
        for span in spans(self._size, self._piece):
            slots = tuple(vector[span] for vector in self._vectors.values())
            self._rule.step(
                self._ops,
                parameters[span],
                gradient[span],
                slots,
                rate=learning_rate,
                count=self._steps,
            )

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
            if not all_finite(found):
                raise LayoutMismatchError(f"optimizer state {name!r} holds NaN or infinity")
        for name, vector in self._vectors.items():
            np.copyto(vector, state[name])
            if name == "v":
                np.maximum(vector, 0.0, out=vector)
        self._steps = max(0, int(state["steps"]))
