"""A shard of the swarm's replay memory: a process that stores what actors make, and draws from it.

It reads unrolls as a learner does (`workers.actor_source`), but learns nothing: it appends them, counts their
steps and episodes for its node, and lets the actors go on at once. When the daemon asks, it draws rows into
shared memory; TD errors that learners computed come back and change priorities. Rows lie in the daemon's
memory, so one that is killed loses none.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from p2pdrl.config.task import ReplayOptions, TaskConfig
from p2pdrl.errors import WorkerError
from p2pdrl.replay.shards import PRIORITIES, InsertLimiter, pack_sample
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.transport.codec import decode
from p2pdrl.workers.child import PollPause
from p2pdrl.workers.mailbox import Mailbox
from p2pdrl.workers.protocol import (
    Collect,
    DrawnRows,
    DrawRows,
    LearnerPace,
    Others,
    Prioritize,
    Progress,
    ReplayRows,
    Report,
    SampleSlots,
    Stop,
    ToLearner,
)

if TYPE_CHECKING:
    from p2pdrl.rl.trainer import Trainer
    from p2pdrl.workers.actor_source import ActorSource

__all__ = ["ReplayShard", "insert_limiter"]

REPORT_INTERVAL_S = 0.1
SLACK = 8
"""Samples that learners may be late by before actors wait."""


def insert_limiter(task: TaskConfig, most_rows: int) -> InsertLimiter:
    """Return whether actors wait for learners, as a task's options say.

    Args:
        most_rows: of a sample.
    """
    algorithm = task.algorithm
    if not isinstance(algorithm, ReplayOptions):
        raise WorkerError("only algorithms with a replay memory have shards of it")
    rows = algorithm.gradient_steps * algorithm.batch_size
    per_insert = algorithm.min_replay_ratio * rows / (task.env.num_envs * algorithm.unroll_steps)
    return InsertLimiter(per_insert, ahead=algorithm.learning_starts, slack=SLACK * most_rows)


class ReplayShard:
    """The loop of one shard.

    Args:
        source: of the trainer, whose replay memory this is.
        seed: of what is drawn.
        limiter: whether actors wait for learners.
    """

    def __init__(
        self,
        trainer: Trainer,
        source: ActorSource[Any],
        mailbox: Mailbox,
        seed: int,
        *,
        limiter: InsertLimiter,
    ) -> None:
        self._trainer = trainer
        self._source = source
        self._spec = trainer.replay.samples
        self._mailbox = mailbox
        self._rng = np.random.default_rng(seed)
        self._discount = trainer.replay.discount
        self._slots: list[memoryview] = []
        self._regions: list[SharedRegion] = []
        self._pause = PollPause()
        self._going = True
        self._paused = True
        self._env_steps = 0
        self._episodes = 0
        self._returns: list[float] = []
        self._reported_s = float("-inf")
        self._drawn = 0
        self._collects = False
        self._limiter = limiter

    def run(self) -> None:
        """Store and draw until the daemon stops this process, or is gone."""
        while self._going:
            busy = not self._paused and self._collects and self._store()
            messages = self._mailbox.receive(0.0 if busy else self._pause.next_s())
            for message in messages:
                self._handle(message)
            if busy or messages:
                self._pause.reset()
            self._mailbox.flush()
            if time.monotonic() >= self._reported_s + REPORT_INTERVAL_S and not self._mailbox.backlog:
                self._report()
        self._report()
        self._mailbox.drain(1.0)

    def _store(self) -> bool:
        """Append one unroll, if there is one."""
        if not self._source.waiting or not self._limiter.may_insert(time.monotonic()):
            return False
        batch = self._source.next()
        self._source.commit()
        self._source.grant()
        self._limiter.inserted(batch.env_steps)
        self._env_steps += batch.env_steps
        self._episodes += len(batch.episodes)
        self._returns += [total for total, _ in batch.episodes]
        return True

    def _handle(self, message: ToLearner) -> None:
        match message:
            case DrawRows():
                self._draw(message)
            case Prioritize(content=content, rows=rows):
                arrays = PRIORITIES.views(memoryview(content), rows)
                memory = self._trainer.replay.memory
                memory.update_priorities(arrays["indices"], arrays["serials"], arrays["errors"])
            case Stop():
                self._going = False
            case LearnerPace(paused=paused):
                self._paused = paused
            case Progress(fraction=fraction, env_steps=env_steps):
                self._trainer.set_progress(fraction, env_steps)
            case Others(moments=moments):
                others = {
                    name: Moments.from_wire(decode(data, Any, "moments")) for name, data in moments.items()
                }
                self._trainer.set_other_moments(others)
            case ReplayRows(nbytes=nbytes):
                kept = SharedRegion.attach(self._mailbox.take_fd(), nbytes)
                self._regions.append(kept)
                if not self._trainer.keep_replay(kept.buf):
                    print("replay: the rows were of another layout; it begins empty", file=sys.stderr)
            case Collect(ring_nbytes=ring, policy_nbytes=policy):
                regions = [SharedRegion.attach(self._mailbox.take_fd(), nbytes) for nbytes in (ring, policy)]
                self._source.attach(*regions)
                self._source.grant()
                self._collects = True
            case SampleSlots(nbytes=nbytes):
                region = SharedRegion.attach(self._mailbox.take_fd(), nbytes)
                self._regions.append(region)
                size = self._spec.content_nbytes(self._spec.shares[0])
                self._slots = [region.buf[n * size : (n + 1) * size] for n in range(self._spec.slots)]
            case _:
                pass  # strategies and pipelines are the learners' affair

    def _draw(self, asked: DrawRows) -> None:
        memory = self._trainer.replay.memory
        rows = 0
        mass = memory.mass
        if asked.rows and memory.count:
            if asked.rows > self._spec.shares[0] or asked.slot >= len(self._slots):
                raise WorkerError(f"the daemon asks for {asked.rows} rows in slot {asked.slot}")
            sample = memory.sample(asked.rows, self._rng, discount=self._discount)
            pack_sample(sample, mass, self._spec.views(self._slots[asked.slot], asked.rows))
            rows = asked.rows
            self._drawn += rows
            self._limiter.drawn(rows, time.monotonic())
        self._mailbox.send(
            DrawnRows(
                number=asked.number,
                rows=rows,
                mass=mass,
                count=memory.count,
                appended=memory.appended,
                full=memory.full,
            )
        )

    def _report(self) -> None:
        self._reported_s = time.monotonic()
        memory = self._trainer.replay.memory
        moments = {
            name: msgspec.msgpack.encode(value.to_wire())
            for name, value in self._trainer.own_moments().items()
        }
        self._mailbox.send(
            Report(
                policy_version=0,
                updates=0,
                env_steps=self._env_steps,
                episodes=self._episodes,
                returns=self._returns,
                metrics={
                    "replay_rows": float(memory.count),
                    "replay_mass": memory.mass,
                    "replay_appended": float(memory.appended),
                    "replay_drawn": float(self._drawn),
                },
                moments=moments,
            )
        )
        self._returns = []
