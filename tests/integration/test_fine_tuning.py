"""A swarm that begins with what another one has learned."""

from __future__ import annotations


def test_a_founder_starts_from_another_swarm_s_node_and_a_joiner_takes_the_swarm_s_state(
    swarm, small_updates, wait_until, no_orphans
):
    options = [f"--set={key}={value}" for key, value in small_updates.items()]
    options += ["--set=task.env.normalize_observations=true"]
    old = swarm.start("old", *options, "--swarm=one")
    swarm.training(old)
    wait_until(lambda: old.status().get("updates", 0) >= 2, 60, "it has learned something")
    old.hold()
    wait_until(lambda: old.status().get("state") == "paused", 10, "its parameters stay")
    saved = old.checkpoint()

    other = ["--swarm=two", "--from", old.api]
    founder = swarm.found("founder", *options, "--set=task.env.max_episode_steps=200", *other)
    founder.hold()
    joiner = swarm.start("joiner", *other, peers=founder)
    wait_until(lambda: founder.status().get("state") == "paused", 90, "it has begun")
    (began,) = founder.events("started-from")
    assert began["params_hash"] == saved.meta["params_hash"]
    wait_until(lambda: joiner.events("adopted"), 60, f"it adopts: {joiner.text()[-2000:]}")
    (told,) = joiner.events("start-not-needed")
    assert "the swarm's parameters are taken" in told["text"]
    assert not joiner.events("started-from")
    wait_until(lambda: joiner.status().get("lineage") == founder.status().get("lineage"), 10, "one lineage")
    assert founder.status()["lineage"] != old.status()["lineage"]
    for node in (old, founder, joiner):
        node.post("/v1/leave")
    assert [node.wait(20) for node in (old, founder, joiner)] == [0, 0, 0]
