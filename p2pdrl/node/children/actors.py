"""The actor processes of this node: started, watched, replaced, counted.

The memory that they share with the learner is the daemon's: it outlives each of them, and the learner. An
actor that dies is replaced; its half unroll is dropped (`tensors.unroll_ring`). One that was let begin and
makes nothing for long is killed and replaced, too. Their environments, actions and parameters are none of
ours.

With ``node.actors.inference = "batched"`` they ask the node's inference process (`node.inference`) at each
step, through memory and doorbells that are the daemon's, too: `StepPort`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

import msgspec

from p2pdrl.clock import Clock
from p2pdrl.config.node import LearnerConfig, NodeConfig
from p2pdrl.config.task import RegressionConfig, ReplayOptions, TaskConfig
from p2pdrl.errors import LayoutMismatchError, WorkerError
from p2pdrl.node.children.child_process import ProcessLink
from p2pdrl.node.children.restarts import Death, RestartPolicy
from p2pdrl.node.events import EventLog
from p2pdrl.telemetry.rate import RateMeter
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.inference_slots import StepLanes, StepSpec
from p2pdrl.tensors.shared_memory import Doorbell, SharedRegion
from p2pdrl.tensors.shared_policy import PolicyCopies, features_of
from p2pdrl.tensors.unroll_ring import UnrollLane, UnrollRing, UnrollSpec, assignments
from p2pdrl.workers.protocol import (
    Collect,
    Start,
    StartActor,
    actor_seed,
    decode_from_actor,
    frame,
)

__all__ = ["ActorPool", "StallWatch", "StepPort", "actor_count", "lanes_for_ranks", "remote_actor_count"]

BUILD_S = 600.0
"""The longest that environments may take to build, before they are tried anew."""
LOOK_EVERY_S = 1.0
STALLED_S = 60.0
STALLED_TIMES = 10.0
REMOTE_ACTORS = 16
REPLAY_ACTORS = 4
"""Of other nodes, where nothing else is said; as few where a replay memory is too small to keep
`UNROLLS_KEPT` unrolls of every environment of more."""
UNROLLS_KEPT = 4


def actor_count(node: NodeConfig, task: TaskConfig, cores: int | None = None) -> int:
    """Return how many actors a node is to have for a task: none, or one at least where it doesn't learn.

    Args:
        task: the swarm's, which may have fewer environments than the node has actors.
        cores: that this process may use; None looks.
    """
    if isinstance(task.algorithm, RegressionConfig) or not node.acts:
        return 0
    count = node.actors.count
    if count == 0 and node.learns and remote_actor_count(node, task, cores):
        return 1  # one process learns from unrolls of many, or makes its own
    if count == "auto" or (count == 0 and not node.learns):
        have = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = have if cores is None else cores
        count = 0 if count < 2 and node.learns else count
    return min(count, task.env.num_envs)


def remote_actor_count(node: NodeConfig, task: TaskConfig, cores: int | None = None) -> int:
    """Return how many actors of other nodes a node's learner takes, or would take, unrolls from at most.

    Where nothing is said and the node has actors of its own, they are those of its pipeline's other ranks,
    should it ever be the first rank of one. Memory of lanes that nobody fills isn't used.
    """
    algorithm = task.algorithm
    if isinstance(algorithm, RegressionConfig) or not algorithm.remote_actors:
        return 0
    count = node.learner.remote_actors
    if count != "auto":
        return count
    if isinstance(algorithm, ReplayOptions):
        kept = UNROLLS_KEPT * (algorithm.unroll_steps + algorithm.n_step) * task.env.num_envs
        room = algorithm.buffer_size // kept - 1
        return min(max(room, REPLAY_ACTORS), REMOTE_ACTORS) if node.roles else 0
    acts = node.actors.count != 0 and (node.actors.count != "auto" or actor_count(node, task, cores) > 0)
    return REMOTE_ACTORS if node.roles or acts else 0


def lanes_for_ranks(node: NodeConfig) -> bool:
    """Whether lanes for actors of other nodes are for those of its pipeline's other ranks only."""
    return node.learner.remote_actors == "auto" and not node.roles


class StallWatch:
    """Judges whether an actor makes nothing though it might. Pure: time comes in as looks.

    Between two unrolls `STALLED_S` may pass, and ten times the longest time that any took so far. A look
    counts for two periods at most: time in which this process stood still itself isn't held against the
    actor.
    """

    def __init__(self) -> None:
        self._committed = -1
        self._idle_s = 0.0
        self._longest_s = 0.0

    def look(self, committed: int, *, may_begin: bool, elapsed_s: float) -> bool:
        """Note what an actor has made; tell whether it is stuck.

        Args:
            committed: unrolls.
            may_begin: whether the learner lets it make one.
            elapsed_s: since the last look.
        """
        if committed != self._committed or not may_begin:
            if self._committed >= 0 and committed != self._committed:
                self._longest_s = max(self._longest_s, self._idle_s)
            self._committed, self._idle_s = committed, 0.0
            return False
        self._idle_s += min(elapsed_s, 2.0 * LOOK_EVERY_S)
        return self._idle_s > max(STALLED_S, STALLED_TIMES * self._longest_s)


class StepPort:
    """The memory through which a node's actors ask its inference process, and the doorbells.

    Both outlive each of the processes. Actors begin once that process has said what a step is made of.

    Args:
        shares: environments of each actor.

    Raises:
        TensorError: the system gives no descriptors.
    """

    def __init__(self, shares: tuple[int, ...]) -> None:
        self.shares = shares
        self.asked = Doorbell.create()
        self.answered = tuple(Doorbell.create() for _ in shares)
        self._spec: StepSpec | None = None
        self._region: SharedRegion | None = None
        self._lanes: StepLanes | None = None
        self._opened = asyncio.Event()

    def open(self, spec: StepSpec) -> SharedRegion:
        """Make the memory, if there is none yet; return it.

        Raises:
            TensorError: the system gives no such memory, or it was made for other steps.
        """
        if self._region is None:
            self._region = SharedRegion.create(spec.nbytes, "steps")
            self._spec, self._lanes = spec, StepLanes(self._region, spec)
            self._opened.set()
        if spec != self._spec:
            raise LayoutMismatchError("another inference process makes other steps than its predecessor")
        return self._region

    async def opened(self) -> tuple[StepSpec, SharedRegion]:
        """Wait until there is the memory."""
        while self._spec is None or self._region is None:
            await self._opened.wait()
        return self._spec, self._region

    @property
    def bells(self) -> tuple[tuple[int, int], ...]:
        """Descriptors of the doorbells: the process' own, then each actor's."""
        return tuple((bell.waiter, bell.ringer) for bell in (self.asked, *self.answered))

    @property
    def questions(self) -> tuple[int, ...]:
        """How many each actor has asked; 0 for those that wait for no answer."""
        return () if self._lanes is None else tuple(self._lanes.questions)

    def left(self, number: int) -> None:
        """An actor is gone: no batch waits for it."""
        if self._lanes is not None:
            self._lanes.lanes[number].acting = False

    def close(self) -> None:
        """Free the memory and the descriptors."""
        self._lanes = None
        if self._region is not None:
            self._region.close()
        for bell in (self.asked, *self.answered):
            bell.close()


class ActorLink(ProcessLink):
    """A running actor process."""

    NAME = "actor"

    @classmethod
    async def spawn(
        cls,
        start: StartActor,
        ring: SharedRegion,
        policy: SharedRegion,
        asks: tuple[StepPort, SharedRegion] | None = None,
    ) -> ActorLink:
        """Start an actor process and tell it what to act in.

        Args:
            asks: where it does so at each step; None has it act by itself.

        Raises:
            WorkerError: it can't be started.
        """
        environment = os.environ | {"OMP_NUM_THREADS": str(start.threads)}
        options = {"--ring": ring.fd, "--policy": policy.fd, "--steps": -1, "--asked": -1, "--answered": -1}
        fds = [ring.fd, policy.fd]
        if asks is not None:
            port, region = asks
            asked, answered = port.asked.ringer, port.answered[start.number].waiter
            options |= {"--steps": region.fd, "--asked": asked, "--answered": answered}
            fds += [region.fd, asked, answered]
        link = cls(*await cls.launch("p2pdrl.workers.actor", options, environment, fds))
        try:
            await link.send(frame(start))
        except BaseException:
            await link.kill()
            raise
        return link

    async def acts(self) -> None:
        """Wait until environments and network are built.

        Raises:
            ConfigError: they can't be, as configured.
            WorkerError: it is gone, or took too long.
        """
        try:
            async with asyncio.timeout(BUILD_S):
                await self._hear(until_it_acts=True)
        except TimeoutError:
            raise WorkerError(f"the actor wasn't ready after {BUILD_S:.0f} s") from None

    async def gone(self) -> None:
        """Wait until its socket closes: it says no more.

        Raises:
            ConfigError: it can't act as configured.
        """
        with contextlib.suppress(WorkerError):
            await self._hear(until_it_acts=False)

    async def _hear(self, *, until_it_acts: bool) -> None:
        while True:
            for body in await self.receive():
                if not self.says_its_end(decode_from_actor(body)) and until_it_acts:
                    return


class ActorPool:
    """All actors of this node, through all their restarts, and the memory that their unrolls lie in.

    Lanes behind theirs are for actors of other nodes, whose unrolls `experience.receiver` brings.

    Args:
        batched: whether the inference process acts for them.

    Attributes:
        steps: how they ask it; None where they act by themselves, and before `open`.
    """

    def __init__(
        self, start: Start, config: LearnerConfig, clock: Clock, events: EventLog, *, batched: bool = False
    ) -> None:
        self._start = start
        self.batched = batched and start.actors > 0
        self.steps: StepPort | None = None
        self._config = config
        self._clock = clock
        self._events = events
        self._spec = b""
        self._unrolls: UnrollSpec | None = None
        self._size = 0
        self._ring: SharedRegion | None = None
        self._policy: SharedRegion | None = None
        self._copies: PolicyCopies | None = None
        self._lanes: tuple[UnrollLane, ...] = ()
        self._tasks: list[asyncio.Task[None]] = []
        self._pids: list[int | None] = [None] * start.actors
        self._rates = [RateMeter(10.0) for _ in range(start.actors)]
        self._counted = [0] * start.actors
        self._restarts = [0] * start.actors

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of those that run."""
        return tuple(pid for pid in self._pids if pid is not None)

    @property
    def spec(self) -> UnrollSpec:
        """What unrolls are made of."""
        if self._unrolls is None:
            raise WorkerError("the learner isn't built yet")
        return self._unrolls

    @property
    def lanes(self) -> tuple[UnrollLane, ...]:
        """One for each actor, in the order of their environments; those of other nodes' actors are last."""
        return self._lanes

    @property
    def policy(self) -> PolicyCopies:
        """What actors act with."""
        if self._copies is None:
            raise WorkerError("the learner isn't built yet")
        return self._copies

    @property
    def policy_region(self) -> SharedRegion:
        """The memory that it lies in."""
        if self._policy is None:
            raise WorkerError("the learner isn't built yet")
        return self._policy

    def open(self, unrolls: UnrollSpec, board: BoardSpec) -> None:
        """Make the memory for what a learner declared.

        Raises:
            TensorError: the system gives no such memory.
        """
        self._unrolls, self._size = unrolls, board.layout.size
        self._spec = msgspec.msgpack.encode(unrolls.to_wire())
        features = features_of(board)
        self._ring = SharedRegion.create(unrolls.nbytes, "unrolls")
        self._policy = SharedRegion.create(PolicyCopies.nbytes_of(self._size, features), "policy")
        self._copies = PolicyCopies(self._policy, self._size, features)
        self._lanes = UnrollRing(self._ring, unrolls).lanes
        if self.batched:
            self.steps = StepPort(unrolls.shares[: unrolls.local])

    def collected(self) -> tuple[Collect, list[SharedRegion]]:
        """Return what a learner is told, and whose descriptors go along."""
        if self._ring is None or self._policy is None:
            raise WorkerError("the learner isn't built yet")
        return Collect(self._ring.nbytes, self._policy.nbytes), [self._ring, self._policy]

    def divide(self, rank: int, nodes: int) -> None:
        """Have this node's actors act in their part of a batch's environments; see `assignments`.

        Args:
            rank: of this node among those that act for the same learners.
            nodes: how many those are.
        """
        lanes = self._lanes[: self._start.actors]
        if not lanes:
            return
        found = assignments([lane.environments for lane in lanes], rank, nodes)
        for lane, assignment in zip(lanes, found, strict=True):
            if lane.assignment != assignment:
                lane.assign(assignment)

    def begin(self) -> None:
        """Start all actors."""
        self._tasks = [
            asyncio.create_task(self._keep(number), name=f"actor {number}")
            for number in range(self.spec.local)
        ]

    async def watch(self) -> None:
        """Wait until they are stopped.

        Raises:
            ConfigError: they can't act as configured.
            WorkerError: one dies again and again in the same way.
        """
        if not self._tasks:
            return
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if not task.cancelled():
                task.result()

    async def stop(self) -> None:
        """End all actors; nothing of them is missed. What ended one's keeping before is left to `watch`."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def close(self) -> None:
        """Free the memory. Nobody may use it afterwards."""
        self._lanes, self._copies = (), None
        for region in (self._ring, self._policy):
            if region is not None:
                region.close()
        self._ring = self._policy = None
        if self.steps is not None:
            self.steps.close()
            self.steps = None

    def figures(self) -> list[dict[str, object]]:
        """What each actor does; JSON types."""
        now_s = self._clock.monotonic()
        return [
            {
                "number": number,
                "pid": self._pids[number],
                "running": lane.running,
                "environments": lane.environments if (now := lane.assignment) is None else now.environments,
                "steps_per_s": self._rates[number].rate(now_s),
                "env_steps": lane.env_steps,
                "episodes": lane.episodes,
                "unrolls": lane.committed,
                "dropped": lane.torn,
                "restarts": self._restarts[number],
            }
            for number, lane in enumerate(self._lanes[: self._start.actors])
        ]

    async def _keep(self, number: int) -> None:
        """Keep one actor running."""
        lane, policy = self._lanes[number], RestartPolicy(self._config, f"actor {number}")
        while True:
            began_s = self._clock.monotonic()
            try:
                death = await self._live(number, lane)
            except WorkerError as error:
                policy.failed_to_start()
                how = f"couldn't be started: {error}"
            else:
                lived_s = self._clock.monotonic() - began_s
                policy.died(death, lived_s)
                if policy.give_up_reason is not None:
                    raise WorkerError(policy.give_up_reason)
                how = death.how
            text = f"actor {number} {how}; another takes its place in {policy.backoff_s:g} s"
            self._events.emit("actor-died", text, level="warning", actor=number)
            await asyncio.sleep(policy.backoff_s)
            self._restarts[number] += 1

    async def _live(self, number: int, lane: UnrollLane) -> Death:
        """Run one process to its end; tell how it ended.

        Raises:
            ConfigError: it can't act as configured.
            WorkerError: it couldn't be started.
        """
        _, (ring, policy) = self.collected()
        start, asks, spec = self._start, None, None
        if self.steps is not None:
            spec, region = await self.steps.opened()
            asks = self.steps, region
        first = StartActor(
            task=start.task,
            number=number,
            seed=actor_seed(start.seed, number, lane.lives),
            spec=self._spec,
            policy_size=self._size,
            threads=start.threads,
            allow_import=start.allow_import,
            step_delay_s=start.step_delay_s,
            steps=spec,
        )
        lane.started()
        link = await ActorLink.spawn(first, ring, policy, asks)
        self._pids[number] = link.pid
        try:
            stood_still = await self._acting(number, lane, link)
            return await link.ended(stood_still)
        finally:
            lane.running = False
            self._pids[number] = None
            await link.kill()  # where we were cancelled; does nothing to one that is gone
            if self.steps is not None:
                self.steps.left(number)

    async def _acting(self, number: int, lane: UnrollLane, link: ActorLink) -> str | None:
        """Wait until a process ends, or is stuck; tell why in the second case."""
        try:
            await link.acts()
        except WorkerError:
            return None
        lane.running = True
        stalled = asyncio.create_task(self._until_stalled(number, lane), name=f"actor {number} stalls")
        gone = asyncio.create_task(link.gone(), name=f"actor {number} ends")
        try:
            await asyncio.wait([stalled, gone], return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                gone.result()
                return None
            return "it made nothing though it might"
        finally:
            for task in (stalled, gone):
                task.cancel()
            await asyncio.wait([stalled, gone])

    async def _until_stalled(self, number: int, lane: UnrollLane) -> None:
        """Look at an actor until it is stuck."""
        watch, looked_s = StallWatch(), self._clock.monotonic()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now_s = self._clock.monotonic()
            self._rates[number].add(lane.env_steps - self._counted[number], now_s)
            self._counted[number] = lane.env_steps
            if watch.look(lane.committed, may_begin=lane.may_begin, elapsed_s=now_s - looked_s):
                return
            looked_s = now_s
