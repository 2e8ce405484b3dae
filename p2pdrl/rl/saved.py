"""How much memory autograd keeps between a forward and its backward, in bytes.

`block_costs` measures a block by it, for plans; `pipeline.runner` a stage at work, for figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

__all__ = ["saved_bytes"]


def saved_bytes(forward: Callable[[], Tensor], known: Iterable[Tensor]) -> tuple[Tensor, int]:
    """Run a forward; return its output, and the bytes of what is kept for its backward beside that.

    Each piece of memory counts once, and as a whole: a view keeps all that it is a view of. The backward
    works as it would without this.

    Args:
        forward: returns its output.
        known: what is kept anyway: inputs, parameters.
    """
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[_address(tensor)] = tensor.untyped_storage().nbytes()
        # detached: an operation that keeps its own output would else be kept by it in turn, for ever
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()
    for tensor in (*known, output):
        kept.pop(_address(tensor), None)
    return output, sum(kept.values())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
