"""One learner and actors on many nodes that really act and learn, in virtual time and one process.

The rings that unrolls lie in, the source that chooses among them, environments, policies, the learner and its
evaluation are the real ones; how long something takes is what is said, as in `support.virtual_training`. The
first node learns and acts, the others act. An actor of another node begins its next unroll once the answer to
its last one has come, by the policy that came with it: whole, or as differences from the one that it has
(`PolicyImage`); the learner's own is one unroll ahead. A replay memory
is the learner's own: of its rows as many are new at each update as `min_replay_ratio` allows.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pdrl.config.task import ReplayOptions, TaskConfig
from p2pdrl.planner.description import NodeLink
from p2pdrl.rl.registry import RolloutContext, build_trainer
from p2pdrl.rl.rollout import RawUnroll
from p2pdrl.rl.rollout_worker import RolloutWorker
from p2pdrl.rl.sources.unrolls import pack
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.shared_policy import ActingPolicy, PolicyCopies, PolicyImage, SharedPolicy
from p2pdrl.tensors.unroll_ring import UnrollLane, UnrollRing, assignments
from p2pdrl.workers.actor_source import ActorSource
from support.virtual_training import NEWS_S, Costs, Judged, evaluated, watch_work

__all__ = ["VirtualActors"]

FULL_S = (0.002, 0.05)
"""Before an unroll is offered again that there was no room for: at first, and at most."""


class _Source(ActorSource[Any]):
    """Has several batches of unrolls go to a replay memory at once, where they came faster than updates."""

    most = 1
    """For each update."""

    def next(self) -> Any:
        """Return the last of them, with all their steps."""
        batch = super().next()
        steps = batch.env_steps
        for _ in range(self.most - 1):
            self.commit()
            if not self.waiting:
                break
            batch = super().next()
            steps += batch.env_steps
        return batch if steps == batch.env_steps else replace(batch, env_steps=steps)


@dataclass
class _Actor:
    """The actor of a node."""

    node: int
    worker: RolloutWorker
    lane: UnrollLane
    factor: float
    policy: ActingPolicy
    """With which it acts, the parameters aside."""
    acts: bool = False


class VirtualActors:
    """A swarm of one learner and many actors that trains a task in virtual time.

    Args:
        task: its evaluation and number of environment steps are kept.
        nodes: how many act, the learner's among them.
        costs: of a node of factor 1; gradients are the learner's.
        link: of each node.
        factors: how many times slower than that each node acts; 1 for those beyond.
        seed: of everything random but the task's own.
        say: told of each evaluation.

    Attributes:
        judged: each evaluation.
        env_steps: of the whole swarm; ``updates`` and ``gradients`` likewise.
        busy_s: seconds that the learner computed.
        staleness: of each update's unrolls, in versions of the policy.
        bytes_out: sent by all nodes.
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
        self.task, self._costs, self._link, self._seed, self._say = task, costs, link, seed, say
        self.judged: list[Judged] = []
        self.staleness: list[float] = []
        self.env_steps = self.updates = self.gradients = self.bytes_out = 0
        self.busy_s = 0.0
        self._now_s = self._spent_s = 0.0
        self._in_free_s = self._out_free_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._learning = False

        def source(acting: RolloutContext[Any]) -> _Source:
            return _Source(acting, 1, 1, nodes - 1, clock=lambda: self._now_s)

        environments = task.env.num_envs
        self.trainer = build_trainer(
            task, seed=self._word(0), device="cpu", source=source, streams=environments * nodes
        )
        found = self.trainer.source
        assert isinstance(found, _Source)  # noqa: S101 - made above
        self._source = found
        if isinstance(task.algorithm, ReplayOptions):
            ratio = getattr(task.algorithm, "min_replay_ratio", 0.0) or 1.0
            found.most = max(1, round(1.0 / ratio))
        self._judge = build_trainer(task, seed=seed, device="cpu")
        self._regions = [
            SharedRegion.create(found.spec.nbytes, "unrolls"),
            SharedRegion.create(found.policy_nbytes, "policy"),
        ]
        found.attach(*self._regions)
        watch_work(self.trainer, lambda _batch, _seconds: None, self._computed)
        self.trainer.publish()
        lanes = UnrollRing(self._regions[0], found.spec).lanes
        whole = task.scaling == "none" or isinstance(task.algorithm, ReplayOptions)
        parts = 1 if whole else nodes
        self._actors = []
        for node, lane in enumerate(lanes):
            (own,) = assignments([environments], node % parts, parts)
            lane.assign(own)
            lane.started()
            lane.running = True
            worker = RolloutWorker(
                task, self._word(node + 1), own.environments, first=own.first, total=own.total
            )
            factor = factors[node] if node < len(factors) else 1.0
            self._actors.append(_Actor(node, worker, lane, factor, self._read(worker)))
        features = math.prod(self._actors[0].worker.obs_shape)
        self._copies = PolicyCopies(self._regions[1], self.trainer.layout.size, features)
        self._image = PolicyImage.first(self._newest(), self._copies.size, features)

    def _word(self, number: int) -> int:
        return int(np.random.SeedSequence((self._seed, number)).generate_state(1)[0]) >> 1

    def _read(self, worker: RolloutWorker) -> ActingPolicy:
        """Give a worker the newest parameters."""
        policy = SharedPolicy(self._regions[1], self.trainer.layout.size, worker.obs_shape)
        acting = policy.read(worker.parameters_D)
        assert acting is not None  # noqa: S101 - there is one from the beginning on
        return acting

    def _newest(self) -> npt.NDArray[np.uint8]:
        """Return the bytes of the newest policy."""
        content = self._copies.read()
        assert content is not None  # noqa: S101 - there is one from the beginning on
        return content

    @property
    def seconds(self) -> float:
        """Virtual ones since the beginning."""
        return self._now_s

    def run(self, goal: float, *, in_a_row: int = 2) -> bool:
        """Train until so many evaluations in a row are at the goal, or the task's steps are made.

        Returns:
            Whether the goal was reached.
        """
        limit = self.task.stop.env_steps or math.inf
        every, due, good, told_s = self.task.evaluation.every, 0, 0, 0.0
        for actor in self._actors:
            # machines aren't in step: their first unrolls begin at even distances
            steps = getattr(self.task.algorithm, "unroll_steps", 1) * actor.worker.environments
            unroll_s = steps * self._costs.env_step_s * actor.factor
            self._at(unroll_s * actor.node / len(self._actors), functools.partial(self._act, actor))
        while self.env_steps < limit:
            self._now_s, _, event = heapq.heappop(self._events)
            event()
            if self._now_s >= told_s + NEWS_S:
                told_s = self._now_s
                self.trainer.set_progress(min(1.0, self.env_steps / limit), self.env_steps)
            if self.env_steps >= due + every:
                due = self.env_steps // every * every
                vector, number = self.trainer.flat, len(self.judged) + 1
                value = evaluated(self.task, self._judge, vector, self.trainer, number)
                self.judged.append(Judged(self._now_s, self.env_steps, value))
                self._say(self.judged[-1])
                good = good + 1 if value >= goal else 0
                if good == in_a_row:
                    return True
        return False

    def close(self) -> None:
        """Free everything."""
        for actor in self._actors:
            actor.worker.close()
        self.trainer.close()
        self._judge.close()

    def _at(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._numbers), event))

    # -- an actor

    def _act(self, actor: _Actor) -> None:
        """Begin an unroll, if one may."""
        local = actor.node == 0
        if actor.acts or (local and not actor.lane.may_begin):
            return
        actor.acts = True
        if local:
            actor.policy = self._read(actor.worker)
        # by the policy of now, though its steps are over later
        raw, version = actor.worker.collect(actor.policy), actor.policy.version
        steps = int(raw.valid_TB.sum())
        spent_s = steps * self._costs.env_step_s * actor.factor
        self._at(self._now_s + spent_s, lambda: self._acted(actor, raw, version))

    def _acted(self, actor: _Actor, raw: RawUnroll, version: int) -> None:
        self.env_steps += int(raw.valid_TB.sum())
        if actor.node == 0:
            self._commit(actor, raw, version)
            actor.acts = False
            self._act(actor)
            return
        nbytes = self._source.spec.content_nbytes(actor.worker.environments)
        self.bytes_out += nbytes
        begins_s = max(self._now_s + 2.0 * self._link.delay_s, self._in_free_s)
        self._in_free_s = begins_s + nbytes / min(self._link.in_bytes_s, self._link.out_bytes_s)
        self._at(self._in_free_s, lambda: self._arrived(actor, raw, version, FULL_S[0]))

    def _arrived(self, actor: _Actor, raw: RawUnroll, version: int, pause_s: float) -> None:
        """Another node's unroll is at the learner's node: take it or have it offered again; answer."""
        if not actor.lane.may_begin:
            again_s = min(2.0 * pause_s, FULL_S[1])
            self._at(self._now_s + pause_s, lambda: self._arrived(actor, raw, version, again_s))
            return
        self._commit(actor, raw, version)
        nbytes = self._give(actor)
        self.bytes_out += nbytes
        self._out_free_s = max(self._now_s, self._out_free_s) + nbytes / self._link.out_bytes_s
        self._at(self._out_free_s + 2.0 * self._link.delay_s, lambda: self._answered(actor))

    def _give(self, actor: _Actor) -> int:
        """Give another node's actor the newest policy; return the bytes that this takes."""
        if self.trainer.policy_version != self._image.version:
            self._image = self._image.then(self._newest())
        image, held = self._image, actor.policy.version
        if image.version == held:
            return 0
        actor.policy = self._read(actor.worker)
        np.copyto(actor.worker.parameters_D, image.vector_D)  # in place of what the learner has
        found = image.since(held)
        return image.whole.nbytes if found is None else len(found[1])

    def _answered(self, actor: _Actor) -> None:
        actor.acts = False
        self._act(actor)

    def _commit(self, actor: _Actor, raw: RawUnroll, version: int) -> None:
        environments = actor.worker.environments
        pack(raw, actor.lane.begin(environments))
        actor.lane.commit(
            policy_version=version,
            episodes=len(raw.episodes),
            env_steps=int(raw.valid_TB.sum()),
            environments=environments,
        )
        self._learn()

    # -- the learner

    def _computed(self, batch: Any) -> None:
        self.gradients += 1
        self._spent_s += self._costs.gradient_s + self._costs.row_s * batch.rows

    def _learn(self) -> None:
        if self._learning or not self._source.ready:
            return
        self._learning = True
        self._spent_s = 0.0
        stats = self.trainer.step()
        self.updates += 1
        self.staleness.append(stats.metrics.get("actor_staleness", 0.0))
        self.busy_s += self._spent_s
        self._at(self._now_s + self._spent_s, self._learned)

    def _learned(self) -> None:
        self._learning = False
        self.trainer.policy_version += 1
        self.trainer.publish()
        self._act(self._actors[0])
        self._learn()
