"""What the first rank and all others do alike once the gradients are there: sums, steps and slices.

Sums go up and end at the first rank, which knows the whole gradient's norm then; the step that follows goes
down, and every rank passes it on before it steps itself. **So ranks may differ by one step**, from the moment
when the first rank sends a ``StepMessage`` until the last one has it: a link that breaks in between leaves
some ranks with ``StageParameters.steps`` one higher than others. Slices carry that number: those of one
number make a whole, and where numbers differ the pipeline goes back to the last state that was put together.

Shape suffixes: D parameters of the whole model, P of one rank.
"""

# ruff: noqa: N815 (fields carry shape suffixes)
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from p2pdrl.errors import PeerUnreachableError, WireError
from p2pdrl.pipeline.trace import TraceSpan
from p2pdrl.rl.gradients import Outputs
from p2pdrl.rl.pipeline.links import Links, Room, Way, receive, receive_any, receive_kind
from p2pdrl.rl.pipeline.messages import Message, Opening, Slice, StepMessage, Sums, UpdateOver, Whole
from p2pdrl.rl.pipeline.runner import Recorder, Running, ScheduleRunner
from p2pdrl.rl.pipeline.stage_parameters import StageParameters
from p2pdrl.rl.pipeline.tensor_specs import TensorSlot

__all__ = ["Assembled", "Rank"]

Vector = npt.NDArray[np.float32]
Arrays = dict[str, npt.NDArray[Any]]

_Kind = TypeVar("_Kind", bound=Message)

_MOST_RATE = 1e30
"""Optimizers multiply learning rates by numbers that must fit in float32."""


@dataclass(frozen=True)
class Assembled:
    """All slices, put together.

    Attributes:
        step: minibatches done.
        vector_D: the parameters.
        optimizer: the optimizer's arrays, as ``Optimizer.state`` names them; None where nobody asked.
        version: policy version that the first rank gave it, where it was spread.
        place: likewise its trainer's in the data, as ``Trainer.place`` counts.
        last: the pipeline ends with this.
    """

    step: int
    vector_D: Vector
    optimizer: Arrays | None
    version: int = 0
    place: int = 0
    last: bool = False


class Rank(Generic[Outputs]):
    """A share and its links. After an error it is of no use any more, and its links are closed.

    Args:
        share: of this rank.
        links: to the neighbours; None where one rank is all.
        generation: of the pipeline.
        timeout_s: bound on each wait for a message, but for those that wait for the first rank's next idea.
        clock: seconds, monotonic; for ``runner``'s figures.
        runner: computes gradients; None for one that does so over the links.
        recorder: of what this rank does; None for one of its own.

    Attributes:
        share: as given.
        generation: as given.
        runner: as given.
        recorder: as given.
    """

    def __init__(
        self,
        share: StageParameters[Outputs],
        links: Links | None,
        generation: int,
        timeout_s: float,
        clock: Callable[[], float],
        *,
        runner: Running | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.share = share
        self.generation = generation
        self.recorder = recorder or Recorder()
        self.runner: Running = runner or ScheduleRunner(share, links, timeout_s, clock)
        self.runner.recorder = self.recorder
        self._clock = clock
        self._links = links
        self._timeout_s = timeout_s
        self._broken = False
        self._told_steps = share.steps
        self._squares_s = self._busy_s = self._whole_s = 0.0

    @property
    def last(self) -> bool:
        """Whether there is no rank below."""
        return self.share.rank == self.share.plan.ranks - 1

    @contextmanager
    def whole_or_broken(self) -> Iterator[None]:
        """Close the links when something in here goes wrong: neighbours needn't wait for it to show.

        Raises:
            PeerUnreachableError: something went wrong before.
        """
        if self._broken:
            raise PeerUnreachableError(f"generation {self.generation} of the pipeline has ended")
        try:
            yield
        except BaseException:
            self.close()
            self.runner.forget()
            raise

    @contextmanager
    def noted(self, what: str) -> Iterator[None]:
        """Record what is done in here, unless it fails."""
        step, begin_s = self.share.steps, self._clock()
        yield
        self.recorder.add(TraceSpan(what, begin_s, self._clock(), step=step))

    def close(self) -> None:
        """End this rank's part in the pipeline."""
        self._broken = True
        if self._links is not None:
            self._links.close()

    def metrics(self) -> dict[str, float]:
        """Return the number of stages, and since the last call: the idle part of the steps, the most kept.

        ``step_s`` are the seconds of a step on a minibatch, from its beginning at the first rank to its end
        here; ``bubble`` is the part of them in which this rank neither computed nor stepped.
        ``activation_bytes`` is missing where nobody counts them.
        """
        bubble = max(1.0 - self._busy_s / self._whole_s, 0.0) if self._whole_s else 0.0
        step_s = self._whole_s / max(self.share.steps - self._told_steps, 1)
        self._told_steps = self.share.steps
        self._busy_s = self._whole_s = 0.0
        most, self.recorder.activation_bytes = self.recorder.activation_bytes, 0
        kept = {"activation_bytes": float(most)} if most else {}
        return {"stages": float(self.share.plan.stages), "bubble": bubble, "step_s": step_s, **kept}

    def send(self, way: Way, message: Message, tensors: list[Tensor] | None = None) -> None:
        """Send to a neighbour, if there is one that way: not from the last rank down to the first."""
        if self._links is not None and not (way == "down" and self.last):
            self._links.send(way, message, tensors or [])

    def receive(
        self,
        way: Way,
        kind: type[_Kind],
        room: Callable[[_Kind], list[TensorSlot]],
        waits: int = 1,
    ) -> _Kind:
        """Receive from a neighbour; see ``links.receive_kind``. Who is told later may wait several times."""
        assert self._links is not None  # noqa: S101 - or there is nobody to hear from
        return receive_kind(self._links, way, kind, room, waits * self._timeout_s)

    def receive_any(self, way: Way, room: Room, timeout_s: float, what: str) -> Message:
        """Receive from a neighbour; see ``links.receive_any``."""
        assert self._links is not None  # noqa: S101 - or there is nobody to hear from
        return receive_any(self._links, way, room, timeout_s, what)

    def gather(self, terms: Tensor | None) -> Sums:
        """Return the sums of this rank and all below, once they are there."""
        with self.noted("sums"):
            begin_s = self._clock()
            squares = self.share.squares()
            self._squares_s = self._clock() - begin_s
            if terms is not None:
                return Sums(self.share.steps, squares, tuple(terms.tolist()))
            below = self.receive("up", Sums, self._sums)
            return Sums(self.share.steps, squares + below.squares, below.terms)

    def step(self, step: StepMessage) -> float:
        """Pass a step on, and step; return the gradient's norm."""
        begin_s = self._clock()
        with self.noted("step"):
            self.send("down", step)
            norm = self.share.step(step.squares, step.learning_rate, step.max_grad_norm)
        step_s, runner = self._clock() - begin_s, self.runner
        self._busy_s += runner.ran_s - runner.waited_s + self._squares_s + step_s
        self._whole_s += step.took_s + step_s
        runner.ran_s = runner.waited_s = 0.0
        return norm

    def bare(self, message: Sums | StepMessage | UpdateOver) -> list[TensorSlot]:
        """Return room for a message without tensors.

        Raises:
            WireError: it is of another step, or its numbers would do harm.
        """
        if message.step != self.share.steps:
            raise WireError(f"{message} came at step {self.share.steps}")
        if isinstance(message, (Sums, StepMessage)) and message.squares < 0.0:
            raise WireError(f"{message}: no squares add up to that")
        if isinstance(message, StepMessage) and not (
            0.0 <= message.learning_rate <= _MOST_RATE
            and 0.0 < message.max_grad_norm < math.inf
            and 0.0 <= message.took_s < math.inf
        ):
            raise WireError(f"{message} isn't a step that can be taken")
        return []

    def _sums(self, sums: Sums) -> list[TensorSlot]:
        """Do what ``bare`` does; the algorithm counts on as many terms as its objective has."""
        if len(sums.terms) != self.share.parts.objective.terms:
            raise WireError(f"{sums} should have {self.share.parts.objective.terms} terms")
        return self.bare(sums)

    def slices(self, *, state: bool) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield the vectors of each rank from this one on, with its number."""
        share = self.share
        yield share.rank, share.vectors(state=state)
        for rank in range(share.rank + 1, share.plan.ranks):
            size = share.parts.block_map.size(share.plan.numbers(rank))
            yield rank, self._vectors("up", self.slice(rank), size, state=state)

    def slice(self, rank: int) -> Slice:
        """Return what comes with a rank's vectors."""
        return Slice(rank, self.share.steps, self.share.optimizer.steps)

    def send_whole(self, assembled: Assembled, *, changed: bool = False) -> None:
        """Tell the ranks below what was put together; or with ``changed``, what all are to go on with."""
        optimizer = assembled.optimizer or {}
        vectors = [assembled.vector_D, *(optimizer[name] for name in self.share.vector_names)]
        steps = int(optimizer["optimizer.steps"])
        whole = Whole(self.share.steps, steps, assembled.version, assembled.place, changed)
        self.send("down", whole, [torch.from_numpy(vector) for vector in vectors])

    def receive_whole(self) -> Assembled:
        """Return what the first rank has put together, and pass it on; go on with it where it changed."""
        tensors = self.whole_tensors()
        # it comes whole to one rank after the other
        whole = self.receive("down", Whole, lambda whole: self.room(whole, tensors), waits=self.share.rank)
        return self.take_whole(whole, tensors)

    def whole_tensors(self) -> list[Tensor]:
        """Return memory for a whole, with the optimizer's."""
        return self._empty(self.share.parts.block_map.layout.size, state=True)

    def room(self, whole: Whole, tensors: list[Tensor]) -> list[TensorSlot]:
        """Return room for a whole.

        Raises:
            WireError: it is of another step.
        """
        share = self.share
        theirs, ours = (whole.step, whole.optimizer_steps), (share.steps, share.optimizer.steps)
        if theirs != ours and not (whole.changed and whole.step == share.steps):
            raise WireError(f"{whole} came at step and optimizer's step {ours}")
        return [TensorSlot(tensor) for tensor in tensors]

    def take_whole(self, whole: Whole, tensors: list[Tensor]) -> Assembled:
        """Pass a whole on that came, and go on with it where it changed; return it.

        Raises:
            TransportError: there is nobody to pass it on to, or something in it isn't finite.
        """
        share = self.share
        _check_finite(tensors, whole)
        self.send("down", whole, tensors)
        assembled = replace(
            self.assembled(tensors, state=True, steps=whole.optimizer_steps),
            version=whole.version,
            place=whole.place,
        )
        if whole.changed:
            share.load(assembled.vector_D, assembled.optimizer or {})
        return assembled

    def assembled(self, vectors: list[Tensor], *, state: bool, steps: int | None = None) -> Assembled:
        """Return whole vectors under their names.

        Args:
            vectors: parameters, and the optimizer's.
            state: whether there are any of the optimizer's.
            steps: of the optimizer; None for this share's.
        """
        share = self.share
        vector_D, *others = (tensor.numpy() for tensor in vectors)
        optimizer: Arrays = dict(zip(share.vector_names, others, strict=True)) if state else {}
        done = share.optimizer.steps if steps is None else steps
        optimizer["optimizer.steps"] = np.array(done, dtype=np.int64)
        return Assembled(share.steps, vector_D, optimizer if state else None)

    def _vectors(self, way: Way, wanted: Slice, size: int, *, state: bool) -> list[Tensor]:
        """Receive vectors of the same length.

        Raises:
            WireError: they are of another step, or something in them isn't finite.
        """
        tensors = self._empty(size, state=state)
        assert self._links is not None  # noqa: S101 - or there is nobody to hear from
        receive(self._links, way, wanted, lambda: [TensorSlot(tensor) for tensor in tensors], self._timeout_s)
        _check_finite(tensors, wanted)
        return tensors

    def _empty(self, size: int, *, state: bool) -> list[Tensor]:
        share = self.share
        vectors = 1 + (len(share.vector_names) if state else 0)
        return [torch.empty(size, dtype=share.parts.dtype) for _ in range(vectors)]

    def check_opening(self, opening: Opening) -> None:
        """Check that a minibatch fits this pipeline, and that it is the next one.

        Raises:
            WireError: it isn't.
        """
        share = self.share
        theirs = opening.generation, opening.step, opening.precision
        ours = self.generation, share.steps, share.parts.precision
        if theirs != ours:
            raise WireError(f"generation, step and precision are {ours} here, a minibatch has {theirs}")
        length, parts = opening.length, opening.parts
        if not 0 < length <= share.parts.most_rows or parts != share.plan.parts(length, most=parts):
            raise WireError(f"a minibatch of {length} rows in {parts} parts isn't one of this task")


def _check_finite(tensors: list[Tensor], message: Slice | Whole) -> None:
    for tensor in tensors:
        if not all(math.isfinite(end) for end in torch.stack(tensor.aminmax()).tolist()):
            raise WireError(f"the numbers that came with {message} aren't all finite")
