"""A member of a `strom` swarm: its numbers and its log, changed together, one change at a time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from p2pdrl.config.strategy import StromConfig
from p2pdrl.ids import new_exchange_id
from p2pdrl.strategies.arithmetic import Arithmetic
from p2pdrl.strategies.protocol import Context
from p2pdrl.strategies.relay.log import GapError, History, Origin, Run, StromLog
from p2pdrl.strategies.relay.state import StromState
from p2pdrl.tensors.compression_threshold import entries_in
from p2pdrl.tensors.layout import Float32Array

__all__ = ["Absorbed", "Given", "StromMember"]

LEAST_WINDOW_BYTES = 1 << 20
MOST_AT_ONCE = 4
"""Messages of one look: entries that moved by several τ take several."""


class Absorbed(NamedTuple):
    """What came of a push.

    Args:
        messages: that were new.
        changed: Euclidean norm of what they added, as if no entry occurred twice.
        gap: messages before the sender's oldest one are missing here.
    """

    messages: int
    changed: float
    gap: bool


class Given(NamedTuple):
    """A base.

    Args:
        history: whose.
        have: what it contains.
        base: D float32.
    """

    history: History
    have: Mapping[Origin, int]
    base: Float32Array


class StromMember:
    """One node's part.

    Args:
        config: the strategy's options.
        context: what the node gives.
        heavy: runs arithmetic.
        window_bytes: messages kept of each origin; None: as many as are cheaper than a base.

    Attributes:
        in_step: whether our base is that of our history; else we need a member's.
        sent_bytes: length of all messages of ours.
        messages: of ours.
        entries: in them.
    """

    def __init__(
        self, config: StromConfig, context: Context, heavy: Arithmetic, window_bytes: int | None = None
    ) -> None:
        self._board, self._heavy = context.learner.board, heavy
        self.state = StromState(
            self._board,
            context.size,
            config.tau,
            max_abs=context.max_abs,
            max_distance=config.max_distance,
        )
        if window_bytes is None:
            window_bytes = max(8 * context.size, LEAST_WINDOW_BYTES)  # more than that is dearer than a base
        self.log = StromLog(context.swarm.node_id, new_exchange_id(), window_bytes)
        self.in_step = False
        self.sent_bytes = self.messages = self.entries = 0
        self._lock = asyncio.Lock()

    async def contribute(self, *, tell: bool, fold: bool = False) -> bool:
        """Look at the learner's progress, and make a message of what has grown beyond τ.

        Args:
            tell: whether a message is wanted; else the residual grows.
            fold: nobody has been there for a while, so the residual belongs to our base.

        Returns:
            Whether there is a new message.

        Raises:
            PoisonedVectorError: our own vector is unusable.
        """
        async with self._lock:
            if not await self._look() or not self.in_step:
                return False
            if fold:
                self.state.fold()
                if self.log.history is None or self.log.history.era:
                    self.log.found(era=0)
                return False
            before = self.messages
            while tell and self.messages < before + MOST_AT_ONCE:
                message, more = await self._heavy.run(self.state.contribute)
                if message:
                    self.log.append(message)
                    self.messages += 1
                    self.entries += self.state.entries
                    self.sent_bytes += len(message)
                if not more:
                    break
            return self.messages > before

    async def absorb(self, runs: Sequence[Run], policy_version: int, *, relay: bool) -> Absorbed:
        """Add what is new to our parameters.

        Raises:
            WireError: a message is malformed; nothing was added.
        """
        async with self._lock:
            good: list[Run] = []
            new: list[bytes] = []
            gap = False
            for run in runs:
                try:
                    fresh = self.log.new_in(run)
                except GapError:
                    gap = True
                    continue
                if fresh:
                    good.append(run)
                    new += fresh
            if not new or not self.in_step:
                return Absorbed(0, 0.0, gap)
            if not await self._heavy.run(lambda: self.state.absorb(new, policy_version)):
                self.in_step = False
                return Absorbed(0, 0.0, gap)
            for run in good:
                self.log.added(run, relay=relay)
            entries = sum(entries_in(memoryview(message)) for message in new)
            return Absorbed(len(new), self.state.tau * math.sqrt(entries), gap)

    async def give(self) -> Given | None:
        """Our base, for somebody who needs one; None when we need one ourselves.

        Raises:
            PoisonedVectorError: our own vector is unusable.
        """
        async with self._lock:
            if not await self._look() or not self.in_step or self.log.history is None:
                return None
            if self.log.history.era == 0:
                self.log.history = History(1, self.log.history.founder)
            base = await self._heavy.run(self.state.base)
            return Given(self.log.history, dict(self.log.have), base)

    async def take(self, given: Given, policy_version: int) -> bool:
        """Have a member's base, and what we did ourselves beyond it.

        Returns:
            False when our learner's vector was replaced meanwhile.

        Raises:
            PoisonedVectorError: the base is unusable, or our own vector is.
            WireError: it claims what can't be.
        """
        async with self._lock:
            await self._look()
            await self._heavy.run(lambda: self.state.check(given.base))
            again = self.log.take(given.history, given.have, new_exchange_id())
            done = await self._heavy.run(lambda: self.state.rebase(given.base, again, policy_version))
            self.in_step = done
            return done

    async def found(self, *, era: int) -> None:
        """Begin a history with what we have.

        Raises:
            PoisonedVectorError: our own vector is unusable.
        """
        async with self._lock:
            await self._look()
            self.log.found(era=era)
            self.in_step = True

    async def _look(self) -> bool:
        same = await self._heavy.run(self.state.look)
        if not same:
            self.in_step = False
        return same
