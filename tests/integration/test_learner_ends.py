"""Learner processes that are stopped, raise, or take their time, under a real node."""

from __future__ import annotations

import os
import signal
import time

import pytest

PACE = [
    "--set=node.learner.max_updates_per_s=5",
    "--set=task.algorithm.unroll_steps=32",
    "--set=node.learner.restart_min_s=0.1",
]

ENVIRONMENTS = '''
import os
import time
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv


class Failing(CartPoleEnv):
    """Falls over in the fortieth step of its process."""

    steps = 0

    def step(self, action):
        Failing.steps += 1
        if Failing.steps == 40:
            raise ValueError("the simulator fell over")
        return super().step(action)


class Slow(CartPoleEnv):
    """Takes its time to be made, and again in a step of the first process."""

    def __init__(self, **options):
        if not os.path.exists(os.environ["SLOW_ONCE"]):
            open(os.environ["SLOW_ONCE"], "w").close()
            time.sleep(8)
        super().__init__(**options)


gymnasium.register("Failing-v0", Failing)
gymnasium.register("Slow-v0", Slow)
'''


@pytest.fixture
def own_environments(tmp_path):
    """Options and variables with which a node finds them."""
    folder = tmp_path / "environments"
    folder.mkdir()
    (folder / "own_environments.py").write_text(ENVIRONMENTS)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))

    def options(name):
        arguments = ["--allow-import", f"--set=task.env.id=own_environments:{name}", *PACE]
        return arguments, {"PYTHONPATH": path, "SLOW_ONCE": str(tmp_path / "slow-once")}

    return options


def test_a_stopped_learner_is_told_and_replaced(swarm, wait_until, no_orphans):
    node = swarm.start("n", *PACE, "--set=node.learner.stopped_deadline_s=3")
    swarm.training(node)
    wait_until(lambda: node.status()["updates"] >= 5, 30, "it trains")
    pid = node.learner_pid()
    os.kill(pid, signal.SIGSTOP)
    began_s = time.monotonic()
    wait_until(lambda: node.status()["learner"]["state"] == "stopped", 10, "it is seen to be stopped")
    assert any("has been stopped" in reason for reason in node.status()["reasons"])
    stood = node.status()["updates"]
    wait_until(lambda: node.status()["updates"] > stood + 3, 40, "another goes on")
    assert time.monotonic() - began_s > 3.0
    learner = node.status()["learner"]
    assert learner["pid"] != pid
    assert learner["restarts"] == 1
    assert "had been stopped" in learner["last_death"]["how"]
    assert [len(node.events(kind)) for kind in ("learner-stopped", "learner-died")] == [1, 1]
    node.signal(signal.SIGTERM)
    assert node.wait(15) == 0


@pytest.mark.slow
def test_an_environment_that_always_raises_ends_the_node_with_its_error(
    swarm, wait_until, own_environments, no_orphans
):
    arguments, variables = own_environments("Failing-v0")
    node = swarm.start("n", *arguments, "--set=node.learner.give_up_after=3", env=variables)

    def shown():
        return ((node.status().get("learner") or {}).get("last_death") or {}).get("error")

    error = wait_until(shown, 60, "the error is in the status")
    assert (error["type"], error["message"]) == ("ValueError", "the simulator fell over")
    assert "own_environments.py" in error["where"]
    assert node.wait(60) == 1
    deaths = [event for event in node.told() if event["kind"] == "learner-died"]
    assert len(deaths) == 3
    for death in deaths:
        assert "died of ValueError: the simulator fell over" in death["event"]
        assert death["error"]["traceback"].endswith("ValueError: the simulator fell over")
    assert [event["kind"] for event in node.told()][-1] == "left"  # it said goodbye, and kept its state
    assert node.summary()["reason"] == "its learner can't go on"
    assert list(node.data.rglob("last.safetensors"))
    last = node.text().splitlines()[-1]
    assert "3 times in a row in the same way" in last
    assert "ValueError: the simulator fell over (at " in last
    assert "start this node again" in last
    assert "killed by signal" not in node.text()
    assert "never retrieved" not in node.text()


@pytest.mark.slow
def test_a_learner_that_takes_long_to_start_is_waited_for(swarm, wait_until, own_environments, no_orphans):
    arguments, variables = own_environments("Slow-v0")
    node = swarm.start("n", *arguments, "--set=node.learner.hung_deadline_s=3", env=variables)
    wait_until(
        lambda: ((node.status().get("learner") or {}).get("starting_s") or 0) > 3,
        30,
        "the status tells that it is starting",
    )
    assert node.status()["learner"]["state"] == "starting"
    assert node.status()["state"] == "starting"
    swarm.training(node)
    assert node.status()["learner"]["starting_s"] is None
    assert not node.events("learner-died")
    node.signal(signal.SIGTERM)
    assert node.wait(15) == 0


@pytest.mark.slow
def test_a_learner_that_is_killed_while_it_is_first_built_is_replaced(swarm, wait_until, own_environments):
    arguments, variables = own_environments("Slow-v0")
    node = swarm.start("n", *arguments, env=variables)
    wait_until(lambda: (node.status().get("learner") or {}).get("starting_s"), 30, "it is starting")
    os.kill(node.learner_pid(), signal.SIGKILL)
    swarm.training(node)
    (death,) = node.events("learner-died")
    assert "was killed by signal 9" in death["text"]
