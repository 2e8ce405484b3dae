"""Real nodes of which one can't be dialled: what it tells others is refused, as by a router."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from p2pdrl.testing.fault_proxy import FaultProxy
from p2pdrl.transport.protocol import Address

from .conftest import RealNode, RealSwarm

EXCHANGING = ["--set", "node.learner.max_updates_per_s=10", "--set", "task.stop.env_steps=0"]
EXCHANGING += ["--set", "task.env.num_envs=4", "--set", "task.algorithm.unroll_steps=32"]


@pytest.fixture
def router() -> Iterator[Address]:
    """An address that belongs to somebody and refuses every connection."""
    loop = asyncio.new_event_loop()
    ready: list[Address] = []
    up, done = threading.Event(), asyncio.Event()

    async def run() -> None:
        async with FaultProxy(Address("127.0.0.1", 1)) as proxy:
            proxy.refuse()
            ready.append(proxy.address)
            up.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert up.wait(10)
    yield ready[0]
    loop.call_soon_threadsafe(done.set)
    thread.join(10)
    loop.close()


def deaths(node: RealNode, of: str) -> list[str]:
    return [
        event["event"] for event in node.told() if event["kind"] == "member-dead" and of in event["event"]
    ]


def suspicions(node: RealNode, of: str) -> list[str]:
    kinds = ("member-suspect", "member-dead")
    return [event["event"] for event in node.told() if event["kind"] in kinds and of in event["event"]]


def exchanged(node: RealNode) -> dict[str, int]:
    return dict(node.status().get("exchanges") or {})


def start_behind(swarm: RealSwarm, router: Address, peers: RealNode, *arguments: str) -> RealNode:
    """Start ``home``, which tells others the address of the router."""
    node = swarm.start("home", *EXCHANGING, "--advertise", str(router), *arguments, peers=peers)
    swarm.training(node, timeout_s=150)
    return node


def row(node: RealNode, name: str) -> dict[str, object]:
    return next((row for row in node.peers() if row["name"] == name), {})


def both_ways(wait_until, home: RealNode) -> None:
    """Wait until others begin exchanges with it, and it with them."""
    before = exchanged(home)

    def more() -> bool:
        now = exchanged(home)
        return all(now.get(word, 0) > before.get(word, 0) + 5 for word in ("ok", "answered"))

    wait_until(more, 60, f"home exchanges both ways: {exchanged(home)}\n{home.text()[-2000:]}")


def test_a_node_that_nobody_can_dial_exchanges_both_ways(
    swarm: RealSwarm, router: Address, wait_until
) -> None:
    n0 = swarm.found("n0", *EXCHANGING)
    home = start_behind(swarm, router, n0)
    for node in (n0, home):
        wait_until(lambda node=node: row(node, "home").get("relays") == ["n0"], 20, "home is relayed")
    both_ways(wait_until, home)
    assert row(n0, "home")["reach"] == "outbound-only"
    assert home.status()["reach"]["state"] == "outbound-only"
    assert n0.status()["reach"]["relays_for"] == ["home"]
    assert not deaths(n0, "home"), n0.text()[-3000:]


@pytest.mark.slow
def test_relays_die_and_the_member_dies(swarm: RealSwarm, router: Address, wait_until) -> None:
    n0 = swarm.found("n0", *EXCHANGING)
    n1, n2 = (swarm.start(name, *EXCHANGING, peers=n0) for name in ("n1", "n2"))
    swarm.training(n0, n1, n2, timeout_s=150)
    home = start_behind(swarm, router, n0)
    for node in (n0, n1, n2, home):
        wait_until(
            lambda node=node: len(row(node, "home").get("relays") or []) == 2,
            20,
            f"{node.name} knows home's two relays:\n{home.text()[-2000:]}",
        )
    assert row(n0, "n1")["reach"] == "direct"
    both_ways(wait_until, home)
    used = home.status()["reach"]["relays"]
    victim, *others = sorted((n0, n1, n2), key=lambda node: node.name not in used)
    victim.kill9()
    began_s = time.monotonic()
    kept = {node.name for node in others}
    wait_until(
        lambda: all(set(row(node, "home").get("relays") or []) == kept for node in others),
        15,
        f"another relay is chosen:\n{home.text()[-2000:]}",
    )
    print(f"another relay after {time.monotonic() - began_s:.1f} s")
    for node in others:
        assert not deaths(node, "home"), deaths(node, "home")
    print("suspicions", [suspicions(node, "home") for node in others])

    home.kill9()
    began_s = time.monotonic()
    for node in others:
        wait_until(lambda node=node: node.view().get("home") == "dead", 20, f"{node.name} finds it dead")
    print(f"known to be dead to all after {time.monotonic() - began_s:.1f} s")
