"""Two real nodes that reach each other only through proxies: slow links, a cut, a hang, and their end."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack

import pytest

from p2pdrl.testing.fault_proxy import FaultProxy
from p2pdrl.transport.protocol import Address

TASK = [
    "--config",
    "cartpole",
    "--set",
    "node.learner.max_updates_per_s=2",
    "--set",
    "task.evaluation.every=0",
]
LOST_S = 15.0
BACK_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_nodes_behind_proxies_meet_and_faults_show_and_heal(swarm, wait_until, no_orphans):
    ports = [free_port(), free_port()]

    async def until(condition, timeout_s, what):
        return await asyncio.to_thread(wait_until, condition, timeout_s, what)

    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(FaultProxy(Address("127.0.0.1", port))) for port in ports]
        for proxy in proxies:
            proxy.up.delay_s = proxy.down.delay_s = 0.01

        def start(name, number, *arguments):
            address = str(proxies[number].address)
            return swarm.start(name, *TASK, "--advertise", address, *arguments, port=ports[number])

        a = start("a", 0)
        await asyncio.to_thread(swarm.training, a)
        b = start("b", 1, "--peers", str(proxies[0].address))
        await asyncio.to_thread(swarm.training, b)

        def states():
            return a.view().get("b"), b.view().get("a")

        async def both(wanted, timeout_s, what):
            await until(lambda: all(state in wanted for state in states()), timeout_s, what)

        await both(("alive",), LOST_S, "they see each other")
        shown = {row["name"]: row["address"] for row in a.peers()}
        assert shown["b"] == str(proxies[1].address)
        before = [proxy.up.nbytes for proxy in proxies]
        await until(
            lambda: all(proxy.up.nbytes > count for proxy, count in zip(proxies, before, strict=True)),
            LOST_S,
            "they talk through both proxies",
        )

        for fault in ("cut", "hang"):
            for proxy in proxies:
                getattr(proxy, fault)()
            await both(("suspect", "dead"), LOST_S, f"after a {fault} both miss each other")
            for proxy in proxies:
                proxy.heal()
            await both(("alive",), BACK_S, f"after the {fault} was healed both are back")
        for node in (a, b):
            assert node.process.poll() is None
            node.kill9()
