"""A server's side of asynchronous pushes: each gradient is applied as it comes (Dean 2012, section 4.1).

Staleness s is the shard's version minus the version that the gradient was computed on. Up to
``max_staleness`` a gradient counts whole; beyond it, by `weight_of`, less and less or not at all.
"""

from __future__ import annotations

import math

import numpy as np

from p2pdrl.config.strategy import ServerAsyncConfig
from p2pdrl.strategies.heavy import heavy
from p2pdrl.strategies.servers.desk import Answered, DeskOptions, Seeding, Turns, give
from p2pdrl.strategies.servers.inbox import Inbox, Parcel
from p2pdrl.strategies.servers.messages import Given, Push
from p2pdrl.strategies.servers.shard import Shard
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.transport.protocol import Refusal

__all__ = ["AsyncDesk", "bucket_of", "weight_of"]


class AsyncDesk:
    """One shard at work in one view.

    Args:
        shard: filled, unless ``seed``.
        config: the strategy's options.
        options: what the node and the view give.
        seed: whether the shard becomes the mean of the givers' parameters first.
    """

    def __init__(self, shard: Shard, config: ServerAsyncConfig, options: DeskOptions, *, seed: bool) -> None:
        self._shard = shard
        self._config = config
        self._options = options
        self._inbox = Inbox(config, shard.span.size, options.max_abs, options.strike)
        self._turns = Turns()
        self._gradient: Float32Array = np.empty(shard.span.size, np.float32)
        self._seeding = Seeding(shard, options, self._inbox, self._turns.turn) if seed else None
        self._why: str | None = None

    async def push(self, sender: str, head: Push, parcel: Parcel) -> Answered:
        """Take what a worker sends: apply its gradient, give the parameters if they are wanted.

        Raises:
            Refusal: the view has ended (409), or no parameters came in time (408).
            TensorError: what it sent is poisoned.
        """
        given = Given(self._shard.version)
        if head.op == "seed" and self._seeding is not None:
            await self._seeding.give(sender, parcel)
        elif head.op == "step" and head.weight > 0:
            await self._filled()
            given = await self._step(sender, head, parcel)
        else:
            await self._filled()
        await self._inbox.drain(parcel)
        if head.wants:
            await self._refresh()
        return give(self._shard, head.base, given, wants=head.wants)

    async def close(self, why: str) -> None:
        """Refuse everybody, and wait for a step that is under way."""
        self._why = why
        self._turns.close(why)
        if self._seeding is not None:
            await self._seeding.close(why)
        async with self._shard.lock:
            pass

    async def _filled(self) -> None:
        while self._shard.edition is None:
            await self._turns.next(self._options.config.deadline_s)

    async def _step(self, sender: str, head: Push, parcel: Parcel) -> Given:
        shard, options = self._shard, self._options
        async with self._inbox.received(parcel, whole=False) as data, shard.lock:
            if self._why is not None:
                raise Refusal(409, self._why)
            staleness = max(0, shard.version - head.number)
            options.counts[bucket_of(staleness)] += 1
            weight = weight_of(staleness, self._config)
            if not weight:
                options.counts["stale"] += 1
                return Given(shard.version, outcome="stale", staleness=staleness)
            options.counts["scaled"] += weight < 1
            # The step and not the gradient: adaptive optimizers would divide a factor of it out again.
            rate = weight * options.learning_rate()

            def work() -> None:
                self._inbox.decode_now(sender, data, self._gradient, whole=False)
                if math.isfinite(rate):
                    shard.apply(self._gradient, rate)

            shard.stepping = True
            try:
                await heavy(8 * shard.span.size, work)
                shard.version += 1
                shard.progress += int(head.weight)
            finally:
                shard.stepping = False
            options.counts["steps"] += 1
            return Given(shard.version, merged=((sender, weight),), staleness=staleness)

    async def _refresh(self) -> None:
        """See to it that the newest edition is of the present version."""
        shard = self._shard
        async with shard.lock:
            if shard.edition is None or shard.edition.version != shard.version:
                version = shard.version
                shard.publish(await shard.edit(), version)


def weight_of(staleness: int, config: ServerAsyncConfig) -> float:
    """Factor of the step along a gradient that is ``staleness`` steps old; 0 for one that is dropped.

    1 up to τ = ``max_staleness``. Beyond it, with ``stale = "scale"``, (1 + τ) / (1 + s): it has no jump at
    τ, and with τ = 0 it is 1 / (1 + s), as in staleness-aware SGD (Zhang 2016, arXiv 1511.05950, equation 6).
    """
    if staleness <= config.max_staleness:
        return 1.0
    return (1.0 + config.max_staleness) / (1.0 + staleness) if config.stale == "scale" else 0.0


def bucket_of(staleness: int) -> str:
    """Name the bucket of a histogram that ``staleness`` falls into: 0, 1, 2-3, 4-7, …."""
    if staleness < 2:
        return f"staleness_{staleness}"
    low = 1 << (staleness.bit_length() - 1)
    return f"staleness_{low}-{2 * low - 1}"
