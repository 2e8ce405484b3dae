"""What a node holds of the parameters: the shard that it serves, replicas of others', and a whole copy.

When another node becomes the server of a shard, `restore` fills it piece by piece from whoever holds the
freshest contents: parameters from the highest version, optimizer state with them where the holder has it,
else from a copy at most `STATE_LAG` steps older. When part of a shard's state can't be had, the optimizer of
the whole shard begins anew (for Adam: larger steps for a while, as at the start of a training).

Shapes: every vector is flat, of the length of its span; names carry no suffix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from p2pdrl.config.strategy import Compression, ServerOptions
from p2pdrl.errors import PoisonedVectorError, TransportError
from p2pdrl.group.view import ViewKey
from p2pdrl.strategies.offload import heavy
from p2pdrl.strategies.servers.messages import Pull, Pulled
from p2pdrl.strategies.servers.shard_plan import MOST_CLAIMS, STATE_LAG, Claim, HeldSpan, Holder, ShardSpan
from p2pdrl.tensors import mix
from p2pdrl.tensors.compression import Codec, make_codec
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.optimizers import ShardOptimizer, update_rule
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Address, Refusal, Transport

__all__ = [
    "Contents",
    "NobodyGivesError",
    "Puller",
    "ReplicaStore",
    "Shard",
    "ShardVersion",
    "ShardVersions",
    "difference_codec",
    "restore",
]

SNAPSHOTS = 2
"""Pieces that are copied and sent at a time; other pulls wait."""
MOST_KEPT = 16
PULL_S = 30.0
"""The longest that one piece may take."""
MAX_SCALAR = 2.0**53

AnyArray = npt.NDArray[np.generic]


class ShardVersion:
    """One version of the parameters, kept while somebody holds it.

    Attributes:
        vector: unchanged while it is held.
        delta: encoded difference to the version before, where there is one.
    """

    def __init__(self, size: int, delta_nbytes: int, free: Callable[[ShardVersion], None]) -> None:
        self.version = -1
        self.vector: Float32Array = np.empty(size, np.float32)
        self.room = memoryview(bytearray(delta_nbytes))
        self.delta: memoryview | None = None
        self._free = free
        self._held = 0

    def hold(self) -> ShardVersion:
        """Keep it until `release` was called as often."""
        self._held += 1
        return self

    def release(self) -> None:
        """Hold it no longer."""
        self._held -= 1
        if not self._held:
            self._free(self)


class ShardVersions:
    """The newest version, and those before it that are still being sent.

    A slow connection may still send an older version while the server steps on, so each has a buffer of its
    own, which is never written to while it is held, and used again afterwards.

    Args:
        size: entries of the shard.
        delta_nbytes: longest encoded difference; 0 when differences aren't sent.
    """

    def __init__(self, size: int, delta_nbytes: int = 0) -> None:
        self._size = size
        self._delta_nbytes = delta_nbytes
        self._idle: list[ShardVersion] = []
        self.newest: ShardVersion | None = None
        """What goes out now; None before the first."""

    def blank(self) -> ShardVersion:
        """Return a buffer for the next version."""
        idle = self._idle
        blank = idle.pop() if idle else ShardVersion(self._size, self._delta_nbytes, self._free)
        blank.delta = None
        return blank

    def put(self, written: ShardVersion, version: int) -> None:
        """Make what was written into a blank the newest."""
        written.version = version
        before, self.newest = self.newest, written.hold()
        if before is not None:
            before.release()

    def _free(self, unused: ShardVersion) -> None:
        if len(self._idle) < 2:
            self._idle.append(unused)


def optimizer_of(config: ServerOptions, size: int) -> ShardOptimizer:
    """A fresh optimizer for ``size`` entries, as the strategy's options say."""
    rule = update_rule(config.optimizer, momentum=config.momentum, decay=config.decay, eps=config.eps)
    return ShardOptimizer(rule, size)


def difference_codec(kind: Compression, size: int) -> Codec | None:
    """Make the codec of differences between versions; None where whole slices travel.

    Sparse kinds would show workers a fraction of each step, so differences are at least of 16 bits there.
    """
    if kind == "none":
        return None
    return make_codec("int8" if kind == "int8" else "bf16", size, feedback=False)


class Shard:
    """A slice of the parameters with its optimizer.

    Parameters are kept in float32 and stepped in place. Workers get versions of them: the whole slice, or the
    rounded difference to the version before. Rounding is never lost: the next difference is taken from what
    workers hold, so they follow the server exactly on average, and a learning rate of 0 changes nothing.

    Methods are arithmetic alone; the caller holds `lock` around each, and runs it in a thread.

    Args:
        version: count of steps behind its contents.
        differences: whether versions carry encoded differences.
    """

    def __init__(self, span: ShardSpan, config: ServerOptions, version: int, *, differences: bool) -> None:
        self.span = span
        self.version = version
        self.progress = 0
        """Samples whose gradients are in it."""
        self.lock = asyncio.Lock()
        """Held by whoever steps, copies or replaces the contents."""
        self.stepping = False
        """Whether a step is under way that will raise the version."""
        self.parameters: Float32Array = np.zeros(span.size, np.float32)
        self.optimizer = optimizer_of(config, span.size)
        self._codec = difference_codec(config.compression, span.size) if differences else None
        self._versions = ShardVersions(span.size, 0 if self._codec is None else self._codec.max_nbytes)
        self._scratch: Float32Array = np.empty(span.size, np.float32)

    @property
    def claim(self) -> Claim:
        """What our note says of it; a step under way counts as done: whoever asks for its result waits."""
        return Claim(self.span.start, self.span.stop, self.version + self.stepping, live=True)

    @property
    def published(self) -> ShardVersion | None:
        """What goes out to workers now; None before the first."""
        return self._versions.newest

    def apply(self, gradient: Float32Array, learning_rate: float) -> None:
        """Let the optimizer make one step; the caller counts the version."""
        self.optimizer.step(self.parameters, gradient, learning_rate)

    def write_version(self) -> ShardVersion:
        """Write the parameters as they are into a buffer for workers; `publish` puts it out."""
        written, before = self._versions.blank(), self._versions.newest
        if self._codec is None or before is None:
            np.copyto(written.vector, self.parameters)
            return written
        np.subtract(self.parameters, before.vector, out=self._scratch)
        nbytes = self._codec.encode(self._scratch, written.room)
        written.delta = written.room[:nbytes]
        self._codec.decode(written.delta, self._scratch)
        np.add(before.vector, self._scratch, out=written.vector)
        return written

    def publish(self, written: ShardVersion, version: int) -> None:
        """Put a buffer out as ``version``; in the event loop, like all that reads `published`."""
        self.version = version
        self._versions.put(written, version)

    async def republish(self, version: int | None = None) -> None:
        """Publish the parameters as they are, unless they are out: as ``version``, or as the count says."""
        async with self.lock:
            wanted = self.version if version is None else version
            out = self.published
            if out is None or not wanted == out.version == self.version:
                self.publish(await heavy(8 * self.span.size, self.write_version), wanted)


@dataclass(frozen=True)
class Contents:
    """Parameters of a span with the optimizer's state.

    Attributes:
        version: count of steps behind it.
        parameters: None where only state is meant.
        arrays: state with one number for each parameter, by name.
        scalars: other state, by name.
    """

    span: ShardSpan
    version: int
    parameters: Float32Array | None
    arrays: dict[str, AnyArray] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)

    @property
    def views(self) -> list[memoryview]:
        """Its vectors in the order of the wire."""
        vectors: list[AnyArray] = [] if self.parameters is None else [self.parameters]
        vectors += [self.arrays[name] for name in sorted(self.arrays)]
        return [vector.data.cast("B") for vector in vectors]

    def part(self, span: ShardSpan, *, parameters: bool, state: bool, copy: bool) -> Contents:
        """Return the part of ``span``, which lies within; as views unless ``copy``."""
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


def split_state(state: Mapping[str, AnyArray]) -> tuple[dict[str, AnyArray], dict[str, float]]:
    """Split an optimizer's state into arrays over the parameters and single numbers."""
    arrays = {name: value for name, value in state.items() if value.ndim == 1}
    scalars = {name: float(value) for name, value in state.items() if value.ndim == 0}
    return arrays, scalars


class ReplicaStore:
    """The three kinds of contents that one node holds.

    Args:
        size: D.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.shard: Shard | None = None
        """The shard that this node serves, or served until the present view."""
        self.kept: dict[ShardSpan, Contents] = {}
        """Replicas of other servers' shards; never written to, only replaced."""
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
        """What our note says of it."""
        live = () if self.shard is None or self.shard.published is None else (self.shard.claim,)
        kept = [Claim(*kept.span, kept.version, live=False) for kept in self.kept.values()]
        return (*live, *kept)[:MOST_CLAIMS]

    @property
    def copy_version(self) -> int:
        """Version of the whole copy; -1 for none."""
        return -1 if self.copy is None else self.copy.version

    def blank_copy(self) -> Float32Array:
        """Return a buffer for the next whole copy."""
        if self._spare is None:
            self._spare = np.zeros(self._size, np.float32)
        return self._spare

    async def replace_copy(self, vector: Float32Array, version: int) -> None:
        """Make ``vector``, which came from `blank_copy`, the whole copy; the old one becomes the blank."""
        async with self._copy_readers:
            self._spare = None if self.copy is None else self.copy.parameters
            self.copy = Contents(ShardSpan(0, self._size), version, vector)

    def keep(self, contents: Contents) -> None:
        """Keep a replica of another server's shard; an older version never replaces a newer."""
        have = self.kept.get(contents.span)
        if have is not None and have.version > contents.version:
            return
        self.kept.pop(contents.span, None)
        self.kept[contents.span] = contents
        while len(self.kept) > MOST_KEPT:
            del self.kept[next(iter(self.kept))]

    def replace_shard(self, shard: Shard) -> None:
        """Serve another shard from now on; the one before is kept for whoever serves it now."""
        before, self.shard = self.shard, shard
        if before is not None and before is not shard and before.published is not None:
            arrays, scalars = split_state(before.optimizer.state())
            self.keep(Contents(before.span, before.version, before.parameters, arrays, scalars))

    def forget(self, spans: set[ShardSpan], *, keep_shard: bool) -> None:
        """Keep only the replicas of ``spans``, and our shard if we still serve it."""
        self.kept = {span: kept for span, kept in self.kept.items() if span in spans}
        if not keep_shard:
            self.shard = None

    def clear(self) -> None:
        """Hold nothing any more."""
        self.shard = self.copy = None
        self.kept = {}
        self.progress, self.branch = 0, ""

    async def snapshot(
        self, span: ShardSpan, version: int, *, parameters: bool, state: bool
    ) -> Contents | None:
        """Return a copy of the newest that we hold of ``span``; None when that is older than ``version``.

        Replicas and the whole copy are preferred only where they are newer than the shard.
        """
        shard, copy = self.shard, self.copy
        options: list[Contents] = [kept for kept in self.kept.values() if kept.span.holds(span)]
        if copy is not None and not state:
            options.append(copy)
        best = max(options, key=lambda kept: kept.version, default=None)
        if shard is not None and shard.published is not None and shard.span.holds(span):
            async with shard.lock:
                if shard.version >= max(version, -1 if best is None else best.version):
                    arrays, scalars = split_state(shard.optimizer.state())
                    whole = Contents(shard.span, shard.version, shard.parameters, arrays, scalars)
                    return await heavy(
                        4 * span.size * (1 + len(arrays)),
                        lambda: whole.part(span, parameters=parameters, state=state, copy=True),
                    )
        if best is None or best.version < version:
            return None
        if best is not copy:
            return best.part(span, parameters=parameters, state=state, copy=False)
        async with self._copy_readers:
            held = self.copy
            if held is None or held.version < version:
                return None
            return await heavy(
                4 * span.size, lambda: held.part(span, parameters=parameters, state=False, copy=True)
            )

    async def serve(self, pull: Pull) -> tuple[Pulled, Contents]:
        """Answer a peer that pulls; the caller says `sent` once the answer has gone out.

        Raises:
            Refusal: we hold nothing so new (409), or the span is none (400).
        """
        if not pull.start < pull.stop <= self._size:
            raise Refusal(400, "the piece lies outside the vector")
        await self._sending.acquire()
        found = None
        try:
            found = await self.snapshot(pull.span, pull.version, parameters=pull.parameters, state=pull.state)
        finally:
            if found is None:
                self._sending.release()
        if found is None:
            raise Refusal(409, "nothing so new is held here")
        return Pulled(found.version, found.scalars), found

    def sent(self) -> None:
        """An answer to a pull has gone out."""
        self._sending.release()


class NobodyGivesError(TransportError):
    """None of the holders of a piece gave it."""


@dataclass(frozen=True)
class Puller:
    """Pulls pieces from peers, and from our own store without the network, within one view.

    Args:
        transport: to the others.
        address_of: where a member listens.
        strike: notes that a peer sent something poisoned.
        config: names the optimizer whose state is pulled.
    """

    me: str
    key: ViewKey
    store: ReplicaStore
    transport: Transport
    address_of: Callable[[str], Address]
    max_abs: float
    strike: Callable[[str, str], None]
    config: ServerOptions

    async def pull(
        self, peer: str, span: ShardSpan, version: int, *, parameters: bool, state: bool
    ) -> Contents:
        """Get what ``peer`` holds of ``span``.

        Args:
            peer: node id, maybe our own.
            version: the least worth having.

        Raises:
            TransportError: it doesn't answer, or not so.
            PoisonedVectorError: what it sent is unusable.
        """
        if peer == self.me:
            mine = await self.store.snapshot(span, version, parameters=parameters, state=state)
            if mine is None:
                raise NobodyGivesError("we don't hold that piece any more")
            return mine
        arrays, numbers = split_state(optimizer_of(self.config, 1).state()) if state else ({}, {})
        empty = Contents(
            span,
            version,
            np.empty(span.size, np.float32) if parameters else None,
            {name: np.empty(span.size, array.dtype) for name, array in arrays.items()},
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
            _check_scalars(scalars, numbers.keys())
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


async def restore(shard: Shard, parts: Sequence[HeldSpan], source: Puller) -> bool:
    """Fill ``shard`` piece by piece.

    Returns:
        Whether the optimizer goes on with the state it had.

    Raises:
        NobodyGivesError: a piece can't be had from anybody.
    """
    template = shard.optimizer.state()
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
        shard.optimizer.load({**filled, **numbers})
    return whole


async def _first(
    span: ShardSpan, holders: Sequence[Holder], source: Puller, *, parameters: bool
) -> Contents | None:
    """Pull from the first holder that gives the piece; None when none does."""
    for holder in holders:
        try:
            return await source.pull(
                holder.peer, span, holder.version, parameters=parameters, state=holder.state
            )
        except (TransportError, PoisonedVectorError):
            continue
    return None
