"""A model over several devices of one machine: every rank in this process, one thread and one device each."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic

import torch
from torch import Tensor

from p2pdrl.errors import ConfigError, TransportError
from p2pdrl.pipeline.layers import Peer
from p2pdrl.pipeline.partition import partition
from p2pdrl.pipeline.plan import PipelinePlan
from p2pdrl.rl.engines import EngineOptions, resolve_device
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Minibatch, Objective, Outputs
from p2pdrl.rl.optimizers import Optimizer
from p2pdrl.rl.pipeline.links import ring
from p2pdrl.rl.pipeline.parts import ModelParts, measure_parts
from p2pdrl.rl.pipeline.rank import Pipelined, RankOptions, StageServer
from p2pdrl.rl.pipeline.stage_parameters import StageParameters
from p2pdrl.tensors.optimizers import SGD

__all__ = ["ModelSplit", "SplitEngine", "split_engine"]

_IDLE_TIMEOUT_S = 7 * 24 * 3600.0
"""Closing ends all waits; this is for programs that forget to."""


class ModelSplit(Generic[Outputs]):
    """Implements ``gradients.GradientEngine`` and ``gradients.Stepper``; close it when done.

    At the end of each update the algorithm's own parameters and optimizer have become what they would have
    become without it.

    Args:
        devices: one for each rank; the same one may come twice.
        timeout_s: bound on each wait of one rank for another within a minibatch.
        checkpoint_activations: keep only what comes into a stage, and compute the rest anew.

    Raises:
        ConfigError: there aren't as many devices as ranks.

    Example:
        ::

            split = ModelSplit(trainer.parts(), plan, [torch.device("cuda:0"), torch.device("cuda:1")])
            trainer.engine = trainer.stepper = split
            stats = trainer.step()
    """

    ends_update = False

    scattered = True

    def __init__(
        self,
        parts: ModelParts[Outputs],
        plan: PipelinePlan,
        devices: Sequence[torch.device],
        *,
        timeout_s: float = 600.0,
        checkpoint_activations: bool = False,
        tune: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        say: Callable[[str], None] = lambda _: None,
        make_share: type[StageParameters[Outputs]] = StageParameters,
    ) -> None:
        if len(devices) != plan.ranks:
            raise ConfigError(f"a model over {plan.ranks} devices needs as many, not {len(devices)}")
        links = ring(plan.ranks)
        self.shares = shares = [
            make_share(parts, plan, rank, device, checkpoint_activations=checkpoint_activations)
            for rank, device in enumerate(devices)
        ]
        first = links[0] if plan.ranks > 1 else None
        options: RankOptions = {"generation": 0, "timeout_s": timeout_s, "clock": clock}
        self._head = Pipelined(shares[0], first, state_every=1, tune=tune, say=say, **options)
        self._errors: list[Exception] = []
        servers = [
            StageServer(share, link, idle_timeout_s=_IDLE_TIMEOUT_S, **options)
            for share, link in zip(shares[1:], links[1:], strict=True)
        ]
        self._threads = [
            threading.Thread(
                target=self._serve, args=(server,), name=f"stage {server.share.rank}", daemon=True
            )
            for server in servers
        ]
        for thread in self._threads:
            thread.start()

    def gradients(self, batch: Minibatch, objective: Objective[Outputs]) -> Tensor:
        """Compute the mean gradient; each device keeps its part. See ``Pipelined.gradients``."""
        with self._explained():
            return self._head.gradients(batch, objective)

    def step(
        self,
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
            pass  # closed, or another thread has the error
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


MOST_TUNED = 8
"""Microbatches beyond which ``auto`` doesn't look."""


class Copy(StageParameters[Outputs]):
    """A share whose parameters are stepped by somebody else: it brings gradients, and takes what they become.

    Steps are counted, so that ranks agree about where they are, and change nothing.
    """

    def step(self, squares: float, learning_rate: float, max_grad_norm: float) -> float:
        """Count."""
        del learning_rate, max_grad_norm
        self.steps += 1
        return math.sqrt(squares)

    def take(self, parameters_D: Tensor) -> None:
        """Copy this share's parameters from the whole."""
        for whole, own in self._pieces():
            self.parameters_P[own].copy_(parameters_D[whole])

    def bring(self, gradients_D: Tensor) -> None:
        """Copy this share's gradients to where they belong in the whole."""
        for whole, own in self._pieces():
            gradients_D[whole].copy_(self.gradients_P[own])

    def _pieces(self) -> list[tuple[slice, slice]]:
        pieces, at = [], 0
        for start, stop in self.parts.block_map.spans(self.plan.numbers(self.rank)):
            pieces.append((slice(start, stop), slice(at, at + stop - start)))
            at += stop - start
        return pieces


class SplitEngine(Generic[Outputs]):
    """Implements ``gradients.GradientEngine``; close it when done.

    Args:
        devices: one for each rank; the same one may come twice.
        options: of which checkpointing, ``auto``, clock and words count.

    Raises:
        ConfigError: there aren't as many devices as ranks.
    """

    def __init__(
        self,
        flat: FlatModule,
        parts: ModelParts[Outputs],
        plan: PipelinePlan,
        devices: Sequence[torch.device],
        options: EngineOptions,
    ) -> None:
        self._flat = flat
        self._optimizer = Optimizer(SGD(), flat)  # has no state to be copied
        self._split = ModelSplit(
            replace(parts, optimizer=self._optimizer),
            plan,
            devices,
            checkpoint_activations=options.checkpoint_activations,
            tune=options.microbatches == "auto",
            clock=options.clock,
            say=options.say,
            make_share=Copy,
        )

    def gradients(self, batch: Minibatch, objective: Objective[Outputs]) -> Tensor:
        """See ``GradientEngine.gradients``."""
        copies = [share for share in self._split.shares if isinstance(share, Copy)]
        for copy in copies:
            copy.take(self._flat.parameters_D)
        terms = self._split.gradients(batch, objective)  # no rank is behind it: their sums are in
        for copy in copies:
            copy.bring(self._flat.gradients_D)
        self._split.step(self._optimizer, learning_rate=0.0, max_grad_norm=1.0, samples=0, left=1)
        return terms

    def metrics(self) -> dict[str, float]:
        """Return the number of microbatches and of stages, and the figures of the first device."""
        return self._split.metrics()

    def close(self) -> None:
        """End the devices' threads."""
        self._split.close()


def split_engine(
    flat: FlatModule, parts: ModelParts[Outputs], options: EngineOptions
) -> SplitEngine[Outputs]:
    """Return the engine over ``options.split_devices``, cut where they say, or balanced by measured times.

    Raises:
        ConfigError: a device isn't there, or the model can't be cut like that.
    """
    count, blocks = len(options.split_devices), len(parts.blocks)
    if count > blocks:
        raise ConfigError(
            f"node.learner.split_devices: {count} devices are more than the {blocks} blocks that this "
            f"network has ({', '.join(parts.block_map.titles)}); name {blocks} at most"
        )
    cuts = options.split_cuts
    if cuts and (
        len(cuts) != count - 1 or list(cuts) != sorted({*cuts}) or not 0 < cuts[0] <= cuts[-1] < blocks
    ):
        raise ConfigError(
            f"node.learner.split_cuts: {count} devices and {blocks} blocks need {count - 1} numbers that "
            f"rise from 1 to at most {blocks - 1}, not {list(cuts)}"
        )
    try:
        devices = [resolve_device(name) for name in options.split_devices]
    except ConfigError as error:
        raise ConfigError(f"node.learner.split_devices: {error}") from error
    microbatches = MOST_TUNED if options.microbatches == "auto" else options.microbatches
    if not cuts:
        layers = measure_parts(parts, microbatches, clock=options.clock)  # all devices are taken to be alike
        cuts = partition(layers, [Peer(str(device)) for device in devices]).cuts
    plan = PipelinePlan(blocks, tuple(cuts), "1f1b", microbatches, count)
    options.say(f"the model's {blocks} blocks are cut before {', '.join(map(str, cuts))} for {count} devices")
    return SplitEngine(flat, parts, plan, devices, options)
