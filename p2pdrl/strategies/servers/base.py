"""The base of both server strategies: views, shards that move between nodes, the calls of peers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

import msgspec

from p2pdrl.config.strategy import Mode, ServerOptions
from p2pdrl.group.compatibility import Summary
from p2pdrl.group.service import ActiveView, Group
from p2pdrl.group.view import ViewKey
from p2pdrl.strategies.protocol import LearnerHandle, LearnerRequest, Strategy, StrategyContext
from p2pdrl.strategies.servers.messages import GradientPush, Pull, ShardRequest
from p2pdrl.strategies.servers.replica_store import ReplicaStore
from p2pdrl.strategies.servers.server_host import ServerHost
from p2pdrl.strategies.servers.shard import Shard
from p2pdrl.strategies.servers.shard_plan import ServerNote, make_plan, read_note
from p2pdrl.strategies.servers.shard_server import ShardServer, ShardServerOptions
from p2pdrl.strategies.servers.view_session import ViewSession
from p2pdrl.strategies.task_runner import OutcomeMetrics
from p2pdrl.transport.codec import decode
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

__all__ = ["LearnerRequests", "ServedStrategy"]


class LearnerRequests:
    """Waits for posts, from view to view.

    Args:
        learner: the node's.
        stopped: set when the strategy is to end; then nobody waits any longer.
    """

    def __init__(self, learner: LearnerHandle, stopped: asyncio.Event) -> None:
        self._learner = learner
        self._stopped = stopped
        self._next: asyncio.Task[LearnerRequest] | None = None
        self._end: asyncio.Task[bool] | None = None

    async def next(self, timeout_s: float | None = None) -> LearnerRequest | None:
        """Return the next post; None when none came in time, or we are stopped."""
        task = self._next
        if task is None:
            task = self._next = asyncio.create_task(self._learner.next_post(), name="post")
        if self._end is None:
            self._end = asyncio.create_task(self._stopped.wait(), name="stop")
        await asyncio.wait([task, self._end], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        # From here on nothing waits, so nobody can be cancelled with a post in his hands.
        if self._stopped.is_set() or self._next is not task or not task.done():
            return None
        self._next = None
        return task.result()

    async def close(self) -> None:
        """Wait for no more posts; what came and wasn't taken is left to the learner."""
        tasks = [task for task in (self._next, self._end) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._next = self._end = None


POLL_S = 0.1
TERM_S = 2.0
"""How long a peer's call waits until the view that is in force is acted in here."""
ROUND_SHARE = 0.4
"""Part of the time to stop in that the round in flight may take; what is left is for handing over."""

T = TypeVar("T")


class ServedStrategy(Strategy, ABC):
    """Parameter servers among the nodes themselves.

    Args:
        config: the strategy's options.
        context: what the node gives.
        differences: whether workers may be sent differences between versions.
    """

    mode: Mode

    def __init__(self, config: ServerOptions, context: StrategyContext, *, differences: bool) -> None:
        self._options = config
        self._context = context
        self._swarm = context.swarm
        self._differences = differences
        self._me = context.swarm.node_id
        self._group = Group(context.swarm, context.transport, context.clock, context.epoch, self._note)
        self._store = ReplicaStore(context.size)
        self._stopped = asyncio.Event()
        self._stop_s = 0.0
        self._posts = LearnerRequests(context.learner, self._stopped)
        self._task: asyncio.Task[None] | None = None
        self._outcomes = OutcomeMetrics(context.swarm)
        self._host = ServerHost(
            config, context, self._store, self._group.doubt, self._open_server, differences=differences
        )
        self._session: ViewSession | None = None
        self._termed = asyncio.Event()
        self._summary: Summary | None = None
        self._policy = 0
        self._served_by: tuple[str, ...] = ()

    # What the strategies add

    @abstractmethod
    def _open_server(self, session: ViewSession, shard: Shard, options: ShardServerOptions) -> ShardServer:
        """Put a shard to work."""

    @abstractmethod
    async def _work(self, session: ViewSession) -> None:
        """Be a worker of this view, until it is cancelled with the view or `_stopped` is set."""

    # What the node sees

    @property
    def group(self) -> Group:
        """In which views are agreed on."""
        return self._group

    @property
    def consensus_distance(self) -> float | None:
        """Workers hold what servers gave them: 0 once they do."""
        return None if self._store.copy is None else 0.0

    @property
    def outcomes(self) -> dict[str, int]:
        """Rounds or pushes of this node's worker so far, by how they ended."""
        return self._outcomes.outcomes

    @property
    def facts(self) -> dict[str, float | str]:
        """Role, shard, version, servers and counts, for status."""
        session, facts = self._session, dict[str, float | str]()
        facts["version"] = float(max(0, self._store.copy_version))
        facts.update({name: float(count) for name, count in sorted(self._host.counts.items())})
        if session is None:
            return {"role": "waiting for a group", **facts}
        names = [self._swarm.name_of(server) for server in dict.fromkeys(session.plan.servers)]
        facts["servers"] = ", ".join(names[:20])
        facts["workers"] = float(len(session.members))
        shard = self._store.shard
        if session.index is not None and shard is not None:
            facts["shard"] = f"{shard.span.start} to {shard.span.stop - 1}"
            facts["shard_version"] = float(shard.version)
        return {"role": "worker" if session.index is None else "server and worker", **facts}

    async def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run(), name="served")

    async def stop(self, timeout_s: float) -> None:
        """Finish the round in flight and hand our shard over, at most ``timeout_s`` long; end."""
        self._stop_s = timeout_s
        self._stopped.set()
        if self._task is not None:
            _, late = await asyncio.wait([self._task], timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._posts.close()
        await self._group.stop()
        self._store.clear()

    async def watch(self) -> None:
        """Wait until the strategy is stopped; raise what ended it before: a bug of ours."""
        if self._task is not None:
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.result()

    def updated(self, updates: int) -> None:
        """Rounds follow posts, not updates."""
        del updates

    # Views

    async def _ready(self) -> None:
        """Wait until there are parameters to bring along, and members enough."""
        least = self._context.start_at_members
        while True:
            if self._swarm.summary() is not None and len(self._swarm.alive()) + 1 >= least:
                return
            await asyncio.sleep(POLL_S)

    def _note(self) -> bytes:
        held = self._store
        note = ServerNote(
            pin=self._pin(),
            copy=held.copy_version,
            progress=held.progress,
            branch=held.branch,
            claims=held.claims,
        )
        # While we adopt there is no summary; but what servers gave us is as good as before.
        summary = self._swarm.summary() or (None if held.copy is None else self._summary)
        self._summary = summary
        if summary is not None:
            self._policy = max(self._policy, summary.policy_version)
            note = msgspec.structs.replace(
                note, lineage=summary.lineage, steps=summary.lineage_steps, policy=self._policy
            )
        return note.encode()

    def _pin(self) -> int:
        """Our place among the pinned servers; -1 for none."""
        pinned = self._options.pinned
        for called in (self._me, self._swarm.name_of(self._me)):
            if called in pinned:
                return pinned.index(called)
        return -1

    async def _run(self) -> None:
        await self._or_stop(self._ready())
        if self._stopped.is_set():
            return
        await self._group.start()
        key: ViewKey | None = None
        watching = asyncio.create_task(self._group.watch(), name="group")
        try:
            while not self._stopped.is_set():
                active = await self._or_stop(self._group.active(key), watching)
                if active is None:
                    break
                key = active.view.key
                await self._act(active)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _or_stop(self, waiting: Coroutine[Any, Any, T], *others: asyncio.Task[None]) -> T | None:
        """Wait for something; None when we were stopped first, or one of ``others`` has ended."""
        task = asyncio.ensure_future(waiting)
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait([task, stopped, *others], return_when=asyncio.FIRST_COMPLETED)
            for other in others:
                if other.done():
                    other.result()
            return task.result() if task.done() else None
        finally:
            for one in (task, stopped):
                one.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)

    async def _act(self, active: ActiveView) -> None:
        """Act in a view until it is no longer in force."""
        session = self._begin(active)
        ended = asyncio.create_task(self._group.ended(session.key), name="view")
        tasks = {
            asyncio.create_task(self._work(session), name="worker"),
            asyncio.create_task(self._host.insure(session), name="keeper"),
        }
        if session.index is not None:
            tasks.add(
                asyncio.create_task(
                    self._host.serve(session, session.plan.spans[session.index]), name="server"
                )
            )
        stopped = asyncio.create_task(self._stopped.wait(), name="stop")
        try:
            await asyncio.wait({ended, stopped, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done() and not ended.done():
                await self._finish(session, tasks, ended)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for one in (ended, stopped, *tasks):
                one.cancel()
            await asyncio.gather(ended, stopped, *tasks, return_exceptions=True)
            await session.close("the group's view has changed")
            self._session = None
            if self._stopped.is_set():
                self._termed.set()

    async def _finish(
        self, session: ViewSession, tasks: Collection[asyncio.Task[None]], ended: asyncio.Task[None]
    ) -> None:
        """We are stopped: let the worker finish its round, while the view lasts; hand our shard over."""
        work = next(task for task in tasks if task.get_name() == "worker")
        await asyncio.wait(
            [work, ended], timeout=ROUND_SHARE * self._stop_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not ended.done() and self._stop_s > 0:
            await self._host.hand_over(session)

    def _begin(self, active: ActiveView) -> ViewSession:
        size = self._context.size
        notes = {peer: read_note(active.notes.get(peer), size) for peer in active.view.members}
        plan = make_plan(
            f"servers {self._context.epoch}", active.view.members, notes, self._options.servers, size
        )
        if self._me not in plan.holders:
            self._store.clear()  # of another branch, or of none
        session = self._session = ViewSession(active, plan, notes, self._swarm, self._group)
        self._termed.set()
        self._termed = asyncio.Event()
        names = ", ".join(self._swarm.name_of(server) for server in plan.servers[:20])
        if plan.servers != self._served_by:
            self._served_by = plan.servers
            self._swarm.tell("servers", f"served by {names}")
        return session

    # Peers' calls

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a peer's call.

        Raises:
            Refusal: quarantined (403), another view or route (409), not ready (503), poisoned (422), too
                few came (408).
            WireError: malformed.
        """
        if incoming.route == "group":
            return await self._group.answer(incoming)
        if incoming.route not in ("push", "shard"):
            raise Refusal(409, f"this node's strategy has servers, which have no {incoming.route}")
        if self._swarm.quarantined(incoming.sender):
            raise Refusal(403, "quarantined after poisoned vectors")
        if incoming.route == "push":
            head: GradientPush = decode(incoming.meta, GradientPush, "push")
            session = await self._term_of(head.key, incoming.sender)
            work = self._host.answer_push(incoming, head, session)
            return await self._group.hold(incoming.sender, head.call, work)
        request: ShardRequest = decode(incoming.meta, ShardRequest, "shard message")
        session = await self._term_of(request.key, incoming.sender)
        if isinstance(request, Pull):
            return await self._host.answer_pull(request)
        return await self._host.answer_take(incoming.sender, request, session)

    async def _term_of(self, key: ViewKey, sender: str) -> ViewSession:
        """Return the view that a message belongs to, once we act in it."""
        self._group.check(key)
        session = self._session
        if (session is None or session.key != key) and not self._stopped.is_set():
            try:
                async with asyncio.timeout(TERM_S):
                    await self._termed.wait()
            except TimeoutError as error:
                raise Refusal(503, "this node doesn't act in that view yet") from error
            self._group.check(key)
            session = self._session
        if session is None or session.key != key or sender not in session.members:
            raise Refusal(409, f"group view {key} isn't acted in here, or not with you")
        return session
