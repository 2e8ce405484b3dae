"""How a node computes its gradients: device, precision, activation checkpointing, microbatches.

The precision is decided once, here, for all of a batch and all of a model: autocast (Micikevicius 2018,
arXiv 1710.03740) runs matrix products in bfloat16, whose range is that of float32, or in float16, whose
smallest numbers are larger than many gradients: there the loss is scaled up and the gradient down again
(``LossScaled``). What comes out is float32 again before an objective sees it. Activation checkpointing (Chen
2016, arXiv 1604.06174) keeps what passes between blocks and computes what is inside them anew; not the last
one's, whose backward pass comes first. Acting and evaluation run the model as it is, in float32.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from p2pdrl.config.fields import Microbatches, Precision
from p2pdrl.errors import ConfigError
from p2pdrl.rl.distributions import PolicyOutputs
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import (
    Accumulated,
    Forward,
    GradientEngine,
    Minibatch,
    Objective,
    Outputs,
    WholeBatch,
)
from p2pdrl.rl.networks.lstm import RecurrentContext
from p2pdrl.rl.optimizers import gradient_norm
from p2pdrl.rl.policy import ActorCritic, Policy
from p2pdrl.rl.sequential import HeadsBlock, blocks
from p2pdrl.rl.tuned_gradients import Tuned

__all__ = [
    "DEFAULT",
    "EngineOptions",
    "LossScaled",
    "has_bf16",
    "in_precision",
    "make_engine",
    "module_forward",
    "policy_forward",
    "resolve_device",
]


def policy_forward(
    policy: Policy,
    precision: Precision = "float32",
    *,
    checkpoint_activations: bool = False,
    whole_unrolls: bool = False,
) -> Forward[Any]:
    """Return what runs a policy, whole or block by block; what isn't an ``ActorCritic`` is one block.

    With ``whole_unrolls`` its batches are environments by steps even where it has no memory.
    """
    run: Forward[Any] = policy.outputs
    if checkpoint_activations and isinstance(policy, ActorCritic):
        run = _checkpointed(policy, time=whole_unrolls)
    return in_precision(run, precision)


def module_forward(
    layers: Sequence[nn.Module], precision: Precision = "float32", *, checkpoint_activations: bool = False
) -> Forward[Tensor]:
    """Return what runs layers one after the other, each one tensor in, one out; they remember nothing."""

    def run(x: Tensor, _: RecurrentContext) -> Tensor:
        for layer in layers[:-1]:
            x = _checkpoint(layer, x) if checkpoint_activations else layer(x)
        output: Tensor = layers[-1](x)
        return output

    return in_precision(run, precision)


def _checkpointed(policy: ActorCritic, *, time: bool) -> Forward[PolicyOutputs]:
    *inner, heads = blocks(policy, time=time)
    assert isinstance(heads, HeadsBlock)  # noqa: S101 - the last block always is

    def run(x: Tensor, context: RecurrentContext) -> PolicyOutputs:
        obs = x
        for block in inner:
            x = _checkpoint(block, x, context)
        outputs = heads.unpack(heads(x, context))
        return outputs._replace(policy=policy.allowed(outputs.policy, obs))

    return run


def _checkpoint(block: nn.Module, *arguments: Tensor | RecurrentContext) -> Tensor:
    # nothing is random inside, so the generator's state needn't be kept
    output: Tensor = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
    return output


def in_precision(run: Forward[Outputs], precision: Precision) -> Forward[Outputs]:
    """Return what runs a model in a precision, with outputs of float32 in any."""
    if precision == "float32":
        return run
    narrow = torch.bfloat16 if precision == "bf16" else torch.float16

    def in_narrow(inputs: Tensor, context: RecurrentContext) -> Outputs:
        with torch.autocast(inputs.device.type, narrow):
            outputs = run(inputs, context)
        floats: Outputs = _float32(outputs)
        return floats

    return in_narrow


def has_bf16(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Tell whether a device computes in bfloat16 itself; where that can't be known, that it does.

    Processors without it are several times slower in bfloat16 than in float32, as each product is made in
    float32 and rounded.

    Args:
        cpuinfo: where Linux tells what the processor knows.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        known = cpuinfo.read_text()
    except OSError:
        return True
    return device.type != "cpu" or "bf16" in known


def _float32(outputs: Any) -> Any:
    """Return a tensor, or what is a tensor in a tuple, in float32; anything else as it is."""
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.is_floating_point() else outputs
    if not isinstance(outputs, tuple | list):
        return outputs
    parts = [_float32(part) for part in outputs]
    return type(outputs)(*parts) if hasattr(outputs, "_fields") else tuple(parts)


@dataclass(frozen=True)
class EngineOptions:
    """What a node chooses about its gradients; ``config.node.LearnerConfig`` explains each.

    Attributes:
        microbatches: how many, or ``auto``.
        checkpoint_activations: compute activations anew instead of keeping them.
        activation_limit_bytes: with ``auto``; 0 is none.
        split_devices: over which the model is cut (``pipeline.model_split``); empty for one device.
        split_cuts: number of the first block of each of them but the first; empty has it balanced.
        compiled: by torch.compile.
        clock: seconds, monotonic; what ``auto`` measures with.
        say: told what ``auto`` picked, and where a precision makes this device slower.
    """

    microbatches: Microbatches = 1
    checkpoint_activations: bool = False
    activation_limit_bytes: int = 0
    split_devices: tuple[str, ...] = ()
    split_cuts: tuple[int, ...] = ()
    compiled: bool = False
    clock: Callable[[], float] = time.perf_counter
    say: Callable[[str], None] = lambda _: None


DEFAULT = EngineOptions()


def make_engine(
    options: EngineOptions, flat: FlatModule, forward: Forward[Outputs], precision: Precision = "float32"
) -> GradientEngine[Outputs]:
    """Return the engine that ``options`` ask for, on ``flat``; for several devices trainers make another.

    Args:
        precision: that ``forward`` runs in.

    Raises:
        ConfigError: it is to be compiled, and there is no compiler.
    """
    if precision == "bf16" and not has_bf16(flat.device):
        options.say(
            f"{flat.device.type} computes without bfloat16 here, which makes it several times slower: "
            "task.gradients.precision = float32 is faster"
        )
    if options.compiled:
        _check_compiler(flat.device)
        forward = torch.compile(forward)
    engine: GradientEngine[Outputs]
    if options.microbatches == "auto":
        engine = Tuned(
            flat,
            forward,
            limit_bytes=options.activation_limit_bytes,
            clock=options.clock,
            say=options.say,
        )
    elif options.microbatches == 1:
        engine = WholeBatch(flat, forward)
    else:
        engine = Accumulated(flat, forward, options.microbatches)
    return LossScaled(flat, engine) if precision == "fp16" else engine


def _check_compiler(device: torch.device) -> None:
    """Raise unless torch.compile will find what it needs: on a processor a C++ compiler."""
    compilers = (os.environ.get("CXX"), "g++", "clang++")
    if device.type == "cpu" and not any(name and shutil.which(name) for name in compilers):
        raise ConfigError(
            "node.learner.compile: torch.compile needs a C++ compiler, and neither g++ nor clang++ is here; "
            "install one (apt install g++), or set it to false"
        )


@dataclass(frozen=True)
class _Scaled(Generic[Outputs]):
    """An objective whose loss is multiplied by ``scale``; its terms aren't."""

    objective: Objective[Outputs]
    scale: float

    @property
    def target_names(self) -> tuple[str, ...]:
        return self.objective.target_names

    @property
    def terms(self) -> int:
        return self.objective.terms

    def over(self, rows: int) -> Self:
        return type(self)(self.objective.over(rows), self.scale)

    def __call__(self, outputs: Outputs, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss, terms = self.objective(outputs, targets)
        return loss * self.scale, terms


class LossScaled(Generic[Outputs]):
    """Computes gradients of the loss times a scale, and divides them by it before anybody sees them.

    The scale doubles after 2,000 gradients in a row without an infinity, and halves with each that has one
    (Micikevicius 2018, section 3.2; its numbers are those of torch's ``GradScaler``). A gradient with an
    infinity is left as it is: the stepper skips it, or leaves it out of the mean with peers'.

    Args:
        engine: computes them.

    Attributes:
        scale: of the next loss.
    """

    FIRST = 65_536.0
    LARGEST = 2.0**24
    CLEAN = 2000
    """Gradients without infinity before the scale doubles."""

    def __init__(self, flat: FlatModule, engine: GradientEngine[Outputs]) -> None:
        self._flat = flat
        self._engine = engine
        self._clean = 0
        self.scale = self.FIRST

    def gradients(self, batch: Minibatch, objective: Objective[Outputs]) -> Tensor:
        """See ``GradientEngine.gradients``."""
        terms = self._engine.gradients(batch, _Scaled(objective, self.scale))
        self._flat.gradients_D.mul_(1.0 / self.scale)
        if not math.isfinite(gradient_norm(self._flat.gradients_D)):
            self.scale = max(0.5 * self.scale, 1.0)
            self._clean = 0
        else:
            self._clean += 1
            if self._clean == self.CLEAN:
                self.scale = min(2.0 * self.scale, self.LARGEST)
                self._clean = 0
        return terms

    def metrics(self) -> dict[str, float]:
        """Return the scale beside the engine's own."""
        return {**self._engine.metrics(), "loss_scale": self.scale}


DEVICES = ("auto", "cpu", "cuda", "mps", "xpu")


def resolve_device(name: str) -> torch.device:
    """Return the device that ``name`` stands for.

    Raises:
        ConfigError: there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        if name.partition(":")[0] not in DEVICES:
            raise ConfigError(
                f"no device is called {name!r}: write auto, cpu, cuda, cuda:1 or mps"
            ) from error
        raise ConfigError(
            f"there is no device {name} here that torch can use: take cpu or auto (`p2pdrl doctor` tells "
            "whether it sees a GPU; torch may be a build without it)"
        ) from error
    return device
