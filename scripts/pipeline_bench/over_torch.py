"""Our stages over torch.distributed, for `bench_pipeline.py`: the ``torch`` backend of a pipeline."""

from __future__ import annotations

from typing import Any

from p2pdrl.pipeline.plan import Rendezvous, StageOrder
from p2pdrl.rl.pipeline.links import FramedLinks, Links
from p2pdrl.rl.pipeline.runner import Running
from p2pdrl.workers.pipeline import torch_stages
from p2pdrl.workers.pipeline.pipe_carrier import PipeCarrier
from p2pdrl.workers.torch_group.rendezvous import connect_store, open_store
from pipeline_bench.model import Model
from pipeline_bench.redirected import Redirected
from pipeline_bench.staged import TIMEOUT_S, Staged, WatchedShare
from pipeline_bench.talk import Trial, say

__all__ = ["OverTorch"]


class OverTorch(Staged):
    """One rank, over torch.distributed. See `Contender`.

    Args:
        model: what learns.
        share: this rank's.
    """

    def __init__(self, model: Model, share: WatchedShare) -> None:
        super().__init__(model, share)
        self._stages: torch_stages.TorchStages | None = None
        self._carrier: PipeCarrier | None = None

    def meet(self, **options: Any) -> None:
        """Meet; rank 0 says where the store is, with ``proxied`` all hear where else to connect to."""
        plan, rank = self._share.plan, self._share.rank
        if options["proxied"]:
            _redirect(rank)
        order = StageOrder(
            generation=1,
            rank=rank,
            blocks=plan.blocks,
            cuts=plan.cuts,
            schedule=plan.schedule,
            microbatches=plan.microbatches,
            ranks=plan.ranks,
            timeout_s=TIMEOUT_S,
            idle_timeout_s=TIMEOUT_S,
            state_every=1,
            backend="torch",
            meeting=Rendezvous("127.0.0.1", options["port"]),
        )
        self._stages = torch_stages.TorchStages(order, self._share.device, lambda port: say(port=port))
        self._carrier = PipeCarrier(self._stages.pipes, self._share.parts.longest_nbytes)

    def links(self, trial: Trial) -> tuple[Links, Running | None]:
        """See `Staged`."""
        del trial
        if self._stages is None or self._carrier is None:
            raise RuntimeError("ranks meet before they run")
        links = FramedLinks(self._carrier)
        return links, self._stages.runner(self._share, links, self._carrier)

    def close(self) -> None:
        """See `Contender`."""
        if self._stages is not None:
            self._stages.close()
        if self._carrier is not None:
            self._carrier.close()


def _redirect(rank: int) -> None:
    """Let all that comes from a store go through `Redirected`: nothing else says where ranks listen."""

    def opened(*arguments: Any) -> tuple[Redirected, int]:
        store, port = open_store(*arguments)
        return Redirected(store, rank), port

    def found(*arguments: Any) -> Redirected:
        return Redirected(connect_store(*arguments), rank)

    vars(torch_stages).update(open_store=opened, find_store=found)
