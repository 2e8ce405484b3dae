"""A module whose parameters are views of one flat vector.

``trainer`` wraps the policy in it. Optimizers step one tensor, a peer's delta is one addition, and the
board gets the vector without gathering anything.

Shape suffix: D parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from p2pdrl.errors import ConfigError, LayoutMismatchError
from p2pdrl.tensors.layout import Layout, TensorEntry

__all__ = ["FlatModule", "FlatSpan"]

Vector = npt.NDArray[np.float32]


class FlatSpan:
    """Pieces of a module's flat vectors, or the whole: what one optimizer steps.

    The tensors stay the same objects whatever memory they come to lie in (``FlatModule.rebind``), so
    whoever holds them goes on with the new memory.

    Attributes:
        pieces: (parameters, gradients) of each, in the order of the vector.
        size: D, all pieces together.
    """

    def __init__(self, *pieces: tuple[Tensor, Tensor]) -> None:
        self.pieces = pieces
        self.size = sum(parameters.numel() for parameters, _ in pieces)

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.pieces[0][0].device

    def set_(self, vector_D: Vector) -> None:
        """Replace the parameters in place.

        Raises:
            LayoutMismatchError: the vector has another length.
        """
        parts = torch.split(self._tensor(vector_D), [parameters.numel() for parameters, _ in self.pieces])
        for (parameters, _), part in zip(self.pieces, parts, strict=True):
            parameters.copy_(part)

    def _tensor(self, vector_D: Vector) -> Tensor:
        if vector_D.shape != (self.size,):
            raise LayoutMismatchError(
                f"the policy has {self.size} parameters, the vector is of shape {vector_D.shape}"
            )
        if not vector_D.flags.writeable:  # torch can't wrap what must not be written
            vector_D = vector_D.copy()
        return torch.from_numpy(vector_D).to(self.device)


class FlatModule(FlatSpan):
    """Moves a module's parameters and gradients into two flat tensors of D elements.

    Args:
        module: its parameters are replaced by views, in the order of ``named_parameters()``.
        device: where the flat tensors, and so the parameters, live.
        dtype: float32; anything else is for checks of arithmetic, and never leaves the process.

    Attributes:
        module: the same module.
        parameters_D: every parameter.
        gradients_D: every gradient; ``backward()`` accumulates into it.
        layout: names, shapes and offsets.
    """

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.module = module.to(device, dtype)
        named = list(module.named_parameters())
        self.layout = Layout(
            tuple(TensorEntry(name, tuple(parameter.shape), "float32") for name, parameter in named)
        )
        self.parameters_D = torch.empty(self.layout.size, dtype=dtype, device=device)
        self.gradients_D = torch.zeros_like(self.parameters_D)
        super().__init__((self.parameters_D, self.gradients_D))
        self._spans: list[tuple[slice, tuple[Tensor, Tensor]]] = []
        for piece, parameter in self._slices():
            self.parameters_D[piece] = parameter.detach().reshape(-1)
        self._bind()
        self._bind_gradients()

    def numpy(self) -> Vector:
        """Return the parameters: a view on the CPU, a copy from any other device."""
        vector: Vector = self.parameters_D.cpu().numpy()
        return vector

    def add_(self, delta_D: Vector) -> None:
        """Add a vector to the parameters in place.

        Raises:
            LayoutMismatchError: it has another length.
        """
        self.parameters_D.add_(self._tensor(delta_D))

    def span(self, *prefixes: str) -> FlatSpan:
        """Return what the parameters of some parts of the module make up, in as few pieces as there can be.

        Args:
            prefixes: the parts, as in the names of their parameters: ``actor`` for ``actor.0.weight`` and on.

        Raises:
            ConfigError: no parameter is called so.
        """
        names = [entry.name for entry in self.layout.entries]
        inside: set[str] = set()
        for prefix in prefixes:
            found = {name for name in names if name == prefix or name.startswith(f"{prefix}.")}
            if not found:
                raise ConfigError(f"no parameter belongs to {prefix!r}; there are {', '.join(names)}")
            inside |= found
        slices: list[slice] = []
        for name, (piece, _) in zip(names, self._slices(), strict=True):
            if name not in inside:
                continue
            if slices and slices[-1].stop == piece.start:
                slices[-1] = slice(slices[-1].start, piece.stop)
            else:
                slices.append(piece)
        bound = [(piece, (self.parameters_D[piece], self.gradients_D[piece])) for piece in slices]
        self._spans += bound
        return FlatSpan(*(tensors for _, tensors in bound))

    def rebind(self, buffer_D: Vector, *, write: bool) -> None:
        """Move the parameters onto memory that is given, such as a piece that several processes share.

        ``parameters_D`` stays the same tensor object with other memory behind it, so whoever holds it,
        as optimizers do, goes on with the new memory. Arrays that ``numpy`` returned before stay with the
        old one. The buffer is kept alive as long as it is used here; give another (``np.empty``) to let
        go of it. Processes that step on one buffer without locks do Hogwild (Recht 2011, arXiv
        1106.5730): aligned float32 are read and written whole, sums may be lost.

        Args:
            buffer_D: D writable float32 in one piece.
            write: copy the parameters into the buffer first; else those that lie there count.

        Raises:
            LayoutMismatchError: the buffer is of another length or type, or can't be written.
            ConfigError: the parameters live on a GPU.
        """
        if self.device.type != "cpu":
            raise ConfigError(f"memory can be shared by learners on the cpu only, not on {self.device}")
        flags = buffer_D.flags
        fits = buffer_D.shape == (self.layout.size,) and buffer_D.dtype == np.float32
        if not (fits and flags.writeable and flags.c_contiguous and flags.aligned):
            raise LayoutMismatchError(
                f"parameters want {self.layout.size} writable float32 in one piece, "
                f"not {buffer_D.dtype} of shape {buffer_D.shape}"
            )
        shared_D = torch.from_numpy(buffer_D)
        if write:
            shared_D.copy_(self.parameters_D)
        self.parameters_D.data = shared_D
        self._bind()

    def drop_gradients(self) -> None:
        """Give the gradients' memory back: nobody computes any here until `make_gradients`."""
        for parameter in self.module.parameters():
            parameter.grad = None
        for vector_D in (self.gradients_D, *(gradients for _, (_, gradients) in self._spans)):
            vector_D.data = vector_D.new_empty(0)

    def make_gradients(self) -> None:
        """Have memory for gradients again, all zero; ``gradients_D`` is still the same tensor object."""
        self.gradients_D.data = torch.zeros_like(self.parameters_D)
        self._bind_gradients()

    def _slices(self) -> Iterator[tuple[slice, nn.Parameter]]:
        """Yield where each parameter lies in the vector."""
        begin = 0
        for parameter in self.module.parameters():
            yield slice(begin, begin + parameter.numel()), parameter
            begin += parameter.numel()

    def _bind_gradients(self) -> None:
        """Make each parameter's gradient a view of its piece of the vector."""
        for piece, parameter in self._slices():
            parameter.grad = self.gradients_D[piece].view(parameter.shape)
        for piece, (_, gradients) in self._spans:
            gradients.data = self.gradients_D[piece]

    def _bind(self) -> None:
        """Make each parameter a view of its piece of the vector."""
        for piece, parameter in self._slices():
            parameter.data = self.parameters_D[piece].view(parameter.shape)
        for piece, (parameters, _) in self._spans:
            parameters.data = self.parameters_D[piece]
