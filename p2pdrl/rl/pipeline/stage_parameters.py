"""One rank's share of a model: its blocks, their parameters, gradients and optimizer.

Nothing here knows of other ranks: ``runner`` says what to compute when, ``rank`` what to step with.

Shape suffixes: D parameters of the whole model, P of this share.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.plan import PipelinePlan
from p2pdrl.pipeline.schedule import computes_anew
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Outputs
from p2pdrl.rl.networks.lstm import RecurrentContext
from p2pdrl.rl.optimizers import Optimizer, sum_of_squares
from p2pdrl.rl.pipeline.parts import ModelParts
from p2pdrl.rl.sequential import Block, chain

__all__ = ["StageParameters"]

Vector = npt.NDArray[np.float32]
Arrays = dict[str, npt.NDArray[Any]]


class StageParameters(Generic[Outputs]):
    """Takes copies of its blocks from the parts, and the state that the optimizer has then.

    Parameters change in ``step`` and ``load`` and nowhere else, and ``steps`` in the first of them: whatever
    breaks off a minibatch, they are those after the last whole step.

    Args:
        device: where the blocks are to be.
        checkpoint_activations: keep only what comes into a stage, and compute the rest anew.
        steps: minibatches done before.

    Attributes:
        steps: minibatches that were stepped with, or skipped: equal on all ranks between two minibatches.

    Raises:
        ConfigError: this rank's blocks have no parameters.
    """

    def __init__(
        self,
        parts: ModelParts[Outputs],
        plan: PipelinePlan,
        rank: int,
        device: torch.device,
        *,
        checkpoint_activations: bool = False,
        steps: int = 0,
    ) -> None:
        self.parts = parts
        self.plan = plan
        self.rank = rank
        self.device = device
        self.steps = steps
        self._checkpoint = checkpoint_activations
        numbers = plan.numbers(rank)
        if parts.block_map.size(numbers) == 0:
            raise ConfigError(f"rank {rank} has no parameters to train: cut the model elsewhere")
        own: list[Block] = copy.deepcopy([parts.blocks[number] for number in numbers])
        self._flat = FlatModule(nn.ModuleList(own), device, parts.dtype)
        self.optimizer: Optimizer = parts.optimizer.over(self._flat)
        self._load_optimizer(parts.optimizer.state())
        by_number = dict(zip(numbers, own, strict=True))
        self._stages = {
            stage: [by_number[number] for number in plan.blocks_of(stage)] for stage in plan.stages_of(rank)
        }

    @property
    def parameters_P(self) -> Tensor:  # noqa: N802 - shape suffix
        """The parameters, as they are now."""
        return self._flat.parameters_D

    @property
    def gradients_P(self) -> Tensor:  # noqa: N802 - shape suffix
        """The gradients, as far as they are computed."""
        return self._flat.gradients_D

    def begin(self) -> None:
        """Forget the gradients of the minibatch before."""
        self._flat.gradients_D.zero_()

    def forward(self, stage: int, x: Tensor, context: RecurrentContext, *, stored: int) -> Tensor:
        """Return a stage's output as it travels; the rank stores ``stored`` microbatches at most at once."""
        blocks = self._stages[stage]
        with self._precision():
            if self.computes_anew(stored):
                y: Tensor = checkpoint(
                    _run, blocks, x, context, use_reentrant=False, preserve_rng_state=False
                )
            else:
                y = _run(blocks, x, context)
        return y if stage == self.plan.stages - 1 else y.to(self.parts.travelling).contiguous()

    def computes_anew(self, stored: int) -> bool:
        """Whether a stage's inside is computed anew for its backward, with so many microbatches stored."""
        return computes_anew(self._checkpoint, stored)

    def outputs(self, y: Tensor) -> Outputs:
        """Return what the objective wants, from what the last stage's ``forward`` gave."""
        last = self._stages[self.plan.stages - 1][-1]
        return self.parts.unpack(last, y.to(self.parts.dtype))

    def squares(self) -> float:
        """Return the sum of the squares of all gradients."""
        return sum_of_squares(self._flat.gradients_D)

    def step(self, squares: float, learning_rate: float, max_grad_norm: float) -> float:
        """Clip as the whole model's gradient is to be clipped, and step, unless that isn't finite.

        ``squares`` are summed over the whole model's gradients; returned is their norm before clipping.
        """
        norm = self.optimizer.clipped_step(learning_rate, max_grad_norm, math.sqrt(squares))
        self.steps += 1
        return norm

    def load(self, vector_D: Vector, optimizer: Arrays) -> None:
        """Go on with parts of another whole: parameters, and the arrays of its optimizer by name."""
        self._flat.set_(self.parts.block_map.take(vector_D, self.plan.numbers(self.rank)))
        self._load_optimizer(optimizer)

    def vectors(self, *, state: bool) -> list[Tensor]:
        """Return the parameters, and with ``state`` the optimizer's vectors: copies, on the host."""
        vectors = [self._flat.parameters_D.to("cpu", copy=True)]
        if state:
            arrays = self.optimizer.state()
            vectors += [torch.from_numpy(np.array(arrays[name])) for name in self.vector_names]
        return vectors

    @property
    def vector_names(self) -> list[str]:
        """Names of the optimizer's vectors, in order."""
        return [item.name for item in self.optimizer.items() if item.shape]

    def _load_optimizer(self, arrays: Arrays) -> None:
        numbers = self.plan.numbers(self.rank)
        self.optimizer.load(
            {
                name: self.parts.block_map.take(array, numbers) if array.ndim else array
                for name, array in arrays.items()
            }
        )

    def _precision(self) -> AbstractContextManager[object]:
        if self.parts.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()


def _run(blocks: Sequence[Block], x: Tensor, context: RecurrentContext) -> Tensor:
    # what was rounded on its way is float32 again: each operation knows what it wants
    return chain(blocks, x.float() if x.dtype == torch.bfloat16 else x, context)
