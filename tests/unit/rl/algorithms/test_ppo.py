"""The clipped objective against NumPy, and what it must not reward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p2pdrl.rl.algorithms.ppo import PPOObjective
from p2pdrl.rl.distributions import PolicyOutputs

N, A = 7, 3
SMALL = {"value_clip": None, "value_coef": 0.5, "entropy_coef": 0.01}


def numbers(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    outputs = PolicyOutputs(draw(N, A).requires_grad_(), draw(N).requires_grad_())
    targets = {
        "actions": torch.randint(A, (N,), generator=generator),
        "log_probs": -1.0 + 0.3 * draw(N),
        "values": outputs.values.detach() + 0.5 * draw(N),
        "advantages": draw(N),
        "returns": draw(N),
    }
    return outputs, targets


@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_loss_and_terms_follow_the_paper(value_clip):
    outputs, targets = numbers()
    objective = PPOObjective(clip=0.2, value_clip=value_clip, value_coef=0.3, entropy_coef=0.05)
    loss, terms = objective(outputs, targets)

    logits, values = outputs.policy.detach().numpy(), outputs.values.detach().numpy()
    t = {name: target.numpy() for name, target in targets.items()}
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    ratio = np.exp(log_probs[np.arange(N), t["actions"]] - t["log_probs"])
    clipped = np.clip(ratio, 0.8, 1.2)
    policy_loss = -np.minimum(ratio * t["advantages"], clipped * t["advantages"]).sum()
    errors = (values - t["returns"]) ** 2
    if value_clip is not None:
        near = t["values"] + np.clip(values - t["values"], -value_clip, value_clip)
        errors = np.maximum(errors, (near - t["returns"]) ** 2)
    entropy = -(np.exp(log_probs) * log_probs).sum()
    kl = (ratio - 1 - np.log(ratio)).sum()
    outside = ((ratio < 0.8) | (ratio > 1.2)).sum()
    value_loss = 0.5 * errors.sum()
    np.testing.assert_allclose(terms.numpy(), [policy_loss, value_loss, entropy, kl, outside], rtol=1e-12)
    assert float(loss.detach()) == pytest.approx(policy_loss + 0.3 * value_loss - 0.05 * entropy, rel=1e-12)
    assert not terms.requires_grad


@pytest.mark.parametrize("push", [1.0, -1.0])
def test_ratio_outside_the_clip_has_no_gradient(push):
    outputs, targets = numbers()
    now = outputs.distribution().log_prob(targets["actions"]).detach()
    # the policy has already moved beyond the bound wherever the advantage would push it on
    targets |= {"log_probs": now - push, "advantages": torch.full((N,), push, dtype=torch.float64)}
    objective = PPOObjective(clip=0.2, value_clip=None, value_coef=0.0, entropy_coef=0.0)
    loss, terms = objective(outputs, targets)
    loss.backward()
    assert not outputs.policy.grad.any()
    assert terms[4] == N


def test_value_clipping_never_lowers_the_loss():
    outputs, targets = numbers()
    free = PPOObjective(clip=0.2, **SMALL)(outputs, targets)[1]
    clipped = PPOObjective(clip=0.2, **{**SMALL, "value_clip": 0.01})(outputs, targets)[1]
    assert clipped[1] > free[1]


def test_rows_that_do_not_count_are_as_good_as_gone():
    outputs, targets = numbers()
    objective = PPOObjective(clip=0.2, **SMALL)
    valid = torch.tensor([True, False, True, True, False, True, False])
    loss, terms = objective(outputs, {**targets, "valid": valid})
    loss.backward()
    grads = outputs.policy.grad.clone(), outputs.values.grad.clone()
    short = PolicyOutputs(outputs.policy[valid], outputs.values[valid])
    outputs.policy.grad = outputs.values.grad = None
    expected, expected_terms = objective(short, {name: target[valid] for name, target in targets.items()})
    expected.backward()
    torch.testing.assert_close((loss, terms), (expected, expected_terms), rtol=1e-12, atol=0)
    torch.testing.assert_close(grads, (outputs.policy.grad, outputs.values.grad), rtol=1e-12, atol=0)
    assert not grads[0][~valid].any()


def test_environments_by_steps_are_rows_too():
    outputs, targets = numbers()
    objective = PPOObjective(clip=0.2, **SMALL)
    square = PolicyOutputs(outputs.policy[:6].view(2, 3, A), outputs.values[:6].view(2, 3))
    rows = PolicyOutputs(outputs.policy[:6], outputs.values[:6])
    by_step = objective(square, {name: target[:6].view(2, 3) for name, target in targets.items()})
    by_row = objective(rows, {name: target[:6] for name, target in targets.items()})
    torch.testing.assert_close(by_step, by_row, rtol=1e-12, atol=0)
