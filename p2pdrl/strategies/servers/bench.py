"""A worker's place: it takes what the servers give, as one vector, and puts it on the learner's board.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from p2pdrl.errors import PeerTimeoutError, PoisonedVectorError, TensorError
from p2pdrl.strategies.heavy import heavy
from p2pdrl.strategies.judgement import Summary
from p2pdrl.strategies.protocol import Context
from p2pdrl.strategies.servers.courier import BadServerError, Courier, Part, PoisonedPushError, together
from p2pdrl.strategies.servers.holdings import Holdings
from p2pdrl.strategies.servers.term import Term
from p2pdrl.tensors import mix
from p2pdrl.tensors.layout import Float32Array

__all__ = ["Bench"]

RETRY_S = 0.25
ADOPT_S = 1.0


class Bench:
    """One node's worker, for as long as its strategy lasts.

    Args:
        context: what the node gives.
        holdings: where the whole copy is kept.
    """

    def __init__(self, context: Context, holdings: Holdings) -> None:
        self._context = context
        self._swarm = context.swarm
        self._board = context.learner.board
        self._holdings = holdings
        self._nbytes = 4 * context.size
        self.posted = -1
        """Version of the vector that was last put on the board."""

    async def join(self, term: Term, courier: Courier, *, settle: bool) -> list[int]:
        """Begin a view with the servers' parameters, to which our own are the seed if there were none.

        Args:
            term: the view.
            courier: to its servers.
            settle: whether all slices must be of one version.

        Returns:
            The version of each shard.
        """
        await self._adopt(term)
        if term.plan.seed and not term.plan.givers:
            await self._leave_for_good(term)
        while True:
            try:
                versions = await self._begin(term, courier, settle=settle)
            except BadServerError as error:
                self._swarm.strike(error.server, str(error))
                term.doubt(error.server, "its parameters are unusable")
            except PoisonedPushError as error:
                self._swarm.heal(f"our own parameters are unusable: {error}")
            except PeerTimeoutError as error:
                self._swarm.tell("servers", str(error), warning=True)
            else:
                self._holdings.branch = f"{term.key.generation}/{term.key.proposer[-12:]}"
                return versions
            await asyncio.sleep(RETRY_S)

    async def _begin(self, term: Term, courier: Courier, *, settle: bool) -> list[int]:
        seeds = term.plan.seed and term.me in term.plan.givers
        own = await self._own() if seeds else None
        parts: Sequence[Part] = await together(
            *(
                courier.insist(shard, "seed" if seeds else "fetch", term.plan.version, vector=own)
                for shard in range(len(term.plan.spans))
            )
        )
        if settle:
            parts = await courier.settle(parts)
        try:
            versions = [part.given.version for part in parts]
            await self.take(courier, parts, max(versions), min(versions))
            return versions
        finally:
            courier.release(parts)

    async def take(self, courier: Courier, parts: Sequence[Part | None], policy: int, version: int) -> float:
        """Put slices together, keep the vector, and put it on the board when it is another than before.

        Args:
            courier: that brought them.
            parts: one of each server.
            policy: policy version for the learner.
            version: for our note: every slice has it, or a higher one.

        Returns:
            Euclidean norm of the change.

        Raises:
            BadServerError: a slice is unusable; nothing was changed.
        """
        out = self._holdings.blank_copy()
        held = None if self._holdings.copy is None else self._holdings.copy.parameters

        def work() -> float:
            courier.assemble(parts, held, out)
            return mix.norm(out) if held is None else mix.distance(out, held)

        changed = await heavy(3 * self._nbytes, work)
        await self._holdings.replace_copy(out, version)
        progress = [part.given.progress for part in parts if part is not None]
        self._holdings.progress = max(self._holdings.progress, *progress, 0)
        if changed or self.posted != policy:
            self.posted = -1
            await heavy(self._nbytes, lambda: self._board.post_set(out, None, policy))
            self.posted = policy
        return changed

    async def _adopt(self, term: Term) -> None:
        """Of another lineage than the one that stays, we take its whole state before we work."""
        plan, mine = term.plan, term.notes[term.me].lineage
        while mine and plan.lineage and mine != plan.lineage:
            why = f"lineage {plan.lineage} has more steps than ours"
            if await self._swarm.adopted(plan.donor, plan.lineage, why):
                self.posted = -1
                return
            await asyncio.sleep(ADOPT_S)

    async def _leave_for_good(self, term: Term) -> None:
        """Nobody in this view had parameters: once we have some, ask for a view that knows it."""
        while True:
            await asyncio.sleep(ADOPT_S)
            summary: Summary | None = self._swarm.summary()
            if summary is not None:
                term.doubt(term.me, "it has parameters by now")

    async def _own(self) -> Float32Array:
        """Our own parameters, as they are on the board."""
        out = self._holdings.blank_copy()

        def work() -> None:
            self._board.now(out)
            mix.check_finite(out, self._context.max_abs)

        while True:
            try:
                await heavy(self._nbytes, work)
                return out
            except PoisonedVectorError as error:
                self._swarm.heal(f"our own parameters are unusable: {error}")
            except TensorError:
                pass  # nothing was published yet
            await asyncio.sleep(RETRY_S)
