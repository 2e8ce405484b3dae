"""The gated memory against its equations step by step, and what it forgets when."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from p2pdrl.rl.networks.gru import GRU
from p2pdrl.rl.networks.layers import initialise
from p2pdrl.rl.networks.lstm import RecurrentContext

B, T, F, H = 3, 7, 4, 5


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def gru():
    core = GRU(F, H)
    initialise(core, torch.Generator().manual_seed(0))
    core = core.double()
    with torch.no_grad():  # biases begin at zero: give them something to say
        core.cells.bias_ih_l0.copy_(draw(3, 3 * H))
        core.cells.bias_hh_l0.copy_(draw(4, 3 * H))
    return core


def by_hand(gru, x_BTF, state_BH, starts_BT):
    """Cho 2014, with the reset gate behind the product: one step and one environment at a time."""
    cells = gru.cells
    w_r, w_z, w_n = cells.weight_ih_l0.chunk(3)
    u_r, u_z, u_n = cells.weight_hh_l0.chunk(3)
    b_r, b_z, b_n = cells.bias_ih_l0.chunk(3)
    c_r, c_z, c_n = cells.bias_hh_l0.chunk(3)
    rows = []
    for x_TF, h, starts_T in zip(x_BTF, state_BH, starts_BT, strict=True):
        outputs = []
        for x, start in zip(x_TF, starts_T.tolist(), strict=True):
            if start:
                h = torch.zeros(H, dtype=x.dtype)
            r = torch.sigmoid(w_r @ x + b_r + u_r @ h + c_r)
            z = torch.sigmoid(w_z @ x + b_z + u_z @ h + c_z)
            n = torch.tanh(w_n @ x + b_n + r * (u_n @ h + c_n))
            h = (1 - z) * n + z * h
            outputs.append(h)
        rows.append(torch.stack(outputs))
    return torch.stack(rows)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_unrolls_are_the_equations_also_with_resets_inside(gru, share):
    x_BTF, state_BH = draw(1, B, T, F).requires_grad_(), draw(2, B, H)
    starts_BT = torch.rand(B, T, generator=torch.Generator().manual_seed(5)) < share
    found = gru(x_BTF, RecurrentContext(starts_BT, state_BH))
    expected = by_hand(gru, x_BTF, state_BH, starts_BT)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    wanted = [x_BTF, *gru.parameters()]
    weights = draw(6, B, T, H)
    torch.testing.assert_close(
        *(torch.autograd.grad((weights * outputs).sum(), wanted) for outputs in (found, expected))
    )


def test_steps_are_the_unroll(gru):
    x_BTF, state_BS = draw(1, B, T, F), draw(2, B, H)
    whole = gru(x_BTF, RecurrentContext(None, state_BS))
    for t in range(T):
        state_BS = gru.step(x_BTF[:, t], state_BS)
        torch.testing.assert_close(gru.output(state_BS), whole[:, t], rtol=1e-12, atol=1e-12)


def test_it_is_pytorchs(gru):
    theirs = nn.GRU(F, H, batch_first=True).double()
    theirs.load_state_dict(gru.cells.state_dict())
    x_BTF, state_BS = draw(1, B, T, F), draw(2, B, H)
    expected, _ = theirs(x_BTF, state_BS[None])
    torch.testing.assert_close(gru(x_BTF, RecurrentContext(None, state_BS)), expected)
    assert gru.state_size == gru.size == H


def test_what_was_not_a_number_is_forgotten_too(gru):
    starts_BT = torch.zeros(B, T, dtype=torch.bool)
    starts_BT[:, 0] = True
    outputs = gru(draw(1, B, T, F), RecurrentContext(starts_BT, torch.full((B, H), torch.nan)))
    outputs.sum().backward()
    assert outputs.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in gru.parameters())


def test_rows_do_not_see_each_other(gru):
    x_BTF, state_BS = draw(1, B, T, F), draw(2, B, H)
    starts_BT = torch.rand(B, T, generator=torch.Generator().manual_seed(3)) < 0.3
    whole = gru(x_BTF, RecurrentContext(starts_BT, state_BS))
    parts = [
        gru(x_BTF[b : b + 1], RecurrentContext(starts_BT[b : b + 1], state_BS[b : b + 1])) for b in range(B)
    ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)
