"""Results of scripts that run for long: rows of a CSV file, added as they come, read again the next time."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Rows", "command_line", "commit"]


class Rows:
    """The rows of one file, which is made with the first.

    Args:
        path: of the file.
        fields: the columns.
    """

    def __init__(self, path: Path, fields: Sequence[str]) -> None:
        self._path = path
        self._fields = fields

    def read(self) -> list[dict[str, str]]:
        """Return the rows so far."""
        if not self._path.exists():
            return []
        with self._path.open(newline="") as file:
            return list(csv.DictReader(file))

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row at the end."""
        new = not self._path.exists()
        with self._path.open("a", newline="") as file:
            writer = csv.DictWriter(file, self._fields)
            if new:
                writer.writeheader()
            writer.writerow(row)


def commit() -> str:
    """Return the commit of what is run; ``-dirty`` where that differs, not where results do."""
    git = ["git", "-C", str(Path(__file__).resolve().parents[2])]
    done = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    sources = [*git, "diff", "--quiet", "HEAD", "--", "p2pdrl", "config", "scripts"]
    changed = subprocess.run(sources, capture_output=True, check=False).returncode != 0
    return done.stdout.strip() + "-dirty" * changed or "unknown"


def command_line() -> str:
    """Return how the script was called."""
    return " ".join(["python", *sys.argv])
