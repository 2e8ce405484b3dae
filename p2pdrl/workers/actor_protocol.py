"""What the daemon and its actor processes say to each other.

An actor inherits its end of a socket pair and two pieces of shared memory: the ring that its unrolls go
through (`tensors.unroll_ring`) and the policy that it acts with (`tensors.shared_policy`).

    daemon                          actor
      │  Act                          │
      ├──────────────────────────────▶│  builds environments and network
      │        Acts, or ActorFailed   │
      │◀──────────────────────────────┤
      │                               │  makes unrolls until it is killed, or the daemon is gone
      │                      Crashed  │
      │◀──────────────────────────────┤  an error ends it, of an environment, say

All else passes through the memory. Frames are those of `protocol`. Torch-free: the daemon imports this
module.
"""

from __future__ import annotations

import msgspec

from p2pdrl.transport.codec import decode
from p2pdrl.workers.protocol import Crashed

__all__ = [
    "Act",
    "ActorFailed",
    "Acts",
    "FromActor",
    "actor_seed",
    "decode_act",
    "decode_from_actor",
]

_ACTOR_STEP = 0x9E3779B1  # 2³²/φ, odd
_LIFE_STEP = 0x85EBCA77


class Act(msgspec.Struct, frozen=True, tag="act"):
    """What to act in, and how."""

    task: bytes
    """The task as JSON of `p2pdrl.config.task.TaskConfig`."""
    number: int
    """Of the actor: its lane in the ring."""
    seed: int
    """Of its environments and actions."""
    spec: bytes
    """msgpack of `UnrollSpec.to_wire`."""
    policy_size: int
    """D."""
    threads: int
    allow_import: bool
    step_delay_s: float


class Acts(msgspec.Struct, frozen=True, tag="acts"):
    """Environments and network are built."""


class ActorFailed(msgspec.Struct, frozen=True, tag="actor_failed"):
    """The actor can't act as configured, and starting it again wouldn't help."""

    message: str
    usage: bool
    """True when the person can mend it (exit code 2)."""


FromActor = Acts | ActorFailed | Crashed

def decode_act(body: bytes) -> Act:
    """Decode the frame's body that an actor reads.

    Raises:
        WireError: it is something else.
    """
    message: Act = decode(body, Act, "message of the daemon")
    return message


def decode_from_actor(body: bytes) -> FromActor:
    """Decode a frame's body as the daemon reads it.

    Raises:
        WireError: it is no message of an actor.
    """
    message: FromActor = decode(body, FromActor, "message of the actor")
    return message


def actor_seed(seed: int, number: int, life: int) -> int:
    """Return the seed of one actor process; the first one's of actor 0 is the learner's own.

    Args:
        seed: of this node's learner.
        number: of the actor.
        life: how many processes it had before: a successor plays other episodes.
    """
    return (seed + number * _ACTOR_STEP + life * _LIFE_STEP) % 2**31
