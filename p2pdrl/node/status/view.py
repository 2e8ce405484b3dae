"""The node as its HTTP API sees it: implements `api.protocol.NodeView` over the parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from p2pdrl.api.protocol import EventSource
from p2pdrl.config.mode import strategy_from
from p2pdrl.errors import CheckpointError
from p2pdrl.node.events import EventLog
from p2pdrl.node.parts import NodeParts
from p2pdrl.node.record_follower import RecordFollower
from p2pdrl.node.state.checkpoints import Saving
from p2pdrl.node.status.meters import Meters
from p2pdrl.node.status.reporter import StatusReporter

__all__ = ["View"]

T = TypeVar("T")


class View:
    """What people and scripts may see and do.

    Args:
        name: of this node.
        node_id: its own id.
        token: the local token, 64 hex digits.
        swarm_key: the shared secret, or None.
        open_metrics: whether ``/metrics`` wants no authentication.
        events: the event log.
        leave: begins to leave.
    """

    def __init__(
        self,
        *,
        name: str,
        node_id: str,
        token: str,
        swarm_key: bytes | None,
        open_metrics: bool,
        data_dir: str,
        events: EventLog,
        leave: Callable[[str], None],
    ) -> None:
        self.name = name
        self.node_id = node_id
        self.token = token
        self.swarm_key = swarm_key
        self.open_metrics = open_metrics
        self.data_dir = data_dir
        self._events = events
        self._leave = leave
        self._parts: NodeParts | None = None
        self._figures: StatusReporter | None = None
        self._meters: Meters | None = None
        self._follower: RecordFollower | None = None

    def attach(
        self, parts: NodeParts, figures: StatusReporter, meters: Meters, follower: RecordFollower
    ) -> None:
        """Give the view what it shows, once it is there."""
        self._parts, self._figures, self._meters, self._follower = parts, figures, meters, follower

    def status(self) -> dict[str, object]:
        """The document of ``/v1/status``."""
        return _need(self._figures).status()

    def peers(self) -> list[dict[str, object]]:
        """The document of ``/v1/peers``."""
        return _need(self._figures).peers()

    def health(self) -> tuple[bool, list[str]]:
        """Whether this node is well, and why not."""
        return _need(self._figures).health()

    def ready(self) -> tuple[bool, list[str]]:
        """Whether this node trains, and why not."""
        return _need(self._figures).ready()

    def metrics(self) -> bytes:
        """The page of ``/metrics``."""
        return _need(self._meters).render()

    def events(self) -> EventSource:
        """The event log."""
        return self._events

    async def leave(self) -> None:
        """Begin to leave the swarm."""
        self._leave("asked to")

    async def pause(self, swarm: bool) -> None:
        """Hold this node's learner, or everybody's."""
        self._set_pause(paused=True, swarm=swarm)

    async def resume(self, swarm: bool) -> None:
        """Let this node's learner go on, or everybody's."""
        self._set_pause(paused=False, swarm=swarm)

    def mode(self) -> dict[str, object]:
        """The document of ``/v1/mode``."""
        return _need(self._figures).mode()

    def rounds(self) -> list[dict[str, object]]:
        """The document of ``/v1/rounds``."""
        return _need(self._figures).rounds()

    async def trace(self, seconds: float) -> dict[str, object]:
        """The timeline of this node's pipeline.

        Raises:
            ConfigError: this node is in none.
            CheckpointError: this node has no swarm yet.
        """
        return await _need(_need(self._parts).training).timelines.collect(seconds)

    async def set_mode(self, mode: str, sets: Sequence[str]) -> dict[str, object]:
        """Propose another mode to the swarm.

        Raises:
            ConfigError: it isn't one, or can't work.
            CheckpointError: this node has no swarm yet.
        """
        parts, follower = _need(self._parts), _need(self._follower)
        _need(parts.training)
        record = follower.propose_mode(strategy_from(mode, sets))
        return {"epoch": record.epoch, "proposer": record.proposer}

    async def checkpoint(self) -> str:
        """Write a checkpoint; return its path.

        Raises:
            CheckpointError: there is no state yet.
            StorageError: the disk doesn't take it.
        """
        return await self._saving().save()

    async def export(self) -> bytes:
        """The present state as a checkpoint file.

        Raises:
            CheckpointError: there is no state yet.
        """
        return await self._saving().export()

    def config(self) -> dict[str, object]:
        """The configuration in force; it holds no secrets, only where they are."""
        parts = _need(self._parts)
        document = msgspec.to_builtins(parts.config)
        if parts.training is not None:
            document["task"] = msgspec.to_builtins(parts.training.task)
        return {"task": document["task"], "node": document["node"]}

    def _set_pause(self, *, paused: bool, swarm: bool) -> None:
        training = _need(self._parts).training
        follower = _need(self._follower)
        if swarm:
            follower.pause(paused=paused)
        elif training is not None:
            follower.hold(training, paused=paused)

    def _saving(self) -> Saving:
        saving = _need(self._parts).saving
        if saving is None:
            raise CheckpointError("this node has no state yet; wait until it trains")
        return saving


def _need(thing: T | None) -> T:
    if thing is None:
        raise CheckpointError("this node is still starting")
    return thing
