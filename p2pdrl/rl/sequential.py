"""The sequential view of a policy: a chain of blocks, one tensor between each two of them.

What runs a policy in stages cuts the chain between any two blocks and sends one tensor, of a shape that
depends on the number of rows alone. Chained over observations, the blocks give what ``ActorCritic.outputs``
gives. Their parameters are the policy's own tensors, each in exactly one block; ``block_map`` says where they
lie in the flat vector.

The first dimension of every tensor is the batch's: rows, or environments where the policy is recurrent, whose
tensors have the steps second (BTX, and so on). How a tensor lies in memory doesn't matter. Separate networks
of policy and value function run side by side in the same blocks, their features put together along the last
dimension.

Shape suffixes: B rows, or environments; T steps; X the observation's own dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from p2pdrl.rl.block_map import BlockMap
from p2pdrl.rl.networks.layers import Trunk
from p2pdrl.rl.networks.lstm import LSTM, NO_CONTEXT, RecurrentContext
from p2pdrl.rl.outputs import PolicyOutputs
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.tensors.layout import Layout, TensorEntry

__all__ = [
    "Block",
    "HeadsBlock",
    "RowBlock",
    "block_map",
    "blocks",
    "chain",
    "map_blocks",
]

Vector = npt.NDArray[np.float32]


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
    """

    def __init__(self, actor: nn.Module, critic: nn.Module, activation: nn.Module, *, first: bool) -> None:
        super().__init__()
        self.actor = actor
        self.critic = critic
        self.activation = activation
        self._first = first

    def forward(self, x: Tensor, context: RecurrentContext = NO_CONTEXT) -> Tensor:
        """See ``Block.forward``."""
        del context
        x = x.flatten(1)
        for_actor, for_critic = (x, x) if self._first else x.chunk(2, -1)
        output: Tensor = self.activation(torch.cat((self.actor(for_actor), self.critic(for_critic)), -1))
        return output


class Memory(Block):
    """The core of a recurrent policy."""

    def __init__(self, core: LSTM) -> None:
        super().__init__()
        self.core = core

    def forward(self, x: Tensor, context: RecurrentContext = NO_CONTEXT) -> Tensor:
        """See ``Block.forward``; x is BTF."""
        output: Tensor = self.core(x, context)
        return output


class HeadsBlock(Block):
    """The last block: policy outputs, then the value, along the last dimension.

    Args:
        policy: whose heads.
        towers: the features are those of two networks side by side.
    """

    def __init__(self, policy: ActorCritic, *, towers: bool) -> None:
        super().__init__()
        self.policy_head = policy.policy_head
        self.value_head = policy.value_head
        self.log_std: nn.Parameter | None = getattr(policy, "log_std", None)
        self._towers = towers
        self._obs_dims = len(policy.spec.obs_shape)

    def forward(self, x: Tensor, context: RecurrentContext = NO_CONTEXT) -> Tensor:
        """See ``Block.forward``."""
        del context
        for_policy, for_value = x.chunk(2, -1) if self._towers else (x, x)
        return torch.cat((self.policy_head(for_policy), self.value_head(for_value)), -1)

    def unpack(self, output: Tensor) -> PolicyOutputs:
        """Return what ``forward`` gave as the objectives want it; log_std is this block's own."""
        return PolicyOutputs(output[..., :-1], output[..., -1], self.log_std)


def blocks(policy: ActorCritic) -> list[Block]:
    """Return the chain of ``policy``: one block per dense, convolutional, residual or attention layer.

    A policy that lives in one flat vector stays there: the blocks hold the same tensors.
    """
    time = policy.core is not None
    trunk = policy.trunk
    made: list[Block] = []
    towers = (
        not isinstance(trunk, Trunk) and isinstance(policy.actor, nn.Sequential) and len(policy.actor) > 0
    )
    if isinstance(trunk, Trunk):
        made.extend(RowBlock(layer, time=time) for layer in trunk.layers())
    elif towers:
        assert isinstance(policy.actor, nn.Sequential)  # noqa: S101 - they are built alike
        assert isinstance(policy.critic, nn.Sequential)  # noqa: S101
        made.extend(_towers(policy.actor, policy.critic))
    else:
        made.append(RowBlock(trunk, time=time))
    if policy.core is not None:
        made.append(Memory(policy.core))
    made.append(HeadsBlock(policy, towers=towers))
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


def _towers(actor: nn.Sequential, critic: nn.Sequential) -> Iterator[Towers]:
    """Yield a block per layer of two networks in which each layer has a non-linearity behind it."""
    for at in range(0, len(actor), 2):
        yield Towers(actor[at], critic[at], actor[at + 1], first=at == 0)
