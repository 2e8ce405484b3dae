"""A task's policy, for observations that come from elsewhere: no environments are stepped here.

The inference process of a node answers ``POST /v1/act`` with it, and the node's actors (`workers.inference`);
evaluation plays with the one of a checkpoint (`workers.evaluator`), and so do callers in their own process
(`library.policy`). Parameters and the moments of observations are given. What the policy makes of a caller's
observation is what evaluation makes of it; what it makes of an actor's, what the actor would have made of it
itself.

Shape suffixes: N observations, X the observation's own dimensions, A one action's, S a recurrent state's, D
parameters.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from p2pdrl.config.task import RegressionConfig, TaskConfig
from p2pdrl.errors import CheckpointError, ConfigError, UsageError, WireError
from p2pdrl.rl.algorithms.registry import entry_of
from p2pdrl.rl.engines import resolve_device
from p2pdrl.rl.envs import EnvSpec, VectorEnv, make_vector_env
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.imports import require_allowed
from p2pdrl.rl.networks.lstm import RecurrentContext
from p2pdrl.rl.normalize import RunningNormalizer, observation_normalizer
from p2pdrl.rl.observations import ObservationEntry
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.q_network import QNetwork
from p2pdrl.rl.sources.unrolls import step_spec
from p2pdrl.tensors.checkpoint import Checkpoint
from p2pdrl.tensors.inference_slots import InferenceEntry, InferenceSpec, PolicyAnswer, StepSpec
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.shared_policy import ActingPolicy

__all__ = ["PolicyInference", "task_of"]

Array = npt.NDArray[Any]


def task_of(checkpoint: Checkpoint) -> TaskConfig:
    """Return the task that a checkpoint's policy was trained for.

    Raises:
        CheckpointError: it can't be read, or has no policy.
    """
    try:
        task = msgspec.convert(checkpoint.meta.get("task"), TaskConfig)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"the checkpoint's task can't be read: {error}") from error
    if isinstance(task.algorithm, RegressionConfig):
        raise CheckpointError(
            "the checkpoint holds a regression, which plays no episodes; its evaluation_loss is among the "
            "node's metrics"
        )
    return task


class PolicyInference:
    """Acts on observations with the parameters that it was last given.

    Args:
        seed: of sampled actions.
        device: as ``build_trainer`` takes it.
        allow_import: permit environment ids that import a module.

    Attributes:
        task: as given.
        policy: the network.
        normalizer: of observations; None where the task doesn't normalise them.
        env: the environments that observations are of, closed.
        spec: what observations and actions are made of.
        device: where it computes.
        size: D.
        obs_shape: of what observations are normalised with; (0,) where they aren't.
        refusal: why it can't answer single observations; empty where it can.

    Raises:
        ConfigError: the task has no policy.
    """

    def __init__(
        self, task: TaskConfig, seed: int, device: str = "cpu", *, allow_import: bool = False
    ) -> None:
        if isinstance(task.algorithm, RegressionConfig):
            raise ConfigError("a regression has no policy that could act")
        require_allowed(task, allow_import=allow_import)
        config = msgspec.structs.replace(task.env, num_envs=1)
        env = make_vector_env(config, seed, allow_import=allow_import)
        env.close()
        self.env = env
        self.task = task
        self.policy = entry_of(task.algorithm).policy(env.spec, task)
        self._narrow = task.gradients.precision == "bf16"
        self._exploration = 0.0
        self.refusal = ""
        if self.policy.initial_state(1) is not None:
            self.refusal = (
                f"the policy has a memory (network.core = {task.network.core}), so what it does depends on a "
                "whole episode: it isn't asked for actions on single observations"
            )
        self.device = resolve_device(device)
        self._flat = FlatModule(self.policy, self.device)
        self._flat.drop_gradients()
        self.size = self._flat.layout.size
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self.normalizer: RunningNormalizer | None = None
        if task.env.normalize_observations:
            self.normalizer = observation_normalizer(env.spec)
        self.obs_shape = (0,) if self.normalizer is None else self.normalizer.shape
        self._version = 0
        self.spec = _spec_of(env, has_values=isinstance(self.policy, ActorCritic))

    def use(self, vector_D: npt.NDArray[np.float32], acting: ActingPolicy) -> None:
        """Answer with these parameters and moments from now on."""
        self._flat.set_(vector_D)
        self._version = acting.version
        self._exploration = acting.exploration
        if self.normalizer is not None:
            self.normalizer.use(acting.mean_X, acting.scale_X)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Answer with a checkpoint's parameters and moments from now on.

        Raises:
            CheckpointError: it is of another network, or its moments are of other observations.
        """
        if checkpoint.layout != self._flat.layout:
            raise CheckpointError("the checkpoint's layout isn't that of its task's network")
        self._flat.set_(checkpoint.params)
        self._version = int(checkpoint.meta.get("policy_version", 0))
        if self.normalizer is None:
            return
        try:
            own = _own_moments(checkpoint)
            others = _other_moments(checkpoint)
        except (ValueError, TypeError, WireError, msgspec.DecodeError) as error:
            raise CheckpointError(f"the checkpoint's moments of observations are damaged: {error}") from error
        shapes = {moments.mean.shape for moments in (own, others) if moments is not None}
        if not shapes <= {self.normalizer.shape}:
            raise CheckpointError("the checkpoint's moments aren't of this environment's observations")
        if own is not None:
            self.normalizer.set_own(own)
        if others is not None:
            self.normalizer.set_others(others)

    @torch.inference_mode()
    def act(
        self, obs_NX: Array, generator: torch.Generator | None = None, state_NS: Tensor | None = None
    ) -> Array:
        """Return actions as the environment takes them.

        Args:
            obs_NX: as environments give them, raw.
            generator: of sampled actions; None takes the likeliest.
            state_NS: of a recurrent policy; overwritten by the state after this step.
        """
        inputs_NX = self._seen(obs_NX, copy=True)
        self.policy.exploration = 0.0
        noise = None if generator is None else self.policy.noise((len(inputs_NX),), generator)
        return self._in_space(self.policy.act(inputs_NX, noise, state_NS))

    @torch.inference_mode()
    def values(self, obs_NX: Array, state_NS: Tensor | None = None) -> npt.NDArray[np.float32]:
        """Return v(s), N; with action values that of the best action.

        Args:
            obs_NX: as environments give them, raw.
            state_NS: of a recurrent policy before this step; None stands for a first one.

        Raises:
            UsageError: the policy has no such values.
        """
        inputs_NX = self._seen(obs_NX, copy=True)
        policy = self.policy
        if isinstance(policy, QNetwork):
            return _numpy(policy.forward(inputs_NX).amax(-1))
        if not isinstance(policy, ActorCritic):
            raise UsageError(
                f"{self.task.algorithm.__struct_config__.tag} learns the values of actions, not of states: "
                "this policy has no value to tell"
            )
        if policy.core is None:
            return _numpy(policy.values(inputs_NX))
        return _numpy(policy.values(inputs_NX.unsqueeze(1), RecurrentContext(state_BS=state_NS)).squeeze(1))

    def _in_space(self, actions: Tensor) -> Array:
        return self.env.to_space(self.policy.to_environment(actions.cpu().numpy()))

    @torch.inference_mode()
    def answer(self, obs_NX: Array, greedy: int) -> PolicyAnswer:
        """Act on a batch of callers.

        ε isn't used: who asks for actions gets those that the policy holds best, as in evaluation, or, where
        it is stochastic, draws from it.

        Args:
            obs_NX: as environments give them, raw.
            greedy: so many at the front get the likeliest action, the others a sampled one.
        """
        self.policy.exploration = 0.0
        inputs_NX = self._seen(obs_NX, copy=True)  # the memory belongs to whoever fills it next
        count, parts = len(inputs_NX), []
        if greedy:
            parts.append(self.policy.act(inputs_NX[:greedy]))
        if greedy < count:
            noise = self.policy.noise((count - greedy,), self._generator)
            parts.append(self.policy.act(inputs_NX[greedy:], noise))
        actions = torch.cat(parts) if len(parts) > 1 else parts[0]
        log_probs_N, values_N = self.policy.evaluate(inputs_NX, actions)
        return PolicyAnswer(
            self._in_space(actions),
            _numpy(log_probs_N),
            _numpy(values_N) if self.spec.has_values else None,
            self._version,
        )

    def step_spec(self, shares: tuple[int, ...]) -> StepSpec:
        """Return what actors with so many environments each ask `step` with, and what it answers."""
        fresh = entry_of(self.task.algorithm).policy(self.env.spec, self.task, drawn=False)
        return step_spec(fresh, shares)

    @torch.inference_mode()
    def step(self, asked: Mapping[str, Array]) -> tuple[dict[str, Array], int]:
        """Act on a batch of actors.

        Args:
            asked: N rows of what ``sources.unrolls.step_spec`` names.

        Returns:
            rows of the answers that it names, and the policy version behind them.
        """
        self.policy.exploration = self._exploration
        inputs_NX = self._seen(asked["obs"], copy=False)  # nobody writes there before it is answered
        noise_N = torch.from_numpy(asked["noise"]).to(self.device)
        state_NS = None
        if "state" in asked:
            # a copy: it is overwritten, and whoever asked may have to ask again
            state_NS = torch.from_numpy(asked["state"]).to(self.device, copy=True)
        found = self.policy.step(inputs_NX, noise_N, state_NS, narrow=self._narrow)
        answers = {
            "actions": found.actions.cpu().numpy(),
            "log_probs": _numpy(found.log_probs_B),
            "values": _numpy(found.values_B),
        }
        if found.taken_B is not None:
            answers["taken"] = _numpy(found.taken_B)
        if state_NS is not None:
            answers["state"] = _numpy(state_NS)
        return answers, self._version

    def _seen(self, obs_NX: Array, *, copy: bool) -> Tensor:
        seen_NX = obs_NX if self.normalizer is None else self.normalizer.normalize(obs_NX)
        dtype = self.policy.spec.obs_dtype
        return torch.from_numpy(seen_NX.astype(dtype, copy=copy)).to(self.device)


def _own_moments(checkpoint: Checkpoint) -> Moments | None:
    """Return what the learner of a checkpoint had counted of observations; None where that isn't in it."""
    parts = [checkpoint.sidecar.get(f"observations.{part}") for part in ("count", "mean", "m2")]
    count, mean, m2 = parts
    if count is None or mean is None or m2 is None:
        return None
    return Moments(float(count), np.array(mean, np.float64), np.array(m2, np.float64))


def _other_moments(checkpoint: Checkpoint) -> Moments | None:
    """Return what all other nodes had counted."""
    others = checkpoint.meta.get("others_moments")
    if not isinstance(others, str):
        return None
    packed = msgspec.msgpack.decode(base64.b64decode(others), type=dict[str, bytes])
    found = packed.get("observations")
    return None if found is None else Moments.from_wire(msgspec.msgpack.decode(found))


def _numpy(numbers_N: Tensor) -> npt.NDArray[np.float32]:
    found: npt.NDArray[np.float32] = numbers_N.float().cpu().numpy()
    return found


def _spec_of(env: VectorEnv, *, has_values: bool) -> InferenceSpec:
    spec: EnvSpec = env.spec
    layout = spec.layout
    entries = () if layout is None else tuple(_entry(one) for one in layout.inputs)
    first = entries[0].path[:1] if entries else ()
    return InferenceSpec(
        obs_shape=spec.obs_shape,
        obs_dtype=spec.obs_dtype,
        entries=entries,
        mask=None if layout is None or layout.mask is None else _entry(layout.mask),
        info_mask=layout is not None and layout.info_mask,
        several="" if not first else "dict" if isinstance(first[0], str) else "tuple",
        action_shape=env.action_shape,
        action_dtype=env.action_dtype.name,
        has_values=has_values,
    )


def _entry(entry: ObservationEntry) -> InferenceEntry:
    return InferenceEntry(entry.path, entry.shape, entry.dtype, entry.offset, entry.sizes, entry.start)
