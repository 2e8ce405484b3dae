"""Pipes between fake learners: messages are Python objects that take the network's time to arrive.

An update of rank 0 goes down to the last rank and back, and each state copy as well. So a rank that is gone,
frozen or cut off holds up all others, as real stages do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, NamedTuple

from p2pdrl.errors import (
    ConfigError,
    PeerRefusedError,
    PeerTimeoutError,
    PeerUnreachableError,
    TransportError,
    WorkerError,
)
from p2pdrl.pipeline.layers import Layer
from p2pdrl.pipeline.plan import StageNews, StageOrder, StageSide
from p2pdrl.strategies.pipeline.port import Measured
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.testing.fake_learner import FakeLearner
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.transport.pipe.ticket import Pipe, PipeReply
from p2pdrl.transport.protocol import Address, Incoming, Refusal

__all__ = ["Began", "FakePipe", "FakePipes", "FakeStages", "blocks_of"]

_LISTENING: dict[tuple[int, Address], FakePipes] = {}


class FakePipe(Pipe):
    """One end of a pipe.

    Args:
        network: whose cuts and frozen nodes count.
        me: node id.
        peer: node id of the other end.
    """

    def __init__(self, network: MemoryNetwork, me: str, peer: str) -> None:  # no socket
        self.peer, self.meta, self._me, self._network = peer, b"", me, network
        self.other: FakePipe = self
        self.came: asyncio.Queue[Any] = asyncio.Queue()
        self.closed = False

    def send(self, message: Any) -> None:
        """Send without waiting; what can't arrive is lost."""
        if not self.closed and not self._network.severed(self._me, self.peer):
            delay_s = self._network.delay_s[0]
            asyncio.get_running_loop().call_later(delay_s, self.other.came.put_nowait, message)

    async def receive(self, timeout_s: float) -> Any:
        """Wait for a message.

        Raises:
            PeerTimeoutError: none came in time.
            PeerUnreachableError: the other end was closed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                message = await self.came.get()
        except TimeoutError as error:
            raise PeerTimeoutError(f"nothing from {self.peer} for {timeout_s:g} s") from error
        if message is None:
            raise PeerUnreachableError(f"the pipe to {self.peer} ended", sent=True)
        return message

    def close(self) -> None:
        """End it; the other end hears of that unless the network is cut."""
        if not self.closed:
            self.send(None)
            self.closed = True


class FakePipes:
    """Opens pipes, and takes them.

    Args:
        network: joins the nodes.
        me: own node id.
    """

    def __init__(self, network: MemoryNetwork, me: str) -> None:
        self._network, self._me = network, me
        self.accept: Callable[[Incoming], Awaitable[PipeReply]] | None = None
        self._address: Address | None = None
        self.opened = 0
        self.ends: list[FakePipe] = []
        """Both ends of each that it opened."""

    def serve(self, address: Address, accept: Callable[[Incoming], Awaitable[PipeReply]]) -> None:
        """Take pipes at an address."""
        self._address, self.accept = address, accept
        _LISTENING[id(self._network), address] = self

    def close(self) -> None:
        """Take none any more."""
        if self._address is not None:
            _LISTENING.pop((id(self._network), self._address), None)

    async def open_pipe(
        self, to: Address, peer_id: str, route: str, meta: bytes, *, deadline_s: float
    ) -> Pipe:
        """Open a pipe; see `HttpTransport.open_pipe`."""
        try:
            async with asyncio.timeout(deadline_s):
                return await self._open(to, peer_id, route, meta)
        except TimeoutError as error:
            raise PeerTimeoutError(f"{peer_id} didn't answer") from error

    async def _open(self, to: Address, peer_id: str, route: str, meta: bytes) -> Pipe:
        network = self._network
        await network.until_thawed(self._me)
        await asyncio.sleep(network.delay_s[0])
        peer = _LISTENING.get((id(network), to))
        if peer is None or peer.accept is None:
            raise PeerUnreachableError(f"nothing listens at {to}")
        if network.severed(self._me, peer_id):
            await asyncio.get_running_loop().create_future()
        await network.until_thawed(peer_id)
        try:
            reply = await peer.accept(_Request(self._me, route, meta))
        except Refusal as refusal:
            raise PeerRefusedError(refusal.status, refusal.reason) from refusal
        mine, theirs = FakePipe(network, self._me, peer_id), FakePipe(network, peer_id, self._me)
        mine.other, theirs.other = theirs, mine
        reply.take(theirs)
        self.opened += 1
        self.ends += [mine, theirs]
        return mine


class _Request:
    """An `Incoming` without a vector."""

    vector_nbytes = 0
    remote_host = "10.0.0.1"

    def __init__(self, sender: str, route: str, meta: bytes) -> None:
        self.sender, self.route, self.meta = sender, route, meta

    async def read_vector_into(self, out: memoryview) -> None:
        raise ValueError("there is none")


class Began(NamedTuple):
    """With what a rank began a generation."""

    order: StageOrder
    vector: Float32Array
    policy_version: int
    previous: str
    """Node id of the rank before; empty for none."""


def blocks_of(count: int, seconds: float = 0.01, activation_bytes: float = 1000.0) -> tuple[Layer, ...]:
    """Return blocks that are all alike."""
    return tuple(
        Layer(f"block {number}", seconds / 3, 2 * seconds / 3, 1000.0, activation_bytes)
        for number in range(count)
    )


class FakeStages:
    """Implements `port.Stages`.

    Args:
        me: own node id.
        learner: whose vector is trained.
        network: whose frozen nodes stand still.

    Attributes:
        layers: told when somebody wants it measured; empty: it can't be cut.
        gone: whether the learner is dead, and answers nothing.
        began: with what each generation began here.
        updates: made as head, in all generations.
    """

    def __init__(self, me: str, learner: FakeLearner, network: MemoryNetwork) -> None:
        self._me, self._learner, self._network = me, learner, network
        self.layers: tuple[Layer, ...] = blocks_of(6)
        self.gone = False
        self.began: list[Began] = []
        self.updates = 0
        self.ready_s = 0.05
        self.fails = False
        """Whether every update that it takes part in with others breaks."""
        self.torch_fails: Literal["", "meeting", "updates"] = ""
        """Where torch.distributed gives up."""
        self.device, self.usable_bytes, self.gpu = "cpu", 0, ""
        self.imported = False
        """Whether it was asked to import what torch needs."""
        self.stuck: asyncio.Event | None = None
        self._news: asyncio.Queue[StageNews] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._order: StageOrder | None = None
        self.pipes: Mapping[StageSide, Pipe] = {}
        """Of the order that it carries out."""
        self._finish = 0
        learner.idle = self._idle

    @property
    def order(self) -> StageOrder | None:
        """The order that it carries out."""
        return None if self._task is None or self._task.done() else self._order

    async def measure(self, microbatches: int, *, deadline_s: float, over_torch: bool = False) -> Measured:
        """Return what was scripted."""
        self.imported = self.imported or over_torch
        del microbatches
        if self.gone:
            await asyncio.sleep(min(deadline_s, 0.1))
            raise WorkerError("the learner is gone")
        if self.stuck is not None:
            try:
                await asyncio.wait_for(self.stuck.wait(), deadline_s)
            except TimeoutError as error:
                raise WorkerError("the learner doesn't answer") from error
        if not self.layers:
            raise ConfigError("this policy has one block")
        await asyncio.sleep(0.01)
        return Measured(self.layers, self.device, self.usable_bytes, self.gpu)

    def work(self, order: StageOrder, pipes: Mapping[StageSide, Pipe]) -> None:
        """Be a rank."""
        self.release()
        self._order, self.pipes, self._finish = order, pipes, 0
        self._task = asyncio.create_task(self._serve(order, pipes), name=f"stage {self._me[-2:]}")

    def finish(self, generation: int) -> None:
        """End after the update."""
        if self._order is not None and generation == self._order.generation:
            self._finish = generation

    async def news(self) -> StageNews:
        """Wait for the next news."""
        return await self._news.get()

    def release(self) -> None:
        """End what it does, as by another learner_mode."""
        if self._task is not None:
            self._task.cancel()
        for pipe in self.pipes.values():
            pipe.close()
        self.pipes = {}

    def die(self) -> None:
        """The learner process is gone; `revive` brings another."""
        order = self.order
        self.gone = True
        self.release()
        if order is not None:
            self._say(order, "broken", why="the learner died")

    def stick(self) -> None:
        """The learner process is stopped, as by SIGSTOP, though its daemon isn't."""
        self.stuck = asyncio.Event()

    def unstick(self) -> None:
        """It goes on."""
        if self.stuck is not None:
            self.stuck.set()
        self.stuck = None

    def revive(self) -> None:
        """There is a learner again."""
        self.gone = False

    async def close(self) -> None:
        """End everything."""
        self.release()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    # One generation

    async def _serve(self, order: StageOrder, pipes: Mapping[StageSide, Pipe]) -> None:
        if self.gone:
            return
        await asyncio.sleep(self.ready_s)
        if order.backend == "torch" and order.rank == 0:
            self._say(order, "meeting", port=4242)
        if order.backend == "torch" and self.torch_fails == "meeting":
            self._say(order, "broken", why="no NCCL here")
            return
        await self._thawed()
        self._learner.absorb()
        before = pipes["previous"].peer if "previous" in pipes else ""
        self.began.append(Began(order, self._learner.x.copy(), self._learner.version, before))
        self._say(order, "ready")
        side: StageSide = "next"
        try:
            if order.rank == 0:
                await self._drive(order, pipes)
            else:
                side = "previous"
                await self._follow(order, pipes)
        except TransportError as error:
            for pipe in pipes.values():
                pipe.close()
            self._say(order, "broken", side=side, why=str(error))

    async def _drive(self, order: StageOrder, pipes: Mapping[StageSide, Pipe]) -> None:
        learner, since = self._learner, 0
        while not self._finish:
            await asyncio.sleep(learner.next_period_s())
            await self._thawed()
            if order.ranks > 1:
                self._maybe_fail(order)
            await self._down(order, pipes, ("update",))
            learner.x = learner.step(learner.x, learner.gradient(learner.x).astype(learner.x.dtype))
            learner.version += 1
            self.updates += 1
            learner.publish()
            learner.on_update(1)
            since += 1
            if since % order.state_every == 0 and not self._finish:
                await self._spread(order, pipes, "copied")
        await self._spread(order, pipes, "over")

    async def _spread(self, order: StageOrder, pipes: Mapping[StageSide, Pipe], what: str) -> None:
        self._learner.absorb()
        await self._down(order, pipes, (what, self._learner.x.copy(), self._learner.version))
        self._learner.publish()
        self._say(order, what)

    async def _down(self, order: StageOrder, pipes: Mapping[StageSide, Pipe], message: object) -> None:
        pipe = pipes.get("next")
        if order.rank < order.ranks - 1 and isinstance(pipe, FakePipe):
            pipe.send(message)
            await pipe.receive(order.timeout_s)

    async def _follow(self, order: StageOrder, pipes: Mapping[StageSide, Pipe]) -> None:
        if order.backend == "torch":
            await asyncio.Event().wait()  # what the head's learner says to it goes past this network
        pipe, learner = pipes["previous"], self._learner
        assert isinstance(pipe, FakePipe)  # noqa: S101 - a test's own
        what = ""
        while what != "over":
            what, *state = await pipe.receive(order.idle_timeout_s)
            await self._thawed()
            self._maybe_fail(order)
            await self._down(order, pipes, (what, *state))
            if state:
                learner.x, learner.version = state[0].copy(), state[1]
                learner.absorb()
                learner.publish()
                self._say(order, what)
            pipe.send("done")

    def _idle(self) -> None:
        """Without an order it takes what is on its board, like every learner between two updates."""
        if self.order is None and not self.gone:
            self._learner.absorb()

    def _maybe_fail(self, order: StageOrder) -> None:
        if self.fails or (order.backend == "torch" and self.torch_fails):
            raise PeerTimeoutError("it was made to fail")

    async def _thawed(self) -> None:
        await self._network.until_thawed(self._me)
        if self.stuck is not None:
            await self.stuck.wait()

    def _say(
        self, order: StageOrder, what: str, side: StageSide | None = None, why: str = "", port: int = 0
    ) -> None:
        self._news.put_nowait(
            StageNews(order.generation, what, side, why, port, self._learner.version)  # type: ignore[arg-type]
        )
