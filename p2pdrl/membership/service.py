"""Membership on a real network: carries the core's effects out over a `Transport`.

It must not blame others for a lagging event loop: a call that outlived its deadline here, and a timer that
came late, count against this node's own health and accuse nobody.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec

from p2pdrl.clock import Clock
from p2pdrl.config.node import TRAINS
from p2pdrl.errors import (
    PeerRefusedError,
    PeerTimeoutError,
    PeerUnreachableError,
    StorageError,
    TransportError,
)
from p2pdrl.membership.events import (
    Answered,
    Effect,
    Input,
    MemberEvent,
    MemberView,
    Notified,
    Reject,
    Request,
    Respond,
    Send,
    SendFailed,
    SwarmChanged,
    Tick,
)
from p2pdrl.membership.joining import (
    Joiner,
    JoinHooks,
    Listens,
    Resolver,
    judge_newcomer,
    knows_no_address,
    listens,
    resolve,
)
from p2pdrl.membership.known_members import KnownMember, KnownMembers, living
from p2pdrl.membership.messages import (
    ROUTES,
    Delta,
    GossipMessage,
    JoinRequest,
    Message,
    Sync,
    Welcome,
    decode,
    encode,
    route_of,
    without_settings,
)
from p2pdrl.membership.operators import Operator
from p2pdrl.membership.records import SwarmRecord, refuse_address, relays_in, with_relays
from p2pdrl.membership.state import Membership
from p2pdrl.membership.swarm_records import SwarmRecords
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply, Transport

__all__ = ["MembershipService", "PendingRequests", "failed"]

_LOCAL = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENETDOWN, errno.ENETUNREACH, errno.EADDRNOTAVAIL}
)


def failed(call_id: int, error: TransportError, took_s: float, deadline_s: float, lag_s: float) -> SendFailed:
    """Return what a transport's ``error`` means to the core.

    | error | kind |
    |---|---|
    | connection refused, or nothing listens there | unreachable: fast evidence |
    | no answer in time; the connection broke; the name isn't known | timeout: ambiguous |
    | a refusal | refused, with its status |
    | out of file descriptors, no network, held up ourselves | local: our own trouble |

    Args:
        took_s: how long the call took, which was allowed to take ``deadline_s``.
        lag_s: an answer later than the deadline by more than this was held up here.
    """
    if isinstance(error, PeerRefusedError):
        return SendFailed(
            call_id, "refused", f"it answered {error.status}: {error.reason}"[:200], error.status
        )
    number = _errno(error)
    if number in _LOCAL:
        return SendFailed(call_id, "local", f"this node can't connect: {errno.errorcode[number]}")
    if took_s > deadline_s + lag_s:
        return SendFailed(call_id, "local", f"this node was held up for {took_s - deadline_s:.1f} s")
    if isinstance(error, PeerTimeoutError):
        return SendFailed(call_id, "timeout", f"no answer within {deadline_s:g} s")
    if isinstance(error, PeerUnreachableError):
        if number == errno.ECONNREFUSED or (number is None and error.__cause__ is None):
            return SendFailed(call_id, "unreachable", "connection refused")
        if number == errno.EHOSTUNREACH:
            return SendFailed(call_id, "timeout", "no route to its host")
        return SendFailed(call_id, "timeout", "the connection broke")
    return SendFailed(call_id, "timeout", f"a strange answer: {error}"[:200])


def _errno(error: BaseException) -> int | None:
    """The first errno in the chain of causes."""
    cause: BaseException | None = error
    for _ in range(5):
        if cause is None:
            return None
        if isinstance(cause, OSError) and cause.errno:
            return cause.errno
        inner = getattr(cause, "os_error", None)
        if isinstance(inner, OSError) and inner.errno:
            return inner.errno
        cause = cause.__cause__
    return None


class PendingRequests:
    """Requests that wait for the core's answer, by token; one that takes over ``within_s`` is refused."""

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._token = 0
        self._waiting: dict[int, asyncio.Future[Message]] = {}

    async def ask(self, feed: Callable[[int], None]) -> Message:
        """Give a request to the core, and wait until it is answered.

        Args:
            feed: is given the request's token; `settle` may be called before it returns.

        Raises:
            Refusal: the core refuses, or no answer came in time (503).
        """
        self._token += 1
        token = self._token
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[token] = future
        try:
            feed(token)
            async with asyncio.timeout(self._within_s):
                return await future
        except TimeoutError:
            raise Refusal(503, "no answer came together in time") from None
        finally:
            del self._waiting[token]

    def settle(self, token: int, result: Message | Refusal) -> None:
        """Give the answer to a request; one that nobody waits for any more is passed over."""
        future = self._waiting.get(token)
        if future is None or future.done():
            return
        if isinstance(result, Refusal):
            future.set_exception(result)
        else:
            future.set_result(result)

    def close(self) -> None:
        """Answer none of them any more."""
        for future in self._waiting.values():
            future.cancel()


MAX_META_BYTES = {"swim/delta": 2 * 1024 * 1024, "swim/join": 320 * 1024}
ANSWER_WITHIN_S = 10.0
SAVE_EVERY_S = 5.0
SAVE_FIRST_S = 0.5
"""While no member is remembered: a node that is killed soon after it joined must know that it had others."""


class MembershipService:
    """One node's membership, running.

    Args:
        core: made by `open_core`.
        transport: calls peers and serves their calls; started and closed by the daemon.
        clock: the same as the core's.
        seeds: addresses to join through; ours may be among them.
        known: what was remembered from the last run, and where to keep it.
        on_record: told of each swarm record that changed.
        on_twin: told the address of another node that runs with our key.

    Attributes:
        joiner: tries the seeds.
        joined: set once some member took us in, or we took one in.
        messages: requests and answers of the protocol that this node sent.
    """

    def __init__(
        self,
        core: Membership,
        transport: Transport,
        clock: Clock,
        seeds: Iterable[Address] = (),
        *,
        hooks: JoinHooks | None = None,
        known: KnownMembers | None = None,
        rng: random.Random,
        resolver: Resolver = resolve,
        listens: Listens = listens,
        on_record: Callable[[SwarmRecord], None] | None = None,
        on_twin: Callable[[str], None] | None = None,
    ) -> None:
        self._core = core
        self._transport = transport
        self._clock = clock
        self._hooks = hooks or JoinHooks()
        self._known = known or KnownMembers(None)
        self._on_record = on_record
        self._on_twin = on_twin
        self._subscribers: list[Callable[[MemberEvent], None]] = []
        self._pending = PendingRequests(ANSWER_WITHIN_S)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sends: set[asyncio.Task[Any]] = set()
        self._crash: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._kick = asyncio.Event()
        self._wake_at = float("inf")
        self._dirty = False
        self._closed = False
        self.messages = 0
        self.joiner = Joiner(
            transport=transport,
            clock=clock,
            seeds=seeds,
            hints=[Address.parse(member.address) for member in self._known.members],
            hooks=self._hooks,
            core=core,
            carry_out=self._carry_out,
            rng=rng,
            resolver=resolver,
            listens=listens,
        )
        self.joined = self.joiner.joined
        for route in ROUTES:
            transport.serve(route, self._serve, max_meta_bytes=MAX_META_BYTES.get(route, 65536))

    # Life

    async def start(self) -> None:
        """Begin probing, and trying the seeds."""
        self._save(living(self.members()))
        self._spawn(self._run_timers(), "membership timers")
        self._spawn(self.joiner.run(), "membership seeds")
        self._spawn(self._run_saving(), "membership file")

    async def watch(self) -> None:
        """Wait for ever; raise what ended one of our own tasks: a bug, to be told loudly."""
        await asyncio.shield(self._crash)

    async def leave(self, timeout_s: float = 5.0) -> int:
        """Say goodbye to three members; return how many heard it within ``timeout_s``."""
        before = set(self._sends)
        self._carry_out(self._core.leave(self._clock.monotonic()))
        for address in self.joiner.declined:
            self._spawn(self._decline(address), "goodbye", self._sends)
        goodbyes = self._sends - before
        if not goodbyes:
            return 0
        done, _ = await asyncio.wait(goodbyes, timeout=timeout_s)
        return sum(1 for task in done if not task.cancelled() and task.exception() is None and task.result())

    async def _decline(self, address: Address) -> bool:
        """Say goodbye to a member that took us in, whose swarm wasn't one for us."""
        me = self._core.me
        message = GossipMessage(me.incarnation, (me,))
        try:
            await self._transport.call(
                address, None, route_of(message), encode(message), deadline_s=1.0, lane="probe"
            )
        except TransportError:
            return False
        return True

    async def close(self) -> None:
        """Stop everything and write the file; calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        tasks = [*self._tasks, *self._sends]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._pending.close()
        if not self._crash.done():
            self._crash.cancel()
        self._save(living(self.members()))

    # What the daemon reads and says

    @property
    def core(self) -> Membership:
        """The core, for reading."""
        return self._core

    @property
    def node_id(self) -> str:
        """Our own id."""
        return self._core.me.id

    @property
    def public_key(self) -> bytes:
        """Our own public key."""
        return self._core.me.public_key

    @property
    def records(self) -> SwarmRecords:
        """Settings of the whole swarm, for reading; `propose` writes them."""
        return self._core.swarm

    def members(self) -> list[MemberView]:
        """Everybody known, ourselves first, tombstones included."""
        return self._core.members(self._clock.monotonic())

    def subscribe(self, callback: Callable[[MemberEvent], None]) -> None:
        """Call ``callback`` with each event."""
        self._subscribers.append(callback)

    def propose(self, key: str, value: Any) -> SwarmRecord:
        """Write a setting of the whole swarm.

        Raises:
            ValueError: the value is longer than 8 KiB, or there is no such setting.
            BadRecordError: the swarm has operators, and this isn't for nodes to write.
        """
        record, effects = self._core.propose(key, value, self._clock.monotonic())
        self._carry_out(effects)
        return record

    def submit(self, record: SwarmRecord) -> None:
        """Take a setting that an operator has signed, and tell everybody at once.

        Raises:
            BadRecordError: it is forged, or by somebody who may not write it.
        """
        self._carry_out(self._core.submit(record, self._clock.monotonic()))

    def use_roots(self, roots: Iterable[Operator]) -> None:
        """Take other root operators: the file of the swarm's key has changed."""
        self._carry_out(self._core.use_roots(roots, self._clock.monotonic()))

    def retag(self, tags: dict[str, str]) -> None:
        """Change the facts that our record tells, but for how we are reached, and spread it."""
        self._retag(with_relays(tags, relays_in(self._core.me.tags)))

    def tell_relays(self, relays: Sequence[str] | None) -> None:
        """Tell everybody who relays calls to us, which nobody can dial; None: we can be dialled."""
        self._retag(with_relays(self._core.me.tags, relays))

    def _retag(self, tags: dict[str, str]) -> None:
        self._carry_out(self._core.update_self(self._clock.monotonic(), tags=tags))

    def relays_of(self, node_id: str) -> list[tuple[str, Address]] | None:
        """The living members that relay calls to a member, and where; None when it can be dialled."""
        table = self._core.table
        member = table.get(node_id)
        ids = None if member is None else relays_in(member.record.tags)
        if ids is None:
            return None
        known = [relay for relay in map(table.get, ids) if relay is not None and relay.living]
        known.sort(key=lambda relay: relay.state != "alive")
        return [
            (relay.record.id, Address.parse(relay.record.address))
            for relay in known
            if relays_in(relay.record.tags) is None
        ]

    def move(self, address: Address) -> None:
        """Tell everybody that we live at another address now."""
        self._carry_out(self._core.update_self(self._clock.monotonic(), str(address)))

    def follow(self, lineage: str) -> None:
        """Hold the settings of ``lineage`` from now on: our state is of that lineage."""
        self._carry_out(self._core.follow(lineage, self._clock.monotonic()))

    def recall(self, record: SwarmRecord) -> None:
        """Take a setting that this node held in an earlier run, unless a greater one is known by now.

        Raises:
            BadRecordError: forged, or of another swarm.
        """
        self._carry_out(self._core.recall(record, self._clock.monotonic()))

    def catch_up(self, node_id: str) -> None:
        """Compare views with a member that knows a newer setting than we do."""
        self._carry_out(self._core.catch_up(node_id, self._clock.monotonic()))

    def tell_settings(self, node_id: str) -> None:
        """Tell a member that seems to follow older settings ours, at once."""
        self._carry_out(self._core.tell_settings(node_id, self._clock.monotonic()))

    # Inputs

    def _feed(self, event: Input) -> None:
        self._carry_out(self._core.handle(event, self._clock.monotonic()))

    async def _run_timers(self) -> None:
        while True:
            due = self._core.next_wakeup()
            self._wake_at = float("inf") if due is None else due
            self._kick.clear()
            wait_s = None if due is None else max(0.0, due - self._clock.monotonic())
            try:
                async with asyncio.timeout(wait_s):
                    await self._kick.wait()
            except TimeoutError:
                # The loop may wake a hair early by its own clock; the timer is due all the same.
                now = max(self._clock.monotonic(), self._wake_at)
                self._carry_out(self._core.handle(Tick(), now))

    async def _serve(self, incoming: Incoming) -> Reply:
        message = self._believable(decode(incoming.meta), incoming.sender)
        if type(message) is not ROUTES[incoming.route]:
            raise Refusal(400, f"{type(message).__name__} doesn't belong to {incoming.route}")
        if isinstance(message, JoinRequest):
            if incoming.sender == self._core.me.id or knows_no_address(message.record):
                return Reply(encode(Welcome((), b"", incoming.remote_host)))
            if (starting := self._hooks.starting()) is not None:
                self._note_starting(message, incoming)
                others = self.joiner.others_starting(message.record.address)
                return Reply(encode(msgspec.structs.replace(starting, others=others)))
            judge_newcomer(message, incoming.sender, self._hooks, self._core.spoken)
        answer = await self._pending.ask(
            lambda token: self._feed(Request(token, incoming.sender, message, incoming.remote_host))
        )
        if isinstance(answer, Welcome):
            self.joined.set()
            answer = msgspec.structs.replace(answer, join_info=self._hooks.info())
        return Reply(encode(answer))

    def _believable(self, message: Message, sender: str | None) -> Message:
        """Take the swarm's settings of nobody whose certificate gives no say in them, whoever signed them."""
        allowed = None if sender is None else self._transport.roles_of(sender)
        return message if allowed is None or allowed & TRAINS else without_settings(message)

    def _note_starting(self, join: JoinRequest, incoming: Incoming) -> None:
        """Two nodes that start at once may know each other one way only: ask back."""
        address = join.record.address
        if join.record.id == incoming.sender and refuse_address(address, incoming.remote_host) is None:
            self.joiner.heard_of(Address.parse(address))

    # Effects

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            self.messages += isinstance(effect, Send | Respond | Reject)
            if isinstance(effect, Send):
                self._spawn(self._send(effect), "membership call", self._sends)
            elif isinstance(effect, Respond):
                self._pending.settle(effect.token, effect.message)
            elif isinstance(effect, Reject):
                self._pending.settle(effect.token, Refusal(effect.status, effect.reason))
            elif isinstance(effect, Notified):
                self._dirty = True
                for callback in self._subscribers:
                    callback(effect.event)
            elif isinstance(effect, SwarmChanged):
                if self._on_record is not None:
                    self._on_record(effect.record)
            elif self._on_twin is not None:
                self._on_twin(effect.address)
        due = self._core.next_wakeup()
        if due is not None and due < self._wake_at:
            self._kick.set()

    async def _send(self, send: Send) -> bool:
        started = self._clock.monotonic()
        to = Address.parse(send.to)
        bulk = isinstance(send.message, Sync | Delta)
        result: Answered | SendFailed
        try:
            answer = await self._transport.call(
                to,
                send.target_id,
                route_of(send.message),
                encode(send.message),
                deadline_s=send.deadline_s,
                lane="bulk" if bulk else "probe",
            )
            message = self._believable(decode(answer.meta), answer.sender)
            result = Answered(send.call_id, message, to.host)
        except TransportError as error:
            took_s = self._clock.monotonic() - started
            result = failed(send.call_id, error, took_s, send.deadline_s, self._core.config.lag_s)
        self._feed(result)
        return isinstance(result, Answered)

    def _spawn(
        self, work: Coroutine[Any, Any, Any], name: str, group: set[asyncio.Task[Any]] | None = None
    ) -> None:
        tasks = self._tasks if group is None else group
        task = asyncio.get_running_loop().create_task(work, name=name)
        tasks.add(task)

        def ended(task: asyncio.Task[Any]) -> None:
            tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None and not self._crash.done():
                self._crash.set_exception(error)

        task.add_done_callback(ended)

    async def _run_saving(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_S if self._known.members else SAVE_FIRST_S)
            if self._dirty:
                self._dirty = False
                await asyncio.to_thread(self._save, living(self.members()))

    def _save(self, members: tuple[KnownMember, ...]) -> None:
        """Write the file; a disk that doesn't take it costs us hints at the next start, no more."""
        try:
            self._known.save(self._core.me.incarnation.boot_ms, members or self._known.members)
        except StorageError:
            self._dirty = True
