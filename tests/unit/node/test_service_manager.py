"""systemd's side of sd_notify: a datagram socket that takes what the node tells."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from p2pdrl.clock import SystemClock
from p2pdrl.node.events import EventLog
from p2pdrl.node.service_manager import ServiceManager


@pytest.fixture(params=["file", "abstract"])
def listening(request, tmp_path):
    """Its socket, and the value of NOTIFY_SOCKET."""
    name = str(tmp_path / "notify") if request.param == "file" else f"@p2pdrl-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as opened:
        opened.bind(name.replace("@", "\0", 1) if name.startswith("@") else name)
        opened.settimeout(5)
        yield opened, name


def heard(opened):
    return dict(line.split("=", 1) for line in opened.recv(4096).decode().split("\n"))


async def test_it_hears_of_readiness_of_what_happened_last_and_that_the_loop_turns(listening):
    opened, name = listening
    events = EventLog(10, SystemClock())
    events.emit("started", "n0 listens\non 127.0.0.1:7700")
    manager = ServiceManager.of(
        {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "30000", "WATCHDOG_PID": str(os.getpid())}
    )
    job = asyncio.create_task(manager.run(events))
    first = await asyncio.to_thread(heard, opened)
    assert first == {"READY": "1", "STATUS": "n0 listens on 127.0.0.1:7700", "WATCHDOG": "1"}
    assert await asyncio.to_thread(heard, opened) == {"WATCHDOG": "1"}
    events.emit("training", "x" * 1000)
    while "STATUS" not in (later := await asyncio.to_thread(heard, opened)):
        pass
    assert later == {"STATUS": "x" * 500, "WATCHDOG": "1"}
    job.cancel()


def test_it_hears_that_the_node_leaves(listening):
    opened, name = listening
    ServiceManager.of({"NOTIFY_SOCKET": name}).tell(STOPPING="1", STATUS="leaves: SIGTERM")
    assert heard(opened) == {"STOPPING": "1", "STATUS": "leaves: SIGTERM"}


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "relative"}])
async def test_without_one_nothing_is_told(environment):
    manager = ServiceManager.of(environment)
    manager.tell(READY="1")
    await manager.run(EventLog(10, SystemClock()))


async def test_one_that_is_gone_does_no_harm(tmp_path):
    manager = ServiceManager.of({"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "no number"})
    manager.tell(READY="1")
