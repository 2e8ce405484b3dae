"""What strangers, web pages and lying members send changes nothing: all rows, against real nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "attack.py"


def played(*options: str, timeout_s: float) -> dict[str, list[str]]:
    """Play the rows; return what failed in each."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", *options],
        capture_output=True,
        check=False,
        text=True,
        timeout=timeout_s,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.stdout, done.stderr[-3000:]
    rows = json.loads(done.stdout)
    assert done.returncode == (1 if any(row["failures"] for row in rows) else 0)
    return {row["row"]: row["failures"] for row in rows}


def test_the_quick_rows_hold() -> None:
    failures = played("--quick", timeout_s=240)
    assert len(failures) >= 18
    assert {name: found for name, found in failures.items() if found} == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_row_holds() -> None:
    failures = played(timeout_s=800)
    assert len(failures) >= 25
    assert {name: found for name, found in failures.items() if found} == {}
