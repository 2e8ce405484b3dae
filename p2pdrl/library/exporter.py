"""Writes a policy as a file that runs without p2pdrl, in a process of its own.

``p2pdrl export`` starts it as ``python -m p2pdrl.library.exporter SOURCE --format NAME --out FILE``, so that
the command line stays free of torch, and reads the card from its standard output.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from p2pdrl.errors import P2PDRLError
from p2pdrl.telemetry.progress import ProgressLine

__all__ = ["main"]


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="p2pdrl.library.exporter")
    parser.add_argument("source")
    parser.add_argument("--format", dest="form")
    parser.add_argument("--out", required=True)
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--allow-import", action="store_true")
    parser.add_argument("--swarm-key-file")
    parser.add_argument("--data-dir")
    given = vars(parser.parse_args())
    form, out = given.pop("form"), Path(given.pop("out"))
    try:
        from p2pdrl.library.policy import load
        from p2pdrl.rl.export import format_of, require_packages

        form = form or format_of(out)
        require_packages(form)
        source = given.pop("source")
        with ProgressLine() as progress:
            progress.part(f"reading the policy of {source} (1 of 2)")
            policy = load(source, **given)
            progress.part(f"writing it as {form}, and comparing what that computes (2 of 2)")
            card = policy.export(out, form)
    except P2PDRLError as error:
        print(f"p2pdrl: {error}", file=sys.stderr)
        return error.exit_code
    sys.stdout.write(msgspec.json.encode(card).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
