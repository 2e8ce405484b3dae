"""What the servers of both strategies share: one shard at work in one view.

A desk is opened once its shard is filled (or waits for its seed), and closed with the view.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from p2pdrl.clock import Clock
from p2pdrl.config.strategy_bases import Served
from p2pdrl.strategies.gathering import Contribution, Gathering
from p2pdrl.strategies.heavy import heavy
from p2pdrl.strategies.patience import Patience
from p2pdrl.strategies.servers.editions import Edition
from p2pdrl.strategies.servers.inbox import Inbox, Parcel
from p2pdrl.strategies.servers.messages import Given, Push
from p2pdrl.strategies.servers.shard import Shard
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.robust import combine
from p2pdrl.transport.protocol import Refusal

__all__ = ["Answered", "Attendance", "Desk", "DeskOptions", "Seeding", "Turns", "give"]

Answered = tuple[Given, Edition | None]
"""An answer; the edition is held for the caller, who releases it."""


@dataclass(frozen=True)
class DeskOptions:
    """What a desk needs of its node and view.

    Args:
        config: the strategy's options.
        members: of the view, in order.
        givers: those whose parameters make the seed.
        version: at which the shard begins.
        clock: time.
        learning_rate: of the next step.
        max_abs: greatest entry accepted.
        strike: notes that a peer sent something poisoned.
        doubt: asks for a view without a member.
        counts: of what happened, for status.
    """

    config: Served
    members: tuple[str, ...]
    givers: tuple[str, ...]
    version: int
    clock: Clock
    learning_rate: Callable[[], float]
    max_abs: float
    strike: Callable[[str, str], None]
    doubt: Callable[[str, str], None]
    counts: Counter[str]


class Turns:
    """Lets many wait for the next version."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._why: str | None = None

    def turn(self) -> None:
        """A version is out: wake all."""
        self._event.set()
        self._event = asyncio.Event()

    def close(self, why: str) -> None:
        """No more: all who wait, and whoever comes, are refused."""
        self._why = why
        self._event.set()

    async def next(self, limit_s: float) -> None:
        """Wait for the next turn.

        Raises:
            Refusal: it is closed (409), or none came in time (408).
        """
        try:
            async with asyncio.timeout(limit_s):
                if self._why is None:
                    await self._event.wait()
        except TimeoutError as error:
            raise Refusal(408, "no new version in time") from error
        if self._why is not None:
            raise Refusal(409, self._why)


class Attendance:
    """Who came to the present round.

    Args:
        members: who should come.
        doubt: asks for a view without a member.
    """

    def __init__(self, members: Sequence[str], doubt: Callable[[str, str], None]) -> None:
        self._members = members
        self._doubt = doubt
        self._came: set[tuple[int, str]] = set()

    def note(self, number: int, member: str) -> None:
        """``member`` came to round ``number``."""
        self._came.add((number, member))

    def came(self, number: int, member: str) -> bool:
        """Tell whether ``member`` came to round ``number``."""
        return (number, member) in self._came

    def clear(self) -> None:
        """A round is over."""
        self._came.clear()

    def doubt_absent(self, number: int, why: str) -> None:
        """Round ``number`` found too few: doubt those who didn't come. Only the first call does it."""
        absent = [member for member in self._members if not self.came(number, member)]
        if len(absent) < len(self._members):
            self.clear()
            for member in absent:
                self._doubt(member, why)


class Desk(Protocol):
    """One shard at work."""

    async def push(self, sender: str, head: Push, parcel: Parcel) -> Answered:
        """Take a push and answer it; raises `Refusal` or `TensorError`."""
        ...

    async def close(self, why: str) -> None:
        """Refuse everybody; afterwards nothing touches the shard."""
        ...


class Seeding:
    """The first round of a mode epoch: the shard becomes the mean of all givers' parameters.

    Everybody's parameters count the same, so what mode was before, the mean of all nodes stays.

    Args:
        shard: to fill.
        options: of the desk.
        inbox: reads the vectors.
        done: called once the shard is filled.
    """

    def __init__(self, shard: Shard, options: DeskOptions, inbox: Inbox, done: Callable[[], None]) -> None:
        self._shard = shard
        self._options = options
        self._inbox = inbox
        self._done = done
        self._attendance = Attendance(options.givers, options.doubt)
        self._gathering = Gathering(
            size=shard.span.size,
            members=options.givers,
            clock=options.clock,
            patience=Patience(options.config.deadline_s),
            reduce=self._reduce,
            first=0,
        )

    async def give(self, sender: str, parcel: Parcel) -> None:
        """Take a member's parameters and wait for the mean.

        Raises:
            Refusal: not in time (408): those who are missing are doubted.
            PoisonedVectorError: they are unusable.
        """

        async def fill(out: Float32Array) -> None:
            async with self._inbox.received(parcel, whole=True) as data:
                await self._inbox.decode(sender, data, out, whole=True)
            self._attendance.note(0, sender)

        try:
            await self._gathering.contribute(0, sender, 1.0, 0, fill)
        except Refusal as refusal:
            if refusal.status == 408:
                self._attendance.doubt_absent(0, "it gave no parameters to begin with")
            raise

    async def close(self, why: str) -> None:
        """Refuse everybody."""
        self._gathering.close(why)
        await self._gathering.closed()

    async def _reduce(self, contributions: Sequence[Contribution]) -> Float32Array:
        shard, vectors = self._shard, [one.vector for one in contributions]
        async with shard.lock:

            def work() -> Edition:
                combine(vectors, [1.0] * len(vectors), out=shard.parameters)
                return shard.write_edition()

            edition = await heavy(4 * shard.span.size * (len(vectors) + 1), work)
            shard.publish(edition, self._options.version)
        self._done()
        return edition.vector


def give(shard: Shard, base: int, given: Given, *, wants: bool) -> Answered:
    """Answer with the newest edition: as a difference where the worker holds the one before.

    Raises:
        Refusal: there is none yet (503).
    """
    edition = shard.edition
    if edition is None:
        raise Refusal(503, "this shard has no parameters yet")
    if not wants or base == edition.version:
        return _with(given, shard, edition.version, "nothing"), None
    if edition.delta is not None and base == edition.version - 1:
        return _with(given, shard, edition.version, "delta"), edition.hold()
    return _with(given, shard, edition.version, "whole"), edition.hold()


def _with(given: Given, shard: Shard, version: int, kind: Literal["whole", "delta", "nothing"]) -> Given:
    return msgspec.structs.replace(given, version=version, kind=kind, progress=shard.progress)
