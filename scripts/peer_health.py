#!/usr/bin/env python3
"""Every peer's health, from any one node of the swarm.

    python scripts/peer_health.py --peers host-a:7700 --peers host-b:7700

The addresses are tried in turn, and the first node that answers tells about all members. Ends with 0
when all are well, with 4 and the reasons when something is unwell, with 3 when nobody answers. For cron,
monitors and people; `p2pdrl top` shows the same live.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import click

    from p2pdrl.cli.formats import age, as_number, clean
    from p2pdrl.cli.main import run_command
    from p2pdrl.cli.options import FiniteRange, Target, split_addresses
    from p2pdrl.cli.tables import ADDRESSES, console, members_table
    from p2pdrl.errors import DaemonUnreachableError, P2PDRLError, UnhealthyError
except ModuleNotFoundError as error:
    # Started by a Python that lacks the package: take the one that make has set up, if there is one.
    own = Path(__file__).resolve().parents[1] / ".venv" / "bin" / "python"
    if not own.exists() or Path(sys.executable) == own:
        sys.exit(f"peer_health: {error}: install p2pdrl, or run `make venv` first")
    os.execv(own, [str(own), *sys.argv])


MAX_REPORT_AGE_S = 60.0
"""A member whose numbers are older than this is only known to be alive, not to be well."""


def problems(members: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per member that is unwell: who, and why.

    A member that has left is not unwell; one that is suspect or dead is.
    """
    lines = []
    for member in members:
        if reasons := _reasons(member):
            who = f"{clean(member.get('name', '?'), 64)} at {clean(member.get('address', '?'), 64)}"
            lines.append(f"{who}: {'; '.join(clean(reason) for reason in reasons)}")
    return lines


def _reasons(member: Mapping[str, Any]) -> list[str]:
    state = member.get("state")
    if state == "left":
        return []
    if state != "alive":
        why = member.get("state_reason")
        return [f"{state} ({why})" if why else str(state)]
    reasons = [str(reason) for reason in member.get("reasons") or []]
    if member.get("healthy") is False and not reasons:
        reasons.append("says that it is unwell")
    old_s = as_number(member.get("report_age_s"))
    if not member.get("self") and (old_s is None or old_s > MAX_REPORT_AGE_S):
        reasons.append("has sent no numbers yet" if old_s is None else f"its numbers are {age(old_s)} old")
    return reasons


def ask(
    addresses: list[str], key_file: str | None, data_dir: str | None, timeout_s: float
) -> tuple[str, list[dict[str, Any]]]:
    """Return the first address that answers, and its list of members; tell about those that don't."""
    errors = []
    for address in addresses:
        try:
            return address, Target(address, key_file, data_dir).client(timeout_s).peers()
        except P2PDRLError as error:
            if error.exit_code == 2:
                raise
            errors.append(str(error))
            print(f"peer_health: {error}", file=sys.stderr)
    raise DaemonUnreachableError(f"none of {', '.join(addresses)} answers")


def check(
    addresses: list[str], key_file: str | None, data_dir: str | None, timeout_s: float, as_json: bool
) -> list[str]:
    """Ask once, print the answer, and return what is wrong."""
    address, members = ask(addresses, key_file, data_dir, timeout_s)
    wrong = problems(members)
    if as_json:
        print(json.dumps({"asked": address, "healthy": not wrong, "problems": wrong, "peers": members}))
    else:
        console().print(members_table(members, ADDRESSES))
        for line in wrong:
            print(line)
    return wrong


@click.command()
@click.option(
    "--peers", multiple=True, metavar="HOST:PORT[,…]", help="Nodes to ask, tried in turn. Repeatable."
)
@click.option(
    "--api", envvar="P2PDRL_API", metavar="HOST:PORT", help="One more, tried first.  [env: P2PDRL_API]"
)
@click.option(
    "--swarm-key-file", envvar="P2PDRL_SWARM_KEY_FILE", metavar="FILE", help="The swarm's key, if it has one."
)
@click.option("--data-dir", metavar="FOLDER", help="Of a node on this machine, whose token is there.")
@click.option("--timeout", "timeout_s", type=FiniteRange(min=0.1), default=5.0, show_default=True)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: one document, or one per line with --watch."
)
@click.option(
    "--watch",
    "interval_s",
    type=FiniteRange(min=0.1),
    is_flag=False,
    flag_value=5.0,
    metavar="[SECONDS]",
    help="Again and again until Ctrl-C, every 5 s unless told otherwise.",
)
def peer_health(
    *,
    peers: tuple[str, ...],
    api: str | None,
    swarm_key_file: str | None,
    data_dir: str | None,
    timeout_s: float,
    as_json: bool,
    interval_s: float | None,
) -> None:
    """Show every peer's health, from any one node of the swarm."""  # fmt: skip
    addresses = ([api] if api else []) + split_addresses(peers) or ["127.0.0.1:7700"]
    while interval_s is not None:
        try:
            check(addresses, swarm_key_file, data_dir, timeout_s, as_json)
        except DaemonUnreachableError as error:
            print(f"peer_health: {error}", file=sys.stderr)
        sys.stdout.flush()
        time.sleep(interval_s)
    if wrong := check(addresses, swarm_key_file, data_dir, timeout_s, as_json):
        raise UnhealthyError(f"{len(wrong)} of the members are unwell")


if __name__ == "__main__":
    sys.exit(run_command(peer_health, "peer_health"))
