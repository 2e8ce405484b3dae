"""The typed client against a node of constants."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

import p2pdrl
from p2pdrl.api.keyfile import read_operator_key, read_swarm_keys, write_operator_key, write_swarm_key
from p2pdrl.errors import ConfigError, DaemonUnreachableError, P2PDRLError, UnhealthyError, UsageError
from p2pdrl.membership.identity import verify
from p2pdrl.membership.records import Verifier
from p2pdrl.membership.swarm_records import SwarmRecords
from p2pdrl.rl.inference import PolicyInference
from p2pdrl.tensors.observation_rows import rows_of_arrays

from .spaces import TASKS, observations, one


@pytest.fixture
def client(served):
    return p2pdrl.Client(served.address)


def test_what_a_node_tells_has_types(client, served):
    status = client.status()
    assert (status.name, status.state, status.swarm_env_steps) == ("node-1", "training", 240_000)
    assert status.evaluation.mean == 400.0
    assert status.document["speedup"]["times"] == 1.96
    assert not status.done
    first, second = client.peers()
    assert (first.is_self, second.is_self, second.name) == (True, False, "node-2")
    assert [row.env_steps for row in client.evaluations()] == [50_000, 100_000]
    mode = client.mode()
    assert (mode.mode, mode.protocol, mode.options) == ("gossip", "adpsgd", {"weight": 0.3})
    assert [member.follows for member in mode.members] == [True, True]
    assert served.address in repr(client)


def test_another_releases_status_is_told(client, served):
    served.node.state = {"name": 3}
    with pytest.raises(DaemonUnreachableError, match="another release"):
        client.status()


def test_events_come_from_the_past_and_as_they_happen(client, served):
    for number in range(3):
        served.node.log.emit("counted", f"number {number}")
    assert [event.seq for event in client.events()] == [1, 2, 3]
    assert [event.text for event in client.events(since=2)] == ["number 2"]
    following = client.events(follow=True)
    assert [event.kind for event in itertools.islice(following, 3)] == ["counted"] * 3
    following.close()


def test_it_is_paused_and_goes_on(client, served):
    client.pause()
    client.resume(swarm=True)
    assert served.node.done == ["pause node", "resume swarm"]


def test_the_mode_is_set_and_waited_for(client, served):
    def follow(node):
        record = {"epoch": 2, "proposer": "01" * 16}
        node.mode_state = {**node.mode_state, "epoch": 2, "record": record}

    served.node.on_mode = follow
    assert client.set_mode("gossip", protocol="dsgd", topology="ring").epoch == 2
    assert served.node.done == ["mode gossip protocol=dsgd topology=ring"]
    with pytest.raises(ConfigError, match="did you mean weight"):
        client.set_mode("gossip", wieght=0.3)
    served.node.on_mode = lambda _node: None
    served.node.mode_state["members"] = []
    with pytest.raises(P2PDRLError, match="not everybody is in mode"):
        client.set_mode("gossip", wait_s=0.1)


def test_what_is_for_the_whole_swarm_is_signed_by_its_operator(served, tmp_path):
    key = tmp_path / "swarm.key"
    write_swarm_key(key, [write_operator_key(tmp_path / "alice.operator", "alice").public])
    keys, alice = read_swarm_keys(key), read_operator_key(tmp_path / "alice.operator")
    served.node.swarm_keys = keys.good(time.time())
    held = served.node.swarm_records = SwarmRecords(Verifier(keys.swarm_id, verify), keys.operators)
    held.follow("ab" * 16)
    with pytest.raises(P2PDRLError, match="only operators command this swarm"):
        p2pdrl.Client(served.address, swarm_key_file=key).pause(swarm=True)
    node = p2pdrl.Client(served.address, swarm_key_file=key, operator_file=tmp_path / "alice.operator")
    node.pause(swarm=True)
    node.set_mode("local", wait_s=0)
    assert {name: held.get(name).proposer for name in ("pause", "mode")} == {
        "pause": alice.public.id,
        "mode": alice.public.id,
    }
    assert served.node.done == ["record pause", "record mode"]


def test_roles_are_shown_and_set(client, served):
    served.node.members[0]["roles"] = ["actor", "learner"]
    assert client.roles() == {"node-1": ["actor", "learner"], "node-2": []}
    client.set_roles("learner", "actor")
    assert served.node.done == ["roles learner,actor"]
    with pytest.raises(UnhealthyError, match="new roles"):
        client.set_roles("learner", wait_s=0.1)
    with pytest.raises(UsageError, match="at least one role"):
        client.set_roles()


def test_a_checkpoint_is_fetched_or_written_there(client, served, tmp_path):
    assert client.checkpoint(tmp_path / "now.safetensors").read_bytes() == b"p2pdrl" * 600_000
    assert client.checkpoint().name == "last.safetensors"
    assert served.node.done == ["checkpoint"]
    with pytest.raises(P2PDRLError, match="write the checkpoint"):
        client.checkpoint(tmp_path / "nowhere" / "now.safetensors")


def test_a_checkpoint_that_breaks_off_leaves_nothing(client, served, tmp_path, monkeypatch):
    def fails():
        raise P2PDRLError("no state yet")

    monkeypatch.setattr(served.node, "export", fails)
    with pytest.raises(P2PDRLError):
        client.checkpoint(tmp_path / "now.safetensors")
    assert not [path for path in tmp_path.iterdir() if "now" in path.name]


def test_it_leaves(client, served):
    client.leave(wait_s=0)
    assert served.node.done == ["leave"]
    with pytest.raises(UnhealthyError, match="still there"):
        client.leave(wait_s=0.1)


def test_nobody_there(free_address):
    with pytest.raises(DaemonUnreachableError):
        p2pdrl.Client(free_address).status()
    with pytest.raises(UsageError):
        p2pdrl.Client("a b")


def test_plain_observations_travel_as_bytes(client, served):
    obs = np.arange(12, dtype=np.float64).reshape(3, 4)
    np.testing.assert_array_equal(client.act(obs, deterministic=True), [0, 1, 2])
    assert client.act(obs[0]) == 0
    (sent, greedy), (_, sampled) = served.node.acted
    np.testing.assert_array_equal(sent, obs)
    assert (greedy, sampled) == (True, False)
    with pytest.raises(UsageError, match=r"shape \[4\]"):
        client.act(np.zeros(3))
    with pytest.raises(UsageError, match="finite"):
        client.act(np.full(4, np.nan))


@pytest.mark.parametrize("name", ["dict", "dict-masked", "tuple", "vector-masked", "multi_discrete", "box"])
def test_observations_arrive_as_a_policy_here_would_see_them(client, served, name):
    spec = PolicyInference(TASKS[name], 0).spec
    served.node.policy_spec = spec
    obs, mask = observations(TASKS[name], 5)
    rows, _ = rows_of_arrays(spec, obs, mask)
    more = {} if mask is None else {"mask": mask}
    actions = client.act(obs, **more)
    assert actions.shape == (5, *spec.action_shape)
    assert actions.dtype == spec.action_dtype
    np.testing.assert_array_equal(served.node.acted[-1][0], rows)
    alone = {key: value[2] for key, value in more.items()}
    assert np.shape(client.act(one(obs, 2), **alone)) == spec.action_shape
    np.testing.assert_array_equal(served.node.acted[-1][0], rows[2:3])
