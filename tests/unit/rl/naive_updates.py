"""Updates written out with everything in one place.

Losses as means over rows, the clip, the formula of the optimizer, the skip.
"""

from __future__ import annotations

import math

import torch

from p2pdrl.rl.algorithms.returns import gae


def adam(parameters, gradients, state, rate, eps):
    m, v, steps = state
    m.lerp_(gradients, 1.0 - 0.9)
    v.mul_(0.999).addcmul_(gradients, gradients, value=1.0 - 0.999)
    denominator = v.sqrt().div_(math.sqrt(1.0 - 0.999**steps)).add_(eps)
    parameters.addcdiv_(m, denominator, value=-rate / (1.0 - 0.9**steps))


def rmsprop(parameters, gradients, state, rate, eps):
    v = state[1]
    v.mul_(0.99).addcmul_(gradients, gradients, value=1.0 - 0.99)
    parameters.addcdiv_(gradients, v.sqrt().add_(eps), value=-rate)


def naive_step(flat, loss, state, config, formula, eps):
    flat.gradients_D.zero_()
    loss.backward()
    norm = float(torch.linalg.vector_norm(flat.gradients_D))
    if norm > config.max_grad_norm and math.isfinite(norm):
        flat.gradients_D.mul_(config.max_grad_norm / norm)
    if math.isfinite(norm):
        state[2] += 1
        formula(flat.parameters_D, flat.gradients_D, state, config.learning_rate, eps)


def advantages_of(unroll, config):
    return gae(
        unroll.rewards_TB,
        unroll.values_T1B,
        config.discount * (~unroll.terminated_TB),
        config.gae_lambda,
        continues_TB=(~unroll.ends_TB).to(torch.float32),
    )[unroll.valid_TB]


def ppo_loss(policy, rows, config):
    outputs = policy.outputs(rows["obs"])
    values, distribution = outputs.values, outputs.distribution()
    log_probs, entropy = distribution.log_prob(rows["actions"]), distribution.entropy()
    ratio = (log_probs - rows["log_probs"]).exp()
    clipped = ratio.clamp(1.0 - config.clip, 1.0 + config.clip)
    policy_loss = -torch.minimum(ratio * rows["advantages"], clipped * rows["advantages"]).mean()
    errors = (values - rows["returns"]).square()
    if config.value_clip is not None:
        moved = (values - rows["values"]).clamp(-config.value_clip, config.value_clip)
        errors = torch.maximum(errors, (rows["values"] + moved - rows["returns"]).square())
    return policy_loss + config.value_coef * (0.5 * errors.mean()) - config.entropy_coef * entropy.mean()


def a2c_loss(policy, rows, config):
    outputs = policy.outputs(rows["obs"])
    values, distribution = outputs.values, outputs.distribution()
    log_probs, entropy = distribution.log_prob(rows["actions"]), distribution.entropy()
    loss = -(rows["advantages"] * log_probs).mean()
    loss = loss + config.value_coef * (0.5 * (values - rows["returns"]).square().mean())
    return loss - config.entropy_coef * entropy.mean()


def naive_ppo(policy, flat, unroll, state, config, generator):
    valid = unroll.valid_TB
    values = unroll.values_T1B[:-1][valid]
    advantages = advantages_of(unroll, config)
    returns = advantages + values
    batch = {
        "obs": unroll.obs_T1BX[:-1][valid],
        "actions": unroll.actions[valid],
        "log_probs": unroll.log_probs_TB[valid],
        "values": values,
        "advantages": (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8),
        "returns": returns,
    }
    for _ in range(config.epochs):
        order = torch.randperm(len(values), generator=generator)
        for indices in torch.split(order, math.ceil(len(values) / config.minibatches)):
            rows = {name: array[indices] for name, array in batch.items()}
            naive_step(flat, ppo_loss(policy, rows, config), state, config, adam, 1e-5)


def naive_a2c(policy, flat, unroll, state, config, generator):
    valid = unroll.valid_TB
    advantages = advantages_of(unroll, config)
    rows = {
        "obs": unroll.obs_T1BX[:-1][valid],
        "actions": unroll.actions[valid],
        "advantages": advantages,
        "returns": advantages + unroll.values_T1B[:-1][valid],
    }
    naive_step(flat, a2c_loss(policy, rows, config), state, config, rmsprop, config.rmsprop_eps)
