"""How a node computes its gradients: device, precision, activation checkpointing, microbatches.

The precision is decided once, here, for all of a batch and all of a model: autocast (Micikevicius 2018,
arXiv 1710.03740) runs matrix products in bfloat16, whose range is that of float32, so no loss is scaled. What
comes out is float32 again before an objective sees it. Activation checkpointing (Chen 2016, arXiv 1604.06174)
keeps what passes between blocks and computes what is inside them anew; not the last one's, whose backward
pass comes first. Acting and evaluation run the model as it is, in float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from p2pdrl.config.fields import Microbatches, Precision
from p2pdrl.errors import ConfigError
from p2pdrl.rl.distributions import PolicyOutputs
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Accumulated, Forward, GradientEngine, Outputs, WholeBatch
from p2pdrl.rl.networks.lstm import RecurrentContext
from p2pdrl.rl.policy import ActorCritic, Policy
from p2pdrl.rl.sequential import HeadsBlock, blocks
from p2pdrl.rl.tuned_gradients import Tuned

__all__ = [
    "DEFAULT",
    "EngineOptions",
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

    def in_bf16(inputs: Tensor, context: RecurrentContext) -> Outputs:
        with torch.autocast(inputs.device.type, torch.bfloat16):
            outputs = run(inputs, context)
        floats: Outputs = _float32(outputs)
        return floats

    return in_bf16


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
        clock: seconds, monotonic; what ``auto`` measures with.
        say: told what ``auto`` picked.
    """

    microbatches: Microbatches = 1
    checkpoint_activations: bool = False
    activation_limit_bytes: int = 0
    split_devices: tuple[str, ...] = ()
    split_cuts: tuple[int, ...] = ()
    clock: Callable[[], float] = time.perf_counter
    say: Callable[[str], None] = lambda _: None


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
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} can't be used here ({reason}); try 'cpu' or 'auto'") from error
    return device
