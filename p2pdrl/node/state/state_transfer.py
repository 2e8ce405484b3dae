"""Hands a node's whole state to a peer, and takes a peer's: parameters, sidecar, policy version.

Used when a node joins, adopts another lineage, or has fallen too far behind. The state travels
as float32 parameters followed by the sidecar's bytes, with a SHA-256 of each in the head.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass

import msgspec
import numpy as np

from p2pdrl.errors import PoisonedVectorError, WireError
from p2pdrl.group.compatibility import Natural, Short
from p2pdrl.tensors import mix
from p2pdrl.tensors.board import BoardSpec, DaemonBoard
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.sidecar import AnyArray
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply, Transport

__all__ = [
    "ROUTE",
    "StateHead",
    "StateRequest",
    "TransferredState",
    "decode_request",
    "fetch",
    "offer",
    "params_hash",
]

ROUTE = "state"
DEADLINE_S = 10.0
SLOWEST_BYTES_S = 1e6
"""A donor that gives less than this a second isn't waited for: there are others."""
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


def params_hash(vector: Float32Array) -> str:
    """Return the SHA-256 of a float32 vector's bytes, 64 hex digits."""
    return hashlib.sha256(vector.data).hexdigest()


def decode_request(incoming: Incoming) -> StateRequest:
    """Read the request.

    Raises:
        Refusal: 400 when it can't be read.
    """
    try:
        request: StateRequest = codec.decode(incoming.meta, StateRequest, "state request")
    except WireError as error:
        raise Refusal(400, str(error)) from error
    return request


async def offer(
    board: DaemonBoard, spec: BoardSpec, lineage: str, lineage_steps: int
) -> tuple[Reply, StateHead]:
    """Return the answer that carries our state, and its head.

    Raises:
        TensorError: nothing has been published yet.
        PoisonedVectorError: something in it isn't finite.
    """
    return await asyncio.to_thread(_pack, board, spec, lineage, lineage_steps)


def _pack(board: DaemonBoard, spec: BoardSpec, lineage: str, steps: int) -> tuple[Reply, StateHead]:
    vector = np.empty(spec.layout.size, np.float32)
    version = board.now(vector).policy_version
    sidecar = board.sidecar()
    _check_finite(vector, sidecar, FLOAT32_MAX)
    packed = bytearray(spec.sidecar.nbytes if sidecar is not None else 0)
    if sidecar is not None:
        spec.sidecar.write(sidecar, spec.sidecar.views(packed))
    head = StateHead(
        policy_version=version,
        lineage=lineage,
        lineage_steps=steps,
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
    """Take ``donor``'s state.

    Args:
        transport: how to reach it.
        donor: its node id.
        address: where it listens.
        request: what we expect.
        spec: our own layout; the answer must fit it exactly.
        max_abs: largest parameter accepted.

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
