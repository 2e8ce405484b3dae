"""What every rank but the first does: wait for minibatches, compute its part of them, step, hand over.

The first rank is ``pipelined``'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Generic

from torch import Tensor

from p2pdrl.errors import WireError
from p2pdrl.rl.gradients import Outputs
from p2pdrl.rl.pipeline.links import Links
from p2pdrl.rl.pipeline.messages import Activation, Message, StepMessage, UpdateOver, Whole
from p2pdrl.rl.pipeline.rank import Assembled, Rank
from p2pdrl.rl.pipeline.runner import Recorder, Running
from p2pdrl.rl.pipeline.stage_parameters import StageParameters
from p2pdrl.rl.pipeline.tensor_specs import TensorSlot

__all__ = ["StageServer"]


class StageServer(Generic[Outputs]):
    """One rank of a pipeline, but the first.

    Args:
        share: of the model.
        links: to the neighbours.
        generation: of the pipeline, the same on all ranks.
        timeout_s: bound on each wait within a minibatch.
        idle_timeout_s: bound on the wait for the next update: the first rank makes experience meanwhile.
        within_s: bound on the wait for another minibatch of the same update; None for the same, where nobody
            says which is an update's last.
        clock: seconds, monotonic; for figures only.
        runner: computes this rank's gradients; None for one that does so over the links.
        recorder: of what this rank does; None for one of its own.

    Attributes:
        behind: updates since the whole was spread last.
    """

    def __init__(
        self,
        share: StageParameters[Outputs],
        links: Links,
        *,
        generation: int,
        timeout_s: float,
        idle_timeout_s: float,
        within_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        runner: Running | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._rank = Rank(share, links, generation, timeout_s, clock, runner=runner, recorder=recorder)
        self._idle_timeout_s = idle_timeout_s
        self._within_s = idle_timeout_s if within_s is None else within_s
        self.behind = 0

    @property
    def share(self) -> StageParameters[Outputs]:
        """What this rank holds, whatever has become of the pipeline."""
        return self._rank.share

    def serve(self) -> Assembled | None:
        """Take part in one update, until the first rank says that it is over.

        Returns:
            The whole model's state, where the first rank has it spread; None where it only took the slices.
            With ``last`` this was the pipeline's last update. With step 0 it wasn't an update, but what all
            are to begin with.

        Raises:
            TransportError: a neighbour is gone, late or talks nonsense. The pipeline has ended then.
        """
        rank = self._rank
        with rank.whole_or_broken():
            tensors: list[Tensor] = []
            over = self._next(tensors, self._idle_timeout_s)
            while isinstance(over, Activation):
                rank.send("up", rank.gather(rank.runner.run()))
                rank.step(rank.receive("down", StepMessage, rank.bare))
                over = self._next(tensors, self._within_s)
            if isinstance(over, Whole):
                return rank.take_whole(over, tensors)
            rank.send("down", over)
            for number, vectors in rank.slices(state=over.state):
                rank.send("up", rank.slice(number), vectors)
            self.behind += not over.last
            if not over.spread:
                return None
            whole = replace(rank.receive_whole(), last=over.last)
            self.behind = 0
            return whole

    @property
    def recorder(self) -> Recorder:
        """What this rank has done lately."""
        return self._rank.recorder

    def metrics(self) -> dict[str, float]:
        """Return what the monitors plot about this rank."""
        return self._rank.metrics()

    def close(self) -> None:
        """End this rank's part; from any thread."""
        self._rank.close()

    def _next(self, tensors: list[Tensor], timeout_s: float) -> Activation | UpdateOver | Whole:
        """Wait for the next minibatch and begin it, or learn that there is none.

        Before the first one a whole may come, which goes into ``tensors``.
        """

        def room(message: Message) -> list[TensorSlot]:
            if isinstance(message, UpdateOver):
                return self._rank.bare(message)
            if isinstance(message, Whole) and message.changed and message.step == 0:
                tensors[:] = self._rank.whole_tensors()
                return self._rank.room(message, tensors)
            own = self.share.rank
            opening = message.opening if isinstance(message, Activation) else None
            if opening is None or message != Activation(own, 0, opening):
                raise WireError(f"{str(message)[:200]} came instead")
            self._rank.check_opening(opening)
            self._rank.runner.begin(opening)
            return self._rank.runner.room(own, 0)

        message = self._rank.receive_any("down", room, timeout_s, "the next minibatch")
        assert isinstance(message, Activation | UpdateOver | Whole)  # noqa: S101 - checked above
        return message
