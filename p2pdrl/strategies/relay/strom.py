"""Threshold-compressed updates to everybody (Strom 2015, Interspeech, "Scalable distributed DNN training").

Each node's learner trains freely. What it moved its parameters by, whatever its optimizer, is added to a
residual; entries that have grown to ±τ go to all other nodes as ±τ, which add them to theirs (`state`).
Each message is added exactly once by everybody (`log`), so replicas differ by their residuals, and by
what is under way.

**Learning rate**: N nodes add up all N nodes' updates, so the swarm steps N times as far in the same time as
one node: begin with 1/N of the rate (or 1/√N) that suits one node. Adam's moments follow each node's own
gradients only.

**τ**: every entry of a replica may be off by about τ from each other's, in either direction. Lower is
closer and costs more bytes; `facts` tells bytes for each update, and the residual.

Up to `DIRECT_MEMBERS` nodes send straight to all others. More pass messages on along a random regular graph
of degree `DEGREE`, each up to `DEGREE` times to everybody, who keeps what is new.

When the mode begins, all take the base of one member, the one with the lowest id: so begin it when replicas
are close. Whoever comes anew, was frozen for long, or meets a greater history takes a base (`sync`):
exact, since it comes with the numbers of all messages it contains. After a partition that outlasted what is
kept (messages of as many bytes as two vectors), one side's base is taken by the other, whose work since then
is lost but for its last messages. A node that was alone for `ALONE_S` follows those it meets likewise.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine

from p2pdrl.config.strategy import Mode, StromConfig
from p2pdrl.errors import PoisonedVectorError
from p2pdrl.strategies.arithmetic import Arithmetic
from p2pdrl.strategies.door import Door
from p2pdrl.strategies.protocol import Context
from p2pdrl.strategies.relay.log import History
from p2pdrl.strategies.relay.member import StromMember
from p2pdrl.strategies.relay.messages import ROUTE, Ask, Call
from p2pdrl.strategies.relay.push import StromPush
from p2pdrl.strategies.relay.sync import StromSync
from p2pdrl.strategies.runner import Runner
from p2pdrl.strategies.tally import Tally
from p2pdrl.strategies.topology import neighbours
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.transport.codec import decode
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply

__all__ = ["DIRECT_MEMBERS", "StromStrategy"]

DIRECT_MEMBERS = 16
DEGREE = 4
POLL_S = 0.1
LEAST_SLEEP_S = 1e-3
ALONE_S = 2.0
FIRST_REST_S = 0.1
MOST_DOUBLINGS = 5


class StromStrategy:
    """Strom's updates over the transport; see `Strategy`.

    Args:
        config: its options.
        context: what the node gives.
        direct_members: up to so many nodes send straight to all others.
        window_bytes: see `StromMember`.
    """

    mode: Mode = "gossip"

    def __init__(
        self,
        config: StromConfig,
        context: Context,
        *,
        direct_members: int = DIRECT_MEMBERS,
        window_bytes: int | None = None,
    ) -> None:
        self._direct_members = direct_members
        self._config, self._context = config, context
        self._me, self._swarm, self._clock = context.swarm.node_id, context.swarm, context.clock
        self._heavy = Arithmetic(4 * context.size)
        self._member = StromMember(config, context, self._heavy, window_bytes)
        self._door = Door(context.swarm, context.epoch, config.max_staleness)
        self._sync = StromSync(config, context, self._member, self._door)
        self._tally, self._runner = Tally(context.swarm), Runner()
        self._pushes = StromPush(config, context, self._member, self._door, self._sync, self._tally)
        self._updates = self._all_updates = 0
        self._next_s = 0.0
        self._met_s: float | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._rests: dict[str, tuple[int, float]] = {}
        self._start_at_members = context.start_at_members
        self._bug: BaseException | None = None

    @property
    def consensus_distance(self) -> float | None:
        """Estimate of sqrt(mean over nodes of ‖x_i − x̄‖²), as if all residuals were as long as ours."""
        nodes = len(self._swarm.alive()) + 1
        if not self._member.messages or nodes < 2:
            return None
        return self._member.state.residual_norm * math.sqrt(1.0 - 1.0 / nodes)

    @property
    def residual(self) -> Float32Array:
        """What of our learner's progress was told to nobody yet; the rest of our vector is the base."""
        return self._member.state.residual

    @property
    def history(self) -> History | None:
        """That our base belongs to; None before we have one."""
        return self._member.log.history

    @property
    def outcomes(self) -> dict[str, int]:
        """Messages so far: ``pushed`` and ``answered`` (came and were new); ``known`` (nothing was new).

        Failed: ``timeout refused failed unsure busy poisoned``; ``behind`` and ``ahead``: one side's
        state or base is being taken by the other.
        """
        return self._tally.outcomes

    @property
    def facts(self) -> dict[str, float | str]:
        """Figures for people; the compression ratio is that of a float32 vector for each update."""
        member, updates = self._member, max(self._all_updates, 1)
        per_update = member.sent_bytes / updates
        vector_bytes = 4 * self._context.size
        return {
            "tau": member.state.tau,
            "residual_norm": member.state.residual_norm,
            "messages": member.messages,
            "entries_per_message": member.entries / max(member.messages, 1),
            "bytes_per_update": per_update,
            "compression_ratio": vector_bytes / per_update if per_update else 0.0,
            "kept_bytes": member.log.kept_bytes,
            "in_step": "yes" if member.in_step else "no",
            "bases_taken": self._sync.taken,
            "relay": "yes" if self._relay else "no",
        }

    async def start(self) -> None:
        """Begin."""
        self._runner.start(self._run())

    async def stop(self, timeout_s: float) -> None:
        """End everything; messages under way may or may not count, by what the receivers say."""
        self._runner.stopping = True
        if timeout_s > 0 and self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=min(timeout_s, 0.5))
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._runner.stop(timeout_s)
        await self._heavy.close()

    async def watch(self) -> None:
        """Wait until it is stopped; raise what ended it before: a bug of ours."""
        await self._runner.watch()

    def updated(self, updates: int) -> None:
        """The learner made ``updates`` more updates."""
        self._updates += updates
        self._all_updates += updates
        self._runner.news.set()

    # What we do

    @property
    def _relay(self) -> bool:
        return len(self._swarm.alive()) + 1 > self._direct_members

    async def _run(self) -> None:
        while not self._runner.stopping:
            if self._bug is not None:
                raise self._bug
            living, now_s = self._swarm.alive(), self._clock.monotonic()
            ready = len(living) + 1 >= self._start_at_members and self._swarm.summary() is not None
            if ready:
                self._start_at_members = 0
                await self._turn(living, now_s)
            wait_s = self._next_s - now_s if self._updates >= self._config.every_updates else POLL_S
            if 0 < wait_s < POLL_S:
                await asyncio.sleep(max(wait_s, LEAST_SLEEP_S))  # updates meanwhile don't make it earlier
            else:
                await self._runner.rest(POLL_S)

    async def _turn(self, living: dict[str, Address], now_s: float) -> None:
        if living or self._met_s is None:
            self._met_s = now_s
        alone = not living and now_s - self._met_s > ALONE_S
        if self._updates >= self._config.every_updates and now_s >= self._next_s:
            self._updates, self._next_s = 0, now_s + self._config.min_interval_s
            try:
                await self._member.contribute(tell=bool(living), fold=alone)
            except PoisonedVectorError as error:
                self._swarm.heal(f"our own parameters are unusable: {error}")
                return
        if not self._member.in_step:
            self._spawn("", self._take_base())
            return
        log, relay = self._member.log, self._relay
        targets = set(living)
        if relay:
            targets = set(neighbours("random_regular", self._me, {*living, self._me}, degree=DEGREE))
        log.forget(living)
        for peer in sorted(targets):
            rested = self._rests.get(peer, (0, 0.0))[1] <= now_s
            if rested and peer not in self._tasks and log.has_for(peer, relay=relay):
                self._spawn(peer, self._push(peer, living[peer], relay=relay))

    def _spawn(self, name: str, work: Coroutine[None, None, None]) -> None:
        """Do one thing at a time with each peer; and take one base at a time."""
        if name in self._tasks or self._runner.stopping:
            work.close()
            return
        task = self._tasks[name] = asyncio.create_task(work, name=f"strom {name[:8]}")

        def ended(task: asyncio.Task[None]) -> None:
            del self._tasks[name]
            if not task.cancelled() and task.exception() is not None:
                self._bug = task.exception()
            self._runner.news.set()

        task.add_done_callback(ended)

    async def _take_base(self) -> None:
        try:
            await self._sync.run()
        except PoisonedVectorError as error:
            self._swarm.heal(f"our own parameters are unusable: {error}")

    async def _push(self, peer: str, address: Address, *, relay: bool) -> None:
        went_well = await self._pushes.push(peer, address, relay=relay)
        failures = 0 if went_well else self._rests.get(peer, (0, 0.0))[0] + 1
        rest_s = self._config.min_interval_s
        if failures:
            rest_s = max(rest_s, FIRST_REST_S * 2.0 ** min(failures, MOST_DOUBLINGS))
        self._rests[peer] = (failures, self._clock.monotonic() + rest_s)

    # What others want

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a member's call.

        Raises:
            Refusal: another mode epoch, route or τ (409), no state (503), malformed (400), messages that
                can't be (422), quarantined (403).
        """
        if incoming.route != ROUTE:
            raise Refusal(409, f"this node's strategy is strom, which has no {incoming.route}")
        call: Call = decode(incoming.meta, Call, "call of a member")
        if self._runner.stopping:
            raise Refusal(503, "the strategy stops")
        if isinstance(call, Ask):
            return await self._sync.answer(incoming.sender, call)
        return await self._pushes.answer(incoming, call, relay=self._relay)
