"""An algorithm's optimizer: an update rule over a span of the flat vector, with state; norms and clipping.

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
from p2pdrl.rl.flat import FlatSpan
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


def gradient_norm(*gradients: Tensor) -> float:
    """Return the Euclidean norm of all pieces of a gradient, as exactly as `sum_of_squares`."""
    return math.sqrt(sum(map(sum_of_squares, gradients)))


def clip_gradients(max_norm: float, *gradients: Tensor, norm: float | None = None) -> float:
    """Scale all pieces of a gradient to a norm of at most ``max_norm``, in place; return the norm they had.

    Args:
        norm: of the gradient, where it is known, or of a larger one that these are pieces of.
    """
    norm = gradient_norm(*gradients) if norm is None else norm
    if norm > max_norm and math.isfinite(norm):
        for piece in gradients:
            piece.mul_(max_norm / norm)
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
        root_eps: float = 0.0,
    ) -> None:
        denominator = self._root(v, root_eps)
        if root_bias != 1.0:
            denominator.div_(root_bias)
        if eps != 0.0:
            denominator.add_(eps)
        x.addcdiv_(m, denominator, value=-(rate / m_bias))

    def _root(self, v: Tensor, eps: float) -> Tensor:
        """Return √(v + ε), to be changed at will; valid until the next call."""
        if eps:
            v = v + eps
        if v.device.type != "cpu":
            return v.sqrt()
        if self._scratch.dtype != v.dtype or self._scratch.numel() < v.numel():
            self._scratch = torch.empty_like(v)
        return torch.sqrt(v, out=self._scratch[: v.numel()])


class Optimizer:
    """A rule over a span, with its state: named vectors of D elements and a count of steps.

    Args:
        rule: formula.
        span: parameters, moved in place, and gradients, read at each step.
        name: before the names of its arrays in the sidecar; optimizers of one algorithm have one each.
    """

    def __init__(self, rule: UpdateRule, span: FlatSpan, name: str = "optimizer") -> None:
        self.span = span
        self.name = name
        self._rule = rule
        self._count: npt.NDArray[np.int64] = np.zeros((), np.int64)
        self._allocate()
        self._ops = _TorchOps()
        self._offloaded: Arrays | None = None

    def step(self, learning_rate: float) -> None:
        """Move the parameters against the gradients."""
        if self._offloaded is not None:
            raise RuntimeError("an optimizer whose state is offloaded can't step")
        self._count += 1
        count = max(int(self._count), 1)  # of shared statistics one may be lost
        for x, g, *slots in self._pieces():
            self._rule.step(self._ops, x, g, tuple(slots), rate=learning_rate, count=count)

    def clipped_step(self, learning_rate: float, max_norm: float, norm: float | None = None) -> float:
        """Clip the gradients and step, unless their norm isn't finite; return the norm they had.

        One bad batch must not poison the parameters, here and at every peer. ``norm``: see `clip_gradients`.
        """
        norm = clip_gradients(max_norm, *(gradients for _, gradients in self.span.pieces), norm=norm)
        if math.isfinite(norm):
            self.step(learning_rate)
        return norm

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return int(self._count) if self._offloaded is None else int(self._offloaded[f"{self.name}.steps"])

    def _pieces(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield pieces of the parameters, the gradients and each slot in order: together the whole.

        Rules without state pass over the vectors once, and devices other than CPUs do best with one operation
        over all.
        """
        size = _PIECE * torch.get_num_threads()
        cached = self.span.device.type == "cpu" and self._vectors
        for tensors, slots in zip(self.span.pieces, self._slots, strict=True):
            piece = (*tensors, *slots)
            if not cached or piece[0].numel() <= size:
                yield piece
            else:
                yield from zip(*(torch.split(vector, size) for vector in piece), strict=True)

    def _allocate(self) -> None:
        """Have memory for the state, all zero, cut like the span."""
        like = self.span.pieces[0][0]
        self._lay_out({slot: like.new_zeros(self.span.size) for slot in self._rule.slots})

    def _lay_out(self, vectors: dict[str, Tensor]) -> None:
        sizes = [parameters.numel() for parameters, _ in self.span.pieces]
        self._vectors = vectors
        cut = [torch.split(vector_D, sizes) for vector_D in self._vectors.values()]
        self._slots = [tuple(vector[number] for vector in cut) for number in range(len(sizes))]

    def reset(self) -> None:
        """Let the next step be the first; no effect while the state is offloaded."""
        if self._offloaded is None:
            for vector_D in self._vectors.values():
                vector_D.zero_()
            self._count[...] = 0

    def over(self, span: FlatSpan) -> Optimizer:
        """Return an optimizer with the same rule and name over another span, before its first step.

        Optimizers of a vector's pieces do what the whole one's does.
        """
        return Optimizer(self._rule, span, self.name)

    def share(self, arrays: Mapping[str, npt.NDArray[Any]], *, write: bool) -> None:
        """Have the state in arrays that other processes step with, too, without locks (Hogwild).

        So does the shared RMSProp of A3C (Mnih 2016, arXiv 1602.01783). Where two step at once, what one of
        them adds to an entry or to the count may be lost.

        Args:
            arrays: by the names of `items`, writable; kept as long as the state lies there.
            write: copy the state there first; else what lies there counts.

        Raises:
            LayoutMismatchError: an array is missing or has another shape.
        """
        self._check(arrays)
        state = self.state()
        self._lay_out({name: torch.from_numpy(arrays[f"{self.name}.{name}"]) for name in self._vectors})
        self._count = arrays[f"{self.name}.steps"]
        if write:
            self.load(state)

    def keep(self) -> None:
        """Have the state, as it is, in memory of its own."""
        state = self.state()
        self._count = np.zeros((), np.int64)
        self._allocate()
        self.load(state)

    def offload(self) -> None:
        """Give up the state's memory while others step.

        Offloaded, it lies in arrays of others (`offload_to`), at first in copies on the host. It can be read
        and replaced as ever, but not stepped with.
        """
        if self._offloaded is None:
            self._offloaded = self.state()
            self._vectors, self._slots = dict.fromkeys(self._vectors, torch.empty(0)), []
            self._ops = _TorchOps()

    def offload_to(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Offloaded, let the state be what lies in these arrays, which nobody changes until there are others.

        Raises:
            LayoutMismatchError: an array is missing or has another shape.
        """
        if self._offloaded is None:
            raise RuntimeError("an optimizer that steps has its state in memory of its own")
        self._check(arrays)
        self._offloaded = {item.name: arrays[item.name] for item in self.items()}

    def reload(self) -> None:
        """Have the state where the parameters are again."""
        if self._offloaded is not None:
            arrays, self._offloaded = self._offloaded, None
            self._allocate()
            self.load(arrays)

    def items(self) -> tuple[SidecarItem, ...]:
        """Return how the state is laid out in the sidecar."""
        shape = (self.span.size,)
        vectors = [SidecarItem(f"{self.name}.{name}", shape, "float32", "copy") for name in self._vectors]
        return (*vectors, SidecarItem(f"{self.name}.steps", (), "int64", "copy"))

    def state(self) -> Arrays:
        """Return the state by name; vectors are views where the device is the CPU."""
        if self._offloaded is not None:
            return dict(self._offloaded)
        arrays: Arrays = {f"{self.name}.{name}": v.cpu().numpy() for name, v in self._vectors.items()}
        arrays[f"{self.name}.steps"] = np.array(self._count)
        return arrays

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over a state that ``state`` returned, here or on another node; offloaded, without copying.

        Raises:
            LayoutMismatchError: an array is missing or has another shape.
        """
        if self._offloaded is not None:
            self.offload_to(arrays)
            return
        self._check(arrays)
        for name, vector_D in self._vectors.items():
            vector_D.copy_(torch.from_numpy(np.array(arrays[f"{self.name}.{name}"], dtype=np.float32)))
            if name == "v":
                vector_D.clamp_(min=0.0)  # squares: below zero, as a peer may send them, they give NaN
        self._count[...] = min(max(int(arrays[f"{self.name}.steps"]), 0), MAX_COUNT)

    def _check(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        for item in self.items():
            found = arrays.get(item.name)
            if found is None or found.shape != item.shape:
                shape = None if found is None else found.shape
                raise LayoutMismatchError(f"{item.name} should be of shape {item.shape}, is {shape}")
