"""Action masks: what isn't allowed is never done, has no part in the loss, and gets no gradient."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import distributions as reference_of

from p2pdrl.config.task import (
    A2CConfig,
    DiscreteSACConfig,
    DQNConfig,
    EnvConfig,
    GradientsConfig,
    ImpalaConfig,
    NetworkConfig,
    PPOConfig,
    TaskConfig,
)
from p2pdrl.errors import ConfigError
from p2pdrl.rl.algorithms.a2c import A2CObjective
from p2pdrl.rl.engines import EngineOptions
from p2pdrl.rl.envs import Discrete, EnvSpec, MultiDiscrete, make_vector_env
from p2pdrl.rl.evaluate import evaluate
from p2pdrl.rl.networks.entries import entry_of
from p2pdrl.rl.observations import ObservationPacker, layout_of
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.q_network import QNetwork
from p2pdrl.rl.registry import build_trainer

from . import toys

F, N = 3, 64


@pytest.fixture(scope="module", autouse=True)
def ids():
    with toys.registered():
        yield


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def observed(action, seed=0):
    """A spec, N rows of it, and their masks, in which something is always allowed for each choice."""
    space = gym.spaces.Dict(x=gym.spaces.Box(-1, 1, (F,)), m=gym.spaces.MultiBinary(action.outputs))
    layout = layout_of(space, mask_key="m", mask_size=action.outputs)
    rng = np.random.default_rng(seed)
    sizes = action.sizes if isinstance(action, MultiDiscrete) else (action.n,)
    masks = []
    for size in sizes:
        mask = rng.random((N, size)) < 0.4
        mask[np.arange(N), rng.integers(size, size=N)] = True
        masks.append(mask)
    mask = np.concatenate(masks, 1)
    obs = {"x": rng.uniform(-1, 1, (N, F)).astype(np.float32), "m": mask.astype(np.int8)}
    rows = ObservationPacker(layout, N, "m").pack(obs, {})
    spec = EnvSpec((layout.nbytes,), "uint8", action, layout=layout)
    return spec, torch.from_numpy(rows.copy()), torch.from_numpy(mask)


def heads_that_speak(policy):
    with torch.no_grad():
        policy.policy_head.weight.mul_(300.0)
    return policy


def reference(logits, mask):
    """Torch's distribution over the allowed actions alone, as minus infinity makes it."""
    return reference_of.Categorical(logits=logits.masked_fill(~mask, -torch.inf))


@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
def test_probabilities_are_those_among_what_is_allowed(core):
    spec, rows, mask = observed(Discrete(5))
    policy = heads_that_speak(ActorCritic(spec, NetworkConfig(hidden=(8,), core=core, core_size=6), 0))
    obs = rows if core == "none" else rows.view(8, 8, -1)
    outputs = policy.outputs(obs)
    shape = obs.shape[:-1]
    free = outputs.policy.clone()
    expected = reference(free, mask.view(*shape, 5))
    ours = outputs.distribution()
    for action in range(5):
        actions = torch.full(shape, action)
        allowed = mask.view(*shape, 5)[..., action]
        log_probs = ours.log_prob(actions)
        torch.testing.assert_close(log_probs[allowed], expected.log_prob(actions)[allowed])
        assert (log_probs[~allowed].exp() == 0.0).all()
        assert log_probs.isfinite().all()
    probs = expected.probs
    entropy = -(probs * probs.clamp(min=1e-30).log()).sum(-1)
    torch.testing.assert_close(ours.entropy(), entropy)
    assert mask.view(*shape, 5).gather(-1, ours.mode().unsqueeze(-1)).all()


def test_what_is_drawn_is_allowed_and_has_the_right_probabilities():
    spec, rows, mask = observed(Discrete(5))
    policy = heads_that_speak(ActorCritic(spec, NetworkConfig(hidden=(8,)), 0))
    drawn = torch.stack([policy.act(rows, policy.noise((N,), generator(seed))) for seed in range(2000)])
    counts = torch.nn.functional.one_hot(drawn, 5).sum(0)
    assert (counts[~mask] == 0).all()
    with torch.no_grad():
        expected = reference(policy.outputs(rows).policy, mask).probs
    torch.testing.assert_close(counts / 2000, expected, atol=0.06, rtol=0)
    assert mask.gather(1, policy.act(rows).unsqueeze(1)).all()


def test_no_noise_beats_a_mask():
    """Gumbel noise is infinite where an exponential draw is zero: one in millions."""
    spec, rows, mask = observed(Discrete(5))
    policy = ActorCritic(spec, NetworkConfig(hidden=(8,)), 0)
    noise = torch.zeros((N, 5))
    worst = (~mask).float().argmax(1)
    noise[torch.arange(N), worst] = float(policy.noise((100_000,), generator()).max().clamp(min=1e8))
    taken = policy.act(rows, noise)
    assert mask.gather(1, taken.unsqueeze(1)).all()


@pytest.mark.parametrize("action", [Discrete(5), MultiDiscrete((3, 4)), MultiDiscrete((2, 2))])
def test_gradients_are_finite_and_none_comes_from_what_is_forbidden(action):
    spec, rows, mask = observed(action)
    policy = heads_that_speak(ActorCritic(spec, NetworkConfig(hidden=(8,)), 0))
    taken = policy.act(rows, policy.noise((N,), generator()))
    sizes = action.sizes if isinstance(action, MultiDiscrete) else (action.n,)
    objective = A2CObjective(value_coef=0.5, entropy_coef=0.3)
    targets = {
        "actions": taken,
        "advantages": torch.randn(N, generator=generator(1)),
        "returns": torch.zeros(N),
    }

    def gradient(loss):
        return torch.autograd.grad(loss, [*policy.parameters()], allow_unused=True)

    found = gradient(objective(policy.outputs(rows), targets)[0])
    # by hand, over the allowed choices of each row alone
    features = policy.actor(policy.front(rows))
    logits = policy.policy_head(features)
    by_hand = torch.zeros(())
    for n in range(N):
        at = 0
        for k, size in enumerate(sizes):
            allowed = mask[n, at : at + size].nonzero().flatten()
            log_probs = torch.log_softmax(logits[n, at + allowed], 0)
            action_k = taken[n] if taken.dim() == 1 else taken[n, k]
            (place,) = (allowed == action_k).nonzero().flatten()
            by_hand = by_hand - targets["advantages"][n] * log_probs[place]
            by_hand = by_hand + 0.3 * (log_probs.exp() * log_probs).sum()
            at += size
    value = 0.25 * policy.value_head(policy.critic(policy.front(rows))).square().sum()
    expected = gradient(by_hand + value)
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)


def test_where_nothing_is_allowed_everything_is():
    spec, rows, _ = observed(MultiDiscrete((3, 4)))
    entry_of(rows, spec.layout.mask)[0] = False
    entry_of(rows, spec.layout.mask)[1, :3] = False
    policy = ActorCritic(spec, NetworkConfig(hidden=(8,)), 0)
    outputs = policy.outputs(rows)
    assert (outputs.policy[0] > -1e3).all()
    assert (outputs.policy[1, :3] > -1e3).all()
    assert outputs.distribution().entropy()[0] > np.log(12) - 1e-2


@pytest.mark.parametrize("dueling", [False, True])
def test_greedy_and_exploring_action_values_take_what_is_allowed(dueling):
    spec, rows, mask = observed(Discrete(5))
    net = QNetwork(spec, NetworkConfig(hidden=(8,), dueling=dueling), 0)
    free = torch.where(mask, net.outputs(rows), -torch.inf)
    assert torch.equal(net.act(rows), free.argmax(-1))
    net.exploration = 1.0
    drawn = torch.stack([net.act(rows, net.noise((N,), generator(seed))) for seed in range(2000)])
    counts = torch.nn.functional.one_hot(drawn, 5).sum(0)
    expected = mask / mask.sum(-1, keepdim=True)
    assert (counts[~mask] == 0).all()
    torch.testing.assert_close(counts / 2000, expected, atol=0.06, rtol=0)
    most = torch.full((N, 2), 1.0 - 1e-7)
    most[:, 0] = 0.0
    assert mask.gather(1, net.act(rows, most).unsqueeze(1)).all()


ALGORITHMS = {
    "ppo": PPOConfig(unroll_steps=16, minibatches=2, epochs=2, entropy_coef=0.01),
    "a2c": A2CConfig(),
    "impala": ImpalaConfig(unroll_steps=8),
    "dqn": DQNConfig(learning_starts=16, gradient_steps=4, buffer_size=500, double=False),
    "double dqn": DQNConfig(learning_starts=16, gradient_steps=4, buffer_size=500, n_step=2),
}


@pytest.mark.parametrize("masks", ["entry", "info"])
@pytest.mark.parametrize("dtype", ["int8", "bool"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_environments_never_get_what_they_forbid(masks, dtype, algorithm):
    """They raise, if they do; the mask of an ended episode forbids everything."""
    env = EnvConfig(
        id="Cards-v0",
        num_envs=4,
        kwargs={"masks": masks, "dtype": "int8" if masks == "entry" else dtype, "picture": 0},
    )
    task = TaskConfig(env=env, network=NetworkConfig(hidden=(16,)), algorithm=ALGORITHMS[algorithm])
    trainer = build_trainer(task, 1, "cpu")
    for _ in range(8):
        stats = trainer.step()
        assert all(np.isfinite(value) for value in stats.metrics.values())
        assert abs(stats.metrics.get("td_error", 0.0)) < 100.0  # no bootstrap from what is forbidden
        assert abs(stats.metrics.get("kl", 0.0)) < 1.0
    for greedy in (False, True):
        evaluate(trainer.policy, env, 8, greedy=greedy, seed=1)
    trainer.close()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("algorithm", ["ppo", "impala", "dqn"])
def test_masks_go_with_gradients_in_half_precision(algorithm, precision):
    task = TaskConfig(
        env=EnvConfig(id="Cards-v0", num_envs=4, kwargs={"picture": 0}),
        network=NetworkConfig(hidden=(16,)),
        algorithm=ALGORITHMS[algorithm],
        gradients=GradientsConfig(precision=precision),
    )
    trainer = build_trainer(task, 1, "cpu")
    for _ in range(8):
        metrics = trainer.step().metrics
        assert all(np.isfinite(value) for value in metrics.values())
    assert not metrics.get("skipped_steps")  # the scale of the loss has been found by then
    trainer.close()


@pytest.mark.parametrize("algorithm", ["ppo", "a2c", "impala"])
@pytest.mark.parametrize("core", ["none", "gru"])
def test_several_choices_are_masked_each(algorithm, core):
    env = EnvConfig(id="Cards-v0", num_envs=4, kwargs={"actions": "multi", "picture": 0})
    network = NetworkConfig(hidden=(16,), core=core, core_size=8)
    trainer = build_trainer(TaskConfig(env=env, network=network, algorithm=ALGORITHMS[algorithm]), 1, "cpu")
    for _ in range(5):
        assert all(np.isfinite(value) for value in trainer.step().metrics.values())
    trainer.close()


@pytest.mark.parametrize("double", [False, True])
def test_the_bootstrap_takes_the_greatest_of_what_is_allowed_next(double):
    """Against a tabular one: targets of drawn transitions, from the parameters as they are."""
    env = EnvConfig(id="Cards-v0", num_envs=4, kwargs={"picture": 0}, normalize_returns=False)
    algorithm = DQNConfig(
        learning_starts=1,
        gradient_steps=1,
        batch_size=64,
        double=double,
        unroll_steps=20,
        target_every=1000,
    )
    task = TaskConfig(env=env, network=NetworkConfig(hidden=(16,)), algorithm=algorithm)
    trainer = build_trainer(task, 1, "cpu")
    batch = trainer.source.next()
    drawn = batch.draw(64)
    policy = trainer.policy
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)  # so that online and target differ
    online, target = policy, trainer.algorithm.targets[0].module
    mask = entry_of(drawn.next_obs_BX, policy.spec.layout.mask)
    rows = torch.arange(64)
    with torch.no_grad():
        judge, picker = (net.outputs(drawn.next_obs_BX) for net in (target, online if double else target))
        best = torch.tensor(
            [
                max((float(q[a]), a) for a in range(4) if m[a] or not m.any())[1]
                for q, m in zip(picker, mask, strict=True)
            ]
        )
    expected = drawn.returns_B + drawn.discounts_B * judge[rows, best]
    seen = []
    engine = trainer.engine

    class Noting:
        def gradients(self, part, objective):
            seen.append(part.targets["targets"])
            return engine.gradients(part, objective)

    trainer.engine = Noting()
    batch.replay.blocks = lambda *_: iter([drawn])
    trainer.algorithm.update(batch)
    torch.testing.assert_close(*seen, expected)
    assert (expected.abs() < 100).all()
    assert (~mask).any(-1).all()
    trainer.close()


def test_masks_under_another_name_or_none():
    def layout(**options):
        kwargs = {"picture": 0, **options.pop("kwargs", {})}
        env = make_vector_env(EnvConfig(id="Cards-v0", num_envs=2, kwargs=kwargs, **options), seed=0)
        return env.spec.layout

    assert layout().mask is not None
    assert layout(kwargs={"masks": "info"}).info_mask
    assert layout(kwargs={"masks": "none"}).mask is None
    found = layout(action_mask="", kwargs={"masks": "entry"})
    assert found.mask is None
    assert "action_mask" in [entry.name for entry in found.inputs]  # an entry as any other
    assert layout(action_mask="legal", kwargs={"key": "legal"}).mask.name == "legal"
    assert layout(action_mask="legal", kwargs={"key": "legal", "masks": "info"}).info_mask
    with pytest.raises(ConfigError, match="action_mask = 'legal' is neither in the info"):
        layout(action_mask="legal")


def test_taxis_masks_are_found_and_plain_environments_stay_plain():
    taxi = make_vector_env(EnvConfig(id="Taxi-v4", num_envs=2), seed=0)
    assert taxi.spec.layout.info_mask
    rows = taxi.reset()
    (one_hot,) = taxi.spec.layout.inputs
    assert entry_of(torch.from_numpy(rows), one_hot).sum(-1).tolist() == [1.0, 1.0]
    mask = entry_of(torch.from_numpy(rows), taxi.spec.layout.mask)
    assert mask.shape == (2, 6)
    assert not mask.all()
    for name in ("CartPole-v1", "Acrobot-v1", "Pendulum-v1"):
        assert make_vector_env(EnvConfig(id=name, num_envs=2), seed=0).spec.layout is None


class Lying(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (2,))
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {"action_mask": np.ones(5, np.int8)}


class Narrow(gym.Env):
    observation_space = gym.spaces.Dict(a=gym.spaces.Box(0, 1, (2,)), action_mask=gym.spaces.MultiBinary(2))
    action_space = gym.spaces.Discrete(3)


class Blind(gym.Env):
    observation_space = gym.spaces.Dict(action_mask=gym.spaces.MultiBinary(3))
    action_space = gym.spaces.Discrete(3)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (Lying, "5 numbers, a mask .* 3"),
        (Narrow, "want 3 truth values"),
        (Blind, "nothing to see"),
    ],
)
def test_masks_that_can_not_be_are_refused(env, words):
    gym.register("BadMask-v0", env)
    try:
        with pytest.raises(ConfigError, match=words):
            make_vector_env(EnvConfig(id="BadMask-v0", num_envs=1), seed=0)
    finally:
        del gym.registry["BadMask-v0"]


def test_a_model_cut_into_stages_has_no_masks():
    env = EnvConfig(id="Cards-v0", num_envs=4, kwargs={"picture": 0})
    options = EngineOptions(split_devices=("cpu", "cpu"))
    with pytest.raises(ConfigError, match=r"cut into stages.*action_mask = \"\""):
        build_trainer(TaskConfig(env=env), 1, "cpu", engine=options)


def test_discrete_sac_says_that_it_knows_none():
    env = EnvConfig(id="Cards-v0", num_envs=4, kwargs={"picture": 0})
    with pytest.raises(ConfigError, match=r"sac_discrete knows no action masks.*take dqn"):
        build_trainer(TaskConfig(env=env, algorithm=DiscreteSACConfig()), 1, "cpu")
