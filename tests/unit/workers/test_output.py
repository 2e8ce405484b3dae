"""Printing into a pipe whose reader is slow, frozen or gone."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from p2pdrl.workers.child import NonBlockingFile

FILL = b"x" * (1 << 20)
"""More than a pipe holds."""


@pytest.fixture
def pipe():
    reader, writer = os.pipe2(os.O_NONBLOCK)
    yield reader, writer
    for fd in (reader, writer):
        try:
            os.close(fd)
        except OSError:
            pass


def drain(reader: int) -> bytes:
    found = b""
    while True:
        try:
            data = os.read(reader, 1 << 16)
        except BlockingIOError:
            return found
        found += data


def test_what_a_frozen_reader_doesnt_take_is_left_out_and_told(pipe):
    reader, writer = pipe
    file = NonBlockingFile(writer, 0.02)
    assert file.write(FILL) == len(FILL)
    began_s = time.monotonic()
    for _ in range(1000):
        assert file.write(b"more\n") == 5
    assert time.monotonic() - began_s < 1.0  # none of them waited: that would be 20 s
    held = len(drain(reader))
    assert 0 < held < len(FILL)
    file.write(b"again\n")
    assert drain(reader) == f"\n[{len(FILL) - held + 5000} bytes left out]\nagain\n".encode()


def test_a_reader_that_is_only_busy_gets_all(pipe):
    reader, writer = pipe
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys, time; time.sleep(0.3); print(len(sys.stdin.buffer.read()))"],
        stdin=reader,
        stdout=subprocess.PIPE,
    )
    try:
        os.set_blocking(reader, True)  # of both processes: they share it
        assert NonBlockingFile(writer, 30.0).write(FILL) == len(FILL)
        os.close(writer)
        assert int(child.communicate(timeout=30)[0]) == len(FILL)
    finally:
        child.kill()
        child.wait()


def test_a_reader_that_is_gone_hurts_nobody(pipe):
    reader, writer = pipe
    os.close(reader)
    assert NonBlockingFile(writer).write(b"hello\n") == 6


PRINTS = """
import os, sys
from p2pdrl.workers.child import print_without_blocking
print_without_blocking()
print("one")
print("two", file=sys.stderr)
os.write(2, b"three\\n")
raise RuntimeError("four \\ud800")
"""


def test_all_that_python_prints_goes_at_once(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PRINTS], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False, timeout=60,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[:3], lines[-1]) == (
        1,
        ["one", "two", "three"],
        r"RuntimeError: four \ud800",
    )
