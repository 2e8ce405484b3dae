"""``p2pdrl eval``: plays episodes with a policy from a file, or with the one that a node holds now.

The playing happens in a child process (`p2pdrl.workers.evaluator`), so that the command line stays
free of torch; its progress goes to standard error as it comes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from p2pdrl.cli.formats import clean, duration, fixed, grouped
from p2pdrl.cli.options import Target, as_arguments, json_option, policy_peer_options

__all__ = ["evaluate"]

_DOWNLOAD_S = 60.0


@click.command("eval")
@click.argument("checkpoint", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option("--peer", metavar="HOST:PORT", help="Take the current parameters of this running node instead.")
@click.option(
    "--episodes",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    metavar="N",
    help="Episodes with sampled actions, and as many with the likeliest ones.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Of environments and actions.",
)
@click.option("--device", default="cpu", show_default=True, metavar="NAME", help="cpu, cuda …")
@click.option(
    "--video",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.mp4",
    help="Film one episode; wants the `video` extra.",
)
@click.option(
    "--allow-import", is_flag=True, help="Import the module:name that its task names, which runs its code."
)
@click.option(
    "--history", is_flag=True, help="With --peer: show the swarm's own evaluations so far; plays none."
)
@policy_peer_options
@json_option
def evaluate(
    checkpoint: Path | None,
    peer: str | None,
    swarm_key_file: str | None,
    data_dir: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure a checkpoint, or a running node's policy.

    CHECKPOINT is a .safetensors file, as `p2pdrl checkpoint` and nodes write them. With --peer and --history:
    how the swarm has judged its policy so far.
    """  # fmt: skip
    if (checkpoint is None) == (peer is None):
        raise click.UsageError("name either a CHECKPOINT file or --peer HOST:PORT")
    if options.pop("history"):
        if peer is None:
            raise click.UsageError("--history wants --peer HOST:PORT")
        found = Target(peer, swarm_key_file, data_dir).client().get("/v1/evaluations")
        rows = found if isinstance(found, list) else []
        click.echo(json.dumps(rows, indent=2) if as_json else _history(rows))
        return
    if checkpoint is not None:
        document = _play(checkpoint, options)
    else:
        with tempfile.TemporaryDirectory(prefix="p2pdrl-eval-") as folder:
            file = Path(folder) / "peer.safetensors"
            _fetch(str(peer), swarm_key_file, data_dir, file)
            document = _play(file, options)
    click.echo(json.dumps(document, indent=2) if as_json else _report(document), nl=as_json)


def _fetch(peer: str, key_file: str | None, data_dir: str | None, file: Path) -> None:
    client = Target(peer, key_file, data_dir).client(_DOWNLOAD_S)
    with file.open("wb") as out:
        client.download("/v1/checkpoint", out)


def _play(checkpoint: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Run the evaluator, which reports its errors by itself; its exit code becomes ours."""
    command = [sys.executable, "-m", "p2pdrl.workers.evaluator", str(checkpoint.absolute())]
    command += as_arguments(options)
    # Started with the program and our own arguments only: nothing goes through a shell.
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)  # noqa: S603
    if done.returncode:
        raise SystemExit(done.returncode if done.returncode > 0 else 1)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _history(rows: Sequence[Any]) -> str:
    """One line an evaluation, the newest last."""
    found = [row for row in rows if isinstance(row, Mapping)]
    if not found:
        return "no evaluation yet"
    lines = [f"{'steps':>14} {'mean':>9} {'std':>9} {'episodes':>8} {'length':>8} {'took':>8}  node"]
    for row in found:
        cells = f"{fixed(row.get('mean')):>9} {fixed(row.get('std')):>9} {grouped(row.get('episodes')):>8}"
        cells += f" {fixed(row.get('length')):>8} {duration(row.get('seconds')):>8}"
        lines.append(f"{grouped(row.get('env_steps')):>14} {cells}  {clean(row.get('name'), 64)}")
    return "\n".join(lines)


def _report(document: dict[str, Any]) -> str:
    """One line per way of acting."""
    version, steps = grouped(document.get("policy_version")), grouped(document.get("env_steps"))
    lines = [
        f"{clean(document.get('env'))}  policy version {version}, {steps} steps",
        f"{'':<8} {'mean':>9} {'std':>9} {'median':>9} {'min':>9} {'max':>9} {'length':>9}",
    ]
    for way in ("sampled", "greedy"):
        result = document.get(way) or {}
        cells = [result.get(key) for key in ("mean", "std", "median", "min", "max", "mean_length")]
        lines.append(f"{way:<8} " + " ".join(f"{fixed(cell):>9}" for cell in cells))
    if video := document.get("video"):
        lines.append(f"video    {clean(video['path'])} (return {fixed(video['return'])})")
    return "\n".join(lines) + "\n"
