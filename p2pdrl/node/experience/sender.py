"""Sends what this node's actors make to the learner that they work for, and brings its parameters back.

To the actors it is their learner: it reads their lanes of the ring, grants them the next unroll once one was
taken, and writes the policy that they act with. Which learner it is follows from who lives; when that one
dies, the same unroll goes to the next.

A node whose own learner is a later rank of a pipeline sends to the first rank (`LentActors`): its learner
leaves it the actors meanwhile, so that there is one who reads a lane and one who writes the policy.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from p2pdrl.clock import Clock
from p2pdrl.config.task import TaskConfig
from p2pdrl.errors import PeerRefusedError, TensorError, TransportError, WireError
from p2pdrl.node.accounting.counters import Counts
from p2pdrl.node.children.actors import ActorPool
from p2pdrl.node.events import EventLog
from p2pdrl.node.experience.messages import Enlist, Enlisted, SentUnroll, UnrollReceipt
from p2pdrl.node.experience.policy import ask_policy, keep_policy
from p2pdrl.telemetry.rate import RateMeter
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.unroll_ring import Committed, UnrollLane, UnrollSpec, shares_of
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Address, Transport

__all__ = ["ExperienceSender", "LentActors"]

RETRY_S = 0.5
"""Before a learner that couldn't be reached, or has no room for more actors, is asked again."""
FULL_S = (0.002, 0.05)
"""Before an unroll is offered again that there was no room for: at first, and at most."""
POLL_S = (0.001, 0.02)
"""Between two looks for an unroll: at first, and at most."""
LOOK_S = 0.2
"""Between two looks for whom the actors work."""


class Post(NamedTuple):
    """Where the actors work.

    Args:
        lanes: of the learner's ring, one for each actor.
    """

    learner: str
    address: Address
    lanes: tuple[int, ...]


class ExperienceSender:
    """The learner of this node's actors, as they see it.

    Args:
        learner: tells who they work for, by id, and where that is; None while nobody learns.
        actors: how many processes share the task's environments.
        remote: lanes for actors of other nodes that there are to be, should this node learn one day.
        ahead: unrolls that each may make while one is under way.
        named: the name that people gave a node.
        max_bytes: no policy larger than that is taken.
        divide: called before each unroll: assigns the actors' environments.
        counts: told the steps and episodes of each unroll that was taken, where this node counts them; None
            leaves that to the learner.
    """

    def __init__(
        self,
        *,
        task: TaskConfig,
        task_hash: str,
        boot: int,
        transport: Transport,
        learner: Callable[[], tuple[str, Address] | None],
        actors: int,
        remote: int,
        ahead: int,
        named: Callable[[str], str],
        clock: Clock,
        events: EventLog,
        max_bytes: int,
        divide: Callable[[], None],
        counts: Callable[[Counts], None] | None = None,
    ) -> None:
        self._divide = divide
        self._counts = counts
        self._task_hash = task_hash
        self._boot = boot
        self._transport = transport
        self._learner = learner
        self._shares = shares_of(task.env.num_envs, actors)
        self._all_shares = (*self._shares, *(task.env.num_envs for _ in range(remote)))
        self._remote = remote
        self._ahead = ahead
        self._named = named
        self._clock = clock
        self._events = events
        self._max_bytes = max_bytes
        self._pool: ActorPool | None = None
        self._post: Post | None = None
        self._enlisting = asyncio.Lock()
        self._held = -1
        self._rate = RateMeter(10.0)
        self._taken_s = clock.monotonic()
        self.sent = 0
        """Unrolls that were taken."""
        self.refused = 0
        """Times that there was no room for one."""
        self.without_learner = ""
        """Why no learner takes this node's actors, when that was tried last; empty once one does."""
        self.env_steps = 0

    async def layout(self) -> tuple[BoardSpec, UnrollSpec]:
        """Enlist with a learner, however long that takes; return its layouts, the second for our actors."""
        while True:
            found = await self._enlist()
            if found is not None:
                enlisted, _ = found
                board = BoardSpec.from_wire(codec.decode(enlisted.board, dict, "layout of parameters"))
                theirs = UnrollSpec.from_wire(codec.decode(enlisted.unrolls, dict, "layout of unrolls"))
                slots = 1 + max(self._ahead, 1 if self._remote else 0)
                return board, UnrollSpec(theirs.items, self._all_shares, slots, self._remote)
            await asyncio.sleep(RETRY_S)

    async def run(self, pool: ActorPool) -> None:
        """Move unrolls and policies for ever, with memory as `layout` said."""
        self._pool = pool
        self._post = None  # who enlists is given the policy to begin with
        async with asyncio.TaskGroup() as group:
            for number, lane in enumerate(pool.lanes[: len(self._shares)]):
                group.create_task(self._serve(number, lane), name=f"unrolls of actor {number}")

    def rest(self) -> None:
        """Work for nobody, once `run` was cancelled; what was under way is sent again where it still lies."""
        self._post = None

    @property
    def works_for(self) -> str:
        """Id of the learner; empty while there is none."""
        return "" if self._post is None else self._post.learner

    def figures(self) -> dict[str, object]:
        """What was sent; JSON types."""
        name = self._named(self.works_for) if self.works_for else None
        return {
            "learner": self.works_for or None,
            "learner_name": name,
            "sent": self.sent,
            "refused": self.refused,
            "env_steps": self.env_steps,
            "policy_version": self.policy_version,
        }

    @property
    def policy_version(self) -> int:
        """Of the newest policy that the actors have; 0 while there is none."""
        return max(self._held, 0)

    @property
    def steps_per_s(self) -> float:
        """Environment steps a second, in unrolls that were taken."""
        return self._rate.rate(self._clock.monotonic())

    @property
    def idle_s(self) -> float:
        """Seconds since an unroll was taken, or since this began."""
        return self._clock.monotonic() - self._taken_s

    async def _serve(self, number: int, lane: UnrollLane) -> None:
        await self._posted()
        while True:
            self._divide()
            lane.grant(self._ahead)
            found = await self._next(lane)
            await self._send(number, found)
            self.sent += 1
            self._taken_s = self._clock.monotonic()
            self.env_steps += found.env_steps
            self._rate.add(found.env_steps, self._taken_s)
            lane.consume()
            if self._counts is not None:
                self._counts(Counts(found.env_steps, found.episodes))

    async def _next(self, lane: UnrollLane) -> Committed:
        pause_s, most_s = POLL_S
        while (found := lane.peek()) is None:
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, most_s)
        return found

    async def _send(self, number: int, found: Committed) -> None:
        """Bring an unroll to the learner, or to the one after it, however often that has to be tried."""
        pause_s, most_s = FULL_S
        while True:
            post = await self._posted()
            head = SentUnroll(
                boot=self._boot,
                lane=post.lanes[number],
                serial=found.serial,
                life=found.life,
                policy_version=found.policy_version,
                episodes=found.episodes,
                environments=found.environments,
                held=self._held,
                counted=self._counts is not None,
                differences=True,
            )
            try:
                answer, policy = await self._call(post.learner, post.address, head, found.content)
                await self._keep(codec.decode(answer, UnrollReceipt, "learner's answer"), policy)
            except PeerRefusedError as error:
                if error.status in (423, 429):  # no room yet, or more calls a second than a peer may make
                    self.refused += 1
                    await asyncio.sleep(pause_s)
                    pause_s = min(2.0 * pause_s, most_s)
                    continue
                await self._lost(post, str(error))
            except (TransportError, TensorError) as error:
                await self._lost(post, str(error))
            else:
                return

    async def _lost(self, post: Post, why: str) -> None:
        if self._post is post:
            self._post = None
            self._events.remind("experience", f"{self._named(post.learner)} takes no unrolls: {why}")
        await asyncio.sleep(RETRY_S)

    async def _posted(self) -> Post:
        """Return where our actors work, once somebody has taken them."""
        while True:
            async with self._enlisting:
                post, wanted = self._post, self._learner()
                if post is not None and wanted is not None and wanted[0] == post.learner:
                    return post
                if (found := await self._enlist()) is not None:
                    try:
                        await self._keep(UnrollReceipt(0), found[1])
                    except TensorError as error:
                        self._events.remind("experience", f"the learner's policy can't be used: {error}")
                    else:
                        continue
            await asyncio.sleep(RETRY_S)

    async def _enlist(self) -> tuple[Enlisted, npt.NDArray[np.uint8] | None] | None:
        """Ask the learner that is ours for lanes; None when that fails, which is told now and then."""
        wanted = self._learner()
        if wanted is None:
            self.without_learner = "nobody learns"
            self._events.remind("experience", "nobody learns: waits for a learner")
            return None
        learner, address = wanted
        message = Enlist(self._task_hash, self._boot, self._shares)
        try:
            answer, policy = await self._call(learner, address, message, None)
            enlisted: Enlisted = codec.decode(answer, Enlisted, "learner's layout")
            if len(enlisted.lanes) != len(self._shares):
                raise WireError(f"{len(enlisted.lanes)} lanes for {len(self._shares)} actors")
        except TransportError as error:
            self.without_learner = f"{self._named(learner)} doesn't take this node's actors yet: {error}"
            self._events.remind("experience", self.without_learner)
            return None
        self.without_learner = ""
        self._post = Post(learner, address, enlisted.lanes)
        self._events.emit("works-for", f"its actors work for {self._named(learner)}", peer=learner)
        return enlisted, policy

    async def _call(
        self, learner: str, address: Address, message: Enlist | SentUnroll, content: memoryview | None
    ) -> tuple[bytes, npt.NDArray[np.uint8] | None]:
        length = 0 if content is None else content.nbytes
        return await ask_policy(
            self._transport, learner, address, message, content, max_bytes=self._max_bytes, moved_bytes=length
        )

    async def _keep(self, receipt: UnrollReceipt, policy: npt.NDArray[np.uint8] | None) -> None:
        """Let the actors have a policy, where one came; raises as `keep_policy` does."""
        if self._pool is not None:
            held = await keep_policy(self._pool.policy, receipt, policy)
            if held is not None:
                self._held = held


class LentActors:
    """Has this node's actors work for its pipeline's first rank while its own learner is a later one.

    ask ──► the learner lets go, between two updates ──► sent to the first rank ──► given back

    While a pipeline is formed anew nobody sends, and the actors stay with whom they are.

    Args:
        sender: sends; the node counts what it has sent.
        lend: tells the learner the number of a loan, 0 for none; ``loan`` tells which it has last followed.
        serves: whether the learner computes for another rank; None while that isn't decided.
        first: tells the first rank of our pipeline, by id, and where that is; None while there is none, or
            it is this node.
        asked: told when the actors are to be lent: from then on this node takes no unrolls of others.
    """

    def __init__(
        self,
        sender: ExperienceSender,
        *,
        lend: Callable[[int], None],
        loan: Callable[[], int],
        serves: Callable[[], bool | None],
        first: Callable[[], tuple[str, Address] | None],
        asked: Callable[[], None],
    ) -> None:
        self.sender = sender
        self._lend, self._loan = lend, loan
        self._serves, self._first = serves, first
        self._on_asked = asked
        self._number = 0
        self.away = False
        """Whether they are lent, or the learner is asked to lend them."""
        self.lent = False
        """Whether the daemon has them."""

    @property
    def working(self) -> bool:
        """Whether what they make goes to the first rank."""
        return self.lent and bool(self.sender.works_for)

    async def run(self, pool: ActorPool) -> None:
        """Lend them and give them back, for ever."""
        while True:
            self._look()
            first = self._first() if self.lent else None
            if first is None:
                await asyncio.sleep(LOOK_S)
            else:
                await self._work_for(first, pool)

    def _look(self) -> None:
        serves = self._serves()
        if serves and not self.away:
            self._number += 1
            self.away = True
            self._on_asked()
            self._lend(self._number)
        elif serves is False and self.away:
            self.away = self.lent = False
            self._lend(0)
        if self.away and self._loan() == self._number:
            self.lent = True  # a learner that is started again is told the same before its first update

    async def _work_for(self, first: tuple[str, Address], pool: ActorPool) -> None:
        """Send to a first rank for as long as it is that."""
        sending = asyncio.create_task(self.sender.run(pool), name="unrolls for the first rank")
        try:
            while not sending.done() and self._serves() and self._first() == first:
                await asyncio.wait([sending], timeout=LOOK_S)
        finally:
            sending.cancel()
            await asyncio.wait([sending])
            self.sender.rest()
        with contextlib.suppress(asyncio.CancelledError):
            sending.result()
