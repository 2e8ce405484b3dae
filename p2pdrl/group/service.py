"""The group of a strategy: its view in force, and the messages by which the members agree on one.

A strategy that needs one list of members owns a `Group`, starts and stops it with itself, hands it the calls
on route ``group``, puts the key of the view in force into each message of its own, and lets `check` refuse
those of other views::

    group = Group(swarm, transport, clock, epoch, note=lambda: b"")
    await group.start()
    await group.run(act)  # ``act(active)`` in each view, cancelled with it

The decisions are `agreement`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec

from p2pdrl.clock import Clock
from p2pdrl.errors import (
    PeerRefusedError,
    PeerTimeoutError,
    PeerUnreachableError,
    TensorError,
    TransportError,
)
from p2pdrl.group.adaptive_timeout import AdaptiveTimeout
from p2pdrl.group.agreement import GroupCall, GroupCore
from p2pdrl.group.calls import AtWork, HeldCalls, repeated
from p2pdrl.group.view import (
    Activate,
    ActiveView,
    Doubt,
    GroupPing,
    GroupView,
    Held,
    Holding,
    Request,
    Response,
    Timing,
    ViewKey,
)
from p2pdrl.transport.codec import decode
from p2pdrl.transport.protocol import Address, Answer, Incoming, Refusal, Reply, Transport, VectorBuffer

__all__ = ["ELSEWHERE", "ROUTE", "ActiveView", "Group", "GroupSwarm", "GroupView", "Sender", "ViewKey"]

ROUTE = "group"
ELSEWHERE = 409
"""Refusal by which a peer says that it is in another mode."""
GONE = frozenset({403, 404})
"""Refusals by which a peer says that it is in no group of ours; others may pass."""
LIVES_S = 1.0
"""Who answers nothing at all for so long is taken for dead."""


class Sender:
    """Sends the group's messages: each is repeated until it is answered, or its time is up.

    So a network that loses one message in twenty doesn't look like members that come and go.
    """

    def __init__(self, transport: Transport, clock: Clock, epoch: int, timing: Timing) -> None:
        self._transport, self._clock, self._epoch, self._timing = transport, clock, epoch, timing
        self._timeout = AdaptiveTimeout(
            timing.answer_s / 2, least_s=timing.again_s, quantile=0.25, margin=3.0
        )

    async def send(self, to: Address | None, call: GroupCall) -> Response | str:
        """Send a message of the core's; return the answer, or the word for what became of it.

        Args:
            to: where its receiver listens; None where nobody knows.
        """
        if to is None:
            return "unreachable"
        try:
            answer = await self._repeated(to, call.to, call.message, call.deadline_s)
            response: Response = decode(answer.meta, Response, "group message")
        except PeerTimeoutError:
            return "timeout"
        except PeerRefusedError as refusal:
            if refusal.status == ELSEWHERE:
                return "elsewhere"
            return "refused" if refusal.status in GONE else "hindered"
        except TransportError:
            return "unreachable"
        return response

    async def holding(self, to: Address, peer: str, number: int) -> bool:
        """Whether ``peer`` works at our call of that number.

        Raises:
            TransportError: it doesn't say.
        """
        message = Holding(self._epoch, number)
        answer = await self._repeated(to, peer, message, self._timing.answer_s)
        held: Held = decode(answer.meta, Held, "group message")
        return held.yes

    async def lives(self, to: Address, peer: str) -> bool:
        """Whether ``peer`` answers anything at all, a refusal too."""
        try:
            await self._repeated(to, peer, GroupPing(self._epoch, proposes=False, active=None), LIVES_S)
        except (PeerTimeoutError, PeerUnreachableError):
            return False
        except TransportError:
            return True
        return True

    async def _repeated(self, to: Address, peer: str, message: msgspec.Struct, deadline_s: float) -> Answer:
        meta, began_s = msgspec.msgpack.encode(message), self._clock.monotonic()

        async def call(left_s: float) -> Answer:
            return await self._transport.call(to, peer, ROUTE, meta, deadline_s=left_s)

        again_s = self._timeout.deadline_s
        answer = await repeated(call, again_s=again_s, deadline_s=deadline_s, clock=self._clock)
        self._timeout.observe(self._clock.monotonic() - began_s)
        return answer


GOODBYE_S = 0.3
INSIST_S = (0.01, 0.25)
"""First and longest pause before a failed call to a member is made again."""
RENEW_S = 3.0
"""A new view is asked for again after this."""
ERA_S = 1_767_225_600
"""Generations begin at the seconds since 2026, so that a node that restarted gives out no key twice."""


T = TypeVar("T")


class GroupSwarm(Protocol):
    """What a group asks of its node: who lives where, and whom to tell people of."""

    @property
    def node_id(self) -> str:
        """Own id."""

    def alive(self) -> dict[str, Address]:
        """The peers that may be in the group, without ourselves."""

    def name_of(self, peer: str) -> str:
        """The name that people gave a member; its id when it is unknown."""

    def tell(self, kind: str, message: str) -> None:
        """Tell people of a new group."""


class Group:
    """One node's place in its group.

    Args:
        epoch: mode epoch; messages of another are refused.
        note: called when a view is acknowledged: what to hand out to all members with it, at most 256 bytes.
    """

    def __init__(
        self,
        swarm: GroupSwarm,
        transport: Transport,
        clock: Clock,
        epoch: int,
        note: Callable[[], bytes],
        *,
        timing: Timing | None = None,
    ) -> None:
        self._swarm, self._clock, self._epoch = swarm, clock, epoch
        self._timing = timing if timing is not None else Timing()
        self._core = GroupCore(
            swarm.node_id,
            epoch,
            note,
            clock.monotonic(),
            first_generation=max(0, int(clock.wall()) - ERA_S),
            timing=self._timing,
        )
        self._sender = Sender(transport, clock, epoch, self._timing)
        self._at_work = AtWork()
        self.calls = HeldCalls(transport, clock, self._sender.holding)
        """Makes calls whose answers members hold, see `hold`."""
        self._addresses: dict[str, Address] = {}
        self._known: dict[str, Address] = {}
        """Where everybody listened when the view in force began."""
        self._changed = asyncio.Event()
        self._shown: ActiveView | None = None
        self._told: tuple[str, ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[None] | None = None

    @property
    def view(self) -> GroupView | None:
        """The view in force; None while there is none."""
        active = self._core.active
        return None if active is None else active.view

    async def active(self, after: ViewKey | None = None) -> ActiveView:
        """Wait for a view in force here that is greater than ``after``.

        Raises:
            Refusal: 503, the group was stopped meanwhile.
        """
        while True:
            active = self._core.active
            if active is not None and (after is None or active.view.key > after):
                return active
            if not self._running:
                raise Refusal(503, "the group has stopped")
            await self._changed.wait()

    async def ended(self, key: ViewKey) -> None:
        """Wait until view ``key`` is no longer in force here, or the group is stopped."""
        while self._running and self._core.active is not None and self._core.active.view.key == key:
            await self._changed.wait()

    async def run(
        self,
        act: Callable[[ActiveView], Coroutine[Any, Any, None]],
        *,
        done: Callable[[], bool] = lambda: False,
    ) -> None:
        """Do ``act`` in each view in turn, for as long as that is in force; return when the group is stopped.

        The end of a view cancels ``act``, which cleans up in a ``finally``; the next view is acted in only
        after that. An ``act`` that has nothing more to do in its view returns, and is called again in the
        next one. Cancelling `run` cancels ``act`` likewise; the group goes on until `stop`.

        Args:
            done: asked before each view, and when ``act`` returns: whether to return without another one.

        Raises:
            BaseException: what ``act`` raises, or what ended the group: a bug of ours.
        """
        key: ViewKey | None = None
        while self._running and not done():
            active = self._core.active
            if active is None or (key is not None and active.view.key <= key):
                await self._changed.wait()
                continue
            key = active.view.key
            work = asyncio.create_task(act(active), name=f"view {key}")
            ended = asyncio.create_task(self.ended(key), name=f"end of view {key}")
            try:
                await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
                if work.done() and not work.cancelled() and work.exception() is None and not done():
                    await ended
            finally:
                for task in (work, ended):
                    task.cancel()
                await asyncio.gather(work, ended, return_exceptions=True)
            if not work.cancelled():
                work.result()
        if not self._running:
            await self.watch()

    def doubt(self, peer: str, why: str) -> None:
        """Ask for a view without ``peer``, which didn't do its part.

        It comes back when it answers: after half a second, and later each time it is doubted within a minute,
        up to 30 s. The proposer itself is passed over only when it doesn't answer either when it is asked.
        """
        if self._running:
            self._look()
            self._carry_out(self._core.doubt(peer, why, self._clock.monotonic()))

    def renew(self, key: ViewKey, why: str) -> None:
        """Ask for a view after ``key``: something that its members share broke, and nobody knows by whom.

        Args:
            key: of a view that was in force here; nothing happens once a later one is.
        """
        if self._running:
            self._look()
            self._carry_out(self._core.renew(key, why, self._clock.monotonic()))

    async def break_up(self, view: GroupView, why: str) -> NoReturn:
        """Ask for another view until ``view`` ends, and the caller with it: what its members share broke.

        Members that answer nothing are doubted.
        """
        others = [peer for peer in view.members if peer != self._swarm.node_id]
        while True:
            for peer, lives in zip(others, await asyncio.gather(*map(self.lives, others)), strict=True):
                if not lives:
                    self.doubt(peer, f"it doesn't answer: {why}")
            self.renew(view.key, why)
            await asyncio.sleep(RENEW_S)

    # Calls to members

    def address(self, peer: str) -> Address:
        """Where a member listens, or did when the view in force began.

        Raises:
            PeerUnreachableError: nobody knows.
        """
        address = self._swarm.alive().get(peer, self._known.get(peer))
        if address is None:
            raise PeerUnreachableError(f"{peer} isn't known to be alive")
        return address

    async def call(
        self,
        peer: str,
        route: str,
        message: msgspec.Struct,
        *,
        vector: memoryview | None = None,
        into: VectorBuffer | None = None,
        deadline_s: float,
        once: bool = False,
    ) -> Answer:
        """Call a member that may hold its answer, as often as that is lost; see `HeldCalls.call`.

        Args:
            message: its metadata; the field ``call`` is filled in.
            once: it would do harm twice.

        Raises:
            TransportError: as `HeldCalls.call`; nobody knows where the peer listens.
        """

        def meta(number: int) -> bytes:
            return msgspec.msgpack.encode(msgspec.structs.replace(message, call=number))

        return await self.calls.call(
            self.address(peer), peer, route, meta, vector=vector, into=into, deadline_s=deadline_s, once=once
        )

    async def insist(
        self, peer: str, attempt: Callable[[], Awaitable[T]], *, late_after_s: float = math.inf
    ) -> T:
        """Try until ``attempt`` succeeds or the view ends, which cancels us; doubt a peer that is at fault.

        A peer is doubted when it doesn't answer in time; when it can't be reached (twice in a row, for a
        connection may break by itself) and answers nothing else either; and for any failure once it is late.

        Args:
            peer: whom ``attempt`` calls.
            attempt: one try; its transport and tensor errors are failures.
            late_after_s: seconds after which it is late.
        """
        pause_s, broken, late_s = INSIST_S[0], False, self._clock.monotonic() + late_after_s
        while True:
            try:
                return await attempt()
            except PeerTimeoutError as error:
                self.doubt(peer, str(error))
            except (TransportError, TensorError) as error:
                gone = False
                if isinstance(error, PeerUnreachableError):
                    gone = (broken or not error.sent) and not await self.lives(peer)
                    broken = True
                if gone or self._clock.monotonic() >= late_s:
                    self.doubt(peer, str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, INSIST_S[1])

    async def lives(self, peer: str) -> bool:
        """Whether a member answers anything: to be asked before it is doubted for what got lost."""
        try:
            return await self._sender.lives(self.address(peer), peer)
        except PeerUnreachableError:
            return False

    async def hold(self, sender: str, number: int, work: Awaitable[Reply]) -> Reply:
        """Do what a member called for with `call`, and tell it so when it asks."""
        return await self._at_work.serve(sender, number, work)

    def check(self, key: ViewKey) -> None:
        """Let a message of view ``key`` pass.

        Raises:
            Refusal: 409, another view is in force here, or none.
        """
        active = self._core.active
        if active is not None and active.view.key == key:
            return
        if active is not None:
            raise Refusal(409, f"group view {key} isn't in force here, {active.view.key} is")
        coming = self._core.acknowledged
        after = "none is" if coming is None else f"{coming.key} is being formed"
        raise Refusal(409, f"group view {key} isn't in force here, {after}")

    async def start(self) -> None:
        """Begin to find a view; alone, one is in force at once."""
        self._over = asyncio.get_running_loop().create_future()
        self._look()
        self._spawn(self._watch_time(), "group")

    async def stop(self) -> None:
        """Leave the group: say so to the proposer, and end everything. Calling it again does nothing."""
        try:
            await self._say_goodbye()
        finally:
            self._end(None)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _say_goodbye(self) -> None:
        if not self._running:
            return
        self._look()
        goodbyes = self._core.leave()
        self._end(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                for call in goodbyes:
                    await self._sender.send(self._addresses.get(call.to), call)

    async def watch(self) -> None:
        """Wait until the group is stopped; raise what ended it before: a bug of ours."""
        if self._over is not None:
            await asyncio.shield(self._over)

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a member's call on route ``group``.

        Raises:
            Refusal: the group is stopped, or of another mode epoch (409).
            WireError: malformed.
        """
        if not self._running:
            raise Refusal(409, "this node is in no group, or no longer")
        message: Request | Holding = decode(incoming.meta, Request | Holding, "group message")
        self._same_epoch(message)
        if isinstance(message, Holding):
            yes = (incoming.sender, message.call) in self._at_work
            return Reply(msgspec.msgpack.encode(Held(yes)))
        self._look()
        response, calls = self._core.request(incoming.sender, message, self._clock.monotonic())
        self._carry_out(calls)
        return Reply(msgspec.msgpack.encode(response))

    def _same_epoch(self, message: Request | Holding) -> None:
        if isinstance(message, GroupPing | Doubt | Holding):
            epoch = message.epoch
        elif isinstance(message, Activate):
            epoch = message.key.epoch
        else:
            epoch = message.view.key.epoch
        if epoch != self._epoch:
            raise Refusal(409, f"this node is in mode epoch {self._epoch}, the message in {epoch}")

    # The core's effects

    @property
    def _running(self) -> bool:
        return self._over is not None and not self._over.done()

    def _look(self) -> None:
        """Tell the core who lives."""
        self._addresses = self._swarm.alive()
        self._carry_out(self._core.tick(self._addresses, self._clock.monotonic()))

    async def _watch_time(self) -> None:
        while True:
            await asyncio.sleep(self._timing.poll_s)
            self._look()

    def _carry_out(self, calls: Iterable[GroupCall]) -> None:
        for call in calls:
            self._spawn(self._make(call), f"group {call.number}")
        if self._core.active is not self._shown:
            self._shown = self._core.active
            self._known = self._addresses
            self._notify()
            self._tell()

    async def _make(self, call: GroupCall) -> None:
        """Send a message and hand its answer, or what became of it, to the core."""
        outcome = await self._sender.send(self._addresses.get(call.to), call)
        now_s = self._clock.monotonic()
        if isinstance(outcome, str):
            self._carry_out(self._core.failed(call.number, outcome, now_s))
        else:
            self._carry_out(self._core.answered(call.number, outcome, now_s))

    def _tell(self) -> None:
        """Tell people who is in the group, when that is others than before."""
        if self._shown is None or self._shown.view.members == self._told:
            return
        self._told = self._shown.view.members
        names = ", ".join(self._swarm.name_of(member) for member in self._told[:20])
        more = f" and {len(self._told) - 20} more" if len(self._told) > 20 else ""
        self._swarm.tell("group", f"group of {len(self._told)}: {names}{more}")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._end(task.exception())

    def _end(self, error: BaseException | None) -> None:
        """Be stopped: by ourselves, or by a bug."""
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
        if not self._over.done():
            if error is None:
                self._over.set_result(None)
            else:
                self._over.set_exception(error)
                self._over.exception()  # told by `watch`; nobody need ask
        self._notify()
