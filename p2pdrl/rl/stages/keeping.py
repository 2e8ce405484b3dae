"""What a rank keeps of each microbatch until its backward, in bytes: measured once, and known from then on.

Both runners use it.
"""

from __future__ import annotations

from typing import Generic, NamedTuple

from torch import Tensor

from p2pdrl.rl.networks.lstm import Context
from p2pdrl.rl.objectives.objective import Outputs
from p2pdrl.rl.saved import saved_bytes
from p2pdrl.rl.stages.share import Share

__all__ = ["Keeping", "Kept"]


class Kept(NamedTuple):
    """Of one microbatch in one stage, beside what comes in and what goes out.

    Attributes:
        waiting_bytes: from its forward to its backward.
        anew_bytes: more in its backward, where they are computed anew for it.
    """

    waiting_bytes: int
    anew_bytes: int


class Keeping(Generic[Outputs]):
    """Runs a share's stages. The first microbatch of each length is looked at.

    Where activations are computed anew, looking takes another forward: what autograd keeps of the real one
    isn't there yet. Of a recurrent policy, a microbatch in which episodes begin keeps more than one in which
    none does: the first stands for all.

    Args:
        share: whose stages.
    """

    def __init__(self, share: Share[Outputs]) -> None:
        self._share = share
        self._inner_bytes: dict[tuple[int, int], int] = {}

    def forward(self, stage: int, x: Tensor, context: Context, *, stored: int) -> tuple[Tensor, Kept]:
        """Return what `Share.forward` does, and what is kept of it.

        Args:
            stage: see `Share.forward`.
            x: see there.
            context: see there.
            stored: see there.
        """
        share, key, output = self._share, (stage, len(x)), None
        anew = share.computes_anew(stored)
        if key not in self._inner_bytes:
            known = [share.parameters_P, x, *(tensor for tensor in context if tensor is not None)]
            output, self._inner_bytes[key] = saved_bytes(
                lambda: share.forward(stage, x, context, stored=1), known
            )
        if output is None or anew:
            output = None  # lets go of what it took to look
            output = share.forward(stage, x, context, stored=stored)
        inner_bytes = self._inner_bytes[key]
        return output, Kept(0, inner_bytes) if anew else Kept(inner_bytes, 0)
