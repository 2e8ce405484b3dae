"""A module whose parameters are views of one flat vector.

``trainer`` wraps the policy in it. Optimizers step one tensor, a peer's delta is one addition, and the
board gets the vector without gathering anything.

Shape suffix: D parameters.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from p2pdrl.errors import LayoutMismatchError
from p2pdrl.tensors.layout import Entry, Layout

__all__ = ["FlatModule"]

Vector = npt.NDArray[np.float32]


class FlatModule:
    """Moves a module's parameters and gradients into two flat float32 tensors of D elements.

    Args:
        module: its parameters are replaced by views, in the order of ``named_parameters()``.
        device: where the flat tensors, and so the parameters, live.

    Attributes:
        module: the same module.
        parameters_D: every parameter.
        gradients_D: every gradient; ``backward()`` accumulates into it.
        layout: names, shapes and offsets.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = module.to(device)
        named = list(module.named_parameters())
        self.layout = Layout(
            tuple(Entry(name, tuple(parameter.shape), "float32") for name, parameter in named)
        )
        self.parameters_D = torch.empty(self.layout.size, dtype=torch.float32, device=device)
        self.gradients_D = torch.zeros_like(self.parameters_D)
        begin = 0
        for _, parameter in named:
            piece = slice(begin, begin + parameter.numel())
            self.parameters_D[piece] = parameter.detach().reshape(-1)
            parameter.data = self.parameters_D[piece].view(parameter.shape)
            parameter.grad = self.gradients_D[piece].view(parameter.shape)
            begin = piece.stop

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.parameters_D.device

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

    def set_(self, vector_D: Vector) -> None:
        """Replace the parameters in place.

        Raises:
            LayoutMismatchError: the vector has another length.
        """
        self.parameters_D.copy_(self._tensor(vector_D))

    def _tensor(self, vector_D: Vector) -> Tensor:
        if vector_D.shape != (self.layout.size,):
            raise LayoutMismatchError(
                f"the policy has {self.layout.size} parameters, the vector is of shape {vector_D.shape}"
            )
        if not vector_D.flags.writeable:  # torch can't wrap what must not be written
            vector_D = vector_D.copy()
        return torch.from_numpy(vector_D).to(self.device)
