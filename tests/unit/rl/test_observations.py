"""Rows of entries: what is packed comes out again, also normalised, stored, shipped and drawn."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from p2pdrl.config.task import (
    A2CConfig,
    DQNConfig,
    EnvConfig,
    ImpalaConfig,
    NetworkConfig,
    PPOConfig,
    SACConfig,
    TaskConfig,
    TD3Config,
)
from p2pdrl.errors import ConfigError
from p2pdrl.rl.engines import EngineOptions
from p2pdrl.rl.envs import Discrete, EnvSpec, make_scalar_env, make_vector_env
from p2pdrl.rl.evaluate import evaluate
from p2pdrl.rl.networks.entries import EntryBranches, VectorEntries, entry_of
from p2pdrl.rl.networks.minatar_cnn import MinAtarCNN
from p2pdrl.rl.networks.nature_cnn import NatureCNN
from p2pdrl.rl.normalize import observation_normalizer
from p2pdrl.rl.observations import ObservationPacker, check_observations, layout_of
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.registry import build_trainer

from . import toys


@pytest.fixture(scope="module", autouse=True)
def ids():
    with toys.registered():
        yield


def cards(num_envs=3, **kwargs):
    return EnvConfig(id="Cards-v0", num_envs=num_envs, kwargs=kwargs, normalize_returns=False)


def seen(layout, rows):
    """The entries by name, as torch reads them."""
    entries = (*layout.inputs, *(() if layout.mask is None else (layout.mask,)))
    return {entry.name: entry_of(torch.from_numpy(rows), entry).numpy() for entry in entries}


@pytest.mark.parametrize("nested", [False, True])
def test_entries_come_out_as_they_went_in(nested):
    spaces = toys.Cards(nested=nested).observation_space
    layout = layout_of(spaces, mask_key="action_mask", mask_size=4)
    spaces.seed(3)
    samples = [spaces.sample() for _ in range(5)]
    batch = gym.vector.utils.create_empty_array(spaces, 5)
    batch = gym.vector.utils.concatenate(spaces, samples, batch)
    rows = ObservationPacker(layout, 5, "action_mask").pack(batch, {})
    found = seen(layout, rows)
    names = ("pair.0", "pair.1") if nested else ("gauges", "suit")
    for b, sample in enumerate(samples):
        gauges, suit = sample["pair"] if nested else (sample["gauges"], sample["suit"])
        np.testing.assert_array_equal(found[names[0]][b], gauges.astype(np.float32))
        assert found[names[1]][b].tolist() == [suit + 7]
        assert found["dials"][b].tolist() == (sample["dials"] - [1, 0]).tolist()
        for name in ("switches", "level", "camera"):
            np.testing.assert_array_equal(found[name][b], sample[name])
        np.testing.assert_array_equal(found["action_mask"][b], sample["action_mask"] != 0)
    types = {entry.name: entry.dtype for entry in layout.inputs}
    assert types["camera"] == types["level"] == "uint8"
    # as many bytes as the entries have, and at most three to the next float
    assert sum(entry.nbytes for entry in layout.inputs) + 4 <= layout.nbytes
    assert layout.nbytes < sum(entry.nbytes for entry in layout.inputs) + 8
    assert layout.floats == 2


def test_vectors_are_numbers_scaled_bytes_and_one_hot_choices():
    layout = layout_of(toys.Cards(picture=0).observation_space, mask_key="action_mask", mask_size=4)
    env = make_vector_env(cards(picture=0), seed=1)
    rows = env.reset().copy()
    found = seen(layout, rows)
    vector = VectorEntries(layout.inputs)(torch.from_numpy(rows)).numpy()
    parts = {
        "gauges": found["gauges"],
        "suit": np.eye(4)[found["suit"][:, 0]],
        "dials": np.concatenate((np.eye(3)[found["dials"][:, 0]], np.eye(5)[found["dials"][:, 1]]), 1),
        "switches": found["switches"],
        "level": found["level"] / 200,
    }
    expected = np.concatenate([parts[entry.name] for entry in layout.inputs], 1)
    np.testing.assert_allclose(vector, expected, rtol=1e-6)
    assert vector.shape[1] == layout.width == 2 + 4 + 8 + 3 + 2


def test_vectors_of_floats_are_normalised_and_nothing_else():
    env = make_vector_env(cards(16), seed=1)
    normalizer = observation_normalizer(env.spec)
    rows = np.concatenate([env.reset().copy(), *(env.step(env_actions(env))[0].copy() for _ in range(4))])
    before = rows.copy()
    normalizer.update(rows)
    normal = normalizer.normalize(rows.reshape(5, 16, -1)).reshape(80, -1)
    np.testing.assert_array_equal(rows, before)
    layout = env.spec.layout
    raw, scaled = seen(layout, rows), seen(layout, normal)
    gauges = raw["gauges"].astype(np.float64)
    expected = (gauges - gauges.mean(0)) / gauges.std(0)
    np.testing.assert_allclose(scaled["gauges"], expected, rtol=1e-5, atol=1e-5)
    for name in raw.keys() - {"gauges"}:
        np.testing.assert_array_equal(scaled[name], raw[name])


def env_actions(env):
    """The first action that each mask allows."""
    masks = seen(env.spec.layout, env._packer._rows_BX)["action_mask"]
    return masks.argmax(1)


def test_each_image_has_its_own_convolutions():
    spaces = gym.spaces.Dict(
        large=gym.spaces.Box(0, 255, (40, 40, 3), np.uint8),
        small=gym.spaces.Box(0.0, 2.0, (2, 8, 8), np.float32),
        speed=gym.spaces.Box(-1, 1, ()),
    )
    layout = layout_of(spaces)
    spec = EnvSpec((layout.nbytes,), "uint8", Discrete(3), layout=layout)
    policy = ActorCritic(spec, NetworkConfig(hidden=(32,)), 0)
    assert isinstance(policy.trunk, EntryBranches)
    kinds = [type(branch[1]) for branch in list(policy.trunk.branches)[:-1]]
    names = [entry.name for entry in layout.images]
    assert dict(zip(names, kinds, strict=True)) == {"large": NatureCNN, "small": MinAtarCNN}
    generator = torch.Generator().manual_seed(0)
    rows = ObservationPacker(layout, 4, "").pack(
        {name: np.stack([space.sample() for _ in range(4)]) for name, space in spaces.items()}, {}
    )
    x = torch.from_numpy(rows.copy())
    # written without rows: each network on its own entry
    found = seen(layout, rows)
    by_name = {name: policy.trunk.branches[k][1] for k, name in enumerate(names)}
    features = [by_name[name](torch.from_numpy(found[name])) for name in names]
    expected = policy.trunk.dense(torch.cat([*features, torch.from_numpy(found["speed"])], 1))
    torch.testing.assert_close(policy.trunk(x), expected)
    assert policy.act(x, policy.noise((4,), generator)).shape == (4,)
    # each entry has a part in what comes out
    policy.outputs(x).values.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in policy.trunk.parameters())


def test_the_smallest_network_of_one_masked_image_is_that_of_the_image():
    space = gym.spaces.Dict(
        board=gym.spaces.Box(0, 1, (10, 10, 4), np.bool_), action_mask=gym.spaces.MultiBinary(3)
    )
    layout = layout_of(space, mask_key="action_mask", mask_size=3)
    masked = ActorCritic(EnvSpec((layout.nbytes,), "uint8", Discrete(3), layout=layout), NetworkConfig(), 0)
    plain = ActorCritic(EnvSpec((10, 10, 4), "bool", Discrete(3), obs_most=1.0), NetworkConfig(), 0)
    assert [name for name, _ in masked.named_parameters()] == [name for name, _ in plain.named_parameters()]
    board = torch.rand(5, 10, 10, 4, generator=torch.Generator().manual_seed(0)) < 0.3
    rows = torch.from_numpy(
        ObservationPacker(layout, 5, "").pack(
            {"board": board.numpy(), "action_mask": np.ones((5, 3), np.int8)}, {}
        )
    )
    torch.testing.assert_close(masked.outputs(rows).policy, plain.outputs(board).policy)
    torch.testing.assert_close(masked.outputs(rows).values, plain.outputs(board).values)


ALGORITHMS = {
    "ppo": PPOConfig(unroll_steps=16, minibatches=2, epochs=2),
    "a2c": A2CConfig(),
    "impala": ImpalaConfig(unroll_steps=8),
    "dqn": DQNConfig(learning_starts=16, gradient_steps=4, buffer_size=500, prioritized=True, n_step=3),
}


@pytest.mark.parametrize("picture", [0, 6, 36])
@pytest.mark.parametrize("core", ["none", "gru"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_updates_are_finite(picture, core, algorithm):
    if algorithm == "dqn" and core != "none":
        return
    env = EnvConfig(
        id="Cards-v0",
        num_envs=2,
        kwargs={"picture": picture, "nested": core == "gru"},
        normalize_observations=True,
    )
    network = NetworkConfig(hidden=(16,), core=core, core_size=8)
    trainer = build_trainer(TaskConfig(env=env, network=network, algorithm=ALGORITHMS[algorithm]), 1, "cpu")
    before = trainer.flat.copy()
    for _ in range(6 if algorithm == "dqn" else 2):
        assert all(np.isfinite(value) for value in trainer.step().metrics.values())
    assert (trainer.flat != before).any()
    assert np.isfinite(trainer.flat).all()
    evaluate(trainer.policy, env, 3, greedy=False, seed=1, normalizer=trainer.observation_normalizer)
    trainer.close()


@pytest.mark.parametrize("picture", [0, 6])
@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(split_devices=("cpu", "cpu"), split_cuts=(1,)),
        EngineOptions(checkpoint_activations=True),
        EngineOptions(microbatches=3),
    ],
    ids=["split", "checkpointed", "accumulated"],
)
def test_all_ways_of_computing_gradients_agree(picture, options):
    env = cards(4, picture=picture, masks="none" if options.split_devices else "entry")
    task = TaskConfig(env=env, network=NetworkConfig(hidden=(8, 8)), algorithm=ALGORITHMS["ppo"])
    trainers = [build_trainer(task, 1, "cpu", engine=engine) for engine in (EngineOptions(), options)]
    for _ in range(2):
        one, other = (trainer.step().metrics for trainer in trainers)
        for key in ("policy_loss", "value_loss", "entropy", "kl"):
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6)
    for trainer in trainers:
        trainer.close()


def test_a_transformer_beside_images_is_refused():
    task = TaskConfig(env=cards(), network=NetworkConfig(kind="transformer"))
    with pytest.raises(ConfigError, match=r"transformer.*images beside other entries; take auto"):
        build_trainer(task, 1, "cpu")
    task = TaskConfig(
        env=cards(picture=0),
        network=NetworkConfig(kind="transformer", width=8, heads=2, layers=1),
        algorithm=ALGORITHMS["a2c"],
    )
    trainer = build_trainer(task, 1, "cpu")
    trainer.step()
    trainer.close()


def test_an_mlp_sees_images_as_vectors():
    task = TaskConfig(env=cards(), network=NetworkConfig(kind="mlp"), algorithm=ALGORITHMS["a2c"])
    trainer = build_trainer(task, 1, "cpu")
    assert trainer.policy.actor[0].in_features == trainer.policy.spec.layout.width
    assert np.isfinite(trainer.step().metrics["policy_loss"])
    trainer.close()


BOX = gym.spaces.Box(0, 1, (2,))
REFUSED = {
    "text": (gym.spaces.Text(5), r"observations are a Text\(.*turn words into numbers"),
    "text inside": (
        gym.spaces.Dict(a=BOX, b=gym.spaces.Tuple([BOX, gym.spaces.Text(5)])),
        r"the entry 'b\.1' of observations is a Text\(",
    ),
    "graph": (gym.spaces.Graph(BOX, None), r"Graph\(.*fixed one"),
    "sequence": (gym.spaces.Dict(a=gym.spaces.Sequence(BOX)), r"the entry 'a'.*Sequence\(.*padded Box"),
    "one of": (gym.spaces.OneOf([BOX, BOX]), r"OneOf\(.*wrapper"),
    "nothing": (gym.spaces.Dict(), "empty"),
    "no numbers": (gym.spaces.Box(0, 1, (0, 3)), "has no numbers"),
    "complex": (gym.spaces.Dict(a=gym.spaces.Discrete(1 << 17)), r"'a'.*Discrete\(131072\).*65536 at most"),
}


@pytest.mark.parametrize(("space", "words"), REFUSED.values(), ids=REFUSED)
def test_what_can_not_be_learned_from_is_refused(space, words):
    class Strange(gym.Env):
        observation_space = space
        action_space = gym.spaces.Discrete(2)

    with pytest.raises(ConfigError, match=words):
        check_observations(space)
    gym.register("StrangeObservations-v0", Strange)
    try:
        with pytest.raises(ConfigError, match=words):
            make_scalar_env(EnvConfig(id="StrangeObservations-v0"))
        with pytest.raises(ConfigError, match=words):
            build_trainer(TaskConfig(env=EnvConfig(id="StrangeObservations-v0", num_envs=2)), 1, "cpu")
    finally:
        del gym.registry["StrangeObservations-v0"]


def test_choices_without_floats_can_not_be_normalised():
    class Dials(gym.Env):
        observation_space = gym.spaces.Dict(a=gym.spaces.Discrete(3), b=gym.spaces.MultiBinary(2))
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return {"a": 0, "b": np.zeros(2, np.int8)}, {}

    gym.register("Dials-v0", Dials)
    try:
        env = EnvConfig(id="Dials-v0", num_envs=1, normalize_observations=True)
        with pytest.raises(ConfigError, match="none in this environment's entries"):
            build_trainer(TaskConfig(env=env), 1, "cpu")
    finally:
        del gym.registry["Dials-v0"]


class Reach(gym.Env):
    """A goal and a place, as robots have them, maybe with a picture: going towards the goal pays."""

    action_space = gym.spaces.Box(-1, 1, (2,))

    def __init__(self, picture: bool = False) -> None:
        entries: dict = {"goal": gym.spaces.Box(-1, 1, (2,)), "place": gym.spaces.Box(-1, 1, (2,))}
        if picture:
            entries["camera"] = gym.spaces.Box(0, 255, (6, 6, 1), np.uint8)
        self.observation_space = gym.spaces.Dict(entries)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.goal, self.place = 0, *self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32)
        return self._seen(), {}

    def _seen(self):
        seen = {"goal": self.goal, "place": self.place, "camera": np.full((6, 6, 1), 9, np.uint8)}
        return {name: seen[name] for name in self.observation_space}

    def step(self, action):
        self.place = np.clip(self.place + 0.2 * action, -1, 1).astype(np.float32)
        self.count += 1
        return self._seen(), -float(np.abs(self.place - self.goal).sum()), False, self.count == 10, {}


@pytest.mark.parametrize("picture", [False, True])
@pytest.mark.parametrize("algorithm", [SACConfig, TD3Config])
def test_continuous_actions_with_critics_see_entries_as_well(picture, algorithm):
    gym.register("Reach-v0", Reach)
    try:
        env = EnvConfig(id="Reach-v0", num_envs=2, kwargs={"picture": picture}, normalize_observations=True)
        options = algorithm(learning_starts=16, batch_size=16)
        task = TaskConfig(env=env, network=NetworkConfig(hidden=(16,)), algorithm=options)
        trainer = build_trainer(task, 1, "cpu")
        for _ in range(30):
            assert all(np.isfinite(value) for value in trainer.step().metrics.values())
        layout = trainer.policy.spec.layout
        row = np.zeros((1, layout.nbytes), np.uint8)
        other = row.copy()
        other[0, :16].view(np.float32)[0] = 0.5  # of the first vector
        with torch.no_grad():
            actions = [trainer.policy.act(torch.from_numpy(x)) for x in (row, other)]
        assert not torch.equal(*actions)
        trainer.close()
    finally:
        del gym.registry["Reach-v0"]
