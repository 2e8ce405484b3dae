"""What a learner is told that becomes one rank of a pipeline, and what it tells of that.

Whoever forms a pipeline makes the orders; learners carry them out. Both are other processes of the same node,
so nothing here comes from the network.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from p2pdrl.pipeline.plan import PipelinePlan
from p2pdrl.pipeline.schedule import ScheduleName

__all__ = ["Meeting", "StageBackend", "StageNews", "StageOrder", "StageSide"]

StageBackend = Literal["stream", "torch"]
"""What carries activations: the swarm's own connections, or torch.distributed."""

StageSide = Literal["next", "previous"]
"""A neighbour: activations go to the next and come from the previous one."""


class Meeting(msgspec.Struct, frozen=True):
    """Where the ranks of a torch.distributed group meet."""

    host: str
    """Where the store is; for rank 0, which opens it, where any other rank is."""
    port: int
    """0 for rank 0."""
    come_s: float = 30.0
    """The longest that all may take to come: one whose learner is new imports torch.distributed before."""


class StageOrder(msgspec.Struct, frozen=True):
    """Be one rank of a pipeline, from now on until told otherwise."""

    generation: int
    """Grows with each pipeline that this node is part of; the same on all its ranks."""
    rank: int
    """0 makes experience, drives the others and has the whole of the parameters after each update."""
    blocks: int
    cuts: tuple[int, ...]
    schedule: ScheduleName
    microbatches: int
    ranks: int
    """These five are `plan.PipelinePlan`'s."""
    timeout_s: float
    """Bound on each wait for a neighbour within an update; with ``torch`` also on how long those who have all
    come take to connect."""
    idle_timeout_s: float
    """Bound on the wait for the next update, but for rank 0."""
    state_every: int
    """Updates until all ranks get the whole of the parameters and of the optimizer's state again (K)."""
    tune: bool = False
    """Rank 0 measures numbers of microbatches up to the plan's and stays with the fastest."""
    backend: StageBackend = "stream"
    meeting: Meeting | None = None
    """With ``torch`` only."""
    checkpoint_activations: bool = False

    @property
    def plan(self) -> PipelinePlan:
        """Who holds what.

        Raises:
            ConfigError: the numbers don't fit each other.
        """
        return PipelinePlan(self.blocks, self.cuts, self.schedule, self.microbatches, self.ranks)


class StageNews(msgspec.Struct, frozen=True):
    """What has become of an order."""

    generation: int
    what: Literal["meeting", "ready", "copied", "over", "broken"]
    """``meeting``: the store is open at ``port``; ``ready``: this rank waits for the first minibatch (rank 0:
    collects experience); ``copied``: the whole state, the optimizer's too, is on the board; ``over``: told to
    finish, it did, with the whole state on the board; ``broken``: a neighbour failed, or time ran out."""
    side: StageSide | None = None
    """With ``broken``: which neighbour, where one is to blame."""
    why: str = ""
    port: int = 0
    policy_version: int = 0
    """Of what is on the board."""
    behind: int = 0
    """With ``broken``: updates that this rank took part in since; only rank 0 has what has become of them."""
