"""Strom's algorithm (Strom 2015, Interspeech, section 3) on what the learner moved by; one node's part of it.

    own progress      u = now − expected            (the paper's gradient; here whatever the optimizer made)
    residual          r ← r + u;  where |r| ≥ τ: send ±τ, r ← r ∓ τ
    a peer's message  now ← now ± τ,  expected ← expected ± τ

``expected`` is kept in float64, so that what a learner's float32 additions round off counts as own progress:
it is told to all, and replicas don't drift apart by rounding. Then ``now − r`` is the same at all nodes that
have the same messages, up to a rounding of now − r itself (2⁻²⁴ of each entry, not growing).

`StromState` is the arithmetic (work for a thread, one call at a time), `StromMember` that and the log.
Shapes: every vector is flat, of D elements.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from p2pdrl.config.strategy import StromConfig
from p2pdrl.errors import PoisonedVectorError
from p2pdrl.ids import new_exchange_id
from p2pdrl.strategies.offload import Arithmetic
from p2pdrl.strategies.own_vector import read_now
from p2pdrl.strategies.protocol import StrategyContext
from p2pdrl.strategies.relay.log import GapError, History, MessageRun, StromLog, UpdateOrigin
from p2pdrl.tensors import mix
from p2pdrl.tensors.board import DaemonBoard
from p2pdrl.tensors.compression import ThresholdResidual, add_message, entries_in
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.wire import WALK, spans

__all__ = ["Absorbed", "GivenBase", "StromMember", "StromState"]


class StromState:
    """Own progress, residual and what was absorbed.

    Args:
        board: where the learner's vector is, and deltas go.
        size: D.
        tau: τ.
        max_abs: largest entry that may be.
        max_distance: largest ratio of a peer's norm to ours.
    """

    def __init__(
        self, board: DaemonBoard, size: int, tau: float, *, max_abs: float, max_distance: float
    ) -> None:
        self._board, self._max_abs, self._max_distance = board, max_abs, max_distance
        self._kept = ThresholdResidual(size, tau)
        self.tau = self._kept.tau
        self.max_nbytes = self._kept.max_nbytes
        self._message = memoryview(bytearray(self.max_nbytes))
        self._expected: npt.NDArray[np.float64] = np.zeros(size, np.float64)
        self._now: Float32Array = np.zeros(size, np.float32)
        self._work: Float32Array = np.zeros(size, np.float32)
        self._sets = -1
        self.residual_norm = 0.0
        self.entries = 0
        """Sent by the last `contribute`."""

    @property
    def residual(self) -> Float32Array:
        """The residual r."""
        return self._kept.residual

    def look(self) -> bool:
        """Count what the learner did since the last look into the residual.

        Returns:
            False when its vector was replaced: the residual is gone with the old one.

        Raises:
            PoisonedVectorError: its vector holds NaN, infinity or a huge entry.
        """
        sets = read_now(self._board, self._now, self._max_abs).sets
        if sets != self._sets:
            self._sets = sets
            self._kept.reset()
            np.copyto(self._expected, self._now)
            return False
        residual = self._kept.residual
        for span in spans(self._now.size, WALK):
            progress = self._work[span]
            np.subtract(self._now[span], self._expected[span], out=progress, casting="same_kind")
            np.add(residual[span], progress, out=residual[span])
            np.copyto(self._expected[span], self._now[span])
        return True

    def contribute(self) -> tuple[bytes, bool]:
        """Take one τ off each entry that has grown to it.

        Returns:
            The message, empty when there is none; and whether entries of τ or more are left.
        """
        residual = self._kept.residual
        nbytes = self._kept.take(self._message)
        self.entries = entries_in(self._message)
        self.residual_norm = mix.norm(residual)
        more = max(float(residual.max()), -float(residual.min())) >= self.tau
        return (bytes(self._message[:nbytes]) if self.entries else b""), more

    def absorb(self, messages: Iterable[bytes], policy_version: int) -> bool:
        """Add peers' messages to the learner's vector.

        Returns:
            False when that vector was replaced meanwhile; nothing was added.

        Raises:
            WireError: one is malformed; nothing was added.
        """
        self._work.fill(0.0)
        for message in messages:
            add_message(memoryview(message), self.tau, self._work)
        return self._post(policy_version)

    def base(self) -> Float32Array:
        """Return now − r, after a `look`: a new vector."""
        return self._now - self._kept.residual

    def rebase(self, base: Float32Array, again: Iterable[bytes], policy_version: int) -> bool:
        """Move the learner to a peer's base, our own messages that it lacks, and our residual.

        Call `look` first, and `check` the base.

        Returns:
            False when the learner's vector was replaced meanwhile.
        """
        for message in again:
            add_message(memoryview(message), self.tau, base)
        np.subtract(base, self._now, out=self._work)
        np.add(self._work, self._kept.residual, out=self._work)
        return self._post(policy_version)

    def check(self, base: Float32Array) -> None:
        """Check a peer's base.

        Raises:
            PoisonedVectorError: it holds NaN, infinity, a huge entry, or its norm is out of proportion.
        """
        mix.check_finite(base, self._max_abs)
        theirs, bound = mix.norm(base), self._max_distance * (1.0 + mix.norm(self._now))
        if theirs > bound:
            raise PoisonedVectorError(f"norm {theirs:.3g} is beyond the bound {bound:.3g}")

    def fold(self) -> None:
        """Nobody is there to be told: what wasn't sent belongs to our base."""
        self._kept.reset()

    def _post(self, policy_version: int) -> bool:
        if not self._board.post_delta(self._work, policy_version, sets=self._sets):
            return False
        np.add(self._expected, self._work, out=self._expected)
        return True


LEAST_WINDOW_BYTES = 1 << 20
MOST_AT_ONCE = 4
"""Messages of one look: entries that moved by several τ take several."""


class Absorbed(NamedTuple):
    """What came of a push."""

    messages: int
    """That were new."""
    changed: float
    """Euclidean norm of what they added, as if no entry occurred twice."""
    gap: bool
    """Messages before the sender's oldest one are missing here."""


class GivenBase(NamedTuple):
    """A base, D float32, its history, and the messages that it contains."""

    history: History
    have: Mapping[UpdateOrigin, int]
    base: Float32Array


class StromMember:
    """One node's part.

    Args:
        window_bytes: messages kept of each origin; None: as many as are cheaper than a base.

    Attributes:
        in_step: whether our base is that of our history; else we need a member's.
        sent_bytes: length of all messages of ours.
        messages: of ours.
        entries: in them.
    """

    def __init__(
        self,
        config: StromConfig,
        context: StrategyContext,
        arithmetic: Arithmetic,
        window_bytes: int | None = None,
    ) -> None:
        self._board, self._arithmetic = context.learner.board, arithmetic
        self.state = StromState(
            self._board, context.size, config.tau, max_abs=context.max_abs, max_distance=config.max_distance
        )
        if window_bytes is None:
            window_bytes = max(8 * context.size, LEAST_WINDOW_BYTES)  # more than that is dearer than a base
        self.log = StromLog(context.swarm.node_id, new_exchange_id(), window_bytes)
        self.in_step = False
        self.sent_bytes = self.messages = self.entries = 0
        self._lock = asyncio.Lock()

    async def contribute(self, *, tell: bool, fold: bool) -> None:
        """Look at the learner's progress, and make a message of what has grown beyond τ.

        Args:
            tell: whether a message is wanted; else the residual grows.
            fold: nobody has been there for a while, so that the residual belongs to our base.

        Raises:
            PoisonedVectorError: our own vector is unusable.
        """
        async with self._lock:
            if not await self._look() or not self.in_step:
                return
            if fold:
                self.state.fold()
                if self.log.history is None or self.log.history.era:
                    self.log.found(era=0)
                return
            if not tell:
                return
            for _ in range(MOST_AT_ONCE):
                message, more = await self._arithmetic.run(self.state.contribute)
                if message:
                    self.log.append(message)
                    self.messages += 1
                    self.entries += self.state.entries
                    self.sent_bytes += len(message)
                if not more:
                    break

    async def absorb(self, runs: Sequence[MessageRun], policy_version: int, *, relay: bool) -> Absorbed:
        """Add what is new to our parameters.

        Raises:
            WireError: a message is malformed; nothing was added.
        """
        async with self._lock:
            good: list[MessageRun] = []
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
            if not await self._arithmetic.run(lambda: self.state.absorb(new, policy_version)):
                self.in_step = False
                return Absorbed(0, 0.0, gap)
            for run in good:
                self.log.added(run, relay=relay)
            entries = sum(entries_in(memoryview(message)) for message in new)
            return Absorbed(len(new), self.state.tau * math.sqrt(entries), gap)

    async def give(self) -> GivenBase | None:
        """Return our base, for a member that needs one; None when we need one ourselves.

        Raises:
            PoisonedVectorError: our own vector is unusable.
        """
        async with self._lock:
            if not await self._look() or not self.in_step or self.log.history is None:
                return None
            if self.log.history.era == 0:
                self.log.history = History(1, self.log.history.founder)
            base = await self._arithmetic.run(self.state.base)
            return GivenBase(self.log.history, dict(self.log.have), base)

    async def take(self, given: GivenBase, policy_version: int) -> bool:
        """Take a member's base, and what we did ourselves beyond it.

        Returns:
            False when our learner's vector was replaced meanwhile.

        Raises:
            PoisonedVectorError: the base is unusable, or our own vector is.
            WireError: it claims what can't be.
        """
        async with self._lock:
            await self._look()
            await self._arithmetic.run(lambda: self.state.check(given.base))
            again = self.log.take(given.history, given.have, new_exchange_id())
            done = await self._arithmetic.run(lambda: self.state.rebase(given.base, again, policy_version))
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
        same = await self._arithmetic.run(self.state.look)
        if not same:
            self.in_step = False
        return same
