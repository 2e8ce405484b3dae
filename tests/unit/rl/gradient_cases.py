"""Models, batches and objectives that gradients are checked on, each with a reference written another way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from p2pdrl.config.task import NetworkConfig
from p2pdrl.rl.algorithms.a2c import A2CObjective
from p2pdrl.rl.algorithms.ppo import PPOObjective
from p2pdrl.rl.algorithms.regression import TARGETS, CrossEntropy, LeastSquares
from p2pdrl.rl.engines import module_forward, policy_forward
from p2pdrl.rl.envs import Continuous, Discrete, EnvSpec
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Minibatch
from p2pdrl.rl.networks.lstm import RecurrentContext
from p2pdrl.rl.policy import ActorCritic

CPU = torch.device("cpu")
ROWS = 13
"""Odd, so that most cuts are uneven."""
FEATURES = 5
STEPS = 6

DISCRETE = EnvSpec((FEATURES,), "float32", Discrete(3))
CONTINUOUS = EnvSpec((FEATURES,), "float32", Continuous(2, torch.full((2,), -1.0), torch.full((2,), 1.0)))
HIDDEN = NetworkConfig(hidden=(16, 8))
NETWORKS = {
    "mlp": HIDDEN,
    "transformer": NetworkConfig(kind="transformer", layers=2, heads=2, width=8),
    "lstm": NetworkConfig(hidden=(8,), core="lstm", core_size=6),
}
PPO = PPOObjective(clip=0.2, value_clip=0.3, value_coef=0.7, entropy_coef=0.01)
A2C = A2CObjective(value_coef=0.5, entropy_coef=0.01)


@dataclass
class Case:
    """One model with one batch for one objective."""

    flat: FlatModule
    module: nn.Module
    batch: Minibatch
    objective: Any
    forward: Any


def draws(seed: int, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(dtype)


def policy_case(
    objective: Any, spec: EnvSpec = DISCRETE, network: str = "mlp", dtype=torch.float64, **how: Any
) -> Case:
    """A policy on rows, or on environments by steps where it remembers."""
    draw = draws(1, dtype)
    policy = ActorCritic(spec, NETWORKS[network], 0)
    flat = FlatModule(policy, CPU, dtype)
    flat.parameters_D.add_(0.3 * draw(flat.layout.size))  # at first heads are nearly zero
    shape = (ROWS, STEPS) if network == "lstm" else (ROWS,)
    obs = draw(*shape, FEATURES)
    if isinstance(spec.action, Discrete):
        actions = torch.randint(3, shape, generator=torch.Generator().manual_seed(2))
    else:
        actions = draw(*shape, spec.action.dim)
    targets = {
        "actions": actions,
        "log_probs": -1.0 + 0.3 * draw(*shape),
        "values": draw(*shape),
        "advantages": draw(*shape),
        "returns": draw(*shape),
    }
    batch = Minibatch(obs, targets, ROWS)
    if network == "lstm":
        valid = draw(*shape) > -1.0
        targets["valid"] = valid
        size = policy.initial_state(ROWS).shape[1]
        starts = torch.cat((torch.zeros_like(valid[:, :1]), ~valid[:, :-1]), 1)
        batch = Minibatch(obs, targets, int(valid.sum()), RecurrentContext(starts, draw(ROWS, size)))
    return Case(flat, policy, batch, objective, policy_forward(policy, **how))


def regression_case(kind: str, dtype=torch.float64, **how: Any) -> Case:
    """A linear model, or a classifier with a hidden layer."""
    draw = draws(1, dtype)
    if kind == "least_squares":
        layers = [nn.Linear(FEATURES, 1, bias=False)]
        objective, targets = LeastSquares(), draw(ROWS)
    else:
        layers = [nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh()), nn.Linear(8, 4)]
        objective = CrossEntropy()
        targets = torch.randint(4, (ROWS,), generator=torch.Generator().manual_seed(2))
    module = nn.Sequential(*layers)
    flat = FlatModule(module, CPU, dtype)
    flat.parameters_D.copy_(0.5 * draw(flat.layout.size))
    batch = Minibatch(draw(ROWS, FEATURES), {TARGETS: targets}, ROWS)
    return Case(flat, module, batch, objective, module_forward(layers, **how))


CASES = {
    "ppo": lambda **how: policy_case(PPO, **how),
    "ppo-continuous": lambda **how: policy_case(PPO, CONTINUOUS, **how),
    "ppo-transformer": lambda **how: policy_case(PPO, network="transformer", **how),
    "ppo-lstm": lambda **how: policy_case(PPO, network="lstm", **how),
    "a2c": lambda **how: policy_case(A2C, **how),
    "a2c-continuous-lstm": lambda **how: policy_case(A2C, CONTINUOUS, "lstm", **how),
    "least_squares": lambda **how: regression_case("least_squares", **how),
    "classifier": lambda **how: regression_case("classifier", **how),
}


def reference(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradient and terms as means over rows, by `torch.autograd.grad`, losses written as means."""
    batch, t = case.batch, case.batch.targets
    parameters = list(case.module.parameters())
    if isinstance(case.objective, LeastSquares | CrossEntropy):
        outputs = case.module(batch.inputs)
        if isinstance(case.objective, LeastSquares):
            loss = nn.functional.mse_loss(outputs[:, 0], t[TARGETS]) / 2
        else:
            loss = nn.functional.cross_entropy(outputs, t[TARGETS])
        terms = loss[None]
    else:
        loss, terms = _policy_reference(case)
    gradients = torch.autograd.grad(loss, parameters)
    return torch.cat([gradient.flatten() for gradient in gradients]), terms.detach()


def _policy_reference(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    batch = case.batch
    valid = batch.targets.get("valid", torch.ones(batch.targets["returns"].shape, dtype=torch.bool))
    t = {name: target[valid] for name, target in batch.targets.items()}
    outputs = case.module.outputs(batch.inputs, batch.context)
    values, policy = outputs.values, outputs.distribution()
    log_probs, entropy = policy.log_prob(batch.targets["actions"]), policy.entropy()
    log_probs, entropy, values = log_probs[valid], entropy[valid].mean(), values[valid]
    o = case.objective
    if isinstance(o, A2CObjective):
        policy_loss = -(t["advantages"] * log_probs).mean()
        value_loss = 0.5 * (values - t["returns"]).square().mean()
        loss = policy_loss + o.value_coef * value_loss - o.entropy_coef * entropy
        return loss, torch.stack((policy_loss, value_loss, entropy))
    ratio = (log_probs - t["log_probs"]).exp()
    clipped = ratio.clamp(1 - o.clip, 1 + o.clip)
    policy_loss = -torch.minimum(ratio * t["advantages"], clipped * t["advantages"]).mean()
    near = t["values"] + (values - t["values"]).clamp(-o.value_clip, o.value_clip)
    errors = torch.maximum((values - t["returns"]).square(), (near - t["returns"]).square())
    value_loss = 0.5 * errors.mean()
    kl = (ratio - 1 - ratio.log()).mean()
    outside = (ratio != clipped).to(kl.dtype).mean()
    loss = policy_loss + o.value_coef * value_loss - o.entropy_coef * entropy
    return loss, torch.stack((policy_loss, value_loss, entropy, kl, outside))
