"""The source of a learner whose environments are in actor processes.

Each batch is one unroll of every actor, side by side: as many environments as the learner would have had
itself. The learner publishes its parameters after each update and lets each actor begin one more unroll, so
with ``ahead = 0`` actors and learner are synchronous: the results don't depend on who was faster. An actor
that is being replaced isn't waited for, and one that is late (frozen, say) not much longer than all ever
took; the batch has fewer environments then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from p2pdrl.rl.registry import RolloutContext
from p2pdrl.rl.sources.source import BatchT, Source
from p2pdrl.rl.sources.unrolls import UnrollPart, joined, unroll_items
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.shared_policy import ActingPolicy, SharedPolicy
from p2pdrl.tensors.unroll_ring import UnrollLane, UnrollRing, UnrollSpec, shares_of

__all__ = ["ActorSource"]

FIRST_S = 120.0
"""The longest wait for an actor that has never made anything, once another has."""
LATE_S = 5.0
LATE_TIMES = 10.0
LATEST_S = 60.0
"""An actor is late when the others have waited for it for `LATE_S`, and for so many times as long as all have
taken at most so far; after `LATEST_S` it is late in any case."""


class ActorSource(Source[BatchT]):
    """Reads the unrolls of actor processes.

    Args:
        ahead: unrolls that each actor may make ahead of the learner.
        clock: seconds, monotonic.

    Attributes:
        spec: of the unrolls.
        policy_nbytes: of the memory that actors read the policy from.
        left_out: how often a batch did without an actor that was late or down.
    """

    def __init__(
        self,
        acting: RolloutContext[BatchT],
        actors: int,
        ahead: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._acting = acting
        self._ahead = ahead
        self._clock = clock
        algorithm: Any = acting.task.algorithm
        steps = algorithm.unroll_steps
        self._environments = acting.task.env.num_envs
        shares = shares_of(self._environments, actors)
        self.spec = UnrollSpec(unroll_items(acting.policy, steps), shares, 1 + ahead)
        self._size = acting.flat.layout.size
        self._obs_shape = (0,) if acting.normalizer is None else acting.normalizer.shape
        self.policy_nbytes = SharedPolicy.nbytes_of(self._size, self._obs_shape)
        self._regions: list[SharedRegion] = []
        self._lanes: tuple[UnrollLane, ...] = ()
        self._policy: SharedPolicy | None = None
        self._lives = [0] * actors
        self._late = [False] * actors
        self._read: list[UnrollLane] = []
        self._granted_s = 0.0
        self._waiting_since_s: float | None = None
        self._longest_s = 0.0
        self._columns = [range(sum(shares[:number]), sum(shares[: number + 1])) for number in range(actors)]
        self._version = 0
        self._staleness = 0.0
        self.left_out = 0

    def attach(self, ring: SharedRegion, policy: SharedRegion) -> None:
        """Take the memory that the daemon made; actors begin with the next `publish`.

        Raises:
            LayoutMismatchError: it is too small.
        """
        self._regions = [ring, policy]
        self._lanes = UnrollRing(ring, self.spec).lanes
        self._policy = SharedPolicy(policy, self._size, self._obs_shape)

    @property
    def ready(self) -> bool:
        """Whether every actor that is waited for has made an unroll, and at least one has."""
        if not any(lane.waiting for lane in self._lanes):
            return False
        missing = [number for number, lane in enumerate(self._lanes) if self._awaited(number, lane)]
        now_s = self._clock()
        if not missing:
            return True
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        never = all(self._lanes[number].committed == 0 for number in missing)
        limit_s = FIRST_S if never else min(max(LATE_S, LATE_TIMES * self._longest_s), LATEST_S)
        if now_s - self._waiting_since_s < limit_s:
            return False
        for number in missing:
            self._late[number] = True
        return True

    def _awaited(self, number: int, lane: UnrollLane) -> bool:
        """Whether a batch is to wait for a lane that has nothing."""
        if lane.waiting:
            self._late[number] = False
            return False
        begins = lane.committed == 0 and lane.lives <= 1  # its first process may just be starting
        return (lane.running or begins) and not self._late[number]

    def next(self) -> BatchT:
        """Return the oldest unroll of each actor, as one."""
        parts, staleness = [], []
        self._read = []
        for number, lane in enumerate(self._lanes):
            found = lane.peek()
            if found is None:
                continue
            restarted = self._lives[number] not in (0, found.life)
            self._lives[number] = found.life
            parts.append(UnrollPart(found.arrays, found.episodes, self._columns[number], restarted))
            staleness.append(max(self._version - found.policy_version, 0))
            self._read.append(lane)
        self._staleness = sum(staleness) / max(len(staleness), 1)
        if len(parts) == len(self._lanes):
            self._longest_s = max(self._longest_s, self._clock() - self._granted_s)
        else:
            self.left_out += len(self._lanes) - len(parts)
        self._waiting_since_s = None
        return self._acting.reader.read(joined(parts, self._environments))

    def commit(self) -> None:
        """Free the slots that the last batch came from."""
        for lane in self._read:
            lane.consume()
        self._read = []

    def metrics(self) -> dict[str, float]:
        """Return the last batch's staleness (mean over actors), and how often any batch lacked an actor."""
        return {"actor_staleness": self._staleness, "actors_left_out": float(self.left_out)}

    def publish(self, version: int) -> None:
        """Write the policy to where actors read it, and let each begin its next unroll."""
        if self._policy is None:
            return
        self._version = version
        acting = self._acting
        nothing = np.zeros(self._obs_shape)
        mean_X, scale_X = (nothing, nothing) if acting.normalizer is None else acting.normalizer.in_use
        policy = ActingPolicy(version, acting.policy.exploration, mean_X, scale_X)
        self._policy.write(acting.flat.numpy(), policy)
        self._granted_s = self._clock()
        for lane in self._lanes:
            lane.grant(self._ahead)

    def close(self) -> None:
        """Unmap the shared memory."""
        self._lanes, self._policy = (), None
        for region in self._regions:
            region.close()
        self._regions = []
