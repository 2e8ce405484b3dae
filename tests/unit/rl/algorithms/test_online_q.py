"""Value-based methods without a replay: their returns, their update, their unrolls, their exploration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from p2pdrl.config.task import NetworkConfig, NStepQConfig, OneStepQConfig, OneStepSarsaConfig
from p2pdrl.rl.algorithms.online_q import OnlineQ
from p2pdrl.rl.algorithms.returns import n_step_returns
from p2pdrl.rl.engines import EngineOptions, make_engine, policy_forward
from p2pdrl.rl.envs import Discrete, EnvSpec
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.q_network import ExplorationSpread, QNetwork
from p2pdrl.rl.rollout import RawUnroll, Unroll
from p2pdrl.rl.sources.unrolls import OverlappingUnrolls, UnrollScaler

SPEC = EnvSpec((3,), "float32", Discrete(4))
CPU = torch.device("cpu")
METHODS = [OneStepQConfig, OneStepSarsaConfig, NStepQConfig]
every_method = pytest.mark.parametrize("method", METHODS)


def stream(seed: int, steps: int, envs: int) -> RawUnroll:
    """So many steps as a collector makes them: the step behind an end is a reset, and isn't valid."""
    rng = np.random.default_rng(seed)
    ends = rng.random((steps, envs)) < 0.3
    for t in range(1, steps):
        ends[t] &= ~ends[t - 1]
    valid = np.ones((steps, envs), bool)
    valid[1:] = ~ends[:-1]
    cut = rng.random((steps, envs)) < 0.5
    return RawUnroll(
        obs_T1BX=rng.standard_normal((steps + 1, envs, 3)).astype(np.float32),
        seen_T1BX=None,
        actions=torch.from_numpy(rng.integers(0, 4, (steps, envs))),
        log_probs_TB=torch.zeros(steps, envs),
        values_T1B=torch.zeros(steps + 1, envs),
        rewards_TB=(rng.standard_normal((steps, envs)) * valid).astype(np.float32),
        terminated_TB=ends & ~cut,
        truncated_TB=ends & cut,
        valid_TB=valid,
        episodes=[],
    )


def piece(raw: RawUnroll, begin: int, end: int) -> RawUnroll:
    """Steps ``begin`` … ``end`` of a stream."""
    steps = {
        name: getattr(raw, name)[begin:end]
        for name in ("actions", "log_probs_TB", "rewards_TB", "terminated_TB", "truncated_TB", "valid_TB")
    }
    long = {name: getattr(raw, name)[begin : end + 1] for name in ("obs_T1BX", "values_T1B")}
    return replace(raw, **steps, **long)


def make(config, *, microbatches: int = 1):
    policy = QNetwork(SPEC, NetworkConfig(hidden=(8,)), seed=1)
    with torch.no_grad():
        for name, parameters in policy.named_parameters():
            if "head" in name:  # they begin small; this makes the actions differ
                parameters.mul_(100.0)
    flat = FlatModule(policy, CPU)
    engine = make_engine(EngineOptions(microbatches=microbatches), flat, policy_forward(policy))
    return OnlineQ(config, policy, flat, engine), policy, flat


def unroll_for(method, seed: int, steps: int, envs: int) -> Unroll:
    raw = stream(seed, steps, envs)
    return (OverlappingUnrolls(CPU, envs) if method is OneStepSarsaConfig else UnrollScaler(CPU)).read(raw)


def returns_by_hand(
    method, unroll: Unroll, target: QNetwork, discount: float
) -> dict[tuple[int, int], float]:
    """R of each valid step that has one, each summed up by itself."""
    T, B = unroll.valid_TB.shape
    found = {}
    for b in range(B):
        for t in range(T):
            if not unroll.valid_TB[t, b]:
                continue
            if method is OneStepSarsaConfig and t + 1 == T:
                continue  # its next action isn't there
            total, weight, step = 0.0, 1.0, t
            while True:
                total += weight * float(unroll.rewards_TB[step, b])
                weight *= discount
                if unroll.terminated_TB[step, b]:
                    break
                if method is not NStepQConfig or unroll.truncated_TB[step, b] or step + 1 == T:
                    after = target(unroll.obs_T1BX[step + 1, b][None])[0].tolist()
                    sarsa = method is OneStepSarsaConfig
                    total += weight * (after[unroll.actions[step + 1, b]] if sarsa else max(after))
                    break
                step += 1
            found[t, b] = total
    return found


def copy_of(policy: QNetwork) -> QNetwork:
    other = QNetwork(SPEC, NetworkConfig(hidden=(8,)), seed=2)
    other.load_state_dict(policy.state_dict())
    return other


@pytest.mark.parametrize("seed", range(5))
def test_n_step_returns_are_the_sums_they_stand_for(seed):
    rng = np.random.default_rng(seed)
    T, B = 13, 3
    rewards, values = rng.normal(size=(T, B)), rng.normal(size=(T, B))
    discounts = 0.9 * (rng.random((T, B)) > 0.2)
    continues = (rng.random((T, B)) > 0.3).astype(float)
    arrays = (torch.from_numpy(array) for array in (rewards, values, discounts, continues))
    found = n_step_returns(*arrays).numpy()
    for b in range(B):
        for t in range(T):
            total, weight, step = 0.0, 1.0, t
            while True:
                total += weight * rewards[step, b]
                weight *= discounts[step, b]
                if step + 1 == T or not continues[step, b]:
                    break
                step += 1
            assert found[t, b] == pytest.approx(total + weight * values[step, b], abs=1e-12)


@every_method
@pytest.mark.parametrize("in_root", [False, True])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("counts", ["env_steps", "versions"])
def test_updates_are_those_of_plain_torch(method, in_root, microbatches, counts):
    config = method(
        discount=0.9,
        learning_rate=0.01,
        rmsprop_eps=0.01,
        rmsprop_eps_in_root=in_root,
        max_grad_norm=0.5,
        target_every=100,
        target_counts=counts,
    )
    algorithm, policy, _ = make(config, microbatches=microbatches)
    mine, target = copy_of(policy), copy_of(policy)
    squares = [torch.zeros_like(p) for p in mine.parameters()]
    for update, seed in enumerate((3, 4, 5)):
        algorithm.env_steps = 60 * update if counts == "env_steps" else 0
        algorithm.policy_version = 60 * update if counts == "versions" else 0
        if update == 2:  # 120 steps: the first copy is due
            target = copy_of(mine)
        unroll = unroll_for(method, seed, steps=9, envs=4)
        metrics = algorithm.update(unroll)
        with torch.no_grad():
            returns = returns_by_hand(method, unroll, target, 0.9)
        errors = [
            total - mine(unroll.obs_T1BX[t, b][None])[0, unroll.actions[t, b]]
            for (t, b), total in returns.items()
        ]
        loss = torch.stack(errors).square().mean()
        assert metrics["q_loss"] == pytest.approx(loss.item(), rel=1e-5)
        gradients = torch.autograd.grad(loss, list(mine.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        assert norm > 0.5  # it is clipped
        with torch.no_grad():
            for p, g, v in zip(mine.parameters(), gradients, squares, strict=True):
                g *= 0.5 / norm
                v.mul_(0.99).add_(0.01 * g * g)
                p -= 0.01 * g / ((v + 0.01).sqrt() if in_root else v.sqrt() + 0.01)
        for (name, p), expected in zip(policy.named_parameters(), mine.parameters(), strict=True):
            np.testing.assert_allclose(p.detach(), expected.detach(), atol=1e-6, err_msg=name)


def sarsa_rows(unrolls) -> list[list[float]]:
    """What Sarsa gets to see of each step, whatever unrolls they come in."""
    rows = []
    for unroll in unrolls:
        for t in range(len(unroll.valid_TB) - 1):
            for b in np.flatnonzero(unroll.valid_TB[t]):
                done = [unroll.rewards_TB[t, b], unroll.terminated_TB[t, b], unroll.truncated_TB[t, b]]
                chosen = [unroll.actions[t, b], unroll.actions[t + 1, b]]
                seen = [*unroll.obs_T1BX[t, b], *unroll.obs_T1BX[t + 1, b]]
                rows.append([float(number) for number in (*seen, *done, *chosen)])
    return sorted(rows)


def test_sarsa_learns_from_each_step_once_with_the_action_that_came_next():
    raw = stream(1, steps=24, envs=3)
    overlapping = OverlappingUnrolls(CPU, 3)
    cuts = [(0, 5), (5, 6), (6, 14), (14, 24)]
    parts = [overlapping.read(piece(raw, *cut)) for cut in cuts]
    whole = UnrollScaler(CPU).read(raw)
    assert sarsa_rows(parts) == sarsa_rows([whole])
    assert [part.env_steps for part in parts] == [int(raw.valid_TB[a:b].sum()) for a, b in cuts]


def test_sarsa_drops_a_step_whose_next_action_was_lost():
    raw = stream(2, steps=12, envs=4)
    overlapping = OverlappingUnrolls(CPU, 4)
    overlapping.read(piece(raw, 0, 4))
    columns = np.array([1, 3])
    some = replace(piece(raw, 4, 8), columns_B=columns)
    for name in ("obs_T1BX", "actions", "rewards_TB", "terminated_TB", "truncated_TB", "valid_TB"):
        some = replace(some, **{name: getattr(some, name)[:, columns]})
    some = replace(some, log_probs_TB=torch.zeros(4, 2), values_T1B=torch.zeros(5, 2))
    some = overlapping.read(some)
    np.testing.assert_array_equal(some.obs_T1BX[0], raw.obs_T1BX[3][columns])
    np.testing.assert_array_equal(some.valid_TB[0], raw.valid_TB[3][columns])
    # the others missed four steps
    last = overlapping.read(replace(piece(raw, 8, 12), restarts_B=np.array([True, False, True, False])))
    np.testing.assert_array_equal(last.valid_TB[0], raw.valid_TB[7] & [False, True, False, True])


def test_sarsas_first_step_waits_for_its_next_action():
    algorithm, _, flat = make(OneStepSarsaConfig(learning_rate=0.1))
    before = flat.numpy().copy()
    metrics = algorithm.update(unroll_for(OneStepSarsaConfig, 1, steps=1, envs=2))
    assert metrics["gradient_steps"] == 0
    assert (flat.numpy() == before).all()


def test_environments_explore_each_with_an_epsilon_of_their_own():
    spread = ExplorationSpread(1.0, (0.1, 0.01, 0.5), (0.4, 0.3, 0.3))
    assert spread.mean_end == pytest.approx(0.193)
    uniform = torch.tensor([0.0, 0.39, 0.41, 0.69, 0.71, 1.0])
    ends = spread.draw(uniform)
    np.testing.assert_allclose(ends, [0.1, 0.1, 0.01, 0.01, 0.5, 0.5])
    np.testing.assert_allclose(spread.epsilon(0.193, ends), ends, atol=1e-6)
    np.testing.assert_allclose(spread.epsilon(1.0, ends), [1.0] * 6, atol=1e-6)
    halfway = spread.epsilon((1.0 + 0.193) / 2, ends)
    np.testing.assert_allclose(halfway, [0.55, 0.55, 0.505, 0.505, 0.75, 0.75], atol=1e-6)


def test_an_environment_keeps_its_epsilon_for_an_unroll_and_actions_follow_it():
    policy = QNetwork(SPEC, NetworkConfig(hidden=(8,)), seed=1)
    policy.configure(NStepQConfig(exploration_ends=(0.0, 0.8), exploration_shares=(0.75, 0.25)))
    policy.exploration = 0.2  # its mean at last
    generator = torch.Generator().manual_seed(0)
    noise = policy.noise((400, 200), generator)
    obs = torch.randn(400, 200, 3, generator=generator)
    acted = torch.stack([policy.act(o, n) for o, n in zip(obs, noise, strict=True)])
    strayed = (acted != policy.act(obs.view(-1, 3)).view(400, 200)).float().mean(0)
    # of those that explore one in four takes the greedy action by chance
    assert set(np.round(strayed.numpy(), 0)) == {0.0, 1.0}
    assert float(strayed[strayed > 0].mean()) == pytest.approx(0.8 * 0.75, abs=0.02)
    assert float((strayed > 0).float().mean()) == pytest.approx(0.25, abs=0.08)


def test_the_mean_epsilon_falls_with_the_swarms_steps():
    algorithm, *_ = make(NStepQConfig(exploration_steps=1000))
    seen = []
    for steps in (0, 500, 1000, 5000):
        algorithm.env_steps = steps
        seen.append(algorithm.exploration)
    assert seen == pytest.approx([1.0, 0.5965, 0.193, 0.193])
