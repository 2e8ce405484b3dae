"""The sequential view of a policy: a chain of blocks, one tensor between each two of them.

What runs a policy in stages cuts the chain between any two blocks and sends one tensor, of a shape that
depends on the number of rows alone. Chained over observations, the blocks give what ``ActorCritic.outputs``
gives. Their parameters are the policy's own tensors, each in exactly one block; ``BlockMap`` says where they
lie in the flat vector. ``measure_blocks`` measures each block's time and memory, by which
`p2pdrl.pipeline.partition` balances stages.

The first dimension of every tensor is the batch's: rows, or environments where the policy is recurrent or the
objective wants whole unrolls, whose tensors have the steps second (BTX, and so on). How a tensor lies in
memory doesn't matter. Separate networks of policy and value function run side by side in the same blocks,
their features put together along the last dimension.

Shape suffixes: B rows, or environments; T steps; X the observation's own dimensions; D parameters, P
parameters of some blocks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from p2pdrl.config.fields import Precision
from p2pdrl.errors import ConfigError, LayoutMismatchError
from p2pdrl.pipeline.layers import Layer
from p2pdrl.rl.actor_critic_q import DenseEnsemble, DeterministicActorCritic, frozen
from p2pdrl.rl.distributions import PolicyOutputs
from p2pdrl.rl.envs import MultiBinary, MultiDiscrete
from p2pdrl.rl.gsde import state_log_std
from p2pdrl.rl.networks.layers import DenseTrunk, Trunk
from p2pdrl.rl.networks.lstm import NO_CONTEXT, RecurrentContext, RecurrentCore
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.tensors.layout import Layout, TensorEntry

__all__ = [
    "Block",
    "BlockMap",
    "HeadsBlock",
    "RowBlock",
    "Span",
    "block_map",
    "blocks",
    "chain",
    "joint_blocks",
    "map_blocks",
    "measure_blocks",
    "saved_bytes",
]

Vector = npt.NDArray[np.float32]
Span = tuple[int, int]
"""Start and stop in the flat vector."""


class Block(nn.Module):
    """One link of the chain; it can't be cut."""

    def forward(self, x: Tensor, context: RecurrentContext = NO_CONTEXT) -> Tensor:
        """Return this block's output.

        Args:
            x: the observations, or the output of the block before.
            context: the unroll's, where the policy is recurrent; only its memory looks at it.
        """
        raise NotImplementedError


class RowBlock(Block):
    """A layer that treats each row, and so each step, by itself.

    Args:
        layer: takes rows, one dimension of them.
        time: rows come as environments and steps.
    """

    def __init__(self, layer: nn.Module, *, time: bool) -> None:
        super().__init__()
        self.layer = layer
        self._time = time

    def forward(self, x: Tensor, context: RecurrentContext = NO_CONTEXT) -> Tensor:
        """See ``Block.forward``."""
        del context
        if not self._time:
            output: Tensor = self.layer(x)
            return output
        rows: Tensor = self.layer(x.flatten(0, 1))
        return rows.view(*x.shape[:2], *rows.shape[1:])


class Towers(Block):
    """The same layer of policy and value function, side by side.

    What the dense layers give is put together before the non-linearity, which keeps its output for the
    backward pass: the next block then reads the same memory. The other way around each layer would keep its
    output twice.

    Args:
        actor: of the policy: reads the first half of the features.
        critic: of the value function: reads the second half.
        activation: behind both, element by element.
        first: both read the whole observation, flattened.
        front: what it goes through before that, if anything.
        time: rows come as environments and steps.
    """

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module,
        activation: nn.Module,
        *,
        first: bool,
        front: nn.Module | None = None,
        time: bool,
    ) -> None:
        super().__init__()
        self._front = None if front is None else RowBlock(front, time=time)
        self.actor = actor
        self.critic = critic
        self.activation = activation
        self._first = first
        self._leading = 2 if time else 1

    def forward(self, x: Tensor, context: RecurrentContext = NO_CONTEXT) -> Tensor:
        """See ``Block.forward``."""
        del context
        x = (x if self._front is None else self._front(x)).flatten(self._leading)
        for_actor, for_critic = (x, x) if self._first else x.chunk(2, -1)
        output: Tensor = self.activation(torch.cat((self.actor(for_actor), self.critic(for_critic)), -1))
        return output


class Memory(Block):
    """The core of a recurrent policy."""

    def __init__(self, core: RecurrentCore) -> None:
        super().__init__()
        self.core = core

    def forward(self, x: Tensor, context: RecurrentContext = NO_CONTEXT) -> Tensor:
        """See ``Block.forward``; x is BTF."""
        output: Tensor = self.core(x, context)
        return output


class HeadsBlock(Block):
    """The last block: policy outputs, deviations if they depend on the state, then the value, in a row.

    Args:
        policy: whose heads.
        towers: the features are those of two networks side by side.
    """

    def __init__(self, policy: ActorCritic, *, towers: bool) -> None:
        super().__init__()
        self.policy_head = policy.policy_head
        self.value_head = policy.value_head
        self.log_std: nn.Parameter | None = getattr(policy, "log_std", None)
        self._state_dependent = policy.state_dependent
        self._action_map = policy.action_map
        action = policy.spec.action
        self._parts = action if isinstance(action, MultiDiscrete | MultiBinary) else None
        self._towers = towers
        self._obs_dims = len(policy.spec.obs_shape)

    def forward(self, x: Tensor, context: RecurrentContext = NO_CONTEXT) -> Tensor:
        """See ``Block.forward``."""
        del context
        for_policy, for_value = x.chunk(2, -1) if self._towers else (x, x)
        heads = [self.policy_head(for_policy), self.value_head(for_value)]
        if self._state_dependent:
            assert self.log_std is not None  # noqa: S101 - or the policy would have been refused
            heads.insert(1, state_log_std(for_policy, self.log_std).to(heads[0].dtype))
        return torch.cat(heads, -1)

    def unpack(self, output: Tensor) -> PolicyOutputs:
        """Return what ``forward`` gave as the objectives want it; a log_std of all states is its own."""
        policy, values = output[..., :-1], output[..., -1]
        log_std: Tensor | None = self.log_std
        if self._state_dependent:
            policy, log_std = policy.chunk(2, -1)
        return PolicyOutputs(policy, values, log_std, self._action_map, self._parts)


def blocks(policy: ActorCritic, *, time: bool = False) -> list[Block]:
    """Return the chain of ``policy``: one block per dense, convolutional, residual or attention layer.

    A policy that lives in one flat vector stays there: the blocks hold the same tensors.

    Args:
        policy: with or without memory.
        time: rows come as environments and steps, as they always do where the policy is recurrent.
    """
    time = time or policy.core is not None
    trunk = policy.trunk
    made: list[Block] = []
    towers = (
        not isinstance(trunk, Trunk) and isinstance(policy.actor, nn.Sequential) and len(policy.actor) > 0
    )
    if isinstance(trunk, Trunk):
        first, *rest = trunk.layers()
        made.append(RowBlock(_behind(policy.front, first), time=time))
        made.extend(RowBlock(layer, time=time) for layer in rest)
    elif towers:
        assert isinstance(policy.actor, nn.Sequential)  # noqa: S101 - they are built alike
        assert isinstance(policy.critic, nn.Sequential)  # noqa: S101
        made.extend(_towers(policy.actor, policy.critic, policy.front, time=time))
    else:
        made.append(RowBlock(_behind(policy.front, trunk), time=time))
    if policy.core is not None:
        made.append(Memory(policy.core))
    made.append(HeadsBlock(policy, towers=towers))
    return made


class ActorLayer(Block):
    """A layer of a deterministic actor; rows of observation and action go past it to the critic.

    Args:
        layer: takes observations if it is the first, else what the layer before gave.
        obs_shape: X.
        row: numbers of an observation and an action, in front of what the layer before gave.
    """

    def __init__(self, layer: nn.Module, obs_shape: tuple[int, ...], row: int, *, first: bool) -> None:
        super().__init__()
        self.layer = layer
        self._obs_shape = obs_shape
        self._row = row
        self._first = first

    def forward(self, x: Tensor, context: RecurrentContext = NO_CONTEXT) -> Tensor:
        """See ``Block.forward``."""
        del context
        row, inner = x[:, : self._row], x[:, self._row :]
        if self._first:
            inner = row[:, : math.prod(self._obs_shape)].reshape(-1, *self._obs_shape)
        output: Tensor = torch.cat((row, self.layer(inner)), 1)
        return output


class CriticLayer(Block):
    """A layer of Q(s, a) and, side by side, the same of Q(s, μ(s)), which gives its parameters no gradient.

    Args:
        layer: of an ensemble of one.
        activation: behind it.
        obs_size: given for the first layer alone: of a row of observation, action and μ(s).
        front: what its observation goes through before that, if anything.
    """

    def __init__(
        self,
        layer: DenseEnsemble,
        activation: Callable[[Tensor], Tensor] | None,
        *,
        obs_size: int = 0,
        front: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self._activation = activation
        self._front = front
        self._obs_size = obs_size

    def forward(self, x: Tensor, context: RecurrentContext = NO_CONTEXT) -> Tensor:
        """See ``Block.forward``."""
        del context
        if self._obs_size:
            obs = x[:, : self._obs_size]
            obs = obs if self._front is None else self._front(obs)
            halves = [torch.cat((obs, actions), 1) for actions in x[:, self._obs_size :].chunk(2, 1)]
        else:
            halves = list(x.chunk(2, 1))
        given = self.layer(halves[0][None])[0]
        with frozen(self.layer):
            own = self.layer(halves[1][None])[0]
        output = torch.cat((given, own), 1)
        return output if self._activation is None else self._activation(output)


def joint_blocks(policy: DeterministicActorCritic) -> list[Block]:
    """Return the chain from observations with an action beside each to Q(s, a) and Q(s, μ(s)).

    All layers of the actor come first, then those of the critic: what ``q_values_and_own`` gives, in two
    columns.

    Raises:
        ConfigError: there are several critics, or layers that aren't dense.
    """
    critic, (trunk, *head) = policy.critics, policy.actor
    front: nn.Module | None = None
    if isinstance(trunk, nn.Sequential):
        front, trunk = trunk
    if critic.members != 1 or not isinstance(trunk, DenseTrunk):
        raise ConfigError("only one critic of dense layers can be cut into stages, with its actor; take mlp")
    obs_size = math.prod(policy.spec.obs_shape)
    first, *layers = trunk.layers()
    actor = [_behind(front, first), *layers, nn.Sequential(*head)]
    row = obs_size + policy.dim
    made: list[Block] = [
        ActorLayer(layer, policy.spec.obs_shape, row, first=layer is actor[0]) for layer in actor
    ]
    for layer in (*critic.hidden, critic.head):
        assert isinstance(layer, DenseEnsemble)  # noqa: S101 - of what critics are made
        made.append(
            CriticLayer(
                layer,
                None if layer is critic.head else critic.activation,
                obs_size=obs_size if len(made) == len(actor) else 0,
                front=critic.trunk,
            )
        )
    return made


def chain(row: Iterable[Block], x: Tensor, context: RecurrentContext = NO_CONTEXT) -> Tensor:
    """Return the output of the last of some blocks in a row."""
    for block in row:
        x = block(x, context)
    return x


def block_map(policy: ActorCritic) -> BlockMap:
    """Return the map of ``policy``; one on the meta device will do."""
    return map_blocks(policy, blocks(policy))


def map_blocks(model: nn.Module, row: Iterable[Block]) -> BlockMap:
    """Return the map of any model whose parameters are those of some blocks."""
    named = list(model.named_parameters())
    by_tensor = {id(parameter): name for name, parameter in named}
    return BlockMap(
        Layout(tuple(TensorEntry(name, tuple(parameter.shape)) for name, parameter in named)),
        tuple(tuple(by_tensor[id(tensor)] for tensor in block.parameters()) for block in row),
    )


def _behind(front: nn.Module | None, layer: nn.Module) -> nn.Module:
    return layer if front is None else nn.Sequential(front, layer)


def _towers(
    actor: nn.Sequential, critic: nn.Sequential, front: nn.Module | None, *, time: bool
) -> Iterator[Towers]:
    """Yield a block per layer of two networks in which each layer has a non-linearity behind it."""
    for at in range(0, len(actor), 2):
        yield Towers(
            actor[at],
            critic[at],
            actor[at + 1],
            first=at == 0,
            front=front if at == 0 else None,
            time=time,
        )


@dataclass(frozen=True)
class BlockMap:
    """From blocks to pieces of the flat vector.

    The vector of some blocks is made of their parameters one after the other, in the order of their numbers:
    as ``FlatModule(nn.ModuleList(those_blocks), device)`` lays them out. What has one number per
    parameter, such as Adam's moments, is cut and put together alike.

    Attributes:
        layout: of the whole policy.
        names: of each block's parameters, in the block's own order.
    """

    layout: Layout
    names: tuple[tuple[str, ...], ...]

    def size(self, numbers: Sequence[int]) -> int:
        """Return P."""
        return sum(stop - start for start, stop in self.spans(numbers))

    def chosen(self, numbers: Sequence[int]) -> list[str]:
        """Return the names of some blocks' parameters.

        Raises:
            LayoutMismatchError: there is no block of such a number, or one is named twice.
        """
        known = range(len(self.names))
        if len(set(numbers)) < len(numbers) or not all(number in known for number in numbers):
            raise LayoutMismatchError(
                f"blocks are numbered 0 to {len(self.names) - 1} and taken once, not {list(numbers)}"
            )
        return [name for number in numbers for name in self.names[number]]

    def spans(self, numbers: Sequence[int]) -> tuple[Span, ...]:
        """Return the pieces of the flat vector that put together are some blocks' own; few and long."""
        merged: list[Span] = []
        for name in self.chosen(numbers):
            start, stop = self._places[name]
            if merged and merged[-1][1] == start:
                merged[-1] = merged[-1][0], stop
            else:
                merged.append((start, stop))
        return tuple(merged)

    def take(self, vector_D: Vector, numbers: Sequence[int]) -> Vector:
        """Return a copy of some blocks' numbers.

        Raises:
            LayoutMismatchError: the vector isn't the whole policy's.
        """
        _check_length(vector_D, self.layout.size)
        return np.concatenate([vector_D[:0], *(vector_D[slice(*span)] for span in self.spans(numbers))])

    def put(self, vector_P: Vector, vector_D: Vector, numbers: Sequence[int]) -> None:
        """Write some blocks' numbers to where they belong in the whole.

        Raises:
            LayoutMismatchError: one of the vectors has another length.
        """
        _check_length(vector_D, self.layout.size)
        _check_length(vector_P, self.size(numbers))
        at = 0
        for start, stop in self.spans(numbers):
            vector_D[start:stop] = vector_P[at : at + stop - start]
            at += stop - start

    @property
    def titles(self) -> tuple[str, ...]:
        """What the names of each block's parameters have in common, for people: ``actor.0 + critic.0``."""
        return tuple(_title(names) for names in self.names)

    @cached_property
    def _places(self) -> dict[str, Span]:
        pairs = zip(self.layout.entries, self.layout.offsets, strict=True)
        return {entry.name: (start, start + entry.size) for entry, start in pairs}


def _check_length(vector: npt.NDArray[Any], size: int) -> None:
    """Check that ``vector`` is flat and has ``size`` numbers.

    Raises:
        LayoutMismatchError: it isn't.
    """
    if vector.shape != (size,):
        raise LayoutMismatchError(f"a vector of {size} numbers is wanted, not of shape {vector.shape}")


def _title(names: Sequence[str]) -> str:
    """Return the longest common path of each network's names."""
    common: dict[str, list[str]] = {}
    for name in names:
        path = name.split(".")[:-1] or [name]
        shared = common.setdefault(path[0], path)
        same = [one == other for one, other in zip(shared, path, strict=False)]
        common[path[0]] = shared[: same.index(False) if False in same else len(same)]
    return " + ".join(".".join(path) for path in common.values()) or "no parameters"


def saved_bytes(forward: Callable[[], Tensor], known: Iterable[Tensor]) -> tuple[Tensor, int]:
    """Run a forward; return its output, and the bytes of what is kept for its backward beside that.

    Each piece of memory counts once, and as a whole: a view keeps all that it is a view of. The backward
    works as it would without this.

    Args:
        forward: returns its output.
        known: what is kept anyway: inputs, parameters.
    """
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[_address(tensor)] = tensor.untyped_storage().nbytes()
        # detached: an operation that keeps its own output would else be kept by it in turn, for ever
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()
    for tensor in (*known, output):
        kept.pop(_address(tensor), None)
    return output, sum(kept.values())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def measure_blocks(
    run: Sequence[Block],
    inputs: Tensor,
    context: RecurrentContext = NO_CONTEXT,
    *,
    titles: Sequence[str] = (),
    precision: Precision = "float32",
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    told: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[Layer]:
    """Run each block forward and backward some times and return the median of its seconds, and its bytes.

    Parameters and their gradients are left alone. Blocks that have no memory (on the meta device) can't be
    measured.

    Args:
        run: blocks in a row, on one device, the model's first among them.
        inputs: what the first of them gets: a microbatch. No gradient of them is wanted.
        context: of the unroll, where the policy is recurrent.
        titles: of the blocks; by default their numbers.
        precision: in which they run, and their outputs travel.
        repeats: measured, after one that isn't.
        clock: seconds, monotonic.
        told: called before each block: how many are measured, and of how many.
    """
    costs = []
    inputs = inputs.detach()
    for index, block in enumerate(run):
        told(index, len(run))
        forward = _forward(block, inputs, context, precision)
        seconds = [_run_once(forward, inputs, block, clock) for _ in range(repeats + 1)][1:]
        parameters = list(block.parameters())
        known = [inputs, *parameters, *(tensor for tensor in context if tensor is not None)]
        output, inner_bytes = saved_bytes(forward, known)
        output_bytes = output.numel() * (2 if precision == "bf16" else output.element_size())
        costs.append(
            Layer(
                name=titles[index] if titles else str(index),
                forward_s=statistics.median(forward_s for forward_s, _ in seconds),
                backward_s=statistics.median(backward_s for _, backward_s in seconds),
                parameter_bytes=sum(parameter.nbytes for parameter in parameters),
                output_bytes=output_bytes,
                inner_bytes=inner_bytes + output.nbytes - output_bytes,  # it may be rounded on its way only
            )
        )
        # from here on, a gradient is wanted of what passes if it leads to parameters
        inputs = output.detach().requires_grad_(output.requires_grad)
    return costs


def _forward(
    block: Block, inputs: Tensor, context: RecurrentContext, precision: Precision
) -> Callable[[], Tensor]:
    """Return what runs a block as a stage does."""

    def forward() -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=precision == "bf16"):
            output: Tensor = block(inputs, context)
            return output

    return forward


def _run_once(
    forward: Callable[[], Tensor], inputs: Tensor, block: Block, clock: Callable[[], float]
) -> tuple[float, float]:
    """Return seconds of one forward and one backward."""
    wanted = [tensor for tensor in (inputs, *block.parameters()) if tensor.requires_grad]
    begin = _now(inputs, clock)
    output = forward()
    middle = _now(inputs, clock)
    if wanted:
        torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)
    return middle - begin, _now(inputs, clock) - middle


def _now(on: Tensor, clock: Callable[[], float]) -> float:
    """Read the clock once the device has done all it was told."""
    if on.device.type == "cuda":
        torch.cuda.synchronize(on.device)
    return clock()
