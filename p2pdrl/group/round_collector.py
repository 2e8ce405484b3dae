"""Rounds of contributions: everybody's come in, one result goes out to all; and whose updates end with them.

Exact averaging has a collector for the piece that each member owns, a parameter server one for its shard. It
knows nothing of networks: a handler calls `RoundCollector.contribute` with a function that reads the sender's
vector, and gets the round's result once the round has closed.

**Synchronous updates.** An update is one long collection of experience and then one or several gradients,
each of which is a round. Learners that begin at different times would be at different places of their updates
for ever: while one collects, all others wait in mid-update for its next gradient, so a cycle takes as long as
all collections one after another. So when the *leader's* update ends, everybody's does, by a shorter one
where need be. The leader of a round is the member with the smallest id among those that gave a gradient to
it; who computes the round's result says in it whether the leader's update ends, so that all conclude the
same.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from p2pdrl.clock import Clock
from p2pdrl.group.adaptive_timeout import AdaptiveTimeout
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.transport.protocol import Refusal

__all__ = ["CollectedRound", "Contribution", "RoundCollector", "UpdatePosition", "leader_ends"]


class UpdatePosition(NamedTuple):
    """Where a member's update is in one round.

    Args:
        weight: of its gradient; 0 when it gave none.
        left: gradients of its update that come after this one.
    """

    member: str
    weight: float
    left: int


def leader_ends(places: Iterable[UpdatePosition]) -> bool:
    """Return whether the leader's update ends with this round; False when nobody gave a gradient."""
    leader = min((place for place in places if place.weight > 0), default=None)
    return leader is not None and leader.left == 0


_NOTHING: Float32Array = np.empty(0, np.float32)


class Contribution(NamedTuple):
    """What one member gave to a round.

    Args:
        weight: how much it counts for; 0 for nothing.
        vector: owned by the collector, overwritten in the next round; empty in `CollectedRound.merged`.
        learning_rate: at which the member would step.
        left: gradients of its update that come after this one.
    """

    sender: str
    weight: float
    policy_version: int
    vector: Float32Array
    learning_rate: float = 0.0
    left: int = 0


class CollectedRound(NamedTuple):
    """How a round ended.

    Args:
        vector: what ``reduce`` returned: the same object for all.
        merged: who counted, in the order of the members, without vectors.
        missing: members without whom it closed.
        late: whether the round had closed before this contribution came, so that it didn't count.
    """

    number: int
    vector: Float32Array
    merged: tuple[Contribution, ...]
    missing: tuple[str, ...]
    late: bool


class _Slot:
    """One member's buffer; ``lock`` is held while it is filled."""

    def __init__(self, size: int) -> None:
        self.lock = asyncio.Lock()
        self.vector: Float32Array = np.empty(size, np.float32)


class _Round:
    """A round that is open, or was."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.opened_s: float | None = None
        self.arrived: dict[str, Contribution] = {}
        self.closing = False
        self.ended = asyncio.Event()
        self.result: CollectedRound | None = None
        self.error: BaseException | None = None


class RoundCollector:
    """Collects one contribution of each member to a round, reduces once, hands the same result to all.

    A round opens with its first contribution and closes when all but ``backups`` members have contributed;
    once the timeout's deadline has passed, a ``quorum`` is enough. After ``adaptive_timeout.most_s`` without
    one, everybody who waits gets 408, and the round begins anew with the next contribution.

    A contribution that comes twice counts once. Arrivals, late ones too, are observed by the timeout.

    Args:
        size: elements of each contribution.
        members: who may contribute, in the order in which ``reduce`` gets them.
        timeout: how long a round may wait.
        quorum: share of the members that is enough once the deadline has passed, in (0, 1].
        backups: slowest members that a round doesn't wait for; one contribution is always needed.
        reduce: makes the result. Contributions' vectors are its own until it returns. What it returns
            must stay unchanged while it is sent to the members: with a full quorum until the round after
            the next closes, so two buffers in turn are enough.
        first: number of the first round; each next is one more.
        arrived: called when a contribution has come and the round waits for more.
    """

    def __init__(
        self,
        *,
        size: int,
        members: Sequence[str],
        clock: Clock,
        timeout: AdaptiveTimeout,
        quorum: float = 1.0,
        backups: int = 0,
        reduce: Callable[[Sequence[Contribution]], Awaitable[Float32Array]],
        first: int,
        arrived: Callable[[], None] = lambda: None,
    ) -> None:
        self._members = tuple(members)
        self._slots = {member: _Slot(size) for member in self._members}
        self._clock = clock
        self._timeout = timeout
        self._quorum = max(1, math.ceil(quorum * len(self._members) - 1e-9))
        self._enough = max(1, len(self._members) - backups)
        self._reduce = reduce
        self._arrived = arrived
        self._round = _Round(first)
        self._last: _Round | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._why: str | None = None
        self.overdue: tuple[str, ...] = ()
        """Members for whose sake a round was given up last; empty when none was."""

    @property
    def number(self) -> int:
        """The round that is open, or opens next."""
        return self._round.number

    @property
    def result(self) -> CollectedRound | None:
        """Result of the round that closed last; None before the first."""
        return None if self._last is None else self._last.result

    @property
    def missing(self) -> tuple[str, ...]:
        """Members whose contribution to the present round hasn't come."""
        return tuple(member for member in self._members if member not in self._round.arrived)

    async def contribute(
        self,
        number: int,
        sender: str,
        weight: float,
        policy_version: int,
        fill: Callable[[Float32Array], Awaitable[None]],
        *,
        learning_rate: float = 0.0,
        left: int = 0,
    ) -> CollectedRound:
        """Give ``sender``'s part to round ``number``, and wait for the round's end.

        A contribution to a round that is over gets the last result instead, with ``late`` set.

        Args:
            weight: how much it counts for, finite and at least 0.
            fill: writes the vector into the buffer that it is given. What it raises goes to the caller,
                and the sender may try again. Not called when the vector isn't needed.

        Raises:
            Refusal: closed, a round ahead of ours, or not a member (409); the weight is none (400); too few
                came (408).
        """
        slot = self._slots.get(sender)
        if slot is None:
            raise Refusal(409, "not a member of this group")
        if not (math.isfinite(weight) and weight >= 0):
            raise Refusal(400, "a weight is a finite number, and not negative")
        here = self._here(number)
        if self._wants(here, sender):
            self._open(here)
            async with slot.lock:
                if self._wants(here, sender):
                    await fill(slot.vector)
                    part = Contribution(sender, weight, policy_version, slot.vector, learning_rate, left)
                    self._arrive(here, part)
        elif sender not in here.arrived:
            self._observe(here)
        await here.ended.wait()
        if here.error is not None:
            raise _again(here.error)
        result = here.result
        if result is None:
            raise Refusal(409, "the round was given up")
        return result if sender in here.arrived else result._replace(late=True)

    def close(self, why: str) -> None:
        """Let everybody who waits, and whoever comes, have Refusal(409, why). Again does nothing."""
        if self._why is None:
            self._why = why
            self._stop_timer()
            self._end(self._round, error=Refusal(409, why))

    async def closed(self) -> None:
        """Wait, after `close`, until a reduction that was under way has ended; its result is dropped."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _here(self, number: int) -> _Round:
        """The round that a contribution to ``number`` belongs to."""
        if self._why is not None:
            raise Refusal(409, self._why)
        if number > self._round.number:
            raise Refusal(409, f"round {number} is ahead of ours, {self._round.number}")
        if number == self._round.number:
            return self._round
        if self._last is None:
            raise Refusal(409, f"round {number} is over here, and its result is gone")
        return self._last

    def _wants(self, here: _Round, sender: str) -> bool:
        return here is self._round and not here.closing and sender not in here.arrived

    def _open(self, here: _Round) -> None:
        if here.opened_s is None:
            here.opened_s = self._clock.monotonic()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout.deadline_s, self._check_time, here)

    def _observe(self, here: _Round) -> None:
        if here.opened_s is not None:
            self._timeout.observe(self._clock.monotonic() - here.opened_s)

    def _arrive(self, here: _Round, contribution: Contribution) -> None:
        """Count what was filled in; a round that has closed meanwhile goes without it."""
        self._observe(here)
        if self._why is not None or not self._wants(here, contribution.sender):
            return
        here.arrived[contribution.sender] = contribution
        waited_s = self._clock.monotonic() - (here.opened_s or 0.0)
        enough = self._quorum if waited_s >= self._timeout.deadline_s else self._enough
        if len(here.arrived) >= min(enough, self._enough):
            self._close_round(here)
        else:
            self._arrived()

    def _check_time(self, here: _Round) -> None:
        """The timeout's deadline has passed, or its longest wait."""
        if here is not self._round or here.closing:
            return
        left_s = self._timeout.most_s - (self._clock.monotonic() - (here.opened_s or 0.0))
        if len(here.arrived) >= min(self._quorum, self._enough):
            self._close_round(here)
        elif left_s > 1e-6:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._check_time, here)
        else:
            self.overdue = self.missing
            missing = ", ".join(member[:8] for member in self.overdue)
            self._round = _Round(here.number)
            self._end(here, error=Refusal(408, f"round {here.number} lacks {missing}"))

    def _close_round(self, here: _Round) -> None:
        here.closing = True
        self._stop_timer()
        self._task = asyncio.create_task(self._finish(here), name=f"reduce round {here.number}")

    async def _finish(self, here: _Round) -> None:
        contributions = [here.arrived[member] for member in self._members if member in here.arrived]
        try:
            vector = await self._reduce(contributions)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            if self._why is None:
                self._round = _Round(here.number)
                self._end(here, error=error)
            return
        if self._why is not None:
            return
        merged = tuple(contribution._replace(vector=_NOTHING) for contribution in contributions)
        here.result = CollectedRound(here.number, vector, merged, self.missing, late=False)
        self._last, self._round = here, _Round(here.number + 1)
        self._end(here)

    def _end(self, here: _Round, error: BaseException | None = None) -> None:
        here.error = error
        here.ended.set()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _again(error: BaseException) -> BaseException:
    """An error for one of several waiters; refusals are made anew, for tracebacks grow with each raise."""
    return Refusal(error.status, error.reason) if isinstance(error, Refusal) else error
