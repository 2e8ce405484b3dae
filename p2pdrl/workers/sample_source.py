"""The source of a learner whose replay memory is in shards on other nodes.

The daemon (`node.experience.sampler`) brings samples; the learner takes the oldest, makes its gradients, and
leaves the TD errors, which go back to the shards. Environment steps and episodes are credited where they are
stored, so its batches have none.
"""

from __future__ import annotations

import numpy as np

from p2pdrl.config.task import ReplayOptions
from p2pdrl.errors import ConfigError
from p2pdrl.replay.shards import ERRORS
from p2pdrl.rl.registry import RolloutContext
from p2pdrl.rl.sources.replay import ReplayBatch, SampledRows, sample_spec
from p2pdrl.rl.sources.source import Source
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.shared_policy import ActingPolicy, SharedPolicy
from p2pdrl.tensors.unroll_ring import UnrollRing, UnrollSpec

__all__ = ["SampleSource", "errors_spec"]


def errors_spec(samples: UnrollSpec) -> UnrollSpec:
    """Return how the TD errors of samples lie in memory on their way back."""
    return UnrollSpec(ERRORS, samples.shares, samples.slots)


class SampleSource(Source[ReplayBatch]):
    """Reads samples from shared memory.

    Args:
        seed: of the order in which the rows of a sample are used.

    Attributes:
        spec: of the samples.
        policy_nbytes: of the memory that the learner's parameters are read from.
    """

    def __init__(self, acting: RolloutContext[ReplayBatch], seed: int) -> None:
        config = acting.task.algorithm
        if not isinstance(config, ReplayOptions) or acting.replay is None:
            raise ConfigError("only algorithms with a replay memory learn from shards of it")
        self._acting = acting
        self._config = config
        self._scaler = acting.replay.scaler
        self._layout = acting.replay.memory.layout
        self._rng = np.random.default_rng(seed)
        self.spec = sample_spec(config, acting.spec)
        self._size = acting.flat.layout.size
        self._obs_shape = (0,) if acting.normalizer is None else acting.normalizer.shape
        self.policy_nbytes = SharedPolicy.nbytes_of(self._size, self._obs_shape)
        self._regions: list[SharedRegion] = []
        self._policy: SharedPolicy | None = None
        self._rows: SampledRows | None = None
        self._serial = 0

    def attach(self, samples: SharedRegion, errors: SharedRegion, policy: SharedRegion) -> None:
        """Take the memory that the daemon made.

        Raises:
            LayoutMismatchError: it is too small.
        """
        self._regions = [samples, errors, policy]
        (self._samples,) = UnrollRing(samples, self.spec).lanes
        (self._errors,) = UnrollRing(errors, errors_spec(self.spec)).lanes
        self._errors.enter()
        self._policy = SharedPolicy(policy, self._size, self._obs_shape)

    @property
    def fills(self) -> bool:
        """No: others do."""
        return False

    @property
    def ready(self) -> bool:
        """Whether a sample is there, and room for its errors."""
        return bool(self._regions) and self._samples.waiting > 0 and self._errors.waiting < self.spec.slots

    def next(self) -> ReplayBatch:
        """Return the oldest sample."""
        found = self._samples.peek()
        if found is None:
            raise ConfigError("there is no sample yet")
        self._serial = found.serial
        self._rows = SampledRows(
            found.arrays,
            found.env_steps,
            self._layout,
            self._scaler,
            rng=self._rng,
            minibatches=found.environments // self._config.batch_size,
        )
        return ReplayBatch(0, [], self._rows)

    def commit(self) -> None:
        """Free the sample's slot, and leave its errors where priorities are drawn by."""
        if self._rows is None:
            return
        if self._config.prioritized:
            errors_N = self._rows.errors_N
            content = self._errors.fill(len(errors_N))
            np.frombuffer(content, np.float32, len(errors_N))[:] = errors_N
            self._errors.commit(
                policy_version=self._serial, episodes=0, env_steps=0, environments=len(errors_N)
            )
        self._samples.consume()
        self._rows = None

    def publish(self, version: int) -> None:
        """Write the policy to where the daemon reads it for those who act."""
        if self._policy is None:
            return
        acting = self._acting
        nothing = np.zeros(self._obs_shape)
        mean_X, scale_X = (nothing, nothing) if acting.normalizer is None else acting.normalizer.in_use
        self._policy.write(
            acting.flat.numpy(), ActingPolicy(version, acting.policy.exploration, mean_X, scale_X)
        )

    def close(self) -> None:
        """Unmap the shared memory."""
        self._policy = self._rows = None
        for region in self._regions:
            region.close()
        self._regions = []
