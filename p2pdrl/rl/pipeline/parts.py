"""What stages are made of: a model as a chain of blocks, and all that one must know to train it.

Trainers give theirs (``parts``); a rank takes its share of it.

Shape suffix: D parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic

import msgspec
import torch
from torch import Tensor, nn

from p2pdrl.config.fields import Precision
from p2pdrl.errors import ConfigError, LayoutMismatchError, WireError
from p2pdrl.pipeline.layers import Layer
from p2pdrl.rl.actor_critic_q import DeterministicActorCritic
from p2pdrl.rl.distributions import PolicyOutputs
from p2pdrl.rl.envs import Discrete, EnvSpec, MultiBinary, MultiDiscrete
from p2pdrl.rl.gradients import VALID, Minibatch, Objective, Outputs
from p2pdrl.rl.networks.lstm import NO_CONTEXT, RecurrentContext
from p2pdrl.rl.optimizers import Optimizer
from p2pdrl.rl.pipeline.messages import Opening, RowSpec, decode
from p2pdrl.rl.policy import ActorCritic, Policy
from p2pdrl.rl.sequential import (
    Block,
    BlockMap,
    HeadsBlock,
    RowBlock,
    block_map,
    blocks,
    joint_blocks,
    map_blocks,
    measure_blocks,
)

__all__ = ["ModelParts", "joint_parts", "measure_parts", "module_parts", "policy_parts"]

_MOST = 1e30
"""Larger numbers may not fit in float32."""


@dataclass(frozen=True)
class ModelParts(Generic[Outputs]):
    """A model, its optimizer and its objective.

    Attributes:
        blocks: in a row; each takes a tensor and a context. They stay as they are: shares are copies.
        block_map: where their parameters lie in the flat vector.
        unpack: what the objective wants, from the last block and its output.
        inputs: of the first block.
        targets: of the objective, by name.
        context: of a model that remembers, by the names of ``Context``'s fields; empty for others.
        most_rows: that a batch may have.
    """

    blocks: Sequence[Block]
    block_map: BlockMap
    unpack: Callable[[Block, Tensor], Outputs]
    inputs: RowSpec
    targets: Mapping[str, RowSpec]
    context: Mapping[str, RowSpec]
    objective: Objective[Outputs]
    optimizer: Optimizer
    most_rows: int
    precision: Precision = "float32"

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        return self._parameter.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._parameter.device

    @property
    def _parameter(self) -> nn.Parameter:
        return next(parameter for block in self.blocks for parameter in block.parameters())

    @property
    def travelling(self) -> torch.dtype:
        """Type of activations and their gradients between stages."""
        return torch.bfloat16 if self.precision == "bf16" else self.dtype

    @cached_property
    def extras(self) -> tuple[tuple[str, RowSpec], ...]:
        """Names and rows of what rides along with activations: targets, then the context."""
        return *sorted(self.targets.items()), *self.context.items()

    @cached_property
    def outputs(self) -> tuple[RowSpec, ...]:
        """What each block's output looks like on its way: found with one row."""
        x = torch.zeros((1, *self.inputs.shape), dtype=self.inputs.dtype, device=self.device)
        specs = []
        with torch.no_grad():
            for block in self.blocks:
                x = block(x, NO_CONTEXT)
                specs.append(RowSpec(tuple(x.shape[1:]), self.travelling))
        return tuple(specs)

    @cached_property
    def longest_nbytes(self) -> int:
        """Bytes of the most that one message brings: all slices with the optimizer, or an activation."""
        vectors = 1 + sum(1 for item in self.optimizer.items() if item.shape)
        return max(vectors * self.block_map.layout.size * self.dtype.itemsize, self.activation_nbytes)

    @cached_property
    def activation_nbytes(self) -> int:
        """Bytes of the longest activation of a whole batch, with what rides along."""
        riding = sum(spec.nbytes(self.most_rows) for _, spec in self.extras)
        return riding + max(spec.nbytes(self.most_rows) for spec in self.outputs)

    def objective_of(self, opening: Opening) -> Objective[Outputs]:
        """Return the objective that a minibatch brings, its sums divided by the minibatch's rows.

        Raises:
            WireError: there is none like that.
        """
        objective = decode(opening.objective, type(self.objective))
        given = msgspec.to_builtins(objective).items()
        wrong = [name for name, x in given if isinstance(x, float) and not abs(x) <= _MOST]
        if wrong:
            raise WireError(f"{', '.join(wrong)} of the objective can't be reckoned with")
        return objective.over(opening.rows)

    def check(self, batch: Minibatch) -> None:
        """Check that a batch is what was promised.

        Raises:
            LayoutMismatchError: its rows are others, or too many.
        """
        given = {**batch.targets, **{k: v for k, v in batch.context._asdict().items() if v is not None}}
        missing = {name for name, _ in self.extras} - given.keys()
        if missing or len(batch.inputs) > self.most_rows:
            raise LayoutMismatchError(
                f"a batch of {len(batch.inputs)} rows (at most {self.most_rows}) lacks {sorted(missing)}"
            )
        self.inputs.check(batch.inputs, "the inputs")
        for name, spec in self.extras:
            spec.check(given[name], f"target {name!r}")


def policy_parts(
    policy: Policy,
    objective: Objective[PolicyOutputs],
    optimizer: Optimizer,
    *,
    steps: int,
    most_rows: int,
    precision: Precision = "float32",
    whole_unrolls: bool = False,
) -> ModelParts[PolicyOutputs]:
    """Return the parts of a policy, whose parameters are the optimizer's.

    The objective's targets are one number a row, all but ``actions``. Where the policy remembers, unrolls
    have ``steps`` (T) steps, and rows are environments. With ``whole_unrolls`` they are so in any case, and
    have T+1 observations, the last of which is the bootstrap's and has no targets.

    Raises:
        ConfigError: it isn't an ``ActorCritic``: nobody knows where else to cut; or it has action masks.
    """
    if not isinstance(policy, ActorCritic):
        raise ConfigError(f"{type(policy).__name__} isn't a chain of blocks and can't be cut into stages")
    if policy.mask is not None:
        raise ConfigError(
            "this environment says which actions are allowed (task.env.action_mask), and a model that is cut "
            "into stages has its observations at the first, its actions at the last; take another strategy, "
            'name no split_devices, or set task.env.action_mask = ""'
        )
    dtype = policy.policy_head.weight.dtype
    time = whole_unrolls or policy.core is not None
    leading = (steps,) if time else ()
    seen = (steps + 1,) if whole_unrolls else leading
    targets = {name: RowSpec(leading, dtype) for name in objective.target_names}
    context: dict[str, RowSpec] = {}
    if time:
        targets[VALID] = RowSpec(leading, torch.bool)
    if policy.core is not None:
        context = {
            "starts_BT": RowSpec(seen, torch.bool),
            "state_BS": RowSpec((policy.core.state_size,), dtype),
        }
    targets["actions"] = _actions(policy.spec, leading, dtype)
    return ModelParts(
        blocks=blocks(policy, time=time),
        block_map=block_map(policy),
        unpack=_unpack,
        inputs=RowSpec(
            (*seen, *policy.spec.obs_shape),
            dtype if policy.spec.obs_dtype == "float32" else getattr(torch, policy.spec.obs_dtype),
        ),
        targets=targets,
        context=context,
        objective=objective,
        optimizer=optimizer,
        most_rows=most_rows,
        precision=precision,
    )


def joint_parts(
    policy: DeterministicActorCritic,
    objective: Objective[tuple[Tensor, Tensor]],
    optimizer: Optimizer,
    *,
    most_rows: int,
    precision: Precision = "float32",
) -> ModelParts[tuple[Tensor, Tensor]]:
    """Return the parts of an actor and its critic, whose rows are observations with an action beside each.

    The objective's targets are one number a row.

    Raises:
        ConfigError: there are several critics, or layers that aren't dense.
    """
    row = joint_blocks(policy)
    dtype = policy.critics.head.weight.dtype
    return ModelParts(
        blocks=row,
        block_map=map_blocks(policy, row),
        unpack=lambda _, output: (output[:, :1].T, output[:, 1]),
        inputs=RowSpec((math.prod(policy.spec.obs_shape) + policy.dim,), dtype),
        targets={name: RowSpec((), dtype) for name in objective.target_names},
        context={},
        objective=objective,
        optimizer=optimizer,
        most_rows=most_rows,
        precision=precision,
    )


def module_parts(
    model: nn.Module,
    layers: Sequence[nn.Module],
    objective: Objective[Tensor],
    optimizer: Optimizer,
    *,
    inputs: RowSpec,
    targets: RowSpec,
    most_rows: int,
    precision: Precision = "float32",
) -> ModelParts[Tensor]:
    """Return the parts of a model of layers in a row, each one tensor in, one out, that remember nothing."""
    row = [RowBlock(layer, time=False) for layer in layers]
    return ModelParts(
        blocks=row,
        block_map=map_blocks(model, row),
        unpack=lambda _, output: output,
        inputs=inputs,
        targets=dict.fromkeys(objective.target_names, targets),
        context={},
        objective=objective,
        optimizer=optimizer,
        most_rows=most_rows,
        precision=precision,
    )


def measure_parts(
    parts: ModelParts[Any],
    microbatches: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    told: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[Layer]:
    """Return what each block costs with one microbatch of the longest batch; see ``measure_blocks``.

    Parameters, gradients and random numbers stay as they are.
    """
    rows = math.ceil(parts.most_rows / max(microbatches, 1))
    generator = torch.Generator().manual_seed(0)
    inputs, shape = parts.inputs, (rows, *parts.inputs.shape)
    if inputs.dtype.is_floating_point:
        x = torch.randn(shape, generator=generator, dtype=inputs.dtype)
    else:
        most = 2 if inputs.dtype == torch.bool else inputs.below or 256
        x = torch.randint(most, shape, generator=generator, dtype=inputs.dtype)
    context = {
        name: torch.zeros((rows, *spec.shape), dtype=spec.dtype, device=parts.device)
        for name, spec in parts.context.items()
    }
    return measure_blocks(
        parts.blocks,
        x.to(parts.device),
        RecurrentContext(**context),
        titles=parts.block_map.titles,
        precision=parts.precision,
        clock=clock,
        told=told,
    )


def _actions(spec: EnvSpec, leading: tuple[int, ...], dtype: torch.dtype) -> RowSpec:
    shape = (*leading, *spec.action.shape)
    match spec.action:
        case Discrete(n):
            return RowSpec(shape, torch.int64, n)
        case MultiDiscrete(sizes):
            return RowSpec(shape, torch.int64, max(sizes))
        case MultiBinary():
            return RowSpec(shape, torch.int64, 2)
    return RowSpec(shape, dtype)


def _unpack(block: Block, output: Tensor) -> PolicyOutputs:
    assert isinstance(block, HeadsBlock)  # noqa: S101 - the last block always is
    return block.unpack(output)
