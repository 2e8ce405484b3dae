"""What an actor process has of the learning code: environments and a policy that acts in them, on the CPU.

It learns nothing: parameters, exploration and the moments of observations come from the learner. Where the
policy is in the node's inference process, it has environments only, and draws the noise of actions.

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
from p2pdrl.rl.rollout import AskedPolicy, Collector, RawUnroll
from p2pdrl.tensors.shared_policy import ActingPolicy

__all__ = ["RolloutWorker"]


class RolloutWorker:
    """Collects unrolls in some of a task's environments, with the learner's policy.

    Args:
        seed: of environments and actions.
        environments: how many of the task's.
        first: number of the first one among those of all actors.
        total: environments of all actors; None stands for ``environments``.
        step_delay_s: seconds slept at each step of the environments.
        asked: acts; None has the policy here.

    Attributes:
        environments: B.
        parameters_D: the policy's; written between two unrolls. None of them where it isn't here.
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
        asked: AskedPolicy | None = None,
    ) -> None:
        require_allowed(task, allow_import=allow_import)
        self.environments = environments
        algorithm: Any = task.algorithm
        env_seed, action_seed = (int(word) for word in np.random.SeedSequence(seed).generate_state(2))
        config = msgspec.structs.replace(task.env, num_envs=environments)
        env = make_vector_env(config, env_seed, allow_import=allow_import, step_delay_s=step_delay_s)
        self._policy = entry_of(algorithm).policy(env.spec, task, drawn=asked is None)
        self.act_as(first, environments if total is None else total)
        self.parameters_D: npt.NDArray[np.float32] = np.zeros(0, np.float32)
        if asked is None:
            flat = FlatModule(self._policy, torch.device("cpu"))
            flat.drop_gradients()
            self.parameters_D = flat.numpy()
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
            asked=asked,
        )

    def act_as(self, first: int, total: int) -> None:
        """Take the environments for those from number ``first`` on, of ``total``."""
        self._policy.act_as(first, self.environments, total)

    def collect(self, acting: ActingPolicy | None = None) -> RawUnroll:
        """Make an unroll with the parameters as they are now.

        Args:
            acting: what to act with beside them; None where the policy isn't here.
        """
        if acting is not None:
            self._policy.exploration = acting.exploration
            if self._normalizer is not None:
                self._normalizer.use(acting.mean_X, acting.scale_X)
        return self._collector.collect()

    def close(self) -> None:
        """Close the environments."""
        self._collector.close()
