"""What children print becomes lines of the log, however they end, and whether or not anybody reads."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import time
from pathlib import Path

import pytest

from p2pdrl.node.children.child_process import ProcessLink
from p2pdrl.telemetry.logging import configure

TALKS = """
import os, socket, sys
from p2pdrl.workers.child import print_without_blocking
print_without_blocking()
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with socket.socket(fileno=int(given["--fd"])) as sock:
    while True:
        data = sock.recv(65536)[4:]
        if not data:
            sys.exit()
        if data == b"die":
            print("talker: last words")
            sys.stdout.write("and half a li")
            sys.stdout.flush()
            os.kill(os.getpid(), 9)
        if data == b"flood":
            for number in range(20000):
                print(f"talker: {number} of many", file=sys.stderr)
            open("flooded", "w").close()
        else:
            os.write(2, data)
        sock.sendall(b"\\x04\\0\\0\\0done")
"""


class Talker(ProcessLink):
    NAME = "talker"


@pytest.fixture
def log():
    """The log as JSON lines."""
    root, own = logging.getLogger(), logging.getLogger("p2pdrl")
    before = root.handlers[:], root.level, own.level
    stream = io.StringIO()
    configure("info", "json", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:], level, own_level = before
    root.setLevel(level)
    own.setLevel(own_level)


@pytest.fixture
async def talker(tmp_path, monkeypatch):
    (tmp_path / "talks.py").write_text(TALKS)
    paths = os.pathsep.join([str(tmp_path), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    monkeypatch.chdir(tmp_path)
    link = Talker(*await Talker.launch("talks", {}, os.environ | {"PYTHONPATH": paths}))
    yield link
    await link.kill()


async def say(link: Talker, words: bytes) -> None:
    await link.send(len(words).to_bytes(4, "little") + words)


async def test_lines_are_logged_as_they_come(talker, log, until):
    await say(
        talker, b"talker: it is a fine day\nUserWarning: \xff\x1b[2J\n\n" + b"y" * 5000 + b"\nunfinished"
    )
    await talker.receive()
    await until(lambda: len(log()) == 4)
    first, second, third, fourth = log()
    assert (first["event"], first["level"], first["source"]) == ("it is a fine day", "info", "talker")
    assert first["pid"] == talker.pid
    assert (second["event"], second["level"]) == ("UserWarning: \\xff\x1b[2J", "warning")
    assert third["event"] + fourth["event"] == "y" * 5000
    await talker.kill()
    assert [line["event"] for line in log()[4:]] == ["unfinished"]


async def test_last_words_arent_lost(talker, log):
    await say(talker, b"die")
    assert await talker.reap(20.0) == -signal.SIGKILL
    assert [(line["event"], line["level"]) for line in log()] == [
        ("last words", "info"),
        ("and half a li", "warning"),
    ]


async def test_a_daemon_that_reads_nothing_holds_no_child_up(talker, log, until):
    await say(talker, b"flood")
    until_s = time.monotonic() + 30
    while not os.path.exists("flooded"):  # noqa: ASYNC240, PTH110
        assert time.monotonic() < until_s
        time.sleep(0.01)  # noqa: ASYNC251 - the daemon is frozen: its loop stands still
    assert await talker.receive() == [b"done"]
    await until(log)
    await say(talker, b"talker: hello again\n")
    await talker.receive()
    await talker.kill()
    events = [line["event"] for line in log()]
    assert events[0] == "0 of many"
    assert events[-1] == "hello again"
    assert len(events) < 20000
