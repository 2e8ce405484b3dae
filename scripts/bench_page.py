"""What the page costs with many members: the browser that shows it, and a daemon that serves it.

    python scripts/bench_page.py --members 100 --seconds 30

The daemon is a real one that trains slowly among members that are real to it: each is a membership over
HTTP in one other process, and tells a report of itself, with figures that change, every few seconds. The
browser is a headless Chromium, whose processes are counted all together. What is printed are CPU seconds
a second, of both without the page first, then with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.errors import TransportError
from p2pdrl.ids import swarm_id_from_name
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.known_members import KnownMembers
from p2pdrl.membership.parameters import MembershipConfig
from p2pdrl.membership.service import MembershipService
from p2pdrl.membership.state import open_core
from p2pdrl.node.accounting.facts import FactSigner
from p2pdrl.node.accounting.metrics_gossip import MetricsExchange
from p2pdrl.node.accounting.report_table import PeerReport, ReportTable
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import Address

SWARM = "page bench"
REPORT_EVERY_S = 5.0


async def member(number: int, node: Address, stack: contextlib.AsyncExitStack) -> None:
    """One member, for as long as the process lives."""
    identity, clock, rng = Identity(random.Random(number).randbytes(32)), SystemClock(), random.Random(number)
    swarm_id, limits = swarm_id_from_name(SWARM), TransportLimits()
    transport = HttpTransport(identity.node_id, swarm_id, None, clock=clock, limits=limits)
    app = web.Application()
    transport.mount(app)
    listener = Listener(limits, clock, transport.counters)
    at = await listener.listen(app, "127.0.0.1", 0)
    await transport.start()
    core = open_core(
        config=MembershipConfig.wan(), signer=identity, swarm_id=swarm_id, name=f"member-{number}",
        address=str(at), clock=clock, rng=rng, known=KnownMembers(None), tags={"roles": "actor,learner"},
    )  # fmt: skip
    service = MembershipService(core, transport, clock, [node], rng=rng)
    await service.start()
    stack.push_async_callback(listener.close)
    stack.push_async_callback(transport.close)
    stack.push_async_callback(service.close)
    signer = FactSigner(identity, swarm_id)
    table = ReportTable(signer)
    boot = core.me.incarnation.boot_ms
    for seq in range(1, 1 << 30):
        report = PeerReport(
            id=identity.node_id, boot=boot, seq=seq, state="training", env_steps=1000 * seq, updates=seq,
            policy_version=seq, steps_per_s=rng.uniform(900, 1100), mean_return=rng.uniform(0, 500),
        )  # fmt: skip
        table.put(report, clock.monotonic())
        rows = [row for _, row in table.outgoing(clock.monotonic())]
        told = msgspec.msgpack.encode(MetricsExchange(reports=rows, counts={}, moments={}, holds={}))
        with contextlib.suppress(TransportError):
            await transport.call(node, None, "metrics", told, deadline_s=5.0)
        await asyncio.sleep(REPORT_EVERY_S * rng.uniform(0.8, 1.2))


async def members(count: int, node: Address) -> None:
    """All members, until the process is ended."""
    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(member(number, node, stack))
            await asyncio.sleep(0.05)


def cpu_s(processes: list[psutil.Process]) -> float:
    """CPU seconds of processes and all below them."""
    total = 0.0
    for process in processes:
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = one.cpu_times()
                total += times.user + times.system
    return total


def own_cpu_s(process: psutil.Process) -> float:
    """CPU seconds of one process without those below it."""
    times = process.cpu_times()
    return times.user + times.system


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A headless Chromium with an empty tab, and the address of its tabs."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("there is no Chromium here: apt-get install chromium")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--disable-sync"]
    flags += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    flags += [f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen([chromium, *flags], stderr=subprocess.DEVNULL)
    try:
        port = folder / "DevToolsActivePort"
        end = time.monotonic() + 60
        while not port.exists() or "\n" not in port.read_text():
            if time.monotonic() > end:
                raise SystemExit("Chromium doesn't start")
            time.sleep(0.1)
        yield process, f"http://127.0.0.1:{port.read_text().split()[0]}/json"
    finally:
        process.kill()
        process.wait()


async def show(tabs: str, url: str, count: int) -> None:
    """Open the page, and wait until it shows every member."""
    async with aiohttp.ClientSession() as session, session.get(tabs) as answer:
        tab = next(one for one in await answer.json() if one["type"] == "page")
        async with session.ws_connect(tab["webSocketDebuggerUrl"]) as socket:
            await socket.send_json({"id": 1, "method": "Page.navigate", "params": {"url": url}})
            await socket.receive_json(timeout=30)
            script = f"document.querySelectorAll('#members tr').length > {count}"
            for number in range(2, 600):
                asked = {"expression": script, "returnByValue": True}
                await socket.send_json({"id": number, "method": "Runtime.evaluate", "params": asked})
                told: Any = await socket.receive_json(timeout=30)
                if told.get("result", {}).get("result", {}).get("value"):
                    return
                await asyncio.sleep(0.2)
    raise SystemExit("the page never showed all members")


def known(api: str) -> int:
    """Members that the node sees, itself included; on a busy machine some are suspects at times."""

    async def ask() -> int:
        async with aiohttp.ClientSession() as session, session.get(f"http://{api}/v1/status") as answer:
            counts = (await answer.json())["members"]
            return int(counts["alive"]) + int(counts["suspect"])

    try:
        return asyncio.run(ask())
    except (aiohttp.ClientError, KeyError):
        return 0


def measure(count: int, seconds: float, port: int) -> dict[str, float]:
    """Part of a core that each takes, without the page and with it."""
    api = f"127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="p2pdrl-page-") as text:
        folder = Path(text)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        node = [sys.executable, "-m", "p2pdrl", "node", "--listen", api, "--swarm", SWARM, "--name", "daemon"]
        node += ["--data-dir", str(folder / "node"), "--set", "node.learner.max_updates_per_s=2"]
        node += ["--set", "node.membership=wan", "--set", "task.strategy.name=local"]
        daemon = subprocess.Popen(node, **quiet)
        others = None
        try:
            while not known(api):
                if daemon.poll() is not None:
                    raise SystemExit(f"the node ended with {daemon.returncode}")
                time.sleep(0.2)
            others = subprocess.Popen(
                [sys.executable, __file__, "--be", str(count), "--port", str(port)], **quiet
            )
            end = time.monotonic() + 240
            while (seen := known(api)) <= count:
                if time.monotonic() > end or others.poll() is not None:
                    raise SystemExit(f"only {seen} of {count + 1} are there")
                time.sleep(1.0)
            time.sleep(3 * REPORT_EVERY_S)
            process = psutil.Process(daemon.pid)
            with browser(folder / "chromium") as (chromium, tabs):
                parts = {}
                for word in ("without", "with"):
                    if word == "with":
                        asyncio.run(show(tabs, f"http://{api}/", count))
                    time.sleep(3.0)
                    before = own_cpu_s(process), cpu_s([psutil.Process(chromium.pid)]), time.monotonic()
                    time.sleep(seconds)
                    after = own_cpu_s(process), cpu_s([psutil.Process(chromium.pid)]), time.monotonic()
                    wall_s = after[2] - before[2]
                    parts[f"daemon_{word}"] = (after[0] - before[0]) / wall_s
                    parts[f"browser_{word}"] = (after[1] - before[1]) / wall_s
            return parts
        finally:
            for started in (others, daemon):
                if started is not None:
                    started.send_signal(signal.SIGKILL)
                    started.wait()


def main() -> None:
    """Measure, or be the members."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--port", type=int, default=29_700)
    parser.add_argument("--be", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.be is not None:
        asyncio.run(members(given.be, Address("127.0.0.1", given.port)))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parts = measure(given.members, given.seconds, given.port)
    parts["daemon_for_the_page"] = parts["daemon_with"] - parts["daemon_without"]
    parts["browser_for_the_page"] = parts["browser_with"] - parts["browser_without"]
    print(
        json.dumps(
            {"members": given.members} | {name: round(part, 4) for name, part in parts.items()}, indent=2
        )
    )


if __name__ == "__main__":
    main()
