"""What a node says that it does for the swarm."""

from __future__ import annotations

import pytest

from p2pdrl.config.loader import resolve
from p2pdrl.config.node import is_heir, roles_in, tags_of
from p2pdrl.errors import UsageError


@pytest.mark.parametrize(
    ("roles", "told"),
    [
        ((), ("actor", "learner", "server")),
        (("learner", "actor"), ("actor", "learner")),
        (("actor",), ("actor",)),
        (("replay", "server"), ("replay", "server")),
    ],
)
def test_roles_travel_as_a_tag(roles, told):
    assert roles_in(tags_of(roles)) == told


@pytest.mark.parametrize(
    ("roles", "promote", "heir"),
    [(("actor",), True, True), (("actor",), False, False), ((), True, False), (("learner",), True, False)],
)
def test_who_would_learn_if_nobody_else_did_says_so(roles, promote, heir):
    tags = tags_of(roles, promote=promote)
    assert is_heir(tags) is heir
    assert roles_in(tags) == roles_in(tags_of(roles))


def test_paths_that_others_are_told_are_good_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    given = resolve(sets=["node.swarm_key_file=~/swarm.key", "node.data_dir=here"]).config.node.placed()
    assert given.swarm_key_file == str(tmp_path / "home" / "swarm.key")
    assert given.data_dir == str(tmp_path / "here")
    assert resolve().config.node.placed() == resolve().config.node


def test_a_member_of_another_release_is_understood():
    assert roles_in({}) == ("actor", "learner", "server")
    assert roles_in({"roles": "learner,oracle"}) == ("learner",)
    assert roles_in({"roles": ""}) == ()


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (['node.roles=["actor"]'], "needs a learner: name a node of the swarm with node.peers"),
        (['node.roles=["server"]'], "add learner or actor"),
        (['node.roles=["learner"]', "task.algorithm.name=a2c"], "a2c learns from unrolls of its newest"),
        (['node.roles=["learner", "replay"]', "task.env.num_envs=4"], "ppo has no replay memory"),
        (['node.roles=["replay"]'], "holds a replay needs a learner: name a node"),
        (['node.roles=["learner", "actor", "learner"]'], "twice"),
        (['node.roles=["teacher"]'], "node.roles"),
    ],
)
def test_roles_that_cant_be_played_are_refused(sets, why):
    with pytest.raises(UsageError, match=why):
        resolve(sets=sets)


def test_roles_that_can_be():
    assert resolve(sets=['node.roles=["learner", "actor"]']).config.node.roles == ("learner", "actor")
    shards = ["task.algorithm.name=dqn", 'node.roles=["learner"]']
    assert resolve(sets=shards).config.node.draws_replay
    own = resolve(sets=["task.algorithm.name=dqn", 'node.roles=["learner", "replay"]']).config.node
    assert (own.draws_replay, own.holds_replay, own.learns) == (False, False, True)
    shard = resolve(sets=['node.roles=["replay"]', 'node.peers=["127.0.0.1:7700"]']).config.node
    assert (shard.draws_replay, shard.holds_replay, shard.acts) == (False, True, False)
    regression = ['task.algorithm.name="regression"', 'node.roles=["learner"]']
    assert resolve(sets=regression).config.node.roles == ("learner",)
    assert resolve(sets=["task.algorithm.name=dqn", 'node.roles=["learner"]']).config.node.learns
    actor = resolve(sets=['node.roles=["actor"]', 'node.peers=["10.0.0.1:7700"]']).config.node
    assert (actor.acts, actor.learns) == (True, False)
    assert resolve(sets=[]).config.node.acts
    assert resolve(sets=[]).config.node.learns


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (["node.actors.count=9", "task.env.num_envs=8", "task.seed=1"], "9 actors can't share"),
        (["node.actors.count=1", "task.algorithm.name=regression"], "no environments"),
        (["node.actors.count=-1"], "node.actors.count"),
        (["node.actors.count=some"], "node.actors.count"),
    ],
)
def test_actors_that_cant_be_are_refused(sets, why):
    with pytest.raises(UsageError, match=why):
        resolve(sets=sets)


@pytest.mark.parametrize(("text", "count"), [("auto", "auto"), ("3", 3), ("0", 0)])
def test_actors_by_number_or_by_cores(text, count):
    assert resolve(sets=[f"node.actors.count={text}"]).config.node.actors.count == count


PEER = 'node.peers=["127.0.0.1:7700"]'


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        ([], "node.actors.count = 0"),
        (["node.actors.count=2", "task.algorithm.name=regression"], "no environments"),
        (['node.roles=["learner"]', "node.actors.count=2", "task.algorithm.name=impala"], "nobody acts"),
        (['node.roles=["replay"]', PEER, "task.algorithm.name=dqn"], "nobody acts"),
        (['node.roles=["learner", "actor"]', "task.algorithm.name=a2c"], "node.actors.count = 0"),
    ],
)
def test_batched_inference_is_refused_where_nobody_would_ask(sets, why):
    with pytest.raises(UsageError, match=why):
        resolve(sets=["node.actors.inference=batched", *sets])


@pytest.mark.parametrize(
    "sets",
    [
        ["node.actors.count=2"],
        ["node.actors.count=auto"],
        ['node.roles=["actor"]', PEER],
        ['node.roles=["learner", "actor"]', "task.algorithm.name=impala"],
        ["node.learner.remote_actors=2"],
    ],
)
def test_batched_inference_goes_with_actors_in_processes(sets):
    node = resolve(sets=["node.actors.inference=batched", *sets]).config.node
    assert node.actors.inference == "batched"
