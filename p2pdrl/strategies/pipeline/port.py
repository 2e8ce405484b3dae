"""What the pipeline strategy asks of its node: a learner that can be a stage, and pipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from p2pdrl.pipeline.layers import Layer
from p2pdrl.pipeline.plan import StageNews, StageOrder, StageSide
from p2pdrl.transport.pipe.ticket import Pipe
from p2pdrl.transport.protocol import Address

__all__ = ["PIPE_ROUTE", "Measured", "Pipes", "Stages"]

PIPE_ROUTE = "stage"
"""Route of pipes between stages, and of calls. Like all `protocol.ROUTES` it is served once by the node (for
pipes by `HttpTransport.serve_pipes`), which passes requests for pipes on to the strategy in force, where that
has an ``accept``."""


class Pipes(Protocol):
    """Opens pipes to peers. `transport.http_transport.HttpTransport` does."""

    async def open_pipe(
        self, to: Address, peer_id: str, route: str, meta: bytes, *, deadline_s: float
    ) -> Pipe:
        """Open a pipe; see `HttpTransport.open_pipe`, and there for errors."""


class Measured(NamedTuple):
    """What a learner says of itself.

    Args:
        layers: what each block costs there.
        device: where it computes, as torch writes it.
        usable_bytes: of a GPU's memory, that its stage may take now; 0 where nobody knows.
        gpu: what tells its GPU from all others, on whichever machine; empty where NCCL can't reach one.
    """

    layers: Sequence[Layer]
    device: str
    usable_bytes: int = 0
    gpu: str = ""


class Stages(Protocol):
    """The learner of this node as a stage: what a strategy may ask of it, and what it hears of it.

    Orders and news name a generation; news of an older one are passed over by whoever reads them. A learner
    that dies is started again by the node without any order: the strategy hears ``broken`` of the generation
    that it was in.
    """

    async def measure(self, microbatches: int, *, deadline_s: float, over_torch: bool = False) -> Measured:
        """Return what each block costs here with one of so many microbatches, and what it computes on.

        The learner measures once for each number and answers at once afterwards. With ``over_torch`` it also
        imports what pipelines over torch.distributed need, so that it joins one quickly.

        Raises:
            WorkerError: it didn't answer in time, or is gone.
            ConfigError: the policy can't be cut.
        """

    def work(self, order: StageOrder, pipes: Mapping[StageSide, Pipe]) -> None:
        """Have the learner be a stage, on pipes that are its own from now on.

        Whatever it did before ends at once: who wants the update to be finished says `finish` first.
        """

    def finish(self, generation: int) -> None:
        """Have rank 0 end the generation after the update that it is in, with the whole state on all boards.

        It answers ``over`` (or ``broken``), and so do the ranks behind it without having been asked.
        """

    async def news(self) -> StageNews:
        """Wait for the next news; cancelling loses none."""
