"""A model over several devices of one machine: every rank in this process, one thread and one device each.

The same stages and schedules as between machines, on links that copy from device to device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic

import torch
from torch import Tensor

from p2pdrl.errors import ConfigError, TransportError
from p2pdrl.pipeline.plan import Plan
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Minibatch
from p2pdrl.rl.objectives.objective import Objective, Outputs
from p2pdrl.rl.optimizers import Optimizer
from p2pdrl.rl.stages.memory_links import ring
from p2pdrl.rl.stages.parts import Parts
from p2pdrl.rl.stages.pipelined import Pipelined
from p2pdrl.rl.stages.server import StageServer
from p2pdrl.rl.stages.share import Share

__all__ = ["ModelSplit"]

_IDLE_TIMEOUT_S = 7 * 24 * 3600.0
"""Closing wakes whoever waits; this is for programs that forget to."""


class ModelSplit(Generic[Outputs]):
    """Implements ``gradients.GradientEngine`` and ``stepping.Stepper``; close it when done.

    At the end of each update the algorithm's own parameters and optimizer have become what they would have
    become without it.

    Args:
        parts: of the model, as it is now.
        plan: who holds what.
        devices: one for each rank; the same one may come twice.
        timeout_s: bound on each wait of one rank for another within a minibatch.
        checkpoint_activations: keep only what comes into a stage, and compute the rest anew.
        tune: as of ``Pipelined``.
        clock: likewise.
        say: likewise.
        make_share: makes the share of each rank.

    Attributes:
        ends_update: false.
        shares: of each rank.

    Raises:
        ConfigError: there aren't as many devices as ranks.

    Example:
        ::

            split = ModelSplit(trainer.parts(), plan, [torch.device("cuda:0"), torch.device("cuda:1")])
            trainer.engine = trainer.stepper = split
            stats = trainer.step()
    """

    ends_update = False

    def __init__(
        self,
        parts: Parts[Outputs],
        plan: Plan,
        devices: Sequence[torch.device],
        *,
        timeout_s: float = 600.0,
        checkpoint_activations: bool = False,
        tune: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        say: Callable[[str], None] = lambda _: None,
        make_share: type[Share[Outputs]] = Share,
    ) -> None:
        if len(devices) != plan.ranks:
            raise ConfigError(f"a model over {plan.ranks} devices needs as many, not {len(devices)}")
        links = ring(plan.ranks)
        self.shares = shares = [
            make_share(parts, plan, rank, device, checkpoint_activations=checkpoint_activations)
            for rank, device in enumerate(devices)
        ]
        first = links[0] if plan.ranks > 1 else None
        self._head = Pipelined(
            shares[0],
            first,
            generation=0,
            timeout_s=timeout_s,
            state_every=1,
            tune=tune,
            clock=clock,
            say=say,
        )
        self._errors: list[Exception] = []
        self._threads = [
            threading.Thread(
                target=self._serve,
                args=(
                    StageServer(
                        share,
                        link,
                        generation=0,
                        timeout_s=timeout_s,
                        idle_timeout_s=_IDLE_TIMEOUT_S,
                        clock=clock,
                    ),
                ),
                name=f"stage {share.rank}",
                daemon=True,
            )
            for share, link in zip(shares[1:], links[1:], strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def gradients(self, batch: Minibatch, objective: Objective[Outputs]) -> Tensor:
        """Compute the mean gradient; each device keeps its part. See ``Pipelined.gradients``."""
        with self._explained():
            return self._head.gradients(batch, objective)

    def step(
        self,
        flat: FlatModule,
        optimizer: Optimizer,
        *,
        learning_rate: float,
        max_grad_norm: float,
        samples: int,
        left: int,
    ) -> float:
        """Step on all devices. See ``Pipelined.step``."""
        with self._explained():
            return self._head.step(
                flat,
                optimizer,
                learning_rate=learning_rate,
                max_grad_norm=max_grad_norm,
                samples=samples,
                left=left,
            )

    def metrics(self) -> dict[str, float]:
        """See ``Pipelined.metrics``."""
        return self._head.metrics()

    def close(self) -> None:
        """End all threads. What an unfinished update has done is lost."""
        self._head.close()
        for thread in self._threads:
            thread.join()

    def _serve(self, server: StageServer[Outputs]) -> None:
        try:
            while True:
                server.serve()
        except TransportError:
            pass  # closed, or another thread has an error to tell
        except Exception as error:  # noqa: BLE001 - raised where the trainer runs
            self._errors.append(error)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise what went wrong in a thread instead of saying that its links are closed."""
        try:
            yield
        except TransportError as error:
            self.close()
            if self._errors:
                raise self._errors[0] from error
            raise
