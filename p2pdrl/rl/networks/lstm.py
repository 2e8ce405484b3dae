"""Long short-term memory (Hochreiter 1997; with forget gates, Gers 2000): a policy that remembers.

``policy`` puts it, or another `RecurrentCore` (``gru``), between a trunk and the heads. While acting it takes
one step at a time from the state that the actor keeps; while training it runs over whole unrolls from the
state at their beginning. The arithmetic is PyTorch's, whose fused kernels are many times as fast as a loop in
Python; autocast doesn't reach it, for what is remembered for hundreds of steps wants all of float32.

Shape suffixes: B environments, T steps, F features, H units, S numbers of state: 2 H here (output | cell).
"""

# ruff: noqa: N815 (fields carry shape suffixes)
from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["LSTM", "NO_CONTEXT", "RecurrentContext", "RecurrentCore", "draw_cells"]


class RecurrentContext(NamedTuple):
    """What a recurrent policy must know of an unroll beside its observations; empty for all others."""

    starts_BT: Tensor | None = None
    """Bool: the row is the first of an episode, and the state is forgotten before it. None: no row is."""
    state_BS: Tensor | None = None
    """State before the first row. None: zeros."""


NO_CONTEXT = RecurrentContext()

CELL_WEIGHTS = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
"""PyTorch's names of what a layer of one direction has."""


def draw_cells(cells: nn.RNNBase, generator: torch.Generator) -> None:
    """Set a layer's weights to orthogonal ones and its biases to zero."""
    inputs, recurrent, *biases = (getattr(cells, name) for name in CELL_WEIGHTS)
    nn.init.orthogonal_(inputs, generator=generator)
    nn.init.orthogonal_(recurrent, generator=generator)
    for bias in biases:
        nn.init.zeros_(bias)


class Cells(nn.LSTM):
    """PyTorch's layer, with orthogonal weights, and a bias of 1 on the forget gate (Jozefowicz 2015)."""

    bias_ih_l0: nn.Parameter

    def __init__(self, features: int, size: int) -> None:
        super().__init__(features, size, batch_first=True, device="meta")

    def draw(self, generator: torch.Generator) -> None:
        """Set weights and biases."""
        draw_cells(self, generator)
        _, forget_H, _, _ = self.bias_ih_l0.detach().chunk(4)
        forget_H.fill_(1.0)


class RecurrentCore(nn.Module, ABC):
    """One layer of ``size`` (H) units that remembers, whose state begins with its output.

    Attributes:
        cells: PyTorch's layer; ``parts`` tensors of H numbers are what it carries from step to step.
        state_size: S.
    """

    cells: nn.RNNBase
    size: int
    parts: ClassVar[int]

    @property
    def state_size(self) -> int:
        """S."""
        return self.parts * self.size

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of the inputs, of the output before, and both biases."""
        first, second, third, fourth = (getattr(self.cells, name) for name in CELL_WEIGHTS)
        return first, second, third, fourth

    @abstractmethod
    def step(self, x_BF: Tensor, state_BS: Tensor) -> Tensor:
        """Return the state after one step."""

    def output(self, state_BS: Tensor) -> Tensor:
        """Return the output_BH that is part of a state."""
        return state_BS[:, : self.size]

    def forward(self, x_BTF: Tensor, context: RecurrentContext = NO_CONTEXT) -> Tensor:
        """Return outputs_BTH of a whole unroll, the same as T calls of ``step`` would give."""
        state_BS, starts_BT = context.state_BS, context.starts_BT
        if state_BS is None:
            state_BS = x_BTF.new_zeros(len(x_BTF), self.state_size)
        state = self._pieces(state_BS)
        if starts_BT is None:
            return self._run(x_BTF, state)[0]
        pieces = []
        # each piece ends where at least one environment begins anew
        cuts = starts_BT[:, 1:].any(0).nonzero().flatten().add(1).tolist()
        for begin, end in pairwise((0, *cuts, x_BTF.shape[1])):
            start_B1 = starts_BT[:, begin : begin + 1]
            state = tuple(piece_1BH.masked_fill(start_B1, 0.0) for piece_1BH in state)
            output_BTH, state = self._run(x_BTF[:, begin:end], state)
            pieces.append(output_BTH)
        return torch.cat(pieces, 1)

    def _pieces(self, state_BS: Tensor) -> tuple[Tensor, ...]:
        """Return a state's parts as the kernels want them: a layer's dimension first, in one piece."""
        pieces = state_BS.to(self.weights[0].dtype).chunk(self.parts, -1)
        return tuple(piece_BH[None].contiguous() for piece_BH in pieces)

    def _run(self, x_BTF: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the outputs and the state after them."""
        given = state[0] if self.parts == 1 else state
        with torch.autocast(x_BTF.device.type, enabled=False), _quiet(x_BTF.device):
            output_BTH, after = self.cells(x_BTF.to(self.weights[0].dtype), given)
        return output_BTH, (after,) if self.parts == 1 else after


class LSTM(RecurrentCore):
    """One layer of ``size`` (H) units, from ``features`` (F)."""

    parts = 2

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.cells = Cells(features, size)

    def step(self, x_BF: Tensor, state_BS: Tensor) -> Tensor:
        """Return the state after one step."""
        return torch.cat(torch.lstm_cell(x_BF, state_BS.chunk(2, -1), *self.weights), -1)


@contextmanager
def _quiet(device: torch.device) -> Iterator[None]:
    """Keep cuDNN from telling at each call that it copies weights that lie amid a flat vector."""
    if device.type != "cuda":
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        yield
