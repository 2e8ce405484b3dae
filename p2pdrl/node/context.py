"""What the modules around the daemon see of one running node."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from p2pdrl.clock import Clock
from p2pdrl.config.node import TRAINS, Role, is_heir, roles_in
from p2pdrl.config.root import Config
from p2pdrl.ids import short
from p2pdrl.membership.events import MemberView
from p2pdrl.membership.service import MembershipService
from p2pdrl.node.accounting.evaluations import Evaluation, EvaluationLog
from p2pdrl.node.accounting.metrics_gossip import MetricsGossip
from p2pdrl.node.accounting.progress_tracker import LineageRank, ProgressTracker
from p2pdrl.node.events import EventLog
from p2pdrl.node.inference import Inference
from p2pdrl.node.looplag import LoopLagMonitor
from p2pdrl.node.reachability import Reachability
from p2pdrl.node.state.checkpoints import Checkpointer
from p2pdrl.node.training import Training
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.protocol import Address

__all__ = ["NodeContext"]


@dataclass
class NodeContext:
    """Filled by the daemon as the node comes up; what isn't there yet is None."""

    config: Config
    name: str
    node_id: str
    swarm_id: str
    boot: int
    data_dir: str
    address: Address
    clock: Clock
    events: EventLog
    transport: HttpTransport
    membership: MembershipService
    reachability: Reachability
    progress_tracker: ProgressTracker
    began_s: float
    """Monotonic time of the start."""
    lag: LoopLagMonitor = field(default_factory=LoopLagMonitor)
    gossip: MetricsGossip | None = None
    training: Training | None = None
    building: Training | None = None
    """The same from the moment on when it is being built; the next one where another still is there."""
    checkpointer: Checkpointer | None = None
    inference: Inference | None = None
    """Answers who asks for actions."""
    state: str = "joining"
    """``joining starting fetching training paused stopping stopped``; what people see."""
    alone_since_s: float | None = None
    halted: str | None = None
    """Why the swarm is done, once it is."""
    evaluations: EvaluationLog = field(default_factory=EvaluationLog)
    """Of the swarm's policy, by all nodes."""
    own_evaluations: tuple[Evaluation, ...] = ()
    """The last that this node made, which its report tells."""
    mode_error: str | None = None
    """Why this node can't run the swarm's mode and trains alone; None while it can."""
    allowed: frozenset[str] | None = None
    """The roles that this node's own certificate allows it; None for no limit."""

    @property
    def steers(self) -> bool:
        """Whether this node has a say in the swarm's settings."""
        return self.allowed is None or bool(self.allowed & TRAINS)

    def judges(self, node: str) -> bool:
        """Whether what another node says of the policy counts: not if it is certified to act alone."""
        allowed = self.transport.roles_of(node)
        return allowed is None or bool(allowed & TRAINS)

    def roles_of(self, member: MemberView) -> tuple[Role, ...]:
        """What a member does, as far as its certificate allows it."""
        allowed = self.allowed if member.is_self else self.transport.roles_of(member.id)
        return roles_in(member.tags, allowed)

    def alive(self) -> dict[str, Address]:
        """Living members without ourselves, by id; suspects are left alone until they are heard of again."""
        return {member.id: Address.parse(member.address) for member in self.others_alive()}

    def rank(self, lineage: str) -> LineageRank:
        """How a lineage stands when it meets another, by what this node believes."""
        living = [self.node_id, *(member.id for member in self.others_alive())]
        return self.progress_tracker.rank(lineage, living)

    def learners(self) -> dict[str, Address]:
        """Those of them that update parameters: strategies, groups and adoptions meet nobody else."""
        learners = (member for member in self.others_alive() if "learner" in self.roles_of(member))
        return {member.id: Address.parse(member.address) for member in learners}

    def actors(self) -> list[str]:
        """Ids of those that act for others: learners, or nodes with a shard of the replay, share them."""
        roles = ((member.id, self.roles_of(member)) for member in self.others_alive())
        return [node for node, has in roles if "actor" in has and not {"learner", "replay"} & set(has)]

    def acting(self) -> list[str]:
        """Ids of all of them that act, whoever learns from it; also of suspects, who mostly come back."""
        return [
            member.id
            for member in self.membership.members()
            if member.state in ("alive", "suspect")
            and not member.is_self
            and "actor" in self.roles_of(member)
        ]

    def shards(self) -> dict[str, Address]:
        """Those of them that hold a shard of the replay memory for learners on other nodes."""
        return {
            member.id: Address.parse(member.address)
            for member in self.others_alive()
            if "replay" in (has := self.roles_of(member)) and "learner" not in has
        }

    def heirs(self) -> list[str]:
        """Ids of those of them that would learn if nobody else did."""
        return [
            member.id
            for member in self.others_alive()
            if is_heir(member.tags, self.transport.roles_of(member.id))
        ]

    def learner_left(self) -> bool:
        """Whether there is a node that learns, a suspect one included, ourselves aside."""
        return any(
            member.state in ("alive", "suspect") and "learner" in self.roles_of(member)
            for member in self.membership.members()
            if not member.is_self
        )

    def others_alive(self) -> list[MemberView]:
        """What membership knows of them."""
        return [
            member for member in self.membership.members() if member.state == "alive" and not member.is_self
        ]

    def member_counts(self) -> dict[str, int]:
        """Members by state, ourselves among the living."""
        counts = {"alive": 0, "suspect": 0, "dead": 0, "left": 0, "banned": 0}
        for member in self.membership.members():
            counts[member.state] += 1
        return counts

    def author(self, proposer: str) -> str:
        """Who wrote a record, in words: an operator, or a node by its name."""
        operator = self.membership.records.operator(proposer)
        return self.name_of(proposer) if operator is None else operator.words

    def name_of(self, node: str) -> str:
        """The name that people gave a member (see `names`); its id when it is unknown."""
        return self.names().get(node, node)

    def names(self) -> dict[str, str]:
        """By id: the name that people gave a member, with its first digits where others have the same."""
        members = self.membership.members()
        living = Counter(member.name for member in members if member.state in ("alive", "suspect"))
        return {
            member.id: member.name if living[member.name] < 2 else f"{member.name} ({short(member.id)})"
            for member in members
        }
