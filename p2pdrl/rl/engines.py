"""From what a node chose to its gradient engine; trainers build through it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from p2pdrl.config.fields import Microbatches
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Accumulated, Forward, GradientEngine, WholeBatch
from p2pdrl.rl.objectives.objective import Outputs
from p2pdrl.rl.tuned_gradients import Tuned

__all__ = ["DEFAULT", "EngineOptions", "make_engine"]


def _nobody(_: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class EngineOptions:
    """What a node chooses about its gradients; ``config.node.LearnerConfig`` explains each.

    Attributes:
        microbatches: how many, or ``auto``.
        checkpoint_activations: compute activations anew instead of keeping them.
        activation_limit_bytes: with ``auto``; 0 is none.
        split_devices: over which the model is cut (``pipeline.model_split``); empty for one device.
        split_cuts: number of the first block of each of them but the first; empty has it balanced.
        clock: seconds, monotonic; what ``auto`` measures with.
        say: told what ``auto`` picked.
    """

    microbatches: Microbatches = 1
    checkpoint_activations: bool = False
    activation_limit_bytes: int = 0
    split_devices: tuple[str, ...] = ()
    split_cuts: tuple[int, ...] = ()
    clock: Callable[[], float] = time.perf_counter
    say: Callable[[str], None] = _nobody


DEFAULT = EngineOptions()


def make_engine(
    options: EngineOptions, flat: FlatModule, forward: Forward[Outputs]
) -> GradientEngine[Outputs]:
    """Return the engine that ``options`` ask for, on ``flat``; for several devices trainers make another."""
    if options.microbatches == "auto":
        return Tuned(
            flat,
            forward,
            limit_bytes=options.activation_limit_bytes,
            clock=options.clock,
            say=options.say,
        )
    if options.microbatches == 1:
        return WholeBatch(flat, forward)
    return Accumulated(flat, forward, options.microbatches)
