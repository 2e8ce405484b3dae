"""What the daemon and its group process say to each other.

The group process averages through torch.distributed with those of the other members. The two hold the ends
of a Unix socket pair, framed as in `workers.protocol`; each order is answered once, in order, by what it asks
for or by `Broken`. Vectors don't travel here: they lie in shared memory whose descriptor the process
inherits, D float32 of the member's own and then D float32 of the result.

    daemon                          group process
      │                        Ready  │
      │◀──────────────────────────────┤  torch is imported
      │  Host                         │
      ├──────────────────────────────▶│  the view's first member only: opens the store where all meet
      │                      Hosting  │
      │◀──────────────────────────────┤  its port, which the daemon tells the others
      │  Join                         │
      ├──────────────────────────────▶│  meets the others; leaves any group that it was in
      │                       Joined  │
      │◀──────────────────────────────┤
      │  Reduce                       │
      ├──────────────────────────────▶│  averages with all of them
      │                      Reduced  │
      │◀──────────────────────────────┤

Torch-free: the daemon imports this module.
"""

from __future__ import annotations

import struct

import msgspec

from p2pdrl.errors import WireError
from p2pdrl.transport.codec import decode

__all__ = [
    "Broken",
    "FromGroup",
    "GroupReduced",
    "Host",
    "Hosting",
    "JoinGroup",
    "Joined",
    "Ready",
    "Reduce",
    "Row",
    "ToGroup",
    "decode_from_group",
    "decode_to_group",
    "frame",
    "memory_nbytes",
]

_LENGTH = struct.Struct("<I")


class Host(msgspec.Struct, frozen=True, tag="host"):
    """Open a store for a new group, on the address that the other members reach us at."""

    others: tuple[str, ...]
    """Host names or IP literals of the other members."""
    timeout_s: float
    """How long anybody waits for anybody."""


class JoinGroup(msgspec.Struct, frozen=True, tag="join"):
    """Meet the others."""

    rank: int
    """0 for the one that hosts the store."""
    size: int
    """Members, at least 2."""
    host: str
    """Where the store is; for rank 0 where any other member is."""
    port: int
    timeout_s: float
    """Greatest time of one operation of the group, too."""


class Reduce(msgspec.Struct, frozen=True, tag="reduce"):
    """Average the vectors that lie in the members' memories, weighted."""

    number: int
    """Of the round; the same at all members."""
    weight: float
    """0 for a member whose memory isn't read."""
    policy_version: int
    learning_rate: float
    """At which this member would step."""
    max_abs: float
    """Greatest entry that this member takes; the least of all members' counts."""
    bf16: bool
    """Whether numbers travel, and are added up, as bfloat16; the same at all members."""
    spread: bool
    """Whether squared norms of the members' vectors are wanted; the same at all members."""
    left: int = 0
    """Gradients of this member's update that come after this one."""


ToGroup = Host | JoinGroup | Reduce


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Waits for orders."""

    device: str
    """``cpu``, or the CUDA device that vectors would travel from."""


class Hosting(msgspec.Struct, frozen=True, tag="hosting"):
    """The store is open."""

    port: int


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """All have met."""

    backend: str
    """What carries the vectors: ``gloo`` or ``nccl``."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """What one member gave."""

    weight: float
    policy_version: int
    learning_rate: float
    square: float
    """‖x‖²; 0 unless it was asked for."""
    left: int = 0


class GroupReduced(msgspec.Struct, frozen=True, tag="reduced"):
    """The mean lies in the shared memory, the same bits at all members."""

    rows: tuple[Row, ...]
    """Of the members, by rank."""
    norm: float
    """‖mean‖."""
    sound: bool
    """Whether no entry is NaN or beyond the bound; the same at all members. Else the mean is no use."""


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """That failed: somebody is gone, or too late. The group is left; the process can join another."""

    message: str


FromGroup = Ready | Hosting | Joined | GroupReduced | Broken

_encoder = msgspec.msgpack.Encoder()


def memory_nbytes(size: int) -> int:
    """Bytes of the shared memory for vectors of ``size`` elements."""
    return 2 * 4 * size


def frame(message: ToGroup | FromGroup) -> bytes:
    """Return ``message`` as one frame, to be cut by `workers.protocol.FrameBuffer`."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def decode_to_group(body: bytes) -> ToGroup:
    """Decode a frame's body as the group process reads it.

    Raises:
        WireError: if it isn't a message of this protocol.
    """
    message: ToGroup = decode(body, ToGroup, "message of the daemon")
    return message


def decode_from_group(body: bytes) -> FromGroup:
    """Decode a frame's body as the daemon reads it.

    Raises:
        WireError: if it isn't a message of this protocol, or says what can't be.
    """
    message: FromGroup = decode(body, FromGroup, "message of the group process")
    if isinstance(message, Hosting) and not 0 < message.port < 1 << 16:
        raise WireError(f"the group process says that its store is at port {message.port}")
    return message
