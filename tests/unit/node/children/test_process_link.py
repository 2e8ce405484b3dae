"""A child process that echoes what it is sent: started, spoken with, and ended in every way."""

from __future__ import annotations

import os
import signal
import sys

import psutil
import pytest

from p2pdrl.errors import WorkerError
from p2pdrl.node.children.child_process import ProcessLink
from p2pdrl.tensors.shared_memory import SharedRegion

ECHO = """
import socket, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with socket.socket(fileno=int(given["--fd"])) as sock:
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 65536, 4)
        if not data or data[4:] == b"end":
            sys.exit(7)
        sock.sendall(data[:-1] if data[4:] == b"half" else data)
"""


class EchoLink(ProcessLink):
    NAME = "echo"


@pytest.fixture
async def start(tmp_path):
    (tmp_path / "echoes.py").write_text(ECHO)
    links = []

    async def started(**options):
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        links.append(EchoLink(*await EchoLink.launch("echoes", options, environment)))
        return links[-1]

    yield started
    for link in links:
        await link.kill()


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


async def test_frames_go_and_come(start):
    link = await start()
    await link.send(frame(b"one"))
    assert await link.receive() == [b"one"]
    region = SharedRegion.create(64, "echo")
    await link.send(frame(b"with memory"), [region])
    assert await link.receive() == [b"with memory"]
    region.close()
    await link.send(frame(b"half"))
    assert await link.receive() == []


async def test_its_command_tells_whose_child_it_is(start):
    link = await start(**{"--size": 3})
    words = psutil.Process(link.pid).cmdline()
    assert words[1:5] == ["-m", "echoes", "--size", "3"]
    assert words[-2:] == ["--parent", str(os.getpid())]  # what the tests with real nodes find orphans by


async def test_it_ends_by_itself_or_is_killed(start):
    link = await start()
    await link.send(frame(b"end"))
    assert await link.reap(20.0) == 7
    link = await start()
    assert await link.reap(0.05) == -signal.SIGKILL
    link = await start()
    os.kill(link.pid, signal.SIGSTOP)
    assert await link.kill() == -signal.SIGKILL


async def test_one_that_is_gone_is_told(start):
    link = await start()
    await link.send(frame(b"end"))
    with pytest.raises(WorkerError, match="the echo is gone"):
        await link.receive()
    with pytest.raises(WorkerError, match="the echo is gone"):
        await link.send(frame(b"more"))


async def test_nothing_to_start(start, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(WorkerError, match="can't start the echo"):
        await start()
