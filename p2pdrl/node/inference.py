"""Actions of the node's newest policy for whoever asks: ``POST /v1/act``, and the node's own actors.

    requests ──► Batcher ──► slot of shared memory ──► inference process ──► answers
                               NewestPolicy ──► policy in shared memory ──┘

One process of the node answers (`workers.inference`). It is started by the first request, ends after a while
without any, and is started again by the next request where it died. Requests are gathered for a few
milliseconds; while one batch is computed the next one fills another slot. Whoever waits has a deadline.

With ``node.actors.inference = "batched"`` the same process acts for the node's actors, which ask it without
us (`workers.inference`). It runs all the time then, is replaced at once where it dies, and has one copy of
the parameters, those that the learner wrote for its actors: what callers get is what the actors act with.
"""

# ruff: noqa: N815 (names carry shape suffixes)
from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from p2pdrl.api.answers import ApiRefusal
from p2pdrl.clock import Clock
from p2pdrl.config.node import InferenceConfig, NodeConfig
from p2pdrl.config.task import RegressionConfig
from p2pdrl.errors import ConfigError, TensorError, WorkerError
from p2pdrl.node.accounting.progress_tracker import ProgressTracker
from p2pdrl.node.background import first_ended
from p2pdrl.node.children.actors import ActorPool, StepPort
from p2pdrl.node.children.child_process import ProcessLink
from p2pdrl.node.children.restarts import Death, RestartPolicy
from p2pdrl.node.events import EventLog
from p2pdrl.node.training import Training
from p2pdrl.telemetry.metrics import Registry
from p2pdrl.tensors.inference_slots import InferenceSlots, InferenceSpec, PolicyAnswer
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.shared_policy import ActingPolicy, PolicyCopies, SharedPolicy, features_of
from p2pdrl.transport.codec import decode
from p2pdrl.workers.protocol import (
    ActedForActors,
    FromInference,
    Infer,
    InferenceReady,
    Inferred,
    StartInference,
    UseSlots,
    UseSteps,
    decode_from_inference,
    frame,
)

__all__ = ["Batcher", "Inference", "InferenceLink", "NewestPolicy"]

T = TypeVar("T")

SLOTS = 2
"""Batches in shared memory: one that is computed, one that is filled meanwhile."""
BUILD_S = 600.0
"""The longest that the process may take to build environment and network."""
REFRESH_S = 0.05
"""Shortest time between two copies of the parameters, and ten times what the last one took."""
MOMENTS_EVERY_S = 1.0
SMALL_BYTES = 1 << 20
"""Parameters up to this are copied on the event loop, others in a thread."""
BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 30.0
"""After a process that ended before it answered anything; doubles with each in a row."""


class Batcher(Generic[T]):
    """Requests that wait for their batch, oldest first. Pure: time comes in.

    Args:
        max_batch: most observations of a batch.
        wait_s: how long the oldest waits for others.
        max_waiting: most observations that wait, unless one request alone has more.
    """

    def __init__(self, max_batch: int, wait_s: float, max_waiting: int) -> None:
        self._max_batch = max_batch
        self._wait_s = wait_s
        self._max_waiting = max_waiting
        self._queue: deque[tuple[T, int, float]] = deque()
        self._rows = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def rows(self) -> int:
        """Observations that wait."""
        return self._rows

    def put(self, request: T, rows: int, now_s: float) -> bool:
        """Let a request wait; False where there is no room.

        Args:
            rows: its observations, ``max_batch`` at most.
        """
        if self._queue and self._rows + rows > self._max_waiting:
            return False
        self._queue.append((request, rows, now_s))
        self._rows += rows
        return True

    def drop(self, request: T) -> None:
        """Forget a request that isn't waited for any more; one that was taken is left alone."""
        for entry in self._queue:
            if entry[0] is request:
                self._queue.remove(entry)
                self._rows -= entry[1]
                return

    def due_in_s(self, now_s: float) -> float | None:
        """Return when the next batch is to be taken, 0 for now; None while nothing waits."""
        if not self._queue:
            return None
        if self._rows >= self._max_batch:
            return 0.0
        return max(0.0, self._queue[0][2] + self._wait_s - now_s)

    def take(self) -> list[T]:
        """Return the requests of the next batch: the oldest that fit, in their order."""
        taken: list[T] = []
        room = self._max_batch
        while self._queue and (not taken or self._queue[0][1] <= room):
            request, rows, _ = self._queue.popleft()
            self._rows -= rows
            room -= rows
            taken.append(request)
        return taken

    def clear(self) -> list[T]:
        """Return all that wait, and forget them."""
        found = [request for request, _, _ in self._queue]
        self._queue.clear()
        self._rows = 0
        return found


class NewestPolicy:
    """Copies a node's newest policy to where its inference process reads it.

    Of a node that learns that is its board, with all that was exchanged, normalised by the moments of the
    whole swarm, as evaluations are; of a node that only acts it is what its actors act with.
    """

    def __init__(self, training: Training, progress_tracker: ProgressTracker, clock: Clock) -> None:
        self._training = training
        self._progress_tracker = progress_tracker
        self._clock = clock
        spec = training.spec
        self._features = features_of(spec)
        self.size = spec.layout.size
        nbytes = SharedPolicy.nbytes_of(self.size, (self._features,))
        self.region = SharedRegion.create(nbytes, "newest policy")
        self._shared = SharedPolicy(self.region, self.size, (self._features,))
        self._copies = PolicyCopies(self.region, self.size, self._features)
        self._vector_D = np.empty(self.size, np.float32)
        self._written: object = None
        self._next_s = float("-inf")
        self._copying: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Have a policy there, and soon the newest: a large one is copied while older ones still answer.

        Raises:
            WorkerError: there is none yet.
        """
        if self._copying is not None and self._copying.done():
            done, self._copying = self._copying, None
            done.result()
        newest, now_s = self._newest(), self._clock.monotonic()
        if newest is None:
            raise WorkerError("this node has no policy yet")
        if newest == self._written or (self._written is not None and now_s < self._next_s):
            return
        if self.size * 4 <= SMALL_BYTES:
            self._write(newest)
        elif self._written is None:
            await asyncio.to_thread(self._write, newest)
        elif self._copying is None:
            self._copying = asyncio.create_task(asyncio.to_thread(self._write, newest), name="newest policy")

    async def close(self) -> None:
        """Free the memory."""
        if self._copying is not None:
            await asyncio.wait([self._copying])
        self.region.close()

    def _newest(self) -> object:
        """Tell one policy from another; None while there is none."""
        training = self._training
        if not training.learns:
            return None if training.actors is None else training.actors.policy.version
        if not training.ready:
            return None
        moments_age = int(self._clock.monotonic() / MOMENTS_EVERY_S) if self._features else 0
        return training.lineage, training.board.sets, training.policy_version, moments_age

    def _write(self, newest: object) -> None:
        began_s = self._clock.monotonic()
        training = self._training
        if training.learns:
            snapshot = training.board.now(self._vector_D)
            mean_F, scale_F = self._moments()
            self._shared.write(self._vector_D, ActingPolicy(snapshot.policy_version, 0.0, mean_F, scale_F))
        elif training.actors is not None:
            content = training.actors.policy.read()
            if content is None:
                return
            self._copies.write(content)
        self._written = newest
        now_s = self._clock.monotonic()
        self._next_s = now_s + max(REFRESH_S, 10.0 * (now_s - began_s))

    def _moments(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return the mean and 1 / deviation of all observations that the swarm has seen."""
        known = (self._training.learners.moments, self._progress_tracker.others_moments())
        parts = [
            Moments.from_wire(decode(moments["observations"], Any, "moments"))
            for moments in known
            if self._features and "observations" in moments
        ]
        found = Moments.merge(parts).standardization if parts else None
        if found is None:
            return np.zeros(self._features), np.ones(self._features)
        return found[0].reshape(-1), found[1].reshape(-1)


class InferenceLink(ProcessLink):
    """A running inference process."""

    NAME = "inference process"

    @classmethod
    async def spawn(
        cls, start: StartInference, policy: SharedRegion, steps: StepPort | None = None
    ) -> InferenceLink:
        """Start the process, and tell it what to act with.

        Args:
            steps: through which actors ask it; None without such.

        Raises:
            WorkerError: it can't be started.
        """
        environment = os.environ | {"OMP_NUM_THREADS": str(start.threads)}
        bells = () if steps is None else steps.bells
        fds = [policy.fd, *sorted({fd for bell in bells for fd in bell})]
        link = cls(*await cls.launch("p2pdrl.workers.inference", {"--policy": policy.fd}, environment, fds))
        try:
            await link.send(frame(start))
        except BaseException:
            await link.kill()
            raise
        return link

    async def ready(self) -> InferenceReady:
        """Wait until the network is built.

        Raises:
            ConfigError: it can't be, as configured.
            WorkerError: the process is gone, or took too long.
        """
        try:
            async with asyncio.timeout(BUILD_S):
                while True:
                    for message in await self.hear():
                        if isinstance(message, InferenceReady):
                            return message
        except TimeoutError:
            raise WorkerError(f"the inference process wasn't ready after {BUILD_S:.0f} s") from None

    async def hear(self) -> list[FromInference]:
        """Wait for messages; return them.

        Raises:
            ConfigError: it says that it can't work as configured.
            WorkerError: it is gone.
        """
        messages = [decode_from_inference(body) for body in await self.receive()]
        return [message for message in messages if not self.says_its_end(message)]


class _StuckError(WorkerError):
    """The process is there, and doesn't answer."""


@dataclass(eq=False)
class _Ask:
    """A request that waits."""

    obs_NX: npt.NDArray[Any]
    greedy: bool
    answer: asyncio.Future[PolicyAnswer]


@dataclass(eq=False)
class _Batch:
    """A batch that is being computed."""

    asks: list[_Ask]
    sent_s: float


class Inference:
    """This node's inference process, through all its restarts, and the requests that wait for it.

    Args:
        node: this node's configuration.
        seed: of sampled actions; each process has another.
        spawn: starts a process.
    """

    def __init__(
        self,
        node: NodeConfig,
        training: Training,
        progress_tracker: ProgressTracker,
        *,
        seed: int,
        clock: Clock,
        events: EventLog,
        registry: Registry,
        spawn: Callable[..., Any] = InferenceLink.spawn,
    ) -> None:
        self._node = node
        self._config: InferenceConfig = node.inference
        self._training = training
        self._progress_tracker = progress_tracker
        self._seed = seed
        self._clock = clock
        self._events = events
        self._registry = registry
        self._spawn = spawn
        config = self._config
        self._batcher: Batcher[_Ask] = Batcher(config.max_batch, config.batch_wait_s, config.max_waiting)
        self._spec: InferenceSpec | None = None
        self._spec_asks: list[asyncio.Future[InferenceSpec]] = []
        self._wanted = asyncio.Event()
        self._changed = asyncio.Event()
        self._in_flight: dict[int, _Batch] = {}
        self._policy: NewestPolicy | None = None
        self._memory: SharedRegion | None = None
        self._used_s = 0.0
        self._lives = 0
        self._answered = 0
        """Batches of this process."""
        self._backoff_s = 0.0
        self._not_before_s = float("-inf")
        self._hopeless: str | None = None
        actors = training.actors
        self._pool: ActorPool | None = actors if actors is not None and actors.batched else None
        """Actors that it acts for; None where they do so themselves."""
        self._restarts = RestartPolicy(node.learner, "the inference process")
        self._device: str | None = None
        self.pid: int | None = None
        """Of the process; None while there is none."""
        if isinstance(training.task.algorithm, RegressionConfig):
            self._hopeless = "a regression has no policy that could act"

    # --- requests -------------------------------------------------------------------------------

    async def spec(self) -> InferenceSpec:
        """Return what observations and actions are made of; the first time this starts the process.

        Raises:
            ApiRefusal: 409 where this node has no policy to ask; 503 while it can't say.
        """
        self._may_ask()
        if self._spec is not None:
            return self._spec
        ask: asyncio.Future[InferenceSpec] = asyncio.get_running_loop().create_future()
        self._spec_asks.append(ask)
        self._wanted.set()
        return await self._in_time(ask)

    async def act(self, obs_NX: npt.NDArray[Any], *, greedy: bool) -> PolicyAnswer:
        """Return actions for up to ``node.inference.max_batch`` observations, checked by the caller.

        Args:
            obs_NX: as `spec` says.
            greedy: take the likeliest actions; otherwise sample.

        Raises:
            ApiRefusal: as `spec`; 503 also where too many wait, or the answer doesn't come.
        """
        self._may_ask()
        began_s = self._clock.monotonic()
        ask = _Ask(obs_NX, greedy, asyncio.get_running_loop().create_future())
        if not self._batcher.put(ask, len(obs_NX), began_s):
            self._registry.act_requests_total.inc("busy")
            raise _later(
                f"{self._batcher.rows} observations wait already, and node.inference.max_waiting is "
                f"{self._config.max_waiting}; come again later, or ask another node"
            )
        self._wanted.set()
        self._changed.set()
        try:
            found = await self._in_time(ask.answer)
        finally:
            self._batcher.drop(ask)
        self._registry.act_requests_total.inc("ok")
        self._registry.act_observations_total.inc(len(obs_NX))
        self._registry.act_seconds.observe(self._clock.monotonic() - began_s)
        return found

    @property
    def max_rows(self) -> int:
        """Most observations of one request."""
        return self._config.max_batch

    def figures(self) -> dict[str, object]:
        """What the process does; JSON types."""
        return {
            "pid": self.pid,
            "device": self._device,
            "starts": self._lives,
            "waiting": self._batcher.rows,
        }

    def _may_ask(self) -> None:
        if self._hopeless is not None:
            raise ApiRefusal(409, self._hopeless)
        training = self._training
        there = training.ready
        if not training.learns or self._pool is not None:
            there = training.actors is not None and training.actors.policy.version is not None
        if not there:
            raise _later("this node has no policy yet; wait until it trains")
        left_s = self._not_before_s - self._clock.monotonic()
        if left_s > 0:
            self._registry.act_requests_total.inc("failed")
            raise _later("the inference process failed a moment ago; see this node's events", left_s)

    async def _in_time(self, ask: asyncio.Future[T]) -> T:
        try:
            async with asyncio.timeout(self._config.deadline_s):
                return await ask
        except TimeoutError:
            self._registry.act_requests_total.inc("late")
            raise _later(
                f"no answer within node.inference.deadline_s = {self._config.deadline_s:g}"
            ) from None

    # --- the process ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a process while it is asked for, or while actors may ask it, until cancelled.

        Raises:
            ConfigError: it can't act for this node's actors as configured.
            WorkerError: it dies again and again in the same way, and they have nobody else to ask.
        """
        try:
            while True:
                if self._pool is None:
                    await self._wanted.wait()
                await self._live()
        finally:
            self._refuse_all("this node is ending")
            if self._policy is not None:
                await self._policy.close()
            if self._memory is not None:
                self._memory.close()

    async def _live(self) -> None:
        """Run one process to its end; tell those who wait where it fails."""
        self._answered = 0
        began_s = self._clock.monotonic()
        death: Death | None = None
        try:
            death = await self._one_life()
            if death is None:
                return  # nobody asked for long
            how = death.how
        except ConfigError as error:
            if self._pool is not None:
                raise
            self._hopeless = f"this node's policy can't be asked: {error}"
            self._events.emit("inference-failed", self._hopeless, level="warning")
            self._refuse_all(self._hopeless, status=409)
            return
        except (WorkerError, TensorError) as error:
            how = f"couldn't be started: {error}"
        self._registry.inference_failures_total.inc()
        if self._pool is not None:
            await self._replace(how, death, self._clock.monotonic() - began_s)
            return
        self._backoff_s = 0.0 if self._answered else self._next_backoff_s()
        self._not_before_s = self._clock.monotonic() + self._backoff_s
        text = f"the inference process {how}"
        self._events.emit("inference-failed", f"{text}; the next request starts another", level="warning")
        self._refuse_all(text)

    async def _replace(self, how: str, death: Death | None, lived_s: float) -> None:
        """Tell of an end, and wait until actors that wait are to have another process.

        Raises:
            WorkerError: it died again and again in the same way.
        """
        policy = self._restarts
        if death is None:
            policy.failed_to_start()
        else:
            policy.died(death, lived_s)
        text = f"the inference process {how}"
        self._refuse_all(text)
        if policy.give_up_reason is not None:
            raise WorkerError(policy.give_up_reason)
        text = f"{text}; actors wait, and another takes its place in {policy.backoff_s:g} s"
        self._events.emit("inference-failed", text, level="warning")
        self._not_before_s = self._clock.monotonic() + policy.backoff_s
        await asyncio.sleep(policy.backoff_s)

    def _next_backoff_s(self) -> float:
        return min(max(BACKOFF_S, 2.0 * self._backoff_s), LONGEST_BACKOFF_S)

    async def _one_life(self) -> Death | None:
        """Run one process to its end; return how it died, None where it wasn't needed any more.

        Raises:
            ConfigError: it can't work as configured.
            WorkerError: it couldn't be started.
            TensorError: the system gives no memory to share.
        """
        region, size = await self._acts_with()
        steps = None if self._pool is None else self._pool.steps
        self._lives += 1
        self._registry.inference_starts_total.inc()
        start = StartInference(
            task=msgspec.json.encode(self._training.task),
            seed=(self._seed + self._lives) % 2**31,
            device=self._config.device,
            threads=self._node.learner.threads,
            allow_import=self._node.may_import,
            policy_size=size,
            policy_nbytes=region.nbytes,
            shares=() if steps is None else steps.shares,
            bells=() if steps is None else steps.bells,
            step_wait_s=self._config.batch_wait_s,
            max_rows=self._config.max_batch,
        )
        link: InferenceLink = await self._spawn(start, region, steps)
        self.pid = link.pid
        try:
            try:
                slots = await self._attach(link)
                await self._serve(link, slots)
            except _StuckError as error:
                return await link.ended(stood_still=str(error))
            except WorkerError:
                return await link.ended()
            self._wait_again()
            return None
        finally:
            self.pid = self._device = None
            await link.kill()

    async def _acts_with(self) -> tuple[SharedRegion, int]:
        """Return the memory that the process reads parameters from, and how many there are.

        Raises:
            WorkerError: there is no policy yet.
            TensorError: the system gives no such memory.
        """
        if self._pool is not None:
            return self._pool.policy_region, self._training.spec.layout.size
        if self._policy is None:
            self._policy = NewestPolicy(self._training, self._progress_tracker, self._clock)
        await self._policy.refresh()
        return self._policy.region, self._policy.size

    async def _attach(self, link: InferenceLink) -> InferenceSlots:
        """Wait until the process is built, and share the memory for batches with it."""
        ready = await link.ready()
        self._spec, self._device = ready.spec, ready.device
        if ready.refusal:
            self._hopeless = f"this node's policy can't be asked: {ready.refusal}"
            self._refuse_all(self._hopeless, status=409)
        rows = self._config.max_batch
        nbytes = InferenceSlots.nbytes_of(ready.spec, rows, SLOTS)
        if self._memory is None:
            self._memory = SharedRegion.create(nbytes, "inference")
        await link.send(frame(UseSlots(nbytes, rows, SLOTS)), [self._memory])
        if ready.steps is not None and self._pool is not None and self._pool.steps is not None:
            region = self._pool.steps.open(ready.steps)
            await link.send(frame(UseSteps(region.nbytes)), [region])
        for ask in self._spec_asks:
            if not ask.done():
                ask.set_result(ready.spec)
        self._spec_asks.clear()
        self._used_s = self._clock.monotonic()
        return InferenceSlots(self._memory, ready.spec, rows, SLOTS)

    async def _serve(self, link: InferenceLink, slots: InferenceSlots) -> None:
        """Hand batches to the process, and answers to who asked, until nobody asks for long.

        Raises:
            ConfigError: as `InferenceLink.hear`.
            WorkerError: the process is gone, or stuck.
        """
        jobs = [
            asyncio.create_task(self._send_batches(link, slots), name="inference batches"),
            asyncio.create_task(self._hear_answers(link, slots), name="inference answers"),
            asyncio.create_task(self._watch(), name="inference watch"),
        ]
        await first_ended(jobs)
        failed = [job.exception() for job in jobs if not job.cancelled()]
        for error in failed:
            if error is not None:
                raise error

    async def _send_batches(self, link: InferenceLink, slots: InferenceSlots) -> None:
        while True:
            await self._due()
            if self._policy is not None:
                await self._policy.refresh()
            asks = self._batcher.take()
            if not asks:
                continue
            number = next(number for number in range(SLOTS) if number not in self._in_flight)
            asks.sort(key=lambda ask: not ask.greedy)
            rows = greedy = 0
            for ask in asks:
                count = len(ask.obs_NX)
                slots[number].obs_NX[rows : rows + count] = ask.obs_NX
                rows += count
                greedy += count * ask.greedy
            self._in_flight[number] = _Batch(asks, self._clock.monotonic())
            self._registry.act_batch_observations.observe(rows)
            await link.send(frame(Infer(number, rows, greedy)))

    async def _due(self) -> None:
        """Wait until a batch is to be taken, and a slot is free for it."""
        while True:
            self._changed.clear()
            due_s = self._batcher.due_in_s(self._clock.monotonic())
            if len(self._in_flight) == SLOTS:
                due_s = None
            if due_s == 0.0:
                return
            try:
                async with asyncio.timeout(due_s):
                    await self._changed.wait()
            except TimeoutError:
                return

    async def _hear_answers(self, link: InferenceLink, slots: InferenceSlots) -> None:
        while True:
            for message in await link.hear():
                if isinstance(message, Inferred):
                    self._answer(message, slots)
                elif isinstance(message, ActedForActors):
                    self._answered += len(message.seconds)
                    self._registry.observe_steps(message.environments, message.seconds)

    def _answer(self, message: Inferred, slots: InferenceSlots) -> None:
        batch, slot = self._in_flight.pop(message.slot), slots[message.slot]
        self._changed.set()
        self._answered += 1
        self._used_s = self._clock.monotonic()
        has_values = self._spec is not None and self._spec.has_values
        at = 0
        for ask in batch.asks:
            rows = slice(at, at + len(ask.obs_NX))
            at = rows.stop
            if not ask.answer.done():
                ask.answer.set_result(
                    PolicyAnswer(
                        slot.actions_NA[rows].copy(),
                        slot.log_probs_N[rows].copy(),
                        slot.values_N[rows].copy() if has_values else None,
                        message.policy_version,
                    )
                )

    async def _watch(self) -> None:
        """Return when nobody has asked for long.

        Raises:
            _StuckError: the process takes too long for a batch.
        """
        overdue, before, since_s = 0, self._questions(), self._clock.monotonic()
        while True:
            await asyncio.sleep(min(1.0, self._config.idle_s / 4, self._config.deadline_s / 4))
            now_s = self._clock.monotonic()
            questions = self._questions()
            if not any(asked and asked == same for asked, same in zip(questions, before, strict=True)):
                since_s = now_s
            before = questions
            sent_s = min((batch.sent_s for batch in self._in_flight.values()), default=now_s)
            # twice in a row: an answer may lie there where it was this daemon that stood still
            overdue = overdue + 1 if now_s - min(sent_s, since_s) > self._config.deadline_s else 0
            if overdue > 1:
                raise _StuckError(f"it took over {self._config.deadline_s:g} s for a batch")
            waits = bool(self._in_flight or self._batcher or self._pool is not None)
            if not waits and now_s - self._used_s >= self._config.idle_s:
                self._wanted.clear()
                return

    def _questions(self) -> tuple[int, ...]:
        """What each actor waits for, by number; 0 for nothing."""
        steps = None if self._pool is None else self._pool.steps
        return () if steps is None else steps.questions

    def _wait_again(self) -> None:
        """Let requests that came while the process was ending wait for the next one."""
        now_s = self._clock.monotonic()
        for batch in self._in_flight.values():
            for ask in batch.asks:
                self._batcher.put(ask, len(ask.obs_NX), now_s)
        self._in_flight.clear()

    def _refuse_all(self, why: str, status: int = 503) -> None:
        """Refuse all that wait."""
        self._wanted.clear()
        asks = [ask.answer for ask in self._batcher.clear()]
        asks += [ask.answer for batch in self._in_flight.values() for ask in batch.asks]
        self._in_flight.clear()
        waiting: list[asyncio.Future[Any]] = [*asks, *self._spec_asks]
        self._spec_asks.clear()
        for ask in waiting:
            if not ask.done():
                self._registry.act_requests_total.inc("failed")
                ask.set_exception(_later(why) if status == 503 else ApiRefusal(status, why))


def _later(why: str, after_s: float = 1.0) -> ApiRefusal:
    return ApiRefusal(503, why, {"Retry-After": str(max(1, round(after_s)))})
