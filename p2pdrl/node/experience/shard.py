"""This node's shard of the swarm's replay memory, as other nodes use it.

Learners ask for rows and send TD errors back; the process that holds the rows (`workers.replay_shard`) draws
into slots of shared memory, from which the answer is sent. Whoever asks for more than there are slots for is
refused at once (423).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import numpy as np

from p2pdrl.errors import WireError, WorkerError
from p2pdrl.node.children.draws import DrawPort
from p2pdrl.node.experience.messages import AskRows, ExperienceRoute, RowsDrawn, SetPriorities
from p2pdrl.replay.shards import PRIORITIES
from p2pdrl.strategies.protocol import SwarmView
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Incoming, Refusal, Reply
from p2pdrl.workers.protocol import Prioritize

__all__ = ["ReplayServer"]

DEADLINE_S = 3.0
"""In which the shard's process draws."""


class ReplayServer(ExperienceRoute):
    """Serves `messages.REPLAY_ROUTE`.

    Args:
        port: the process that holds the rows.
        boot: of this node.
    """

    def __init__(self, *, task_hash: str, boot: int, port: DrawPort, strikes: SwarmView) -> None:
        super().__init__(strikes)
        self._task_hash = task_hash
        self._boot = boot
        self._port = port
        self.rows = 0
        """That were given."""
        self.priorities = 0
        """Rows whose TD errors came."""

    async def _answer(self, incoming: Incoming) -> Reply:
        """Serve a call.

        Raises:
            Refusal: malformed (400), another task (409), numbers or a length that can't
                be (422), no slot free (423), the process isn't there or too slow (503).
        """
        try:
            message: AskRows | SetPriorities = codec.decode(
                incoming.meta, AskRows | SetPriorities, "replay's request"
            )
        except WireError as error:
            raise Refusal(400, str(error)) from error
        if message.task_hash != self._task_hash:
            raise Refusal(409, "our task is another one")
        if isinstance(message, AskRows):
            return await self._draw(message.rows)
        return await self._prioritize(incoming, message)

    async def _draw(self, rows: int) -> Reply:
        port = self._port
        if rows > port.most_rows:
            raise Refusal(422, f"{port.most_rows} rows are drawn at once at most, not {rows}")
        slot = port.take_slot() if rows else 0
        if slot is None:
            raise Refusal(423, "no room for another sample yet")

        def release(_sent: bool = True) -> None:
            if rows:
                port.free_slot(slot)

        try:
            async with asyncio.timeout(DEADLINE_S):
                drawn = await port.draw(slot, rows)
        except (WorkerError, TimeoutError) as error:
            # a slot that a slow process may still write to is free once that has answered, or is gone
            port.abandon(slot) if rows else None
            raise Refusal(503, "the shard of the replay memory doesn't answer") from error
        except BaseException:
            port.abandon(slot) if rows else None
            raise
        self.rows += drawn.rows
        meta = msgspec.msgpack.encode(
            RowsDrawn(self._boot, drawn.rows, drawn.mass, drawn.count, drawn.appended, drawn.full)
        )
        if not drawn.rows:
            release()
            return Reply(meta)
        return Reply(meta, vector=port.content(slot, rows), on_end=release)

    async def _prioritize(self, incoming: Incoming, sent: SetPriorities) -> Reply:
        nbytes = PRIORITIES.content_nbytes(sent.rows)
        if incoming.vector_nbytes != nbytes or sent.rows > self._port.most_rows:
            why = f"{incoming.vector_nbytes} bytes for the priorities of {sent.rows} rows"
            self._strikes.strike(incoming.sender, why)
            raise Refusal(422, why)
        content = bytearray(nbytes)
        await incoming.read_vector_into(memoryview(content))
        if sent.boot != self._boot:
            return Reply(b"")  # those rows are gone
        arrays = PRIORITIES.views(memoryview(content), sent.rows)
        indices = arrays["indices"]
        good = np.isfinite(arrays["errors"]).all() and indices.min() >= 0 and arrays["serials"].min() >= 0
        if not good or indices.max() >= self._port.places:
            why = "priorities that no row can have"
            self._strikes.strike(incoming.sender, why)
            raise Refusal(422, why)
        self.priorities += sent.rows
        self._port.tell(Prioritize(sent.rows, bytes(content)))
        return Reply(b"")

    def figures(self, metrics: Callable[[str], float]) -> dict[str, object]:
        """What this shard holds and gave; JSON types."""
        return {
            "rows": int(metrics("replay_rows")),
            "mass": metrics("replay_mass"),
            "appended": int(metrics("replay_appended")),
            "given": self.rows,
            "priorities": self.priorities,
            "refused": {str(status): count for status, count in self.refused.items()},
        }
