"""Keeps a node to some of its machine's processors: the daemon, and with it every process that it starts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from p2pdrl.config.node import NodeConfig
from p2pdrl.errors import UsageError

__all__ = ["choose", "keep_to_processors"]

_THREADS = Path("/proc/self/task")


def choose(usable: Collection[int], count: int, key: str) -> set[int]:
    """Return ``count`` of the ``usable`` processors, neighbours by number, from one that ``key`` picks.

    More than there are is all of them, and so is 0.
    """
    numbers = sorted(usable)
    if not 0 < count < len(numbers):
        return set(numbers)
    first = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    return {numbers[(first + place) % len(numbers)] for place in range(count)}


def keep_to_processors(node: NodeConfig) -> None:
    """Keep this process to ``node.limits.cpus`` of the processors that it may use now.

    Processes and threads that are started afterwards inherit that.

    Raises:
        UsageError: the system can't do so.
    """
    count = node.limits.cpus
    if not count:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError(
            "node.limits.cpus: this system doesn't let a process choose its processors; leave it 0, and "
            "lower node.actors.count, node.learner.threads or node.learner.max_updates_per_s instead"
        )
    folder = node.data_dir
    key = str(os.getpid()) if folder is None else str(Path(folder).expanduser().resolve())
    chosen = choose(os.sched_getaffinity(0), count, key)
    os.sched_setaffinity(0, chosen)
    for thread in _THREADS.iterdir() if _THREADS.is_dir() else ():  # libraries have started theirs already
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), chosen)
