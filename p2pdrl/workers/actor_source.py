"""The source of a learner whose environments are in actor processes, of its own node or of others.

Each batch has unrolls of as many environments as the task says, side by side. Actors of the learner's own
node have just so many together. The learner publishes its parameters after each update and lets each actor
begin one more unroll, so with ``ahead = 0`` actors and learner are synchronous: the results don't depend on
who was faster. Actors of other nodes come and go, and may be more or fewer: a batch takes the oldest unrolls
(those of the oldest policy) that fit. An actor that is being replaced isn't waited for, and one that is late
(frozen, say) not much longer than all ever took; the batch has fewer environments then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from p2pdrl.rl.registry import RolloutContext
from p2pdrl.rl.sources.source import NOTHING_ELSEWHERE, BatchT, CountedElsewhere, Source
from p2pdrl.rl.sources.unrolls import UnrollPart, joined, unroll_items
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.shared_policy import ActingPolicy, SharedPolicy
from p2pdrl.tensors.unroll_ring import Committed, UnrollLane, UnrollRing, UnrollSpec, shares_of

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
        actors: of this node.
        ahead: unrolls that each actor may make ahead of the learner.
        remote: lanes for actors of other nodes, each of which may have all of the task's environments.
        remote_ahead: unrolls that those may be ahead, at least: one, where the way is long and there are many
            of them; none where data are to be as new as this node's own.
        clock: seconds, monotonic.

    Attributes:
        spec: of the unrolls.
        policy_nbytes: of the memory that actors read the policy from.
        left_out: how often a batch did without one of this node's actors that was late or down.
    """

    def __init__(
        self,
        acting: RolloutContext[BatchT],
        actors: int,
        ahead: int,
        remote: int = 0,
        *,
        remote_ahead: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._acting = acting
        self._ahead, self._remote_ahead = ahead, max(ahead, remote_ahead)
        self._clock = clock
        algorithm: Any = acting.task.algorithm
        steps = algorithm.unroll_steps
        self._whole = self._wanted = acting.task.env.num_envs
        local = shares_of(self._whole, actors) if actors else ()
        shares = (*local, *(self._whole for _ in range(remote)))
        slots = 1 + (self._remote_ahead if remote else ahead)
        self.spec = UnrollSpec(unroll_items(acting.policy, steps), shares, slots, remote)
        self._environments = sum(shares)
        self._size = acting.flat.layout.size
        self._obs_shape = (0,) if acting.normalizer is None else acting.normalizer.shape
        self.policy_nbytes = SharedPolicy.nbytes_of(self._size, self._obs_shape)
        self._regions: list[SharedRegion] = []
        self._lanes: tuple[UnrollLane, ...] = ()
        self._policy: SharedPolicy | None = None
        self._lives = [0] * len(shares)
        self._made = list(shares)
        """Of how many environments each lane's unrolls are, as far as is known."""
        self._late = [False] * len(shares)
        self._read: list[UnrollLane] = []
        self._granted_s = 0.0
        self._waiting_since_s: float | None = None
        self._longest_s = 0.0
        self._columns = [sum(shares[:number]) for number in range(len(shares))]
        self._version = 0
        self._staleness = 0.0
        self._lent = False
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
        """Whether there are unrolls of enough environments, or one of every actor that is waited for."""
        waiting = 0 if self._lent else sum(lane.waiting_environments for lane in self._lanes)
        if not waiting:
            return False
        missing = [number for number, lane in enumerate(self._lanes) if self._awaited(number, lane)]
        now_s = self._clock()
        if not missing or waiting >= self._wanted:
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
        # its first process may just be starting; another node's actor runs once it has come
        begins = number < self.spec.local and lane.committed == 0 and lane.lives <= 1
        return (lane.running or begins) and not self._late[number]

    def next(self) -> BatchT:
        """Return the oldest unrolls, at most one of each actor, as one."""
        parts, staleness = [], []
        self._read = []
        absent = [number for number, lane in enumerate(self._lanes) if self._missed(number, lane)]
        elsewhere = NOTHING_ELSEWHERE
        for number, found in self._chosen():
            restarted = self._lives[number] not in (0, found.life)
            self._lives[number] = found.life
            self._made[number] = found.environments
            first = self._columns[number]
            columns = range(first, first + found.environments)
            parts.append(UnrollPart(found.arrays, found.episodes, columns, restarted))
            staleness.append(max(self._version - found.policy_version, 0))
            self._read.append(self._lanes[number])
            if found.counted:
                steps, episodes = elsewhere
                elsewhere = CountedElsewhere(steps + found.env_steps, episodes + found.episodes)
        self.elsewhere = elsewhere
        self._staleness = sum(staleness) / max(len(staleness), 1)
        if not absent:
            self._longest_s = max(self._longest_s, self._clock() - self._granted_s)
        elif sum(len(part.columns) for part in parts) < self._wanted:
            self.left_out += sum(number < self.spec.local for number in absent)
        self._waiting_since_s = None
        return self._acting.reader.read(joined(parts, self._environments))

    def _missed(self, number: int, lane: UnrollLane) -> bool:
        """Whether a lane has nothing that might have: one of this node's, or of another's actor at work."""
        return not lane.waiting and (number < self.spec.local or lane.running)

    def _chosen(self) -> list[tuple[int, Committed]]:
        """Return lanes' numbers and unrolls for the next batch, in order of the lanes."""
        found = [(number, one) for number, lane in enumerate(self._lanes) if (one := lane.peek()) is not None]
        if sum(one.environments for _, one in found) <= self._wanted:
            return found
        chosen: list[tuple[int, Committed]] = []
        room = self._wanted
        for number, one in sorted(found, key=lambda entry: (entry[1].policy_version, entry[0])):
            if one.environments <= room or not chosen:
                chosen.append((number, one))
                room -= one.environments
        return sorted(chosen, key=lambda entry: entry[0])

    def share(self, rank: int, learners: int, part: float, cuts: int = 1) -> None:
        """Divide the environments of a batch, as far as whole unrolls go: each is of all an actor has."""
        del rank, learners
        self._wanted = max(1, round(self._whole * part / cuts))

    @property
    def batch_share(self) -> float:
        """See ``Source.batch_share``; by how many environments each actor has now, or had last."""
        lanes = range(len(self.spec.shares))
        there = [number for number in lanes if number < self.spec.local or self._running(number)]
        least = min(self._environments_of(number) for number in there or lanes)
        return min(max(self._wanted // least, 1) * least, self._whole) / self._whole

    def _running(self, number: int) -> bool:
        return bool(self._lanes) and self._lanes[number].running

    def _environments_of(self, number: int) -> int:
        assigned = self._lanes[number].assignment if self._lanes else None
        return self._made[number] if assigned is None else assigned.environments

    def commit(self) -> None:
        """Free the slots that the last batch came from."""
        for lane in self._read:
            lane.consume()
        self._read = []

    def metrics(self) -> dict[str, float]:
        """Return the last batch's staleness (mean over actors), and how often any batch lacked an actor."""
        return {"actor_staleness": self._staleness, "actors_left_out": float(self.left_out)}

    @property
    def waiting(self) -> bool:
        """Whether there is any unroll."""
        return any(lane.waiting for lane in self._lanes)

    def grant(self) -> None:
        """Let each actor begin its next unroll, with whatever policy there is."""
        for number, lane in enumerate(self._lanes):
            lane.grant(self._ahead if number < self.spec.local else self._remote_ahead)

    def publish(self, version: int) -> None:
        """Write the policy to where actors read it, and let each begin its next unroll."""
        if self._policy is None or self._lent:
            return
        self._version = version
        acting = self._acting
        nothing = np.zeros(self._obs_shape)
        mean_X, scale_X = (nothing, nothing) if acting.normalizer is None else acting.normalizer.in_use
        policy = ActingPolicy(version, acting.policy.exploration, mean_X, scale_X)
        self._policy.write(acting.flat.numpy(), policy)
        self._granted_s = self._clock()
        self.grant()

    def lend(self, *, lent: bool) -> None:
        """Leave the actors to the daemon, or take them back; what came from other nodes is dropped.

        Their unrolls would be many updates old by the time that this learner reads again.
        """
        self._lent = lent
        if lent:
            for lane in self._lanes[self.spec.local :]:
                while lane.waiting:
                    lane.consume()

    def close(self) -> None:
        """Unmap the shared memory."""
        self._lanes, self._policy = (), None
        for region in self._regions:
            region.close()
        self._regions = []
