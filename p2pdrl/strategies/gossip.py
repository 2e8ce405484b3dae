"""Pairwise asynchronous gossip of parameters: the I/O around `adpsgd` and `pair`.

A node begins an exchange when its core says so, and answers those of others; never two at a
time. Who is engaged refuses (423) and the caller tries somebody else. An exchange that isn't
done by its deadline is given up: training goes on meanwhile, so it costs that round alone.

When the last answer is lost after the responder committed, the responder has moved alone: the
swarm's mean then moves by at most ``weight · ‖a − b‖ / N``. That is counted as ``unsure``.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TypeVar

import msgspec

from p2pdrl.config.strategy import AdpsgdConfig, Mode
from p2pdrl.errors import (
    PeerRefusedError,
    PeerTimeoutError,
    PeerUnreachableError,
    PoisonedVectorError,
    TensorError,
    TransportError,
)
from p2pdrl.ids import new_exchange_id
from p2pdrl.strategies.adpsgd import AdpsgdCore
from p2pdrl.strategies.judgement import Verdict, judge, why_adopt
from p2pdrl.strategies.pair import ExchangeHead, PairScratch, decode_head
from p2pdrl.strategies.protocol import Context
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.wire import WireDtype
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply

__all__ = ["ROUTE", "GossipStrategy"]

ROUTE = "exchange"
BUSY = 423
INLINE_BYTES = 1 << 20
REMEMBERED = 1024
DISTANCE_MEMORY = 0.8

T = TypeVar("T")


class GossipStrategy:
    """AD-PSGD over the transport.

    Args:
        config: the strategy's options.
        context: what the node gives.
    """

    mode: Mode = "gossip"

    def __init__(self, config: AdpsgdConfig, context: Context) -> None:
        self._config = config
        self._swarm = context.swarm
        self._board = context.learner.board
        self._transport = context.transport
        self._clock = context.clock
        self._core = AdpsgdCore(config, context.swarm.node_id, context.rng)
        self._wire: WireDtype = "float32" if config.compression == "none" else "bf16"
        self._scratch = PairScratch(
            context.size, self._wire, config.weight, context.max_abs, config.max_distance
        )
        self._max_exchanges = context.max_exchanges
        self._start_at_members = context.start_at_members
        self._engaged = False
        self._news = asyncio.Event()
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._square: float | None = None
        self._outcomes: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None
        self._last: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def consensus_distance(self) -> float | None:
        """Estimate of sqrt(mean over nodes of ‖x_i − x̄‖²) from the pairs we met.

        The mean over pairs of ‖x_i − x_j‖² is 2n/(n−1) times the square of it.
        """
        if self._square is None:
            return None
        nodes = len(self._swarm.alive()) + 1
        return math.sqrt(self._square * (nodes - 1) / (2 * nodes))

    @property
    def outcomes(self) -> dict[str, int]:
        """Exchanges so far, by how they ended.

        Begun by us: ``ok busy timeout refused failed poisoned``, ``behind`` (we adopted instead) and
        ``ahead`` (the peer did); begun by peers: ``answered``. ``unsure``: one side may have moved
        alone; a ``timeout`` may hide another such case.
        """
        return dict(self._outcomes)

    async def start(self) -> None:
        """Begin to meet peers."""
        self._task = asyncio.create_task(self._run(), name="gossip")

    async def stop(self, timeout_s: float) -> None:
        """Finish the exchange in flight, waiting at most ``timeout_s``; a bug is left to `watch`."""
        self._stopping = True
        self._news.set()
        if self._task is not None:
            _, late = await asyncio.wait([self._task], timeout=timeout_s)
            for task in late:
                task.cancel()
            task, self._task = self._task, None
            await asyncio.gather(task, return_exceptions=True)

    async def watch(self) -> None:
        """Wait until the strategy is stopped; raise what ended it before: a bug of ours."""
        task = self._task
        if task is not None:
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()

    def updated(self, updates: int) -> None:
        """The learner made ``updates`` more updates."""
        self._core.updated(updates)
        self._news.set()

    async def _run(self) -> None:
        while not self._stopping:
            self._board.flush()
            partner = self._next_partner()
            if partner is not None:
                await self._meet(*partner)
                continue
            self._news.clear()
            try:
                async with asyncio.timeout(self._rest_s()):
                    await self._news.wait()
            except TimeoutError:
                continue

    def _rest_s(self) -> float:
        """How long to wait for news: up to the moment at which an exchange may begin."""
        left_s = self._core.next_s - self._clock.monotonic()
        return max(left_s if left_s > 0 else self._config.min_interval_s, 0.005)

    def _next_partner(self) -> tuple[str, Address] | None:
        now_s = self._clock.monotonic()
        enough = 0 < self._max_exchanges <= self._outcomes["ok"]
        if enough or self._engaged or not self._core.due(now_s) or self._swarm.summary() is None:
            return None
        alive = self._swarm.alive()
        if len(alive) + 1 < self._start_at_members:
            return None
        self._start_at_members = 0
        peer = self._core.choose(alive, now_s)
        return None if peer is None else (peer, alive[peer])

    async def _meet(self, peer: str, address: Address) -> None:
        began_s = self._clock.monotonic()
        self._core.began(began_s)
        self._engaged = True
        try:
            outcome = await self._initiate(peer, address)
        except PeerTimeoutError:
            outcome = "timeout"
        except PeerRefusedError as refusal:
            outcome = "busy" if refusal.status == BUSY else "refused"
        except PoisonedVectorError as error:
            self._swarm.strike(peer, str(error))
            outcome = "poisoned"
        except PeerUnreachableError:
            outcome = "failed"
        except TransportError:
            outcome = "unsure"
        except TensorError:
            outcome = "failed"
        finally:
            self._engaged = False
        now_s = self._clock.monotonic()
        self._outcomes[outcome] += 1
        self._swarm.observed(outcome, now_s - began_s)
        if outcome == "ok":
            self._core.mixed(peer)
        elif outcome == "busy":
            self._core.busy(now_s, now_s - began_s)
        else:
            self._core.failed(peer, now_s)

    async def _initiate(self, peer: str, address: Address) -> str:
        summary = self._swarm.summary()
        if summary is None:
            return "failed"
        if not await self._load():
            return "failed"
        head = ExchangeHead(exchange_id=new_exchange_id(), wire=self._wire, summary=summary)
        answer = await self._transport.call(
            address,
            peer,
            ROUTE,
            msgspec.msgpack.encode(head),
            vector=self._scratch.outgoing,
            into=lambda _, nbytes: self._scratch.incoming if nbytes == self._scratch.nbytes else None,
            deadline_s=self._config.deadline_s,
            lane="bulk",
        )
        theirs = decode_head(answer.meta)
        if theirs is None or theirs.exchange_id != head.exchange_id:
            return "failed"
        if theirs.verdict == Verdict.BE_ADOPTED.value:
            if judge(summary, theirs.summary, self._config.max_staleness) is not Verdict.ADOPT:
                return "failed"
            self._swarm.adopt(peer, theirs.summary.lineage, why_adopt(summary, theirs.summary))
            return "behind"
        if theirs.verdict == Verdict.ADOPT.value:
            return "ahead"
        if theirs.verdict != Verdict.MIX.value or not answer.vector_nbytes:
            return "failed"
        delta_D = await self._heavy(self._scratch.mix)
        version = max(summary.policy_version, theirs.summary.policy_version)
        if not await self._heavy(lambda: self._scratch.commit(self._board, delta_D, version)):
            return "unsure"
        self._met()
        return "ok"

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a peer's exchange.

        Raises:
            Refusal: engaged (423), no state yet (503), another task or mode (409), a replay (409),
                poisoned (422), quarantined (403), malformed (400).
        """
        if incoming.route != ROUTE:
            raise Refusal(409, f"this node's strategy is adpsgd, which has no {incoming.route}")
        head = decode_head(incoming.meta)
        if head is None:
            raise Refusal(400, "the exchange's head can't be read")
        if self._swarm.quarantined(incoming.sender):
            raise Refusal(403, "quarantined after poisoned vectors")
        mine = self._swarm.summary()
        if mine is None or self._stopping:
            raise Refusal(503, "no state to mix yet, or no longer")
        if self._engaged:
            raise Refusal(BUSY, "in another exchange")
        verdict = judge(mine, head.summary, self._config.max_staleness)
        if verdict in (Verdict.OTHER_TASK, Verdict.OTHER_MODE, Verdict.ABSURD):
            raise Refusal(409, f"can't mix: {verdict.value}")
        reply = ExchangeHead(
            exchange_id=head.exchange_id, wire=self._wire, summary=mine, verdict=verdict.value
        )
        if verdict is Verdict.ADOPT:
            self._swarm.adopt(incoming.sender, head.summary.lineage, why_adopt(mine, head.summary))
        if verdict is not Verdict.MIX:
            return Reply(msgspec.msgpack.encode(reply))
        if head.wire != self._wire or incoming.vector_nbytes != self._scratch.nbytes:
            raise Refusal(422, "the vector has another format or length than ours")
        if head.exchange_id in self._seen:
            raise Refusal(409, "this exchange was here before")
        self._remember(head.exchange_id)
        return await self._engage(incoming, reply, head.summary.policy_version)

    async def _engage(self, incoming: Incoming, reply: ExchangeHead, their_version: int) -> Reply:
        self._engaged = True
        handed_over = False
        try:
            async with asyncio.timeout(self._config.deadline_s):
                await incoming.read_vector_into(self._scratch.incoming)
                if not await self._load():
                    raise Refusal(503, "our own parameters are unusable; taking a donor's")
                delta_D = await self._heavy(self._scratch.mix)
            version = max(reply.summary.policy_version, their_version)

            def ended(sent: bool) -> None:
                self._last = asyncio.create_task(self._commit(delta_D, version, sent=sent), name="commit")

            handed_over = True
            return Reply(msgspec.msgpack.encode(reply), vector=self._scratch.outgoing, on_end=ended)
        except PoisonedVectorError as error:
            self._swarm.strike(incoming.sender, str(error))
            raise Refusal(422, f"poisoned vector: {error}") from error
        except TimeoutError as error:
            raise Refusal(408, "the vector didn't arrive in time") from error
        finally:
            if not handed_over:
                self._engaged = False

    async def _load(self) -> bool:
        """Take our vector off the board; False, and the node heals, when it can't be given to anybody."""
        try:
            await self._heavy(lambda: self._scratch.load(self._board))
        except PoisonedVectorError as error:
            self._swarm.heal(f"our own parameters are unusable: {error}")
            return False
        return True

    async def _commit(self, delta_D: Float32Array, version: int, *, sent: bool) -> None:
        """End an exchange that a peer began: our side counts once the answer is written."""
        try:
            committed = sent and await self._heavy(
                lambda: self._scratch.commit(self._board, delta_D, version)
            )
        finally:
            self._engaged = False
        if committed:
            self._met()
        self._outcomes["answered" if committed else "unsure"] += 1

    def _met(self) -> None:
        square = self._scratch.distance**2
        old = self._square
        self._square = square if old is None else DISTANCE_MEMORY * old + (1 - DISTANCE_MEMORY) * square

    async def _heavy(self, work: Callable[[], T]) -> T:
        if self._scratch.nbytes <= INLINE_BYTES:
            return work()
        thread = asyncio.create_task(asyncio.to_thread(work), name="gossip-arithmetic")
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            # Given up, but the thread goes on: until it ends, the scratch is not for the next exchange.
            await asyncio.gather(thread, return_exceptions=True)
            raise

    def _remember(self, exchange_id: str) -> None:
        self._seen[exchange_id] = None
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
