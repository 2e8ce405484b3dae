"""Filling a shard from whoever holds its pieces: ourselves, the server before us, a keeper, a worker.

Parameters come from the highest version. Optimizer state comes along where the holder has it, else from a
copy at most `STATE_LAG` steps older; when part of a shard's state can't be had, the optimizer of the whole
shard begins anew (for Adam: larger steps for a while, as at the start of a training).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from p2pdrl.errors import PoisonedVectorError, TransportError
from p2pdrl.strategies.group.view import ViewKey
from p2pdrl.strategies.heavy import heavy
from p2pdrl.strategies.servers.holdings import Contents, Holdings, StateShape, split_state
from p2pdrl.strategies.servers.messages import Pull, Pulled
from p2pdrl.strategies.servers.serving import STATE_LAG, Holder, Piece, Span
from p2pdrl.strategies.servers.shard import AnyArray, Shard
from p2pdrl.tensors import mix
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Address, Transport

__all__ = ["NobodyGivesError", "Puller", "restore"]

PULL_S = 30.0
"""The longest that one piece may take."""
MAX_SCALAR = 2.0**53


class NobodyGivesError(TransportError):
    """None of the holders of a piece gave it."""


class Source(Protocol):
    """Where pieces come from."""

    async def pull(self, peer: str, span: Span, version: int, *, parameters: bool, state: bool) -> Contents:
        """Get what ``peer`` holds of ``span``; raises `TransportError` or `PoisonedVectorError`."""
        ...


@dataclass
class Puller:
    """Pulls from peers, and from our own holdings without the network.

    Args:
        me: own id.
        key: view in force.
        holdings: ours.
        transport: to the others.
        address_of: where a member listens.
        max_abs: greatest entry accepted.
        strike: notes that a peer sent something poisoned.
        shape: of the optimizer's state.
    """

    me: str
    key: ViewKey
    holdings: Holdings
    transport: Transport
    address_of: Callable[[str], Address]
    max_abs: float
    strike: Callable[[str, str], None]
    shape: StateShape

    async def pull(self, peer: str, span: Span, version: int, *, parameters: bool, state: bool) -> Contents:
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
            mine = await self.holdings.snapshot(span, version, parameters=parameters, state=state)
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


async def restore(shard: Shard, parts: Sequence[Piece], source: Source) -> bool:
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
    span: Span, holders: Sequence[Holder], source: Source, *, parameters: bool
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
