"""Joins, both ways: whom this node admits, who admits it, and how long it waits for that.

Membership asks through `JoinHooks`; the daemon waits in `find_swarm`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from p2pdrl.clock import Clock
from p2pdrl.config.checks import task_problems
from p2pdrl.config.environments import environment_problems, import_problems
from p2pdrl.config.root import Config
from p2pdrl.config.task import TaskConfig, task_hash
from p2pdrl.errors import JoinRefusedError, WireError
from p2pdrl.membership.joining import Joiner, JoinHooks
from p2pdrl.membership.messages import Starting
from p2pdrl.node.background import beside
from p2pdrl.node.bootstrap.joining import (
    Candidate,
    FoundingDecision,
    JoinInfo,
    SwarmOrigin,
    decide,
    decode_info,
    refuse_task,
)
from p2pdrl.node.events import EventLog
from p2pdrl.node.state.swarm_memory import RememberedSwarm
from p2pdrl.node.training import Training
from p2pdrl.transport.protocol import Address, Refusal

__all__ = ["JoinAdmission"]

STILL_TRYING_S = 10.0
_CANT = "this node can't run what the swarm trains:"
DEFAULT = TaskConfig()
LOOK_AGAIN_S = 0.5


class JoinAdmission:
    """Decides about joins.

    Args:
        task_given: the person named a task, so that a swarm with another one is refused.
    """

    def __init__(self, config: Config, *, task_given: bool, events: EventLog, clock: Clock) -> None:
        self._config = config
        self._decided_hash = task_hash(config.task) if task_given else ""
        """Hash of the task that the person named, or with which this node founded or joined; empty before."""
        self._events = events
        self._clock = clock
        self._welcome: JoinInfo | None = None
        self._news = asyncio.Event()
        self._decision = FoundingDecision("wait", "blocked")
        """At first such that nobody founds because of us."""
        self._claimed_s: float | None = None
        self._env_steps = -1
        """Of the swarm that the data folder remembers; -1 when it remembers none."""
        self._task_given = task_given
        self.training: Training | None = None
        """What newcomers are told about, once it is built."""
        self.founded_at: Callable[[], float | None] = lambda: None
        """Tells when the swarm was founded."""

    @property
    def hooks(self) -> JoinHooks:
        """What membership asks."""
        return JoinHooks(
            meta=lambda: self._hash().encode(),
            check_join=self._check_join,
            info=self._info,
            check_welcome=self._check_welcome,
            starting=self._starting,
            lineage=lambda welcome: decode_info(welcome).lineage,  # checked before
            on_refused=self._on_refused,
        )

    async def find_swarm(
        self,
        joiner: Joiner,
        own: Address,
        *,
        remembers: bool,
        memory: RememberedSwarm | None = None,
    ) -> SwarmOrigin:
        """Wait for a member to take us in, or decide to found a swarm or to resume the one that we remember.

        Args:
            remembers: whether members of an earlier run are on disk.
            memory: the swarm of an earlier run; counts if it had other members.

        Raises:
            JoinRefusedError: every seed refuses us.
        """
        if memory is not None and not (self._same_task(memory) and (remembers or memory.others)):
            memory = None  # alone, or for another task, the configuration counts
        remembers = remembers or memory is not None
        if remembers:
            self._env_steps = 0 if memory is None else memory.env_steps
        if self._config.node.peers or remembers or self._config.node.discover:
            local = ["the local network"] if self._config.node.discover else []
            where = ", ".join([*self._config.node.peers, *local]) or "members of the last run"
            self._events.emit("joining", f"looks for a swarm at {where}")
        async with beside(self._tell_still_trying(joiner), "still-trying"):
            await self._until_decided(joiner, own)
        self._decision = FoundingDecision("found", "decided")
        info = self._welcome
        if info is not None:
            text = f"joined a swarm that trains {info.task.subject}"
            self._events.emit("joined", text, lineage=info.lineage)
            self._tell_overruled(info)
            return SwarmOrigin("joined", info.task, info)
        task = self._config.task if memory is None or self._task_given else memory.task
        self._decided_hash = task_hash(task)
        if memory is None:
            return SwarmOrigin("founded", task, None)
        return SwarmOrigin("resumed", task, None, memory.lineage, memory.settled)

    async def _until_decided(self, joiner: Joiner, own: Address) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        seeds = {str(Address.parse(peer)) for peer in self._config.node.peers}
        told = ""
        while not joiner.joined.is_set():
            among = str(own) in seeds or joiner.own_address_among_seeds
            waited_s = loop.time() - began_s
            me = Candidate(
                joiner.node_id,
                self._env_steps,
                among,
                waited_s,
                self._claimed_s,
                may_found=self._config.node.learns,
            )
            self._decision = decide(me, joiner.sightings())
            if self._decision.what == "found":
                return
            if self._decision.phase != "claiming":
                self._claimed_s = None
            if self._decision.what == "claim":
                self._claimed_s = self._claimed_s or self._clock.monotonic()
                await joiner.once()
            else:
                if self._decision.phase == "blocked" and self._decision.why != told:
                    told = self._decision.why
                    self._events.emit("waiting", f"waits to be taken in: {told}")
                await self._wait_for_news(joiner, seeds - {str(own)})

    def _same_task(self, memory: RememberedSwarm) -> bool:
        return not self._task_given or task_hash(memory.task) == task_hash(self._config.task)

    @property
    def wanted_task(self) -> str:
        """Hash of the task that this node trains, or was told to; empty while it takes any."""
        return self._hash()

    def tell_founded(self, origin: SwarmOrigin) -> None:
        """Tell that this node founds or resumes a swarm, if so."""
        if origin.how == "founded":
            self._events.emit("founded", f"founds a swarm that trains {origin.task.subject}")
        if origin.how == "resumed":
            text = (
                f"nobody of the swarm that its data folder remembers is up: resumes it, training "
                f"{origin.task.subject}; another --data-dir would begin afresh"
            )
            self._events.emit("resumed-swarm", text, lineage=origin.lineage)

    async def _wait_for_news(self, joiner: Joiner, others: set[str]) -> None:
        either = [
            asyncio.create_task(joiner.joined.wait(), name="joined"),
            asyncio.create_task(self._news.wait(), name="refused"),
        ]
        try:
            await asyncio.wait(either, timeout=LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in either:
                task.cancel()
            await asyncio.wait(either)
        self._news.clear()
        refusals = joiner.refusals()
        if not joiner.joined.is_set() and others and others <= refusals.keys():
            where, why = next((at, said) for at, said in refusals.items() if at in others)
            raise JoinRefusedError(
                f"{why}; the swarm is at {where}"
                if why.startswith(_CANT)
                else f"{where} doesn't take this node in: {why}"
            )

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

    async def _tell_still_trying(self, joiner: Joiner) -> None:
        while True:
            await asyncio.sleep(STILL_TRYING_S)
            where = ", ".join(self._config.node.peers) or "the members of the last run"
            troubles = joiner.troubles()
            why = "; ".join(f"{address}: {trouble}" for address, trouble in troubles.items())
            text = (
                f"no answer from {where} yet{f' ({why})' if why else ''}; goes on trying. Is a node running "
                "there, is the address right, is the port open?"
            )
            if self._decision.phase != "following":
                text = f"no swarm has taken this node in yet, and it goes on trying: {self._decision.why}"
            self._events.emit("still-trying", text, level="warning", troubles=troubles)

    def _on_refused(self, address: str, reason: str) -> None:
        self._events.emit("refused", f"{address}: {reason}", level="warning", address=address)
        self._news.set()

    def _need(self) -> Training:
        if self.training is None:
            raise Refusal(503, "this node is only just starting")
        return self.training

    def _starting(self) -> Starting | None:
        """What a newcomer is told while we are in no swarm, or can't admit it yet."""
        return None if self.training is not None else Starting(self._decision.phase, self._env_steps)

    def _hash(self) -> str:
        return self._decided_hash if self.training is None else self.training.task_hash

    def _check_join(self, meta: bytes) -> str | None:
        training = self._need()
        return refuse_task(meta.decode("ascii", "replace"), training.task, training.task_hash)

    def _info(self) -> bytes:
        training = self._need()
        return JoinInfo(
            task=training.task,
            task_hash=training.task_hash,
            lineage=training.lineage,
            policy_version=training.policy_version,
            founded_at=self.founded_at() or self._clock.wall(),
        ).encode()

    def _check_welcome(self, data: bytes) -> str | None:
        try:
            info = decode_info(data)
        except WireError as error:
            return str(error)
        refusal = refuse_task(self._hash(), info.task, info.task_hash)
        if refusal is not None:
            return refusal
        task = info.task
        found = (
            task_problems(task),
            environment_problems(task),
            import_problems(task, self._config),
        )
        problem = next(itertools.chain(*found), None)
        if problem is not None:
            return f"{_CANT} {problem.key}: {problem.message}"
        self._decided_hash = info.task_hash
        if self._welcome is None:
            self._welcome = info
        return None
