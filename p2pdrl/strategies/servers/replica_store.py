"""What a node holds of the servers' vector, its shard and replicas, and how a shard is filled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from p2pdrl.config.strategy import ServerOptions
from p2pdrl.errors import PoisonedVectorError, TransportError
from p2pdrl.group.view import ViewKey
from p2pdrl.strategies.offload import heavy
from p2pdrl.strategies.servers.messages import Pull, Pulled
from p2pdrl.strategies.servers.shard import AnyArray, Shard, optimizer_of
from p2pdrl.strategies.servers.shard_plan import MOST_CLAIMS, STATE_LAG, Claim, HeldSpan, Holder, ShardSpan
from p2pdrl.tensors import mix
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Address, Refusal, Transport

__all__ = ["Contents", "NobodyGivesError", "Puller", "ReplicaStore", "StateShape", "restore", "split_state"]

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

    span: ShardSpan
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

    def part(self, span: ShardSpan, *, parameters: bool, state: bool, copy: bool) -> Contents:
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
    def of(cls, config: ServerOptions) -> StateShape:
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


class ReplicaStore:
    """The three kinds of contents of one node.

    Args:
        size: D.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.shard: Shard | None = None
        """The shard that this node serves, or served until the present view."""
        self.kept: dict[ShardSpan, Contents] = {}
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
        live = () if self.shard is None or self.shard.version_buffer is None else (self.shard.claim,)
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
            self.copy = Contents(ShardSpan(0, self._size), version, vector)

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
        if before is not None and before is not shard and before.version_buffer is not None:
            arrays, scalars = split_state(before.state())
            self.keep(Contents(before.span, before.version, before.parameters, arrays, scalars))

    def forget(self, spans: set[ShardSpan], *, keep_shard: bool) -> None:
        """Keep nothing but what is kept of ``spans``, and our shard if we still serve it."""
        self.kept = {span: kept for span, kept in self.kept.items() if span in spans}
        if not keep_shard:
            self.shard = None

    def clear(self) -> None:
        """Hold nothing: all begin anew."""
        self.shard = self.copy = None
        self.kept = {}
        self.progress, self.branch = 0, ""

    async def snapshot(
        self, span: ShardSpan, version: int, *, parameters: bool, state: bool
    ) -> Contents | None:
        """Return a copy of the newest that we hold of ``span``; None when that is older than ``version``.

        What is kept for others, or is a whole copy, is preferred only where it is newer than the shard.
        """
        shard, copy = self.shard, self.copy
        options: list[Contents] = [kept for kept in self.kept.values() if kept.span.holds(span)]
        if copy is not None and not state:
            options.append(copy)
        best = max(options, key=lambda kept: kept.version, default=None)
        if shard is not None and shard.version_buffer is not None and shard.span.holds(span):
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

    async def _of_shard(self, shard: Shard, span: ShardSpan, *, parameters: bool, state: bool) -> Contents:
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


PULL_S = 30.0
"""The longest that one piece may take."""
MAX_SCALAR = 2.0**53


class NobodyGivesError(TransportError):
    """None of the holders of a piece gave it."""


class ShardSource(Protocol):
    """Where pieces come from."""

    async def pull(
        self, peer: str, span: ShardSpan, version: int, *, parameters: bool, state: bool
    ) -> Contents:
        """Get what ``peer`` holds of ``span``; raises `TransportError` or `PoisonedVectorError`."""
        ...


@dataclass
class Puller:
    """Pulls from peers, and from our own store without the network.

    Args:
        me: own id.
        key: view in force.
        store: ours.
        transport: to the others.
        address_of: where a member listens.
        max_abs: greatest entry accepted.
        strike: notes that a peer sent something poisoned.
        shape: of the optimizer's state.
    """

    me: str
    key: ViewKey
    store: ReplicaStore
    transport: Transport
    address_of: Callable[[str], Address]
    max_abs: float
    strike: Callable[[str, str], None]
    shape: StateShape

    async def pull(
        self, peer: str, span: ShardSpan, version: int, *, parameters: bool, state: bool
    ) -> Contents:
        """Get what ``peer`` holds of ``span``.

        Args:
            peer: node id, maybe our own.
            span: which entries.
            version: the least worth having.
            parameters: whether they are wanted.
            state: whether the optimizer's state is.

        Raises:
            TransportError: it doesn't answer, or not so.
            PoisonedVectorError: what it sent is unusable.
        """
        if peer == self.me:
            mine = await self.store.snapshot(span, version, parameters=parameters, state=state)
            if mine is None:
                raise NobodyGivesError("we don't hold that piece any more")
            return mine
        arrays = self.shape.arrays
        empty = Contents(
            span,
            version,
            np.empty(span.size, np.float32) if parameters else None,
            {name: np.empty(span.size, dtype) for name, dtype in arrays.items()} if state else {},
        )
        views = empty.views
        room = memoryview(bytearray(sum(view.nbytes for view in views)))
        answer = await self.transport.call(
            self.address_of(peer),
            peer,
            "shard",
            msgspec.msgpack.encode(
                Pull(self.key, span.start, span.stop, version, parameters=parameters, state=state)
            ),
            into=lambda _, nbytes: room if nbytes == room.nbytes else None,
            deadline_s=PULL_S,
            lane="bulk",
        )
        head: Pulled = codec.decode(answer.meta, Pulled, "piece's head")
        if answer.vector_nbytes != room.nbytes or head.version < version:
            raise NobodyGivesError("the piece that came isn't what was asked for")
        scalars = head.scalars if state else {}
        try:
            await heavy(room.nbytes, lambda: self._fill(empty, room))
            _check_scalars(scalars, self.shape.scalars.keys() if state else set[str]())
        except PoisonedVectorError as error:
            self.strike(peer, str(error))
            raise
        return Contents(span, head.version, empty.parameters, empty.arrays, dict(scalars))

    def _fill(self, contents: Contents, room: memoryview) -> None:
        at = 0
        for view in contents.views:
            view[:] = room[at : at + view.nbytes]
            at += view.nbytes
        if contents.parameters is not None:
            mix.check_finite(contents.parameters, self.max_abs)
        for name, array in contents.arrays.items():
            if not np.isfinite(array).all():
                raise PoisonedVectorError(f"the optimizer's {name} isn't finite")


def _check_scalars(scalars: Mapping[str, float], wanted: Set[str]) -> None:
    if scalars.keys() != wanted:
        raise PoisonedVectorError("the optimizer's state has other parts than ours")
    if not all(0 <= value <= MAX_SCALAR for value in scalars.values()):
        raise PoisonedVectorError("the optimizer's state holds an impossible number")


async def restore(shard: Shard, parts: Sequence[HeldSpan], source: ShardSource) -> bool:
    """Fill ``shard`` piece by piece.

    Returns:
        Whether the optimizer goes on with the state it had.

    Raises:
        NobodyGivesError: a piece can't be had from anybody.
    """
    template = shard.state()
    arrays, scalars = split_state(template)
    filled: dict[str, AnyArray] = {name: np.zeros_like(array) for name, array in arrays.items()}
    counts: dict[str, float] = dict.fromkeys(scalars, 0.0)
    whole = True
    for piece in parts:
        found = await _first(piece.span, piece.holders, source, parameters=True)
        if found is None or found.parameters is None:
            raise NobodyGivesError(f"nobody gives entries {piece.span.start} to {piece.span.stop - 1}")
        where = slice(piece.span.start - shard.span.start, piece.span.stop - shard.span.start)
        np.copyto(shard.parameters[where], found.parameters)
        if template and not found.arrays and not found.scalars:
            recent = [one for one in piece.holders if one.state and one.version >= found.version - STATE_LAG]
            state = await _first(piece.span, recent, source, parameters=False)
        else:
            state = found
        if state is None:
            whole = False
            continue
        for name, array in state.arrays.items():
            filled[name][where] = array
        counts = {name: max(count, state.scalars.get(name, 0.0)) for name, count in counts.items()}
    if whole and template:
        numbers = {name: np.asarray(count, template[name].dtype) for name, count in counts.items()}
        shard.load({**filled, **numbers})
    return whole


async def _first(
    span: ShardSpan, holders: Sequence[Holder], source: ShardSource, *, parameters: bool
) -> Contents | None:
    """Ask one holder after the other."""
    for holder in holders:
        try:
            return await source.pull(
                holder.peer, span, holder.version, parameters=parameters, state=holder.state
            )
        except (TransportError, PoisonedVectorError):
            continue
    return None
