"""What a strategy needs of the node, what the node needs of a strategy, and what a learner requests.

The node hands each strategy one `StrategyContext`; the strategy owns no membership, learner or disk.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from p2pdrl.clock import Clock
from p2pdrl.config.strategy import Mode
from p2pdrl.group.compatibility import Summary
from p2pdrl.group.service import Group
from p2pdrl.strategies.allreduce.group_process import GroupProcess
from p2pdrl.strategies.pipeline.port import Pipes, Stages
from p2pdrl.tensors.board import DaemonBoard
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.transport.pipe.ticket import PipeReply
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply, Transport

__all__ = [
    "EXCHANGE_END_S",
    "ROUTES",
    "AnswerKind",
    "LearnerHandle",
    "LearnerRequest",
    "Merged",
    "RoundReport",
    "Strategy",
    "StrategyContext",
    "SwarmView",
]

ROUTES = ("exchange", "group", "reduce", "push", "neighbour", "relay", "shard", "stage")
"""Routes that belong to the strategy in force. The node serves all of them once, for its whole life, and
passes what comes to the present strategy; each strategy refuses those that it has no use for."""

EXCHANGE_END_S = 3.0
"""What a strategy has for ending the exchange in flight, unless it says otherwise."""

AnswerKind = Literal["none", "replace", "add", "set"]
"""What the learner does at its request: ``none``: go on as if alone (a gradient is stepped with as it is,
if the learner steps); ``replace``: the slot holds the gradient to step with; ``add``: the slot holds what is
to be added to its next gradient; ``set``: take what is on the board before going on."""


class LearnerRequest(NamedTuple):
    """What the learner sends, and (unless its learner mode lets it run ahead) waits to have answered.

    Args:
        number: grows by one with each request of this learner process.
        kind: ``gradients`` or, only to say that the board holds a round's result, ``parameters``.
        policy_version: of the parameters that it was computed on, or that are published.
        samples: environment steps (rows, for a regression) behind it: of the gradient, or made since the last
            round. A gradient of 0 has nothing to add, and its vector is zero: the learner's own was not
            finite, and it sends this so that nobody waits in vain.
        vector: the gradient, averaged over ``samples``, in the shared ring: D float32; where the learner mode
            sends every so many gradients, their sum, each averaged over its own samples. It belongs to the
            daemon, who may overwrite it, until the request is answered. None for ``parameters``.
        left: gradients of the same update that come after this one, at least 0.
    """

    number: int
    kind: Literal["parameters", "gradients"]
    policy_version: int
    samples: int
    vector: Float32Array | None
    left: int = 0


class LearnerHandle(Protocol):
    """The learner of this node as its strategy sees it."""

    @property
    def board(self) -> DaemonBoard:
        """Where its parameters are, and where deltas and sets are posted."""

    @property
    def learning_rate(self) -> float:
        """The algorithm's learning rate now, annealing included."""

    async def next_request(self) -> LearnerRequest:
        """Wait for the next request; cancelling loses none. Learners that run freely make none."""

    def answer(
        self,
        request: LearnerRequest,
        kind: AnswerKind,
        learning_rate: float | None = None,
        *,
        end_update: bool = False,
    ) -> None:
        """Let the learner go on; a request of one that died since is passed over.

        Args:
            learning_rate: at which to step with what replaces the gradient; None for the algorithm's own.
            end_update: leave out what is left of the update; see `group.round_collector`.
        """

    def preempt(self) -> None:
        """Have the learner end the unroll that it collects for its next request: others wait for that.

        Without effect while a request waits for its answer, and in learner modes that aren't ``preempted``.
        """


class SwarmView(Protocol):
    """The node as its strategy sees it."""

    @property
    def node_id(self) -> str:
        """Own id."""

    def alive(self) -> dict[str, Address]:
        """Learners that exchanges may begin with, without ourselves, the suspect and the quarantined."""

    def name_of(self, peer: str) -> str:
        """The name that people gave a member; its id when it is unknown."""

    def steps_since(self) -> int:
        """Environment steps that this node made since the last call."""

    def summary(self) -> Summary | None:
        """What we say of ourselves now; None while there is no state to mix."""

    def adopt(self, donor: str, lineage: str, why: str) -> None:
        """Begin to take the whole state of ``donor``, or else of another member of ``lineage``.

        In the background; once at a time. While it lasts `summary` is None.
        """

    async def adopted(self, donor: str, lineage: str, why: str) -> bool:
        """Like `adopt`, and wait for its end; False when nobody's state could be taken."""

    def heal(self, why: str) -> None:
        """Our own state is unusable: begin to take the best donor's, in the background; once at a time."""

    def strike(self, peer: str, why: str) -> None:
        """Note that ``peer`` sent something poisoned, or something that no honest node can have come to."""

    def trust(self, peer: str) -> float:
        """By which the pull of ``peer`` is multiplied: 1 but for peers whose exchanges did harm."""

    def quarantined(self, peer: str) -> bool:
        """Tell whether ``peer`` is to be refused."""

    def observed(self, outcome: str, seconds: float) -> None:
        """Note how an exchange that we began has ended, and how long it took."""

    def round(self, report: RoundReport) -> None:
        """Note how a round has ended."""

    def tell(
        self, kind: str, message: str, *, warning: bool = False, facts: Mapping[str, int] | None = None
    ) -> None:
        """Tell people something: a new group, a new server; ``facts`` of it are for programs."""


class Merged(NamedTuple):
    """One contribution to a round.

    Args:
        weight: how much it counted for in what we hold now.
        staleness: our policy version minus its; at a server, its steps since the parameters of the gradient.
    """

    peer: str
    weight: float
    staleness: int = 0


@dataclass(frozen=True, slots=True)
class RoundReport:
    """How one round ended, in figures; a round that changed nothing didn't succeed.

    Args:
        outcome: ``ok``, or in a word why not (``timeout``, ``refused``, ``regrouped`` …).
        merged: who was merged and with which weight, ourselves included.
        pulls: how far each of them alone moved our vector; empty where nobody measured it.
        missing: who should have been and wasn't.
        seconds: from its begin to its end, monotonic.
        waited_s: how long our learner stood still for it.
        bytes_out: payload that we sent for it.
        bytes_in: payload that came for it.
        round_trips: calls that we made for it.
        changed: Euclidean norm of what was added to our vector.
        distance: Euclidean distance between us and those merged, before; None where nobody measured it.
        error: in words; empty when all went well.
        unready: whether the peer said that it has no state yet, or no longer.
        served: whether it was servers that merged: then ``merged`` says how stale our own contribution was.
    """

    outcome: str
    merged: tuple[Merged, ...] = ()
    pulls: tuple[float, ...] = ()
    missing: tuple[str, ...] = ()
    seconds: float = 0.0
    waited_s: float = 0.0
    bytes_out: int = 0
    bytes_in: int = 0
    round_trips: int = 0
    changed: float = 0.0
    distance: float | None = None
    error: str = ""
    unready: bool = False
    served: bool = False

    def staleness(self, me: str) -> list[int]:
        """Staleness of what was merged: of others' contributions, and of ours where servers merged it."""
        return [one.staleness for one in self.merged if one.peer != me or self.served]


@dataclass(frozen=True)
class StrategyContext:
    """Everything that the node gives a strategy.

    Args:
        transport: how peers are reached; ``bulk`` is the lane for vectors.
        epoch: mode epoch, in every message; peers of another epoch are refused with 409.
        size: D, float32 parameters.
        max_abs: largest entry accepted from a peer.
        trusted_network: whether torch.distributed may be used.
        bounded: whether peers may lie: ``mixing = "auto"`` bounds then what each can do.
        direct: whether peers reach any port of this machine, not only the one that this node listens on.
        max_exchanges: begin no more rounds than this (for experiments); 0 is no bound.
        start_at_members: begin none before this many members are alive, ourselves included.
        group_process: in which torch.distributed runs; None where the node has none to offer.
        stages: the learner as a rank of a pipeline; None where the node has none to offer.
        pipes: opens pipes between stages; None likewise.
        minibatches: of one update of the algorithm, which a pipeline's predictions take into account.
        batches: how many of them the longest batch is cut into; the others are further passes over it.
        rows: of one minibatch, which can't be cut into more; environments where the policy remembers. 0 where
            nobody knows.
    """

    swarm: SwarmView
    learner: LearnerHandle
    transport: Transport
    clock: Clock
    rng: random.Random = field(repr=False)
    epoch: int
    size: int
    max_abs: float
    trusted_network: bool = False
    bounded: bool = False
    direct: bool = False
    max_exchanges: int = 0
    start_at_members: int = 0
    group_process: GroupProcess | None = None
    stages: Stages | None = None
    pipes: Pipes | None = None
    minibatches: int = 1
    batches: int = 1
    rows: int = 0


class Strategy(Protocol):
    """One way to agree, from start to stop. Built by `registry.build`; never started again once stopped.

    Strategies derive from it: what has a body here is what most of them do.
    """

    @property
    def mode(self) -> Mode:
        """The word people type for its family (``gossip``, ``allreduce``)."""

    @property
    def consensus_distance(self) -> float | None:
        """Estimate of sqrt(mean over nodes of ‖x_i − x̄‖²); None before the first exchange."""

    @property
    def outcomes(self) -> dict[str, int]:
        """Exchanges or rounds so far by outcome."""

    @property
    def facts(self) -> dict[str, float | str]:
        """Figures and words for people, told by ``mode show``: our role, members, rounds."""
        return {}

    @property
    def group(self) -> Group | None:
        """In which views are agreed on; None for a strategy without one, or before it begins."""
        return None

    @property
    def members(self) -> Sequence[str]:
        """Node ids of those whom our learner computes with, in their order."""
        return ()

    @property
    def ends_within_s(self) -> float:
        """The longest that `stop` takes when the mode changes; the node waits 15 s at most."""
        return EXCHANGE_END_S

    async def start(self) -> None:
        """Begin."""

    async def stop(self, timeout_s: float) -> None:
        """Finish the exchange in flight, at most ``timeout_s`` long, and end.

        Afterwards no thread, task or callback of it touches the board or a request's vector. What was posted
        and isn't answered is left: the learner drops it when it hears of its next mode.
        """

    async def watch(self) -> None:
        """Wait until it is stopped; raise what ended it before: a bug of ours."""

    def updated(self, updates: int) -> None:
        """The learner made ``updates`` more updates."""
        del updates

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a peer's call on one of `ROUTES`.

        Raises:
            Refusal: another mode epoch or route (409), busy (423), no state (503), poisoned (422),
                quarantined (403), malformed (400).
        """

    async def accept(self, incoming: Incoming) -> PipeReply:
        """Serve a peer's request for a pipe on `pipeline.port.PIPE_ROUTE`.

        Raises:
            Refusal: this strategy has no use for pipes (409), and as `answer`.
        """
        raise Refusal(409, f"mode {self.mode} has no use for pipes")
