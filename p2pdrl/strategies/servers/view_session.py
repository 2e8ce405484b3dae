"""One group view as a node of a server strategy acts in it: the plan, and our shard's server once open."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from p2pdrl.group.service import Group, GroupView
from p2pdrl.strategies.servers.shard_plan import ServerNote, ShardPlan
from p2pdrl.strategies.servers.shard_server import ShardServer
from p2pdrl.transport.protocol import Refusal

__all__ = ["ViewSession"]


class ViewSession:
    """A view in force.

    Args:
        notes: the members', read.
    """

    def __init__(
        self, view: GroupView, plan: ShardPlan, notes: Mapping[str, ServerNote], me: str, group: Group
    ) -> None:
        self.key, self.members = view.key, view.members
        self.plan, self.notes = plan, notes
        self.me, self.group = me, group
        self.index = plan.shard_of(me)
        """Shard that we serve; None for none."""
        self._server: ShardServer | None = None
        self._opened = asyncio.Event()
        self._why: str | None = None

    def open(self, server: ShardServer) -> None:
        """Let our shard be called."""
        self._server = server
        self._opened.set()

    async def server(self, limit_s: float) -> ShardServer:
        """Return our shard's server once it is open.

        Raises:
            Refusal: we serve nothing (409), the view has ended (409), or it isn't open in time (503).
        """
        if self.index is None:
            raise Refusal(409, "this node serves no shard")
        try:
            async with asyncio.timeout(limit_s):
                await self._opened.wait()
        except TimeoutError as error:
            raise Refusal(503, "this node's shard isn't filled yet") from error
        if self._why is not None or self._server is None:
            raise Refusal(409, self._why or "this node serves no shard")
        return self._server

    async def close(self, why: str) -> None:
        """Refuse everybody, at the view's end; afterwards nothing touches the shard."""
        self._why = why
        self._opened.set()
        if self._server is not None:
            await self._server.close(why)
