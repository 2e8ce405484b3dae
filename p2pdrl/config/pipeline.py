"""Options of the pipeline strategy."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from p2pdrl.config.fields import PositiveSeconds, Travelling
from p2pdrl.config.gradients import Microbatches
from p2pdrl.config.schedules import ScheduleName

__all__ = ["MAX_CHUNKS", "MAX_STAGES", "PipelineConfig", "ScheduleName"]

MAX_STAGES = 64
MAX_CHUNKS = 8


class PipelineConfig(
    Travelling, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="name", tag="pipeline"
):
    """One model over several peers: each holds a stage of it, and batches pass through in microbatches.

    More peers than stages form further pipelines, whose first peers agree by gossip. Whoever is left over
    stands by.
    """

    stages: Annotated[int, Meta(ge=1, le=MAX_STAGES)] = 2
    """Peers of one pipeline. Where fewer are alive, they hold the whole model among them. No more than the
    model has blocks, ``chunks`` of them for each."""
    schedule: ScheduleName = "1f1b"
    """``gpipe`` does all forwards, then all backwards; ``1f1b`` alternates, so a peer keeps no more
    microbatches than there are stages below it; ``interleaved`` alternates over ``chunks`` stages a peer."""
    chunks: Annotated[int, Meta(ge=1, le=MAX_CHUNKS)] = 1
    """Stages that each peer holds; more than one with ``interleaved`` only, which needs it: a shorter bubble
    for more messages."""
    microbatches: Microbatches = 4
    """Parts that each minibatch is cut into, as equal as can be: more make a shorter bubble of smaller, less
    efficient parts. ``auto`` measures 1, 2, 4 and 8 in the first updates and stays with the fastest."""
    cuts: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    """Number of the first block of each stage but the first; empty has the stages balanced by measured times,
    bytes and speeds of the peers. ``p2pdrl pipeline plan --config NAME`` numbers the blocks. With fewer peers
    than ``stages`` are alive these cuts fit no pipeline, and stages are balanced."""
    backend: Literal["auto", "stream", "torch"] = "auto"
    """``stream`` runs over the swarm's own connections; ``torch`` over torch.distributed, which needs
    ``node.trusted_network``, for it listens without authentication. ``auto`` takes ``stream``, and none of
    both where this would be slower than one peer alone: then each peer accumulates microbatches by itself."""
    state_every: Annotated[int, Meta(ge=1, le=1_000_000)] = 10
    """Updates until all peers of a pipeline get a copy of the whole parameters and of the optimizer's state:
    what is lost at most when peers die."""
    deadline_s: PositiveSeconds = 10.0
    """Longest wait for a neighbour within an update; who takes longer is left out. With ``torch`` at least
    10 s, and no more than 30."""
    checkpoint_activations: bool = False
    """Keep only what comes into a stage, and compute the rest anew on the way back (Chen 2016,
    arXiv 1604.06174): less memory for about a third more time."""
    gossip_every_s: PositiveSeconds = 1.0
    """Seconds between two exchanges of a pipeline's first peer with another's."""
