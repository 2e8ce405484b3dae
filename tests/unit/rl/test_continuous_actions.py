"""Options of continuous actions: how they begin and explore, what environments get, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p2pdrl.config.task import EnvConfig, NetworkConfig, TaskConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.envs import Continuous, Discrete, EnvSpec
from p2pdrl.rl.evaluate import evaluate
from p2pdrl.rl.gsde import held_noise, perturbation, state_log_std
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.registry import build_trainer

LOW, HIGH = np.array([-2.0, 0.0], np.float32), np.array([2.0, 5.0], np.float32)
SPEC = EnvSpec((3,), "float32", Continuous(2, LOW, HIGH))
OPEN = EnvSpec((3,), "float32", Continuous(2, LOW, np.array([2.0, np.inf], np.float32)))
CHOICE = EnvSpec((3,), "float32", Discrete(4))
F, A = 8, 2


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def policy_of(spec=SPEC, **options):
    return ActorCritic(spec, NetworkConfig(hidden=(F,), **options), seed=0)


@pytest.mark.parametrize("noise", ["white", "sde"])
def test_deviations_begin_as_configured(noise):
    policy = policy_of(exploration_noise=noise, log_std_init=-1.5)
    assert policy.log_std.shape == ((F, A) if noise == "sde" else (A,))
    assert (policy.log_std == -1.5).all()
    assert not policy_of(exploration_noise=noise).log_std.any()


@pytest.mark.parametrize("options", [{"squash": "tanh"}, {"rescale_actions": True}])
def test_the_bounds_are_what_minus_one_and_one_become(options):
    policy = policy_of(**options)
    u = np.array([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0], [3.0, -9.0]], np.float32)
    inner = np.tanh(u) if "squash" in options else u
    expected = np.array([0.0, 2.5]) + np.array([2.0, 2.5]) * inner
    actions = policy.to_environment(u)
    assert actions.dtype == np.float32
    np.testing.assert_allclose(actions, expected, rtol=1e-6)
    assert policy_of().to_environment(u) is u


@pytest.mark.parametrize("options", [{"squash": "tanh"}, {"rescale_actions": True}])
def test_actions_without_bounds_can_not_be_brought_between_them(options):
    with pytest.raises(ConfigError, match=r"network.* must be finite; .* action 1 goes from 0 to inf"):
        policy_of(OPEN, **options)
    policy_of(OPEN, exploration_noise="sde")


@pytest.mark.parametrize(
    "options", [{"squash": "tanh"}, {"rescale_actions": True}, {"exploration_noise": "sde"}]
)
def test_choices_are_not_continuous(options):
    task = TaskConfig(env=EnvConfig(num_envs=1), network=NetworkConfig(**options))
    with pytest.raises(ConfigError, match=f"network.{next(iter(options))} = .* is for continuous actions"):
        build_trainer(task, 1, "cpu")
    policy_of(CHOICE, log_std_init=-2.0)


def test_noise_is_held_for_as_many_steps_as_asked_for():
    def noise(hold):
        return held_noise((7, 3), F, A, hold, generator())

    for hold, new in ((1, range(7)), (3, (0, 3, 6)), (7, (0,)), (0, (0,)), (100, (0,))):
        drawn = noise(hold)
        assert drawn.shape == (7, 3, F, A)
        assert [t for t in range(7) if t == 0 or not torch.equal(drawn[t], drawn[t - 1])] == list(new)
    assert torch.equal(noise(3), noise(3))
    assert not torch.equal(noise(3)[0, 0], noise(3)[0, 1])  # each environment has its own
    assert noise(0).untyped_storage().nbytes() == 4 * 3 * F * A  # a view, whatever the unroll's length
    assert held_noise((3,), F, A, 0, generator()).shape == (3, F, A)


def test_a_held_function_gives_the_same_state_the_same_action():
    policy = policy_of(exploration_noise="sde", sde_sample_freq=2)
    noise_TBFA = policy.noise((4, 3), generator())
    obs_BX = torch.randn(1, 3, generator=generator()).expand(3, 3)
    with torch.no_grad():
        first, second, third, _ = (policy.act(obs_BX, noise) for noise in noise_TBFA)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert not torch.equal(first[0], first[1])


def test_the_variance_is_that_of_equation_9():
    features = torch.randn(5, F, generator=generator(), dtype=torch.float64)
    log_std = 0.3 * torch.randn(F, A, generator=generator(1), dtype=torch.float64) - 0.5
    variance = np.einsum("nf,fa->na", features.numpy() ** 2, np.exp(log_std.numpy()) ** 2)
    np.testing.assert_allclose(state_log_std(features, log_std), 0.5 * np.log(variance + 1e-6), rtol=1e-12)
    draws = torch.randn(40_000, F, A, generator=generator(2), dtype=torch.float64)
    for row, expected in zip(features[:2], torch.from_numpy(variance), strict=False):
        moved = perturbation(row.expand(40_000, F), log_std, draws)
        torch.testing.assert_close(moved.var(0), expected, rtol=0.03, atol=0)
        torch.testing.assert_close(moved.mean(0), torch.zeros(A).double(), rtol=0, atol=0.06)


def test_features_learn_nothing_from_the_variance():
    features = torch.randn(5, F, generator=generator()).requires_grad_()
    log_std = torch.zeros(F, A, requires_grad=True)
    state_log_std(features, log_std).sum().backward()
    assert features.grad is None
    assert log_std.grad.abs().min() > 0
    assert state_log_std(torch.zeros(1, F), log_std).isfinite().all()


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_log_probabilities_of_an_unroll_are_those_of_its_actions(core):
    network = NetworkConfig(
        hidden=(F,), core=core, core_size=4, squash="tanh", exploration_noise="sde", sde_sample_freq=3
    )
    env = EnvConfig(id="Pendulum-v1", num_envs=2, max_episode_steps=9)
    trainer = build_trainer(TaskConfig(env=env, network=network), 1, "cpu")
    unroll = trainer.source.next()
    with torch.no_grad():
        if core == "none":
            log_probs, _ = trainer.policy.evaluate(unroll.obs_T1BX[:-1], unroll.actions)
        else:
            obs, actions = unroll.obs_T1BX[:-1].transpose(0, 1), unroll.actions.transpose(0, 1)
            log_probs = trainer.policy.evaluate(obs, actions, unroll.context)[0].T
    torch.testing.assert_close(log_probs, unroll.log_probs_TB)
    trainer.close()


def test_evaluation_hands_environments_what_training_does():
    env = EnvConfig(id="Pendulum-v1", num_envs=2, max_episode_steps=20)
    means = []
    for options in ({}, {"rescale_actions": True}):
        policy = ActorCritic(SPEC_1D, NetworkConfig(hidden=(F,), **options), seed=0)
        with torch.no_grad():
            policy.policy_head.bias.fill_(1.0 if options else 2.0)  # the same torque of 2
            policy.policy_head.weight.zero_()
        means.append(evaluate(policy, env, 2, greedy=True, seed=0).returns)
    assert means[0] == means[1]


SPEC_1D = EnvSpec((3,), "float32", Continuous(1, np.array([-2.0], np.float32), np.array([2.0], np.float32)))
