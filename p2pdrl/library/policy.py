"""A trained policy in the caller's own process: ``p2pdrl.load``.

It is `rl.inference.PolicyInference`, which nodes and evaluation act with, behind arrays of the caller's.

Shape suffixes: N observations, A one action's own dimensions, S a recurrent state's.
"""

# ruff: noqa: N806 (names carry shape suffixes)
from __future__ import annotations

from pathlib import Path
from typing import Any, overload

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch

from p2pdrl.api.checkpoints import read_checkpoint
from p2pdrl.config.environments import imports_of
from p2pdrl.config.task import TaskConfig
from p2pdrl.errors import UsageError
from p2pdrl.library.names import is_registered
from p2pdrl.rl.envs import make_scalar_env
from p2pdrl.rl.export import Format, export, format_of
from p2pdrl.rl.inference import PolicyInference, task_of
from p2pdrl.rl.policy_module import PolicyModule
from p2pdrl.tensors.checkpoint import Checkpoint
from p2pdrl.tensors.inference_slots import InferenceSpec
from p2pdrl.tensors.observation_rows import rows_of_arrays, wanted

__all__ = ["TrainedPolicy", "load"]

Array = npt.NDArray[Any]


class TrainedPolicy:
    """A policy with the parameters of a checkpoint, and with the normalisation of its observations.

    Observations are those of `make_env`: what the task's environment shows behind the wrappers that its
    configuration asks for. One observation, or a batch with a leading dimension N; of Dict observations a
    dictionary of arrays, of Tuple observations a tuple of them.

    Attributes:
        task: what it was trained for.
        env_steps: of the whole swarm, until the checkpoint.
        policy_version: updates until the checkpoint, as its lineage counts them.
        mean_return: of the swarm's episodes, or of its evaluation, when the checkpoint was written; None
            before there was any.

    Examples:
        >>> policy = load("data/checkpoints/0123456789ab/last.safetensors")  # doctest: +SKIP
        >>> policy.act([0.0, 0.1, -0.2, 0.3], deterministic=True)  # doctest: +SKIP
        np.int64(1)
    """

    def __init__(self, inference: PolicyInference, checkpoint: Checkpoint) -> None:
        self._inference = inference
        self._spec: InferenceSpec = inference.spec
        self._generator = torch.Generator(inference.device)
        self._generator.seed()
        meta = checkpoint.meta
        self.task: TaskConfig = inference.task
        self.env_steps = int(meta.get("env_steps", 0))
        self.policy_version = int(meta.get("policy_version", 0))
        found = meta.get("mean_return")
        self.mean_return = float(found) if isinstance(found, int | float) else None

    def __repr__(self) -> str:
        algorithm = self.task.algorithm.__struct_config__.tag
        return f"<TrainedPolicy {self.task.env.id}, {algorithm}, {self.env_steps:,} steps>"

    @property
    def recurrent(self) -> bool:
        """Whether it remembers: `act` wants a ``state`` then."""
        return self._inference.policy.initial_state(1) is not None

    @property
    def observation(self) -> str:
        """What one observation is, in words."""
        return wanted(self._spec)

    @overload
    def act(
        self,
        obs: Any,
        *,
        mask: Any = None,
        state: None = None,
        deterministic: bool = False,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Array: ...

    @overload
    def act(
        self,
        obs: Any,
        *,
        mask: Any = None,
        state: Array,
        deterministic: bool = False,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Array, Array]: ...

    def act(
        self,
        obs: Any,
        *,
        mask: Any = None,
        state: Array | None = None,
        deterministic: bool = False,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Array | tuple[Array, Array]:
        """Return actions as the environment takes them.

        Args:
            obs: one observation, or N of them; see the class.
            mask: true for each action that is allowed, A or N x A, where the environment tells that in its
                ``info``; None allows all. A mask that is an entry of observations stays there.
            state: of a recurrent policy: of `initial_state` at an episode's first step, then what the last
                call returned; S or N x S.
            deterministic: take the likeliest action; otherwise it is sampled, as in training, but for what
                only explores (ε).
            seed: of this call's samples; the same one gives the same actions.
            generator: draws the samples, on the policy's device; instead of ``seed``.

        Returns:
            the action, or N of them; with ``state`` also the state after the step.

        Raises:
            UsageError: the observations aren't the environment's (the message says what is wanted), a policy
                that remembers got no state, or one that doesn't got one.
        """
        rows_N, single = rows_of_arrays(self._spec, obs, mask)
        state_NS = self._state_of(state, len(rows_N), single=single)
        source = None if deterministic else self._source(seed, generator)
        actions_N = self._inference.act(rows_N, source, state_NS)
        actions = actions_N[0] if single else actions_N
        if state_NS is None:
            return actions
        after_NS = state_NS.cpu().numpy()
        return actions, after_NS[0] if single else after_NS

    def value(self, obs: Any, *, mask: Any = None, state: Array | None = None) -> Array:
        """Return v(s): float32, one number or N; with action values that of the best action.

        Args:
            obs: as for `act`, like ``mask``.
            state: of a recurrent policy before this observation. It isn't changed.

        Raises:
            UsageError: as `act`; also where the policy has no such values (sac, td3, ddpg).
        """
        rows_N, single = rows_of_arrays(self._spec, obs, mask)
        values_N = self._inference.values(rows_N, self._state_of(state, len(rows_N), single=single))
        return values_N[0] if single else values_N

    def initial_state(self, batch: int | None = None) -> Array:
        """Return a recurrent policy's state at the first step of an episode: zeros, S or ``batch`` x S.

        Raises:
            UsageError: the policy isn't recurrent.
        """
        found = self._inference.policy.initial_state(1 if batch is None else batch)
        if found is None:
            raise UsageError("this policy has no memory (task.network.core = none): it has no state")
        zeros: Array = found.cpu().numpy()
        return zeros[0] if batch is None else zeros

    def torch_module(self) -> PolicyModule:
        """Return a plain ``torch.nn.Module``: raw observations in, the likeliest action and values out."""
        return PolicyModule(self._inference)

    def export(self, path: str | Path, form: Format | None = None) -> dict[str, Any]:
        """Write the policy as a file that runs without p2pdrl, and beside it what it is: JSON and Markdown.

        Args:
            path: the file.
            form: ``onnx``, ``torch`` or ``torchscript``; None goes by the file's ending: ``.onnx``, ``.pt2``
                or ``.pt``.

        Returns:
            the card that lies beside it.

        Raises:
            UsageError: the packages of ``p2pdrl[onnx]`` are missing, or the ending says nothing.
            P2PDRLError: the format can't hold this policy.
            StorageError: the disk doesn't take it.
        """
        file = Path(path)
        facts = {
            "environment": self.task.env.id,
            "algorithm": self.task.algorithm.__struct_config__.tag,
            "observation": self.observation,
            "action": str(self._inference.env.spec.action),
            "env_steps": self.env_steps,
            "policy_version": self.policy_version,
            "mean_return": self.mean_return,
        }
        return export(self.torch_module(), file, format_of(file) if form is None else form, facts)

    def make_env(self, render_mode: str | None = None) -> gym.Env[Any, Any]:
        """Return an environment of the task, whose observations `act` takes.

        Raises:
            ConfigError: it can't be made here.
        """
        return make_scalar_env(self.task.env, allow_import=True, render_mode=render_mode)

    def _source(self, seed: int | None, generator: torch.Generator | None) -> torch.Generator:
        if seed is not None and generator is not None:
            raise UsageError("give a seed or a generator, not both")
        if seed is not None:
            return torch.Generator(self._inference.device).manual_seed(seed)
        return self._generator if generator is None else generator

    def _state_of(self, state: Array | None, count: int, *, single: bool) -> torch.Tensor | None:
        """Return a copy of the state as the policy takes it."""
        if not self.recurrent:
            if state is not None:
                raise UsageError("this policy has no memory: leave state out")
            return None
        if state is None:
            raise UsageError(
                "this policy remembers: begin an episode with state=policy.initial_state(), and hand on the "
                "state that act returns"
            )
        shape = self.initial_state(None if single else count).shape
        given = np.asarray(state, np.float32)
        if given.shape != shape:
            raise UsageError(f"the state must be of shape {list(shape)}, not {list(given.shape)}")
        whole = given[None] if single else given
        return torch.tensor(whole, device=self._inference.device)


def load(
    source: str | Path,
    *,
    device: str = "cpu",
    best: bool = False,
    allow_import: bool = False,
    swarm_key_file: str | Path | None = None,
    data_dir: str | Path | None = None,
) -> TrainedPolicy:
    """Load a policy.

    Args:
        source: a checkpoint file (``.safetensors``), a folder of a node's data, or ``HOST:PORT`` of a running
            node, whose present policy is fetched.
        device: ``cpu``, ``cuda`` …
        best: of a folder: the checkpoint that was evaluated best, instead of the newest.
        allow_import: import the ``module:name`` of a task's own environment or network, which runs its code.
            What `p2pdrl.register_env` and `p2pdrl.register_network` named is imported anyway.
        swarm_key_file: of a node on another machine: its swarm's key.
        data_dir: of a running node on this machine with a swarm key: its data folder, where its token is.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ConfigError: its environment can't be made here, or runs code that isn't allowed.
        DaemonUnreachableError: no node answers there.
    """
    checkpoint = read_checkpoint(source, best=best, swarm_key_file=swarm_key_file, data_dir=data_dir)
    task = task_of(checkpoint)
    allowed = allow_import or all(is_registered(name) for name in imports_of(task).values())
    inference = PolicyInference(task, 0, device, allow_import=allowed)
    inference.restore(checkpoint)
    return TrainedPolicy(inference, checkpoint)
