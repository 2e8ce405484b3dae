"""torch.distributed.pipelining over gloo, for `bench_pipeline.py`: what we are compared with.

Blocks, objective, clipping and optimizer are those of our stages (`StageParameters`); splitting, schedules,
messages and the backward pass between stages are torch's. Shapes are static. The last rank has the targets
already, which ours sends along with the activations.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from p2pdrl.pipeline.plan import PipelinePlan
from p2pdrl.rl.distributions import PolicyOutputs
from p2pdrl.rl.networks.lstm import NO_CONTEXT
from p2pdrl.rl.pipeline.stage_parameters import StageParameters
from pipeline_bench.model import OBJECTIVE, Model
from pipeline_bench.redirected import Redirected
from pipeline_bench.talk import LEARNING_RATE, MAX_GRAD_NORM, Stopwatch, Trial

__all__ = ["Gloo"]

TIMEOUT = timedelta(seconds=60)


class _Stage(nn.Module):
    """A stage as torch wants it."""

    def __init__(self, share: StageParameters[PolicyOutputs], stage: int) -> None:
        super().__init__()
        self._share = share
        self._stage = stage

    def forward(self, x: Tensor) -> Tensor:
        return self._share.forward(self._stage, x, NO_CONTEXT, stored=1)


class Gloo:
    """One rank. See `Contender`.

    Args:
        model: what learns.
        share: this rank's.
    """

    def __init__(self, model: Model, share: StageParameters[PolicyOutputs]) -> None:
        self._share = share
        self._batch = model.batch
        names = OBJECTIVE.target_names
        self._names = names
        self._targets = torch.stack([model.batch.targets[name].float() for name in names], 1)
        self._schedules: dict[tuple[str, int], Any] = {}
        self._store: Store | None = None

    def meet(self, **options: Any) -> None:
        """Make a process group; with ``proxied``, tell where gloo listens and hear where to connect."""
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        plan, rank = self._share.plan, self._share.rank
        store: Store = TCPStore(
            "127.0.0.1", options["port"], plan.ranks, is_master=rank == 0, timeout=TIMEOUT
        )
        if options["proxied"]:
            store = Redirected(store, rank)
        self._store = store  # torch's group doesn't keep it alive, and others may still read it
        dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.ranks, timeout=TIMEOUT)

    def prepare(self, trial: Trial) -> None:
        """See `Contender`."""
        self._schedule(trial)

    def run(self, trial: Trial, watch: Stopwatch) -> dict[str, Any]:
        """See `Contender`."""
        share = self._share
        schedule = self._schedule(trial)
        first, last = share.rank == 0, share.rank == share.plan.ranks - 1
        inputs = (self._batch.inputs,) if first else ()
        target = {"target": self._targets} if last else {}
        watch.begin()
        for _ in range(trial.steps):
            share.begin()
            schedule.step(*inputs, **target, return_outputs=False)
            squares = torch.tensor([share.squares()], dtype=torch.float64)
            dist.all_reduce(squares)
            watch.stepped(share.step(float(squares), LEARNING_RATE, MAX_GRAD_NORM))
        return {}

    def close(self) -> None:
        """See `Contender`."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _schedule(self, trial: Trial) -> Any:
        key = trial.schedule, trial.microbatches
        if key not in self._schedules:
            plan = self._share.plan
            stages: list[Any] = [
                self._stage(plan, stage, trial.microbatches) for stage in plan.stages_of(self._share.rank)
            ]
            options: dict[str, Any] = {
                "n_microbatches": trial.microbatches,
                "loss_fn": self._loss,
                "scale_grads": False,
            }
            if trial.schedule == "interleaved":
                self._schedules[key] = ScheduleInterleaved1F1B(stages, **options)
            else:
                kind = ScheduleGPipe if trial.schedule == "gpipe" else Schedule1F1B
                self._schedules[key] = kind(stages[0], **options)
        return self._schedules[key]

    def _stage(self, plan: PipelinePlan, stage: int, microbatches: int) -> PipelineStage:
        """Return a stage whose microbatches all look alike."""
        parts, batch = self._share.parts, self._batch
        rows = len(batch.inputs) // microbatches
        blocks = plan.blocks_of(stage)

        def like(block: int) -> Tensor:
            spec = parts.outputs[block]
            shape, device = (rows, *spec.shape), self._share.device
            return torch.empty(shape, dtype=spec.dtype, device=device, requires_grad=True)

        given = like(blocks[0] - 1) if stage else batch.inputs[:rows]
        return PipelineStage(
            _Stage(self._share, stage),
            stage,
            plan.stages,
            self._share.device,
            input_args=(given,),
            output_args=(like(blocks[-1]),),
        )

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return this microbatch's share of the objective over the batch."""
        targets = dict(zip(self._names, target.unbind(1), strict=True))
        targets["actions"] = targets["actions"].long()
        loss, _ = OBJECTIVE.over(self._batch.rows)(self._share.outputs(output), targets)
        return loss
