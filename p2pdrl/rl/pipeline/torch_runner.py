"""Runs one rank's part of a minibatch through ``torch.distributed.pipelining``."""

from __future__ import annotations

import re
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic

import torch
from torch import Tensor, nn
from torch.distributed import DistError
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, TransportError
from p2pdrl.pipeline.schedule import peak_activations
from p2pdrl.pipeline.trace import TraceSpan
from p2pdrl.rl.gradients import Minibatch, Objective, Outputs
from p2pdrl.rl.networks.lstm import RecurrentContext
from p2pdrl.rl.pipeline.links import Links
from p2pdrl.rl.pipeline.messages import Activation, Opening, RowSpec, TensorSlot
from p2pdrl.rl.pipeline.runner import ActivationBytes, ActivationMemory, Recorder
from p2pdrl.rl.pipeline.stage_parameters import StageParameters

__all__ = ["TorchRunner", "peer_error"]

_NETWORK = re.compile(r"/gloo/|timeout caused pair closure|NCCL", re.IGNORECASE)
_LATE = re.compile(r"timed? ?out", re.IGNORECASE)
_ADVICE = re.compile(r"^\[[^\]]*:\d+\] ?|\. This is typically caused by.*")


def peer_error(error: BaseException) -> TransportError | None:
    """Return what torch.distributed means by an error, if it is about other processes or the network."""
    text = str(error)
    if not isinstance(error, DistError) and not _NETWORK.search(text):
        return None
    why = _ADVICE.sub("", " ".join(text.split()))[:200]
    late = _LATE.search(text) and "pair closure" not in text
    return PeerTimeoutError(why) if late else PeerUnreachableError(why)


_Schedule = ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B
_KEPT_SCHEDULES = 2
"""Most batches of an update are equally long, but for the last. Each has memory for what it receives."""


class TorchRunner(Generic[Outputs]):
    """Implements ``runner.Running`` on this process' torch.distributed group, whose ranks are the plan's.

    Args:
        travelling: device that tensors are on when they are sent: the CPU with gloo, with NCCL the share's.
        leave: leaves the group; called after an error, since others wait for this rank then.
        blame: finds out which neighbour failed; called after an error of torch.

    Attributes:
        recorder: see ``Running``. A wait ends with the computation that it was for, and begins with the end
            of the one before.
    """

    def __init__(
        self,
        share: StageParameters[Outputs],
        links: Links,
        *,
        travelling: torch.device,
        leave: Callable[[], None],
        blame: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._share = share
        self._plan = share.plan
        self._links = links
        self._travelling = travelling
        self._leave = leave
        self._blame = blame
        self._clock = clock
        self._schedules: OrderedDict[tuple[int, int], _Schedule] = OrderedDict()
        self._computed_s = self._idle_since_s = 0.0
        self._kept_bytes = 0
        self._activations = ActivationMemory(share)
        self.recorder = Recorder()
        self.waited_s = self.ran_s = 0.0
        self._now: _Minibatch[Outputs] | None = None

    def begin(self, opening: Opening, batches: Sequence[Minibatch] = ()) -> None:
        """See ``Running.begin``."""
        share = self._share
        now: _Minibatch[Outputs] = _Minibatch(opening)
        self._now = now
        if share.rank == self._plan.ranks - 1:
            now.objective = share.parts.objective_of(opening)
        if batches:
            now.inputs = now.equally_long([batch.inputs for batch in batches])
            given = [{**batch.targets, **batch.context._asdict()} for batch in batches]
            now.extras = {name: torch.cat([one[name] for one in given]) for name, _ in share.parts.extras}
        share.begin()

    def room(self, stage: int, microbatch: int) -> list[TensorSlot]:
        """See ``Running.room``: targets and context of all microbatches."""
        assert (stage, microbatch) == (self._share.rank, 0)  # noqa: S101 - others aren't received here
        now, extras = self._minibatch, self._share.parts.extras
        length = now.opening.length
        now.extras = {name: torch.empty((length, *spec.shape), dtype=spec.dtype) for name, spec in extras}
        return [TensorSlot(now.extras[name], spec.below) for name, spec in extras]

    def run(self) -> Tensor | None:
        """See ``Running.run``."""
        share, now = self._share, self._minibatch
        begin_s = self._idle_since_s = self._clock()
        before_s, self._kept_bytes = self._computed_s, 0
        if share.rank < self._plan.ranks - 1:
            riding = [now.extras[name] for name, _ in share.parts.extras]
            self._links.send("down", Activation(share.rank + 1, 0, now.opening), riding)
        context = {name: now.equally_long(now.cut(name)).to(share.device) for name in share.parts.context}
        if now.objective is not None:
            now.targets = {
                name: [piece.to(share.device) for piece in now.cut(name)] for name in share.parts.targets
            }
        inputs = () if now.inputs is None else (now.inputs,)
        parts = now.opening.parts
        schedule: Any = self._schedule(parts, max(now.sizes))
        with self._peers_errors():
            schedule.step(*inputs, target=torch.arange(parts), return_outputs=False, **context)
        self._now = None
        ran_s = self._clock() - begin_s
        self.ran_s += ran_s
        self.waited_s += max(ran_s - (self._computed_s - before_s), 0.0)
        return now.terms

    def forget(self) -> None:
        """See ``Running.forget``; leaves the group, too."""
        self._now = None
        self._schedules.clear()
        self._leave()

    @property
    def _minibatch(self) -> _Minibatch[Outputs]:
        assert self._now is not None  # noqa: S101 - `begin` comes first
        return self._now

    def _schedule(self, parts: int, rows: int) -> _Schedule:
        """Return PyTorch's schedule for so many microbatches of so many rows."""
        found = self._schedules.pop((parts, rows), None)
        if found is None:
            while len(self._schedules) >= _KEPT_SCHEDULES:
                self._schedules.popitem(last=False)
            found = self._made(parts, rows)
        self._schedules[parts, rows] = found
        return found

    def _made(self, parts: int, rows: int) -> _Schedule:
        plan, rank = self._plan, self._share.rank
        options: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        as_gpipe = plan.schedule == "gpipe" or (plan.schedule == "1f1b" and parts < plan.stages)
        stored = parts if as_gpipe else peak_activations(plan.actions(rank, parts))
        stages: list[Any] = [self._stage(stage, rows, stored) for stage in plan.stages_of(rank)]
        if plan.schedule == "interleaved":
            return ScheduleInterleaved1F1B(stages, parts, **options)
        return (ScheduleGPipe if as_gpipe else Schedule1F1B)(stages[0], parts, **options)

    def _stage(self, stage: int, rows: int, stored: int) -> PipelineStage:
        plan, parts = self._plan, self._share.parts
        numbers = plan.blocks_of(stage)
        before = parts.outputs[numbers[0] - 1] if stage > 0 else parts.inputs
        behind = parts.outputs[numbers[-1]]
        return _Stage(
            _Blocks(self._share, self._activations, stage, stored, self._travelling),
            stage,
            plan.stages,
            self._travelling,
            input_args=_example(before, rows, learns=stage > 0),
            output_args=_example(behind, rows, learns=True),
            noted=self._noted,
            keeps=self._keeps,
            passing_bytes=before.nbytes(rows) + behind.nbytes(rows),
        )

    def _loss(self, output: Tensor, microbatch: Tensor) -> Tensor:
        """Return the loss of one microbatch, by its own rows, without those that fill it up."""
        now = self._minibatch
        assert now.objective is not None  # noqa: S101 - this is the last rank
        with self._computing():
            m = int(microbatch)
            targets = {name: pieces[m] for name, pieces in now.targets.items()}
            loss, terms = now.objective(self._share.outputs(output[: now.sizes[m]]), targets)
            now.terms = terms if now.terms is None else now.terms + terms
            return loss

    @contextmanager
    def _computing(self) -> Iterator[float]:
        begin_s = self._clock()
        yield begin_s
        self._idle_since_s = self._clock()
        self._computed_s += self._idle_since_s - begin_s

    @contextmanager
    def _noted(self, what: str, stage: int, microbatch: int) -> Iterator[None]:
        """Record a computation, and the wait before it."""
        about = stage, microbatch, self._minibatch.opening.step
        since_s = self._idle_since_s
        with self._computing() as begin_s:
            yield
        if what == "forward" and stage > 0:
            self.recorder.add(TraceSpan("recv_activation", since_s, begin_s, *about))
        if what == "backward" and stage < self._plan.stages - 1:
            self.recorder.add(TraceSpan("recv_gradient", since_s, begin_s, *about))
        self.recorder.add(TraceSpan(what, begin_s, self._idle_since_s, *about))

    def _keeps(self, kept_bytes: int, passing_bytes: int = 0) -> None:
        """Record what is kept, some of it for a moment only."""
        self._kept_bytes += kept_bytes
        self.recorder.kept(self._kept_bytes + passing_bytes)

    @contextmanager
    def _peers_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            meant = peer_error(error)
            if meant is None:
                raise
            # What still waits to be sent is in the frames, and keeps connections open that others wait at.
            traceback.clear_frames(error.__traceback__)
            self._blame()
            raise meant from None


@dataclass
class _Minibatch(Generic[Outputs]):
    """All that is known of the minibatch that runs."""

    opening: Opening
    inputs: Tensor | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)
    objective: Objective[Outputs] | None = None
    targets: dict[str, list[Tensor]] = field(default_factory=dict)
    terms: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.opening.sizes

    def cut(self, name: str) -> Sequence[Tensor]:
        """Return what rides along, by microbatch."""
        return torch.split(self.extras[name], list(self.sizes))

    def equally_long(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return microbatches as one tensor, each as long as the longest."""
        longest = max(self.sizes)
        padded = [(piece, piece[-1:]) if len(piece) < longest else (piece,) for piece in pieces]
        return torch.cat([tensor for pair in padded for tensor in pair])


class _Blocks(nn.Module):
    """A stage's blocks as PyTorch calls them. Parameters stay the share's: this module has none."""

    def __init__(
        self,
        share: StageParameters[Any],
        activations: ActivationMemory[Any],
        stage: int,
        stored: int,
        travelling: torch.device,
    ) -> None:
        super().__init__()
        self._share = share
        self._activations = activations
        self._stage = stage
        self._stored = stored
        self._travelling = travelling
        self.kept = ActivationBytes(0, 0)
        """Of the last microbatch; all are equally long."""

    def forward(
        self,
        x: Tensor,
        starts_BT: Tensor | None = None,
        state_BS: Tensor | None = None,
    ) -> Tensor:
        """Return the stage's output, where it travels from."""
        share = self._share
        output, self.kept = self._activations.forward(
            self._stage, x.to(share.device), RecurrentContext(starts_BT, state_BS), stored=self._stored
        )
        if self._stage == share.plan.stages - 1:
            return output
        output = output.to(self._travelling)
        # A gradient comes for it anyway, even where nothing before it has any parameters.
        return output if output.requires_grad else output.requires_grad_()


class _Stage(PipelineStage):
    """Says when it computes what, and what it keeps."""

    def __init__(
        self,
        blocks: _Blocks,
        *args: Any,
        noted: Callable[..., Any],
        keeps: Callable[..., None],
        passing_bytes: int,
        **options: Any,
    ) -> None:
        super().__init__(blocks, *args, **options)
        self._blocks = blocks
        self._noted = noted
        self._keeps = keeps
        self._passing_bytes = passing_bytes

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        with self._noted("forward", self.stage_index, fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        self._keeps(self._passing_bytes + self._blocks.kept.waiting_bytes)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        self._keeps(0, self._blocks.kept.anew_bytes)
        with self._noted("backward", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **options)
        self._keeps(-self._passing_bytes - self._blocks.kept.waiting_bytes)


def _example(spec: RowSpec, rows: int, *, learns: bool) -> Tensor:
    """Return a tensor like those of one microbatch, without memory."""
    return torch.empty((rows, *spec.shape), dtype=spec.dtype, device="meta", requires_grad=learns)
