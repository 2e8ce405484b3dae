"""Finds and reads the checkpoint that a caller names: a file, a folder of a node's, or a running node."""

from __future__ import annotations

import io
from pathlib import Path

from p2pdrl.api.client import NodeClient
from p2pdrl.errors import CheckpointError, UsageError
from p2pdrl.tensors.checkpoint import Checkpoint, from_bytes, read_file

__all__ = ["checkpoint_to_start_from", "in_folder", "read_checkpoint"]

LAST, BEST = "last.safetensors", "best.safetensors"
DOWNLOAD_S = 60.0


def read_checkpoint(
    source: str | Path,
    *,
    best: bool = False,
    swarm_key_file: str | Path | None = None,
    data_dir: str | Path | None = None,
) -> Checkpoint:
    """Read the checkpoint that ``p2pdrl.load`` loads, with its arguments.

    Raises:
        CheckpointError: there is none, or it is damaged.
        DaemonUnreachableError: no node answers there.
    """
    path = Path(source).expanduser()
    if path.exists():
        file = in_folder(path, best=best) if path.is_dir() else path
        return read_file(file)
    if isinstance(source, Path) or ":" not in source or path.suffix == ".safetensors":
        raise CheckpointError(f"there is no checkpoint or folder {source}; a node is named HOST:PORT")
    client = NodeClient.at(
        str(source), swarm_key_file=swarm_key_file, data_dir=data_dir, timeout_s=DOWNLOAD_S
    )
    data = io.BytesIO()
    client.download("/v1/checkpoint", data)
    return from_bytes(data.getvalue())


def checkpoint_to_start_from(source: str, swarm_key_file: str | Path | None = None) -> Checkpoint:
    """Read what ``--from`` (``node.start_from``) names.

    Raises:
        UsageError: there is no checkpoint there, or it is damaged.
        DaemonUnreachableError: no node answers there.
    """
    try:
        return read_checkpoint(source, swarm_key_file=swarm_key_file)
    except CheckpointError as error:
        raise UsageError(f"--from {source}: {error}") from error


def in_folder(folder: Path, *, best: bool = False) -> Path:
    """Return the checkpoint in a node's data folder or a folder of checkpoints, of several tasks the newest.

    Raises:
        CheckpointError: there is none.
    """
    name = BEST if best else LAST
    found = [
        file for pattern in (name, f"*/{name}", f"checkpoints/*/{name}") for file in folder.glob(pattern)
    ]
    if not found:
        raise CheckpointError(
            f"there is no {name} in {folder}: is it a node's data folder, and has it saved yet?"
        )
    return max(found, key=lambda file: file.stat().st_mtime)
