"""The chain of blocks is the policy: same numbers, same gradients, same tensors, wherever it is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from p2pdrl.config.task import NetworkConfig
from p2pdrl.errors import LayoutMismatchError
from p2pdrl.rl.distributions import PolicyOutputs
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.sequential import HeadsBlock, block_map, blocks, chain

from .policies import POLICIES, make_inputs, make_policy

CPU = torch.device("cpu")

every_policy = pytest.mark.parametrize("name", POLICIES)


def loss_of(outputs: PolicyOutputs) -> torch.Tensor:
    """Something that every output and log_std have a part in, none of them evenly."""
    policy = outputs.distribution()
    weights = torch.linspace(0.5, 1.5, outputs.values.numel(), dtype=outputs.values.dtype)
    weights = weights.view(outputs.values.shape)
    return (weights * (policy.entropy() + outputs.values.square() + outputs.policy.tanh().sum(-1))).sum()


def gradients_of(policy: ActorCritic, outputs: PolicyOutputs) -> dict[str, torch.Tensor]:
    named = dict(policy.named_parameters())
    found = torch.autograd.grad(loss_of(outputs), list(named.values()), allow_unused=True)
    return dict(zip(named, found, strict=True))


@every_policy
def test_the_chain_gives_the_policys_outputs_and_gradients(name):
    policy = make_policy(name).double()
    obs, context = make_inputs(name)
    *_, heads = made = blocks(policy)
    assert isinstance(heads, HeadsBlock)
    chained = heads.unpack(chain(made, obs, context))
    whole = policy.outputs(obs, context)
    for ours, theirs in zip(chained, whole, strict=True):
        if not isinstance(ours, torch.Tensor):
            assert ours is theirs  # None, or the policy's own map
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    ours, theirs = gradients_of(policy, chained), gradients_of(policy, whole)
    assert any(gradient.abs().max() > 1e-3 for gradient in theirs.values() if gradient is not None)
    for parameter, gradient in theirs.items():
        torch.testing.assert_close(ours[parameter], gradient, rtol=1e-12, atol=1e-12, msg=parameter)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_layers_side_by_side_give_what_each_gives_alone_to_the_bit(activation):
    """Of widths that fill no register of the processor evenly."""
    policy = ActorCritic(POLICIES["mlp"][0], NetworkConfig(hidden=(33, 7, 129), activation=activation), 0)
    x = torch.randn(13, 5, generator=torch.Generator().manual_seed(1))
    for at, block in enumerate(blocks(policy)[:-1]):
        halves = (x, x) if at == 0 else x.chunk(2, -1)
        layers = slice(2 * at, 2 * at + 2)
        alone = torch.cat((policy.actor[layers](halves[0]), policy.critic[layers](halves[1])), -1)
        x = block(x)
        assert torch.equal(x, alone)


def kept_bytes(policy, compute):
    """Return the bytes that autograd keeps for the backward pass, parameters apart."""
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    return sum(storage.nbytes() for address, storage in kept.items() if address not in own)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_chain_keeps_no_more_for_the_backward_pass_than_the_policy(activation):
    hidden = (64, 64, 64, 64)
    policy = ActorCritic(POLICIES["mlp"][0], NetworkConfig(hidden=hidden, activation=activation), 0)
    obs = torch.randn(100, 5, generator=torch.Generator().manual_seed(1))
    made = blocks(policy)
    whole = kept_bytes(policy, lambda: policy.outputs(obs))
    assert kept_bytes(policy, lambda: chain(made, obs)) == whole == obs.nbytes + 4 * 100 * 2 * sum(hidden)
    x = obs
    for block in made[:-1]:
        each = x
        x = block(each).detach().requires_grad_()
        assert kept_bytes(policy, lambda block=block, each=each: block(each)) == each.nbytes + x.nbytes


@every_policy
def test_at_any_cut_one_tensor_passes_whose_shape_depends_on_the_rows_alone(name):
    """And how it lies in memory doesn't matter: what was received lies row by row."""
    made = blocks(make_policy(name).double())
    shapes: list[list[tuple[int, ...]]] = []
    for seed, rows in ((0, 4), (1, 4), (2, 3)):
        x, context = make_inputs(name, rows, seed=seed)
        shapes.append([])
        for block in made:
            x = block(x, context)
            assert isinstance(x, torch.Tensor)
            assert len(x) == rows
            shapes[-1].append(tuple(x.shape[1:]))
            x = x.contiguous()
        whole = chain(made, *make_inputs(name, rows, seed=seed))
        torch.testing.assert_close(x, whole, rtol=1e-12, atol=1e-12)
    assert shapes[0] == shapes[1] == shapes[2]


@every_policy
def test_every_parameter_is_the_policys_own_and_in_one_block(name):
    policy = make_policy(name)
    tensors = [parameter for block in blocks(policy) for parameter in block.parameters()]
    assert {id(tensor) for tensor in tensors} == {id(parameter) for parameter in policy.parameters()}
    assert len(tensors) == len(list(policy.parameters()))


@every_policy
def test_blocks_stay_in_the_flat_vector(name):
    policy = make_policy(name)
    made = blocks(policy)
    flat = FlatModule(policy, CPU)
    obs, context = make_inputs(name)
    obs = obs.float()
    context = context._replace(state_BS=None if context.state_BS is None else context.state_BS.float())
    flat.rebind(np.zeros(flat.layout.size, np.float32), write=True)
    before = chain(made, obs, context)
    flat.parameters_D.mul_(0.5)
    assert not torch.equal(before, chain(made, obs, context))
    heads = made[-1]
    assert isinstance(heads, HeadsBlock)
    loss_of(heads.unpack(chain(made, obs, context))).backward()
    through_blocks = flat.gradients_D.clone()
    flat.gradients_D.zero_()
    loss_of(policy.outputs(obs, context)).backward()
    assert flat.gradients_D.norm() > 0
    torch.testing.assert_close(through_blocks, flat.gradients_D, rtol=1e-4, atol=1e-5)


def test_there_is_a_block_for_each_layer():
    def titles(name):
        return block_map(make_policy(name, None)).titles

    heads = "policy_head + value_head"
    assert titles("mlp") == ("actor.0 + critic.0", "actor.2 + critic.2", "actor.4 + critic.4", heads)
    assert titles("mlp for control") == ("actor.0 + critic.0", f"log_std + {heads}")
    assert titles("nature cnn") == (
        "trunk.convolutions.0",
        "trunk.convolutions.2",
        "trunk.convolutions.4",
        "trunk.dense.0",
        heads,
    )
    assert titles("impala resnet") == (
        *(f"trunk.sections.{section}" for section in ("0.0", "1", "2", "3.0", "4", "5")),
        "trunk.dense.0",
        heads,
    )
    assert titles("lstm on a transformer") == (
        "trunk.tokens",
        "trunk.mixing.0",
        "trunk.mixing.1",
        "trunk.pool.norm",
        "core.cells",
        f"log_std + {heads}",
    )
    assert titles("no hidden layer") == ("no parameters", heads)


@every_policy
@pytest.mark.parametrize("cuts", [1, 2, 3])
def test_the_whole_can_be_cut_and_put_together(name, cuts):
    policy = make_policy(name)
    where, whole = block_map(policy), FlatModule(policy, CPU)
    assert where.layout == whole.layout
    vector_D = whole.numpy().copy()
    together_D = np.full_like(vector_D, np.nan)
    for numbers in np.array_split(np.arange(len(where.names)), cuts):
        part_P = where.take(vector_D, numbers)
        assert len(part_P) == where.size(numbers)
        where.put(part_P, together_D, numbers)
    assert np.array_equal(vector_D, together_D)


def test_what_does_not_fit_is_refused():
    spec, network = POLICIES["mlp"]
    where = block_map(ActorCritic(spec, network, None))
    with pytest.raises(LayoutMismatchError, match="0 to 3"):
        where.size(range(3, 5))
    with pytest.raises(LayoutMismatchError, match="once"):
        where.spans([1, 1])
    with pytest.raises(LayoutMismatchError, match="numbers is wanted"):
        where.put(np.zeros(3, np.float32), np.zeros(where.layout.size, np.float32), range(1))
    with pytest.raises(LayoutMismatchError):
        where.take(np.zeros(3, np.float32), [0])
    with pytest.raises(LayoutMismatchError):
        where.put(np.zeros(3, np.float32), np.zeros(where.layout.size, np.float32), [0])


def test_spans_are_few():
    spec, network = POLICIES["nature cnn"]
    where = block_map(ActorCritic(spec, network, None))
    assert where.spans(range(5)) == ((0, where.layout.size),)
    towers = block_map(ActorCritic(*POLICIES["mlp"], None))
    assert len(towers.spans([0])) == 2


def test_modules_without_memory_can_be_made_twice():
    policy = ActorCritic(*POLICIES["lstm"], None)
    assert all(parameter.is_meta for parameter in nn.ModuleList(blocks(policy)).parameters())
