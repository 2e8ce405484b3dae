"""PPO and A2C on made-up unrolls: signs, masks, clipping, batch identities."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from p2pdrl.config.task import A2CConfig, NetworkConfig, PPOConfig
from p2pdrl.rl.algorithms.a2c import A2C
from p2pdrl.rl.algorithms.ppo import PPO
from p2pdrl.rl.algorithms.registry import AlgorithmContext, entry_of
from p2pdrl.rl.engines import policy_forward
from p2pdrl.rl.envs import Discrete, EnvSpec
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Accumulated, WholeBatch
from p2pdrl.rl.networks.lstm import RecurrentContext
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.rollout import Unroll

SPEC = EnvSpec((3,), "float32", Discrete(2))
T, B = 6, 4
MLP = NetworkConfig(hidden=(8,))
LSTM = NetworkConfig(hidden=(8,), core="lstm", core_size=4)


def make(config, seed=0, microbatches=None, network=MLP):
    policy = ActorCritic(SPEC, network, seed)
    flat = FlatModule(policy, torch.device("cpu"))
    forward = policy_forward(policy)
    engine = WholeBatch(flat, forward) if microbatches is None else Accumulated(flat, forward, microbatches)
    made = AlgorithmContext(config, policy, flat, engine, lambda _: engine, torch.Generator().manual_seed(0))
    return policy, flat, entry_of(config).build(made)


def make_unroll(policy, seed=0, **changes):
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randn(T + 1, B, 3, generator=generator)
    actions = torch.randint(2, (T, B), generator=generator)
    context, state = RecurrentContext(), policy.initial_state(B)
    if state is not None:
        state = torch.randn(state.shape, generator=generator).tanh()
        context = RecurrentContext(torch.zeros(B, T + 1, dtype=torch.bool), state)
    with torch.no_grad():
        outputs = policy.outputs(obs.transpose(0, 1), context)
        log_probs = outputs.distribution().log_prob(torch.cat((actions, actions[-1:])).T)
    nothing = torch.zeros(T, B, dtype=torch.bool)
    unroll = Unroll(
        obs_T1BX=obs,
        actions=actions,
        log_probs_TB=log_probs.T[:-1].contiguous(),
        values_T1B=outputs.values.T.contiguous(),
        rewards_TB=torch.randn(T, B, generator=generator),
        terminated_TB=nothing,
        truncated_TB=nothing,
        valid_TB=~nothing,
        env_steps=T * B,
        episodes=[],
        state_BS=state,
    )
    return replace(unroll, **changes)


def ended(kind, *ends):
    """Changes of an unroll by which episodes end at those steps and environments; a step to reset follows."""
    ends_TB = torch.zeros(T, B, dtype=torch.bool)
    valid_TB = torch.ones(T, B, dtype=torch.bool)
    for t, b in ends:
        ends_TB[t, b] = True
        valid_TB[t + 1 : t + 2, b] = False
    return {f"{kind}_TB": ends_TB, "valid_TB": valid_TB, "env_steps": int(valid_TB.sum())}


def test_registry_builds_by_configuration():
    assert isinstance(make(PPOConfig())[2], PPO)
    assert isinstance(make(A2CConfig())[2], A2C)


@pytest.mark.parametrize("config", [PPOConfig(normalize_advantages=False), A2CConfig(entropy_coef=0.0)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_positive_advantage_raises_the_log_probability(config, sign):
    policy, _, algorithm = make(config)
    unroll = make_unroll(policy)
    unroll = replace(
        unroll,
        actions=torch.ones(T, B, dtype=torch.int64),
        rewards_TB=torch.full((T, B), 10.0 * sign),
        log_probs_TB=policy.evaluate(unroll.obs_T1BX[:-1], torch.ones(T, B, dtype=torch.int64))[0].detach(),
    )
    algorithm.update(unroll)
    after = policy.evaluate(unroll.obs_T1BX[:-1], unroll.actions)[0]
    assert sign * (after - unroll.log_probs_TB).mean() > 0


@pytest.mark.parametrize("config", [PPOConfig(epochs=2), A2CConfig()])
def test_masked_steps_have_no_part_in_the_update(config):
    ends = ended("truncated", (2, 1), (4, 3))
    invalid = ~ends["valid_TB"]
    results = []
    for garbage in (0.0, 1e3):
        policy, flat, algorithm = make(config)
        unroll = make_unroll(policy, **ends)
        unroll.rewards_TB[invalid] = garbage
        unroll.log_probs_TB[invalid] = -garbage
        unroll.actions[invalid] = int(garbage > 0)
        algorithm.update(unroll)
        results.append(flat.numpy().copy())
    assert (results[0] == results[1]).all()


def test_target_kl_stops_the_passes():
    config = PPOConfig(learning_rate=0.1, epochs=50, minibatches=1, target_kl=0.01)
    policy, _, algorithm = make(config)
    metrics = algorithm.update(make_unroll(policy))
    assert metrics["gradient_steps"] < 50


@pytest.mark.parametrize("config", [A2CConfig(), PPOConfig(epochs=1, minibatches=1)], ids=["a2c", "ppo"])
@pytest.mark.parametrize("step", [2, T - 1])
def test_a_state_after_the_end_has_a_value_only_where_the_episode_was_cut(config, step):
    """ŷ = r + γ (1 − done) v(s′) …, within the unroll and at its end; a truncation isn't done."""
    for kind in ("terminated", "truncated"):
        gradients = []
        for more in (0.0, 10.0):
            policy, flat, algorithm = make(config)
            unroll = make_unroll(policy, **ended(kind, (step, 1)))
            unroll.values_T1B[step + 1, 1] += more
            algorithm.update(unroll)
            gradients.append(flat.gradients_D.clone())
        assert torch.equal(*gradients) == (kind == "terminated")


@pytest.mark.parametrize("network", [MLP, LSTM], ids=["mlp", "lstm"])
@pytest.mark.parametrize(
    "config",
    [
        A2CConfig(max_grad_norm=1e9),
        PPOConfig(normalize_advantages=False, epochs=1, minibatches=1, max_grad_norm=1e9),
    ],
    ids=["a2c", "ppo"],
)
def test_k_environments_equal_k_averaged_workers(config, network):
    """Each by its valid steps; some of PPO's ratios are beyond the clip."""
    policy, flat, algorithm = make(config, network=network)
    unroll = make_unroll(policy, **ended("terminated", (1, 0), (3, 0), (2, 2)))
    unroll.log_probs_TB.add_(torch.randn(T, B, generator=torch.Generator().manual_seed(1)), alpha=0.3)
    start = flat.numpy().copy()
    algorithm.update(unroll)
    together = flat.gradients_D.clone()
    workers = torch.zeros_like(together)
    for b in range(B):
        flat.set_(start)
        columns = {
            name: array[:, b : b + 1]
            for name, array in vars(unroll).items()
            if isinstance(array, torch.Tensor) and name != "state_BS"
        }
        state = None if unroll.state_BS is None else unroll.state_BS[b : b + 1]
        steps = int(columns["valid_TB"].sum())
        algorithm.update(replace(unroll, **columns, state_BS=state, env_steps=steps))
        workers += flat.gradients_D * (steps / unroll.env_steps)
    torch.testing.assert_close(workers, together, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("microbatches", [None, 3])
@pytest.mark.parametrize("config", [PPOConfig(epochs=1, minibatches=1), A2CConfig()])
def test_a_batch_of_nonsense_leaves_the_parameters_alone(config, microbatches):
    policy, flat, algorithm = make(config, microbatches=microbatches)
    before = flat.numpy().copy()
    metrics = algorithm.update(make_unroll(policy, rewards_TB=torch.full((T, B), float("nan"))))
    assert metrics["skipped_steps"] == 1
    assert (flat.numpy() == before).all()
