"""Three real nodes average through torch.distributed, lose one by death or by frost, and go on."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

from p2pdrl.strategies.allreduce.torch_averager import TIMEOUT_S

TASK = [
    "--set", "task.algorithm.name=regression",
    "--set", "task.algorithm.features=5000",
    "--set", "task.algorithm.rows=64",
    "--set", "task.algorithm.batch_size=8",
    "--set", "task.algorithm.learning_rate=1e-4",
    "--set", "task.stop.env_steps=1000000000",
    "--set", "task.strategy.name=grad_average",
    "--set", "task.strategy.backend=torch",
    "--set", "node.learner.max_updates_per_s=8",
    "--set", "node.learner.device=cpu",
    "--set", "node.trusted_network=true",
]  # fmt: skip


@pytest.fixture
def three(swarm, wait_until, no_orphans):
    """Nodes that step together, with a warm process each."""
    a = swarm.start("a", *TASK)
    nodes = [a, *(swarm.start(name, *TASK, peers=a) for name in "bc")]
    swarm.training(*nodes, timeout_s=120)
    wait_until(lambda: all(len(group_processes(node)) == 2 for node in nodes), 60, "processes stand by")
    go_on(wait_until, nodes, within_s=60)
    yield nodes
    living = [node for node in nodes if node.process.poll() is None]
    for node in living:
        node.signal(signal.SIGTERM)
    assert [node.wait(30) for node in living] == [0] * len(living)


def group_processes(node):
    """The one at work and the one that stands by."""
    found = []
    for child in node.children():
        try:
            if "p2pdrl.workers.torch_group.process" in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return sorted(found, key=lambda child: child.create_time())


def go_on(wait_until, nodes, rounds=4, within_s=30.0):
    """Wait until each of ``nodes`` has done more rounds; return the seconds."""
    began_s = time.monotonic()
    before = {node.name: node.rounds_in("grad_average") for node in nodes}

    def done():
        return all(node.rounds_in("grad_average") >= before[node.name] + rounds for node in nodes)

    text = "\n".join(node.text()[-1500:] for node in nodes)
    wait_until(done, within_s, f"they go on:\n{text}")
    return time.monotonic() - began_s


def stay_equal(wait_until, nodes, states=3):
    """Wait until all have been seen with the same bits at several steps; replicas that differ never are."""
    seen = {node.name: set() for node in nodes}

    def look():
        for node in nodes:
            seen[node.name].add(node.checkpoint().params.tobytes())
        return len(set.intersection(*seen.values())) >= states

    wait_until(look, 30, "all have the same parameters")


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_nodes_average_through_torch_and_go_on_without_one_that_is_killed(three, wait_until):
    a, b, c = three
    stay_equal(wait_until, three)
    assert all("gloo" in str(node.events("torch")) for node in three)

    processes = group_processes(c)
    c.kill9()
    seconds = go_on(wait_until, [a, b])
    print(f"four rounds without the killed one took {seconds:.1f} s")
    assert seconds < 5 + 4 / 8
    wait_until(lambda: not any(process.is_running() for process in processes), 5, "its processes are gone")
    stay_equal(wait_until, [a, b])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nodes_go_on_without_one_that_is_frozen_and_it_comes_back(three, wait_until):
    a, b, c = three
    processes = c.children()
    c.signal(signal.SIGSTOP)
    for process in processes:
        process.suspend()
    seconds = go_on(wait_until, [a, b])
    print(f"four rounds without the frozen one took {seconds:.1f} s")
    assert seconds < TIMEOUT_S + 5
    for process in processes:
        process.resume()
    c.signal(signal.SIGCONT)
    go_on(wait_until, three, within_s=90)
    stay_equal(wait_until, three)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_frozen_process_of_a_living_node_is_replaced(three, wait_until):
    frozen = group_processes(three[1])[0]
    frozen.suspend()
    seconds = go_on(wait_until, three, within_s=60)
    print(f"four rounds of all after a frozen process took {seconds:.1f} s")
    assert seconds < TIMEOUT_S + 8
    assert not frozen.is_running()
    stay_equal(wait_until, three)
