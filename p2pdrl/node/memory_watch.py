"""Watches what memory a node takes, its child processes included, against a bound that its owner set.

Memory is PSS: each page that several processes map counts in parts that add up to one, so neither libraries
nor what the node's processes share count twice. Where the system doesn't tell, it is what is resident and not
shared. Pages of files are left out where a replay memory is kept in one: the system takes them back when it
needs them.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from p2pdrl.errors import LimitError
from p2pdrl.node.events import EventLog

__all__ = [
    "LOOK_EVERY_S",
    "MemoryWatch",
    "ProcessMemory",
    "give_back_memory",
    "memory_of_node",
    "size",
    "trimmer",
    "watch_memory",
]

LOOK_EVERY_S = 2.0
"""Milliseconds of the kernel's time each, in a thread."""

GIVE_BACK_EVERY_S = 20.0

WARN_AT = 0.9
"""Part of the bound from which on there is a warning."""

CALM_AT = 0.8
"""Part of the bound below which there may be another."""

_MODULE = "p2pdrl.workers."


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """One process of the node.

    Attributes:
        kind: daemon, learner, actor, inference …
        nbytes: its memory.
    """

    pid: int
    kind: str
    nbytes: int


def memory_of_node(*, files: bool = True) -> list[ProcessMemory]:
    """Return the memory of this process and of all that descend from it; those that just ended are left out.

    Reads of /proc for each, so it is for a thread.

    Args:
        files: count the pages of files that are mapped, such as libraries.
    """
    daemon = psutil.Process()
    kinds = [(daemon, "daemon")]
    for child in daemon.children():
        with suppress(psutil.Error):  # it ended
            kind = _kind(child.cmdline())
            kinds += [(process, kind) for process in (child, *child.children(recursive=True))]
    return [found for process, kind in kinds for found in _memory_of(process, kind, files=files)]


def _kind(command: Sequence[str]) -> str:
    """What a child process is for, by the module that it runs."""
    module = next((word for word in command if word.startswith(_MODULE)), "")
    return module.removeprefix(_MODULE).split(".")[0].replace("_", " ") or "other"


def _memory_of(process: psutil.Process, kind: str, *, files: bool) -> list[ProcessMemory]:
    with suppress(psutil.Error, OSError):
        return [ProcessMemory(process.pid, kind, _nbytes(process, files=files))]
    return []


def _nbytes(process: psutil.Process, *, files: bool) -> int:
    with suppress(OSError):
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text("ascii")
        found = {line.partition(":")[0]: line.split()[1] for line in text.splitlines()[1:]}
        if "Pss" in found:
            return 1024 * (int(found["Pss"]) - (0 if files else int(found.get("Pss_File", 0))))
    memory = process.memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


def size(nbytes: int) -> str:
    """A number of bytes for people: ``1.5 GB``, ``320 MB``."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


class MemoryWatch:
    """Judges what was seen.

    Args:
        most_nbytes: the bound.
    """

    def __init__(self, most_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self._warned = False

    def warning(self, processes: Sequence[ProcessMemory]) -> str | None:
        """Say that the bound is near, once each time that it comes near; None without such news.

        Raises:
            LimitError: it is exceeded.
        """
        nbytes = sum(process.nbytes for process in processes)
        if nbytes > self._most_nbytes:
            raise LimitError(
                f"this node took {_shares(processes)}, more than node.limits.memory_bytes = "
                f"{self._most_nbytes} ({size(self._most_nbytes)}). Raise that, or need less: a smaller "
                "task.algorithm.buffer_size where there is a replay memory, fewer actors "
                "(node.actors.count); then start it again: it goes on from its last checkpoint"
            )
        if nbytes < CALM_AT * self._most_nbytes:
            self._warned = False
        if self._warned or nbytes < WARN_AT * self._most_nbytes:
            return None
        self._warned = True
        return (
            f"this node takes {_shares(processes)}; above node.limits.memory_bytes = {self._most_nbytes} "
            f"({size(self._most_nbytes)}) it ends"
        )


def _shares(processes: Sequence[ProcessMemory]) -> str:
    """How much all have together, and which has most."""
    nbytes = sum(process.nbytes for process in processes)
    most = max(processes, key=lambda process: process.nbytes)
    return (
        f"{size(nbytes)} of memory, the most of it the {most.kind} (process {most.pid}: {size(most.nbytes)})"
    )


async def watch_memory(most_nbytes: int, events: EventLog, *, files: bool = True) -> None:
    """Look at this node's memory now and then, and warn when the bound is near.

    Args:
        most_nbytes: the bound.
        events: where the warning goes.
        files: as for `memory_of_node`.

    Raises:
        LimitError: the node has more.
    """
    watch = MemoryWatch(most_nbytes)
    while True:
        processes = await asyncio.to_thread(memory_of_node, files=files)
        warning = watch.warning(processes)
        if warning is not None:
            nbytes = {str(process.pid): process.nbytes for process in processes}
            events.emit("memory", warning, level="warning", bound=most_nbytes, processes=nbytes)
        await asyncio.sleep(LOOK_EVERY_S)


def trimmer() -> Callable[[], object] | None:
    """Return what hands the free pages of this process's heap back to the system; None where nothing does.

    glibc keeps them: a crowd of connections, as after a time in which the machine was frozen, left ten
    megabytes more resident each time.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # macOS, musl
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return lambda: trim(0)


async def give_back_memory(every_s: float = GIVE_BACK_EVERY_S) -> None:
    """Hand the heap's free pages back now and then, in a thread; some milliseconds each time."""
    trim = trimmer()
    while trim is not None:
        await asyncio.sleep(every_s)
        await asyncio.to_thread(trim)
