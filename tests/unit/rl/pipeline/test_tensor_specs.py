"""Rows and the memory for them."""

from __future__ import annotations

import pytest
import torch

from p2pdrl.errors import LayoutMismatchError
from p2pdrl.rl.pipeline.messages import Buffers, RowSpec

SPEC = RowSpec((3,), torch.float32)


def test_memory_is_used_again_while_it_is_long_enough():
    buffers = Buffers(torch.device("cpu"))
    first, second = buffers.take(SPEC, 4), buffers.take(SPEC, 4)
    assert first.shape == (4, 3)
    assert first.data_ptr() != second.data_ptr()
    buffers.give(SPEC, first)
    assert buffers.take(SPEC, 2) is first
    buffers.give(SPEC, first)
    longer = buffers.take(SPEC, 5)
    assert longer is not first
    buffers.give(SPEC, longer)
    assert buffers.take(SPEC, 4) is longer
    assert buffers.take(RowSpec((3,), torch.bfloat16), 4).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "tensor", [torch.zeros(2, 4), torch.zeros(2), torch.zeros(2, 3, dtype=torch.float64)]
)
def test_other_rows_are_told_apart(tensor):
    SPEC.check(torch.zeros(7, 3), "x")
    with pytest.raises(LayoutMismatchError, match=r"x should have rows of torch\.float32"):
        SPEC.check(tensor, "x")
