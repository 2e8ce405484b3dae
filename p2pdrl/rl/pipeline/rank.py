"""What the first rank and all others do alike once the gradients are there: sums, steps and slices.

Sums go up and end at the first rank, which knows the whole gradient's norm then; the step that follows goes
down, and every rank passes it on before it steps itself. **So ranks may differ by one step**, from the moment
when the first rank sends a ``StepMessage`` until the last one has it: a link that breaks in between leaves
some ranks with ``StageParameters.steps`` one higher than others. Slices carry that number: those of one
number make a whole, and where numbers differ the pipeline goes back to the last state that was put together.

Shape suffixes: D parameters of the whole model, P of one rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, NotRequired, TypedDict, TypeVar, Unpack

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from p2pdrl.errors import PeerUnreachableError, WireError
from p2pdrl.pipeline.trace import TraceSpan
from p2pdrl.rl.gradients import Minibatch, Objective, Outputs, cut
from p2pdrl.rl.optimizers import Optimizer
from p2pdrl.rl.pipeline.links import Links, Room, Way, receive, receive_any, receive_kind
from p2pdrl.rl.pipeline.messages import (
    Activation,
    Message,
    Opening,
    Slice,
    StepMessage,
    Sums,
    TensorSlot,
    UpdateOver,
    Whole,
)
from p2pdrl.rl.pipeline.runner import Recorder, Running, ScheduleRunner
from p2pdrl.rl.pipeline.stage_parameters import StageParameters
from p2pdrl.rl.tuned_gradients import Tuner

__all__ = ["Assembled", "Pipelined", "Rank", "RankOptions", "StageServer"]

# ruff: noqa: N815 (fields carry shape suffixes)


Vector = npt.NDArray[np.float32]
Arrays = dict[str, npt.NDArray[Any]]

_Kind = TypeVar("_Kind", bound=Message)

_MOST_RATE = 1e30
"""Optimizers multiply learning rates by numbers that must fit in float32."""


@dataclass(frozen=True)
class Assembled:
    """All slices, put together.

    Attributes:
        optimizer: the optimizer's arrays, as ``Optimizer.state`` names them; None where nobody asked.
        version: policy version that the first rank gave it, where it was spread.
        position: likewise its trainer's in the data, as ``Trainer.position`` counts.
        last: the pipeline ends with this.
    """

    step: int
    vector_D: Vector
    optimizer: Arrays | None
    version: int = 0
    position: int = 0
    last: bool = False


class RankOptions(TypedDict):
    """What every rank takes by name; see ``Rank``."""

    generation: int
    timeout_s: float
    clock: NotRequired[Callable[[], float]]
    runner: NotRequired[Running | None]
    recorder: NotRequired[Recorder | None]


class Rank(Generic[Outputs]):
    """A share and its links: `Pipelined` or `StageServer`. After an error it is of no use, its links closed.

    Args:
        links: to the neighbours; None where one rank is all.
        generation: of the pipeline.
        timeout_s: bound on each wait for a message, but for that for the first rank's next minibatch.
        clock: seconds, monotonic; for ``runner``'s figures.
        runner: computes gradients; None for one that does so over the links.
        recorder: of what this rank does; None for one of its own.
    """

    def __init__(
        self,
        share: StageParameters[Outputs],
        links: Links | None,
        *,
        generation: int,
        timeout_s: float,
        clock: Callable[[], float] = time.perf_counter,
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
    def _last(self) -> bool:
        """Whether there is no rank below."""
        return self.share.rank == self.share.plan.ranks - 1

    @contextmanager
    def _whole_or_broken(self) -> Iterator[None]:
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
    def _noted(self, what: str) -> Iterator[None]:
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

    def _send(self, way: Way, message: Message, tensors: list[Tensor] | None = None) -> None:
        """Send to a neighbour, if there is one that way: not from the last rank down to the first."""
        if self._links is not None and not (way == "down" and self._last):
            self._links.send(way, message, tensors or [])

    def _receive(
        self,
        way: Way,
        kind: type[_Kind],
        room: Callable[[_Kind], list[TensorSlot]],
        waits: int = 1,
    ) -> _Kind:
        """Receive from a neighbour; see ``links.receive_kind``. Who is told later may wait several times."""
        assert self._links is not None  # noqa: S101 - or there is nobody to hear from
        return receive_kind(self._links, way, kind, room, waits * self._timeout_s)

    def _receive_any(self, way: Way, room: Room, timeout_s: float, what: str) -> Message:
        """Receive from a neighbour; see ``links.receive_any``."""
        assert self._links is not None  # noqa: S101 - or there is nobody to hear from
        return receive_any(self._links, way, room, timeout_s, what)

    def _gather(self, terms: Tensor | None) -> Sums:
        """Return the sums of this rank and all below, once they are there."""
        with self._noted("sums"):
            begin_s = self._clock()
            squares = self.share.squares()
            self._squares_s = self._clock() - begin_s
            if terms is not None:
                return Sums(self.share.steps, squares, tuple(terms.tolist()))
            below = self._receive("up", Sums, self._sums_room)
            return Sums(self.share.steps, squares + below.squares, below.terms)

    def _step_by(self, step: StepMessage) -> float:
        """Pass a step on, and step; return the gradient's norm."""
        begin_s = self._clock()
        with self._noted("step"):
            self._send("down", step)
            norm = self.share.step(step.squares, step.learning_rate, step.max_grad_norm)
        step_s, runner = self._clock() - begin_s, self.runner
        self._busy_s += runner.ran_s - runner.waited_s + self._squares_s + step_s
        self._whole_s += step.took_s + step_s
        runner.ran_s = runner.waited_s = 0.0
        return norm

    def _bare(self, message: Sums | StepMessage | UpdateOver) -> list[TensorSlot]:
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

    def _sums_room(self, sums: Sums) -> list[TensorSlot]:
        """Do what ``bare`` does; the algorithm counts on as many terms as its objective has."""
        if len(sums.terms) != self.share.parts.objective.terms:
            raise WireError(f"{sums} should have {self.share.parts.objective.terms} terms")
        return self._bare(sums)

    def _slices(self, *, state: bool) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield the vectors of each rank from this one on, with its number."""
        share = self.share
        yield share.rank, share.vectors(state=state)
        for rank in range(share.rank + 1, share.plan.ranks):
            size = share.parts.block_map.size(share.plan.numbers(rank))
            yield rank, self._vectors("up", self._slice(rank), size, state=state)

    def _slice(self, rank: int) -> Slice:
        """Return what comes with a rank's vectors."""
        return Slice(rank, self.share.steps, self.share.optimizer.steps)

    def _send_whole(self, assembled: Assembled, *, changed: bool = False) -> None:
        """Tell the ranks below what was put together; or with ``changed``, what all are to go on with."""
        optimizer = assembled.optimizer or {}
        vectors = [assembled.vector_D, *(optimizer[name] for name in self.share.vector_names)]
        steps = int(optimizer["optimizer.steps"])
        whole = Whole(self.share.steps, steps, assembled.version, assembled.position, changed)
        self._send("down", whole, [torch.from_numpy(vector) for vector in vectors])

    def _receive_whole(self) -> Assembled:
        """Return what the first rank has put together, and pass it on; go on with it where it changed."""
        tensors = self._whole_tensors()
        # it comes whole to one rank after the other
        whole = self._receive("down", Whole, lambda whole: self._room(whole, tensors), waits=self.share.rank)
        return self._take_whole(whole, tensors)

    def _whole_tensors(self) -> list[Tensor]:
        """Return memory for a whole, with the optimizer's."""
        return self._empty(self.share.parts.block_map.layout.size, state=True)

    def _room(self, whole: Whole, tensors: list[Tensor]) -> list[TensorSlot]:
        """Return room for a whole."""
        share = self.share
        theirs, ours = (whole.step, whole.optimizer_steps), (share.steps, share.optimizer.steps)
        if theirs != ours and not (whole.changed and whole.step == share.steps):
            raise WireError(f"{whole} came at step and optimizer's step {ours}")
        return [TensorSlot(tensor) for tensor in tensors]

    def _take_whole(self, whole: Whole, tensors: list[Tensor]) -> Assembled:
        """Pass a whole on that came, and go on with it where it changed; return it.

        Raises:
            TransportError: there is nobody to pass it on to, or something in it isn't finite.
        """
        share = self.share
        _check_finite(tensors, whole)
        self._send("down", whole, tensors)
        assembled = replace(
            self._assembled(tensors, state=True, steps=whole.optimizer_steps),
            version=whole.version,
            position=whole.position,
        )
        if whole.changed:
            share.load(assembled.vector_D, assembled.optimizer or {})
        return assembled

    def _assembled(self, vectors: list[Tensor], *, state: bool, steps: int | None = None) -> Assembled:
        """Return whole vectors (parameters, with ``state`` the optimizer's too) under their names.

        ``steps`` are the optimizer's; None for this share's.
        """
        share = self.share
        vector_D, *others = (tensor.numpy() for tensor in vectors)
        optimizer: Arrays = dict(zip(share.vector_names, others, strict=True)) if state else {}
        done = share.optimizer.steps if steps is None else steps
        optimizer["optimizer.steps"] = np.array(done, dtype=np.int64)
        return Assembled(share.steps, vector_D, optimizer if state else None)

    def _vectors(self, way: Way, wanted: Slice, size: int, *, state: bool) -> list[Tensor]:
        """Receive vectors of the same length."""
        tensors = self._empty(size, state=state)
        assert self._links is not None  # noqa: S101 - or there is nobody to hear from
        receive(self._links, way, wanted, lambda: [TensorSlot(tensor) for tensor in tensors], self._timeout_s)
        _check_finite(tensors, wanted)
        return tensors

    def _empty(self, size: int, *, state: bool) -> list[Tensor]:
        share = self.share
        vectors = 1 + (len(share.vector_names) if state else 0)
        return [torch.empty(size, dtype=share.parts.dtype) for _ in range(vectors)]

    def _check_opening(self, opening: Opening) -> None:
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


class StageServer(Rank[Outputs]):
    """Any rank but the first: waits for minibatches, computes its part of them, steps, hands over.

    Args:
        idle_timeout_s: bound on the wait for the next update: the first rank makes experience meanwhile.
        within_s: bound on the wait for another minibatch of the same update; None for the same, where nobody
            says which is an update's last.

    Attributes:
        behind: updates since the whole was spread last.
    """

    def __init__(
        self,
        share: StageParameters[Outputs],
        links: Links,
        *,
        idle_timeout_s: float,
        within_s: float | None = None,
        **options: Unpack[RankOptions],
    ) -> None:
        super().__init__(share, links, **options)
        self._idle_timeout_s = idle_timeout_s
        self._within_s = idle_timeout_s if within_s is None else within_s
        self.behind = 0

    def serve(self) -> Assembled | None:
        """Take part in one update, until the first rank says that it is over.

        Returns:
            The whole model's state, where the first rank has it spread; None where it only took the slices.
            With ``last`` this was the pipeline's last update. With step 0 it wasn't an update, but what all
            are to begin with.

        Raises:
            TransportError: a neighbour is gone, late or sent what doesn't fit. The pipeline has ended then.
        """
        with self._whole_or_broken():
            tensors: list[Tensor] = []
            over = self._next(tensors, self._idle_timeout_s)
            while isinstance(over, Activation):
                self._send("up", self._gather(self.runner.run()))
                self._step_by(self._receive("down", StepMessage, self._bare))
                over = self._next(tensors, self._within_s)
            if isinstance(over, Whole):
                return self._take_whole(over, tensors)
            self._send("down", over)
            for number, vectors in self._slices(state=over.state):
                self._send("up", self._slice(number), vectors)
            self.behind += not over.last
            if not over.spread:
                return None
            whole = replace(self._receive_whole(), last=over.last)
            self.behind = 0
            return whole

    def _next(self, tensors: list[Tensor], timeout_s: float) -> Activation | UpdateOver | Whole:
        """Wait for the next minibatch and begin it, or learn that there is none.

        Before the first one a whole may come, which goes into ``tensors``.
        """

        def room(message: Message) -> list[TensorSlot]:
            if isinstance(message, UpdateOver):
                return self._bare(message)
            if isinstance(message, Whole) and message.changed and message.step == 0:
                tensors[:] = self._whole_tensors()
                return self._room(message, tensors)
            own = self.share.rank
            opening = message.opening if isinstance(message, Activation) else None
            if opening is None or message != Activation(own, 0, opening):
                raise WireError(f"{str(message)[:200]} came instead")
            self._check_opening(opening)
            self.runner.begin(opening)
            return self.runner.room(own, 0)

        message = self._receive_any("down", room, timeout_s, "the next minibatch")
        assert isinstance(message, Activation | UpdateOver | Whole)  # noqa: S101 - checked above
        return message


class Pipelined(Rank[Outputs]):
    """The first rank; implements ``gradients.GradientEngine`` and ``gradients.Stepper``.

    It computes what the first stage computes and asks the ranks below for the rest; the gradient and the step
    are those of the whole model. Engine and stepper must both be this one, since the gradients of the other
    stages never come here.

    While an update runs, the vector that the policy acts with stays as it was; its end fetches what has
    become of it (``collect``). So after an error that vector is the last whole one, and every
    ``stage_parameters`` has the state after its own last step.

    Args:
        state_every: with an update's last ``step``, fetch the parameters to where the algorithm has its own,
            and after each so many updates the optimizer's state. None leaves all that to ``collect``.
        spread: whenever the optimizer's state is fetched so, all ranks get the whole.
        hold: they get it when ``give`` is called, before anything else: something may be made of it first.
        tune: measure numbers of microbatches up to the plan's, and stay with the fastest (``tuner``).
        say: told what tuning picked.

    Attributes:
        ends_update: false: all peers that step with it do the same.
        held: with ``hold``, what is to be given; the other ranks wait for it.
    """

    ends_update = False
    scattered = True

    def __init__(
        self,
        share: StageParameters[Outputs],
        links: Links | None,
        *,
        state_every: int | None = None,
        spread: bool = False,
        hold: bool = False,
        tune: bool = False,
        say: Callable[[str], None] = lambda _: None,
        **options: Unpack[RankOptions],
    ) -> None:
        super().__init__(share, links, **options)
        self._sums: Sums | None = None
        self._microbatches = share.plan.microbatches
        self._tuner = Tuner(share.plan.microbatches) if tune else None
        self._state_every = state_every
        self._spread = spread
        self._hold = hold
        self.held: Assembled | None = None
        self._updates = 0
        self._began_s = 0.0
        self._say = say

    def gradients(self, batch: Minibatch, objective: Objective[Outputs]) -> Tensor:
        """Compute the mean gradient; each rank keeps its own part of it for ``step``.

        Returns:
            The objective's terms as means over the rows.

        Raises:
            TransportError: a neighbour is gone, late or sent what doesn't fit. The pipeline has ended then.
            LayoutMismatchError: the batch isn't what the parts promised.
        """
        share = self.share
        if self._sums is not None:
            raise RuntimeError("a pipeline's gradient is to be stepped with by the pipeline itself")
        share.parts.check(batch)
        begin, tuner = self._clock(), self._tuner
        self._began_s = begin
        most = share.plan.microbatches if tuner is None else tuner.microbatches
        batches = cut(batch, share.plan.parts(len(batch.inputs), most=most))
        self._microbatches = len(batches)
        opening = Opening(
            generation=self.generation,
            step=share.steps,
            rows=batch.rows,
            length=len(batch.inputs),
            parts=len(batches),
            precision=share.parts.precision,
            objective=msgspec.msgpack.encode(objective),
        )
        with self._whole_or_broken():
            self.runner.begin(opening, batches)
            self._sums = self._gather(self.runner.run())
        if tuner is not None and not tuner.done:
            self._measured(tuner, (self._clock() - begin) / max(batch.rows, 1))
        return torch.tensor(self._sums.terms, dtype=share.parts.dtype, device=batch.inputs.device)

    def step(
        self,
        optimizer: Optimizer,
        *,
        learning_rate: float,
        max_grad_norm: float,
        samples: int,
        left: int,
    ) -> float:
        """Step on all ranks with the gradient that ``gradients`` left there; see ``Stepper.step``.

        ``optimizer`` is the whole's, not touched but at the end of an update. Errors are those of
        ``gradients``, here and below.
        """
        del samples
        sums, self._sums = self._sums, None
        if sums is None:
            raise RuntimeError("there is no gradient of this pipeline to step with")
        took_s = self._clock() - self._began_s
        with self._whole_or_broken():
            norm = self._step_by(StepMessage(sums.step, sums.squares, learning_rate, max_grad_norm, took_s))
        if left == 0 and self._state_every is not None:
            self._updates += 1
            state = self._updates % self._state_every == 0
            spread = state and self._spread
            whole = self.fetch(state=state, spread=spread)
            if spread and self._hold:
                self.held = whole
            elif spread:
                self.give(whole)
            optimizer.span.set_(whole.vector_D)
            if whole.optimizer is not None:
                optimizer.load(whole.optimizer)
        return norm

    def collect(self, *, state: bool, spread: bool = False) -> Assembled:
        """End the update: fetch the other ranks' slices and put them together.

        ``state`` adds the optimizer's; with ``spread``, which needs it, all ranks get what was put together.
        """
        whole = self.fetch(state=state, spread=spread)
        if spread:
            self.give(whole)
        return whole

    def fetch(self, *, state: bool, spread: bool = False, last: bool = False) -> Assembled:
        """Do what ``collect`` does, but leave the spreading to ``give``, for which all ranks wait.

        With ``last`` the pipeline ends with this, of which the other ranks hear.
        """
        if spread and not state:
            raise ValueError("what is spread must have the optimizer's state")
        share = self.share
        parts = share.parts
        with self._whole_or_broken():
            self._send("down", UpdateOver(share.steps, state, spread, last))
            whole: list[Tensor] = []
            for number, vectors in self._slices(state=state):
                whole = whole or [
                    torch.empty(parts.block_map.layout.size, dtype=parts.dtype) for _ in vectors
                ]
                for vector_P, vector_D in zip(vectors, whole, strict=True):
                    parts.block_map.put(vector_P.numpy(), vector_D.numpy(), share.plan.numbers(number))
            return self._assembled(whole, state=state)

    def give(self, whole: Assembled, *, changed: bool = False) -> None:
        """Let all ranks have what was fetched; its arrays stay as they are until it has arrived.

        ``changed`` says that it became something else since: then all ranks go on with that, this one too.
        """
        self.held = None
        with self._whole_or_broken():
            self._send_whole(whole, changed=changed)
            if changed:
                self.share.load(whole.vector_D, whole.optimizer or {})

    def metrics(self) -> dict[str, float]:
        """Return the last number of microbatches, and what ``Rank.metrics`` says."""
        return {"microbatches": float(self._microbatches), **super().metrics()}

    def _measured(self, tuner: Tuner, seconds_per_row: float) -> None:
        tuner.took(seconds_per_row)
        if tuner.done:
            self._say(f"microbatches = {tuner.microbatches} of {sorted(tuner.medians_s)} is the fastest")
