"""What a process frees is there for what it takes next, without new pages from the system."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

NBYTES = 64 << 20
"""Twice of what glibc keeps at most by itself."""

CODE = f"""
import ctypes, resource, sys
from p2pdrl.workers.child import keep_freed_memory

heap = ctypes.CDLL(None)
heap.malloc.argtypes, heap.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
heap.free.argtypes = [ctypes.c_void_p]

def use():
    block = heap.malloc({NBYTES})
    ctypes.memset(block, 1, {NBYTES})
    heap.free(block)

if sys.argv[1] == "keep":
    print(keep_freed_memory(), file=sys.stderr)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str, **env: str) -> tuple[int, str]:
    """Return the page faults of ten blocks after the first, and what the process said."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", CODE, how],
        env=kept | env,
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    return int(done.stdout), done.stderr.strip()


@pytest.mark.skipif(
    sys.platform == "win32" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="this system has no mallopt"
)
def test_a_block_is_kept_for_the_next_one():
    plain, _ = page_faults("plain")
    kept, said = page_faults("keep")
    assert said == "True"
    assert kept < 20 < plain  # each block is 16,384 small pages or 32 huge ones


def test_the_environment_has_the_last_word():
    asked, said = page_faults("keep", MALLOC_ARENA_MAX="2")
    assert said == "False"
    assert asked > 20 or not sys.platform.startswith("linux")
