"""The daemon of one node: brings its parts up in order, keeps them running, takes them down.

    data folder, identity → port → membership → task (founded or joined) → learner → state →
    records (mode, stop) → gossip, checkpoints — until a signal, ``leave`` or the swarm's halt.

`run` is what ``p2pdrl node`` calls.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from p2pdrl.clock import SystemClock
from p2pdrl.config.loader import Resolved
from p2pdrl.config.root import Config
from p2pdrl.config.task import HASHED, TaskConfig
from p2pdrl.errors import P2PDRLError, StorageError, UsageError
from p2pdrl.ids import short
from p2pdrl.membership.events import MemberEvent
from p2pdrl.membership.records import SwarmRecord
from p2pdrl.node import settings
from p2pdrl.node.accounting import metrics_gossip
from p2pdrl.node.accounting.metrics_gossip import MetricsGossip
from p2pdrl.node.admission import JoinAdmission
from p2pdrl.node.bootstrap.first_state import first_state, founded_at, take_up
from p2pdrl.node.bootstrap.memory import RememberedSwarm, SwarmMemory, recall_stop
from p2pdrl.node.bootstrap.startup import Opened, open_node
from p2pdrl.node.events import EventLog
from p2pdrl.node.looplag import LoopLagMonitor
from p2pdrl.node.record_follower import RecordFollower
from p2pdrl.node.shutdown import WITHIN_S, shutdown
from p2pdrl.node.state import state_transfer
from p2pdrl.node.state.checkpoints import Checkpoint, CheckpointStore, Saving
from p2pdrl.node.state.saved_mode import SavedMode, recall
from p2pdrl.node.state.state_server import StateServer
from p2pdrl.node.status import traces
from p2pdrl.node.status.meters import Meters
from p2pdrl.node.status.reporter import StatusReporter
from p2pdrl.node.training import Training
from p2pdrl.strategies.pipeline.port import PIPE_ROUTE
from p2pdrl.strategies.protocol import ROUTES
from p2pdrl.telemetry import logging as telemetry_logging
from p2pdrl.telemetry.tensorboard import TensorBoardWriter, open_writer
from p2pdrl.transport.protocol import Address, Incoming, Refusal

__all__ = ["Node", "run"]

R = TypeVar("R")

LAST_WORDS_S = 1.5
"""After a halt the node stays this long, so that everybody hears of it and sees the last figures."""
FOLD_AFTER_S = 60.0
REMEMBER_EVERY_S = 15.0


def run(resolved: Resolved) -> int:
    """Run a node until it leaves or the swarm is done; return the exit code.

    Raises:
        P2PDRLError: the node can't start, or can't go on.
    """
    config = resolved.config
    telemetry_logging.configure(config.node.log.level, config.node.log.format)
    insists = any(key.split(".")[1] in HASHED for key in resolved.given("task"))
    node = Node(config)
    try:
        return asyncio.run(node.live(insists=insists))
    except BaseExceptionGroup as group:
        known, others = group.split(P2PDRLError)
        if known is None or others is not None:
            raise
        raise _first(known) from None
    finally:
        node.last_resort.cancel()


def _first(group: BaseExceptionGroup[P2PDRLError]) -> P2PDRLError:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


class Node:
    """One node's life.

    Args:
        config: the whole configuration.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._clock = SystemClock()
        self._events = EventLog(2000, self._clock)
        self._leaving = asyncio.Event()
        self._leave_reason = ""
        self._fatal: P2PDRLError | None = None
        self._failed: P2PDRLError | None = None
        self._to_remember = asyncio.Event()
        self._memory_failed = False
        self._had_others = False
        """Whether this swarm had other members, in this run or, when it is resumed, before."""
        self.last_resort = threading.Timer(WITHIN_S, os._exit, (0,))
        """Ends the process when leaving hangs (a disk that doesn't answer, say)."""
        self.last_resort.daemon = True

    async def live(self, *, insists: bool) -> int:
        """Come up, train, go down; return the exit code.

        Args:
            insists: the person named a task, so that a swarm with another one is refused.
        """
        async with AsyncExitStack() as stack:
            self._catch_signals(stack)
            self._admission = JoinAdmission(
                self._config, insists=insists, events=self._events, clock=self._clock
            )
            opened = await open_node(
                stack,
                self._config,
                events=self._events,
                clock=self._clock,
                hooks=self._admission.hooks,
                leave=self.leave,
                on_record=self._on_record,
                on_twin=self._on_twin,
            )
            parts = self._parts = opened.parts
            self._figures = StatusReporter(parts)
            self._follower = RecordFollower(parts, self._figures)
            self._meters = Meters(parts, self._figures, self._open_writer(stack))
            parts.lag = LoopLagMonitor(on_sample=self._meters.registry.observe_loop_lag)
            self._admission.founded_at = lambda: self._follower.founded_at
            opened.view.attach(parts, self._figures, self._meters, self._follower)
            parts.membership.subscribe(self._on_member)
            await parts.membership.start()
            stack.push_async_callback(parts.membership.close)
            await self._until_left(self._work(stack, opened))
            if parts.training is not None:
                await self._remember(parts.training)
            if self._fatal is not None:
                raise self._fatal
            await shutdown(parts, self._figures, self._leave_reason or "done")
            if self._failed is not None:
                raise self._failed
        return 0

    def _open_writer(self, stack: AsyncExitStack) -> TensorBoardWriter | None:
        folder = self._config.node.log.tensorboard_dir
        if folder is None:
            return None
        writer = open_writer(folder, self._clock)
        stack.callback(writer.close)
        return writer

    def _catch_signals(self, stack: AsyncExitStack) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
            stack.callback(loop.remove_signal_handler, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._leaving.is_set():
            os._exit(130)
        self.leave(f"signal {number.name}")

    def leave(self, reason: str) -> None:
        """Begin to leave the swarm."""
        if not self._leaving.is_set():
            self._leave_reason = reason
            self._leaving.set()
            self.last_resort.start()

    async def _until_left(self, work: Coroutine[Any, Any, None]) -> None:
        """Do ``work`` until it ends or somebody asks us to leave."""
        task = asyncio.create_task(work, name="work")
        leaving = asyncio.create_task(self._leaving.wait(), name="leaving")
        try:
            await asyncio.wait([task, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            task.cancel()
            await asyncio.wait([task, leaving])
        if not task.cancelled():
            task.result()

    # --- work -----------------------------------------------------------------------------------

    async def _work(self, stack: AsyncExitStack, opened: Opened) -> None:
        parts = self._parts
        async with asyncio.TaskGroup() as group:
            jobs = [
                group.create_task(parts.membership.watch(), name="membership"),
                group.create_task(parts.lag.run(), name="loop lag"),
            ]
            parts.gossip = self._make_rumours()
            jobs.append(group.create_task(parts.gossip.run(), name="gossip"))
            self._memory = SwarmMemory(parts.data_dir, parts.swarm_id)
            memory = await asyncio.to_thread(self._memory.read)
            origin = await self._admission.find_swarm(
                parts.membership, parts.address, remembers=opened.remembers, memory=memory
            )
            training = self._make_training(origin.task)
            stack.callback(training.close)
            stack.push_async_callback(training.stop)
            parts.learner = training.supervisor
            await training.build()
            self._admission.founds(origin)  # not before: the learner may refuse the task
            store = CheckpointStore(self._folder(training), self._config.node.checkpoint.keep)
            checkpoint = await take_up(store, parts.step_accounting, self._events)
            parts.training = self._admission.training = training
            for route in ROUTES:
                parts.transport.serve(
                    route,
                    self._telling(training.mode.answer),
                    max_vector_bytes=self._config.node.limits.max_vector_bytes,
                )
            parts.transport.serve_pipes(PIPE_ROUTE, self._telling(training.mode.accept))
            parts.transport.serve(traces.ROUTE, training.timelines.answer)
            parts.transport.serve(
                state_transfer.ROUTE, StateServer(training, parts.step_accounting, self._events).answer
            )
            state, lineage = await first_state(parts, training, origin, checkpoint)
            await training.begin(state, lineage)
            opened.data.keep = True
            parts.saving = self._make_saving(store, training, checkpoint)
            parts.state = "paused" if training.paused else "training"
            self._follower.saved_mode = SavedMode(parts.data_dir, training.task_hash, parts.swarm_id)
            await recall(parts, self._follower.saved_mode, origin, checkpoint)
            self._events.emit("training", f"trains {origin.task.subject} on {training.supervisor.device}")
            if origin.how == "resumed" and memory is not None:
                self._had_others = True
                recall_stop(parts, memory)
            if origin.how != "joined":
                self._follower.found(training, founded_at(checkpoint, self._clock.wall()))
            jobs += [
                group.create_task(self._remember_often(training), name="memory"),
                group.create_task(self._follower.run(training), name="records"),
                group.create_task(self._watch(training.supervisor.watch()), name="learner"),
                group.create_task(self._watch(training.learner_pool.watch()), name="helpers"),
                group.create_task(self._watch(training.watch_actors()), name="actors"),
                group.create_task(training.adoptions.watch(), name="adoptions"),
                group.create_task(training.mode.watch(), name="strategy"),
                group.create_task(parts.saving.run(), name="checkpoints"),
                group.create_task(self._fold_later(), name="fold"),
            ]
            await self._follower.halted.wait()
            if self._config.node.keep_running:
                parts.state = "stopped"
                await asyncio.Event().wait()
            await asyncio.sleep(LAST_WORDS_S)
            for job in jobs:
                job.cancel()
        self.leave("the swarm is done")

    async def _watch(self, learners: Coroutine[Any, Any, None]) -> None:
        """Leave in good order, and end with the error, when a learner can't go on: its state is kept."""
        try:
            await learners
        except P2PDRLError as error:
            self._failed = self._failed or error
            self.last_resort.args = (error.exit_code,)
            self.leave("its learner can't go on")

    def _telling(self, answer: Callable[[Incoming], Awaitable[R]]) -> Callable[[Incoming], Awaitable[R]]:
        """Tell whoever is refused for an older mode or view (409) the swarm's settings at once."""

        async def answered(incoming: Incoming) -> R:
            try:
                return await answer(incoming)
            except Refusal as refusal:
                if refusal.status == 409:
                    self._parts.membership.tell_settings(incoming.sender)
                raise

        return answered

    def _make_training(self, task: TaskConfig) -> Training:
        config, parts = self._config.node, self._parts
        seed = config.seed
        if seed is None:
            digest = hashlib.sha256(f"{parts.node_id} {parts.boot}".encode()).digest()
            seed = int.from_bytes(digest[:4], "little") >> 1
        training = Training(
            me=parts.node_id,
            task=task,
            config=config,
            seed=seed,
            transport=parts.transport,
            clock=self._clock,
            events=self._events,
            step_accounting=parts.step_accounting,
            rng=random.Random(seed),
            alive=parts.learners,
            donors=self._donors,
            observed=self._meters.registry.observe_exchange,
            rounds=self._meters.round,
            named=parts.name_of,
            pipes=parts.transport,
            entered=self._on_lineage,
        )
        parts.state = "starting"
        return training

    def _make_rumours(self) -> MetricsGossip:
        parts = self._parts
        made = MetricsGossip(
            me=parts.node_id,
            transport=parts.transport,
            step_accounting=parts.step_accounting,
            clock=self._clock,
            rng=random.Random(parts.boot + 1),
            alive=parts.alive,
            make_report=self._figures.report,
            on_round=self._on_round,
        )
        parts.transport.serve(metrics_gossip.ROUTE, made.answer, max_meta_bytes=metrics_gossip.MAX_META_BYTES)
        return made

    def _make_saving(
        self, store: CheckpointStore, training: Training, checkpoint: Checkpoint | None
    ) -> Saving:
        saving = Saving(
            store=store,
            config=self._config.node.checkpoint,
            training=training,
            step_accounting=self._parts.step_accounting,
            clock=self._clock,
            events=self._events,
        )
        if checkpoint is not None:
            saving.was_best(checkpoint.meta.get("best_mean_return"))
        return saving

    def _folder(self, training: Training) -> Path:
        return Path(self._parts.data_dir) / "checkpoints" / training.task_hash[:12]

    async def _remember_often(self, training: Training) -> None:
        """Keep what the data folder remembers of the swarm up to date."""
        while True:
            await self._remember(training)
            self._to_remember.clear()
            try:
                async with asyncio.timeout(REMEMBER_EVERY_S):
                    await self._to_remember.wait()
            except TimeoutError:
                pass

    async def _remember(self, training: Training) -> None:
        stop = self._parts.membership.records.get(settings.STOP)
        done = self._parts.halted is not None
        steps = training.lineage_steps
        if not training.lineage:
            return
        self._had_others = self._had_others or len(self._parts.membership.members()) > 1
        memory = RememberedSwarm(
            self._memory.swarm_id,
            training.task,
            training.lineage,
            steps,
            stop,
            done=done,
            others=self._had_others,
        )
        try:
            await asyncio.to_thread(self._memory.write, memory)
        except StorageError as error:
            if not self._memory_failed:
                text = f"{error}; after a restart this node may not know the swarm"
                self._events.emit("memory-unsaved", text, level="warning")
            self._memory_failed = True
        else:
            self._memory_failed = False

    async def _fold_later(self) -> None:
        await asyncio.sleep(FOLD_AFTER_S)
        self._parts.step_accounting.fold_own()
        await asyncio.Event().wait()

    def _donors(self) -> list[tuple[str, Address]]:
        alive = self._parts.learners()
        return [(node, alive[node]) for node in self._figures.donors() if node in alive]

    # --- news -----------------------------------------------------------------------------------

    def _on_round(self) -> None:
        parts = self._parts
        if parts.alive():
            parts.alone_since_s = None
        elif parts.alone_since_s is None:
            parts.alone_since_s = self._clock.monotonic()
        training = parts.training
        if training is None:
            return
        if parts.saving is not None:
            parts.saving.mean_return = self._figures.mean_return
        self._follower.look(training)
        self._meters.write_scalars()

    def _on_member(self, event: MemberEvent) -> None:
        member = event.member
        if member.is_self:
            return
        if event.kind in ("dead", "left") and self._parts.gossip is not None:
            self._parts.gossip.table.drop([member.id])
        if event.kind == "joined":
            self._to_remember.set()
        if event.kind != "updated":
            self._events.emit(
                f"member-{event.kind}",
                f"{member.name} ({short(member.id)}) {_VERBS[event.kind]}: {event.reason}",
                level="warning" if event.kind in ("suspect", "dead") else "info",
                peer=member.id,
            )

    def _on_record(self, _record: SwarmRecord) -> None:
        self._follower.record_changed()
        self._to_remember.set()

    def _on_lineage(self, lineage: str) -> None:
        self._follower.enter(lineage)
        self._to_remember.set()

    def _on_twin(self, address: str) -> None:
        self._fatal = UsageError(
            f"another node was started with this node's identity, at {address}; this one ends. "
            "Give each node a data folder of its own with --data-dir"
        )
        self.leave("its identity runs elsewhere")


_VERBS = {
    "joined": "joined",
    "suspect": "is suspected",
    "alive": "is alive again",
    "dead": "is dead",
    "left": "has left",
}
