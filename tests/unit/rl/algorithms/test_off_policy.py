"""DDPG, TD3, SAC and discrete SAC, each against the same update written anew in plain torch.

The references know the parameters by name and nothing else of the package: layers are matrix products,
densities torch.distributions', steps torch.optim's.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Normal
from torch.distributions.transforms import TanhTransform

from p2pdrl.config.task import DDPGConfig, DiscreteSACConfig, NetworkConfig, SACConfig, TD3Config
from p2pdrl.rl.algorithms.registry import AlgorithmContext, entry_of
from p2pdrl.rl.engines import EngineOptions, make_engine, policy_forward
from p2pdrl.rl.envs import Continuous, Discrete, EnvSpec
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import OwnStepper
from p2pdrl.rl.sources.replay import Replay, ReplayBatch, Transitions

CPU = torch.device("cpu")
A, B, STEPS = 2, 6, 3
BOX = EnvSpec((3,), "float32", Continuous(A, np.array([-2, 0], np.float32), np.array([2, 1], np.float32)))
CHOICES = EnvSpec((3,), "float32", Discrete(4))
USUAL = {"learning_starts": 1, "learning_rate": 0.01, "actor_learning_rate": 0.02, "target_tau": 0.1}


class FixedDraws(Replay):
    """A feeder whose memory holds nothing but what the test says."""

    def __init__(self, *drawn: Transitions, count: int = 1000) -> None:
        self._drawn = list(drawn)
        self.asked = 0
        self.priorities: list[np.ndarray] = []
        self.count = count

    @property
    def stored(self):
        return self.count

    @property
    def full(self):
        return False

    def blocks(self, rows, times, beta):
        for _ in range(times):
            self.asked += 1
            yield self._drawn[(self.asked - 1) % len(self._drawn)]

    def update_priorities(self, drawn, errors_B):
        self.priorities.append(errors_B.numpy().copy())


def transitions(seed: int, spec: EnvSpec = BOX) -> Transitions:
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

    actions = normal(B, A).tanh() if spec is BOX else torch.from_numpy(rng.integers(0, 4, B))
    return Transitions(
        obs_BX=normal(B, 3),
        actions_B=actions,
        returns_B=normal(B) * 2,
        discounts_B=torch.tensor([0.9, 0.0, 0.81, 0.9, 0.0, 0.9]),
        next_obs_BX=normal(B, 3),
        weights_B=torch.from_numpy(rng.uniform(0.2, 1.0, B).astype(np.float32)),
        indices_B=np.arange(B),
        serials_B=np.arange(B),
    )


def make(config, spec=BOX, network=None, microbatches=1):
    """An algorithm with its policy, whose small last layers are made larger, so that something differs."""
    entry = entry_of(config)
    policy = entry.network(spec, network or NetworkConfig(hidden=(8,)), 1)
    policy.configure(config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, value in policy.named_parameters():
            if name != "log_alpha":
                value.add_(0.1 * torch.randn(value.shape, generator=generator))
    flat = FlatModule(policy, CPU)
    options = EngineOptions(microbatches=microbatches)
    made = AlgorithmContext(
        config=config,
        policy=policy,
        flat=flat,
        engine=make_engine(options, flat, policy_forward(policy)),
        engine_for=lambda run: make_engine(options, flat, run),
        generator=torch.Generator().manual_seed(7),
    )
    return entry.build(made), policy, flat


def weights_of(policy) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone().requires_grad_() for name, value in policy.named_parameters()}


def fixed(weights: dict) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in weights.items()}


def part(weights: dict, *prefixes: str) -> list[torch.Tensor]:
    return [value for name, value in weights.items() if name.startswith(prefixes)]


def dense(weights, name, x):
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def q_by_hand(weights, number, inputs):
    x = torch.tanh(
        inputs @ weights["critics.hidden.0.weight"][number] + weights["critics.hidden.0.bias"][number]
    )
    return x @ weights["critics.head.weight"][number] + weights["critics.head.bias"][number]


def q_of(weights, number, obs, actions):
    return q_by_hand(weights, number, torch.cat((obs, actions), 1))[:, 0]


def polyak(target, online, tau):
    for name, value in target.items():
        target[name] = (1 - tau) * value + tau * online[name].detach()


def stepped(optimizer, loss, parameters):
    optimizer.zero_grad()
    for parameter, slope in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = slope
    optimizer.step()
    return float(loss.detach())


def agree(policy, weights):
    for name, value in policy.named_parameters():
        np.testing.assert_allclose(value.detach(), weights[name].detach(), rtol=0, atol=1e-6, err_msg=name)


def agree_target(algorithm, name, weights, prefix):
    found = next(target for target in algorithm.targets if f"target.{name}" in target.state())
    expected = torch.cat([value.reshape(-1) for value in part(weights, prefix)])
    np.testing.assert_allclose(found.state()[f"target.{name}"], expected, rtol=0, atol=1e-6)


def follow(algorithm, policy, reference, spec=BOX):
    """Make some steps with both, and compare losses, parameters and priorities after each."""
    for step in range(STEPS):
        drawn = transitions(step, spec)
        feeder = FixedDraws(drawn)
        metrics = algorithm.update(ReplayBatch(8, [], feeder))
        expected, errors = reference(drawn)
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (step, name)
        np.testing.assert_allclose(feeder.priorities[0], errors.detach(), rtol=1e-5, atol=1e-6)
        yield step


@pytest.mark.parametrize("microbatches", [1, 4])
def test_ddpg_steps_as_plain_torch_does(microbatches):
    algorithm, policy, _ = make(DDPGConfig(**USUAL), microbatches=microbatches)
    weights = weights_of(policy)
    target = fixed(weights)
    critics, actor = part(weights, "critics"), part(weights, "actor")
    by_critic, by_actor = torch.optim.Adam(critics, 0.01), torch.optim.Adam(actor, 0.02)

    def mu(from_, obs):
        return torch.tanh(dense(from_, "actor.1", torch.tanh(dense(from_, "actor.0.dense.0", obs))))

    def reference(drawn):
        next_obs = drawn.next_obs_BX
        y = drawn.returns_B + drawn.discounts_B * q_of(target, 0, next_obs, mu(target, next_obs))
        error = q_of(weights, 0, drawn.obs_BX, drawn.actions_B) - y
        critic_loss = stepped(by_critic, (drawn.weights_B * error**2).mean(), critics)
        actor_loss = stepped(
            by_actor, -q_of(weights, 0, drawn.obs_BX, mu(weights, drawn.obs_BX)).mean(), actor
        )
        polyak(target, weights, 0.1)
        return {"critic_loss": critic_loss, "actor_loss": actor_loss}, error.abs()

    for _ in follow(algorithm, policy, reference):
        agree(policy, weights)
        agree_target(algorithm, "critics", target, "critics")
        agree_target(algorithm, "actor", target, "actor")


@pytest.mark.parametrize("microbatches", [1, 4])
def test_joint_ddpg_steps_once_along_the_sum_of_both_losses(microbatches):
    config = DDPGConfig(**{**USUAL, "actor_learning_rate": None}, joint=True)
    algorithm, policy, _ = make(config, microbatches=microbatches)
    weights = weights_of(policy)
    target = fixed(weights)
    critics, actor = part(weights, "critics"), part(weights, "actor")
    both = torch.optim.Adam([*critics, *actor], 0.01)

    def mu(from_, obs):
        return torch.tanh(dense(from_, "actor.1", torch.tanh(dense(from_, "actor.0.dense.0", obs))))

    def reference(drawn):
        next_obs = drawn.next_obs_BX
        y = drawn.returns_B + drawn.discounts_B * q_of(target, 0, next_obs, mu(target, next_obs))
        error = q_of(weights, 0, drawn.obs_BX, drawn.actions_B) - y
        critic_loss = (drawn.weights_B * error**2).mean()
        actor_loss = -q_of(weights, 0, drawn.obs_BX, mu(weights, drawn.obs_BX)).mean()
        slopes = [
            *torch.autograd.grad(critic_loss, critics, retain_graph=True),
            *torch.autograd.grad(actor_loss, actor),
        ]
        for parameter, slope in zip([*critics, *actor], slopes, strict=True):
            parameter.grad = slope
        both.step()
        polyak(target, weights, 0.1)
        return {"critic_loss": critic_loss.item(), "actor_loss": actor_loss.item()}, error.abs()

    assert len(algorithm.losses) == 1
    for _ in follow(algorithm, policy, reference):
        agree(policy, weights)
        agree_target(algorithm, "critics", target, "critics")
        agree_target(algorithm, "actor", target, "actor")


def test_a_block_of_gradients_says_how_many_are_left_and_ends_with_its_peers():
    config = DDPGConfig(**{**USUAL, "actor_learning_rate": None}, joint=True, gradient_steps=5)
    algorithm, _, _ = make(config)
    loss = algorithm.losses[0]

    class Peers(OwnStepper):
        def __init__(self):
            self.left = []

        def step(self, optimizer, **options):
            self.left.append(options["left"])
            self.ends_update = options["left"] == 2
            return super().step(optimizer, **options)

    loss.stepper = Peers()
    metrics = algorithm.update(ReplayBatch(8, [], FixedDraws(transitions(1))))
    assert loss.stepper.left == [4, 3, 2]
    assert metrics["gradient_steps"] == 3


@pytest.mark.parametrize("microbatches", [1, 4])
def test_td3_steps_as_plain_torch_does(microbatches):
    config = TD3Config(**USUAL, target_noise_std=0.4, target_noise_clip=0.5)
    algorithm, policy, _ = make(config, microbatches=microbatches)
    weights = weights_of(policy)
    target = fixed(weights)
    critics, actor = part(weights, "critics"), part(weights, "actor")
    by_critic, by_actor = torch.optim.Adam(critics, 0.01), torch.optim.Adam(actor, 0.02)
    generator = torch.Generator().manual_seed(7)
    calls = []

    def mu(from_, obs):
        return torch.tanh(dense(from_, "actor.1", torch.tanh(dense(from_, "actor.0.dense.0", obs))))

    def reference(drawn):
        calls.append(1)
        next_obs = drawn.next_obs_BX
        noise = (0.4 * torch.randn((B, A), generator=generator)).clamp(-0.5, 0.5)
        next_actions = (mu(target, next_obs) + noise).clamp(-1, 1)
        next_q = torch.minimum(*(q_of(target, i, next_obs, next_actions) for i in (0, 1)))
        y = drawn.returns_B + drawn.discounts_B * next_q
        errors = [q_of(weights, i, drawn.obs_BX, drawn.actions_B) - y for i in (0, 1)]
        loss = sum((drawn.weights_B * error**2).mean() for error in errors)
        expected = {"critic_loss": stepped(by_critic, loss, critics)}
        if len(calls) % 2 == 0:
            value = q_of(weights, 0, drawn.obs_BX, mu(weights, drawn.obs_BX)).mean()
            expected["actor_loss"] = stepped(by_actor, -value, actor)
            polyak(target, weights, 0.1)
        return expected, sum(error.abs() for error in errors) / 2

    for _ in follow(algorithm, policy, reference):
        agree(policy, weights)
        agree_target(algorithm, "critics", target, "critics")
        agree_target(algorithm, "actor", target, "actor")


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("temperature", ["auto", 0.3])
def test_sac_steps_as_plain_torch_does(temperature, microbatches):
    config = SACConfig(**USUAL, temperature=temperature, temperature_init=0.5, temperature_learning_rate=0.05)
    algorithm, policy, _ = make(config, microbatches=microbatches)
    weights = weights_of(policy)
    target = fixed(weights)
    critics, actor = part(weights, "critics"), part(weights, "actor")
    log_alpha = weights["log_alpha"]
    assert float(log_alpha.detach().exp()) == pytest.approx(0.5 if temperature == "auto" else 0.3)
    by_critic, by_actor = torch.optim.Adam(critics, 0.01), torch.optim.Adam(actor, 0.02)
    by_alpha = torch.optim.Adam([log_alpha], 0.05)
    generator = torch.Generator().manual_seed(7)

    def sampled(obs, z):
        mean, log_std = dense(
            weights, "actor_head", torch.tanh(dense(weights, "actor_trunk.dense.0", obs))
        ).chunk(2, 1)
        u = mean + log_std.clamp(-20, 2).exp() * z
        squash = TanhTransform()
        a = squash(u)
        density = Normal(mean, log_std.clamp(-20, 2).exp()).log_prob(u) - squash.log_abs_det_jacobian(u, a)
        return a, density.sum(1)

    def reference(drawn):
        z, next_z = torch.randn((2 * B, A), generator=generator).chunk(2)
        alpha = log_alpha.detach().exp()
        with torch.no_grad():
            next_actions, next_log_probs = sampled(drawn.next_obs_BX, next_z)
        next_q = torch.minimum(*(q_of(target, i, drawn.next_obs_BX, next_actions) for i in (0, 1)))
        y = drawn.returns_B + drawn.discounts_B * (next_q - alpha * next_log_probs)
        errors = [q_of(weights, i, drawn.obs_BX, drawn.actions_B) - y for i in (0, 1)]
        loss = sum(0.5 * (drawn.weights_B * error**2).mean() for error in errors)
        expected = {"critic_loss": stepped(by_critic, loss, critics)}
        actions, log_probs = sampled(drawn.obs_BX, z)
        q = torch.minimum(*(q_of(weights, i, drawn.obs_BX, actions) for i in (0, 1)))
        expected["actor_loss"] = stepped(by_actor, (alpha * log_probs - q).mean(), actor)
        expected["entropy"] = -float(log_probs.detach().mean())
        if temperature == "auto":
            loss = -(log_alpha * (log_probs.detach() - A)).mean()
            expected["temperature_loss"] = stepped(by_alpha, loss, [log_alpha])
        polyak(target, weights, 0.1)
        return expected, sum(error.abs() for error in errors) / 2

    for _ in follow(algorithm, policy, reference):
        agree(policy, weights)
        agree_target(algorithm, "critics", target, "critics")


@pytest.mark.parametrize("microbatches", [1, 4])
def test_discrete_sac_steps_as_plain_torch_does(microbatches):
    config = DiscreteSACConfig(**USUAL, target_entropy_fraction=0.5, temperature_learning_rate=0.05)
    algorithm, policy, _ = make(config, CHOICES, microbatches=microbatches)
    weights = weights_of(policy)
    target = fixed(weights)
    critics, actor = part(weights, "critics"), part(weights, "actor")
    log_alpha = weights["log_alpha"]
    by_critic, by_actor = torch.optim.Adam(critics, 0.01), torch.optim.Adam(actor, 0.02)
    by_alpha = torch.optim.Adam([log_alpha], 0.05)

    def pi(obs):
        return Categorical(
            logits=dense(weights, "actor.1", torch.tanh(dense(weights, "actor.0.dense.0", obs)))
        )

    def reference(drawn):
        alpha = log_alpha.detach().exp()
        after = pi(drawn.next_obs_BX)
        next_q = torch.minimum(*(q_by_hand(target, i, drawn.next_obs_BX) for i in (0, 1)))
        values = (after.probs * next_q).sum(1) + alpha * after.entropy()
        y = drawn.returns_B + drawn.discounts_B * values.detach()
        rows = torch.arange(B)
        errors = [q_by_hand(weights, i, drawn.obs_BX)[rows, drawn.actions_B] - y for i in (0, 1)]
        loss = sum(0.5 * (drawn.weights_B * error**2).mean() for error in errors)
        expected = {"critic_loss": stepped(by_critic, loss, critics)}
        q = torch.minimum(*(q_by_hand(weights, i, drawn.obs_BX) for i in (0, 1))).detach()
        now = pi(drawn.obs_BX)
        loss = (-alpha * now.entropy() - (now.probs * q).sum(1)).mean()
        entropy = now.entropy().detach()
        expected["actor_loss"] = stepped(by_actor, loss, actor)
        expected["entropy"] = float(entropy.mean())
        loss = -(log_alpha * (0.5 * math.log(4) - entropy)).mean()
        expected["temperature_loss"] = stepped(by_alpha, loss, [log_alpha])
        polyak(target, weights, 0.1)
        return expected, sum(error.abs() for error in errors) / 2

    for _ in follow(algorithm, policy, reference, CHOICES):
        agree(policy, weights)
        agree_target(algorithm, "critics", target, "critics")


def test_sac_with_state_dependent_exploration_learns_its_deviations():
    """σ̂(s)² = Σ φ_i(s)² σ_ij² is a density's deviation like any other, with φ taken as it is."""
    network = NetworkConfig(hidden=(8,), exploration_noise="sde", log_std_init=-1.0)
    algorithm, policy, _ = make(SACConfig(**USUAL), network=network)
    weights = weights_of(policy)
    drawn = transitions(1)
    z = torch.randn((2 * B, A), generator=torch.Generator().manual_seed(7)).chunk(2)[0]
    features = torch.tanh(dense(weights, "actor_trunk.dense.0", drawn.obs_BX))
    mean = dense(weights, "actor_head", features)
    variance = features.detach() ** 2 @ torch.exp(2 * weights["log_std"]) + 1e-6
    u = mean + variance.sqrt() * z
    density = Normal(mean, variance.sqrt()).log_prob(u).sum(1) - torch.log(1 - torch.tanh(u) ** 2).sum(1)
    metrics = algorithm.update(ReplayBatch(8, [], FixedDraws(drawn)))
    assert metrics["entropy"] == pytest.approx(-float(density.detach().mean()), rel=1e-4)
    assert (policy.log_std.detach() != weights["log_std"].detach()).all()


def copies(module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in module.parameters()]


def differs(one, other) -> bool:
    return any(bool((mine != theirs).any()) for mine, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize("delay", [1, 3])
def test_td3_steps_its_actor_and_its_targets_with_every_so_many_steps(delay):
    config = TD3Config(**USUAL, policy_delay=delay, gradient_steps=1)
    algorithm, policy, _ = make(config)
    moved = []
    for step in range(6):
        actor, critics = copies(policy.actor), copies(policy.critics)
        targets = copy.deepcopy([target.state() for target in algorithm.targets])
        metrics = algorithm.update(ReplayBatch(8, [], FixedDraws(transitions(step))))
        after = [target.state() for target in algorithm.targets]
        differ = [
            differs(actor, copies(policy.actor)),
            *(
                differs(list(old.values()), list(new.values()))
                for old, new in zip(targets, after, strict=True)
            ),
        ]
        assert len(set(differ)) == 1  # all of them or none
        assert differ[0] == ("actor_loss" in metrics)
        assert differs(critics, copies(policy.critics))
        moved.append(differ[0])
    assert moved == [(step + 1) % delay == 0 for step in range(6)]


def test_without_smoothing_and_delay_and_with_equal_critics_td3_is_ddpg():
    ddpg, single, _ = make(DDPGConfig(**USUAL))
    td3, twin, _ = make(TD3Config(**USUAL, policy_delay=1, target_noise_std=0.0))
    with torch.no_grad():
        for name, value in twin.named_parameters():
            value.copy_(dict(single.named_parameters())[name].expand_as(value))
    for target in td3.targets:
        target.reset()
    for step in range(STEPS):
        batch = ReplayBatch(8, [], FixedDraws(transitions(step)))
        assert td3.update(batch)["actor_loss"] == pytest.approx(ddpg.update(batch)["actor_loss"], abs=1e-6)


CASES = [
    (SACConfig, BOX),
    (TD3Config, BOX),
    (DDPGConfig, BOX),
    (DiscreteSACConfig, CHOICES),
]


@pytest.mark.parametrize(("config", "spec"), CASES)
def test_nothing_is_learned_and_all_is_random_before_there_is_enough(config, spec):
    algorithm, _, flat = make(config(learning_starts=100), spec)
    before = flat.numpy().copy()
    assert algorithm.exploration == 1.0
    metrics = algorithm.update(ReplayBatch(8, [], FixedDraws(transitions(1, spec), count=99)))
    assert (flat.numpy() == before).all()
    assert metrics["gradient_steps"] == 0
    assert algorithm.exploration == 1.0
    metrics = algorithm.update(ReplayBatch(8, [], FixedDraws(transitions(1, spec), count=100)))
    assert metrics["gradient_steps"] == 1
    assert (flat.numpy() != before).any()
    assert algorithm.exploration == 0.0


@pytest.mark.parametrize(("config", "spec"), CASES)
def test_who_joins_a_swarm_that_has_learned_acts_as_it_does(config, spec):
    algorithm, *_ = make(config(learning_starts=100), spec)
    algorithm.env_steps = 100
    assert algorithm.exploration == 0.0


@pytest.mark.parametrize(("config", "spec"), CASES)
def test_everything_but_the_targets_travels_as_one_vector(config, spec):
    algorithm, policy, flat = make(config(**USUAL), spec)
    assert flat.size == sum(value.numel() for value in policy.parameters())
    spans = [loss.optimizer.span.size for loss in algorithm.losses]
    assert sum(spans) == flat.size  # each parameter has one loss that steps it
    names = {item.name for part_ in (*algorithm.targets,) for item in part_.items()}
    assert "target.critics" in names


@pytest.mark.parametrize(("config", "spec"), CASES)
def test_learning_rates_fall_with_progress(config, spec):
    algorithm, _, flat = make(config(**USUAL, anneal="linear"), spec)
    algorithm.progress = 1.0
    before = flat.numpy().copy()
    assert algorithm.update(ReplayBatch(8, [], FixedDraws(transitions(1, spec))))["learning_rate"] == 0.0
    assert (flat.numpy() == before).all()


@pytest.mark.parametrize(("config", "spec"), CASES)
def test_a_poisoned_batch_is_skipped(config, spec):
    algorithm, _, flat = make(config(**USUAL, gradient_steps=2), spec)
    poisoned = transitions(1, spec)
    poisoned.returns_B[0] = math.nan
    metrics = algorithm.update(ReplayBatch(8, [], FixedDraws(poisoned, transitions(2, spec))))
    assert metrics["skipped_steps"] == 1
    assert metrics["gradient_steps"] == 1
    assert np.isfinite(flat.numpy()).all()
