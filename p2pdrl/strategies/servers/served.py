"""What both server strategies are made of: views, shards that move between nodes, and the calls of peers.

In each view every node makes the same plan from the members' notes (`serving`). A server fills its shard
(`restoring`) and opens its desk; its worker, like everybody's, begins with the servers' parameters. While
the view lasts, the successor of each shard pulls a copy of it now and then, optimizer state included, so
that a server may vanish; one that leaves properly lets its successor pull at the end.

**What a lost server costs**: its shard goes on from the freshest copy, so at most one round or push of that
shard is lost; the optimizer's state is that of the last pull, `office.KEEP_S` old, or begins anew.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

import msgspec

from p2pdrl.config.strategy import Mode
from p2pdrl.config.strategy_bases import Served
from p2pdrl.strategies.group.service import ActiveView, Group
from p2pdrl.strategies.group.view import ViewKey
from p2pdrl.strategies.judgement import Summary
from p2pdrl.strategies.protocol import Context
from p2pdrl.strategies.servers.desk import Desk, DeskOptions
from p2pdrl.strategies.servers.holdings import Holdings
from p2pdrl.strategies.servers.messages import Pull, Push, ShardRequest
from p2pdrl.strategies.servers.office import Office
from p2pdrl.strategies.servers.posts import Posts
from p2pdrl.strategies.servers.serving import Note, make_plan, read_note
from p2pdrl.strategies.servers.shard import Shard
from p2pdrl.strategies.servers.term import Term
from p2pdrl.strategies.tally import Tally
from p2pdrl.transport.codec import decode
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

__all__ = ["ServedStrategy"]

POLL_S = 0.1
TERM_S = 2.0
"""How long a peer's call waits until the view that is in force is acted in here."""
ROUND_SHARE = 0.4
"""Part of the time to stop in that the round in flight may take; what is left is for handing over."""

T = TypeVar("T")


class ServedStrategy(ABC):
    """Parameter servers among the nodes themselves.

    Args:
        config: the strategy's options.
        context: what the node gives.
        differences: whether workers may be sent differences between versions.
    """

    mode: Mode

    def __init__(self, config: Served, context: Context, *, differences: bool) -> None:
        self._options = config
        self._context = context
        self._swarm = context.swarm
        self._differences = differences
        self._me = context.swarm.node_id
        self._group = Group(context, self._note)
        self._holdings = Holdings(context.size)
        self._stopped = asyncio.Event()
        self._stop_s = 0.0
        self._posts = Posts(context.learner, self._stopped)
        self._task: asyncio.Task[None] | None = None
        self._tally = Tally(context.swarm)
        self._office = Office(
            config, context, self._holdings, self._group.doubt, self._open_desk, differences=differences
        )
        self._term: Term | None = None
        self._termed = asyncio.Event()
        self._summary: Summary | None = None
        self._policy = 0
        self._served_by: tuple[str, ...] = ()

    # What the strategies add

    @abstractmethod
    def _open_desk(self, term: Term, shard: Shard, options: DeskOptions) -> Desk:
        """Put a shard to work."""

    @abstractmethod
    async def _work(self, term: Term) -> None:
        """Be a worker of this view, until it is cancelled with the view or `_stopped` is set."""

    # What the node sees

    @property
    def group(self) -> Group:
        """In which views are agreed on."""
        return self._group

    @property
    def consensus_distance(self) -> float | None:
        """Workers hold what servers gave them: 0 once they do."""
        return None if self._holdings.copy is None else 0.0

    @property
    def outcomes(self) -> dict[str, int]:
        """Rounds or pushes of this node's worker so far, by how they ended."""
        return self._tally.outcomes

    @property
    def facts(self) -> dict[str, float | str]:
        """Role, shard, version, servers and counts, for status."""
        term, facts = self._term, dict[str, float | str]()
        facts["version"] = float(max(0, self._holdings.copy_version))
        facts.update({name: float(count) for name, count in sorted(self._office.counts.items())})
        if term is None:
            return {"role": "waiting for a group", **facts}
        names = [self._swarm.name_of(server) for server in dict.fromkeys(term.plan.servers)]
        facts["servers"] = ", ".join(names[:20])
        facts["workers"] = float(len(term.members))
        shard = self._holdings.shard
        if term.index is not None and shard is not None:
            facts["shard"] = f"{shard.span.start} to {shard.span.stop - 1}"
            facts["shard_version"] = float(shard.version)
        return {"role": "worker" if term.index is None else "server and worker", **facts}

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
        self._holdings.clear()

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
        held = self._holdings
        note = Note(
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
        term = self._begin(active)
        ended = asyncio.create_task(self._group.ended(term.key), name="view")
        tasks = {
            asyncio.create_task(self._work(term), name="worker"),
            asyncio.create_task(self._office.insure(term), name="keeper"),
        }
        if term.index is not None:
            tasks.add(
                asyncio.create_task(self._office.serve(term, term.plan.spans[term.index]), name="server")
            )
        stopped = asyncio.create_task(self._stopped.wait(), name="stop")
        try:
            await asyncio.wait({ended, stopped, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done() and not ended.done():
                await self._finish(term, tasks, ended)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for one in (ended, stopped, *tasks):
                one.cancel()
            await asyncio.gather(ended, stopped, *tasks, return_exceptions=True)
            await term.close("the group's view has changed")
            self._term = None
            if self._stopped.is_set():
                self._termed.set()

    async def _finish(
        self, term: Term, tasks: Collection[asyncio.Task[None]], ended: asyncio.Task[None]
    ) -> None:
        """We are stopped: let the worker finish its round, while the view lasts; hand our shard over."""
        work = next(task for task in tasks if task.get_name() == "worker")
        await asyncio.wait(
            [work, ended], timeout=ROUND_SHARE * self._stop_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not ended.done() and self._stop_s > 0:
            await self._office.hand_over(term)

    def _begin(self, active: ActiveView) -> Term:
        size = self._context.size
        notes = {peer: read_note(active.notes.get(peer), size) for peer in active.view.members}
        plan = make_plan(
            f"servers {self._context.epoch}", active.view.members, notes, self._options.servers, size
        )
        if self._me not in plan.holders:
            self._holdings.clear()  # of another branch, or of none
        term = self._term = Term(active, plan, notes, self._swarm, self._group)
        self._termed.set()
        self._termed = asyncio.Event()
        names = ", ".join(self._swarm.name_of(server) for server in plan.servers[:20])
        if plan.servers != self._served_by:
            self._served_by = plan.servers
            self._swarm.tell("servers", f"served by {names}")
        return term

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
            head: Push = decode(incoming.meta, Push, "push")
            term = await self._term_of(head.key, incoming.sender)
            work = self._office.answer_push(incoming, head, term)
            return await self._group.hold(incoming.sender, head.call, work)
        request: ShardRequest = decode(incoming.meta, ShardRequest, "shard message")
        term = await self._term_of(request.key, incoming.sender)
        if isinstance(request, Pull):
            return await self._office.answer_pull(request)
        return await self._office.answer_take(incoming.sender, request, term)

    async def _term_of(self, key: ViewKey, sender: str) -> Term:
        """Return the view that a message belongs to, once we act in it."""
        self._group.check(key)
        term = self._term
        if (term is None or term.key != key) and not self._stopped.is_set():
            try:
                async with asyncio.timeout(TERM_S):
                    await self._termed.wait()
            except TimeoutError as error:
                raise Refusal(503, "this node doesn't act in that view yet") from error
            self._group.check(key)
            term = self._term
        if term is None or term.key != key or sender not in term.members:
            raise Refusal(409, f"group view {key} isn't acted in here, or not with you")
        return term
