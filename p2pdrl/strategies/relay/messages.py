"""What members of a `strom` swarm say to each other on the route ``relay``.

A `RelayPush` is followed by its messages, one after another; a `BaseState` by a base, as float32.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdrl.group.compatibility import Natural, Short, Summary
from p2pdrl.strategies.relay.log import MAX_ORIGINS, History, Run, UpdateOrigin

__all__ = [
    "MAX_MESSAGES",
    "ROUTE",
    "Asked",
    "BaseRequest",
    "BaseState",
    "Call",
    "Known",
    "RelayPush",
    "RelayPushed",
    "cut_runs",
    "run_head",
]

ROUTE = "relay"
MAX_MESSAGES = 256
"""Messages of one push, over all origins."""

Id = Annotated[str, Meta(max_length=32)]
Known = Annotated[list[tuple[Id, Id, Natural]], Meta(max_length=MAX_ORIGINS + 1)]
"""(node, boot, last number that one's parameters contain)."""


class RunHead(msgspec.Struct, frozen=True, array_like=True):
    """Messages of one origin in a row."""

    node: Id
    boot: Id
    first: Natural
    oldest: Natural
    sizes: Annotated[tuple[Natural, ...], Meta(max_length=MAX_MESSAGES)]
    """Bytes of each; none says that the sender has lost what comes before ``oldest``."""


class RelayPush(msgspec.Struct, frozen=True, tag="push"):
    """Messages, perhaps none."""

    summary: Summary
    history: History
    tau: float
    runs: Annotated[tuple[RunHead, ...], Meta(max_length=MAX_ORIGINS + 1)] = ()
    asks: Annotated[tuple[tuple[Id, Id], ...], Meta(max_length=MAX_ORIGINS + 1)] = ()
    """Origins of which the sender wants to know what the receiver has."""


class BaseRequest(msgspec.Struct, frozen=True, tag="ask"):
    """Give me your base."""

    summary: Summary
    boot: Id
    oldest: Natural
    """The oldest message of its own that the sender keeps."""
    history: History | None = None
    have: Known = []
    urgent: bool = False
    """It has asked for a while: a member that lacks what the sender has begins a greater history."""
    probe: bool = False
    """Only say which history you have."""


Call = RelayPush | BaseRequest


class RelayPushed(msgspec.Struct, frozen=True, tag="pushed"):
    """What became of a push."""

    summary: Summary
    verdict: Short = "mix"
    history: History | None = None
    """None: the receiver has no base yet."""
    have: Known = []


class BaseState(msgspec.Struct, frozen=True, tag="state"):
    """A base."""

    summary: Summary
    history: History
    have: Known


class Asked(msgspec.Struct, frozen=True, tag="asked"):
    """No base, or not now."""

    summary: Summary
    verdict: Short = "mix"
    history: History | None = None
    """None: there is none here."""


def run_head(run: Run) -> RunHead:
    """What goes before a run's messages."""
    sizes = tuple(len(message) for message in run.messages)
    return RunHead(run.origin.node, run.origin.boot, run.first, run.oldest, sizes)


def cut_runs(heads: tuple[RunHead, ...], vector: memoryview) -> list[Run] | None:
    """Cut a push's vector into its messages; None when the lengths don't fit."""
    runs, at = [], 0
    for head in heads:
        messages = []
        for size in head.sizes:
            messages.append(bytes(vector[at : at + size]))
            at += size
        runs.append(Run(UpdateOrigin(head.node, head.boot), head.first, tuple(messages), head.oldest))
    return runs if at == len(vector) else None
