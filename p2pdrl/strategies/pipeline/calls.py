"""Calls between the peers of a pipeline: made again while the other isn't ready, given up when it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from p2pdrl.errors import P2PDRLError, PeerRefusedError, PeerTimeoutError, PeerUnreachableError, WireError
from p2pdrl.group.service import Group
from p2pdrl.strategies.pipeline.port import PIPE_ROUTE
from p2pdrl.strategies.protocol import StrategyContext
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Address

__all__ = ["BLAMELESS", "Peers", "Unformed"]

CALL_PAUSE_S = (0.02, 0.25)
"""First and longest pause before a call is made again."""
BLAMELESS = 424
"""The peer couldn't do it for another one's sake."""
LATER = (409, 423, 503)
"""Refusals after which it is: the view isn't in force there yet, the generation before hasn't ended."""

T = TypeVar("T", bound=msgspec.Struct)


class Unformed(P2PDRLError):  # noqa: N818 - an event, not a bug
    """A pipeline couldn't be formed.

    Attributes:
        suspect: node id of the one to blame; empty for nobody.
        for_s: seconds for which another try is of no use, as far as is known.
    """

    def __init__(self, why: str, suspect: str = "", for_s: float = 0.0) -> None:
        super().__init__(why)
        self.suspect, self.for_s = suspect, for_s


class Peers:
    """The other members of a view.

    Args:
        context: what the node gives.
        group: makes the calls.
    """

    def __init__(self, context: StrategyContext, group: Group) -> None:
        self._swarm, self._clock, self._group = context.swarm, context.clock, group
        self._known = context.swarm.alive()

    def address(self, peer: str) -> Address:
        """Where a member is, or was when the view began.

        Raises:
            PeerUnreachableError: nobody knows.
        """
        address = self._swarm.alive().get(peer, self._known.get(peer))
        if address is None:
            raise PeerUnreachableError(f"{peer} isn't known to be alive")
        return address

    async def call(
        self, peer: str, message: msgspec.Struct, answer: type[T], what: str, *, deadline_s: float
    ) -> T:
        """Call until there is an answer.

        Args:
            peer: whom.
            message: has a field ``call``.
            answer: what is expected.
            what: for messages.
            deadline_s: seconds for all of it.

        Raises:
            Unformed: the peer is gone, refuses for good, or isn't ready in time.
        """
        pause_s, until_s, encode = CALL_PAUSE_S[0], self._clock.monotonic() + deadline_s, _encoder(message)
        while True:
            left_s = until_s - self._clock.monotonic()
            try:
                reply = await self._group.calls.call(
                    self.address(peer), peer, PIPE_ROUTE, encode, deadline_s=max(left_s, 0.0)
                )
                decoded: T = codec.decode(reply.meta, answer, what)
                return decoded
            except PeerRefusedError as error:
                if error.status == BLAMELESS:
                    raise Unformed(str(error)) from error
                if error.status not in LATER or self._clock.monotonic() >= until_s:
                    raise self._unformed(peer, what, error) from error
            except PeerUnreachableError as error:
                if not error.sent or not await self.lives(peer):
                    raise self._unformed(peer, what, error) from error
            except (PeerTimeoutError, WireError) as error:
                raise self._unformed(peer, what, error) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, CALL_PAUSE_S[1])

    async def lives(self, peer: str) -> bool:
        """Whether a member answers anything."""
        return await self._group.lives(peer)

    async def silent(self, peers: tuple[str, ...]) -> list[str]:
        """Ask some members, all at once; return those that don't answer."""
        alive = await asyncio.gather(*map(self.lives, peers))
        return [peer for peer, lives in zip(peers, alive, strict=True) if not lives]

    def _unformed(self, peer: str, what: str, error: Exception) -> Unformed:
        return Unformed(f"no {what} from {self._swarm.name_of(peer)}: {error}", peer)


def _encoder(message: Any) -> Callable[[int], bytes]:
    return lambda number: msgspec.msgpack.encode(msgspec.structs.replace(message, call=number))
