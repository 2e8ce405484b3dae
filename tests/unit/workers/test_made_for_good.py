"""What a process keeps for good is looked through by no collection of cycles."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc
from p2pdrl.workers.child import made_for_good

class Kept:
    pass

before = gc.get_freeze_count()
with made_for_good():
    assert not gc.isenabled()
    kept = [Kept() for _ in range(1000)]
assert gc.isenabled() and gc.get_freeze_count() >= before + 1000
try:
    with made_for_good():
        raise KeyError
except KeyError:
    assert gc.isenabled()
"""


def test_cycles_are_looked_for_afterwards_and_not_among_what_was_made():
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=60)
