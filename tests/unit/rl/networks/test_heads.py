"""Every trunk under every head: what acts also learns, and every weight has a part in it."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from p2pdrl.config.task import NetworkConfig
from p2pdrl.rl.envs import Continuous, Discrete, EnvSpec, MultiBinary, MultiDiscrete
from p2pdrl.rl.networks.lstm import RecurrentContext
from p2pdrl.rl.networks.registry import resolve_kind
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.q_network import QNetwork

KINDS = ("mlp", "nature_cnn", "impala_resnet", "minatar_cnn", "transformer")
OBSERVATIONS = {
    "vector": ((6,), "float32", 1.0),
    "picture": ((36, 40, 3), "uint8", 255.0),
    "board of truth values": ((8, 8, 8), "bool", 1.0),
    "board of numbers": ((9, 8, 8), "float32", 2.0),
}
ACTIONS = {
    "discrete": Discrete(3),
    "choices": MultiDiscrete((2, 3)),
    "switches": MultiBinary(4),
    "continuous": Continuous(2, np.full(2, -1.0), np.full(2, 1.0)),
}
SMALL = {"channels": (4,), "layers": 1, "width": 8, "heads": 2, "patch": 4, "core_size": 5, "hidden": (7,)}
B, T = 3, 4


def spec_of(observations, action=ACTIONS["discrete"]):
    shape, dtype, most = OBSERVATIONS[observations]
    return EnvSpec(shape, dtype, action, most)


def fits(kind, observations):
    if observations == "vector":
        return kind in {"mlp", "transformer"}
    if observations == "picture":
        return True
    return kind != "nature_cnn" and not (kind == "transformer" and observations == "board of numbers")


PAIRS = [(kind, observations) for observations in OBSERVATIONS for kind in KINDS if fits(kind, observations)]


def observe(spec, *leading):
    numbers = torch.rand((*leading, *spec.obs_shape), generator=torch.Generator().manual_seed(1))
    if spec.obs_dtype == "bool":
        return numbers > 0.5
    return (numbers * spec.obs_most).to(getattr(torch, spec.obs_dtype))


@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
def test_to_draw_weights_torch_needs_nothing_that_is_slow_to_import(monkeypatch, core):
    """What shapes of symbols take is all of sympy, and for every learner and actor half a second."""
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)
    for kind, observations in PAIRS:
        config = NetworkConfig(kind=kind, core=core, **SMALL)
        policy = ActorCritic(spec_of(observations, ACTIONS["continuous"]), config, seed=0)
        assert all(parameter.device.type == "cpu" for parameter in policy.parameters())


def test_the_pairs_are_all_that_fit():
    assert {kind for kind, _ in PAIRS} == set(KINDS)
    assert {observations for _, observations in PAIRS} == set(OBSERVATIONS)


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize(("kind", "observations"), PAIRS)
def test_action_values(kind, observations, dueling):
    spec = spec_of(observations)
    net = QNetwork(spec, NetworkConfig(kind=kind, dueling=dueling, **SMALL), 0)
    obs = observe(spec, T, B)
    q_TBA = net.outputs(obs)
    assert q_TBA.shape == (T, B, 3)
    for t in range(T):
        torch.testing.assert_close(net.outputs(obs[t]), q_TBA[t], rtol=1e-4, atol=1e-5)
        assert torch.equal(net.act(obs[t]), q_TBA[t].argmax(-1))
    (q_TBA.square().sum() + q_TBA[..., 0].sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in net.parameters())


@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(("kind", "observations"), PAIRS)
def test_actors_and_critics(kind, observations, action, core):
    spec = spec_of(observations, ACTIONS[action])
    policy = ActorCritic(spec, NetworkConfig(kind=kind, core=core, **SMALL), 0)
    obs_BTX = observe(spec, B, T)
    generator = torch.Generator().manual_seed(2)
    state_BS = policy.initial_state(B)
    actions = []
    for t in range(T):
        with torch.no_grad():
            action_B = policy.act(obs_BTX[:, t], policy.noise((B,), generator), state_BS)
        assert (tuple(action_B.shape), str(action_B.dtype)) == (
            (B, *spec.action.shape),
            f"torch.{spec.action.dtype}",
        )
        actions.append(action_B)
    outputs = policy.outputs(obs_BTX, RecurrentContext())
    policies = outputs.distribution()
    taken = torch.stack(actions, 1)
    log_probs_BT, entropy_BT = policies.log_prob(taken), policies.entropy(taken)
    assert log_probs_BT.shape == entropy_BT.shape == outputs.values.shape == (B, T)
    (log_probs_BT.sum() + outputs.values.square().sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in policy.parameters())


@pytest.mark.parametrize(
    ("shape", "dtype", "most", "kind"),
    [
        ((10, 10, 4), "bool", 1.0, "minatar_cnn"),
        ((10, 10, 10), "uint8", 255.0, "minatar_cnn"),
        ((35, 80, 3), "float32", 1.0, "minatar_cnn"),
        ((3, 3, 1), "uint8", 255.0, "minatar_cnn"),
        ((36, 36, 3), "bool", 1.0, "nature_cnn"),
        ((4, 84, 84), "float32", 1.0, "nature_cnn"),
        ((3, 2, 7), "float32", 1.0, "mlp"),
        ((10, 10), "float32", 1.0, "mlp"),
    ],
)
def test_small_means_sides_below_36(shape, dtype, most, kind):
    assert resolve_kind(NetworkConfig(), EnvSpec(shape, dtype, Discrete(2), most)) == kind
