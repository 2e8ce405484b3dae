"""A server's side of synchronous rounds: collect one gradient of each worker, step once, give the result.

A round is numbered by the version that its gradients were computed on. Workers without a gradient (their
learner is paused, or only starting) say so and count as having come, so they hold nobody up; but a round
only begins with a gradient.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import numpy as np

from p2pdrl.config.strategy import ServerSyncConfig
from p2pdrl.errors import PoisonedVectorError
from p2pdrl.strategies.gathering import Contribution, Gathered, Gathering
from p2pdrl.strategies.heavy import heavy
from p2pdrl.strategies.lockstep import Place, leader_ends
from p2pdrl.strategies.patience import Patience
from p2pdrl.strategies.servers.desk import Answered, Attendance, DeskOptions, Seeding, Turns, give
from p2pdrl.strategies.servers.editions import Edition
from p2pdrl.strategies.servers.inbox import Inbox, Parcel
from p2pdrl.strategies.servers.messages import Given, Push
from p2pdrl.strategies.servers.shard import Shard
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.robust import combine
from p2pdrl.transport.protocol import Refusal

__all__ = ["SyncDesk"]


class SyncDesk:
    """One shard's rounds in one view.

    Args:
        shard: filled, unless ``seed``.
        config: the strategy's options.
        options: what the node and the view give.
        seed: whether the shard becomes the mean of the givers' parameters first.
        patience: of rounds; it outlives views.
    """

    def __init__(
        self, shard: Shard, config: ServerSyncConfig, options: DeskOptions, patience: Patience, *, seed: bool
    ) -> None:
        self._shard = shard
        self._config = config
        self._options = options
        self._inbox = Inbox(config, shard.span.size, options.max_abs, options.strike)
        self._turns = Turns()
        self._begun = asyncio.Event()
        self._poisoned: set[tuple[int, str]] = set()
        self._attendance = Attendance(options.members, options.doubt)
        self._combined: Float32Array = np.zeros(shard.span.size, np.float32)
        self._seeding = Seeding(shard, options, self._inbox, self._turns.turn) if seed else None
        self._gathering = Gathering(
            size=shard.span.size,
            members=options.members,
            clock=options.clock,
            patience=patience,
            quorum=config.quorum,
            backups=min(config.backups, len(options.members) - 1),
            reduce=self._reduce,
            first=options.version,
        )

    async def push(self, sender: str, head: Push, parcel: Parcel) -> Answered:
        """Take what a worker sends and answer when its round has closed.

        Raises:
            Refusal: the view has ended (409), the round found too few (408), a poisoned gradient (422).
            TensorError: poisoned parameters.
        """
        given, before = Given(self._shard.version), self._gathering.result
        if head.op == "seed" and self._seeding is not None:
            await self._seeding.give(sender, parcel)
        elif head.op in ("seed", "fetch"):
            await self._reach(head.number if head.op == "fetch" else 0)
        elif before is not None and head.op == "step" and _counted(sender, head.number, before):
            given = self._told(before)  # it is asked again: the answer was lost
        elif head.number < self._shard.version:
            self._options.counts["late"] += head.op == "step"
            given = Given(self._shard.version, outcome="late", ends_update=_ends_update(before))
        elif head.op == "step":
            given = await self._step(sender, head, parcel)
        else:
            given = await self._idle(sender, head)
        await self._inbox.drain(parcel)
        if given.outcome == "waiting":
            return given, None
        return give(self._shard, head.base, given, wants=head.wants)

    async def close(self, why: str) -> None:
        """Refuse everybody, and wait for a step that is under way."""
        self._turns.close(why)
        self._begun.set()
        self._gathering.close(why)
        if self._seeding is not None:
            await self._seeding.close(why)
        await self._gathering.closed()

    async def _reach(self, version: int) -> None:
        """Wait until the shard has parameters of ``version`` or later."""
        while self._shard.edition is None or self._shard.version < version:
            await self._turns.next(self._options.config.deadline_s)

    async def _step(self, sender: str, head: Push, parcel: Parcel) -> Given:
        async def fill(out: Float32Array) -> None:
            try:
                async with self._inbox.received(parcel, whole=False) as data:
                    await self._inbox.decode(sender, data, out, whole=False)
            except PoisonedVectorError:
                # It came, so the others needn't wait for it; but it doesn't count.
                self._poisoned.add((head.number, sender))
                refused.append(sender)
            self._attendance.note(head.number, sender)
            self._begun.set()

        refused: list[str] = []
        gathered = await self._contribute(sender, head, head.weight, fill)
        if refused:
            self._options.counts["poisoned"] += 1
            raise Refusal(422, "the gradient is malformed, or holds NaN or an entry beyond the bound")
        if gathered.late:
            self._options.counts["late"] += 1
        return self._told(gathered)

    def _weight(self, one: Contribution) -> float:
        """How much a gradient counts for, relative to the others of its round."""
        return one.weight if self._config.reduce == "count" else 1.0

    def _told(self, gathered: Gathered) -> Given:
        merged = tuple((one.sender, self._weight(one)) for one in gathered.merged if one.weight > 0)
        return Given(
            gathered.number + 1,
            outcome="late" if gathered.late else "ok",
            merged=merged,
            missing=gathered.missing,
            ends_update=_ends_update(gathered),
        )

    async def _idle(self, sender: str, head: Push) -> Given:
        """Wait for the round to begin, then count as come without a gradient."""
        try:
            async with asyncio.timeout(self._config.deadline_s / 2):
                await self._begun.wait()
        except TimeoutError:
            return Given(self._shard.version, outcome="waiting")
        if not self._attendance.came(head.number, sender) and head.number == self._shard.version:
            self._attendance.note(head.number, sender)
            await self._contribute(sender, head, 0.0, _nothing)
        else:
            await self._reach(head.number + 1)
        return Given(self._shard.version, ends_update=_ends_update(self._gathering.result))

    async def _contribute(self, sender: str, head: Push, weight: float, fill: object) -> Gathered:
        try:
            return await self._gathering.contribute(
                head.number,
                sender,
                weight,
                head.policy,
                fill,  # type: ignore[arg-type]
                left=head.left,
            )
        except Refusal as refusal:
            if refusal.status == 408:
                self._poisoned.clear()
                self._begun.clear()
                self._attendance.doubt_absent(head.number, "its gradient didn't come")
            raise

    async def _reduce(self, contributions: Sequence[Contribution]) -> Float32Array:
        shard = self._shard
        number = shard.version
        counted = [
            one for one in contributions if one.weight > 0 and (number, one.sender) not in self._poisoned
        ]
        learning_rate = self._options.learning_rate()
        shard.stepping = True
        try:
            async with shard.lock:
                edition = await heavy(
                    4 * shard.span.size * (len(counted) + 1), lambda: self._work(counted, learning_rate)
                )
                shard.stepping = False
                shard.publish(edition, shard.version + 1)
                shard.progress += int(sum(one.weight for one in counted))
        finally:
            shard.stepping = False
        self._options.counts["steps"] += 1
        self._options.counts["gradients"] += len(counted)
        self._poisoned.clear()
        self._attendance.clear()
        self._begun.clear()
        self._turns.turn()
        return edition.vector

    def _work(self, counted: Sequence[Contribution], learning_rate: float) -> Edition:
        config = self._config
        if counted:
            combine(
                [one.vector for one in counted],
                [self._weight(one) for one in counted],
                mixing=config.mixing,
                clip_distance=config.clip_distance,
                trim=config.trim,
                reference=self._combined,
                out=self._combined,
            )
            if config.reduce == "sum":
                np.multiply(self._combined, np.float32(len(counted)), out=self._combined)
            if math.isfinite(learning_rate):
                self._shard.apply(self._combined, learning_rate)
        return self._shard.write_edition()


def _counted(sender: str, number: int, gathered: Gathered) -> bool:
    """Whether a sender's gradient is in that round, which was the last."""
    return gathered.number == number and any(
        one.sender == sender and one.weight > 0 for one in gathered.merged
    )


def _ends_update(gathered: Gathered | None) -> bool:
    """Whether the leader's update ended with that round: then all others collect now."""
    merged = () if gathered is None else gathered.merged
    return leader_ends(Place(one.sender, one.weight, one.left) for one in merged)


async def _nothing(out: Float32Array) -> None:
    """A contribution of weight 0 needs no vector."""
    del out
