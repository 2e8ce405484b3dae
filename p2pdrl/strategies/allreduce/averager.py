"""Averaging within one view: its messages on the route ``reduce``, its two backends' interface, who is alive.

`reduce_scatter.ViewAverager` runs over the swarm's own connections, `torch_averager.TorchAverager` over
torch.distributed. Lists travel without field names; everything is bounded before it is believed.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, TransportError
from p2pdrl.group.adaptive_timeout import AdaptiveTimeout
from p2pdrl.group.calls import repeated
from p2pdrl.group.compatibility import Natural
from p2pdrl.group.service import Group, GroupView
from p2pdrl.group.view import MAX_MEMBERS, ViewKey
from p2pdrl.strategies.protocol import AnswerKind, LearnerRequest, StrategyContext
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.transport.protocol import Answer, Incoming, Reply

__all__ = [
    "ANSWER_S",
    "ASK_S",
    "NOTHING",
    "ROUTE",
    "Average",
    "Averager",
    "Backend",
    "Digest",
    "LivenessCheck",
    "Preemption",
    "ReduceAnswer",
    "ReduceRequest",
    "RoundContribution",
    "RoundQuantity",
]

ROUTE = "reduce"
MAX_WEIGHT = 1e12
MAX_LEARNING_RATE = 1e6

Digest = Annotated[bytes, Meta(max_length=16)]
LearningRate = Annotated[float, Meta(ge=0, le=MAX_LEARNING_RATE)]
Finite = Annotated[float, Meta(ge=0, le=1e300)]


class ReduceRequest(msgspec.Struct, frozen=True, array_like=True):
    """What a member wants of another one.

    Attributes:
        what: ``part``: take my piece, and give me the average once all have come; ``alive``: are you there,
            I wait for you; ``preempt``: so many have come that your unroll is to end; ``result``: the last
            round's whole average; ``state``: what a newcomer needs; ``store``: the port where your process
            opened the group's store, as the answer's number.
        weight: of the part; a part of weight 0 has no vector.
        learning_rate: at which the sender would step.
        call: number of the call, for those whose answers are held (see `group.calls`).
        left: gradients of the sender's update that come after this one.
    """

    what: Literal["part", "alive", "preempt", "result", "state", "store"]
    key: ViewKey
    number: Natural
    weight: Annotated[float, Meta(ge=0, le=MAX_WEIGHT)] = 0.0
    policy_version: Natural = 0
    learning_rate: LearningRate = 0.0
    call: Natural = 0
    left: Natural = 0


class ReduceAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer.

    Attributes:
        number: round that the vector is of, or that the sender has completed.
        weights: of the members, in their order.
        versions: their policy versions.
        square: ‖average‖² of this piece.
        spread: Σ w_k ‖x_k − average‖² / Σ w_k of this piece; 0 where it isn't measured.
        digest: digest of the sender's rounds (see `history`).
        before: the same, one round earlier.
        state: of the sender's parameters, where others take its whole state.
        learning_rates: at which the members would step, in their order.
        ends_update: whether the leader's update ends with this round (see `group.round_collector`).
    """

    number: Natural
    weights: Annotated[tuple[Finite, ...], Meta(max_length=MAX_MEMBERS)] = ()
    versions: Annotated[tuple[Natural, ...], Meta(max_length=MAX_MEMBERS)] = ()
    square: Finite = 0.0
    spread: Finite = 0.0
    digest: Digest = b""
    before: Digest = b""
    state: Digest = b""
    learning_rates: Annotated[tuple[LearningRate, ...], Meta(max_length=MAX_MEMBERS)] = ()
    ends_update: bool = False


class RoundContribution(NamedTuple):
    """What this node gives to a round.

    Args:
        vector: unchanged until the round has ended, or another average of it was begun; None for nothing.
        weight: how much it counts for; 0 exactly when there is no vector.
        learning_rate: at which this node would step.
        left: gradients of its update that come after this one.
    """

    vector: Float32Array | None
    weight: float
    policy_version: int
    learning_rate: float = 0.0
    left: int = 0


class Average(NamedTuple):
    """What a round came to, the same bits at all members.

    Args:
        vector: the weighted mean; zeros when all weights are zero. Valid until the round after the next.
        weights: of the members, in their order.
        versions: their policy versions.
        norm: ‖vector‖.
        spread: Σ w_k ‖x_k − vector‖² / Σ w_k, where it was measured.
        learning_rates: at which the members would step, in their order.
        ends_update: whether the leader's update ends with this round (see `group.round_collector`).
    """

    vector: Float32Array
    weights: tuple[float, ...]
    versions: tuple[int, ...]
    norm: float
    spread: float
    bytes_out: int = 0
    bytes_in: int = 0
    round_trips: int = 0
    learning_rates: tuple[float, ...] = ()
    ends_update: bool = False

    @property
    def total(self) -> float:
        """All weights together; 0 when nobody gave anything."""
        return sum(self.weights)

    @property
    def learning_rate(self) -> float:
        """At which all members step: the lower median of those who gave something.

        One wrong figure among three doesn't move it, and one among two can't raise it. Who gave nothing,
        whose learner is paused say, has no figure.
        """
        rates = zip(self.learning_rates, self.weights, strict=True)
        return statistics.median_low([rate for rate, weight in rates if weight] or self.learning_rates)


class Averager(ABC):
    """Averages within one view; made anew for each.

    Args:
        timeout: learns how long rounds take, through all views: who is silent for longer is asked whether
            it is alive.

    Attributes:
        view: in which it averages.
        given: number of the last round that we gave our part to; -1 before the first.
        busy: whether a round is under way.
    """

    def __init__(
        self, context: StrategyContext, group: Group, view: GroupView, timeout: AdaptiveTimeout
    ) -> None:
        self._context, self._group, self.view, self._timeout = context, group, view, timeout
        self._me = context.swarm.node_id
        self.given, self.busy = -1, False
        self._learner = context.learner
        self._liveness = LivenessCheck(context, group, view)

    @property
    def in_force(self) -> bool:
        """Whether the view still is; what comes of a round counts only then."""
        return self._group.view == self.view

    async def average(self, number: int, part: RoundContribution) -> Average:
        """Do round ``number`` with all members; wait until all have given their part.

        Cancelled when the view ends; the part is then given again to the next view's averager.
        """
        began_s = self._context.clock.monotonic()
        self.given, self.busy = number, True
        self._liveness.begin(number, self._timeout.deadline_s, self._silent)
        try:
            average = await self._average(number, part)
        finally:
            self.busy = False
            await self._liveness.end()
        self._timeout.observe(self._context.clock.monotonic() - began_s)
        return average

    def preempted(self, number: int) -> None:
        """Enough members have given their parts to round ``number``: have our learner end its unroll."""
        if self.given < number:
            self._learner.preempt()

    @abstractmethod
    async def _average(self, number: int, part: RoundContribution) -> Average:
        """Do the round itself."""

    @abstractmethod
    def _silent(self) -> Iterable[str]:
        """The members that the round waits for, maybe ourselves among them."""

    @abstractmethod
    async def serve(self, incoming: Incoming, ask: ReduceRequest) -> Reply:
        """Answer a member that asks for a ``part`` or for the ``store``.

        Raises:
            Refusal: not now, or not here (409, 503), poisoned (422), malformed (400), too few came (408).
        """

    @abstractmethod
    def close(self) -> None:
        """The view has ended: whoever waits for us is told."""

    @abstractmethod
    async def closed(self) -> None:
        """Wait, after `close`, until no thread touches any vector."""


class Backend(Protocol):
    """Makes averagers, and keeps what outlives a view."""

    async def start(self) -> None:
        """Begin.

        Raises:
            ConfigError: this node can't.
        """
        return

    async def stop(self) -> None:
        """End everything, after the last averager was closed; calling it again does nothing."""
        return

    def averager(self, group: Group, view: GroupView, *, first: int, raw: bool, spread: bool) -> Averager:
        """Return one for a view that has come into force, whose first round is ``first``.

        Args:
            raw: whether that round's vectors travel as float32 whatever the config says.
            spread: whether to measure how far the parts are apart.
        """


NOTHING = RoundContribution(None, 0.0, 0)
"""The part of a member that takes part without giving anything."""


class RoundQuantity(Protocol):
    """What rounds average: gradients, parameters or noised differences.

    Attributes:
        led: whether a history begins with one member's state; else the first round brings all together.
        seeded: whether that member begins with the mean of all members' parameters, which it sees for that.
        synchronous: whether the state is the learner's, who must make each step; one who missed any takes
            another's.
    """

    led: bool
    seeded: bool
    synchronous: bool

    @property
    def facts(self) -> dict[str, float | str]:
        """Figures for people."""
        return {}

    async def found(self) -> None:
        """Begin a history with our own state."""
        return

    def state(self) -> Sequence[memoryview]:
        """What a newcomer needs besides our learner's state; empty for nothing."""
        return ()

    def room(self) -> memoryview:
        """Where another member's `state` goes; of the same length."""
        return memoryview(b"")

    async def take(self) -> None:
        """What is in `room` is the state from now on.

        Raises:
            PoisonedVectorError: it can't be.
        """
        return

    async def part(self, request: LearnerRequest, number: int, members: Sequence[str]) -> RoundContribution:
        """What we give to round ``number``.

        Raises:
            PoisonedVectorError: our own vector can't be given to anybody.
        """

    async def apply(
        self, request: LearnerRequest | None, average: Average, number: int
    ) -> tuple[AnswerKind, float]:
        """Take a round's result.

        Returns:
            What to answer the learner, and the norm of what was added to our vector.
        """


ASK_S = 1.0
"""Silence after which a member is asked, at most, and then time and again."""
ANSWER_S = 0.75
"""How long it may take to say that it is alive."""
AGAIN_S = 0.15
"""It is asked again after so long, for a question may be lost."""


class Preemption:
    """Has members that a round waits for end their unrolls, once enough others have given their parts.

    DD-PPO's preemption threshold (Wijmans 2020, arXiv 1911.00357, section 3): the owner of the first piece
    sees who has come, and tells each of the missing once in a round.

    Args:
        threshold: share of the members that is enough; with 1 nobody is told.
        missing: gives those whose parts of the present round haven't come, maybe ourselves among them.
        own: called when our own unroll is to end.
    """

    def __init__(
        self,
        context: StrategyContext,
        group: Group,
        view: GroupView,
        threshold: float,
        *,
        missing: Callable[[], Sequence[str]],
        own: Callable[[int], None],
    ) -> None:
        self._transport, self._me = context.transport, context.swarm.node_id
        self._group, self._view = group, view
        self._enough = math.ceil(threshold * len(view.members) - 1e-9)
        self._missing, self._own = missing, own
        self._number = -1
        self._calls: set[asyncio.Task[None]] = set()

    def arrived(self, number: int) -> None:
        """Note that a part has come for round ``number``, which waits for more."""
        missing = self._missing()
        if number == self._number or len(self._view.members) - len(missing) < self._enough:
            return
        self._number = number
        for peer in missing:
            if peer == self._me:
                self._own(number)
            else:
                task = asyncio.create_task(self._tell(peer, number), name="preemption")
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)

    async def _tell(self, peer: str, number: int) -> None:
        ask = msgspec.msgpack.encode(ReduceRequest("preempt", self._view.key, number))
        with contextlib.suppress(TransportError):  # it collects to the end then
            address = self._group.address(peer)
            await self._transport.call(address, peer, ROUTE, ask, deadline_s=ANSWER_S)

    def close(self) -> None:
        """Tell nobody any more."""
        for task in self._calls:
            task.cancel()

    async def closed(self) -> None:
        """Wait, after `close`, until no call is under way."""
        if self._calls:
            await asyncio.wait(self._calls)


class LivenessCheck:
    """Asks the members of one view that a round waits for whether they are alive, and doubts the silent.

    A learner that takes its time and a process that was stopped both stay silent. The daemon of the first
    answers at once, and has until the strategy's deadline; the second is soon left out.
    """

    def __init__(self, context: StrategyContext, group: Group, view: GroupView) -> None:
        self._transport, self._clock = context.transport, context.clock
        self._group, self._view = group, view
        self._number = 0
        self._silent: Callable[[], Iterable[str]] = tuple
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self, number: int, after_s: float, silent: Callable[[], Iterable[str]]) -> None:
        """Watch over a round.

        Args:
            number: of the round, told to those who are asked.
            after_s: nobody is asked before.
            silent: gives those whom the round waits for.
        """
        self._number, self._silent = number, silent
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(min(after_s, ASK_S), self._begin_to_ask)

    async def end(self) -> None:
        """The round has ended."""
        if self._timer is not None:
            self._timer.cancel()
        task, self._task, self._timer = self._task, None, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()  # raises: it never ends by itself but by a bug

    def _begin_to_ask(self) -> None:
        self._task = asyncio.create_task(self._ask_all(), name="liveness")

    async def _ask_all(self) -> None:
        while True:
            await asyncio.gather(asyncio.sleep(ASK_S), *map(self._ask, self._silent()))

    async def _ask(self, peer: str) -> None:
        ask = msgspec.msgpack.encode(ReduceRequest("alive", self._view.key, self._number))
        try:
            address = self._group.address(peer)

            async def call(left_s: float) -> Answer:
                return await self._transport.call(address, peer, ROUTE, ask, deadline_s=left_s)

            await repeated(call, again_s=AGAIN_S, deadline_s=ANSWER_S, clock=self._clock)
        except (PeerUnreachableError, PeerTimeoutError) as error:
            self._group.doubt(peer, str(error))
        except TransportError:
            return  # whoever refuses is alive
