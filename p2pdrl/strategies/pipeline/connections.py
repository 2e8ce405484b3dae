"""Calls and pipes between the ranks of a pipeline: tried again until the other is ready, or gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec

from p2pdrl.errors import P2PDRLError, PeerRefusedError, PeerTimeoutError, PeerUnreachableError, WireError
from p2pdrl.group.service import Group
from p2pdrl.group.view import ViewKey
from p2pdrl.pipeline.plan import StageSide
from p2pdrl.strategies.pipeline.messages import PipeHead
from p2pdrl.strategies.pipeline.port import PIPE_ROUTE, Pipes
from p2pdrl.strategies.protocol import StrategyContext
from p2pdrl.transport import codec
from p2pdrl.transport.pipe.ticket import Pipe, PipeReply
from p2pdrl.transport.protocol import Address, Refusal

__all__ = ["BLAMELESS", "RankConnections", "Unformed", "call_rank"]

PAUSE_S = (0.02, 0.25)
"""First and longest pause before a call, or the opening of a pipe, is tried again."""
BLAMELESS = 424
"""The peer couldn't do it for another one's sake."""
LATER = (409, 423, 503)
"""Refusals after which a call is made again: the view isn't in force there yet, or the generation before
hasn't ended."""

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


async def call_rank(
    context: StrategyContext,
    group: Group,
    peer: str,
    message: msgspec.Struct,
    answer: type[T],
    *,
    what: str,
    deadline_s: float,
) -> T:
    """Call another rank until there is an answer.

    Args:
        message: has a field ``call``.
        answer: what is expected.
        what: the same in a word, for people.
        deadline_s: seconds for all of it.

    Raises:
        Unformed: the peer is gone, refuses for good, or isn't ready in time.
    """
    clock, pause_s = context.clock, PAUSE_S[0]
    until_s = clock.monotonic() + deadline_s

    def unformed(error: Exception) -> Unformed:
        return Unformed(f"no {what} from {context.swarm.name_of(peer)}: {error}", peer)

    while True:
        left_s = max(0.0, until_s - clock.monotonic())
        try:
            reply = await group.call(peer, PIPE_ROUTE, message, deadline_s=left_s)
            decoded: T = codec.decode(reply.meta, answer, what)
            return decoded
        except PeerRefusedError as error:
            if error.status == BLAMELESS:
                raise Unformed(str(error)) from error
            if error.status not in LATER or clock.monotonic() >= until_s:
                raise unformed(error) from error
        except PeerUnreachableError as error:
            if not error.sent or not await group.lives(peer):
                raise unformed(error) from error
        except (PeerTimeoutError, WireError) as error:
            raise unformed(error) from error
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_S[1])


OPEN_S = 3.0
"""Deadline of one try to open a pipe."""
TRIES = 3
"""In a row that nobody answers, after which the next rank is given up."""
TAKEN = 410


class RankConnections:
    """The pipes of one rank in one formation: it opens that to the next rank and is given the previous one's.

    With an interleaved schedule the last rank's next is the first: the chain is a circle.

    Args:
        key: view in which the pipeline is formed.
        members: node ids by rank.
        circle: whether the last rank has the first for its next.
    """

    def __init__(
        self,
        pipes: Pipes,
        key: ViewKey,
        generation: int,
        members: tuple[str, ...],
        rank: int,
        *,
        circle: bool,
    ) -> None:
        self._pipes, self.key, self.generation, self._rank = pipes, key, generation, rank
        several = len(members) > 1
        last = rank == len(members) - 1
        self.next = members[(rank + 1) % len(members)] if several and (circle or not last) else None
        self.previous = members[rank - 1] if several and (circle or rank > 0) else None
        self._before = (rank - 1) % len(members)
        self._given: Pipe | None = None
        self._there = asyncio.Event()
        self._opening: asyncio.Task[Pipe] | None = None
        self._closed = False

    def accept(self, sender: str, head: PipeHead) -> PipeReply:
        """Take the previous rank's pipe.

        Raises:
            Refusal: 409, it isn't for this pipeline, or the sender isn't our previous rank; 410, the pipe
                that we were given first is in use, though its sender doesn't know it: nothing comes of this.
        """
        fits = (head.key, head.generation, head.rank) == (self.key, self.generation, self._before)
        fits = fits and sender == self.previous
        if fits and self._closed and self._given is not None:
            raise Refusal(TAKEN, f"the pipe of generation {head.generation} from there was taken before")
        if self._closed or not fits:
            raise Refusal(409, f"no pipe of generation {head.generation} is expected from there")
        return PipeReply(msgspec.msgpack.encode(head), self._take)

    async def complete(self, address: Callable[[str], Address], deadline_s: float) -> dict[StageSide, Pipe]:
        """Wait for both pipes, as far as this rank has any; they belong to the caller then.

        Args:
            address: where a member is; raises `PeerUnreachableError`.
            deadline_s: seconds for all of it.

        Raises:
            PeerUnreachableError: the next rank is gone.
            PeerTimeoutError: it took too long.
            WireError: the next rank answered nonsense.
        """
        found: dict[StageSide, Pipe] = {}
        try:
            async with asyncio.timeout(deadline_s):
                if self.next is not None:
                    self._opening = asyncio.create_task(self._open(self.next, address), name="pipe")
                    found["next"] = await self._opening
                if self.previous is not None:
                    await self._there.wait()
        except TimeoutError as error:
            side = "next" if self.next is not None and "next" not in found else "previous"
            raise PeerTimeoutError(f"no pipe with the {side} rank within {deadline_s:g} s") from error
        if self._given is not None:
            found["previous"] = self._given
        self._closed = True
        return found

    async def close(self) -> None:
        """Give up what isn't handed over; calling it after `complete` went well does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
            (outcome,) = await asyncio.gather(self._opening, return_exceptions=True)
            if isinstance(outcome, Pipe):
                outcome.close()
        if self._given is not None:
            self._given.close()

    def _take(self, pipe: Pipe | None) -> None:
        if pipe is None:
            return
        if self._closed:
            pipe.close()
            return
        if self._given is not None:  # the answer to the first was lost, and this one counts
            self._given.close()
        self._given = pipe
        self._there.set()

    async def _open(self, peer: str, address: Callable[[str], Address]) -> Pipe:
        """Try until the next rank has begun, too."""
        meta = msgspec.msgpack.encode(PipeHead(self.key, self.generation, self._rank))
        pause_s, silent = PAUSE_S[0], 0
        while True:
            try:
                return await self._pipes.open_pipe(address(peer), peer, PIPE_ROUTE, meta, deadline_s=OPEN_S)
            except PeerRefusedError as error:
                if error.status == TAKEN:
                    raise PeerUnreachableError(f"the answer to our first pipe was lost: {error}") from error
                if error.status not in LATER:
                    raise WireError(f"{peer} takes no pipe: {error}") from error
                silent = 0
            except (PeerUnreachableError, PeerTimeoutError):
                silent += 1
                if silent == TRIES:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S[1])
