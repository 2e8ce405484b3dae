"""The node's say in joins, both ways: whom it takes in, by whom it is taken in, how long it waits.

Membership asks it through `JoinHooks`; the daemon waits in `find_swarm`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from p2pdrl.clock import Clock
from p2pdrl.config.checks import task_problems
from p2pdrl.config.root import Config
from p2pdrl.config.task import TaskConfig
from p2pdrl.config.task_hash import task_hash
from p2pdrl.errors import JoinRefusedError, WireError
from p2pdrl.membership.joining import JoinHooks
from p2pdrl.membership.service import MembershipService
from p2pdrl.node.entry.joining import (
    FOUNDING_PATIENCE_S,
    JoinInfo,
    Origin,
    decode_info,
    patience_s,
    refuse_task,
)
from p2pdrl.node.events import EventLog
from p2pdrl.node.training import Training
from p2pdrl.transport.protocol import Address, Refusal

__all__ = ["Gate"]

STILL_TRYING_S = 10.0
DEFAULT = TaskConfig()
LOOK_AGAIN_S = 0.5


class Gate:
    """Judges joins.

    Args:
        config: the whole configuration.
        insists: the person named a task, so that a swarm with another one is refused.
        events: what is told.
        clock: time.
    """

    def __init__(self, config: Config, *, insists: bool, events: EventLog, clock: Clock) -> None:
        self._config = config
        self._decided_hash = task_hash(config.task) if insists else ""
        """Hash of the task that this node insists on, has founded with or taken over; empty before."""
        self._events = events
        self._clock = clock
        self._welcome: JoinInfo | None = None
        self._news = asyncio.Event()
        self.training: Training | None = None
        """What newcomers are told about, once it is built."""
        self.founded_at: Callable[[], float | None] = lambda: None
        """Tells when the swarm was founded."""

    @property
    def hooks(self) -> JoinHooks:
        """What membership asks."""
        return JoinHooks(
            meta=self._meta,
            check_join=self._check_join,
            info=self._info,
            check_welcome=self._check_welcome,
            on_refused=self._on_refused,
        )

    async def find_swarm(self, membership: MembershipService, own: Address, *, remembers: bool) -> Origin:
        """Wait for a member to take us in, or decide to found.

        Args:
            membership: started.
            own: our advertised address.
            remembers: whether members of an earlier run are on disk.

        Raises:
            JoinRefusedError: every seed refuses us.
        """
        seeds = self._config.node.peers
        patience = patience_s(seeds, own, remembers=remembers)
        if patience != 0:
            where = ", ".join(seeds) or "members of the last run"
            self._events.emit("joining", f"looks for a swarm at {where}")
        grumbling = asyncio.create_task(self._grumble(membership), name="grumbling")
        try:
            async with asyncio.timeout(patience) as limit:
                while not membership.joined.is_set():
                    await self._wait_for_news(membership)
                    if limit.when() is None and membership.own_address_among_seeds:
                        # A seed that is written otherwise (a host's name) turned out to be ourselves.
                        limit.reschedule(asyncio.get_running_loop().time() + FOUNDING_PATIENCE_S)
        except TimeoutError:
            pass
        finally:
            grumbling.cancel()
            await asyncio.wait([grumbling])
            if not grumbling.cancelled():
                grumbling.result()  # raises a bug of ours
        info = self._welcome
        if info is not None:
            text = f"joined a swarm that trains {info.task.subject}"
            self._events.emit("joined", text, lineage=info.lineage)
            self._tell_overruled(info)
            return Origin("joined", info.task, info)
        self._decided_hash = task_hash(self._config.task)
        return Origin("founded", self._config.task, None)

    def founds(self, origin: Origin) -> None:
        """Tell that this node founds a swarm, if so."""
        if origin.how == "founded":
            self._events.emit("founded", f"founds a swarm that trains {origin.task.subject}")

    async def _wait_for_news(self, membership: MembershipService) -> None:
        either = [
            asyncio.create_task(membership.joined.wait(), name="joined"),
            asyncio.create_task(self._news.wait(), name="refused"),
        ]
        try:
            await asyncio.wait(either, timeout=LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in either:
                task.cancel()
            await asyncio.wait(either)
        self._news.clear()
        refusals = membership.refusals()
        seeds = set(self._config.node.peers)
        if not membership.joined.is_set() and seeds and len(refusals) >= len(seeds):
            where, why = next(iter(refusals.items()))
            raise JoinRefusedError(f"{where} doesn't take this node in: {why}")

    def _tell_overruled(self, info: JoinInfo) -> None:
        """Say which of our own options count for nothing, because the swarm has its own."""
        mine = self._config.task
        overruled = [
            name
            for name, ours, theirs, default in (
                ("task.strategy", mine.strategy, info.task.strategy, DEFAULT.strategy),
                ("task.stop", mine.stop, info.task.stop, DEFAULT.stop),
            )
            if ours not in (theirs, default)
        ]
        if overruled:
            text = f"the swarm's own {' and '.join(overruled)} count here, not this node's"
            self._events.emit("overruled", text, level="warning")

    async def _grumble(self, membership: MembershipService) -> None:
        while True:
            await asyncio.sleep(STILL_TRYING_S)
            where = ", ".join(self._config.node.peers) or "the members of the last run"
            troubles = membership.troubles()
            why = "; ".join(f"{address}: {trouble}" for address, trouble in troubles.items())
            self._events.emit(
                "still-trying",
                f"no answer from {where} yet{f' ({why})' if why else ''}; goes on trying. Is a node running "
                "there, is the address right, is the port open?",
                level="warning",
                troubles=troubles,
            )

    def _on_refused(self, address: str, reason: str) -> None:
        self._events.emit("refused", f"{address}: {reason}", level="warning", address=address)
        self._news.set()

    def _need(self) -> Training:
        if self.training is None:
            raise Refusal(503, "this node is only just starting")
        return self.training

    def _meta(self) -> bytes:
        return self._hash().encode()

    def _hash(self) -> str:
        return self._decided_hash if self.training is None else self.training.task_hash

    def _check_join(self, meta: bytes) -> str | None:
        training = self._need()
        return refuse_task(meta.decode("ascii", "replace"), training.task, training.task_hash)

    def _info(self) -> bytes:
        training = self._need()
        return msgspec.msgpack.encode(
            JoinInfo(
                task=training.task,
                task_hash=training.task_hash,
                lineage=training.lineage,
                lineage_steps=training.lineage_steps,
                policy_version=training.policy_version,
                founded_at=self.founded_at() or self._clock.wall(),
            )
        )

    def _check_welcome(self, data: bytes) -> str | None:
        try:
            info = decode_info(data)
        except WireError as error:
            return str(error)
        refusal = refuse_task(self._hash(), info.task, info.task_hash)
        if refusal is not None:
            return refusal
        problem = next(iter(task_problems(info.task)), None)
        if problem is not None:
            return f"its task can't be run: {problem.key}: {problem.message}"
        self._decided_hash = info.task_hash
        if self._welcome is None:
            self._welcome = info
        return None
