"""One update against plain torch, however the batch is cut; what old policies and reset rows do to it."""

from __future__ import annotations

import dataclasses
import itertools

import msgspec
import numpy as np
import pytest
import torch

from p2pdrl.config.task import EnvConfig, ImpalaConfig, NetworkConfig, TaskConfig
from p2pdrl.pipeline.plan import PipelinePlan
from p2pdrl.rl.algorithms.impala import Impala, ImpalaObjective
from p2pdrl.rl.distributions import PolicyOutputs
from p2pdrl.rl.engines import EngineOptions, policy_forward
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Accumulated
from p2pdrl.rl.pipeline.model_split import ModelSplit
from p2pdrl.rl.pipeline.parts import policy_parts
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.registry import build_trainer

from ..pipeline.pipelines import Pipeline, framed_ring, make_plan

CPU = torch.device("cpu")
T, B = 24, 5
CLIPS = {"rho_clip": 1.1, "c_clip": 0.9, "pg_rho_clip": 1.3, "lambda_": 0.9}
CONFIG = ImpalaConfig(unroll_steps=T, entropy_coef=0.02, max_grad_norm=1e9, **CLIPS)
NETWORKS = {
    "mlp": NetworkConfig(hidden=(8, 7)),
    "transformer": NetworkConfig(kind="transformer", layers=1, heads=2, width=8),
    "lstm": NetworkConfig(hidden=(8,), core="lstm", core_size=6),
}
ENVS = {
    "CartPole-v1": EnvConfig(num_envs=B, max_episode_steps=11),  # some terminate, some are truncated
    "Pendulum-v1": EnvConfig(id="Pendulum-v1", num_envs=B, max_episode_steps=9),
}
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}


class Kept:
    """Stands for the stepper: parameters stay."""

    ends_update = False

    def step(self, optimizer, **_):
        return float(optimizer.span.pieces[0][1].norm())


def task_of(network="mlp", env="CartPole-v1", config=CONFIG):
    return TaskConfig(env=ENVS[env], network=NETWORKS[network], algorithm=config)


def old_unroll(network, env, dtype=torch.float64):
    """A policy and an unroll that one with other parameters made, with reset rows in it."""
    trainer = build_trainer(task_of(network, env), 3, "cpu")
    trainer.step()
    unroll = trainer.source.next()
    trainer.close()
    policy = ActorCritic(trainer.policy.spec, NETWORKS[network], 0)
    policy.load_state_dict(trainer.policy.state_dict())
    flat = FlatModule(policy, CPU, dtype)
    generator = torch.Generator().manual_seed(1)
    flat.parameters_D.add_(0.2 * torch.randn(flat.layout.size, generator=generator).to(dtype))
    assert not unroll.valid_TB.all()
    assert unroll.truncated_TB.any()
    parts = {
        field.name: value.to(dtype)
        for field in dataclasses.fields(unroll)
        if isinstance(value := getattr(unroll, field.name), torch.Tensor) and value.is_floating_point()
    }
    return policy, flat, dataclasses.replace(unroll, **parts)


def reference(policy, unroll, config=CONFIG):
    """Return gradient, losses and advantages: one step of one environment at a time."""
    context = unroll.context._replace(starts_BT=unroll.starts_T1B.T)
    outputs = policy.outputs(unroll.obs_T1BX.transpose(0, 1), context)
    if outputs.log_std is None:
        policies = torch.distributions.Categorical(logits=outputs.policy[:, :-1])
        log_probs = policies.log_prob(unroll.actions.T)
        entropy = policies.entropy()
    else:
        policies = torch.distributions.Normal(outputs.policy[:, :-1], outputs.log_std.exp())
        log_probs = policies.log_prob(unroll.actions.transpose(0, 1)).sum(-1)
        entropy = policies.entropy().sum(-1)
    policy_terms, value_terms, entropies, advantages = [], [], [], {}
    for b in range(unroll.valid_TB.shape[1]):
        values = outputs.values[b].detach()
        target_after = None
        for s in reversed(range(unroll.valid_TB.shape[0])):
            if not unroll.valid_TB[s, b]:
                target_after = None
                continue
            ratio = (log_probs[b, s].detach() - unroll.log_probs_TB[s, b]).exp()
            discount = 0.0 if unroll.terminated_TB[s, b] else config.discount
            reward = unroll.rewards_TB[s, b]
            ends = bool(unroll.ends_TB[s, b]) or target_after is None
            after = values[s + 1] if ends else target_after
            delta = torch.clamp(ratio, max=config.rho_clip) * (reward + discount * values[s + 1] - values[s])
            trace = config.lambda_ * torch.clamp(ratio, max=config.c_clip)
            target = values[s] + delta + discount * trace * (after - values[s + 1])
            weight = torch.clamp(ratio, max=config.pg_rho_clip)
            advantages[s, b] = weight * (reward + discount * after - values[s])
            policy_terms.append(-advantages[s, b] * log_probs[b, s])
            value_terms.append(0.5 * (target - outputs.values[b, s]) ** 2)
            entropies.append(entropy[b, s])
            target_after = target
    losses = [torch.stack(terms).mean() for terms in (policy_terms, value_terms, entropies)]
    loss = losses[0] + config.value_coef * losses[1] - config.entropy_coef * losses[2]
    gradient = torch.autograd.grad(loss, list(policy.parameters()))
    return torch.cat([part.flatten() for part in gradient]), torch.stack(losses).detach(), advantages


def gradient_of(policy, flat, unroll, microbatches, **how):
    """Return the gradient of one update, and its metrics."""
    engine = Accumulated(flat, policy_forward(policy, **how), microbatches)
    algorithm = Impala(CONFIG, flat, engine)
    algorithm.losses[0].stepper = Kept()
    metrics = algorithm.update(unroll)
    return flat.gradients_D.clone(), metrics


def relative(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("network", NETWORKS)
def test_an_updates_gradient_is_the_references_in_any_number_of_microbatches(network, env, dtype):
    policy, flat, unroll = old_unroll(network, env, dtype)
    expected, losses, _ = reference(policy, unroll)
    for microbatches in (1, 3, 100):
        found, metrics = gradient_of(policy, flat, unroll, microbatches)
        assert relative(found, expected) < BOUNDS[dtype]
        terms = [metrics[name] for name in ("policy_loss", "value_loss", "entropy")]
        np.testing.assert_allclose(terms, losses, rtol=1e-5, atol=1e-6)
    assert metrics["kl"] > 1e-3
    assert metrics["rho"] < 0.99


def over_ranks():
    """All models in two stages, the smallest in more and by the other schedules; the rest is slow."""
    layouts = [("1f1b", 2, 2), ("1f1b", 3, 3), ("gpipe", 2, 2), ("gpipe", 3, 3), ("interleaved", 4, 2)]
    for network, env, layout in itertools.product(NETWORKS, ENVS, layouts):
        if network != "transformer" and layout[1] > 3:
            continue  # it has three blocks
        quick = layout[1] == 2 or (network, env) == ("mlp", "CartPole-v1") or layout[1] == 4
        yield pytest.param(network, env, *layout, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(("network", "env", "schedule", "stages", "ranks"), list(over_ranks()))
def test_an_updates_gradient_is_the_references_over_the_ranks_of_a_pipeline(
    network, env, schedule, stages, ranks
):
    """Rows are environments with T + 1 observations; targets of V-trace are made at the last rank."""
    policy, flat, unroll = old_unroll(network, env)
    expected, losses, _ = reference(policy, unroll)
    config = msgspec.structs.replace(CONFIG, learning_rate=0.0)
    for microbatches in (1, 2, 4, 8):
        algorithm = Impala(config, flat, Accumulated(flat, policy_forward(policy), 1))
        (loss,) = algorithm.losses
        parts = policy_parts(policy, loss.objective, loss.optimizer, steps=T, most_rows=B, whole_unrolls=True)
        with Pipeline(
            parts, make_plan(parts, stages, microbatches, schedule, ranks), framed_ring
        ) as pipeline:
            loss.engine = loss.stepper = pipeline.head
            metrics = algorithm.update(unroll)
            assert relative(pipeline.gradient(parts), expected) < 1e-12
        terms = [metrics[name] for name in ("policy_loss", "value_loss", "entropy")]
        np.testing.assert_allclose(terms, losses, rtol=1e-9, atol=1e-12)
        assert metrics["rho"] < 0.99


@pytest.mark.parametrize("network", NETWORKS)
def test_activations_computed_anew_give_the_same(network):
    policy, flat, unroll = old_unroll(network, "CartPole-v1")
    expected, _, _ = reference(policy, unroll)
    found, _ = gradient_of(policy, flat, unroll, 2, checkpoint_activations=True, whole_unrolls=True)
    assert relative(found, expected) < 1e-12


@pytest.mark.parametrize(
    ("network", "env", "schedule"),
    [
        ("mlp", "CartPole-v1", "1f1b"),
        ("lstm", "Pendulum-v1", "1f1b"),
        pytest.param("transformer", "Pendulum-v1", "gpipe", marks=pytest.mark.slow),
        pytest.param("mlp", "Pendulum-v1", "gpipe", marks=pytest.mark.slow),
        pytest.param("lstm", "CartPole-v1", "gpipe", marks=pytest.mark.slow),
    ],
)
def test_stages_take_the_step_of_the_whole_model(network, env, schedule):
    ends = []
    for staged in (False, True):
        trainer = build_trainer(task_of(network, env), 3, "cpu")
        pipeline = None
        if staged:
            parts = trainer.parts()
            plan = PipelinePlan(len(parts.blocks), (1,), schedule, 3, 2)
            pipeline = ModelSplit(parts, plan, [CPU, CPU])
            trainer.engine = trainer.stepper = pipeline
        curve = [trainer.step().metrics for _ in range(4)]
        ends.append((trainer.flat.copy(), curve))
        if pipeline is not None:
            pipeline.close()
        trainer.close()
    (flat, curve), (other, others) = ends
    np.testing.assert_allclose(other, flat, rtol=1e-4, atol=1e-5)
    for one, two in zip(curve, others, strict=True):
        for name, value in one.items():
            assert two[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("network", NETWORKS)
def test_several_devices_learn_the_same(network):
    runs = []
    for options in (EngineOptions(), EngineOptions(microbatches=2, split_devices=("cpu", "cpu"))):
        trainer = build_trainer(task_of(network), 3, "cpu", engine=options)
        for _ in range(4):
            trainer.step()
        runs.append(trainer.flat.copy())
        trainer.close()
    np.testing.assert_allclose(runs[1], runs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("network", ["mlp", "lstm"])
def test_reset_rows_have_no_part_in_the_update(network):
    results = []
    policy, flat, unroll = old_unroll(network, "CartPole-v1")
    masked = ~unroll.valid_TB
    for garbage in (0.0, 1e3):
        other = dataclasses.replace(
            unroll,
            rewards_TB=unroll.rewards_TB.masked_fill(masked, garbage),
            log_probs_TB=unroll.log_probs_TB.masked_fill(masked, -garbage),
            actions=unroll.actions.masked_fill(masked, int(garbage > 0)),
        )
        results.append(gradient_of(policy, flat, other, 1))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_the_policy_that_acted_counts_as_it_was_when_it_acted():
    """Its log-probabilities are those of the unroll: other ones give other weights."""
    policy, flat, unroll = old_unroll("mlp", "CartPole-v1")
    other = dataclasses.replace(unroll, log_probs_TB=unroll.log_probs_TB - 0.1)
    found, _ = gradient_of(policy, flat, other, 1)
    assert relative(found, reference(policy, other)[0]) < 1e-12
    assert relative(found, reference(policy, unroll)[0]) > 1e-3


@pytest.mark.parametrize("network", ["mlp", "lstm"])
def test_on_policy_all_weights_are_one(network):
    trainer = build_trainer(task_of(network), 3, "cpu")
    metrics = [trainer.step().metrics for _ in range(3)]
    trainer.close()
    for one in metrics:
        assert one["rho"] == pytest.approx(1.0, abs=1e-6)
        assert one["kl"] == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("reward", [1.0, -1.0])
def test_a_step_along_a_positive_advantage_makes_the_action_likelier(reward):
    logits = torch.zeros(1, 2, 3, dtype=torch.float64, requires_grad=True)
    values = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    row = torch.zeros(1, 1, dtype=torch.float64)
    targets = {
        "actions": torch.ones(1, 1, dtype=torch.int64),
        "log_probs": row - np.log(3.0),
        "rewards": row + reward,
        "discounts": row,
        "continues": row,
        "valid": torch.ones(1, 1, dtype=torch.bool),
    }
    objective = ImpalaObjective(**CLIPS, value_coef=0.5, entropy_coef=0.0)
    loss, _ = objective(PolicyOutputs(logits, values), targets)
    loss.backward()
    logits_after = logits.detach() - 0.1 * logits.grad
    log_prob = torch.log_softmax(logits_after[0, 0], -1)[1]
    assert (log_prob > -np.log(3.0)) == (reward > 0)
    # at ρ = 1: ∂/∂logits −A log π = A (π − onehot), and values go towards the reward by value_coef
    np.testing.assert_allclose(logits.grad[0, 0], reward * (1 / 3 - np.array([0.0, 1.0, 0.0])), atol=1e-15)
    assert values.grad[0].tolist() == [-0.5 * reward, 0.0]
    assert not logits.grad[0, 1].any()


def test_the_optimizer_may_be_adam():
    rules = {}
    for name in ("rmsprop", "adam"):
        trainer = build_trainer(task_of(config=ImpalaConfig(optimizer=name)), 3, "cpu")
        rules[name] = sorted(trainer.sidecar())
        trainer.close()
    assert "optimizer.m" in rules["adam"]
    assert "optimizer.m" not in rules["rmsprop"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rescale_actions": True},
        {"squash": "tanh"},
        {"exploration_noise": "sde", "log_std_init": -1.0},
        {"exploration_noise": "sde", "squash": "tanh"},
    ],
    ids=lambda options: " ".join(map(str, options.values())) or "plain",
)
@pytest.mark.parametrize("network", NETWORKS)
def test_ratios_of_continuous_actions_are_one_under_the_policy_that_acted(network, options):
    task = msgspec.structs.replace(
        task_of(network, "Pendulum-v1", msgspec.structs.replace(CONFIG, learning_rate=0.0)),
        network=msgspec.structs.replace(NETWORKS[network], **options),
    )
    trainer = build_trainer(task, 3, "cpu")
    for _ in range(2):
        metrics = trainer.step().metrics
        assert metrics["rho"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["kl"] == pytest.approx(0.0, abs=1e-5)
    trainer.close()
