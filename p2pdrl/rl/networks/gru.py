"""Gated recurrent units (Cho 2014, arXiv 1406.1078): a memory with two gates and no cell beside its output.

    r = σ(W_r x + U_r h),  z = σ(W_z x + U_z h),  n = tanh(W_n x + r ∘ (U_n h)),  h ← (1 − z) ∘ n + z ∘ h

The reset gate comes after the product with U_n, as in PyTorch's kernels, which take all steps at once. A
quarter fewer weights than an LSTM of as many units, and half of its state.

Shape suffixes: B environments, F features, H units, which are all of the state.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from p2pdrl.rl.networks.lstm import RecurrentCore, draw_cells

__all__ = ["GRU"]


class GatedCells(nn.GRU):
    """PyTorch's layer, with orthogonal weights and biases of zero."""

    def __init__(self, features: int, size: int) -> None:
        super().__init__(features, size, batch_first=True, device="meta")

    def draw(self, generator: torch.Generator) -> None:
        """Set weights and biases."""
        draw_cells(self, generator)


class GRU(RecurrentCore):
    """One layer of ``size`` (H) units, from ``features`` (F)."""

    parts = 1

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.cells = GatedCells(features, size)

    def step(self, x_BF: Tensor, state_BS: Tensor) -> Tensor:
        """Return the state after one step."""
        return torch.gru_cell(x_BF, state_BS, *self.weights)
