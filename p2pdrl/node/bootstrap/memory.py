"""The swarm that a data folder remembers: its task and lineage, how far it was, when it is to end.

Kept in ``swarm.json``; the daemon writes it when the node begins to train, when a lineage or the stop
condition changes, and now and then. A node that starts while nobody else runs goes on with it, instead of
founding another swarm whose settings would compete with the old one's. Blocking: call it in threads.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from p2pdrl.config.task import StopConfig, TaskConfig
from p2pdrl.membership.records import BadRecordError, SwarmRecord
from p2pdrl.node import settings
from p2pdrl.node.parts import NodeParts
from p2pdrl.node.settings import StopSetting
from p2pdrl.node.state.atomic import storage_error, write_atomic

__all__ = ["RememberedSwarm", "SwarmMemory", "recall_stop"]

FORMAT = 1
MAX_BYTES = 131_072


class RememberedSwarm(msgspec.Struct, frozen=True):
    """What is remembered.

    Attributes:
        task: the swarm's, as this node trained it.
        lineage: of the state that it trained.
        env_steps: made within that lineage, as far as it knew.
        stop: the record of the stop condition, signature and all; None while it knew none.
        done: the condition was met.
        others: it had other members. A node that was always alone begins as its configuration says.
    """

    swarm_id: str
    task: TaskConfig
    lineage: str
    env_steps: int
    stop: SwarmRecord | None = None
    done: bool = False
    others: bool = False
    format: int = FORMAT


class SwarmMemory:
    """The file.

    Args:
        data_dir: the node's data folder.
        swarm_id: what is remembered of another swarm is passed over.
    """

    def __init__(self, data_dir: str | Path, swarm_id: str) -> None:
        self.path = Path(data_dir) / "swarm.json"
        self.swarm_id = swarm_id
        self._written: RememberedSwarm | None = None

    def write(self, memory: RememberedSwarm) -> None:
        """Replace the file, whole or not at all; one that says the same already stays.

        Raises:
            StorageError: the disk doesn't take it.
        """
        if memory == self._written:
            return
        try:
            write_atomic(self.path, msgspec.json.format(msgspec.json.encode(memory)) + b"\n")
        except OSError as error:
            raise storage_error("remember the swarm in", self.path, error) from error
        self._written = memory

    def read(self) -> RememberedSwarm | None:
        """Return what is remembered of this swarm; None when there is nothing, or it can't be read.

        A damaged file is as good as none, like one of another release: the checkpoint has a lineage too.
        """
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            found = msgspec.json.decode(data, type=RememberedSwarm)
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
            return None
        good = len(data) <= MAX_BYTES and found.format == FORMAT and found.swarm_id == self.swarm_id
        return found if good and found.lineage else None


def recall_stop(parts: NodeParts, memory: RememberedSwarm) -> None:
    """Take up the stop condition of the swarm that is resumed.

    Another one that the configuration gives counts only where the old one was met already, or with
    ``mode_from_config``: a node's file is as old as its swarm, and the swarm's record is newer.

    Args:
        parts: the node.
        memory: what is resumed.
    """
    if memory.stop is None:
        return
    wanted = parts.config.task.stop
    setting = settings.decode(memory.stop.value, StopSetting)
    try:
        parts.membership.recall(memory.stop)
    except BadRecordError as error:
        parts.events.emit("stop-unreadable", f"the swarm's stop condition is lost: {error}", level="warning")
        return
    if setting is None or wanted in (setting.stop, StopConfig()):
        return
    if memory.done or parts.config.node.mode_from_config:
        parts.membership.propose(settings.STOP, StopSetting(wanted, setting.founded_at))
        return
    parts.events.emit(
        "stop-recalled",
        "goes on to the swarm's own stop condition, not to this node's; --mode-from-config takes this node's",
        level="warning",
    )
