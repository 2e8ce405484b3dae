"""Follows the swarm's key file while it is replaced (``p2pdrl key rotate``), without a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from p2pdrl.api.keyfile import SwarmKeys, read_swarm_keys
from p2pdrl.clock import Clock
from p2pdrl.errors import UsageError
from p2pdrl.membership.operators import Operator
from p2pdrl.node.events import EventLog

__all__ = ["KeyWatch"]

_LOOK_EVERY_S = 5.0


async def _in_a_thread(path: str) -> SwarmKeys:
    return await asyncio.to_thread(read_swarm_keys, path)


@dataclass
class KeyWatch:
    """Looks at the file every few seconds.

    Attributes:
        path: the file.
        keys: what it held at the start.
        use: ``(good keys, dropped)``: takes the keys; with ``dropped`` one that was good is good no more.
        read: reads it; raises ``UsageError``.
        use_operators: takes the root operators that the file names, when they change.
    """

    path: str
    keys: SwarmKeys
    use: Callable[[tuple[bytes, ...], bool], None]
    events: EventLog
    clock: Clock
    read: Callable[[str], Awaitable[SwarmKeys]] = _in_a_thread
    use_operators: Callable[[tuple[Operator, ...]], None] = lambda operators: None

    async def run(self) -> None:
        """Follow it until cancelled."""
        good, operators = self.keys.good(self.clock.wall()), self.keys.operators
        refused: set[bytes] = set()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                self.keys = await self._look()
            except UsageError as error:
                self.events.remind("key-unreadable", f"{error}; goes on with the keys that it has")
            if self.keys.operators != operators:
                operators = self.keys.operators
                self.use_operators(operators)
                names = ", ".join(operator.words for operator in operators)
                self.events.emit("operators-changed", f"root operators are {names} from now on")
            # A clock that goes back brings no key back.
            now = tuple(key for key in self.keys.good(self.clock.wall()) if key not in refused)
            if not now or now == good:
                continue
            try:
                self._change(good, now)
            except OSError as error:
                self.events.remind("key-unusable", f"can't take the swarm's new key yet: {error}")
                continue
            refused |= set(good) - set(now)
            good = now

    async def _look(self) -> SwarmKeys:
        found = await self.read(self.path)
        if found.swarm_id != self.keys.swarm_id:
            raise UsageError(f"{self.path} holds the key of another swarm ({found.swarm_id})")
        if self.keys.operators and not found.operators:
            raise UsageError(f"{self.path} names no operators any more, so all could command: is it whole?")
        return found

    def _change(self, before: tuple[bytes, ...], now: tuple[bytes, ...]) -> None:
        dropped = not set(before) <= set(now)
        self.use(now, dropped)
        words = []
        if set(now) - set(before):
            words.append("a new swarm key is taken, too")
        if now[0] != before[0]:
            words.append("this node shows the new swarm key")
        if dropped:
            words.append("the old swarm key is refused; connections are made anew")
        self.events.emit("key-changed", "; ".join(words), keys=len(now))
