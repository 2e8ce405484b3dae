"""Our stages over any links, for `bench_pipeline.py`: the engine and servers of `rl.pipeline` in trials."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from p2pdrl.rl.distributions import PolicyOutputs
from p2pdrl.rl.pipeline.links import Links
from p2pdrl.rl.pipeline.rank import Pipelined, StageServer
from p2pdrl.rl.pipeline.runner import Running
from p2pdrl.rl.pipeline.stage_parameters import StageParameters
from pipeline_bench.model import OBJECTIVE, Model
from pipeline_bench.talk import LEARNING_RATE, MAX_GRAD_NORM, Stopwatch, Trial

__all__ = ["TIMEOUT_S", "Staged", "WatchedShare"]

TIMEOUT_S = 60.0


class WatchedShare(StageParameters[PolicyOutputs]):
    """Tells when it has stepped.

    Attributes:
        stepped: called with the gradient's norm.
    """

    stepped: Callable[[float], None] | None = None

    def step(self, squares: float, learning_rate: float, max_grad_norm: float) -> float:
        """See `StageParameters.step`."""
        norm = super().step(squares, learning_rate, max_grad_norm)
        if self.stepped is not None:
            self.stepped(norm)
        return norm


class Staged:
    """One rank. See `Contender`.

    Args:
        model: what learns.
        share: this rank's.
    """

    def __init__(self, model: Model, share: WatchedShare) -> None:
        self._model = model
        self._share = share
        self._ranks: dict[Trial, Pipelined[PolicyOutputs] | StageServer[PolicyOutputs]] = {}

    def meet(self, **options: Any) -> None:
        """See `Contender`."""
        raise NotImplementedError

    def links(self, trial: Trial) -> tuple[Links, Running | None]:
        """Return the links to the neighbours for a kind of trial, and what runs minibatches, if not they."""
        raise NotImplementedError

    def prepare(self, trial: Trial) -> None:
        """See `Contender`."""
        self._rank(trial)

    def run(self, trial: Trial, watch: Stopwatch) -> dict[str, Any]:
        """See `Contender`; adds what it costs to collect the parameters once, and computing."""
        rank = self._rank(trial)
        self._share.stepped = watch.stepped
        watch.begin()
        collect_s = 0.0
        if isinstance(rank, Pipelined):
            for _ in range(trial.steps):
                rank.gradients(self._model.batch, OBJECTIVE)
                rank.step(
                    self._model.parts.optimizer,
                    learning_rate=LEARNING_RATE,
                    max_grad_norm=MAX_GRAD_NORM,
                    samples=self._model.batch.rows,
                    left=1,
                )
            after = Stopwatch(self._share.device)
            after.begin()
            rank.collect(state=False)
            after.stepped(0.0)
            collect_s = after.end_s - after.begin_s
        else:
            rank.serve()
        busy_s = sum(
            span.end_s - span.start_s
            for span in rank.recorder.spans(watch.begin_s)
            if span.what in {"forward", "backward", "step"}
        )
        return {"collect_s": collect_s, "busy_s": busy_s}

    def close(self) -> None:
        """See `Contender`."""
        raise NotImplementedError

    def _rank(self, trial: Trial) -> Pipelined[PolicyOutputs] | StageServer[PolicyOutputs]:
        """Return what this rank does in such a trial; all of them have the share and its links in common."""
        share, kind = self._share, dataclasses.replace(trial, steps=0)
        share.plan = dataclasses.replace(share.plan, schedule=trial.schedule, microbatches=trial.microbatches)
        if kind not in self._ranks:
            links, runner = self.links(trial)
            if share.rank == 0:
                self._ranks[kind] = Pipelined(
                    share, links, generation=1, timeout_s=TIMEOUT_S, runner=runner, clock=time.monotonic
                )
            else:
                self._ranks[kind] = StageServer(
                    share,
                    links,
                    generation=1,
                    timeout_s=TIMEOUT_S,
                    idle_timeout_s=TIMEOUT_S,
                    clock=time.monotonic,
                    runner=runner,
                )
        return self._ranks[kind]
