"""What each block of a policy costs on this device: what is measured before the chain is cut.

``pipeline.partition`` balances stages by it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from p2pdrl.config.fields import Precision
from p2pdrl.pipeline.layers import Layer
from p2pdrl.rl.networks.lstm import NO_CONTEXT, RecurrentContext
from p2pdrl.rl.saved import saved_bytes
from p2pdrl.rl.sequential import Block

__all__ = ["measure_blocks"]


def measure_blocks(
    run: Sequence[Block],
    inputs: Tensor,
    context: RecurrentContext = NO_CONTEXT,
    *,
    titles: Sequence[str] = (),
    precision: Precision = "float32",
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Layer]:
    """Run each block forward and backward some times and return the median of its seconds, and its bytes.

    Parameters and their gradients are left alone. Blocks that have no memory (on the meta device) can't be
    measured.

    Args:
        run: blocks in a row, on one device, the model's first among them.
        inputs: what the first of them gets: a microbatch. No gradient of them is wanted.
        context: of the unroll, where the policy is recurrent.
        titles: of the blocks; by default their numbers.
        precision: in which they run, and their outputs travel.
        repeats: measured, after one that isn't.
        clock: seconds, monotonic.
    """
    costs = []
    inputs = inputs.detach()
    for index, block in enumerate(run):
        forward = _forward(block, inputs, context, precision)
        seconds = [_run_once(forward, inputs, block, clock) for _ in range(repeats + 1)][1:]
        parameters = list(block.parameters())
        known = [inputs, *parameters, *(tensor for tensor in context if tensor is not None)]
        output, inner_bytes = saved_bytes(forward, known)
        output_bytes = output.numel() * (2 if precision == "bf16" else output.element_size())
        costs.append(
            Layer(
                name=titles[index] if titles else str(index),
                forward_s=statistics.median(forward_s for forward_s, _ in seconds),
                backward_s=statistics.median(backward_s for _, backward_s in seconds),
                parameter_bytes=sum(parameter.nbytes for parameter in parameters),
                output_bytes=output_bytes,
                inner_bytes=inner_bytes + output.nbytes - output_bytes,  # it may be rounded on its way only
            )
        )
        # from here on, a gradient is wanted of what passes if it leads to parameters
        inputs = output.detach().requires_grad_(output.requires_grad)
    return costs


def _forward(
    block: Block, inputs: Tensor, context: RecurrentContext, precision: Precision
) -> Callable[[], Tensor]:
    """Return what runs a block as a stage does."""

    def forward() -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=precision == "bf16"):
            output: Tensor = block(inputs, context)
            return output

    return forward


def _run_once(
    forward: Callable[[], Tensor], inputs: Tensor, block: Block, clock: Callable[[], float]
) -> tuple[float, float]:
    """Return seconds of one forward and one backward."""
    wanted = [tensor for tensor in (inputs, *block.parameters()) if tensor.requires_grad]
    begin = _now(inputs, clock)
    output = forward()
    middle = _now(inputs, clock)
    if wanted:
        torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)
    return middle - begin, _now(inputs, clock) - middle


def _now(on: Tensor, clock: Callable[[], float]) -> float:
    """Read the clock once the device has done all it was told."""
    if on.device.type == "cuda":
        torch.cuda.synchronize(on.device)
    return clock()
