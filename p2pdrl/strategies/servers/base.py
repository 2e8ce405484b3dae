"""What both server strategies share: views of the group, this node as a server, and as a worker.

In each view every node computes the same `ShardPlan`. Servers fill their shards (`restore`), successors keep
replicas of them, and workers begin with the servers' parameters. How gradients are pushed, and what a server
does with them, is up to the strategies: `server_sync`, `server_async`.

A server that vanishes has its replica at the shard's successor, optimizer state included; one that leaves
properly lets its successor pull at the end. **What a lost server costs**: its shard goes on from the freshest
copy, so at most one round or push of that shard is lost; the optimizer's state is that of the last pull,
`KEEP_S` old or somewhat more, or begins anew.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

import msgspec

from p2pdrl.config.strategy import Mode, ServerOptions
from p2pdrl.errors import PeerTimeoutError, PoisonedVectorError, TensorError, TransportError
from p2pdrl.group.compatibility import Summary
from p2pdrl.group.service import ActiveView, Group
from p2pdrl.group.view import ViewKey
from p2pdrl.strategies.clipping_radius import BeyondCounts, tell_far
from p2pdrl.strategies.learner_requests import RequestQueue
from p2pdrl.strategies.offload import heavy
from p2pdrl.strategies.own_vector import read_now
from p2pdrl.strategies.protocol import Strategy, StrategyContext
from p2pdrl.strategies.servers.messages import GradientPush, Pull, ShardRequest, Take
from p2pdrl.strategies.servers.shard import NobodyGivesError, Puller, ReplicaStore, Shard, restore
from p2pdrl.strategies.servers.shard_client import BadServerError, PoisonedPushError, ShardClient, SliceAnswer
from p2pdrl.strategies.servers.shard_plan import ServerNote, ShardSpan, make_plan, pieces, read_note
from p2pdrl.strategies.servers.shard_server import ReceivedPush, ShardServer, ShardServerOptions, ViewSession
from p2pdrl.strategies.task_runner import OutcomeMetrics, TaskRunner, cancel_and_wait
from p2pdrl.tensors import mix
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.transport.codec import decode
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

__all__ = ["ServedStrategy"]


POLL_S = 0.1
SESSION_S = 2.0
"""The longest that a peer's call waits until this node acts in the view that is in force."""
ROUND_SHARE = 0.4
"""Part of the time to stop in that the round in flight may take; what is left is for handing over."""
KEEP_S = 2.0
"""A successor pulls its replica so often; less when pulling takes long."""
KEEP_SHARE = 10.0
"""Between two rounds of pulling lies at least so many times what the last one took."""
FORGET_S = 10.0
"""A view this old needs no replicas of an older one any more."""
RESTORE_AGAIN_S = 0.2
HANDOVER_S = 3.0
RETRY_S = 0.25
ADOPT_S = 1.0


class ServedStrategy(Strategy, ABC):
    """Parameter servers among the nodes themselves.

    Args:
        differences: whether workers may be sent differences between versions.
        most_open: gradients that the learner may have given before the first one is answered.
    """

    mode: Mode

    def __init__(
        self, config: ServerOptions, context: StrategyContext, *, differences: bool, most_open: int = 1
    ) -> None:
        self._options, self._context, self._differences = config, context, differences
        self._swarm, self._learner, self._clock = context.swarm, context.learner, context.clock
        self._me = context.swarm.node_id
        self._group = Group(context.swarm, context.transport, context.clock, context.epoch, self._note)
        self._store = ReplicaStore(context.size)
        self._counts: Counter[str] = Counter()
        self._beyond = BeyondCounts(tell_far(context.swarm))
        """What happened here as a server and as a worker, for status."""
        self._outcomes = OutcomeMetrics(context.swarm)
        self._stopped = asyncio.Event()
        self._stop_s = 0.0
        self._requests = RequestQueue(context.learner, context.clock, most_open=most_open)
        self._runner = TaskRunner()
        self._session: ViewSession | None = None
        self._changed = asyncio.Event()
        """Set and replaced when a session begins."""
        self._summary: Summary | None = None
        self._policy = 0
        self._servers: tuple[str, ...] = ()
        self._on_board = -1
        """Version of the vector that was last put on the board."""

    # What the strategies add

    @abstractmethod
    def _open_server(self, shard: Shard, options: ShardServerOptions) -> ShardServer:
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
        facts.update({name: float(count) for name, count in sorted(self._counts.items())})
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
        self._runner.start(self._run(), self._requests.follow())

    async def stop(self, timeout_s: float) -> None:
        """Finish the round in flight and hand our shard over, at most ``timeout_s`` long; end."""
        self._stop_s = timeout_s
        self._stopped.set()
        self._requests.close()
        await self._runner.stop(0.0 if self._session is None else timeout_s)
        await self._group.stop()
        self._store.clear()

    async def watch(self) -> None:
        """Wait until the strategy is stopped; raise what ended it before: a bug of ours."""
        await self._runner.watch()

    # From view to view

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
        """Our index among the pinned servers; -1 for none."""
        pinned = self._options.pinned
        for called in (self._me, self._swarm.name_of(self._me)):
            if called in pinned:
                return pinned.index(called)
        return -1

    async def _ready(self) -> None:
        """Wait until there are parameters to bring along, and members enough."""
        least = self._context.start_at_members
        while True:
            if self._swarm.summary() is not None and len(self._swarm.alive()) + 1 >= least:
                return
            await asyncio.sleep(POLL_S)

    async def _run(self) -> None:
        await self._ready()
        await self._group.start()
        await self._group.run(self._act, done=self._stopped.is_set)

    async def _act(self, active: ActiveView) -> None:
        """Act in a view until it ends and we are cancelled, or until we are stopped."""
        session = self._begin(active)
        worker = asyncio.create_task(self._work(session), name="worker")
        tasks = {worker, asyncio.create_task(self._keep_replicas(session), name="replicas")}
        if session.index is not None:
            span = session.plan.spans[session.index]
            tasks.add(asyncio.create_task(self._serve(session, span), name="server"))
        stopped = asyncio.create_task(self._stopped.wait(), name="stop")
        try:
            await asyncio.wait({stopped, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                await asyncio.wait([worker], timeout=ROUND_SHARE * self._stop_s)
                if self._stop_s > 0:
                    await self._hand_over(session)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await cancel_and_wait(stopped, *tasks)
            await session.close("the group's view has changed")
            self._session = None
            if self._stopped.is_set():
                self._changed.set()

    def _begin(self, active: ActiveView) -> ViewSession:
        size = self._context.size
        notes = {peer: read_note(active.notes.get(peer), size) for peer in active.view.members}
        plan = make_plan(
            f"servers {self._context.epoch}", active.view.members, notes, self._options.servers, size
        )
        if self._me not in plan.holders:
            self._store.clear()  # of another branch, or of none
        session = self._session = ViewSession(active.view, plan, notes, self._me, self._group)
        self._changed.set()
        self._changed = asyncio.Event()
        if plan.servers != self._servers:
            self._servers = plan.servers
            names = ", ".join(self._swarm.name_of(server) for server in plan.servers[:20])
            self._swarm.tell("servers", f"served by {names}")
        return session

    # As a server

    async def _serve(self, session: ViewSession, span: ShardSpan) -> None:
        """Fill our shard, put it to work, and stay."""
        plan = session.plan
        if plan.seed:
            shard = Shard(span, self._options, plan.version, differences=self._differences)
        else:
            shard = await self._filled(session, span)
        self._store.replace_shard(shard)
        shard.progress = plan.progress
        options = ShardServerOptions(
            self._options,
            self._context,
            session.members,
            plan,
            self._group.doubt,
            self._learning_rate,
            self._counts,
            self._beyond,
        )
        session.open(self._open_server(shard, options))
        await asyncio.Event().wait()

    def _learning_rate(self) -> float:
        rate = self._options.learning_rate
        return self._learner.learning_rate if rate is None else rate

    async def _filled(self, session: ViewSession, span: ShardSpan) -> Shard:
        """Return our shard with the freshest contents: as it is, or restored."""
        plan = session.plan
        parts = pieces(span, self._me, plan, session.notes)
        best = max(holder.version for part in parts for holder in part.holders[:1])
        shard = self._store.shard
        if shard is None or shard.span != span or shard.published is None or shard.version < best:
            shard = Shard(span, self._options, plan.version, differences=self._differences)
            while True:
                try:
                    with_state = await restore(shard, parts, self._puller(session))
                    break
                except (NobodyGivesError, TensorError) as error:
                    self._counts["restores_failed"] += 1
                    self._swarm.tell("servers", f"our shard can't be filled: {error}", warning=True)
                    await asyncio.sleep(RESTORE_AGAIN_S)
            what = "with" if with_state else "without"
            self._swarm.tell("servers", f"took over entries {span.start} to {span.stop - 1}, {what} momenta")
            self._counts["takeovers"] += 1
        await shard.republish(plan.version)
        return shard

    def _puller(self, session: ViewSession) -> Puller:
        return Puller(
            self._me,
            session.key,
            self._store,
            self._context.transport,
            self._group.address,
            self._context.max_abs,
            self._swarm.strike,
            self._options,
        )

    async def _keep_replicas(self, session: ViewSession) -> None:
        """Pull replicas of the shards that we would take over, again and again."""
        plan = session.plan
        mine = [
            (server, span)
            for server, span, successor in zip(plan.servers, plan.spans, plan.successors, strict=True)
            if successor == self._me != server
        ]
        began_s, pause_s = self._clock.monotonic(), KEEP_S
        while True:
            await asyncio.sleep(pause_s)
            before_s = self._clock.monotonic()
            for server, span in mine:
                await self._replicate(session, server, span)
            now_s = self._clock.monotonic()
            pause_s = max(KEEP_S, KEEP_SHARE * (now_s - before_s))
            if now_s - began_s > FORGET_S:
                self._store.forget({span for _, span in mine}, keep_shard=session.index is not None)

    async def _replicate(self, session: ViewSession, server: str, span: ShardSpan) -> bool:
        """Pull one replica, where there is a newer one; False when that failed."""
        have = self._store.kept.get(span)
        try:
            contents = await self._puller(session).pull(
                server, span, 0 if have is None else have.version + 1, parameters=True, state=True
            )
        except (TransportError, PoisonedVectorError):
            return False
        self._store.keep(contents)
        return True

    async def _hand_over(self, session: ViewSession) -> None:
        """Let our successor pull our shard before we leave."""
        shard = self._store.shard
        if session.index is None or shard is None or shard.published is None:
            return
        successor = session.plan.successors[session.index]
        if successor == self._me:
            return
        take = Take(session.key, *shard.span, shard.version)
        try:
            await self._context.transport.call(
                self._group.address(successor),
                successor,
                "shard",
                msgspec.msgpack.encode(take),
                deadline_s=HANDOVER_S,
                lane="bulk",
            )
        except TransportError:
            self._counts["handovers_failed"] += 1

    # As a worker

    async def _join(self, session: ViewSession, client: ShardClient, *, settle: bool) -> list[int]:
        """Begin a view with the servers' parameters, to which our own are the seed if there were none.

        Args:
            client: to its servers.
            settle: whether all slices must be of one version.

        Returns:
            The version of each shard.
        """
        await self._adopt(session)
        if session.plan.seed and not session.plan.givers:
            await self._wait_for_parameters()
        while True:
            try:
                versions = await self._fetch_first(session, client, settle=settle)
            except BadServerError as error:
                self._reject(error)
            except PoisonedPushError as error:
                self._swarm.heal(f"our own parameters are unusable: {error}")
            except PeerTimeoutError as error:
                self._swarm.tell("servers", str(error), warning=True)
            else:
                self._store.branch = f"{session.key.generation}/{session.key.proposer[-12:]}"
                return versions
            await asyncio.sleep(RETRY_S)

    async def _adopt(self, session: ViewSession) -> None:
        """Take the whole state of the lineage that stays, where ours is another."""
        plan, mine = session.plan, session.notes[self._me].lineage
        while mine and plan.lineage and mine != plan.lineage:
            why = f"lineage {plan.lineage} has more steps than ours"
            if await self._swarm.adopted(plan.donor, plan.lineage, why):
                self._on_board = -1
                return
            await asyncio.sleep(ADOPT_S)

    async def _wait_for_parameters(self) -> None:
        """Nobody in this view had parameters: once we have some, ask for a view that knows it."""
        while True:
            await asyncio.sleep(ADOPT_S)
            if self._swarm.summary() is not None:
                self._group.doubt(self._me, "it has parameters by now")

    async def _fetch_first(self, session: ViewSession, client: ShardClient, *, settle: bool) -> list[int]:
        plan = session.plan
        if plan.seed and self._me in plan.givers:
            own = await self._own_parameters()
            parts = await client.insist_all(GradientPush(session.key, 0, "seed", plan.version), own)
        else:
            parts = await client.fetch(plan.version)
        if settle:
            parts = await client.settle(parts)
        try:
            versions = [part.head.version for part in parts]
            await self._take_parts(client, parts, max(versions), min(versions))
            return versions
        finally:
            client.release(parts)

    async def _own_parameters(self) -> Float32Array:
        """Return our own parameters, as they are on the board."""
        out, board = self._store.blank_copy(), self._learner.board
        while True:
            try:
                await heavy(out.nbytes, lambda: read_now(board, out, self._context.max_abs))
                return out
            except PoisonedVectorError as error:
                self._swarm.heal(f"our own parameters are unusable: {error}")
            except TensorError:
                pass  # nothing was published yet
            await asyncio.sleep(RETRY_S)

    async def _encode(self, client: ShardClient, gradient: Float32Array) -> str:
        """Get a gradient ready to travel; return why it is given to nobody, if it is unusable."""
        try:
            await heavy(8 * gradient.size, lambda: client.encode(gradient))
        except PoisonedVectorError as error:
            self._swarm.tell("servers", f"our gradient isn't given away: {error}", warning=True)
            return str(error)
        return ""

    async def _take_parts(
        self, client: ShardClient, parts: Sequence[SliceAnswer | None], policy: int, version: int
    ) -> float:
        """Put slices together, keep the vector, and put it on the board when it is another than before.

        Args:
            client: that brought them.
            policy: policy version for the learner.
            version: for our note: every slice has it, or a higher one.

        Returns:
            Euclidean norm of the change.

        Raises:
            BadServerError: a slice is unusable; nothing was changed.
        """
        out = self._store.blank_copy()
        held = None if self._store.copy is None else self._store.copy.parameters

        def work() -> float:
            client.assemble(parts, held, out)
            return mix.norm(out) if held is None else mix.distance(out, held)

        changed = await heavy(3 * out.nbytes, work)
        await self._store.replace_copy(out, version)
        progress = [part.head.progress for part in parts if part is not None]
        self._store.progress = max(self._store.progress, *progress, 0)
        if changed or self._on_board != policy:
            self._on_board = -1
            await heavy(out.nbytes, lambda: self._learner.board.post_set(out, None, policy))
            self._on_board = policy
        return changed

    def _reject(self, error: BadServerError) -> None:
        """Strike and doubt a server that gave something unusable."""
        self._swarm.strike(error.server, str(error))
        self._group.doubt(error.server, "its parameters are unusable")

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
            session = await self._session_of(head.key, incoming.sender)
            work = self._answer_push(incoming, head, session)
            return await self._group.hold(incoming.sender, head.call, work)
        request: ShardRequest = decode(incoming.meta, ShardRequest, "shard message")
        session = await self._session_of(request.key, incoming.sender)
        if isinstance(request, Pull):
            pulled, contents = await self._store.serve(request)
            meta = msgspec.msgpack.encode(pulled)
            return Reply(meta, contents.views, on_end=lambda _: self._store.sent())
        return await self._answer_take(incoming.sender, request, session)

    async def _answer_push(self, incoming: Incoming, head: GradientPush, session: ViewSession) -> Reply:
        if head.shard != session.index:
            raise Refusal(409, "another node serves this shard")
        server = await session.server(self._options.deadline_s)
        answer, held = await server.push(incoming.sender, head, ReceivedPush(incoming))
        meta = msgspec.msgpack.encode(answer)
        if held is None:
            return Reply(meta)
        vector = held.delta if answer.kind == "delta" else held.vector.data.cast("B")
        return Reply(meta, vector, on_end=lambda _: held.release())

    async def _answer_take(self, sender: str, take: Take, session: ViewSession) -> Reply:
        """Pull the shard of a server that leaves."""
        span = take.span
        if (sender, span) not in zip(session.plan.servers, session.plan.spans, strict=True):
            raise Refusal(409, "this shard isn't yours to give")
        if not await self._replicate(session, sender, span):
            raise Refusal(503, "the shard couldn't be pulled")
        return Reply(b"")

    async def _session_of(self, key: ViewKey, sender: str) -> ViewSession:
        """Return the session of the view that a message belongs to, once we act in it."""
        self._group.check(key)
        session = self._session
        if (session is None or session.key != key) and not self._stopped.is_set():
            try:
                async with asyncio.timeout(SESSION_S):
                    await self._changed.wait()
            except TimeoutError as error:
                raise Refusal(503, "this node doesn't act in that view yet") from error
            self._group.check(key)
            session = self._session
        if session is None or session.key != key or sender not in session.members:
            raise Refusal(409, f"group view {key} isn't acted in here, or not with you")
        return session
