"""What averaging within one view is: the seam between rounds of a group and how vectors meet.

`allreduce.ViewAverager` runs over the swarm's own connections, `torch_averager.TorchAverager` over
torch.distributed. `backends` chooses.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple, Protocol

from p2pdrl.strategies.averaging.messages import Ask
from p2pdrl.strategies.group.service import Group, GroupView
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.transport.protocol import Address, Incoming, Reply

__all__ = ["Average", "Averager", "Backend", "Part"]


class Part(NamedTuple):
    """What this node gives to a round.

    Args:
        vector: unchanged until the round has ended, or another average of it was begun; None for nothing.
        weight: how much it counts for; 0 exactly when there is no vector.
        policy_version: that it comes from.
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
        bytes_out: payload sent.
        bytes_in: payload received.
        round_trips: calls made.
        learning_rates: at which the members would step, in their order.
        ends_update: whether the leader's update ends with this round (see `strategies.lockstep`).
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


class Averager(Protocol):
    """Averages within one view; made anew for each."""

    view: GroupView
    """In which it averages."""

    @property
    def given(self) -> int:
        """Number of the last round that we gave our part to; -1 before the first."""
        ...

    @property
    def in_force(self) -> bool:
        """Whether the view still is; what comes of a round counts only then."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a round is under way."""
        ...

    async def average(self, number: int, part: Part) -> Average:
        """Do round ``number`` with all members; wait until all have given their part.

        Cancelled when the view ends; the part is then given again to the next view's averager.
        """
        ...

    async def serve(self, incoming: Incoming, ask: Ask) -> Reply:
        """Answer a member that asks for a ``part`` or for the ``store``.

        Raises:
            Refusal: not now, or not here.
        """
        ...

    def address(self, peer: str) -> Address:
        """Where a member is, or was when the view began.

        Raises:
            PeerUnreachableError: nobody knows.
        """
        ...

    def close(self) -> None:
        """The view has ended: whoever waits for us is told."""
        ...

    async def closed(self) -> None:
        """Wait, after `close`, until no thread touches any vector."""
        ...


class Backend(Protocol):
    """Makes averagers, and keeps what outlives a view."""

    async def start(self) -> None:
        """Begin.

        Raises:
            ConfigError: this node can't.
        """
        ...

    async def stop(self) -> None:
        """End everything, after the last averager was closed; calling it again does nothing."""
        ...

    def averager(self, group: Group, view: GroupView, *, first: int, raw: bool, spread: bool) -> Averager:
        """Return one for a view that has come into force.

        Args:
            group: told whom we doubt.
            view: in which it averages.
            first: number of the first round.
            raw: whether that round's vectors travel as float32 whatever the config says.
            spread: whether to measure how far the parts are apart.
        """
        ...
