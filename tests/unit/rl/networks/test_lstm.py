"""The memory against PyTorch's own LSTM, and what it forgets when."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from p2pdrl.rl.networks.layers import initialise
from p2pdrl.rl.networks.lstm import LSTM, RecurrentContext

B, T, F, H = 3, 7, 4, 5


@pytest.fixture
def lstm():
    core = LSTM(F, H)
    initialise(core, torch.Generator().manual_seed(0))
    return core.double()


@pytest.fixture
def x_BTF():
    return torch.randn(B, T, F, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def state_BS():
    return torch.randn(B, 2 * H, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_it_is_pytorchs_lstm(lstm, x_BTF, state_BS):
    theirs = nn.LSTM(F, H, batch_first=True).double()
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(lstm.cells.weight_ih_l0)
        theirs.weight_hh_l0.copy_(lstm.cells.weight_hh_l0)
        theirs.bias_ih_l0.copy_(lstm.cells.bias_ih_l0)
        theirs.bias_hh_l0.copy_(lstm.cells.bias_hh_l0)
    h_BH, c_BH = state_BS.chunk(2, -1)
    expected, (last_h, last_c) = theirs(x_BTF, (h_BH[None].contiguous(), c_BH[None].contiguous()))
    torch.testing.assert_close(
        lstm(x_BTF, RecurrentContext(None, state_BS)), expected, rtol=1e-12, atol=1e-12
    )
    for t in range(T):
        state_BS = lstm.step(x_BTF[:, t], state_BS)
        torch.testing.assert_close(lstm.output(state_BS), expected[:, t], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state_BS, torch.cat((last_h[0], last_c[0]), -1), rtol=1e-12, atol=1e-12)


def test_nothing_is_remembered_from_before_a_start(lstm, x_BTF, state_BS):
    starts_BT = torch.zeros(B, T, dtype=torch.bool)
    starts_BT[0, 3] = starts_BT[1, 0] = starts_BT[1, 1] = True
    outputs = lstm(x_BTF, RecurrentContext(starts_BT, state_BS))
    alone = lstm(x_BTF[:1, 3:])
    torch.testing.assert_close(outputs[:1, 3:], alone)
    torch.testing.assert_close(outputs[1:2, :1], lstm(x_BTF[1:2, :1]))
    torch.testing.assert_close(outputs[1:2, 1:], lstm(x_BTF[1:2, 1:]))
    torch.testing.assert_close(outputs[2:], lstm(x_BTF[2:], RecurrentContext(None, state_BS[2:])))


def test_gradients_stop_at_a_start(lstm, x_BTF):
    starts_BT = torch.zeros(B, T, dtype=torch.bool)
    starts_BT[:, 4] = True
    x_BTF.requires_grad_()
    (gradient,) = torch.autograd.grad(lstm(x_BTF, RecurrentContext(starts_BT))[:, -1].sum(), x_BTF)
    assert (gradient[:, :4] == 0).all()
    assert (gradient[:, 4:] != 0).all()


def test_what_was_not_a_number_is_forgotten_too(lstm, x_BTF, state_BS):
    starts_BT = torch.zeros(B, T, dtype=torch.bool)
    starts_BT[:, 0] = True
    state_BS.fill_(torch.nan)
    outputs = lstm(x_BTF, RecurrentContext(starts_BT, state_BS))
    outputs.sum().backward()
    assert outputs.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in lstm.parameters())


def test_rows_do_not_see_each_other(lstm, x_BTF, state_BS):
    starts_BT = torch.rand(B, T, generator=torch.Generator().manual_seed(3)) < 0.3
    whole = lstm(x_BTF, RecurrentContext(starts_BT, state_BS))
    parts = [
        lstm(x_BTF[b : b + 1], RecurrentContext(starts_BT[b : b + 1], state_BS[b : b + 1])) for b in range(B)
    ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)


def test_it_keeps_what_it_has_at_first(lstm):
    assert (lstm.cells.bias_ih_l0[H : 2 * H] == 1).all()  # the forget gates are open
    assert lstm.cells.bias_ih_l0.count_nonzero() == H
    assert lstm.state_size == 2 * H
    assert [tuple(p.shape) for p in lstm.parameters()] == [(4 * H, F), (4 * H, H), (4 * H,), (4 * H,)]
