"""Long short-term memory (Hochreiter 1997; with forget gates, Gers 2000): a policy that remembers.

``policy`` puts it between a trunk and the heads. While acting it takes one step at a time from the state
that whoever acts keeps; while training it runs over whole unrolls from the state at their beginning.

Shape suffixes: B environments, T steps, F features, H units, S = 2 H numbers of state (output | cell).
"""

# ruff: noqa: N815 (fields carry shape suffixes)
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from p2pdrl.rl.networks.layers import Dense

__all__ = ["LSTM", "NO_CONTEXT", "Context"]


class Context(NamedTuple):
    """What a recurrent policy must know of an unroll beside its observations; empty for all others."""

    starts_BT: Tensor | None = None
    """Bool: the row is the first of an episode, and the state is forgotten before it. None: no row is."""
    state_BS: Tensor | None = None
    """State before the first row. None: zeros."""


NO_CONTEXT = Context()


class Gates(Dense):
    """The inputs' part of the four gates, with a bias of 1 on the forget gate (Jozefowicz 2015)."""

    def draw(self, generator: torch.Generator) -> None:
        """Set weight and bias."""
        super().draw(generator)
        _, forget, _, _ = self.bias.detach().chunk(4)
        forget.fill_(1.0)


class LSTM(nn.Module):
    """One layer of ``size`` units.

    Args:
        features: F.
        size: H.

    Attributes:
        size: H.
        state_size: S.
    """

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.state_size = 2 * size
        self.inputs = Gates(features, 4 * size, 1.0)
        self.recurrent = Dense(size, 4 * size, 1.0, bias=False)

    def step(self, x_BF: Tensor, state_BS: Tensor) -> Tensor:
        """Return the state after one step."""
        h_BH, c_BH = state_BS.chunk(2, -1)
        return torch.cat(self._cell(self.inputs(x_BF), h_BH, c_BH), -1)

    def output(self, state_BS: Tensor) -> Tensor:
        """Return the output_BH that is part of a state."""
        return state_BS[:, : self.size]

    def forward(self, x_BTF: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        """Return outputs_BTH of a whole unroll, the same as T calls of ``step`` would give."""
        if context.state_BS is None:
            h_BH = c_BH = x_BTF.new_zeros(len(x_BTF), self.size)
        else:
            h_BH, c_BH = context.state_BS.to(self.recurrent.weight.dtype).chunk(2, -1)
        starts_BT = context.starts_BT
        outputs = []
        # the inputs' products don't wait for the state: one large product for all steps
        for t, gates_BG in enumerate(self.inputs(x_BTF).unbind(1)):
            if starts_BT is not None:
                start_B1 = starts_BT[:, t : t + 1]
                h_BH, c_BH = h_BH.masked_fill(start_B1, 0.0), c_BH.masked_fill(start_B1, 0.0)
            h_BH, c_BH = self._cell(gates_BG, h_BH, c_BH)
            outputs.append(h_BH)
        return torch.stack(outputs, 1)

    def _cell(self, gates_BG: Tensor, h_BH: Tensor, c_BH: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and cell; ``gates_BG`` is the inputs' part of the gates."""
        write, forget, value, read = (gates_BG + self.recurrent(h_BH)).chunk(4, -1)
        c_BH = torch.sigmoid(forget) * c_BH + torch.sigmoid(write) * torch.tanh(value)
        return torch.sigmoid(read) * torch.tanh(c_BH), c_BH
