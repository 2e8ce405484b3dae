"""What a node's processes have in memory, and when that is too much."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from p2pdrl.clock import ManualClock
from p2pdrl.errors import LimitError
from p2pdrl.node.events import EventLog
from p2pdrl.node.memory_watch import MemoryWatch, ProcessMemory, memory_of_node, size, trimmer, watch_memory

MB = 1_000_000


def seen(learner: int, actor: int = 10, daemon: int = 50) -> list[ProcessMemory]:
    return [
        ProcessMemory(1, "daemon", daemon * MB),
        ProcessMemory(2, "learner", learner * MB),
        ProcessMemory(3, "actor", actor * MB),
    ]


def test_there_is_one_warning_each_time_that_the_bound_comes_near():
    watch = MemoryWatch(1000 * MB)
    loads = [100, 700, 850, 900, 930, 800, 930, 700, 850]
    warnings = [watch.warning(seen(load)) for load in loads]
    assert [warning is not None for warning in warnings] == [False] * 2 + [True] + [False] * 5 + [True]
    assert warnings[2] == (
        "this node takes 910 MB of memory, the most of it the learner (process 2: 850 MB); above "
        "node.limits.memory_bytes = 1000000000 (1.00 GB) it ends"
    )


def test_beyond_it_the_error_says_who_has_most_and_what_to_do():
    watch = MemoryWatch(1000 * MB)
    with pytest.raises(LimitError) as caught:
        watch.warning(seen(300, actor=900))
    text = str(caught.value)
    assert text.startswith("this node took 1.25 GB of memory, the most of it the actor (process 3: 900 MB), ")
    for advice in ("Raise that", "task.algorithm.buffer_size", "node.actors.count"):
        assert advice in text
    assert caught.value.exit_code == 1


def test_exactly_the_bound_is_allowed():
    assert "it ends" in (MemoryWatch(360 * MB).warning(seen(300)) or "")


def test_sizes_in_words():
    assert [size(nbytes) for nbytes in (0, 4_400_000, 999_400_000, 1_500_000_000)] == [
        "0 MB",
        "4 MB",
        "999 MB",
        "1.50 GB",
    ]


def test_the_daemon_and_its_children_are_counted():
    child = "import sys; held = bytearray(b'x') * 40_000_000; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", child, "-m", "p2pdrl.workers.learner"]
    before = {process.pid for process in memory_of_node()}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        found = {each.pid: each for each in memory_of_node()}
        assert found[os.getpid()].kind == "daemon"
        assert found[process.pid].kind == "learner"
        assert found[process.pid].nbytes > 40_000_000
        anonymous = {each.pid: each for each in memory_of_node(files=False)}
        assert 40_000_000 < anonymous[process.pid].nbytes <= found[process.pid].nbytes
        process.stdin.close()
    assert {each.pid for each in memory_of_node()} == before


async def test_the_watch_ends_with_the_error():
    events = EventLog(10, ManualClock())
    with pytest.raises(LimitError, match="the most of it the daemon"):
        await watch_memory(1000, events)


FRAGMENTED = """
import psutil
from p2pdrl.node.memory_watch import trimmer
trim = trimmer()
held = [bytes(3000) for _ in range(30_000)]
kept = held[-1]  # lies at the top of the heap, so that what is below can't be given back by itself
del held
before = psutil.Process().memory_info().rss
trim()
print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(trimmer() is None, reason="this system's C library has no malloc_trim")
def test_what_the_heap_no_longer_needs_goes_back_to_the_system():
    given_back = subprocess.check_output([sys.executable, "-c", FRAGMENTED], text=True)
    assert int(given_back) > 50_000_000
