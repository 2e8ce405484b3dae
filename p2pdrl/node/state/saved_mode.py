"""The swarm's mode as this node last followed it, kept on disk for the day on which all nodes were off.

Whoever starts while others run takes their records. When nobody runs, a founder would write the mode of its
configuration, under an epoch that every node remembering a later one overrules. So each node keeps the record
that it follows, signature and all, in ``modes/<task>.json`` of its data folder; the next start reads it and
checks it like one that a peer sends. Of several nodes' the greatest wins, as always.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from p2pdrl.config.mode import mode_words
from p2pdrl.config.strategy import StrategyConfig, mode_of
from p2pdrl.errors import StorageError
from p2pdrl.membership.records import BadRecordError, SwarmRecord
from p2pdrl.node import settings
from p2pdrl.node.bootstrap.joining import SwarmOrigin
from p2pdrl.node.parts import NodeParts
from p2pdrl.node.settings import ModeSetting
from p2pdrl.node.state.atomic import remove_leftovers, storage_error, write_atomic
from p2pdrl.node.state.checkpoints import Checkpoint

__all__ = ["SavedMode", "recall"]

FORMAT = 2
MAX_BYTES = 65536


class _Head(msgspec.Struct, frozen=True):
    """What every release can read."""

    format: int


class _SavedModeFile(msgspec.Struct, frozen=True):
    """The file."""

    format: int
    mode: str
    """For people; the record is what counts."""
    swarm_id: str
    record: SwarmRecord


class SavedMode:
    """The file of one task. Blocking: the daemon calls it in threads.

    Args:
        data_dir: the node's data folder.
        task_hash: of the task.
        swarm_id: a record of another swarm is passed over.
    """

    def __init__(self, data_dir: str | Path, task_hash: str, swarm_id: str) -> None:
        self.path = Path(data_dir) / "modes" / f"{task_hash[:12]}.json"
        self._swarm_id = swarm_id

    def write(self, record: SwarmRecord, strategy: StrategyConfig) -> None:
        """Replace the file, whole or not at all.

        Args:
            record: the mode record that is followed.
            strategy: what it says.

        Raises:
            StorageError: the disk doesn't take it; the previous one stays.
        """
        content = _SavedModeFile(FORMAT, mode_of(strategy), self._swarm_id, record)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_leftovers(self.path.parent)
            write_atomic(self.path, msgspec.json.format(msgspec.json.encode(content)) + b"\n")
        except OSError as error:
            raise storage_error("keep the mode in", self.path, error) from error

    def read(self) -> SwarmRecord | None:
        """Return the record; None when there is none of this swarm. Its signature isn't checked here.

        Raises:
            StorageError: the file can't be read, or isn't one of ours.
        """
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error("read the mode in", self.path, error) from error
        try:
            return self._decode(data)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise StorageError(f"the mode in {self.path} can't be read: {str(error)[:200]}") from error

    def _decode(self, data: bytes) -> SwarmRecord | None:
        if len(data) > MAX_BYTES:
            raise ValueError(f"it is longer than {MAX_BYTES} bytes")
        if (found := msgspec.json.decode(data, type=_Head).format) != FORMAT:
            raise ValueError(f"it has format {found}, this release reads {FORMAT}")
        content = msgspec.json.decode(data, type=_SavedModeFile)
        if content.swarm_id != self._swarm_id:
            return None
        readable = settings.decode(content.record.value, ModeSetting) is not None
        if content.record.key != settings.MODE or not readable:
            raise ValueError("it holds no mode of this release")
        return content.record


async def recall(
    parts: NodeParts, saved: SavedMode, origin: SwarmOrigin, checkpoint: Checkpoint | None
) -> None:
    """Take up the mode of an earlier run, unless somebody holds a newer one.

    A member that joins others recalls it only to go on with what it trained before: they may have trained
    something else since, from the beginning, under lower epochs.

    Args:
        parts: the node.
        saved: where the mode is kept.
        origin: whether this node founded or joined.
        checkpoint: of an earlier run, if any.
    """
    events, membership, info = parts.events, parts.membership, origin.info
    if info is not None and (checkpoint is None or checkpoint.meta.get("lineage") != info.lineage):
        return
    wanted = origin.task.strategy
    try:
        record = await asyncio.to_thread(saved.read)
        if record is None:
            return
        membership.recall(record)
    except (StorageError, BadRecordError) as error:
        begins = f"this node begins in that of its configuration, {mode_words(wanted)}"
        text = f"{error}; unless others hold a mode, {begins}"
        events.emit("mode-unreadable", text, level="warning")
        return
    setting = settings.decode(record.value, ModeSetting)
    if info is not None or setting is None or setting.strategy == wanted:
        return
    if parts.config.node.mode_from_config:
        membership.propose(settings.MODE, ModeSetting.of(wanted))
        return
    last, own = mode_words(setting.strategy), mode_words(wanted)
    text = (
        f"goes on in the swarm's last mode, {last}; --mode-from-config begins in the configuration's, {own}"
    )
    events.emit("mode-recalled", text, epoch=record.epoch, proposer=record.proposer)
