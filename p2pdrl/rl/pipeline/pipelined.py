"""The first rank of a pipeline: the gradient engine and stepper of whoever learns by it.

It computes what the first stage computes and asks the ranks below for the rest; the gradient and the step
are those of the whole model. An algorithm sees an engine and a stepper; both must be this one, since the
gradients of the other stages never come here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic

import msgspec
import torch
from torch import Tensor

from p2pdrl.rl.flat import FlatSpan
from p2pdrl.rl.gradients import Minibatch, Objective, Outputs, cut
from p2pdrl.rl.optimizers import Optimizer
from p2pdrl.rl.pipeline.links import Links
from p2pdrl.rl.pipeline.messages import Opening, StepMessage, Sums, UpdateOver
from p2pdrl.rl.pipeline.rank import Assembled, Rank
from p2pdrl.rl.pipeline.runner import Recorder, Running
from p2pdrl.rl.pipeline.stage_parameters import StageParameters
from p2pdrl.rl.tuned_gradients import Tuner

__all__ = ["Pipelined"]


class Pipelined(Generic[Outputs]):
    """Implements ``gradients.GradientEngine`` and ``stepping.Stepper``.

    While an update runs, the vector that the policy acts with stays as it was; its end fetches what has
    become of it (``collect``). So after an error that vector is the last whole one, and every
    ``stage_parameters`` has the state after its own last step.

    Args:
        share: of the first rank.
        links: to the neighbours; None where this rank is all.
        generation: of the pipeline, the same on all ranks.
        timeout_s: bound on each wait for a message.
        state_every: with an update's last ``step``, fetch the parameters to where the algorithm has its own,
            and after each so many updates the optimizer's state. None leaves all that to ``collect``.
        spread: whenever the optimizer's state is fetched so, all ranks get the whole.
        hold: they get it when ``give`` is called, before anything else: something may be made of it first.
        tune: measure numbers of microbatches up to the plan's, and stay with the fastest (``tuner``).
        clock: seconds, monotonic; what tuning measures with.
        say: told what tuning picked.
        runner: computes this rank's gradients; None for one that does so over the links.
        recorder: of what this rank does; None for one of its own.

    Attributes:
        ends_update: false: all peers that step with it do the same.
        held: with ``hold``, what is to be given; the other ranks wait for it.
    """

    ends_update = False

    def __init__(
        self,
        share: StageParameters[Outputs],
        links: Links | None,
        *,
        generation: int,
        timeout_s: float,
        state_every: int | None = None,
        spread: bool = False,
        hold: bool = False,
        tune: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        say: Callable[[str], None] = lambda _: None,
        runner: Running | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._rank = Rank(share, links, generation, timeout_s, clock, runner=runner, recorder=recorder)
        self._sums: Sums | None = None
        self._microbatches = share.plan.microbatches
        self._tuner = Tuner(share.plan.microbatches) if tune else None
        self._clock = clock
        self._state_every = state_every
        self._spread = spread
        self._hold = hold
        self.held: Assembled | None = None
        self._updates = 0
        self._began_s = 0.0
        self._say = say

    @property
    def share(self) -> StageParameters[Outputs]:
        """What this rank holds, whatever has become of the pipeline."""
        return self._rank.share

    def gradients(self, batch: Minibatch, objective: Objective[Outputs]) -> Tensor:
        """Compute the mean gradient; each rank keeps its own part of it for ``step``.

        Returns:
            The objective's terms as means over the rows.

        Raises:
            TransportError: a neighbour is gone, late or talks nonsense. The pipeline has ended then.
            LayoutMismatchError: the batch isn't what the parts promised.
        """
        rank, share = self._rank, self.share
        if self._sums is not None:
            raise RuntimeError("a pipeline's gradient is to be stepped with by the pipeline itself")
        share.parts.check(batch)
        begin, tuner = self._clock(), self._tuner
        self._began_s = begin
        most = share.plan.microbatches if tuner is None else tuner.microbatches
        batches = cut(batch, share.plan.parts(len(batch.inputs), most=most))
        self._microbatches = len(batches)
        opening = Opening(
            generation=rank.generation,
            step=share.steps,
            rows=batch.rows,
            length=len(batch.inputs),
            parts=len(batches),
            precision=share.parts.precision,
            objective=msgspec.msgpack.encode(objective),
        )
        with rank.whole_or_broken():
            rank.runner.begin(opening, batches)
            self._sums = rank.gather(rank.runner.run())
        if tuner is not None and not tuner.done:
            self._measured(tuner, (self._clock() - begin) / max(batch.rows, 1))
        return torch.tensor(self._sums.terms, dtype=share.parts.dtype, device=batch.inputs.device)

    def step(
        self,
        flat: FlatSpan,
        optimizer: Optimizer,
        *,
        learning_rate: float,
        max_grad_norm: float,
        samples: int,
        left: int,
    ) -> float:
        """Step on all ranks with the gradient that ``gradients`` left there; see ``Stepper.step``.

        Args:
            flat: the whole vector; not touched but at the end of an update.
            optimizer: likewise.
            learning_rate: after annealing.
            max_grad_norm: bound on the norm of the whole gradient.
            samples: not used.
            left: gradients of the same update that come after this one.

        Raises:
            TransportError: as in ``gradients``.
        """
        del samples
        sums, self._sums = self._sums, None
        if sums is None:
            raise RuntimeError("there is no gradient of this pipeline to step with")
        took_s = self._clock() - self._began_s
        with self._rank.whole_or_broken():
            norm = self._rank.step(StepMessage(sums.step, sums.squares, learning_rate, max_grad_norm, took_s))
        if left == 0 and self._state_every is not None:
            self._updates += 1
            state = self._updates % self._state_every == 0
            spread = state and self._spread
            whole = self.fetch(state=state, spread=spread)
            if spread and self._hold:
                self.held = whole
            elif spread:
                self.give(whole)
            flat.set_(whole.vector_D)
            if whole.optimizer is not None:
                optimizer.load(whole.optimizer)
        return norm

    def collect(self, *, state: bool, spread: bool = False) -> Assembled:
        """End the update: fetch the other ranks' slices and put them together.

        Args:
            state: with the optimizer's state.
            spread: all ranks get what was put together; needs the state.

        Raises:
            TransportError: as in ``gradients``.
        """
        whole = self.fetch(state=state, spread=spread)
        if spread:
            self.give(whole)
        return whole

    def fetch(self, *, state: bool, spread: bool = False, last: bool = False) -> Assembled:
        """Do what ``collect`` does, but leave the spreading to ``give``, which is to follow.

        Args:
            state: as in ``collect``.
            spread: likewise; all ranks wait for ``give``.
            last: the pipeline ends with this; the other ranks hear of it.

        Raises:
            TransportError: as in ``gradients``.
        """
        if spread and not state:
            raise ValueError("what is spread must have the optimizer's state")
        rank, share = self._rank, self.share
        parts = share.parts
        with rank.whole_or_broken():
            rank.send("down", UpdateOver(share.steps, state, spread, last))
            whole: list[Tensor] = []
            for number, vectors in rank.slices(state=state):
                whole = whole or [
                    torch.empty(parts.block_map.layout.size, dtype=parts.dtype) for _ in vectors
                ]
                for vector_P, vector_D in zip(vectors, whole, strict=True):
                    parts.block_map.put(vector_P.numpy(), vector_D.numpy(), share.plan.numbers(number))
            return rank.assembled(whole, state=state)

    def give(self, whole: Assembled, *, changed: bool = False) -> None:
        """Let all ranks have what was fetched; its arrays stay as they are until it has arrived.

        Args:
            whole: with the optimizer's state.
            changed: whether it became something else since; then all ranks go on with that, this one too.

        Raises:
            TransportError: as in ``gradients``.
        """
        self.held = None
        with self._rank.whole_or_broken():
            self._rank.send_whole(whole, changed=changed)
            if changed:
                self.share.load(whole.vector_D, whole.optimizer or {})

    @property
    def recorder(self) -> Recorder:
        """What this rank has done lately."""
        return self._rank.recorder

    def metrics(self) -> dict[str, float]:
        """Return the last number of microbatches, and what ``Rank.metrics`` says."""
        return {"microbatches": float(self._microbatches), **self._rank.metrics()}

    def close(self) -> None:
        """End the pipeline; from any thread."""
        self._rank.close()

    def _measured(self, tuner: Tuner, seconds_per_row: float) -> None:
        tuner.took(seconds_per_row)
        if tuner.done:
            self._say(f"microbatches = {tuner.microbatches} of {sorted(tuner.medians_s)} is the fastest")
