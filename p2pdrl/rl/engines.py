"""How a node computes its gradients: precision, activation checkpointing, microbatches.

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

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from p2pdrl.config.fields import Microbatches, Precision
from p2pdrl.rl.distributions import PolicyOutputs
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Accumulated, Forward, GradientEngine, Outputs, WholeBatch
from p2pdrl.rl.networks.lstm import RecurrentContext
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.sequential import HeadsBlock, blocks
from p2pdrl.rl.tuned_gradients import Tuned

__all__ = ["DEFAULT", "EngineOptions", "make_engine", "module_forward", "policy_forward"]


def policy_forward(
    policy: ActorCritic, precision: Precision = "float32", *, checkpoint_activations: bool = False
) -> Forward[PolicyOutputs]:
    """Return what runs a policy, whole or block by block."""
    run: Forward[PolicyOutputs] = _checkpointed(policy) if checkpoint_activations else policy.outputs
    return run if precision == "float32" else _in_bf16(run, _float32_outputs)


def module_forward(
    layers: Sequence[nn.Module], precision: Precision = "float32", *, checkpoint_activations: bool = False
) -> Forward[Tensor]:
    """Return what runs layers one after the other, each one tensor in, one out; they remember nothing."""

    def run(x: Tensor, _: RecurrentContext) -> Tensor:
        for layer in layers[:-1]:
            x = _checkpoint(layer, x) if checkpoint_activations else layer(x)
        output: Tensor = layers[-1](x)
        return output

    return run if precision == "float32" else _in_bf16(run, Tensor.float)


def _checkpointed(policy: ActorCritic) -> Forward[PolicyOutputs]:
    *inner, heads = blocks(policy)
    assert isinstance(heads, HeadsBlock)  # noqa: S101 - the last block always is

    def run(x: Tensor, context: RecurrentContext) -> PolicyOutputs:
        for block in inner:
            x = _checkpoint(block, x, context)
        return heads.unpack(heads(x, context))

    return run


def _checkpoint(block: nn.Module, *arguments: Tensor | RecurrentContext) -> Tensor:
    # nothing is random inside, so the generator's state needn't be kept
    output: Tensor = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
    return output


def _in_bf16(run: Forward[Outputs], to_float32: Callable[[Outputs], Outputs]) -> Forward[Outputs]:
    def in_bf16(inputs: Tensor, context: RecurrentContext) -> Outputs:
        with torch.autocast(inputs.device.type, torch.bfloat16):
            outputs = run(inputs, context)
        return to_float32(outputs)

    return in_bf16


def _float32_outputs(outputs: PolicyOutputs) -> PolicyOutputs:
    return PolicyOutputs(outputs.policy.float(), outputs.values.float(), outputs.log_std)


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
