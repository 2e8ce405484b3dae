"""What workers and servers say to each other, on two routes.

    worker ── GradientPush, gradient or parameters ──▶ server    route "push"
           ◀── ServerAnswer, parameters ──
    server ── Pull ──▶ whoever holds a piece                     route "shard"
           ◀── Pulled, parameters, optimizer state ──
    server that leaves ── Take ──▶ its successor                 route "shard": which then pulls

Every message carries the view in which it counts. All fields are bounded; vectors are checked where they
are read.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from p2pdrl.group.compatibility import Natural, Short
from p2pdrl.group.view import MAX_MEMBERS, ViewKey
from p2pdrl.strategies.servers.shard_plan import ShardSpan, Step

__all__ = ["GradientPush", "Op", "Pull", "Pulled", "ServerAnswer", "ShardRequest", "Take"]

Op = Literal["seed", "step", "idle", "fetch"]
"""``seed``: parameters, whose mean the shard begins with; ``step``: a gradient; ``idle``: no gradient for
this round; ``fetch``: only the parameters are wanted."""
Weight = Annotated[float, Meta(ge=0, le=1e12)]


class GradientPush(msgspec.Struct, frozen=True):
    """From a worker to the server of one shard.

    Attributes:
        key: view in force at the worker.
        shard: index of the shard.
        op: what it is about.
        number: version of the shard that a gradient was computed on; the least one that a fetch asks for.
        base: version that the worker holds, to which a difference may be sent; -1 for none.
        weight: samples behind a gradient.
        policy: the worker's policy version.
        wants: whether the answer shall bring parameters.
        call: its number, for calls whose answers are held (see `group.calls`).
        left: gradients of the worker's update that come after this one.
    """

    key: ViewKey
    shard: Annotated[int, Meta(ge=0, lt=4096)]
    op: Op
    number: Natural
    base: Step = -1
    weight: Weight = 0.0
    policy: Natural = 0
    wants: bool = True
    call: Natural = 0
    left: Natural = 0


class ServerAnswer(msgspec.Struct, frozen=True):
    """A server's answer.

    Attributes:
        version: of the shard now.
        kind: what follows: the whole slice, the difference to ``base``, or nothing.
        outcome: ``ok``: it counted; ``late``: its round was over; ``stale``: its gradient was too old;
            ``waiting``: the round hasn't begun.
        progress: samples whose gradients are in the shard, since the seed.
        merged: sender and weight of each contribution to the round.
        missing: without whom it closed.
        ends_update: whether the leader's update ended with the round (see `group.round_collector`).
        staleness: steps that the shard had made since the parameters of an asynchronous gradient.
    """

    version: Natural
    kind: Literal["whole", "delta", "nothing"] = "nothing"
    outcome: Literal["ok", "late", "stale", "waiting"] = "ok"
    progress: Natural = 0
    merged: Annotated[tuple[tuple[Short, Weight], ...], Meta(max_length=MAX_MEMBERS)] = ()
    missing: Annotated[tuple[Short, ...], Meta(max_length=MAX_MEMBERS)] = ()
    ends_update: bool = False
    staleness: Natural = 0


class _SpanMessage(msgspec.Struct, frozen=True):
    """About the entries from ``start`` up to ``stop``."""

    key: ViewKey
    start: Natural
    stop: Natural
    version: Natural

    @property
    def span(self) -> ShardSpan:
        """The entries."""
        return ShardSpan(self.start, self.stop)


class Pull(_SpanMessage, frozen=True, tag="pull"):
    """A request for what the receiver holds of a span, of ``version`` or later."""

    parameters: bool = True
    state: bool = False


class Pulled(msgspec.Struct, frozen=True):
    """The head of a piece; then come the parameters, and each array of state in the order of its name.

    Attributes:
        version: of what follows.
        scalars: state that isn't one number for each parameter.
    """

    version: Natural
    scalars: Annotated[dict[Short, float], Meta(max_length=16)]


class Take(_SpanMessage, frozen=True, tag="take"):
    """A leaving server's request that its successor pull the shard now."""


ShardRequest = Pull | Take
