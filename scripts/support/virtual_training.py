"""Swarms that really learn, in virtual time: trainers, strategies and evaluations in one process.

A node is a `testing.virtual_swarm.SimNode` whose learner is a trainer. What it computes, it computes; how
long that takes is what the description says: so much for an environment step, a gradient, a way over a link.
What a node's daemon does beside its strategy is done as there: normalisers' counters and the swarm's progress
reach all nodes, a second late at most; a newcomer takes a living node's state.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np

from p2pdrl.config.learner_mode import LearnerMode
from p2pdrl.config.task import TaskConfig, rate_power, relative_speeds
from p2pdrl.node.children.supervisor import LearnerRequestChannel
from p2pdrl.planner.description import NodeLink, SwarmDescription
from p2pdrl.planner.emulate import LinkedNetwork
from p2pdrl.planner.forecast import Statistics
from p2pdrl.planner.network import Network, Processors
from p2pdrl.rl.evaluate import evaluate
from p2pdrl.rl.registry import build_trainer
from p2pdrl.rl.trainer import Trainer
from p2pdrl.strategies.protocol import AnswerKind, LearnerRequest
from p2pdrl.tensors.board import BoardSpec, DaemonBoard, LearnerBoard
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.testing.virtual_swarm import SimNode, SimSwarm
from p2pdrl.testing.virtual_time import VirtualTimeLoop
from p2pdrl.workers.learner_modes import ModeSwitcher
from p2pdrl.workers.replica import Replica

__all__ = [
    "Costs",
    "Judged",
    "TrainingLearner",
    "VirtualTraining",
    "evaluated",
    "measured_costs",
    "watch_work",
]

MOST_NODES = 64
"""That ever are in one swarm."""
WATCH_S = 0.1
"""How often somebody looks whether an evaluation is due."""
NEWS_S = 1.0
"""How often nodes hear of the swarm's progress and the others' normalisers."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a node of factor 1 needs, in seconds.

    Attributes:
        env_step_s: for each environment step, one after the other.
        gradient_s: for each gradient, forward and backward pass and step.
        row_s: for each row (environment step) that a gradient is made of, beside that.
    """

    env_step_s: float = 0.002
    gradient_s: float = 0.0
    row_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Judged:
    """One evaluation of the swarm's policy.

    Attributes:
        seconds: virtual ones since the beginning.
        env_steps: that the whole swarm had made.
        value: mean return.
    """

    seconds: float
    env_steps: int
    value: float


def measured_costs(task: TaskConfig, updates: int = 2) -> Costs:
    """Return what gradients of a task cost on this machine, on one thread; environment steps are free.

    Minibatches of an update, and of one with an eighth of its steps, give a line: so much each, and so much
    a row.
    """
    algorithm = task.algorithm
    short = getattr(algorithm, "unroll_steps", 0) // 8
    tasks = [task]
    if short:
        shorter = msgspec.structs.replace(algorithm, unroll_steps=short)
        tasks.append(msgspec.structs.replace(task, algorithm=shorter))
    points = [_gradient_cost(one, updates) for one in tasks]
    (rows, seconds), (few_rows, few_seconds) = points[0], points[-1]
    row_s = max(0.0, (seconds - few_seconds) / (rows - few_rows)) if rows > few_rows else 0.0
    return Costs(0.0, max(0.0, seconds - row_s * rows), row_s)


def _gradient_cost(task: TaskConfig, updates: int) -> tuple[float, float]:
    """Rows of a minibatch, and processor seconds of its gradient and step, of medians."""
    trainer = build_trainer(task, seed=1, device="cpu")
    rows: list[int] = []
    collected_s: list[float] = []
    spent_s: list[float] = []
    watch_work(trainer, lambda _, seconds: collected_s.append(seconds), lambda batch: rows.append(batch.rows))
    while len(spent_s) < updates:  # one that fills a replay memory makes no gradient
        gradients = len(rows)
        began_s = time.process_time()
        trainer.step()
        if made := len(rows) - gradients:
            spent_s.append((time.process_time() - began_s - collected_s[-1]) / made)
    trainer.close()
    return statistics.median(rows), statistics.median(spent_s)


def watch_work(
    trainer: Trainer, collected: Callable[[Any, float], None], computed: Callable[[Any], None]
) -> None:
    """Tell of each batch, with the processor seconds of its collection, and of each gradient's minibatch."""
    collect = trainer.source.next

    def collects() -> Any:
        began_s = time.process_time()
        batch = collect()
        collected(batch, time.process_time() - began_s)
        return batch

    trainer.source.next = collects
    for loss in trainer.algorithm.losses:
        compute = loss.gradients

        def computes(batch: Any, compute: Any = compute) -> Any:
            terms = compute(batch)
            computed(batch)
            return terms

        loss.gradients = computes


def evaluated(task: TaskConfig, judge: Trainer, vector: Float32Array, learner: Trainer, number: int) -> float:
    """Return the mean return of a policy that a learner has, of the evaluation of that number.

    Args:
        judge: lends its network.
        vector: the parameters.
    """
    judge.set_state(vector, None)
    return evaluate(
        judge.policy,
        task.env,
        task.evaluation.episodes,
        greedy=task.evaluation.mode == "greedy",
        seed=number,
        normalizer=learner.observation_normalizer,
    ).mean


class _Ended(BaseException):
    """The learner is to end where it is."""


class TrainingLearner:
    """A trainer as a strategy sees a node's learner.

    Its code runs in a thread, which works only while the loop waits for it.

    Args:
        trainer: closed with this.
        costs: of this node.
        learner_mode: how it works.
        learning_rate: the algorithm's now.
        epoch: mode epoch.
    """

    def __init__(
        self,
        trainer: Trainer,
        costs: Costs,
        learner_mode: LearnerMode,
        learning_rate: Callable[[], float],
        epoch: int = 1,
    ) -> None:
        self.trainer, self._costs, self._learning_rate = trainer, costs, learning_rate
        spec = BoardSpec(trainer.layout, trainer.sidecar_layout)
        self._region = SharedRegion.create(spec.nbytes, "learner")
        self.board = DaemonBoard(self._region, spec)
        self._own = LearnerBoard(self._region, spec)
        self.replica = Replica(trainer, self._own)
        self._channel = LearnerRequestChannel()
        self._fds: deque[int] = deque()
        self._epoch = epoch
        self._switcher = ModeSwitcher(
            trainer,
            self.replica,
            say=self._say,
            listen=self._listen,
            report=lambda: None,
            paused=lambda: False,
        )
        self.samples = 1  # per update: what `SimNode` multiplies updates by
        self.idle: Callable[[], None] = lambda: None
        self.on_update: Callable[[int], None] = lambda _updates: None
        self.env_steps = self.updates = self.gradients = 0
        self.waited_s = self._busy_s = 0.0
        self.busy_steps_per_s = 0.0
        """Of its own work, without waits; 0 before the first update."""
        self._spent_s = 0.0
        self._heard = asyncio.Event()
        self._go, self._yielded = threading.Semaphore(0), threading.Semaphore(0)
        self._wish: tuple[str, float] | None = None
        self._ending = False
        self._error: BaseException | None = None
        self._news: list[Callable[[], None]] = []
        watch_work(trainer, self._collected, self._computed)
        trainer.collected = self._between
        self.learner_mode = learner_mode
        self.replica.take()
        self.replica.publish(always=True)

    # -- what the strategy sees

    @property
    def x(self) -> Float32Array:
        """The parameters."""
        return self.trainer.flat

    @property
    def version(self) -> int:
        """Of the policy."""
        return self.replica.version

    @property
    def learning_rate(self) -> float:
        """The algorithm's now."""
        return self._learning_rate()

    @property
    def learner_mode(self) -> LearnerMode:
        """How it works."""
        return self._channel.learner_mode

    @learner_mode.setter
    def learner_mode(self, learner_mode: LearnerMode) -> None:
        work, regions = self._channel.arrange(learner_mode, self._epoch, self.trainer.layout.size)
        fds = deque(os.dup(region.fd) for region in regions)
        self._switcher.hear(work, fds.popleft)
        self._heard.set()

    async def next_request(self) -> LearnerRequest:
        """Wait for the next request."""
        return await self._channel.next_request()

    def answer(
        self,
        request: LearnerRequest,
        kind: AnswerKind,
        learning_rate: float | None = None,
        *,
        end_update: bool = False,
    ) -> None:
        """Let the learner go on."""
        content = 0
        if kind == "set":
            self.board.flush()
            content = self.board.content_id
        message = self._channel.answered(request, kind, content, learning_rate, end_update=end_update)
        if message is not None:
            self._switcher.answered(message)
            self._heard.set()

    def preempt(self) -> None:
        """End the collection under way; here it is over at once."""
        self._channel.preempt()

    def drop_posts(self) -> None:
        """Nobody waits for answers of the mode that ended: `learner_mode` says so to the learner."""

    def now(self) -> Float32Array:
        """The vector with everything that was posted."""
        out = np.empty(self.trainer.layout.size, np.float32)
        self.board.now(out)
        return out

    def close(self) -> None:
        """Free everything."""
        self.trainer.close()
        self._channel.close()
        self._region.close()

    # -- the loop of the learner

    async def run(self, updates: int | None = None) -> None:
        """Train until it is cancelled, or for so many updates."""
        thread = threading.Thread(target=self._live, args=(updates,), name="learner", daemon=True)
        self._ending, self._error = False, None
        thread.start()
        try:
            while self._resume():
                kind, seconds = self._wish
                if kind == "sleep":
                    await asyncio.sleep(seconds)
                    continue
                began_s = asyncio.get_running_loop().time()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._heard.wait()
                self.waited_s += asyncio.get_running_loop().time() - began_s
        finally:
            if thread.is_alive():
                self._ending = True
                self._resume()
            thread.join()
        if self._error is not None:
            raise self._error

    def soon(self, news: Callable[[], None]) -> None:
        """Have the learner hear that between two updates."""
        self._news.append(news)

    def _resume(self) -> bool:
        """Let the thread go on until it wants to wait; False once it has ended."""
        self._wish = None
        self._go.release()
        self._yielded.acquire()
        return self._wish is not None

    def _pass(self, kind: str, seconds: float) -> None:
        """In the thread: wait, as far as virtual time goes."""
        self._wish = (kind, seconds)
        self._yielded.release()
        self._go.acquire()
        if self._ending:
            raise _Ended

    def _spend(self) -> None:
        """Wait for what was computed since the last time."""
        spent_s, self._spent_s = self._spent_s, 0.0
        if spent_s > 0:
            self._busy_s += spent_s
            self._pass("sleep", spent_s)

    def _live(self, updates: int | None) -> None:
        self._go.acquire()
        try:
            while updates is None or self.updates < updates:
                self._turn()
        except _Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            self._error = error
        finally:
            self._wish = None
            self._yielded.release()

    def _turn(self) -> None:
        """As `workers.learner.Learner` does it."""
        news, self._news = self._news, []
        for one in news:
            one()
        self._switcher.turn()
        self.replica.take()
        stats = self.trainer.step()
        self._spend()
        self.replica.moved(versions=int(self._switcher.learner_mode.steps))
        self.updates += 1
        self.env_steps += stats.env_steps
        self.samples = stats.env_steps
        self.busy_steps_per_s = self.env_steps / self._busy_s
        self._switcher.updated(stats.env_steps)
        self.replica.publish()
        self.on_update(1)
        self.board.flush()

    def _say(self, posted: Any) -> None:
        self._spend()
        self._channel.posted(posted)

    def _listen(self, seconds: float) -> None:
        self._spend()
        self._heard.clear()
        self._pass("listen", seconds)
        self.board.flush()

    def _collected(self, batch: Any, _: float) -> None:
        self._spent_s += batch.env_steps * self._costs.env_step_s

    def _between(self) -> None:
        """Take what came while the batch was collected."""
        self._spend()
        self.replica.take()

    def _computed(self, batch: Any) -> None:
        self.gradients += 1
        self._spent_s += self._costs.gradient_s + self._costs.row_s * batch.rows


class VirtualTraining:
    """A swarm that trains a task in virtual time.

    Args:
        task: the swarm's; its strategy, evaluation and number of environment steps are kept.
        nodes: how many there are at first.
        costs: of a node of factor 1.
        link: of each node.
        factors: how many times slower than that each node is; 1 for those beyond.
        seed: of everything random but the task's own.
        say: told of each evaluation.
    """

    def __init__(
        self,
        task: TaskConfig,
        nodes: int,
        costs: Costs,
        link: NodeLink,
        *,
        factors: tuple[float, ...] = (),
        seed: int = 0,
        say: Callable[[Judged], None] = lambda _: None,
    ) -> None:
        self.task, self._costs, self._seed, self._say = task, costs, seed, say
        self._factors, self._first = factors, nodes
        self._description = SwarmDescription(nodes=MOST_NODES, links=(link,))
        self.statistics = Statistics(MOST_NODES)
        self._swarm: SimSwarm | None = None
        self._judge = build_trainer(task, seed=seed, device="cpu")
        self.judged: list[Judged] = []

    @property
    def learners(self) -> list[TrainingLearner]:
        """Of all nodes that ever were."""
        assert self._swarm is not None  # noqa: S101 - it runs
        return [node.learner for node in self._swarm.nodes]

    @property
    def living(self) -> list[int]:
        """Numbers of the nodes that are there."""
        assert self._swarm is not None  # noqa: S101 - it runs
        living = self._swarm.living
        return [number for number, node in enumerate(self._swarm.nodes) if node in living]

    @property
    def env_steps(self) -> int:
        """Of the whole swarm."""
        return sum(learner.env_steps for learner in self.learners)

    @property
    def bytes_per_node(self) -> float:
        """Sent, mean over the nodes there were."""
        return sum(self.statistics.wire_out) / max(1, len(self.learners))

    def run(
        self,
        goal: float,
        *,
        in_a_row: int = 2,
        plan: Callable[[VirtualTraining], Coroutine[Any, Any, None]] | None = None,
    ) -> bool:
        """Train until so many evaluations in a row are at the goal, or the task's steps are made.

        Args:
            plan: what happens meanwhile: nodes that come and go.

        Returns:
            Whether the goal was reached.
        """
        with asyncio.Runner(loop_factory=_InlineLoop) as runner:
            return runner.run(self._run(goal, in_a_row, plan))

    async def _run(self, goal: float, in_a_row: int, plan: Any) -> bool:
        rng = random.Random(self._seed)
        network = LinkedNetwork(
            Network(self._description, MOST_NODES, self.statistics, rng),
            Processors(self._description.costs, MOST_NODES),
            scale=1.0,
            head_bytes=self._description.costs.call_bytes / 2.0,
        )
        self._swarm = SimSwarm(network)
        for _ in range(self._first):
            self._add()
        self._swarm.introduce()
        self._divide()
        for node in self._swarm.nodes:
            await node.start()
        planned = None if plan is None else asyncio.create_task(plan(self))
        try:
            solved = await self._watch(goal, in_a_row)
            await self.ended()
            return solved
        finally:
            if planned is not None:
                planned.cancel()
            await self._swarm.close()
            self._judge.close()

    async def join(self) -> None:
        """One more node comes, takes a living one's state, and trains."""
        swarm = self._swarm
        donor = swarm.living[0]
        node = self._add()
        self._give(donor, node)
        swarm.introduce()
        self._divide()
        await node.start()

    async def kill(self, number: int) -> None:
        """The power of that node is cut."""
        await self._swarm.kill(self._swarm.nodes[number])

    def _add(self) -> SimNode:
        swarm = self._swarm
        number = len(swarm.nodes)
        factor = self._factors[number] if number < len(self._factors) else 1.0
        costs = Costs(*(factor * value for value in dataclasses.astuple(self._costs)))
        seed = int(np.random.SeedSequence((self._seed, number)).generate_state(1)[0]) >> 1
        trainer = build_trainer(self.task, seed=seed, device="cpu")

        def learner(mode: LearnerMode) -> TrainingLearner:
            return TrainingLearner(trainer, costs, mode, self._learning_rate)

        node = swarm.add_learner(self.task.strategy, learner)

        async def take(donor: str) -> bool:
            found = [one for one in swarm.living if one.id == donor]
            for one in found:
                self._give(one, node)
            return bool(found)

        node.swarm.take = take
        return node

    def _give(self, donor: SimNode, taker: SimNode) -> None:
        """Post a node's whole state to another, as a transfer does."""
        trainer = donor.learner.trainer
        sidecar = {name: array.copy() for name, array in trainer.sidecar().items()}
        taker.learner.board.post_set(trainer.flat.copy(), sidecar, donor.learner.version)

    def _learning_rate(self) -> float:
        algorithm = self.task.algorithm
        return algorithm.learning_rate * (1.0 - self._fraction if algorithm.anneal == "linear" else 1.0)

    @property
    def _fraction(self) -> float:
        total = self.task.stop.env_steps
        return min(1.0, self.env_steps / total) if total else 0.0

    async def _watch(self, goal: float, in_a_row: int) -> bool:
        every, due, good, told_s = self.task.evaluation.every, 0, 0, 0.0
        loop = asyncio.get_running_loop()
        limit = self.task.stop.env_steps or float("inf")
        while True:
            await asyncio.sleep(WATCH_S)
            failed = [node for node in self._swarm.living if node.failure is not None]
            if failed:
                raise failed[0].failure
            if loop.time() >= told_s + NEWS_S:
                told_s = loop.time()
                self._tell()
            if self.env_steps >= due + every:
                due = self.env_steps // every * every
                value = self._evaluate()
                self.judged.append(Judged(loop.time(), self.env_steps, value))
                self._say(self.judged[-1])
                good = good + 1 if value >= goal else 0
                if good == in_a_row:
                    return True
            if self.env_steps >= limit:
                return False

    def judged_nodes(self) -> list[SimNode]:
        """Whose policies count: those of the living, in turn."""
        return self._swarm.living

    def _evaluate(self) -> float:
        nodes = self.judged_nodes()
        return self.judge(nodes[len(self.judged) % len(nodes)], len(self.judged) + 1)

    def judge(self, node: SimNode, number: int) -> float:
        """Mean return of what a node holds now, of the evaluation of that number."""
        return evaluated(self.task, self._judge, node.learner.now(), node.learner.trainer, number)

    async def ended(self) -> None:
        """The training has ended; the nodes are still there."""
        return

    def _divide(self) -> None:
        """Let the living learners know their part of each update."""
        power = rate_power(self.task, self.task.strategy)
        living = self._swarm.living
        speeds = relative_speeds([node.learner.busy_steps_per_s for node in living], power or 0.0)
        for number, (node, speed) in enumerate(zip(living, speeds, strict=True)):
            share = (0, 1, 0.0) if power is None else (number, len(living), power, speed, sum(speeds))
            node.learner.soon(functools.partial(node.learner.trainer.share, *share))

    def _tell(self) -> None:
        """Let the learners hear of each other's normalisers, and of how far and how many all are."""
        self._divide()
        swarm, fraction, env_steps = self._swarm, self._fraction, self.env_steps
        moments = [node.learner.trainer.own_moments() for node in swarm.nodes]  # of the dead, too
        for number, node in enumerate(swarm.nodes):
            if node not in swarm.living:
                continue
            others = [one for other, one in enumerate(moments) if other != number]
            names = moments[number] if others else ()
            merged = {name: Moments.merge([one[name] for one in others]) for name in names}

            def news(trainer: Trainer = node.learner.trainer, merged: dict[str, Moments] = merged) -> None:
                trainer.set_progress(fraction, env_steps)
                if merged:
                    trainer.set_other_moments(merged)

            node.learner.soon(news)


class _InlineLoop(VirtualTimeLoop):
    """Work for threads is done at once: in virtual time nobody can wait for one."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Call it; return what it gave."""
        del executor
        future: asyncio.Future[Any] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the caller's
            future.set_exception(error)
        return future
