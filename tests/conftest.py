"""Shared by all tests: nothing may outlive the test that made it."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from .spinning import SpinGuard

_FDS = Path("/proc/self/fd")
_GPU = Path("/dev/nvidiactl")
BUSY_S = 5.0
AT_ONCE = 100_000
_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children")


def pytest_configure() -> None:
    """Let no implicit event loop be made on Python 3.11, which nobody would close, and time no examples."""
    asyncio.set_event_loop(None)
    # How long an example takes says how busy the machine is, and nothing about what is tested.
    settings.register_profile("p2pdrl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("p2pdrl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let virtual time go on as soon as nothing is left to run.

    By default the loop goes round 42 times before, in vain: that took most of the time of these tests.
    """
    for item in items:
        if item.get_closest_marker("looptime"):
            item.add_marker(pytest.mark.looptime(noop_cycles=1))


def _open_things() -> set[str]:
    """Sockets and pipes that are open now, by inode; with a GPU no pipes: its driver opens some, for good."""
    kinds = ("socket:",) if _GPU.exists() else ("socket:", "pipe:")
    things = set()
    for entry in _FDS.iterdir() if _FDS.exists() else ():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith(kinds):
            things.add(target)
    return things


def _children() -> set[str]:
    return set(_CHILDREN.read_text().split()) if _CHILDREN.exists() else set()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves threads, sockets, pipes or child processes behind."""
    threads = set(threading.enumerate())
    things, children = _open_things(), _children()
    yield
    left_children = _children() - children
    assert not left_children, f"child processes left behind: {left_children}"
    if _open_things() - things:
        gc.collect()
    left = _open_things() - things
    assert not left, f"left open: {left}"
    left_threads = {
        thread for thread in set(threading.enumerate()) - threads if thread.is_alive() and not thread.daemon
    }
    left_threads = {thread for thread in left_threads if not thread.name.startswith("asyncio_")}
    assert not left_threads, f"threads left behind: {left_threads}"


@pytest.fixture(autouse=True)
def no_spinning(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test on virtual time whose loop doesn't go on, rather than wait for it."""
    if request.node.get_closest_marker("looptime") is None:
        yield
        return
    with SpinGuard(BUSY_S, AT_ONCE):
        yield
