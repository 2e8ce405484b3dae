"""What the HTTP API needs to know of a node, on one page.

`p2pdrl.node` implements `NodeView` with the live daemon; tests implement it with a few
constants. Every value a method returns consists of JSON types, so that routes stay thin.
"""

# ruff: noqa: N803 (names carry shape suffixes)
from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import numpy.typing as npt

from p2pdrl.membership.invites import Inviter
from p2pdrl.tensors.inference_slots import InferenceSpec, PolicyAnswer

__all__ = ["Event", "EventSource", "NodeView"]

Event = dict[str, Any]
"""``seq`` (int, grows by one), ``time`` (seconds since the Unix epoch), ``kind``, ``text``, and more."""


class EventSource(Protocol):
    """The node's log of what happened, newest last, bounded."""

    def since(self, seq: int) -> list[Event]:
        """Events whose ``seq`` is greater than ``seq`` and that are still remembered, oldest first."""

    def subscribe(self) -> AbstractAsyncContextManager[asyncio.Queue[Event]]:
        """A bounded queue that gets each new event; one that isn't emptied is dropped."""


class NodeView(Protocol):
    """One node, as its API shows and steers it. All methods are quick: none blocks the loop."""

    @property
    def name(self) -> str:
        """What people call the node; text from a config file, so never trusted as markup."""

    @property
    def node_id(self) -> str:
        """The node's own id."""

    @property
    def token(self) -> str:
        """The local token: 64 hex digits, also in ``<data_dir>/token``."""

    @property
    def swarm_keys(self) -> tuple[bytes, ...]:
        """The swarm's secrets that this node holds; several while the key is replaced.

        None for a keyless swarm on loopback, or for a node that was invited.
        """

    @property
    def keyed(self) -> bool:
        """Whether the swarm has a key, be it that this node holds it, or was invited."""

    @property
    def inviter(self) -> Inviter | None:
        """Makes and redeems invites; None where this node holds no swarm key."""

    @property
    def operator_keys(self) -> tuple[bytes, ...]:
        """Public keys of the swarm's operators; none where everybody who holds its key may command."""

    @property
    def open_metrics(self) -> bool:
        """Whether ``/metrics`` is answered without credentials even with a swarm key."""

    @property
    def data_dir(self) -> str:
        """Folder of the node's files; told to callers on this machine only."""

    def status(self) -> dict[str, object]:
        """The node's and the swarm's state in numbers."""

    def peers(self) -> list[dict[str, object]]:
        """Every known member, this node included (``"self": true``)."""

    def health(self) -> tuple[bool, list[str]]:
        """Whether the node is well, and if not why, in plain words."""

    def ready(self) -> tuple[bool, list[str]]:
        """Whether the node has joined and trains, and if not why."""

    def metrics(self) -> bytes:
        """All metrics in Prometheus' text format."""

    def events(self) -> EventSource:
        """The log of events."""

    async def leave(self) -> None:
        """Begin to leave the swarm and end the process; returns before that is done."""

    async def pause(self, *, paused: bool, swarm: bool) -> None:
        """Stop training, or go on, here or in the whole swarm; membership goes on."""

    async def checkpoint(self) -> str:
        """Write a checkpoint now and return its path.

        Raises:
            StorageError: it couldn't be written.
        """

    @property
    def max_act_rows(self) -> int:
        """Most observations of one call of `act`."""

    async def act_spec(self) -> InferenceSpec:
        """What the node's policy takes and gives; the first call may take as long as a process starts.

        Raises:
            ApiRefusal: 409 where there is no policy that could be asked; 503 while there is none.
        """

    async def act(self, obs_NX: npt.NDArray[Any], *, greedy: bool) -> PolicyAnswer:
        """Actions of the node's newest policy.

        Args:
            obs_NX: up to `max_act_rows` observations, as `act_spec` says.
            greedy: the likeliest actions; otherwise they are sampled.

        Raises:
            ApiRefusal: as `act_spec`; 503 also where too many wait, or the process that answers failed.
        """

    async def export(self) -> bytes:
        """Current parameters and sidecar as a safetensors file with JSON metadata."""

    def mode(self) -> dict[str, object]:
        """The swarm's mode: what is in force here, since when, and who follows it."""

    def records(self) -> dict[str, object]:
        """The swarm's records as they are signed, and who may command: what an operator's next is made from.

        ``swarm_id``, ``lineage``, ``operators`` (``name``, ``id``, ``public_key``, ``root``; empty where
        everybody may command) and ``records`` (``key``, ``epoch``, ``by``, ``operator``, ``at``, and
        ``record`` in base64).
        """

    async def submit(self, record: bytes) -> dict[str, object]:
        """Give the swarm a record that an operator has signed.

        Returns:
            ``epoch`` and ``proposer`` of the record.

        Raises:
            ApiRefusal: it isn't one, a newer one is there, or the swarm has no operators.
            ConfigError: it is a mode that can't work.
        """

    async def set_stop(self, sets: Sequence[str]) -> dict[str, object]:
        """Give the swarm another stop condition.

        Args:
            sets: ``KEY=VALUE`` of `p2pdrl.config.task.StopConfig`.

        Raises:
            ConfigError: there is no such condition, or it can't be met.
        """

    async def halt(self, reason: str) -> dict[str, object]:
        """End the training everywhere."""

    async def ban(self, node: str, *, reason: str, banned: bool) -> dict[str, object]:
        """Have every member refuse a node, by its id, or take it again.

        Raises:
            ConfigError: that can't be an id.
        """

    def evaluations(self) -> list[dict[str, object]]:
        """The swarm's evaluations, oldest first."""

    def history(self) -> dict[str, object]:
        """What all members have told over time, as columns."""

    def rounds(self) -> list[dict[str, object]]:
        """The last rounds of the strategy, oldest first."""

    async def trace(self, seconds: float) -> dict[str, object]:
        """What all ranks of this node's pipeline did in the last seconds, in Chrome's trace format.

        Raises:
            ConfigError: this node is in no pipeline.
        """

    async def set_mode(self, mode: str, sets: Sequence[str]) -> dict[str, object]:
        """Propose another mode to the swarm; returns before anybody follows it.

        Args:
            mode: as people type it (``gossip``).
            sets: see `p2pdrl.config.mode.strategy_from`.

        Returns:
            ``epoch`` and ``proposer`` of the record that says so.

        Raises:
            ConfigError: there is no such mode or option, or they can't work together.
        """

    async def set_roles(self, roles: Sequence[str]) -> None:
        """Have this node do something else for the swarm; returns before it does.

        Args:
            roles: as `p2pdrl.config.node.Role`.

        Raises:
            ConfigError: it can't have them.
        """

    async def dial_back(self, host: str, port: int, nonce: str) -> dict[str, object]:
        """Connect to a port of the machine that asks, and say ``nonce`` there (`transport.dial.dial_back`).

        Returns:
            ``connected``, the ``host`` that was dialled, and ``why`` not.

        Raises:
            ApiRefusal: 429, too many ask.
        """

    def config(self) -> dict[str, object]:
        """The resolved configuration without secrets."""
