"""PPO's schedules and normalisations against an update written with PyTorch's own parts, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p2pdrl.config.task import NetworkConfig, PPOConfig
from p2pdrl.rl.algorithms.algorithm import Algorithm
from p2pdrl.rl.algorithms.ppo import PPO
from p2pdrl.rl.algorithms.returns import gae
from p2pdrl.rl.engines import policy_forward
from p2pdrl.rl.envs import Continuous, EnvSpec
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Accumulated, GradientEngine, WholeBatch
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.rollout import Unroll

T, B, A = 11, 3, 2
LOW, HIGH = np.array([-2.0, 0.0], np.float32), np.array([2.0, 5.0], np.float32)
SPEC = EnvSpec((4,), "float32", Continuous(A, LOW, HIGH))
SQUASHED = NetworkConfig(hidden=(8,), squash="tanh", log_std_init=-0.5)
RECURRENT = NetworkConfig(hidden=(8,), core="lstm", core_size=4)
PROGRESS = 0.75


def learner(config, network=SQUASHED, microbatches=None):
    policy = ActorCritic(SPEC, network, seed=0)
    flat = FlatModule(policy, torch.device("cpu"), torch.float64)
    forward = policy_forward(policy)
    engine: GradientEngine = WholeBatch(flat, forward)
    if microbatches is not None:
        engine = Accumulated(flat, forward, microbatches)
    algorithm: Algorithm = PPO(config, flat, engine, torch.Generator().manual_seed(1))
    algorithm.progress = PROGRESS
    return policy, flat, algorithm


def make_unroll(policy, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    valid = torch.ones(T, B, dtype=torch.bool)
    valid[4, 1] = valid[8, 2] = False
    ends = torch.zeros(T, B, dtype=torch.bool)
    ends[3, 1] = ends[7, 2] = True
    state = policy.initial_state(B)
    return Unroll(
        obs_T1BX=draw(T + 1, B, 4),
        actions=draw(T, B, A),
        log_probs_TB=-3.5 + 0.4 * draw(T, B),
        values_T1B=draw(T + 1, B),
        rewards_TB=draw(T, B),
        terminated_TB=ends,
        truncated_TB=torch.zeros_like(ends),
        valid_TB=valid,
        env_steps=int(valid.sum()),
        episodes=[],
        state_BS=state,
    )


def reference_update(policy, unroll, config):
    """One update by autograd, torch.distributions and torch.optim.Adam; returns each minibatch's KL."""
    valid = unroll.valid_TB
    advantages = gae(
        unroll.rewards_TB,
        unroll.values_T1B,
        config.discount * (~unroll.terminated_TB),
        config.gae_lambda,
        continues_TB=(~unroll.terminated_TB).double(),
    )
    returns = (advantages + unroll.values_T1B[:-1])[valid]
    advantages = advantages[valid]
    obs, actions, old = unroll.obs_T1BX[:-1][valid], unroll.actions[valid], unroll.log_probs_TB[valid]
    clip = config.clip * (1.0 - PROGRESS if config.clip_anneal == "linear" else 1.0)
    optimizer = torch.optim.Adam(policy.parameters(), config.learning_rate, eps=1e-5)
    generator = torch.Generator().manual_seed(1)
    centre, half = (torch.tensor(x.astype(np.float64)) / 2 for x in (HIGH + LOW, HIGH - LOW))
    transforms = [
        torch.distributions.TanhTransform(cache_size=1),
        torch.distributions.AffineTransform(centre, half, cache_size=1),
    ]
    kls = []
    for _ in range(config.epochs):
        order = torch.randperm(len(obs), generator=generator)
        for rows in order.split(-(-len(obs) // config.minibatches)):
            adv = advantages[rows]
            if config.normalize_over == "minibatch":
                adv = (adv - adv.mean()) / (adv.var(correction=0).sqrt() + 1e-8)
            mean = policy.policy_head(policy.actor(obs[rows]))
            value = policy.value_head(policy.critic(obs[rows]))[:, 0]
            normal = torch.distributions.Normal(mean, policy.log_std.exp().expand(mean.shape))
            squashed = torch.distributions.TransformedDistribution(normal, transforms)
            sent = transforms[1](transforms[0](actions[rows]))
            ratio = (squashed.log_prob(sent).sum(-1) - old[rows]).exp()
            loss = -torch.minimum(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv).mean()
            loss = loss + config.value_coef * 0.5 * (value - returns[rows]).pow(2).mean()
            # H = H[N] + E log|da/du|, by u = mean + std z with the z that the action was
            z = ((actions[rows] - mean) / normal.stddev).detach()
            u = mean + normal.stddev * z
            entropy = normal.entropy() + (1 - u.tanh() ** 2).log() + half.log()
            loss = loss - config.entropy_coef * entropy.sum(-1).mean()
            kls.append(float((ratio - 1 - ratio.log()).mean().detach()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if config.target_kl is not None and kls[-1] > 1.5 * config.target_kl:
                return kls
    return kls


OPTIONS = {
    "clip falls": {"clip_anneal": "linear"},
    "each minibatch": {"normalize_over": "minibatch"},
    "entropy": {"entropy_coef": 0.1, "normalize_over": "minibatch"},
    "all": {
        "clip_anneal": "linear",
        "normalize_over": "minibatch",
        "entropy_coef": 0.05,
        "target_kl_per": "minibatch",
        "target_kl": 0.2,
    },
}


@pytest.mark.parametrize("microbatches", [None, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_update_is_that_of_plain_torch(name, microbatches):
    options = {"normalize_advantages": "normalize_over" in OPTIONS[name], **OPTIONS[name]}
    config = PPOConfig(learning_rate=0.02, epochs=3, minibatches=4, max_grad_norm=1e9, **options)
    policy, flat, algorithm = learner(config, microbatches=microbatches)
    twin = ActorCritic(SPEC, SQUASHED, seed=0).double()
    metrics = algorithm.update(make_unroll(policy))
    kls = reference_update(twin, make_unroll(policy), config)
    expected = torch.cat([parameter.detach().flatten() for parameter in twin.parameters()])
    torch.testing.assert_close(flat.parameters_D, expected, rtol=1e-10, atol=1e-10)
    assert metrics["gradient_steps"] == len(kls)
    assert metrics["kl"] == pytest.approx(np.mean(kls), rel=1e-5)
    assert metrics.get("clip") == (0.2 * (1 - PROGRESS) if "clip_anneal" in options else None)


def test_the_kl_of_a_minibatch_stops_within_a_pass():
    options = {"learning_rate": 0.02, "epochs": 3, "minibatches": 4, "target_kl": 0.2}
    steps = {}
    for per in ("epoch", "minibatch"):
        policy, _, algorithm = learner(PPOConfig(target_kl_per=per, **options))
        steps[per] = algorithm.update(make_unroll(policy))["gradient_steps"]
    assert steps["epoch"] % 4 == 0
    assert steps["minibatch"] < 4


def test_environments_of_a_memory_are_normalised_by_their_valid_steps():
    """With one environment per minibatch each of them is normalised by itself, as if it were the batch."""
    results = []
    for scale in (1.0, 100.0):
        config = PPOConfig(normalize_over="minibatch", minibatches=B, epochs=1, value_coef=0.0)
        policy, flat, algorithm = learner(config, RECURRENT)
        unroll = make_unroll(policy)
        # advantages of environment 0 become 100 times as large: its own deviation divides that away
        unroll.rewards_TB[:, 0] *= scale
        unroll.values_T1B[:, 0] *= scale
        unroll.rewards_TB[~unroll.valid_TB] = 1e6
        algorithm.update(unroll)
        results.append(flat.parameters_D.clone())
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-8)


def test_a_minibatch_of_one_step_keeps_its_advantage():
    config = PPOConfig(normalize_over="minibatch", minibatches=T * B, epochs=1, max_grad_norm=1e9)
    policy, flat, algorithm = learner(config)
    algorithm.update(make_unroll(policy))
    plain = PPOConfig(normalize_advantages=False, minibatches=T * B, epochs=1, max_grad_norm=1e9)
    other, other_flat, other_algorithm = learner(plain)
    other_algorithm.update(make_unroll(other))
    assert torch.equal(flat.parameters_D, other_flat.parameters_D)
