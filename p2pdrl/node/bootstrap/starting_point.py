"""The checkpoint that a run begins from (``--from``): what is taken over, and what must fit.

Parameters and the moments of normalisers come along. Target networks begin as copies of the parameters;
optimizers, counts, schedules and the lineage begin anew.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from p2pdrl.api.checkpoints import checkpoint_to_start_from
from p2pdrl.config.node import NodeConfig
from p2pdrl.config.task import TaskConfig
from p2pdrl.errors import CheckpointError, ConfigError, P2PDRLError, WireError
from p2pdrl.node.accounting.progress_tracker import ProgressTracker
from p2pdrl.node.state.state_transfer import StateHead, TransferredState, params_hash
from p2pdrl.node.training import Training
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.checkpoint import Checkpoint
from p2pdrl.tensors.layout import Layout
from p2pdrl.tensors.moments import Moments
from p2pdrl.transport.codec import decode

__all__ = ["StartingPoint", "read_starting_point"]

MOST_TOLD = 4
"""Differences of a kind that an error names."""


@dataclass(frozen=True)
class StartingPoint:
    """A checkpoint that somebody named.

    Attributes:
        source: as it was named.
        checkpoint: None where it couldn't be read, and may not be needed.
    """

    source: str
    checkpoint: Checkpoint | None
    error: P2PDRLError | None = None

    def check(self, training: Training) -> tuple[Checkpoint, dict[str, Moments]]:
        """Return the checkpoint and what its normalisers had counted, if a training can begin with them.

        Raises:
            ConfigError: the checkpoint doesn't fit the task; the message names what differs.
            P2PDRLError: it couldn't be read.
        """
        if self.checkpoint is None:
            raise self.error or CheckpointError(f"--from {self.source} can't be read")
        checkpoint = self.checkpoint
        moments = _moments(checkpoint)
        problems = list(_problems(checkpoint, training.spec, training.supervisor.spaces, training.task))
        problems += _unlike_moments(moments, training.spec)
        if problems:
            told = "; ".join(problems[:MOST_TOLD])
            raise ConfigError(
                f"--from {self.source} doesn't fit this task: {told}{_advice(checkpoint, training.task)}"
            )
        return checkpoint, moments

    def check_if_needed(self, training: Training, folder: Path) -> None:
        """Check it, before anybody hears of the run, unless a folder has checkpoints of our own.

        Raises:
            P2PDRLError: as `check`.
        """
        if not any(folder.glob("*.safetensors")):
            self.check(training)

    def begin(self, training: Training, progress_tracker: ProgressTracker) -> TransferredState:
        """Return the state that a new lineage begins with, and count in what normalisers had seen.

        Raises:
            P2PDRLError: as `check`.
        """
        checkpoint, moments = self.check(training)
        wanted = {item.name.removesuffix(".mean") for item in training.spec.sidecar.items}
        progress_tracker.begin_moments({name: one for name, one in moments.items() if name in wanted})
        head = StateHead(
            policy_version=0,
            lineage="",
            lineage_steps=0,
            params_hash=params_hash(checkpoint.params),
            sidecar_hash="",
            params_bytes=checkpoint.params.nbytes,
            sidecar_bytes=0,
        )
        return TransferredState(head, checkpoint.params, None)

    @property
    def words(self) -> str:
        """What it is, for people."""
        meta = {} if self.checkpoint is None else self.checkpoint.meta
        task = meta.get("task")
        env = task.get("env", {}).get("id") if isinstance(task, dict) else None
        about = f" ({env}, {meta.get('env_steps', 0):,} steps)" if isinstance(env, str) else ""
        return f"{self.source}{about}"


def read_starting_point(node: NodeConfig) -> StartingPoint | None:
    """Read what ``node.start_from`` names; None where nothing is named.

    A node with checkpoints in its data folder may start although the file is no more: it goes on from them.

    Raises:
        UsageError: there is no checkpoint, or it is damaged.
        DaemonUnreachableError: no node answers there.
    """
    if node.start_from is None:
        return None
    try:
        return StartingPoint(node.start_from, checkpoint_to_start_from(node.start_from, node.swarm_key_file))
    except P2PDRLError as error:
        folder = None if node.data_dir is None else Path(node.data_dir).expanduser()
        if folder is None or not any(folder.glob("checkpoints/*/*.safetensors")):
            raise
        return StartingPoint(node.start_from, None, error)


def _moments(checkpoint: Checkpoint) -> dict[str, Moments]:
    """Return what the normalisers behind a checkpoint had counted, on all nodes together, by stream.

    Raises:
        ConfigError: that part of it is damaged.
    """
    found: dict[str, list[Moments]] = {}
    try:
        for item in checkpoint.sidecar_layout.items:
            name, _, part = item.name.rpartition(".")
            if item.rule == "moments" and part == "mean":
                count, mean, m2 = (checkpoint.sidecar[f"{name}.{one}"] for one in ("count", "mean", "m2"))
                own = Moments(float(count), np.array(mean, np.float64), np.array(m2, np.float64))
                found.setdefault(name, []).append(own)
        others = checkpoint.meta.get("others_moments")
        if isinstance(others, str):
            packed = msgspec.msgpack.decode(base64.b64decode(others), type=dict[str, bytes])
            for name, data in packed.items():
                found.setdefault(name, []).append(Moments.from_wire(decode(data, Any, "moments")))
        merged = {name: Moments.merge(parts) for name, parts in found.items()}
    except (KeyError, ValueError, WireError, msgspec.MsgspecError, P2PDRLError) as error:
        raise ConfigError(f"the moments of the checkpoint can't be read: {error}") from error
    return {name: one for name, one in merged.items() if one.count >= 2 and one.plausible}


def _problems(
    checkpoint: Checkpoint, spec: BoardSpec, spaces: Mapping[str, str], task: TaskConfig
) -> Iterator[str]:
    """What keeps a checkpoint's policy from being this task's."""
    theirs = checkpoint.meta.get("spaces")
    for name, here in spaces.items():
        known = theirs.get(name) if isinstance(theirs, dict) else None
        if known not in (None, here):
            yield f"an {name} is {known} there, {here} here"
    if checkpoint.layout != spec.layout:
        yield from _unlike_layouts(checkpoint.layout, spec.layout)
        return
    before = _task_of(checkpoint)
    if before is None:
        return
    for key, before_value, value in _unlike_tasks(before, task):
        if key.startswith("task.network.") or key == "task.env.normalize_observations":
            yield f"{key} is {before_value} there, {value} here"


def _unlike_layouts(there: Layout, here: Layout) -> Iterator[str]:
    theirs, ours = ({entry.name: entry.shape for entry in one.entries} for one in (there, here))
    for name in dict.fromkeys([*ours, *theirs]):
        if theirs.get(name) != ours.get(name):
            shapes = (_shape(one.get(name)) for one in (theirs, ours))
            yield "{} is {} there, {} here".format(name, *shapes)
    if theirs == ours:
        yield "its parameters are in another order"


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else " x ".join(map(str, shape)) or "a number"


def _unlike_moments(moments: Mapping[str, Moments], spec: BoardSpec) -> Iterator[str]:
    shapes = {item.name: item.shape for item in spec.sidecar.items}
    for name, one in moments.items():
        here = shapes.get(f"{name}.mean", one.mean.shape)
        if one.mean.shape != here:
            yield f"the normaliser of {name} has {_shape(one.mean.shape)} there, {_shape(here)} here"


def _task_of(checkpoint: Checkpoint) -> TaskConfig | None:
    """Return the task of a checkpoint; None where this release can't read it."""
    try:
        return msgspec.convert(checkpoint.meta.get("task"), TaskConfig)
    except msgspec.ValidationError:
        return None


def _unlike_tasks(before: TaskConfig, task: TaskConfig) -> Iterator[tuple[str, object, object]]:
    """Yield keys of environment, network and algorithm that differ, with both values."""
    there, here = _flat(msgspec.to_builtins(before)), _flat(msgspec.to_builtins(task))
    for key in dict.fromkeys([*here, *there]):
        matters = key.startswith(("task.env.", "task.network.")) or key == "task.algorithm.name"
        if matters and key != "task.env.num_envs" and there.get(key) != here.get(key):
            yield key, there.get(key), here.get(key)


def _flat(table: Mapping[str, Any], before: str = "task.") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return found


def _advice(checkpoint: Checkpoint, task: TaskConfig) -> str:
    """What to do about it."""
    before = _task_of(checkpoint)
    differing = [] if before is None else list(_unlike_tasks(before, task))
    if not differing:
        return ". Take a checkpoint of such a task"
    told = ", ".join(f"{key} = {there!r}" for key, there, _ in differing[: 2 * MOST_TOLD])
    return f". It was trained with {told}: set those that must be alike, or take another checkpoint"
