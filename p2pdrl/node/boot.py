"""The boot id: a number that grows with every start of a node, also when the wall clock went back.

It is the wall clock in milliseconds where that exceeds the last one given out, else the last one
plus one. Incarnations, counters and reports are ordered by it. Called once by the daemon, before
its loop runs.
"""

from __future__ import annotations

from pathlib import Path

from p2pdrl.clock import Clock
from p2pdrl.node.atomic import storage_error, write_atomic

__all__ = ["ahead_s", "next_boot"]

_LARGEST = 2**53


def next_boot(folder: Path, clock: Clock) -> int:
    """Return this start's boot id, after it has been written to ``<folder>/boot``.

    Args:
        folder: the node's data folder, locked by this process.
        clock: gives the wall time.

    Returns:
        Milliseconds since the Unix epoch, or more where the clock went back since the last start.

    Raises:
        StorageError: if the file can't be read or written.
    """
    path = folder / "boot"
    try:
        boot = max(int(clock.wall() * 1000), _last(path) + 1)
        write_atomic(path, f"{boot}\n".encode())
    except OSError as error:
        raise storage_error("keep the boot id in", path, error) from error
    return boot


def ahead_s(boot: int, clock: Clock) -> float:
    """Return by how many seconds ``boot`` lies in the future, zero if it doesn't.

    A node that once started under a clock that ran far ahead keeps growing from there, and peers
    refuse incarnations of the far future: the daemon warns when this is over some minutes.
    """
    return max(0.0, boot / 1000 - clock.wall())


def _last(path: Path) -> int:
    """The boot id given out last; zero where there is none, or where the file is damaged."""
    try:
        text = path.read_bytes()[:32].strip()
    except FileNotFoundError:
        return 0
    value = int(text) if text.isdigit() else 0
    return value if value < _LARGEST else 0
