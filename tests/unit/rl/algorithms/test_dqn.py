"""Deep Q-learning: its targets, its gradient, its targets' copies, its exploration."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from p2pdrl.config.task import DQNConfig, NetworkConfig
from p2pdrl.rl.algorithms.dqn import DQN, OUTLIERS_FROM, LossOutliers, QObjective
from p2pdrl.rl.engines import EngineOptions, make_engine, policy_forward
from p2pdrl.rl.envs import Discrete, EnvSpec
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.q_network import QNetwork
from p2pdrl.rl.sources.replay import Replay, ReplayBatch, Transitions

SPEC = EnvSpec((3,), "float32", Discrete(4))
CPU = torch.device("cpu")


class FixedDraws(Replay):
    """A feeder whose memory holds nothing but what the test says."""

    def __init__(self, *drawn: Transitions, count: int = 1000, blocks: int | None = None) -> None:
        self._drawn = list(drawn)
        self._blocks = blocks
        self.asked: list[tuple[int, float]] = []
        self.priorities: list[np.ndarray] = []
        self.memory = SimpleNamespace(count=count, full=False)

    @property
    def stored(self):
        return self.memory.count

    @property
    def full(self):
        return self.memory.full

    def draw(self, rows, beta):
        self.asked.append((rows, beta))
        return self._drawn[(len(self.asked) - 1) % len(self._drawn)]

    def blocks(self, rows, times, beta):
        for _ in range(self._blocks or times):
            yield self.draw(rows, beta)

    def update_priorities(self, drawn, errors_B):
        self.priorities.append(errors_B.numpy().copy())


def transitions(seed: int, rows: int = 6) -> Transitions:
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

    discounts = torch.tensor([0.9, 0.0, 0.81, 0.9, 0.0, 0.9])[:rows]
    return Transitions(
        obs_BX=normal(rows, 3),
        actions_B=torch.from_numpy(rng.integers(0, 4, rows)),
        returns_B=normal(rows) * 2,
        discounts_B=discounts,
        next_obs_BX=normal(rows, 3),
        weights_B=torch.from_numpy(rng.uniform(0.2, 1.0, rows).astype(np.float32)),
        indices_B=np.arange(rows),
        serials_B=np.arange(rows),
    )


def make(
    config: DQNConfig, *, dueling: bool = False, microbatches: int = 1
) -> tuple[DQN, QNetwork, FlatModule]:
    policy = QNetwork(SPEC, NetworkConfig(hidden=(8,), dueling=dueling), seed=1)
    with torch.no_grad():
        for name, parameters in policy.named_parameters():
            if "head" in name:  # they begin small; this makes the actions differ
                parameters.mul_(100.0)
    flat = FlatModule(policy, CPU)
    engine = make_engine(EngineOptions(microbatches=microbatches), flat, policy_forward(policy))
    return DQN(config, policy, flat, engine), policy, flat


def batch_of(feeder: FixedDraws) -> ReplayBatch:
    return ReplayBatch(8, [], feeder)


def q_by_hand(weights: dict[str, np.ndarray], obs: np.ndarray) -> np.ndarray:
    """The same network in float64 NumPy."""
    x = np.tanh(obs @ weights["trunk.dense.0.weight"].T + weights["trunk.dense.0.bias"])
    q = x @ weights["advantage_head.weight"].T + weights["advantage_head.bias"]
    if "value_head.weight" in weights:
        value = x @ weights["value_head.weight"].T + weights["value_head.bias"]
        q = value + q - q.mean(-1, keepdims=True)
    return q


def joined(*parts: Transitions) -> Transitions:
    """Minibatches one behind the other, as they are drawn at once."""
    columns = ([getattr(part, field.name) for part in parts] for field in fields(Transitions))
    return Transitions(
        *(np.concatenate(c) if isinstance(c[0], np.ndarray) else torch.cat(c) for c in columns)
    )


def weights_of(policy: QNetwork) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().astype(np.float64) for name, value in policy.named_parameters()}


def y_by_hand(drawn: Transitions, online: dict, target: dict, *, double: bool) -> np.ndarray:
    next_obs = drawn.next_obs_BX.numpy().astype(np.float64)
    next_q = q_by_hand(target, next_obs)
    best = (q_by_hand(online, next_obs) if double else next_q).argmax(-1)
    after = next_q[np.arange(len(best)), best]
    return drawn.returns_B.numpy() + drawn.discounts_B.numpy() * after


def loss_by_hand(weights: dict, drawn: Transitions, y: np.ndarray) -> float:
    q = q_by_hand(weights, drawn.obs_BX.numpy().astype(np.float64))
    delta = y - q[np.arange(len(y)), drawn.actions_B.numpy()]
    huber = np.where(np.abs(delta) <= 1, 0.5 * delta**2, np.abs(delta) - 0.5)
    return float((drawn.weights_B.numpy() * huber).mean())


@pytest.mark.parametrize("double", [False, True], ids=["max", "double"])
@pytest.mark.parametrize("dueling", [False, True], ids=["plain", "dueling"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_one_step_follows_the_gradient_of_the_loss_by_hand(double, dueling, microbatches):
    config = DQNConfig(double=double, learning_rate=0.0, max_grad_norm=1e9, learning_starts=1)
    algorithm, policy, _ = make(config, dueling=dueling, microbatches=microbatches)
    online = weights_of(policy)
    target = {name: value + 0.0 for name, value in online.items()}
    with torch.no_grad():  # online and target differ from here on
        for parameters in policy.parameters():
            parameters.add_(0.05 * torch.randn(parameters.shape, generator=torch.Generator().manual_seed(3)))
    online = weights_of(policy)
    drawn = transitions(5)
    metrics = algorithm.update(batch_of(FixedDraws(drawn)))
    y = y_by_hand(drawn, online, target, double=double)
    assert metrics["q_loss"] == pytest.approx(loss_by_hand(online, drawn, y), rel=1e-5)
    found = {name: p.grad.numpy() for name, p in policy.named_parameters()}
    for name, value in online.items():
        for place in np.ndindex(value.shape):
            near = {side: dict(online) for side in (-1, 1)}
            for side, weights in near.items():
                weights[name] = value.copy()
                weights[name][place] += side * 1e-6
            slope = (loss_by_hand(near[1], drawn, y) - loss_by_hand(near[-1], drawn, y)) / 2e-6
            assert found[name][place] == pytest.approx(slope, abs=2e-5), (name, place)


@pytest.mark.parametrize("tau", [None, 0.1], ids=["copied", "soft"])
@pytest.mark.parametrize("double", [False, True])
def test_minibatches_that_are_drawn_at_once_are_learned_from_one_by_one(double, tau):
    config = DQNConfig(
        double=double, target_tau=tau, batch_size=6, learning_starts=1, gradient_steps=4, learning_rate=0.05
    )
    drawn = [transitions(seed) for seed in range(4)]
    found = []
    for feeder in (FixedDraws(*drawn), FixedDraws(joined(*drawn[:3]), drawn[3], blocks=2)):
        algorithm, _, flat = make(config)
        algorithm.update(batch_of(feeder))
        found.append(flat.numpy().copy())
    assert np.abs(found[0] - make(config)[2].numpy()).max() > 0.05
    np.testing.assert_allclose(found[1], found[0], atol=1e-6)


def test_priorities_are_the_errors_at_the_parameters_that_were_stepped():
    config = DQNConfig(double=False, prioritized=True, learning_rate=0.1, learning_starts=1, gradient_steps=2)
    algorithm, policy, _ = make(config, microbatches=3)
    before = weights_of(policy)
    drawn = transitions(5)
    feeder = FixedDraws(drawn)
    algorithm.update(batch_of(feeder))
    y = y_by_hand(drawn, before, before, double=False)
    q = q_by_hand(before, drawn.obs_BX.numpy().astype(np.float64))
    errors = np.abs(y - q[np.arange(6), drawn.actions_B.numpy()])
    np.testing.assert_allclose(feeder.priorities[0], errors, rtol=1e-4, atol=1e-5)
    assert len(feeder.priorities) == 2
    assert not np.allclose(feeder.priorities[1], errors, rtol=1e-3)


def test_beta_rises_to_one_with_progress():
    algorithm, *_ = make(DQNConfig(learning_starts=1, beta=0.4))
    feeder = FixedDraws(transitions(1))
    for progress in (0.0, 0.5, 1.0):
        algorithm.progress = progress
        algorithm.update(batch_of(feeder))
    assert [beta for _, beta in feeder.asked] == pytest.approx([0.4, 0.7, 1.0])


def test_nothing_is_learned_before_there_is_enough():
    algorithm, _, flat = make(DQNConfig(learning_starts=100, learning_rate=0.1))
    before = flat.numpy().copy()
    metrics = algorithm.update(batch_of(FixedDraws(transitions(1), count=99)))
    assert (flat.numpy() == before).all()
    assert metrics["gradient_steps"] == 0
    feeder = FixedDraws(transitions(1), count=100)
    assert algorithm.update(batch_of(feeder))["gradient_steps"] == 1
    assert (flat.numpy() != before).any()


@pytest.mark.parametrize(
    ("counts", "copied"),
    [
        ("env_steps", [True, False, False, True, False, False, True, False]),
        ("versions", [True, False, False, False, False, True, False, False]),
    ],
)
def test_the_target_is_copied_every_so_many_steps_of_the_swarm_or_of_its_servers(counts, copied):
    config = DQNConfig(learning_starts=1, learning_rate=0.1, target_every=30, target_counts=counts)
    algorithm, _, flat = make(config)
    (target,) = algorithm.targets
    copies = []
    for update in range(8):
        algorithm.policy_version = 7 * update
        algorithm.env_steps = 10 * update
        before = flat.numpy().copy()
        algorithm.update(batch_of(FixedDraws(transitions(update))))
        copies.append(bool((target.state()["target.q"] == before).all()))
    assert copies == copied


def test_or_moves_softly_after_each_step():
    config = DQNConfig(learning_starts=1, learning_rate=0.1, target_tau=0.25, gradient_steps=2)
    algorithm, _, flat = make(config)
    expected = flat.numpy().astype(np.float64)
    feeder = FixedDraws(transitions(1), transitions(2))
    (target,) = algorithm.targets
    vectors = []
    loss = algorithm.losses[0]

    class Stepping:
        ends_update = False

        def step(self, optimizer, *, learning_rate, max_grad_norm, samples, left):
            norm = optimizer.clipped_step(learning_rate, max_grad_norm)
            vectors.append(flat.numpy().astype(np.float64))
            return norm

    loss.stepper = Stepping()
    algorithm.update(batch_of(feeder))
    for vector in vectors:
        expected += 0.25 * (vector - expected)
    np.testing.assert_allclose(target.state()["target.q"], expected, rtol=1e-5, atol=1e-6)


def test_exploration_falls_with_the_swarms_steps():
    config = DQNConfig(exploration_start=1.0, exploration_end=0.1, exploration_steps=1000)
    algorithm, policy, _ = make(config)
    seen = []
    for steps in (0, 500, 1000, 5000):
        algorithm.env_steps = steps
        seen.append(algorithm.exploration)
    assert seen == pytest.approx([1.0, 0.55, 0.1, 0.1])
    policy.exploration = 0.5
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(20_000, 3, generator=generator)
    noise = policy.noise((20_000,), generator)
    greedy = policy.act(obs)
    acted = policy.act(obs, noise)
    # of those that explore one in four takes the greedy action by chance
    assert float((acted != greedy).float().mean()) == pytest.approx(0.5 * 0.75, abs=0.02)
    policy.exploration = 0.0
    assert (policy.act(obs, noise) == greedy).all()


def test_or_softly_at_each_fetch_from_a_server_and_not_in_between():
    config = DQNConfig(target_tau=0.25, target_moves="fetch", gradient_steps=3, loss="squared")
    dqn, _, flat = make(config)
    before = flat.numpy().astype(np.float64)
    dqn.update(batch_of(FixedDraws(transitions(3))))
    (target,) = dqn.targets
    np.testing.assert_allclose(target.state()["target.q"], before, rtol=1e-6)
    flat.set_(np.full(flat.size, 2.0, np.float32))  # what a server gave
    target.fetched()
    np.testing.assert_allclose(target.state()["target.q"], 0.25 * 2.0 + 0.75 * before, rtol=1e-5)
    dqn.targets[0].track()
    np.testing.assert_allclose(target.state()["target.q"], 0.25 * 2.0 + 0.75 * before, rtol=1e-5)


def test_the_squared_loss_is_half_the_mean_of_the_squares():
    values = torch.tensor([[0.0, 5.0], [1.0, 0.0]])
    targets = {
        "actions": torch.tensor([1, 0]),
        "targets": torch.tensor([1.0, 3.0]),
        "weights": torch.ones(2),
        "errors": torch.zeros(2),
    }
    loss, _ = QObjective(squared=True).over(2)(values, targets)
    assert float(loss) == (4.0**2 + 2.0**2) / (2 * 2)
    assert targets["errors"].tolist() == [4.0, 2.0]


def test_outliers_are_losses_far_above_the_mean_of_those_before():
    losses = np.random.default_rng(2).uniform(1.0, 2.0, OUTLIERS_FROM)
    limit = losses.mean() + 3.0 * losses.std()
    for loss, far in [(limit - 1e-6, False), (limit + 1e-6, True), (0.0, False), (float("nan"), False)]:
        outliers = LossOutliers(3.0)
        assert not any(map(outliers.found, losses))
        assert outliers.found(loss) == far
    young = LossOutliers(3.0)
    assert not any(map(young.found, losses[:-1]))
    assert not young.found(100.0)
    assert not any(map(LossOutliers(0.0).found, [*losses, 100.0]))


def test_the_gradient_of_an_outlier_is_left_out():
    usual = [transitions(seed) for seed in range(OUTLIERS_FROM)]
    odd = transitions(1)
    odd.returns_B.mul_(1e4)
    config = DQNConfig(outlier_deviations=6.0, gradient_steps=len(usual), learning_starts=1, batch_size=6)
    algorithm, _, flat = make(config)
    assert algorithm.update(batch_of(FixedDraws(*usual)))["outlier_losses"] == 0.0
    before = flat.numpy().copy()
    algorithm._config = replace(config, gradient_steps=1)
    metrics = algorithm.update(batch_of(FixedDraws(odd)))
    assert (metrics["outlier_losses"], metrics["skipped_steps"], metrics["gradient_steps"]) == (1.0, 1.0, 0.0)
    np.testing.assert_array_equal(flat.numpy(), before)
    metrics = algorithm.update(batch_of(FixedDraws(usual[0])))
    assert (metrics["outlier_losses"], metrics["gradient_steps"]) == (0.0, 1.0)
    assert (flat.numpy() != before).any()
