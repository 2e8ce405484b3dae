"""``p2pdrl export``: a policy as a file that runs without p2pdrl.

The work is done in a child process (`p2pdrl.library.exporter`), so that the command line stays free of torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from p2pdrl.cli.formats import byte_size, clean, grouped
from p2pdrl.cli.options import as_arguments, json_option, policy_options, require_writable
from p2pdrl.errors import UsageError

__all__ = ["export"]


@click.command("export")
@policy_options
@click.option(
    "--format",
    "form",
    type=click.Choice(["onnx", "torch", "torchscript"]),
    help="Default: by the ending of FILE: .onnx, .pt2 (torch.export) or .pt (TorchScript).",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    required=True,
    help="Where to; FILE.json and FILE.md say what goes in and comes out.",
)
@click.option("--best", is_flag=True, help="Of a folder: the checkpoint that was evaluated best.")
@click.option(
    "--allow-import", is_flag=True, help="Import the module:name that its task names, which runs its code."
)
@json_option
def export(
    checkpoint: Path | None, peer: str | None, form: str | None, as_json: bool, **options: Any
) -> None:
    """Write a policy as a file that runs without p2pdrl.

    CHECKPOINT is a .safetensors file, or a node's data folder. The file is for ONNX or PyTorch, and what
    stands between an environment and the network is inside: normalisation, the scaling of images, action
    masks. ONNX wants the `onnx` extra.
    """
    if checkpoint is not None and not checkpoint.exists():
        raise UsageError(f"there is no checkpoint {checkpoint}: nodes keep theirs in DATA_DIR/checkpoints")
    require_writable("--out", options["out"])
    source = str(peer) if checkpoint is None else str(checkpoint.absolute())
    command = [sys.executable, "-m", "p2pdrl.library.exporter", source]
    command += as_arguments({"format": form, **options})
    # Started with the program and our own arguments only: nothing goes through a shell.
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)  # noqa: S603
    if done.returncode:
        raise SystemExit(done.returncode if done.returncode > 0 else 1)
    card: dict[str, Any] = json.loads(done.stdout)
    if as_json:
        click.echo(json.dumps(card, indent=2))
        return
    names = {key: ", ".join(clean(info["name"]) for info in card[key]) for key in ("inputs", "outputs")}
    click.echo(f"{clean(options['out'])}: {clean(card['format'])}, {byte_size(card['bytes'])}")
    click.echo(f"{clean(card['environment'])}, {grouped(card['env_steps'])} steps")
    click.echo(f"{names['inputs']} → {names['outputs']}")
