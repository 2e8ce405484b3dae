"""What there is to compute in an update, as measured in seconds and bytes: what `advice` weighs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.layers import Layer
from p2pdrl.pipeline.partition import Demands
from p2pdrl.pipeline.schedule import computes_anew

__all__ = ["UpdateWork"]


@dataclass(frozen=True, slots=True)
class UpdateWork:
    """What there is to compute.

    Attributes:
        blocks: what each block costs on the first peer for one microbatch, by the number of microbatches
            that a minibatch is cut into. Numbers that aren't there are worked out of the nearest that is, as
            though a microbatch's cost were proportional to its rows.
        minibatches: of one update.
        input_bytes: of a whole minibatch.
        parameter_copies: as of `Demands`.
        checkpoint: whether ranks that store several microbatches compute their activations anew.
        state_every: updates until the optimizer's state is fetched and spread; 0 is never.
        state_vectors: how many vectors as long as the parameters that state has; Adam has 2.
    """

    blocks: Mapping[int, Sequence[Layer]]
    minibatches: int = 1
    input_bytes: float = 0.0
    parameter_copies: float = 4.0
    checkpoint: bool = False
    state_every: int = 0
    state_vectors: int = 2

    def check(self) -> None:
        """Raise a `ConfigError` for a number that makes no sense, or when nothing is known."""
        if not self.blocks or min(self.blocks) < 1 or not all(self.blocks.values()):
            raise ConfigError("nothing was measured: there must be blocks for 1 microbatch or more")
        if self.minibatches < 1 or self.state_every < 0 or self.state_vectors < 0:
            raise ConfigError(
                f"{self.minibatches} minibatches an update, state every {self.state_every} updates: "
                "the one begins at 1, the other at 0"
            )

    def layers(self, microbatches: int) -> list[Layer]:
        """Return what one of so many microbatches costs."""
        nearest = min(self.blocks, key=lambda known: (abs(math.log(known / microbatches)), known))
        part = nearest / microbatches
        return [
            layer._replace(
                forward_s=layer.forward_s * part,
                backward_s=layer.backward_s * part,
                output_bytes=layer.output_bytes * part,
                inner_bytes=layer.inner_bytes * part,
            )
            for layer in self.blocks[nearest]
        ]

    def demands(self, microbatches: int, peaks: tuple[int, ...] = (1,), chunks: int = 1) -> Demands:
        """Return what stages keep.

        Args:
            microbatches: of a minibatch.
            peaks: of each rank, how many it stores at once, each in one of its stages.
            chunks: stages of each rank.
        """
        stored = tuple(math.ceil(peak / chunks) for peak in peaks)
        anew = tuple(computes_anew(self.checkpoint, peak) for peak in peaks)
        return Demands(self.parameter_copies, stored * chunks, anew * chunks, self.input_bytes / microbatches)
