"""A policy as one plain ``torch.nn.Module``: raw observations in, actions and what is behind them out.

`library.policy` hands it to callers and `rl.export` writes it as a file. All that stands between an
environment and the network is inside: normalisation, the scaling of images, one-hot choices, action masks,
and on the other side the likeliest action, brought to the environment's numbers and bounds. It computes what
`inference.PolicyInference` does, with tensors of its own for each entry of an observation where that has rows
of bytes: so it can be traced.

Shape suffixes: N observations, X one entry's own dimensions, A one action's, S a recurrent state's.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from p2pdrl.rl.actor_critic_q import (
    CategoricalActorCritic,
    DeterministicActorCritic,
    SquashedGaussianActorCritic,
)
from p2pdrl.rl.algorithms.registry import entry_of
from p2pdrl.rl.distributions import ActionMap
from p2pdrl.rl.envs import Continuous, Discrete, EnvSpec, MultiBinary, MultiDiscrete, VectorEnv
from p2pdrl.rl.inference import PolicyInference
from p2pdrl.rl.networks.entries import UnpackedRows
from p2pdrl.rl.normalize import CLIP, RunningNormalizer
from p2pdrl.rl.observations import ObservationEntry
from p2pdrl.rl.policy import ActorCritic, Policy
from p2pdrl.rl.q_network import QNetwork

__all__ = ["PolicyModule", "TensorInfo"]

OBSERVATION, MASK, STATE = "observation", "action_mask", "recurrent_state"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor that goes in or comes out.

    Attributes:
        shape: of one row; before it there is the batch dimension N.
        role: ``mask`` of actions (true where one is allowed), recurrent ``state`` (zeros at an episode's
            first step), part of the ``observation``, or ``output``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Literal["observation", "mask", "state", "output"] = "observation"

    def zeros(self, rows: int) -> Tensor:
        """Return a batch of zeros; of a mask, a batch that allows everything."""
        dtype = getattr(torch, self.dtype)
        return torch.full((rows, *self.shape), self.role == "mask", dtype=dtype)


class PolicyModule(nn.Module):
    """Acts greedily on raw observations; parameters are copies, without gradients.

    ``forward`` takes the tensors of `inputs` in their order, each with a leading batch dimension, and returns
    a dictionary of those of `outputs`: ``action``; ``logits`` (of Discrete, MultiDiscrete, MultiBinary; those
    of actions that a mask forbids are -1e9), ``mean`` and ``log_std`` (of Box, before they are brought to the
    bounds), or ``q_values``; ``value``, v(s), where there is one; ``next_recurrent_state`` of a policy that
    remembers, whose last input is ``recurrent_state``.

    Attributes:
        inputs: what goes in.
        outputs: what comes out.
    """

    _mean: Tensor
    _scale: Tensor
    _center: Tensor
    _half: Tensor
    _low: Tensor
    _high: Tensor

    def __init__(self, inference: PolicyInference) -> None:
        super().__init__()
        task, env = inference.task, inference.env
        spec: EnvSpec = env.spec
        self.policy = entry_of(task.algorithm).policy(spec, task)
        self.policy.load_state_dict(inference.policy.state_dict())
        self.policy.to(inference.device).requires_grad_(False).eval()
        self._spec = spec
        layout = spec.layout
        self._entries = () if layout is None else layout.inputs
        self._mask = None if layout is None else layout.mask
        self._start = _start_of(env)
        self._action_shape = env.action_shape
        self._action_dtype: torch.dtype = getattr(torch, env.action_dtype.name)
        self._keep_normalizer(inference.normalizer)
        self._keep_bounds(self.policy)
        state = self.policy.initial_state(1)
        inputs = [_input(entry, OBSERVATION) for entry in self._entries]
        if layout is None:
            inputs = [TensorInfo(OBSERVATION, spec.obs_dtype, spec.obs_shape)]
        if self._mask is not None:
            inputs.append(replace(_input(self._mask, MASK), role="mask"))
        if state is not None:
            inputs.append(TensorInfo(STATE, "float32", tuple(state.shape[1:]), "state"))
        self.inputs = _with_own_names(inputs)
        self.to(inference.device).eval()
        with torch.no_grad():
            shown = self(*(info.zeros(1).to(inference.device) for info in self.inputs))
        self.outputs = tuple(
            TensorInfo(name, str(found.dtype).removeprefix("torch."), tuple(found.shape[1:]), "output")
            for name, found in shown.items()
        )

    def _keep_normalizer(self, normalizer: RunningNormalizer | None) -> None:
        self._normalizes = normalizer is not None
        if normalizer is not None:
            mean, scale = normalizer.in_use
            self.register_buffer("_mean", torch.tensor(np.array(mean, np.float64)))
            self.register_buffer("_scale", torch.tensor(np.array(scale, np.float64)))

    def _keep_bounds(self, policy: Policy) -> None:
        action = self._spec.action
        if not isinstance(action, Continuous):
            return
        self._map: ActionMap | None = getattr(policy, "action_map", None)
        if self._map is not None:
            self.register_buffer("_center", torch.tensor(self._map.center))
            self.register_buffer("_half", torch.tensor(self._map.scale))
        self.register_buffer("_low", torch.tensor(action.low))
        self.register_buffer("_high", torch.tensor(action.high))

    def forward(self, *given: Tensor) -> dict[str, Tensor]:
        """Return what the policy makes of N observations; see the class."""
        rest = list(given)
        state_NS = rest.pop() if self.inputs[-1].role == "state" else None
        if self._spec.layout is None:
            obs = self._normalized(rest[0])
        else:
            mask = rest.pop() if self._mask is not None else None
            obs = self._unpacked(rest, mask)
        state = None if state_NS is None else state_NS.clone()
        found, action = self._answer(obs, state)
        outputs = {"action": action, **found}
        if state is not None:
            outputs[f"next_{STATE}"] = state
        return outputs

    def _normalized(self, obs_NX: Tensor) -> Tensor:
        return self._standard(obs_NX, self._mean, self._scale) if self._normalizes else obs_NX

    @staticmethod
    def _standard(x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        """Return (x − mean) / deviation in float64, as a learner's normaliser does, cut and as float32."""
        return ((x.to(torch.float64) - mean) * scale).clamp(-CLIP, CLIP).to(torch.float32)

    def _unpacked(self, given: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        entries = {}
        for entry, tensor in zip(self._entries, given, strict=True):
            if entry.sizes:
                start = torch.tensor(entry.start, device=tensor.device).view(entry.shape)
                tensor = tensor - start
            elif self._normalizes and entry.kind == "vector" and entry.dtype == "float32":
                first = entry.offset // 4
                piece = slice(first, first + entry.width)
                mean, scale = (moment[piece].view(entry.shape) for moment in (self._mean, self._scale))
                tensor = self._standard(tensor, mean, scale)
            entries[entry.path] = tensor
        if self._mask is not None and mask is not None:
            entries[self._mask.path] = mask
        return cast("Tensor", UnpackedRows(entries, self._spec.obs_shape[0]))

    def _answer(self, obs: Tensor, state_NS: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
        """Return what the heads say, and the action that follows."""
        policy = self.policy
        match policy:
            case ActorCritic():
                said = policy.outputs_on(policy.features(obs, state_NS), obs)
                if isinstance(self._spec.action, Continuous):
                    log_std = said.log_std
                    assert log_std is not None  # noqa: S101 - actions are continuous
                    found = {"mean": said.policy, "log_std": log_std.expand(said.policy.shape)}
                    return {**found, "value": said.values}, self._bounded(said.policy)
                return {"logits": said.policy, "value": said.values}, self._likeliest(said.policy)
            case QNetwork():
                q_NA = policy(obs)
                return {"q_values": q_NA, "value": q_NA.amax(-1)}, self._likeliest(q_NA)
            case SquashedGaussianActorCritic():
                mean, log_std = policy.distribution(obs)
                return {"mean": mean, "log_std": log_std}, self._bounded(torch.tanh(mean))
            case CategoricalActorCritic():
                log_probs = policy.log_probs(obs)
                return {"logits": log_probs}, self._likeliest(log_probs)
            case DeterministicActorCritic():
                mean = policy.act(obs)
                return {"mean": mean}, self._bounded(mean)
            case _:
                raise AssertionError(f"a {type(policy).__name__} has no place here")

    def _likeliest(self, logits: Tensor) -> Tensor:
        """Return the likeliest of discrete actions in the environment's numbers."""
        match self._spec.action:
            case MultiDiscrete(sizes):
                parts = [part.argmax(-1) for part in torch.split(logits, list(sizes), -1)]
                action = torch.stack(parts, -1)
            case MultiBinary():
                action = (logits > 0.0).long()
            case Discrete():
                action = logits.argmax(-1)
            case Continuous():
                raise AssertionError("continuous actions aren't chosen")
        if self._start is not None:
            action = action + torch.tensor(self._start, device=action.device)
        return action.reshape(-1, *self._action_shape).to(self._action_dtype)

    def _bounded(self, samples: Tensor) -> Tensor:
        """Return what the environment gets for samples."""
        if self._map is not None:
            wide = samples.to(torch.float64)
            inner = torch.tanh(wide) if self._map.squash else wide
            samples = (self._center + self._half * inner).to(torch.float32)
        samples = torch.minimum(torch.maximum(samples, self._low), self._high)
        return samples.reshape(-1, *self._action_shape).to(self._action_dtype)


def _start_of(env: VectorEnv) -> list[int] | int | None:
    """Return the number of the first of each choice of actions; None where all begin at zero."""
    action = env.spec.action
    if isinstance(action, Continuous):
        return None
    zero = np.zeros((1, *action.shape), np.int64)
    first = env.to_space(zero).reshape(zero.shape)[0]
    return first.tolist() if np.any(first) else None


def _input(entry: ObservationEntry, alone: str) -> TensorInfo:
    """Return what goes in for an entry; it is called ``alone`` where it has no name."""
    name = re.sub(r"\W", "_", "_".join(str(key) for key in entry.path)) or alone
    if not name.isidentifier():  # of a Tuple
        name = f"{OBSERVATION}_{name}"
    return TensorInfo(name, "int64" if entry.sizes else entry.dtype, entry.shape)


def _with_own_names(inputs: Sequence[TensorInfo]) -> tuple[TensorInfo, ...]:
    """Return them with a number behind names that are taken."""
    found: dict[str, TensorInfo] = {}
    for info in inputs:
        tries = (info.name if number == 1 else f"{info.name}_{number}" for number in itertools.count(1))
        name = next(name for name in tries if name not in found)
        found[name] = replace(info, name=name)
    return tuple(found.values())
