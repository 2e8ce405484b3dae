"""What a node holds of the servers' vector: its shard, copies kept for others, and its worker's whole copy.

Whoever must serve a slice next pulls it from here, over the network or, on the same node, without it.

Shapes: every vector is flat; names carry no suffix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from p2pdrl.config.strategy_bases import Served
from p2pdrl.strategies.heavy import heavy
from p2pdrl.strategies.servers.messages import Pull, Pulled
from p2pdrl.strategies.servers.serving import MOST_CLAIMS, Claim, Span
from p2pdrl.strategies.servers.shard import AnyArray, Shard, optimizer_of
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.transport.protocol import Refusal

__all__ = ["Contents", "Holdings", "StateShape", "split_state"]

SNAPSHOTS = 2
"""Pieces that are copied and sent at a time; others wait."""
MOST_KEPT = 16


@dataclass(frozen=True)
class Contents:
    """Parameters of a span with what the optimizer knows of them.

    Attributes:
        span: what it covers.
        version: count of steps behind it.
        parameters: of the span; None where only state is meant.
        arrays: state with one number for each parameter, by name.
        scalars: other state.
    """

    span: Span
    version: int
    parameters: Float32Array | None
    arrays: dict[str, AnyArray] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)

    @property
    def views(self) -> list[memoryview]:
        """Its vectors as they go over the wire."""
        vectors: list[AnyArray] = [] if self.parameters is None else [self.parameters]
        vectors += [self.arrays[name] for name in sorted(self.arrays)]
        return [vector.data.cast("B") for vector in vectors]

    def part(self, span: Span, *, parameters: bool, state: bool, copy: bool) -> Contents:
        """Return what is said of ``span``, which lies within; as views unless ``copy``."""
        where = slice(span.start - self.span.start, span.stop - self.span.start)

        def taken(vector: AnyArray) -> AnyArray:
            return vector[where].copy() if copy else vector[where]

        return Contents(
            span,
            self.version,
            taken(self.parameters).view(np.float32) if parameters and self.parameters is not None else None,
            {name: taken(array) for name, array in self.arrays.items()} if state else {},
            dict(self.scalars) if state else {},
        )


class StateShape(NamedTuple):
    """What an optimizer's state consists of.

    Args:
        arrays: number format of each array over the parameters, by name.
        scalars: names of the single numbers, with their formats.
    """

    arrays: dict[str, np.dtype[np.generic]]
    scalars: dict[str, np.dtype[np.generic]]

    @classmethod
    def of(cls, config: Served) -> StateShape:
        """That of the optimizer which ``config`` names."""
        state = optimizer_of(config, 1).state()
        return cls(
            {name: value.dtype for name, value in state.items() if value.ndim == 1},
            {name: value.dtype for name, value in state.items() if value.ndim == 0},
        )


def split_state(state: Mapping[str, AnyArray]) -> tuple[dict[str, AnyArray], dict[str, float]]:
    """Part an optimizer's state into arrays over the parameters and single numbers."""
    arrays = {name: value for name, value in state.items() if value.ndim == 1}
    scalars = {name: float(value) for name, value in state.items() if value.ndim == 0}
    return arrays, scalars


class Holdings:
    """The three kinds of contents of one node.

    Args:
        size: D.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.shard: Shard | None = None
        """The shard that this node serves, or served until the present view."""
        self.kept: dict[Span, Contents] = {}
        """What it keeps for other servers; never written to, only replaced."""
        self.copy: Contents | None = None
        """The worker's whole vector; replaced, and written to only by `replace_copy`."""
        self.progress = 0
        """Samples behind the whole copy."""
        self.branch = ""
        """View in which the whole copy was taken."""
        self._spare: Float32Array | None = None
        self._sending = asyncio.Semaphore(SNAPSHOTS)
        self._copy_readers = asyncio.Lock()

    @property
    def claims(self) -> tuple[Claim, ...]:
        """What a note says of it."""
        live = () if self.shard is None or self.shard.edition is None else (self.shard.claim,)
        kept = [Claim(*kept.span, kept.version, live=False) for kept in self.kept.values()]
        return (*live, *kept)[:MOST_CLAIMS]

    @property
    def copy_version(self) -> int:
        """Version of the whole copy; -1 for none."""
        return -1 if self.copy is None else self.copy.version

    def blank_copy(self) -> Float32Array:
        """Return a buffer to write the next whole copy into."""
        if self._spare is None:
            self._spare = np.zeros(self._size, np.float32)
        return self._spare

    async def replace_copy(self, vector: Float32Array, version: int) -> None:
        """Make ``vector``, which came from `blank_copy`, the whole copy; the old one becomes the blank."""
        async with self._copy_readers:
            self._spare = None if self.copy is None else self.copy.parameters
            self.copy = Contents(Span(0, self._size), version, vector)

    def keep(self, contents: Contents) -> None:
        """Keep what another server has; an older version never replaces a newer."""
        have = self.kept.get(contents.span)
        if have is not None and have.version > contents.version:
            return
        self.kept.pop(contents.span, None)
        self.kept[contents.span] = contents
        while len(self.kept) > MOST_KEPT:
            del self.kept[next(iter(self.kept))]

    def replace_shard(self, shard: Shard) -> None:
        """Serve another shard from now on; what the one before held is kept, for whoever serves it now."""
        before, self.shard = self.shard, shard
        if before is not None and before is not shard and before.edition is not None:
            arrays, scalars = split_state(before.state())
            self.keep(Contents(before.span, before.version, before.parameters, arrays, scalars))

    def forget(self, spans: set[Span], *, keep_shard: bool) -> None:
        """Keep nothing but what is kept of ``spans``, and our shard if we still serve it."""
        self.kept = {span: kept for span, kept in self.kept.items() if span in spans}
        if not keep_shard:
            self.shard = None

    def clear(self) -> None:
        """Hold nothing: all begin anew."""
        self.shard = self.copy = None
        self.kept = {}
        self.progress, self.branch = 0, ""

    async def snapshot(self, span: Span, version: int, *, parameters: bool, state: bool) -> Contents | None:
        """Return a copy of the newest that we hold of ``span``; None when that is older than ``version``.

        What is kept for others, or is a whole copy, is preferred only where it is newer than the shard.
        """
        shard, copy = self.shard, self.copy
        options: list[Contents] = [kept for kept in self.kept.values() if kept.span.holds(span)]
        if copy is not None and not state:
            options.append(copy)
        best = max(options, key=lambda kept: kept.version, default=None)
        if shard is not None and shard.edition is not None and shard.span.holds(span):
            async with shard.lock:
                if shard.version >= max(version, -1 if best is None else best.version):
                    return await self._of_shard(shard, span, parameters=parameters, state=state)
        if best is None or best.version < version:
            return None
        if best is not copy:
            return best.part(span, parameters=parameters, state=state, copy=False)
        async with self._copy_readers:
            held = self.copy
            if held is None or held.version < version:
                return None
            return await heavy(
                4 * span.size,
                lambda: held.part(span, parameters=parameters, state=False, copy=True),
            )

    async def _of_shard(self, shard: Shard, span: Span, *, parameters: bool, state: bool) -> Contents:
        arrays, scalars = split_state(shard.state())
        whole = Contents(shard.span, shard.version, shard.parameters, arrays, scalars)
        nbytes = 4 * span.size * (1 + len(arrays))
        return await heavy(nbytes, lambda: whole.part(span, parameters=parameters, state=state, copy=True))

    async def serve(self, pull: Pull) -> tuple[Pulled, Contents]:
        """Answer a peer that pulls; `sent` must be called once it has been sent.

        Raises:
            Refusal: we hold nothing so new (409), or the span is none (400).
        """
        if not pull.start < pull.stop <= self._size:
            raise Refusal(400, "the piece lies outside the vector")
        await self._sending.acquire()
        done = False
        try:
            found = await self.snapshot(pull.span, pull.version, parameters=pull.parameters, state=pull.state)
            if found is None:
                raise Refusal(409, "nothing so new is held here")
            done = True
        finally:
            if not done:
                self._sending.release()
        return Pulled(found.version, found.scalars), found

    def sent(self) -> None:
        """An answer to a pull has gone out."""
        self._sending.release()
