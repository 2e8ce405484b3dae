"""``p2pdrl eval``: plays episodes with a policy from a file, or with the one that a node holds now.

The playing happens in a child process (`p2pdrl.workers.evaluator`), so that the command line stays
free of torch; its progress goes to standard error as it comes.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2pdrl.api.checkpoints import in_folder
from p2pdrl.cli.formats import clean, duration, fixed, grouped
from p2pdrl.cli.options import (
    Target,
    as_arguments,
    json_option,
    policy_options,
    require_writable,
    wide_option,
)
from p2pdrl.config.environments import install_hint
from p2pdrl.errors import CheckpointError, UsageError
from p2pdrl.telemetry.progress import ProgressLine

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["evaluate", "history_table", "report_table"]

_DOWNLOAD_S = 60.0


@click.command("eval")
@policy_options
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
    "--history", is_flag=True, help="With --api: show the swarm's own evaluations so far; plays none."
)
@json_option
@wide_option
def evaluate(
    *,
    checkpoint: Path | None,
    peer: str | None,
    swarm_key_file: str | None,
    data_dir: str | None,
    as_json: bool,
    wide: bool,
    **options: Any,
) -> None:
    """Measure a checkpoint, or a running node's policy.

    CHECKPOINT is a .safetensors file, as `p2pdrl checkpoint` and nodes write them, or a node's data folder.
    With --api and --history: how the swarm has judged its policy so far.
    """  # fmt: skip
    from p2pdrl.cli.tables import show

    if options.pop("history"):
        if peer is None:
            raise click.UsageError("--history is a running node's: name that with --api HOST:PORT")
        found = Target(peer, swarm_key_file, data_dir).client().get("/v1/evaluations")
        rows = found if isinstance(found, list) else []
        if as_json:
            click.echo(json.dumps(rows, indent=2))
        else:
            show(history_table(rows), wide=wide)
        return
    if options["video"] is not None:
        _check_video(options["video"])
    if checkpoint is not None:
        document = _play(_file(checkpoint), options)
    else:
        with tempfile.TemporaryDirectory(prefix="p2pdrl-eval-") as folder:
            file = Path(folder) / "peer.safetensors"
            _fetch(str(peer), swarm_key_file, data_dir, file)
            document = _play(file, options)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        show(report_table(document))


def _file(checkpoint: Path) -> Path:
    """Return the file, of a node's data folder the newest.

    Raises:
        UsageError: there is none.
    """
    if checkpoint.is_dir():
        try:
            return in_folder(checkpoint)
        except CheckpointError as error:
            raise UsageError(str(error)) from error
    if not checkpoint.exists():
        raise UsageError(f"there is no checkpoint {checkpoint}: nodes keep theirs in DATA_DIR/checkpoints")
    return checkpoint


VIDEO_PACKAGES = ("moviepy", "imageio_ffmpeg")


def _check_video(path: Path) -> None:
    """See that a film can be made, before anything is played.

    Raises:
        UsageError: it can't.
    """
    if path.suffix != ".mp4":
        raise UsageError(f"--video {path}: a film is written as .mp4; name it {path.with_suffix('.mp4')}")
    missing = [name for name in VIDEO_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"--video needs {' and '.join(missing)}; run: {install_hint('video')}")
    require_writable("--video", path)


def _fetch(peer: str, key_file: str | None, data_dir: str | None, file: Path) -> None:
    client = Target(peer, key_file, data_dir).client(_DOWNLOAD_S)
    with file.open("wb") as out, ProgressLine() as progress:
        progress.part(f"fetching the policy of the node at {client.address}")
        client.download("/v1/checkpoint", out, progress.at)


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


def history_table(rows: Sequence[Any]) -> RenderableType:
    """One line an evaluation, the newest last."""
    from p2pdrl.cli.tables import Column, Listing

    found = [row for row in rows if isinstance(row, Mapping)]
    if not found:
        return "no evaluation yet"
    columns = [
        Column("steps", left=False),
        Column("mean", left=False),
        Column("std", left=False, rank=1),
        Column("episodes", left=False, rank=2),
        Column("length", left=False, rank=4),
        Column("took", left=False, rank=3),
        Column("node", least=20),
    ]
    cells = [
        (
            grouped(row.get("env_steps")),
            fixed(row.get("mean")),
            fixed(row.get("std")),
            grouped(row.get("episodes")),
            fixed(row.get("length")),
            duration(row.get("seconds")),
            clean(row.get("name"), 64),
        )
        for row in found
    ]
    return Listing(columns, cells)


def report_table(document: Mapping[str, Any]) -> RenderableType:
    """One line per way of acting."""
    from rich.console import Group

    from p2pdrl.cli.tables import Column, Listing

    version, steps = grouped(document.get("policy_version")), grouped(document.get("env_steps"))
    heads = ("mean", "std", "median", "min", "max", "length")
    rows = []
    for way in ("sampled", "greedy"):
        result = document.get(way) or {}
        rows.append([way, *(fixed(result.get(key)) for key in (*heads[:-1], "mean_length"))])
    parts: list[RenderableType] = [
        f"{clean(document.get('env'))}  policy version {version}, {steps} steps",
        Listing(
            [Column(""), *(Column(head, left=False, rank=rank) for rank, head in enumerate(heads))], rows
        ),
    ]
    if video := document.get("video"):
        parts.append(f"video  {clean(video['path'])} (return {fixed(video['return'])})")
    return Group(*parts)
