"""What a data folder remembers of its swarm, so that the swarm goes on after all its nodes were off.

``swarm.json`` holds task, lineage, how far it was, and its records: when it is to end, who may command it,
who is banned. A node that starts while nobody else
runs resumes it, instead of founding another swarm whose settings would compete with the old one's.
``modes/<task>.json`` holds the mode record that the node follows: a founder would write the mode of its
configuration, under an epoch that every node remembering a later one overrules. Both keep records with their
signatures, which are checked when they are read like those that a peer sends; of several nodes' the greatest
wins, as always.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from p2pdrl.atomic import remove_leftovers, storage_error, write_atomic
from p2pdrl.config.mode import mode_words
from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.config.task import StopConfig, TaskConfig
from p2pdrl.errors import StorageError
from p2pdrl.membership.records import BadRecordError, SwarmRecord
from p2pdrl.node import settings
from p2pdrl.node.background import set_within
from p2pdrl.node.bootstrap.datadir import SWARM_FILE
from p2pdrl.node.bootstrap.joining import SwarmOrigin
from p2pdrl.node.context import NodeContext
from p2pdrl.node.settings import ModeSetting, StopSetting
from p2pdrl.node.state.checkpoints import Checkpoint
from p2pdrl.node.training import Training

__all__ = [
    "RememberedSwarm",
    "SavedMode",
    "SwarmMemory",
    "recall_members",
    "recall_mode",
    "recall_stop",
]

FORMAT = 2
MODE_FORMAT = 3
MAX_BYTES = 131_072
MAX_MODE_BYTES = 65_536
WRITE_EVERY_S = 15.0


class RememberedSwarm(msgspec.Struct, frozen=True):
    """``swarm.json``."""

    swarm_id: str
    task: TaskConfig
    lineage: str
    env_steps: int
    """Made within that lineage, as far as this node knew."""
    records: tuple[SwarmRecord, ...] = ()
    """As far as the node knew any."""
    done: bool = False
    """The stop condition was met."""
    others: bool = False
    """It had other members. A node that was always alone begins as its configuration says."""
    format: int = FORMAT

    def record(self, key: str) -> SwarmRecord | None:
        """The record under ``key``."""
        return next((record for record in self.records if record.key == key), None)

    @property
    def settled(self) -> bool:
        """Whether mode and stop condition are known."""
        return None not in (self.record(settings.MODE), self.record(settings.STOP))


class SwarmMemory:
    """Keeps ``swarm.json`` up to date: when training begins, when something changes, now and then."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._path = Path(context.data_dir) / SWARM_FILE
        self._written: RememberedSwarm | None = None
        self._failed = False
        self._changed = asyncio.Event()
        self.had_others = False
        """Whether this swarm had other members, in this run or, when it is resumed, before."""

    async def read(self) -> RememberedSwarm | None:
        """Return what is remembered of this swarm; None when there is nothing, or it can't be read.

        A damaged file is as good as none, like one of another release: the checkpoint has a lineage too.
        """
        return await asyncio.to_thread(self._read)

    def changed(self) -> None:
        """Write soon: a member joined, a record or the lineage changed."""
        self._changed.set()

    async def run(self, training: Training) -> None:
        """Write for ever."""
        while True:
            await self.write(training)
            self._changed.clear()
            await set_within(self._changed, WRITE_EVERY_S)

    async def write(self, training: Training) -> None:
        """Replace the file, whole or not at all; a disk that doesn't take it is told of once."""
        if not training.lineage:
            return
        membership = self._context.membership
        self.had_others = self.had_others or len(membership.members()) > 1
        memory = RememberedSwarm(
            self._context.swarm_id,
            training.task,
            training.lineage,
            training.lineage_steps,
            membership.records.all(),
            done=self._context.halted is not None,
            others=self.had_others,
        )
        if memory == self._written:
            return
        try:
            await asyncio.to_thread(write_atomic, self._path, _json(memory))
        except OSError as error:
            if not self._failed:
                told = storage_error("remember the swarm in", self._path, error)
                text = f"{told}; after a restart this node may not know the swarm"
                self._context.events.emit("memory-unsaved", text, level="warning")
            self._failed = True
        else:
            self._failed = False
            self._written = memory

    def _read(self) -> RememberedSwarm | None:
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            found = msgspec.json.decode(data, type=RememberedSwarm)
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
            return None
        good = len(data) <= MAX_BYTES and found.format == FORMAT and found.swarm_id == self._context.swarm_id
        return found if good and found.lineage else None


def recall_members(context: NodeContext, memory: RememberedSwarm | None) -> RememberedSwarm | None:
    """Recall who may command and who is banned, whatever comes of the swarm otherwise; return ``memory``.

    Whoever takes us in may be one of those, and would tell us of neither.
    """
    for key in (settings.OPERATORS, settings.BANS):
        if memory is not None and (record := memory.record(key)) is not None:
            _recall(context, record)
    return memory


def _recall_commands(context: NodeContext, memory: RememberedSwarm) -> None:
    """Recall what operators have said of the swarm that is resumed, so that nobody can say it again."""
    records = context.membership.records
    if not records.roots:
        return
    for key in (settings.MODE, settings.PAUSE):
        if (record := memory.record(key)) is not None:
            _recall(context, record)
    if (halt := memory.record(settings.HALT)) is not None:
        records.pass_over(settings.HALT, halt.epoch)


def _recall(context: NodeContext, record: SwarmRecord) -> None:
    try:
        context.membership.recall(record)
    except BadRecordError as error:
        text = f"the swarm's record {record.key!r} of an earlier run counts no more: {error}"
        context.events.emit("record-lost", text, level="warning")


def recall_stop(context: NodeContext, memory: RememberedSwarm) -> None:
    """Recall the stop condition of the swarm that is resumed, and what operators have commanded beside it.

    Another one that the configuration gives counts only where the old one was met already, or with
    ``mode_from_config``: a node's file is as old as its swarm, and the swarm's record is newer.
    """
    _recall_commands(context, memory)
    record = memory.record(settings.STOP)
    if record is None:
        return
    wanted = context.config.task.stop
    setting = settings.decode(record.value, StopSetting)
    try:
        context.membership.recall(record)
    except BadRecordError as error:
        text = f"the swarm's stop condition is lost: {error}"
        context.events.emit("stop-unreadable", text, level="warning")
        return
    if setting is None or wanted in (setting.stop, StopConfig()):
        return
    if context.membership.records.roots:
        text = "goes on to the swarm's own stop condition, not to this node's; operators change it"
        context.events.emit("stop-recalled", f"{text} (`p2pdrl stop set`)", level="warning")
        return
    if memory.done or context.config.node.mode_from_config:
        context.membership.propose(settings.STOP, StopSetting(wanted, setting.founded_at))
        return
    context.events.emit(
        "stop-recalled",
        "goes on to the swarm's own stop condition, not to this node's; --mode-from-config takes this node's",
        level="warning",
    )


class _Head(msgspec.Struct, frozen=True):
    """What every release can read."""

    format: int


class _SavedModeFile(msgspec.Struct, frozen=True):
    """``modes/<task>.json``."""

    format: int
    mode: str
    """For people; the record is what counts."""
    swarm_id: str
    record: SwarmRecord


class SavedMode:
    """The mode record that this node follows, in the file of one task. Blocking: call it in threads."""

    def __init__(self, data_dir: str | Path, task_hash: str, swarm_id: str) -> None:
        self.path = Path(data_dir) / "modes" / f"{task_hash[:12]}.json"
        self._swarm_id = swarm_id

    def write(self, record: SwarmRecord, strategy: StrategyConfig) -> None:
        """Replace the file, whole or not at all.

        Raises:
            StorageError: the disk doesn't take it; the previous one stays.
        """
        content = _SavedModeFile(MODE_FORMAT, strategy.mode, self._swarm_id, record)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_leftovers(self.path.parent)
            write_atomic(self.path, _json(content))
        except OSError as error:
            raise storage_error("keep the mode in", self.path, error) from error

    def read(self) -> SwarmRecord | None:
        """Return the record; None when there is none of this swarm. Its signature isn't checked here.

        Raises:
            StorageError: the file can't be read, or isn't one of ours.
        """
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_MODE_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error("read the mode in", self.path, error) from error
        try:
            return self._decode(data)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise StorageError(f"the mode in {self.path} can't be read: {str(error)[:200]}") from error

    def _decode(self, data: bytes) -> SwarmRecord | None:
        if len(data) > MAX_MODE_BYTES:
            raise ValueError(f"it is longer than {MAX_MODE_BYTES} bytes")
        if (found := msgspec.json.decode(data, type=_Head).format) != MODE_FORMAT:
            raise ValueError(f"it has format {found}, this release reads {MODE_FORMAT}")
        content = msgspec.json.decode(data, type=_SavedModeFile)
        if content.swarm_id != self._swarm_id:
            return None
        readable = settings.decode(content.record.value, ModeSetting) is not None
        if content.record.key != settings.MODE or not readable:
            raise ValueError("it holds no mode of this release")
        return content.record


def _json(content: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content)) + b"\n"


async def recall_mode(
    context: NodeContext, saved: SavedMode, origin: SwarmOrigin, checkpoint: Checkpoint | None
) -> None:
    """Recall the mode of an earlier run, unless somebody holds a newer one.

    A member that joins others recalls it only to go on with what it trained before: they may have trained
    something else since, from the beginning, under lower epochs.
    """
    events, membership, info = context.events, context.membership, origin.info
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
    if membership.records.get(settings.MODE) != record:
        return  # of another lineage, or a newer one is known
    if context.config.node.mode_from_config and not membership.records.roots:
        membership.propose(settings.MODE, ModeSetting.of(wanted))
        return
    last, own = mode_words(setting.strategy), mode_words(wanted)
    how = f"--mode-from-config begins in the configuration's, {own}"
    if membership.records.roots:
        how = f"an operator can change it to the configuration's, {own} (`p2pdrl mode set`)"
    text = f"goes on in the swarm's last mode, {last}; {how}"
    events.emit("mode-recalled", text, epoch=record.epoch, proposer=record.proposer)
