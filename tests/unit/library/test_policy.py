"""A loaded policy against its network called by hand, for each kind of space."""

from __future__ import annotations

import os
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import p2pdrl
from p2pdrl.errors import CheckpointError, ConfigError, DaemonUnreachableError, UsageError
from p2pdrl.rl.networks.lstm import RecurrentContext
from p2pdrl.rl.observations import ObservationPacker
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.q_network import QNetwork
from p2pdrl.tensors.checkpoint import to_bytes

from .spaces import TASKS, checkpoint, observations, one

ROWS = 20
RECURRENT = [name for name, task in TASKS.items() if task.network.core != "none"]
VALUED = [name for name in TASKS if name not in ("sac", "sac_discrete", "td3")]


def seen_by_hand(inference, obs, mask):
    """What the network sees, packed and normalised by what training does it with."""
    layout = inference.env.spec.layout
    if layout is None:
        rows = np.asarray(obs)
    else:
        packer = ObservationPacker(layout, ROWS, "action_mask")
        rows = packer.pack(obs, {} if mask is None else {"action_mask": list(mask)})
    if inference.normalizer is not None:
        rows = inference.normalizer.normalize(rows)
    return torch.tensor(rows.astype(inference.policy.spec.obs_dtype))


@pytest.mark.parametrize("name", TASKS)
def test_it_acts_and_values_as_the_network_does(policy_of, inference_of, name):
    policy = policy_of(name)
    obs, mask = observations(TASKS[name], ROWS)
    by_hand = inference_of(name)
    network = by_hand.policy
    inputs = seen_by_hand(by_hand, obs, mask)
    state = policy.initial_state(ROWS) + np.float32(0.1) if policy.recurrent else None
    after = None if state is None else torch.tensor(state)
    with torch.inference_mode():
        wanted = by_hand.env.to_space(network.to_environment(network.act(inputs, None, after).numpy()))
        if isinstance(network, QNetwork):
            values = network(inputs).amax(-1).numpy()
        elif state is not None:
            context = RecurrentContext(state_BS=torch.tensor(state))
            values = network.values(inputs[:, None], context)[:, 0].numpy()
        elif isinstance(network, ActorCritic):
            values = network.values(inputs).numpy()
    more = {} if mask is None else {"mask": mask}
    if state is None:
        actions = policy.act(obs, deterministic=True, **more)
    else:
        actions, told = policy.act(obs, state=state, deterministic=True, **more)
        np.testing.assert_array_equal(told, after.numpy())
        more["state"] = state
    np.testing.assert_array_equal(actions, wanted)
    assert actions.dtype == by_hand.env.action_dtype
    if name in VALUED:
        np.testing.assert_array_equal(policy.value(obs, **more), values)
    else:
        with pytest.raises(UsageError, match="values of actions"):
            policy.value(obs, **more)
    # one without a batch dimension is the same as it is among others
    alone = {key: value[3] for key, value in more.items()}
    action = policy.act(one(obs, 3), deterministic=True, **alone)
    action = action if state is None else action[0]
    np.testing.assert_allclose(action, actions[3], rtol=1e-5, atol=1e-6)
    assert policy.make_env().action_space.contains(action)
    if name in VALUED:
        np.testing.assert_allclose(policy.value(one(obs, 3), **alone), values[3], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["vector-masked", "dict-masked", "multi_discrete-masked", "dqn"])
def test_what_a_mask_forbids_is_never_done(policy_of, name):
    policy = policy_of(name)
    obs, mask = observations(TASKS[name], 300, seed=1)
    allowed = obs["action_mask"] if mask is None else mask
    more = {} if mask is None else {"mask": mask}
    for greedy in (True, False):
        actions = policy.act(obs, deterministic=greedy, **more)
        if actions.ndim == 1:
            assert allowed[np.arange(300), actions - 1].all()
        else:
            choice = allowed[:, :2]
            assert (choice[np.arange(300), actions[:, 0] - 1] | ~choice.any(1)).all()


def test_samples_follow_their_seed_or_generator(policy_of):
    policy = policy_of("box")
    obs, _ = observations(TASKS["box"], 8)
    first = policy.act(obs, seed=1)
    np.testing.assert_array_equal(first, policy.act(obs, seed=1))
    assert (first != policy.act(obs, seed=2)).any()
    assert (first != policy.act(obs)).any()
    generator = torch.Generator().manual_seed(1)
    np.testing.assert_array_equal(first, policy.act(obs, generator=generator))
    assert (first != policy.act(obs, generator=generator)).any()
    with pytest.raises(UsageError, match="not both"):
        policy.act(obs, seed=1, generator=generator)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_state_is_carried_through_an_episode(policy_of, name):
    policy = policy_of(name)
    obs, _ = observations(TASKS[name], 2)
    state = policy.initial_state(2)
    assert not state.any()
    _, second = policy.act(obs, state=state, seed=0)
    assert not state.any(), "what the caller holds isn't changed"
    _, third = policy.act(obs, state=second, seed=0)
    assert (second != third).all(1).any()
    assert policy.initial_state().shape == state.shape[1:]
    with pytest.raises(UsageError, match=r"policy\.initial_state"):
        policy.act(obs)
    with pytest.raises(UsageError, match="of shape"):
        policy.act(obs, state=policy.initial_state())


def test_a_policy_without_memory_has_no_state(policy_of):
    policy = policy_of("vector")
    assert not policy.recurrent
    with pytest.raises(UsageError, match="no memory"):
        policy.initial_state()
    with pytest.raises(UsageError, match="leave state out"):
        policy.act(np.zeros(5), state=np.zeros(3))


@pytest.mark.parametrize(
    ("name", "obs", "word"),
    [
        ("vector", np.zeros(4), r"shape \[5\]"),
        ("vector", np.full(5, np.nan), "finite"),
        ("vector", [[1, 2], [3]], "numbers"),
        ("vector", "left", "numbers"),
        ("image", np.zeros((36, 36, 3), np.uint8), r"\[3, 36, 36\]"),
        ("image", np.full((3, 36, 36), 300), "255"),
        ("dict", {"joints": np.zeros(3)}, "has no"),
        ("dict", np.zeros(3), "has no"),
    ],
)
def test_what_is_no_observation_is_refused_in_words(policy_of, name, obs, word):
    with pytest.raises(UsageError, match=word):
        policy_of(name).act(obs)


def test_entries_of_different_batches_are_refused(policy_of):
    policy = policy_of("dict")
    obs, _ = observations(TASKS["dict"], 4)
    with pytest.raises(UsageError, match="different lengths"):
        policy.act({**obs, "joints": obs["joints"][:3]})
    with pytest.raises(UsageError, match="before all entries or before none"):
        policy.act({**obs, "joints": obs["joints"][0]})
    with pytest.raises(UsageError, match="no action masks"):
        policy.act(obs, mask=np.ones((4, 4)))
    with pytest.raises(UsageError, match="2 to 6"):
        policy.act({**obs, "tool": obs["tool"] - 5})


def test_lists_of_observations_are_batches(policy_of):
    for name in ("dict", "tuple"):
        policy = policy_of(name)
        obs, _ = observations(TASKS[name], 4)
        listed = [one(obs, number) for number in range(4)]
        np.testing.assert_array_equal(
            policy.act(listed, deterministic=True), policy.act(obs, deterministic=True)
        )


def test_it_knows_its_task_and_plays_it(policy_of):
    policy = policy_of("dict-masked")
    assert (policy.env_steps, policy.policy_version, policy.mean_return) == (1234, 7, 9.5)
    assert "Still-v0" in repr(policy)
    assert "tool: a whole number from 2 to 6" in policy.observation
    env = policy.make_env()
    obs, _ = env.reset(seed=0)
    env.step(policy.act(obs))
    env.close()


# --- loading -------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "vector.safetensors"
    path.write_bytes(to_bytes(checkpoint(TASKS["vector"])))
    return path


def test_files_folders_and_data_folders_are_loaded(file, tmp_path, policy_of):
    obs, _ = observations(TASKS["vector"], 3)
    wanted = policy_of("vector").value(obs)
    np.testing.assert_array_equal(p2pdrl.load(file).value(obs), wanted)
    older, newer = (tmp_path / "data" / "checkpoints" / name for name in ("ab", "cd"))
    for folder, seed in ((older, 1), (newer, 0)):
        folder.mkdir(parents=True)
        (folder / "last.safetensors").write_bytes(to_bytes(checkpoint(TASKS["vector"], seed)))
    os.utime(older / "last.safetensors", (1, 1))
    for place in (tmp_path / "data", newer, str(newer)):
        np.testing.assert_array_equal(p2pdrl.load(place).value(obs), wanted)
    (older / "best.safetensors").write_bytes(file.read_bytes())
    np.testing.assert_array_equal(p2pdrl.load(older, best=True).value(obs), wanted)
    with pytest.raises(CheckpointError, match="best"):
        p2pdrl.load(newer, best=True)


def test_what_is_no_checkpoint_is_told(tmp_path, free_address):
    with pytest.raises(CheckpointError, match="HOST:PORT"):
        p2pdrl.load("nowhere")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        p2pdrl.load(tmp_path / "a:7700")
    with pytest.raises(CheckpointError, match="data folder"):
        p2pdrl.load(tmp_path)
    (tmp_path / "bad.safetensors").write_bytes(b"bad")
    with pytest.raises(CheckpointError, match="damaged"):
        p2pdrl.load(tmp_path / "bad.safetensors")
    with pytest.raises(DaemonUnreachableError):
        p2pdrl.load(free_address)


def test_a_running_nodes_policy_is_fetched(served, policy_of, monkeypatch):
    async def export():
        return to_bytes(checkpoint(TASKS["vector"]))

    monkeypatch.setattr(served.node, "export", export)
    obs, _ = observations(TASKS["vector"], 3)
    np.testing.assert_array_equal(p2pdrl.load(served.address).value(obs), policy_of("vector").value(obs))


OWN = Path(__file__).parents[3] / "docs" / "own_code.md"


def test_own_code_is_imported_only_where_that_is_allowed(file, tmp_path, monkeypatch):
    import msgspec

    (tmp_path / "own_still.py").write_text(
        "import gymnasium as gym\nimport numpy as np\n"
        "class Own(gym.Env):\n"
        "    observation_space = gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)\n"
        "    action_space = gym.spaces.Discrete(4)\n"
        "    def reset(self, *, seed=None, options=None):\n        return np.zeros(5, np.float32), {}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = msgspec.structs.replace(
        TASKS["vector"],
        env=msgspec.structs.replace(TASKS["vector"].env, id="own_still:Own", kwargs={}),
    )
    found = checkpoint(TASKS["vector"])
    found.meta["task"] = msgspec.to_builtins(own)
    file.write_bytes(to_bytes(found))
    with pytest.raises(ConfigError, match="imports a Python module"):
        p2pdrl.load(file)
    assert p2pdrl.load(file, allow_import=True).act(np.zeros(5)) in range(4)
    monkeypatch.setattr("p2pdrl.library.names._environments", {})
    p2pdrl.register_env("OwnStill-v0", "own_still:Own")
    assert isinstance(p2pdrl.load(file).make_env(), gym.Env)
