"""What an actor process has of the learning code: environments and a policy that acts in them, on the CPU.

It learns nothing: parameters, exploration and the moments of observations come from the learner.

Shape suffixes: D parameters, X the observation's own dimensions.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from p2pdrl.config.task import TaskConfig
from p2pdrl.rl.algorithms.registry import entry_of
from p2pdrl.rl.envs import make_vector_env
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.imports import require_allowed
from p2pdrl.rl.normalize import RunningNormalizer, observation_normalizer
from p2pdrl.rl.rollout import Collector, RawUnroll

__all__ = ["RolloutWorker"]


class RolloutWorker:
    """Collects unrolls in some of a task's environments, with the learner's policy.

    Args:
        seed: of environments and actions.
        environments: how many of the task's.
        first: number of the first one among those of this node.
        total: environments of this node; None stands for ``environments``.
        step_delay_s: seconds slept at each step of the environments.

    Attributes:
        parameters_D: the policy's; written between two unrolls.
        obs_shape: of what observations are normalised with; (0,) where they aren't.

    Raises:
        ConfigError: the task can't be acted in here.
    """

    def __init__(
        self,
        task: TaskConfig,
        seed: int,
        environments: int,
        *,
        allow_import: bool = False,
        step_delay_s: float = 0.0,
        first: int = 0,
        total: int | None = None,
    ) -> None:
        require_allowed(task, allow_import=allow_import)
        algorithm: Any = task.algorithm
        env_seed, action_seed = (int(word) for word in np.random.SeedSequence(seed).generate_state(2))
        config = msgspec.structs.replace(task.env, num_envs=environments)
        env = make_vector_env(config, env_seed, allow_import=allow_import, step_delay_s=step_delay_s)
        self._policy = entry_of(algorithm).policy(env.spec, task)
        self._policy.act_as(first, environments, environments if total is None else total)
        flat = FlatModule(self._policy, torch.device("cpu"))
        flat.drop_gradients()
        self.parameters_D: npt.NDArray[np.float32] = flat.numpy()
        self._normalizer: RunningNormalizer | None = None
        if task.env.normalize_observations:
            self._normalizer = observation_normalizer(env.spec)
        self.obs_shape = (0,) if self._normalizer is None else self._normalizer.shape
        generator = torch.Generator().manual_seed(action_seed)
        self._collector = Collector(
            env,
            self._policy,
            algorithm.unroll_steps,
            generator,
            normalizer=self._normalizer,
            precision=task.gradients.precision,
        )

    def collect(self, exploration: float, mean_X: npt.NDArray[Any], scale_X: npt.NDArray[Any]) -> RawUnroll:
        """Make an unroll with the parameters as they are now.

        Args:
            exploration: ε.
            mean_X: of observations.
            scale_X: 1 / their deviation.
        """
        self._policy.exploration = exploration
        if self._normalizer is not None:
            self._normalizer.use(mean_X, scale_X)
        return self._collector.collect()

    def close(self) -> None:
        """Close the environments."""
        self._collector.close()
