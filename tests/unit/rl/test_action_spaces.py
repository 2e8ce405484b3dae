"""Actions of several parts: distributions against torch's, acting, learning, refusals."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import distributions as reference_of

from p2pdrl.config.task import (
    A2CConfig,
    DQNConfig,
    EnvConfig,
    GradientsConfig,
    ImpalaConfig,
    NetworkConfig,
    PPOConfig,
    TaskConfig,
)
from p2pdrl.errors import ConfigError
from p2pdrl.rl.distributions import Bernoulli, MultiCategorical
from p2pdrl.rl.engines import EngineOptions
from p2pdrl.rl.envs import EnvSpec, MultiBinary, MultiDiscrete, make_vector_env
from p2pdrl.rl.evaluate import evaluate
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.q_network import QNetwork
from p2pdrl.rl.registry import build_trainer

from . import toys

ALGORITHMS = {
    "ppo": PPOConfig(unroll_steps=16, minibatches=2, epochs=2),
    "a2c": A2CConfig(),
    "impala": ImpalaConfig(unroll_steps=8),
}
GUESSES = ["GuessChoices-v0", "GuessShifted-v0", "GuessSwitches-v0"]


@pytest.fixture(scope="module", autouse=True)
def ids():
    with toys.registered():
        yield


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("sizes", [(2, 3, 5), (4, 4), (3,)])
def test_independent_choices_agree_with_torch(sizes):
    logits = torch.randn(7, 2, sum(sizes), generator=generator(), dtype=torch.float64, requires_grad=True)
    ours = MultiCategorical(logits, sizes)
    parts = [reference_of.Categorical(logits=part) for part in logits.split(sizes, -1)]
    actions = ours.sample(MultiCategorical.noise((7, 2), sizes, generator(1)))
    assert actions.shape == (7, 2, len(sizes))
    assert (actions < torch.tensor(sizes)).all()
    log_prob = sum(part.log_prob(actions[..., k]) for k, part in enumerate(parts))
    entropy = sum(part.entropy() for part in parts)
    torch.testing.assert_close(ours.log_prob(actions), log_prob)
    torch.testing.assert_close(ours.entropy(), entropy)
    assert torch.equal(ours.mode(), torch.stack([part.logits.argmax(-1) for part in parts], -1))
    for one, other in ((ours.log_prob(actions), log_prob), (ours.entropy(), entropy)):
        torch.testing.assert_close(
            *(torch.autograd.grad(x.sum(), logits, retain_graph=True) for x in (one, other))
        )


def test_switches_agree_with_torch():
    logits = 3.0 * torch.randn(7, 2, 4, generator=generator(), dtype=torch.float64)
    logits.requires_grad_()
    ours = Bernoulli(logits)
    reference = reference_of.Independent(reference_of.Bernoulli(logits=logits), 1)
    actions = ours.sample(Bernoulli.noise((7, 2), 4, generator(1)))
    assert set(actions.unique().tolist()) == {0, 1}
    pairs = (
        (ours.log_prob(actions), reference.log_prob(actions.double())),
        (ours.entropy(), reference.entropy()),
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(
            *(torch.autograd.grad(x.sum(), logits, retain_graph=True) for x in (one, other))
        )
    assert torch.equal(ours.mode(), (logits > 0).long())
    far = Bernoulli(torch.tensor([[200.0, -200.0]]))
    assert far.log_prob(torch.tensor([[0, 1]])).tolist() == [-400.0]
    assert far.entropy().tolist() == [0.0]


def test_parts_are_drawn_with_their_probabilities():
    sizes = (2, 3)
    logits = torch.tensor([0.3, 0.7, 0.5, 0.1, 0.4]).log()
    drawn = MultiCategorical(logits.expand(50_000, 5), sizes).sample(
        MultiCategorical.noise((50_000,), sizes, generator(1))
    )
    counts = torch.bincount(drawn[:, 0] * 3 + drawn[:, 1], minlength=6).double()
    expected = 50_000 * torch.outer(logits[:2].exp(), logits[2:].exp()).flatten().double()
    assert ((counts - expected) ** 2 / expected).sum() < 20.5  # 5 degrees of freedom, p = 0.001
    odds = torch.logit(torch.tensor([0.1, 0.8]))
    on = Bernoulli(odds.expand(50_000, 2)).sample(Bernoulli.noise((50_000,), 2, generator(2)))
    torch.testing.assert_close(on.double().mean(0), torch.tensor([0.1, 0.8]).double(), atol=0.01, rtol=0)


def test_spaces_are_described():
    def action(name):
        return make_vector_env(EnvConfig(id=name, num_envs=2), seed=0).spec.action

    assert action("GuessChoices-v0") == MultiDiscrete((2, 3, 5))
    assert action("GuessShifted-v0") == MultiDiscrete((3, 3, 3, 3))
    assert action("GuessSwitches-v0") == MultiBinary(3)


@pytest.mark.parametrize("name", GUESSES)
@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_updates_are_finite_and_environments_get_what_their_space_holds(name, core, algorithm):
    """The environment itself asserts the latter."""
    env = EnvConfig(id=name, num_envs=4)
    network = NetworkConfig(hidden=(8,), core=core, core_size=4)
    task = TaskConfig(env=env, network=network, algorithm=ALGORITHMS[algorithm])
    trainer = build_trainer(task, 1, "cpu")
    for _ in range(3):
        metrics = trainer.step().metrics
        assert all(np.isfinite(value) for value in metrics.values())
        if algorithm == "ppo":
            assert abs(metrics["kl"]) < 0.1
    assert evaluate(trainer.policy, env, 3, greedy=False, seed=1).mean > 0.0
    trainer.close()


@pytest.mark.parametrize("name", ["GuessChoices-v0", "GuessSwitches-v0"])
@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(split_devices=("cpu", "cpu"), split_cuts=(1,)),
        EngineOptions(checkpoint_activations=True),
        EngineOptions(microbatches=3),
    ],
    ids=["split", "checkpointed", "accumulated"],
)
def test_all_ways_of_computing_gradients_agree(name, options):
    network = NetworkConfig(hidden=(8, 8))
    task = TaskConfig(env=EnvConfig(id=name, num_envs=4), network=network, algorithm=ALGORITHMS["ppo"])
    trainers = [build_trainer(task, 1, "cpu", engine=engine) for engine in (EngineOptions(), options)]
    for _ in range(2):
        one, other = (trainer.step().metrics for trainer in trainers)
        for key in ("policy_loss", "value_loss", "entropy", "kl"):
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6)
    for trainer in trainers:
        trainer.close()


def test_bf16_keeps_what_the_outputs_stand_for():
    env = EnvConfig(id="GuessChoices-v0", num_envs=4)
    task = TaskConfig(env=env, algorithm=ALGORITHMS["a2c"], gradients=GradientsConfig(precision="bf16"))
    trainer = build_trainer(task, 1, "cpu")
    assert np.isfinite(trainer.step().metrics["entropy"])
    trainer.close()


@pytest.mark.parametrize(
    "name", ["GuessChoices-v0", *(pytest.param(name, marks=pytest.mark.slow) for name in GUESSES[1:])]
)
def test_what_is_shown_is_learned(name):
    env = EnvConfig(id=name, num_envs=16, normalize_returns=False)
    algorithm = PPOConfig(unroll_steps=32, minibatches=4, epochs=6, learning_rate=5e-3, gae_lambda=0.0)
    trainer = build_trainer(TaskConfig(env=env, algorithm=algorithm), 1, "cpu")
    for _ in range(25):
        trainer.step()
    result = evaluate(trainer.policy, env, 32, greedy=True, seed=2)
    trainer.close()
    assert result.mean > 0.85 * toys.STEPS


@pytest.mark.parametrize("action", [MultiDiscrete((2, 3)), MultiBinary(4)])
def test_action_values_of_several_parts_are_refused(action):
    with pytest.raises(ConfigError, match=r"Discrete.*(choices of 2, 3|4 switches).*take ppo"):
        QNetwork(EnvSpec((3,), "float32", action), NetworkConfig(), 0)


def test_dqn_says_so_when_it_is_built():
    task = TaskConfig(env=EnvConfig(id="GuessSwitches-v0"), algorithm=DQNConfig())
    with pytest.raises(ConfigError, match="3 switches"):
        build_trainer(task, 1, "cpu")


@pytest.mark.parametrize("option", [{"squash": "tanh"}, {"exploration_noise": "sde"}])
def test_options_of_continuous_actions_are_refused(option):
    with pytest.raises(ConfigError, match=r"continuous actions.*4 switches"):
        ActorCritic(EnvSpec((3,), "float32", MultiBinary(4)), NetworkConfig(**option), 0)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (gym.spaces.Dict({"a": gym.spaces.Discrete(2)}), "Dict.*one MultiDiscrete"),
        (gym.spaces.Tuple((gym.spaces.Discrete(2),)), "Tuple.*one MultiDiscrete"),
        (gym.spaces.Box(0, 9, (2,), np.int64), "Box.*float type.*MultiDiscrete"),
        (gym.spaces.Text(4), "Text.*wrap"),
    ],
)
def test_actions_that_no_policy_can_take_are_refused(space, words):
    class Strange(gym.Env):
        observation_space = gym.spaces.Box(0, 1, (1,))
        action_space = space

    gym.register("StrangeActions-v0", Strange)
    try:
        with pytest.raises(ConfigError, match=words):
            make_vector_env(EnvConfig(id="StrangeActions-v0", num_envs=1), seed=0)
    finally:
        del gym.registry["StrangeActions-v0"]
