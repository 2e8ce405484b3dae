"""V-trace against published numbers, an independent direct sum, and the n-step return."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from p2pdrl.rl.algorithms.returns import vtrace

T = 5
GOLDEN_CLIPS = {"rho_clip": 3.7, "c_clip": 1.0, "pg_rho_clip": 2.2}
CLIPS = [
    GOLDEN_CLIPS,
    {"rho_clip": 1.0, "c_clip": 1.0, "pg_rho_clip": 1.0},
    {"rho_clip": 2.0, "c_clip": 0.5, "pg_rho_clip": 1.0, "lambda_": 0.8},
    {"rho_clip": None, "c_clip": None, "pg_rho_clip": None, "lambda_": 0.95},
]


def published(B):
    """The inputs of the published numbers, for B environments."""
    steps = np.arange(T * B, dtype=float).reshape(T, B)
    values = np.concatenate((steps / B, np.arange(B)[None] + 1.0))
    discounts = np.broadcast_to(0.9 / (np.arange(B) + 1), (T, B)).copy()
    return 5 * (steps / (B * T) - 0.5), steps, values, discounts


def tensors(*arrays):
    return (torch.from_numpy(np.asarray(array)) for array in arrays)


def vtrace_by_direct_sum(
    log_ratios, rewards, values, discounts, continues, rho_clip, c_clip, pg_rho_clip, lambda_=1.0
):
    """Return targets and advantages by equation 1: each target a sum that ends with its episode."""
    steps, environments = rewards.shape
    bound = {None: np.inf}
    ratios = np.exp(log_ratios)
    rho, c, weights = (np.minimum(bound.get(clip, clip), ratios) for clip in (rho_clip, c_clip, pg_rho_clip))
    targets, advantages = np.zeros((steps, environments)), np.zeros((steps, environments))
    for b in range(environments):
        for s in range(steps):
            targets[s, b] = values[s, b]
            for t in range(s, steps):
                product = np.prod([discounts[i, b] * lambda_ * c[i, b] for i in range(s, t)])
                delta = rewards[t, b] + discounts[t, b] * values[t + 1, b] - values[t, b]
                targets[s, b] += product * rho[t, b] * delta
                if not continues[t, b]:
                    break
        for s in range(steps):
            goes_on = s + 1 < steps and continues[s, b]
            after = targets[s + 1, b] if goes_on else values[s + 1, b]
            q = rewards[s, b] + discounts[s, b] * after
            advantages[s, b] = weights[s, b] * (q - values[s, b])
    return targets, advantages


def episodes(seed, steps=17, environments=4):
    """Return random inputs: episodes terminate and are truncated, a reset row follows each end."""
    rng = np.random.default_rng(seed)
    shape = steps, environments
    terminated, truncated, valid = (np.zeros(shape, bool), np.zeros(shape, bool), np.ones(shape, bool))
    for t, b in itertools.product(range(steps), range(environments)):
        if t and (terminated | truncated)[t - 1, b]:
            valid[t, b] = False
        else:
            terminated[t, b] = rng.random() < 0.15
            truncated[t, b] = not terminated[t, b] and rng.random() < 0.15
    assert terminated.any()
    assert truncated.any()
    return {
        "log_ratios": rng.normal(size=shape),
        "rewards": rng.normal(size=shape),
        "values": rng.normal(size=(steps + 1, environments)),
        "discounts": 0.97 * ~terminated,
        "continues": (~(terminated | truncated)).astype(float),
    }, valid


def test_published_numbers_of_one_environment():
    found = vtrace(*tensors(*published(1)), **GOLDEN_CLIPS)
    targets = [0.200182, 2.709682, 8.513628, 11.932397, 7.33]
    advantages = [0.200182, 1.709682, 6.513628, 10.876614, 1.98]
    np.testing.assert_allclose(found.values_TB[:, 0], targets, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.advantages_TB[:, 0], advantages, rtol=0, atol=1e-6)


def test_published_sums_of_five_environments():
    found = vtrace(*tensors(*published(5)), **GOLDEN_CLIPS)
    assert float(found.values_TB.sum()) == pytest.approx(930.417544, abs=1e-6)
    assert float(found.advantages_TB.sum()) == pytest.approx(824.182115, abs=1e-6)


@pytest.mark.parametrize("clips", CLIPS)
@pytest.mark.parametrize("seed", range(4))
def test_direct_sum(seed, clips):
    inputs, valid = episodes(seed)
    found = vtrace(*tensors(*inputs.values()), **clips)
    targets, advantages = vtrace_by_direct_sum(**inputs, **clips)
    np.testing.assert_allclose(found.values_TB[valid], targets[valid], rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(found.advantages_TB[valid], advantages[valid], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("clips", CLIPS[:3])
def test_nothing_leaks_over_a_reset_row(clips):
    """Other numbers in reset rows, and in all that follows the first end, change nothing before."""
    inputs, valid = episodes(7)
    first_end = inputs["continues"].argmin(0)
    before = np.arange(len(valid))[:, None] <= first_end
    found = vtrace(*tensors(*inputs.values()), **clips)
    other = {name: array.copy() for name, array in inputs.items()}
    for name in ("log_ratios", "rewards"):
        other[name][~before] += 10.0
    other["values"][1:][~before] += 100.0  # the row after the end is the final observation's, and counts
    again = vtrace(*tensors(*other.values()), **clips)
    for one, two in zip(found, again, strict=True):
        np.testing.assert_array_equal(one[before], two[before])
        assert not np.array_equal(one[valid], two[valid])


def test_a_truncated_episode_is_worth_its_final_observation_and_a_terminated_one_nothing():
    values = torch.tensor([[1.0], [9.0], [50.0], [60.0]])
    rewards, ones = torch.tensor([[2.0], [300.0], [400.0]]), torch.ones(3, 1)
    continues = torch.tensor([[0.0], [1.0], [1.0]])
    for discount, expected in ((0.5, 2.0 + 0.5 * 9.0), (0.0, 2.0)):
        discounts = torch.tensor([[discount], [0.5], [0.5]])
        found = vtrace(0.0 * ones, rewards, values, discounts, continues)
        assert float(found.values_TB[0]) == expected
        assert float(found.advantages_TB[0]) == expected - 1.0


def test_on_policy_it_is_the_n_step_return():
    inputs, valid = episodes(3)
    inputs["log_ratios"][:] = 0.0
    found = vtrace(*tensors(*inputs.values()))
    rewards, discounts, continues = inputs["rewards"], inputs["discounts"], inputs["continues"]
    for s, b in zip(*valid.nonzero(), strict=True):
        expected, weight, t = 0.0, 1.0, s
        while True:
            expected += weight * rewards[t, b]
            weight *= discounts[t, b]
            t += 1
            if t == len(rewards) or not continues[t - 1, b]:
                break
        expected += weight * inputs["values"][t, b]
        assert float(found.values_TB[s, b]) == pytest.approx(expected, rel=1e-11)
        advantage = expected - inputs["values"][s, b]
        assert float(found.advantages_TB[s, b]) == pytest.approx(advantage, rel=1e-9, abs=1e-11)


def test_no_gradient_flows_through_it():
    given = [tensor.requires_grad_() for tensor in tensors(*published(2))]
    assert not any(part.requires_grad for part in vtrace(*given))
