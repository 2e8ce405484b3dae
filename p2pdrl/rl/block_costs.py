"""What each block of a policy costs on this device: what is measured before the chain is cut.

``pipeline.partition`` balances stages by it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from p2pdrl.pipeline.layers import Layer
from p2pdrl.rl.networks.lstm import NO_CONTEXT, Context
from p2pdrl.rl.sequential import Block

__all__ = ["measure_blocks"]


def measure_blocks(
    run: Sequence[Block],
    inputs: Tensor,
    context: Context = NO_CONTEXT,
    *,
    titles: Sequence[str] = (),
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Layer]:
    """Run each block forward and backward some times and return the median of its seconds, and its bytes.

    Parameters and their gradients are left alone. Blocks that have no memory (on the meta device) can't be
    measured.

    Args:
        run: blocks in a row, on one device.
        inputs: what the first of them gets: a microbatch.
        context: of the unroll, where the policy is recurrent.
        titles: of the blocks; by default their numbers.
        repeats: measured, after one that isn't.
        clock: seconds, monotonic.
    """
    costs = []
    for index, block in enumerate(run):
        seconds = [_run_once(block, inputs, context, clock) for _ in range(repeats + 1)][1:]
        with torch.no_grad():
            inputs = block(inputs, context)
        costs.append(
            Layer(
                name=titles[index] if titles else str(index),
                forward_s=statistics.median(forward_s for forward_s, _ in seconds),
                backward_s=statistics.median(backward_s for _, backward_s in seconds),
                parameter_bytes=sum(p.numel() * p.element_size() for p in block.parameters()),
                activation_bytes=inputs.numel() * inputs.element_size(),
            )
        )
    return costs


def _run_once(
    block: Block, inputs: Tensor, context: Context, clock: Callable[[], float]
) -> tuple[float, float]:
    """Return seconds of one forward and one backward.

    Observations need no gradient, outputs of other blocks do. What was observed first may be the output of a
    block too, of another stage: a floating input counts as one.
    """
    inputs = inputs.detach()
    inputs.requires_grad_(inputs.is_floating_point())
    wanted = [tensor for tensor in (inputs, *block.parameters()) if tensor.requires_grad]
    begin = _now(inputs, clock)
    output = block(inputs, context)
    middle = _now(inputs, clock)
    if wanted:
        torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)
    return middle - begin, _now(inputs, clock) - middle


def _now(on: Tensor, clock: Callable[[], float]) -> float:
    """Read the clock once the device has done all it was told."""
    if on.device.type == "cuda":
        torch.cuda.synchronize(on.device)
    return clock()
