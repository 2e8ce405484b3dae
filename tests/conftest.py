"""Shared by all tests: nothing may outlive the test that made it."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from p2pdrl.testing.virtual_time import VirtualTimeLoop

from .spinning import SpinGuard

_FDS = "/proc/self/fd"
_KINDS = ("socket:",) if Path("/dev/nvidiactl").exists() else ("socket:", "pipe:")
"""What is looked for; with a GPU no pipes: its driver opens some, for good."""
_CHILDREN = f"/proc/self/task/{os.getpid()}/children"
_PROC = Path(_FDS).exists() and Path(_CHILDREN).exists()
# Workers, nodes and their children share a few processors: a second thread of each costs more than it brings,
# and what is compiled once needn't be compiled again by each of hundreds of processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

_INTEGRATION = Path(__file__).parent / "integration"
_REAL_NODES = "real processes"
_BEGUN = pytest.StashKey[bool]()
NICE = 10
BUSY_S = 5.0
AT_ONCE = 100_000


def pytest_configure(config: pytest.Config) -> None:
    """Let no implicit event loop be made on Python 3.11, which nobody would close, and time no examples."""
    asyncio.set_event_loop(None)
    config.option.loadscopereorder = False  # by how many tests a file has, whatever they take
    # How long an example takes says how busy the machine is, and nothing about what is tested.
    settings.register_profile("p2pdrl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("p2pdrl")


# To look for cycles in what pytest makes of 10,000 tests takes half as long as to make it.
gc.disable()


def pytest_collection_finish() -> None:
    """Look for cycles again, among what tests make."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let a worker that doesn't begin with real nodes, which have deadlines, yield to the one that does."""
    if "PYTEST_XDIST_WORKER" in os.environ and not item.config.stash.get(_BEGUN, False):
        item.config.stash[_BEGUN] = True
        if not _with_real_nodes(item):
            os.nice(NICE)


def _with_real_nodes(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("xdist_group")
    return mark is not None and mark.args == (_REAL_NODES,)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Let one worker run all tests with real nodes, which on two cores don't bear each other's company.

    It has them first. Of the others, each file is handed out as a whole: for each test that it hands out by
    itself, xdist looks through all that it ever handed out.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            real = item.path.is_relative_to(_INTEGRATION)
            item.add_marker(pytest.mark.xdist_group(_REAL_NODES if real else item.path.stem))
    items.sort(key=lambda item: not _with_real_nodes(item))
    yield
    if getattr(config.option, "loadgroup", False) and not all("@" in item.nodeid for item in items):
        raise pytest.UsageError("pytest-xdist doesn't group this pytest's tests: see constraints.txt")


def is_virtual(item: pytest.Item) -> bool:
    """Whether a test wants virtual time: it is marked ``looptime``, and not ``looptime(False)``."""
    mark = item.get_closest_marker("looptime")
    return mark is not None and mark.args != (False,)


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that an asynchronous test and its fixtures run on."""
    if is_virtual(item):
        return {"virtual": functools.partial(VirtualTimeLoop, waits=True)}
    return {"real": asyncio.new_event_loop}


def _open_things() -> set[str]:
    """Sockets and pipes that are open now, by inode."""
    things = set()
    for entry in os.listdir(_FDS) if _PROC else ():  # noqa: PTH208 - before and after each of 10,000 tests
        try:
            target = os.readlink(f"{_FDS}/{entry}")  # noqa: PTH115
        except OSError:
            continue
        if target.startswith(_KINDS):
            things.add(target)
    return things


def _children() -> set[str]:
    if not _PROC:
        return set()
    with open(_CHILDREN) as file:  # noqa: PTH123
        return set(file.read().split())


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves threads, sockets, pipes or child processes behind."""
    threads = set(threading.enumerate())
    things, children = _open_things(), _children()
    yield
    left_children = _children() - children
    assert not left_children, f"child processes left behind: {left_children}"
    if left := _open_things() - things:
        gc.collect()
        left = _open_things() - things
    until_s = time.monotonic() + 5.0
    while (
        left and time.monotonic() < until_s
    ):  # a server in a thread hears a little later that its caller is gone
        time.sleep(0.02)
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
    if not is_virtual(request.node):
        yield
        return
    with SpinGuard(BUSY_S, AT_ONCE):
        yield
