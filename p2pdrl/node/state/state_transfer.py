"""Gives a node's whole state to a peer, and adopts a peer's: parameters, sidecar, policy version.

A node adopts a state when it joins, when it meets a greater lineage, and when it has fallen too far behind.
The state travels as float32 parameters followed by the sidecar's bytes, with a SHA-256 of each in the head.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from p2pdrl.clock import Clock
from p2pdrl.errors import PeerRefusedError, PoisonedVectorError, TensorError, TransportError, WireError
from p2pdrl.group.compatibility import Natural, Short
from p2pdrl.ids import short
from p2pdrl.node.background import FirstFailure
from p2pdrl.node.events import EventLog
from p2pdrl.tensors import mix
from p2pdrl.tensors.board import BoardSpec, DaemonBoard
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.sidecar import AnyArray
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply, Transport

__all__ = [
    "ROUTE",
    "Adoptions",
    "Donors",
    "OwnState",
    "StateHead",
    "StateRequest",
    "StateServer",
    "TransferredState",
    "fetch",
    "params_hash",
    "without_moments",
]

Donors = Callable[[], Sequence[tuple[str, Address]]]
"""Living members, the best donor first."""

ROUTE = "state"
DEADLINE_S = 10.0
SLOWEST_BYTES_S = 1e6
"""A donor that gives less than this a second isn't waited for: there are others."""
RETRY_EVERY_S = 0.5
MAX_SERVED_AT_ONCE = 2
"""A state may be large: more askers at once are sent elsewhere, or told to come again."""
FLOAT32_MAX = float(np.finfo(np.float32).max)


class StateRequest(msgspec.Struct, frozen=True):
    """What the asking node expects; a donor of another layout refuses."""

    task_hash: str
    layout_hash: str
    sidecar_hash: str


class StateHead(msgspec.Struct, frozen=True):
    """What goes before the state."""

    policy_version: Natural
    lineage: Short
    lineage_steps: Natural
    params_hash: str
    sidecar_hash: str
    """SHA-256 of the sidecar's bytes; empty when no sidecar comes along."""
    params_bytes: Natural
    sidecar_bytes: Natural


@dataclass(frozen=True)
class TransferredState:
    """A state that arrived whole: its hashes fit and all its numbers are finite."""

    head: StateHead
    vector: Float32Array
    """Flat float32, all parameters."""
    sidecar: dict[str, AnyArray] | None


class OwnState(NamedTuple):
    """What a node gives."""

    board: DaemonBoard
    spec: BoardSpec
    task_hash: str
    lineage: str
    lineage_steps: int


def params_hash(vector: Float32Array) -> str:
    """Return the SHA-256 of a float32 vector's bytes, 64 hex digits."""
    return hashlib.sha256(vector.data).hexdigest()


def _pack(own: OwnState) -> tuple[Reply, StateHead]:
    """Return the answer that carries our state, and its head."""
    spec = own.spec
    vector = np.empty(spec.layout.size, np.float32)
    version = own.board.now(vector).policy_version
    sidecar = own.board.sidecar()
    _check_finite(vector, sidecar, FLOAT32_MAX)
    packed = bytearray(spec.sidecar.nbytes if sidecar is not None else 0)
    if sidecar is not None:
        spec.sidecar.write(sidecar, spec.sidecar.views(packed))
    head = StateHead(
        policy_version=version,
        lineage=own.lineage,
        lineage_steps=own.lineage_steps,
        params_hash=params_hash(vector),
        sidecar_hash=hashlib.sha256(packed).hexdigest() if packed else "",
        params_bytes=vector.nbytes,
        sidecar_bytes=len(packed),
    )
    parts = [vector.data.cast("B")] + ([memoryview(packed)] if packed else [])
    return Reply(msgspec.msgpack.encode(head), vector=parts), head


async def fetch(
    transport: Transport,
    donor: str,
    address: Address,
    *,
    request: StateRequest,
    spec: BoardSpec,
    max_abs: float,
) -> TransferredState:
    """Take the state of ``donor``; it must fit our ``spec``, and no parameter may exceed ``max_abs``.

    Raises:
        TransportError: the donor didn't answer, refused, or sent something that doesn't fit.
        PoisonedVectorError: its parameters are too large, or something in its state isn't finite.
    """
    size_bytes = 4 * spec.layout.size
    buffer = bytearray(size_bytes + spec.sidecar.nbytes)

    def into(_: bytes, nbytes: int) -> memoryview | None:
        fits = nbytes in (size_bytes, size_bytes + spec.sidecar.nbytes)
        return memoryview(buffer)[:nbytes] if fits else None

    answer = await transport.call(
        address,
        donor,
        ROUTE,
        msgspec.msgpack.encode(request),
        into=into,
        deadline_s=DEADLINE_S + len(buffer) / SLOWEST_BYTES_S,
        lane="bulk",
    )
    return await asyncio.to_thread(_unpack, answer.meta, answer.vector_nbytes, buffer, spec, max_abs)


def _unpack(meta: bytes, nbytes: int, buffer: bytearray, spec: BoardSpec, max_abs: float) -> TransferredState:
    size_bytes = 4 * spec.layout.size
    head: StateHead = codec.decode(meta, StateHead, "donor's head")
    told = (head.params_bytes, head.sidecar_bytes)
    if sum(told) != nbytes or told not in ((size_bytes, 0), (size_bytes, spec.sidecar.nbytes)):
        raise WireError("the donor sent another length than its head says")
    vector = np.frombuffer(buffer, np.float32, spec.layout.size)
    packed = memoryview(buffer)[head.params_bytes : nbytes]
    if params_hash(vector) != head.params_hash:
        raise WireError("the parameters that arrived don't have the hash that the donor told")
    if packed.nbytes and hashlib.sha256(packed).hexdigest() != head.sidecar_hash:
        raise WireError("the sidecar that arrived doesn't have the hash that the donor told")
    sidecar = dict(spec.sidecar.views(packed)) if packed.nbytes else None
    _check_finite(vector, sidecar, max_abs)
    return TransferredState(head, vector, sidecar)


def _check_finite(vector: Float32Array, sidecar: dict[str, AnyArray] | None, max_abs: float) -> None:
    mix.check_finite(vector, max_abs)
    for name, value in (sidecar or {}).items():
        if not np.isfinite(value).all():
            raise PoisonedVectorError(f"{name} of the sidecar holds NaN or infinity")


class StateServer:
    """Serves the state route: newcomers ask there, and nodes that fell behind.

    Args:
        own: tells our state as it is now; None while there is none to give.
    """

    def __init__(self, own: Callable[[], OwnState | None], events: EventLog) -> None:
        self._own = own
        self._events = events
        self._served = 0

    async def answer(self, incoming: Incoming) -> Reply:
        """Give our state.

        Raises:
            Refusal: malformed (400), no usable state (503), another layout or task (409), enough others
                served (429).
        """
        try:
            request: StateRequest = codec.decode(incoming.meta, StateRequest, "state request")
        except WireError as error:
            raise Refusal(400, str(error)) from error
        own = self._own()
        if own is None:
            raise Refusal(503, "no state to give yet")
        if (request.layout_hash, request.sidecar_hash) != (own.spec.layout.hash, own.spec.sidecar.hash):
            raise Refusal(409, "our parameters have another layout than you expect")
        if request.task_hash != own.task_hash:
            raise Refusal(409, "our task is another one")
        if self._served >= MAX_SERVED_AT_ONCE:
            raise Refusal(429, "giving our state to others right now; ask again or elsewhere")
        self._served += 1
        try:
            reply, head = await asyncio.to_thread(_pack, own)
        except PoisonedVectorError as error:
            self._served -= 1
            raise Refusal(503, f"our own state is unusable: {error}") from error
        except BaseException:
            self._served -= 1
            raise

        def ended(sent: bool) -> None:
            self._served -= 1
            if sent:
                self._events.emit(
                    "state-served",
                    f"gave state of version {head.policy_version} to {short(incoming.sender)}",
                    peer=incoming.sender,
                    policy_version=head.policy_version,
                    params_hash=head.params_hash,
                )

        return Reply(reply.meta, vector=reply.vector, on_end=ended)


class Adoptions:
    """Adopts states: the first one, and later ones in the background, one at a time.

    Args:
        max_abs: no state with a parameter beyond it is taken.
        request: tells what is expected of a donor.
        spec: tells our own layout.
        take: makes a state that arrived our own: ``(donor, state, why)``.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        events: EventLog,
        max_abs: float,
        donors: Donors,
        clock: Clock,
        request: Callable[[], StateRequest],
        spec: Callable[[], BoardSpec],
        take: Callable[[str, TransferredState, str], Awaitable[None]],
    ) -> None:
        self._transport = transport
        self._events = events
        self._max_abs = max_abs
        self._donors = donors
        self._clock = clock
        self._request = request
        self._spec = spec
        self._take = take
        self._task: asyncio.Task[bool] | None = None
        self._since_s = 0.0
        self._failure = FirstFailure()

    @property
    def under_way(self) -> bool:
        """Whether one is going on in the background."""
        return self._task is not None

    @property
    def seconds(self) -> float:
        """How long it has been going on; 0 when none is."""
        return 0.0 if self._task is None else self._clock.monotonic() - self._since_s

    async def first(self, give_up: Callable[[], bool]) -> tuple[str, TransferredState] | None:
        """Return the state of the best donor, for a node that has none; None when ``give_up`` says so."""
        while True:
            found = await self._download(self._donors())
            if found is not None or give_up():
                return found
            await asyncio.sleep(RETRY_EVERY_S)

    async def newest(self, lineage: str) -> TransferredState | None:
        """Return the best donor's state of a lineage, taken by nobody yet; None when nobody gives one."""
        found = await self._download(self._donors(), lineage)
        return None if found is None else found[1]

    def begin(self, donor: str, lineage: str | None, why: str) -> None:
        """Adopt a state in the background, and tell ``why`` when it is done.

        Args:
            donor: asked first; empty begins with the best.
            lineage: the only one that will do; None takes any.
        """
        if self._task is None:
            self._since_s = self._clock.monotonic()
            self._task = asyncio.create_task(self._adopt(donor, lineage, why), name="adoption")
            self._task.add_done_callback(self._ended)

    async def ended(self) -> bool:
        """Wait for the end of the one under way; False when there is none, or nobody gave a state."""
        task = self._task
        if task is None:
            return False
        await asyncio.wait([task])
        return not task.cancelled() and task.exception() is None and task.result()

    async def watch(self) -> None:
        """Wait for ever; raise what ended an adoption, by now or before: a bug of ours."""
        await self._failure.watch()

    async def stop(self) -> None:
        """Give up the one under way."""
        if self._task is not None:
            task = self._task
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _adopt(self, donor: str, lineage: str | None, why: str) -> bool:
        donors = sorted(self._donors(), key=lambda entry: entry[0] != donor)
        found = await self._download(donors, lineage)
        if found is not None:
            await self._take(*found, why)
        return found is not None

    async def _download(
        self, donors: Sequence[tuple[str, Address]], lineage: str | None = None
    ) -> tuple[str, TransferredState] | None:
        """Return the first donor that gives a state of ``lineage`` (None: any), and the state."""
        request, spec = self._request(), self._spec()
        for donor, address in donors:
            try:
                state = await fetch(
                    self._transport, donor, address, request=request, spec=spec, max_abs=self._max_abs
                )
            except (TransportError, TensorError) as error:
                if not (isinstance(error, PeerRefusedError) and error.status == 503):
                    text = f"{short(donor)} at {address} didn't give its state: {error}"
                    self._events.emit("donor-failed", text, level="warning", peer=donor)
            else:
                if lineage in (None, state.head.lineage):
                    return donor, state
        return None

    def _ended(self, task: asyncio.Task[bool]) -> None:
        self._task = None
        self._failure.note(task)


def without_moments(state: TransferredState, spec: BoardSpec) -> TransferredState:
    """Return ``state`` with its normaliser moments zeroed: they are the donor's own counts, not ours."""
    if state.sidecar is None:
        return state
    moments = {item.name for item in spec.sidecar.items if item.rule == "moments"}
    sidecar = {name: value * 0 if name in moments else value.copy() for name, value in state.sidecar.items()}
    return TransferredState(state.head, state.vector, sidecar)
