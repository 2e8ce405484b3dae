"""Asks those whom a round waits for whether they are alive, so that a frozen member is soon left out.

A learner that takes its time and a process that was stopped both stay silent. The daemon of the first
answers at once, and has until the strategy's deadline; the second is doubted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import msgspec

from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, TransportError
from p2pdrl.group.retries import repeated
from p2pdrl.group.service import Group, GroupView
from p2pdrl.strategies.allreduce.messages import ROUTE, ReduceRequest
from p2pdrl.strategies.protocol import StrategyContext
from p2pdrl.transport.protocol import Answer

__all__ = ["ANSWER_S", "ASK_S", "LivenessCheck"]

ASK_S = 1.0
"""Silence after which a member is asked, at most, and then time and again."""
ANSWER_S = 0.75
"""How long it may take to say that it is alive."""
AGAIN_S = 0.15
"""It is asked again after so long, for a question may be lost."""


class LivenessCheck:
    """For one view.

    Args:
        context: what the node gives.
        group: told whom we doubt.
        view: the members.
    """

    def __init__(self, context: StrategyContext, group: Group, view: GroupView) -> None:
        self._transport, self._clock = context.transport, context.clock
        self._group, self._view = group, view
        self._number = 0
        self._silent: Callable[[], Iterable[str]] = tuple
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self, number: int, patience_s: float, silent: Callable[[], Iterable[str]]) -> None:
        """Watch over a round.

        Args:
            number: of the round, told to those who are asked.
            patience_s: nobody is asked before.
            silent: gives those whom the round waits for.
        """
        self._number, self._silent = number, silent
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(min(patience_s, ASK_S), self._begin_to_ask)

    async def end(self) -> None:
        """The round has ended."""
        if self._timer is not None:
            self._timer.cancel()
        task, self._task, self._timer = self._task, None, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()  # raises: it never ends by itself but by a bug

    def _begin_to_ask(self) -> None:
        self._task = asyncio.create_task(self._ask_all(), name="roll-call")

    async def _ask_all(self) -> None:
        while True:
            await asyncio.gather(asyncio.sleep(ASK_S), *map(self._ask, self._silent()))

    async def _ask(self, peer: str) -> None:
        ask = msgspec.msgpack.encode(ReduceRequest("alive", self._view.key, self._number))
        try:
            address = self._group.address(peer)

            async def call(left_s: float) -> Answer:
                return await self._transport.call(address, peer, ROUTE, ask, deadline_s=left_s)

            await repeated(call, again_s=AGAIN_S, deadline_s=ANSWER_S, clock=self._clock)
        except (PeerUnreachableError, PeerTimeoutError) as error:
            self._group.doubt(peer, str(error))
        except TransportError:
            return  # whoever refuses is alive
