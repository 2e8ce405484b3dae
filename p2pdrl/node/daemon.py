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
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import msgspec

import p2pdrl
from p2pdrl.clock import SystemClock
from p2pdrl.config.checks import role_problems
from p2pdrl.config.environments import require_runnable
from p2pdrl.config.loader import Resolved
from p2pdrl.config.node import TRAINS, Role, roles_in, tags_of
from p2pdrl.config.root import Config
from p2pdrl.config.task import HASHED, TaskConfig
from p2pdrl.errors import ConfigError, JoinRefusedError, P2PDRLError, UsageError
from p2pdrl.ids import short
from p2pdrl.membership.events import MemberEvent
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.invites import InviteLine
from p2pdrl.membership.records import SwarmRecord
from p2pdrl.node import settings
from p2pdrl.node.accounting import metrics_gossip
from p2pdrl.node.accounting.metrics_gossip import MetricsGossip
from p2pdrl.node.accounting.report_table import period_s
from p2pdrl.node.admission import JoinAdmission
from p2pdrl.node.background import beside, first_ended, set_within
from p2pdrl.node.bootstrap.datadir import DataDir
from p2pdrl.node.bootstrap.first_state import first_state, founded_at, load_checkpoint
from p2pdrl.node.bootstrap.invited import InvitedMember, as_member
from p2pdrl.node.bootstrap.joining import JoinInfo, SwarmOrigin
from p2pdrl.node.bootstrap.lan import LOOK_FIRST_S, LanDiscovery, fingerprint
from p2pdrl.node.bootstrap.processors import keep_to_processors
from p2pdrl.node.bootstrap.starting_point import StartingPoint, read_starting_point
from p2pdrl.node.bootstrap.startup import Opened, direct, moved_to, open_node
from p2pdrl.node.children.evaluator import EvaluatorProcess
from p2pdrl.node.children.run_writers import RunWriters, run_info
from p2pdrl.node.context import NodeContext
from p2pdrl.node.evaluation import Evaluations
from p2pdrl.node.events import EventLog
from p2pdrl.node.experience import messages as experience
from p2pdrl.node.inference import Inference
from p2pdrl.node.looplag import LoopLagMonitor
from p2pdrl.node.memory_watch import give_back_memory, watch_memory
from p2pdrl.node.port_mapping import PortMapping
from p2pdrl.node.record_follower import RecordFollower
from p2pdrl.node.service_manager import ServiceManager
from p2pdrl.node.state import state_transfer
from p2pdrl.node.state.checkpoints import Checkpoint, Checkpointer, CheckpointStore, as_state
from p2pdrl.node.state.swarm_memory import (
    SavedMode,
    SwarmMemory,
    recall_members,
    recall_mode,
    recall_stop,
)
from p2pdrl.node.status import traces
from p2pdrl.node.status.meters import Meters, write_summary
from p2pdrl.node.status.reporter import StatusReporter
from p2pdrl.node.training import NOTHING, Done, Training
from p2pdrl.node.videos import LONGEST_S, Videos, require_video
from p2pdrl.strategies.pipeline.port import PIPE_ROUTE
from p2pdrl.strategies.protocol import ROUTES
from p2pdrl.telemetry import logging as telemetry_logging
from p2pdrl.telemetry.tracing import RoundTracer, open_tracer
from p2pdrl.transport.protocol import Address, Incoming, Refusal, RouteRoles

__all__ = ["SHUTDOWN_S", "Node", "run", "shutdown"]

R = TypeVar("R")
Answerer = Callable[[Incoming], Awaitable[R]]

HALT_LINGER_S = 1.5
"""After a halt the node stays this long, so that everybody hears of it and sees the last report."""
FOLD_AFTER_S = 60.0

SHUTDOWN_S = 10.0
"""A node that was asked to leave is gone after this, whatever hangs; below, the share of each step."""
STOP_TRAINING_S = 5.0
CHECKPOINT_S = 2.0
LAST_REPORT_S = 1.0
SUMMARY_S = 0.5
GOODBYE_S = 1.0

_TRAINERS = RouteRoles(TRAINS, TRAINS)
_COLLECT = frozenset({"learner", "replay"})
"""Roles of those whom others send experience, or ask for it."""

_VERBS = {
    "joined": "joined",
    "suspect": "is suspected",
    "alive": "is alive again",
    "dead": "is dead",
    "left": "has left",
    "banned": "is refused from now on",
}


def run(resolved: Resolved, invite: InviteLine | None = None) -> int:
    """Run a node until it leaves or the swarm is done; return the exit code.

    Args:
        invite: makes it a member, unless it was redeemed in an earlier run.

    Raises:
        P2PDRLError: the node can't start, or can't go on.
    """
    config = resolved.config
    telemetry_logging.configure(config.node.log.level, config.node.log.format)
    keep_to_processors(config.node)
    require_video(config.node.video)
    task_given = any(key.split(".")[1] in HASHED for key in resolved.given("task"))
    node = Node(config, invite, read_starting_point(config.node))
    try:
        return asyncio.run(node.live(task_given=task_given))
    except BaseExceptionGroup as group:
        known, others = group.split(P2PDRLError)
        if known is None or others is not None:
            raise
        raise _first(known) from None
    finally:
        node.exit_timer.cancel()


def _first(group: BaseExceptionGroup[P2PDRLError]) -> P2PDRLError:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


class Node:
    """One node, from its start to its end."""

    def __init__(
        self, config: Config, invite: InviteLine | None = None, start: StartingPoint | None = None
    ) -> None:
        self._config = msgspec.structs.replace(config, node=config.node.placed())
        self._invite = invite
        self._start = start
        self._member: InvitedMember | None = None
        self._clock = SystemClock()
        self._events = EventLog(2000, self._clock)
        self._leaving = asyncio.Event()
        self._leave_reason = ""
        self._fatal: P2PDRLError | None = None
        self._failed: P2PDRLError | None = None
        self._latest: Training | None = None
        self._mapped: tuple[Address, Address] | None = None
        """From where the router passes our port on, and to where."""
        self._wanted_roles: tuple[Role, ...] = ()
        self._roles_wanted = asyncio.Event()
        self._manager = ServiceManager.of(os.environ)
        self.exit_timer = threading.Timer(SHUTDOWN_S, os._exit, (0,))
        """Ends the process when leaving hangs (a disk that doesn't answer, say)."""
        self.exit_timer.daemon = True

    async def live(self, *, task_given: bool) -> int:
        """Come up, train, go down; return the exit code.

        With ``task_given`` the person named a task, so a swarm with another one is refused.
        """
        async with AsyncExitStack() as stack:
            self._catch_signals(stack)
            data = stack.enter_context(DataDir.acquire(self._config.node.data_dir))
            identity = Identity.load_or_create(data.path)
            await self._until_left(self._become_member(data, identity))
            if self._leaving.is_set():
                return 0
            self._admission = JoinAdmission(
                self._config, task_given=task_given, events=self._events, clock=self._clock
            )
            opened = await open_node(
                stack,
                self._config,
                data,
                identity,
                self._member,
                events=self._events,
                clock=self._clock,
                hooks=self._admission.hooks,
                leave=self.leave,
                on_record=self._on_record,
                on_twin=self._on_twin,
            )
            context = self._context = opened.context
            self._memory = SwarmMemory(context)
            self._reporter = StatusReporter(context)
            self._follower = RecordFollower(context, self._reporter)
            self._writers = RunWriters(
                self._config.node.log, Path(context.data_dir), self._clock, self._events
            )
            stack.push_async_callback(self._writers.close)
            self._meters = Meters(context, self._reporter, self._writers, self._open_tracer(stack, context))
            context.lag = LoopLagMonitor(on_sample=self._meters.registry.observe_loop_lag)
            self._admission.founded_at = lambda: self._follower.founded_at
            opened.view.attach(context, self._reporter, self._meters, self._follower, self.set_roles)
            context.membership.subscribe(self._on_member)
            await context.membership.start()
            stack.push_async_callback(context.membership.close)
            try:
                await self._until_left(self._work(stack, opened))
            except* P2PDRLError:
                # It can't train what the swarm trains, say: others needn't find out by probes.
                await context.membership.leave(timeout_s=1.0)
                raise
            if context.training is not None:
                await self._memory.write(context.training)
            if self._fatal is not None:
                raise self._fatal
            await shutdown(context, self._reporter, self._leave_reason or "done")
            if self._failed is not None:
                raise self._failed
        return 0

    async def _become_member(self, data: DataDir, identity: Identity) -> None:
        """Redeem the invite, or read what an earlier run got for one; a key file makes both needless.

        Raises:
            P2PDRLError: see `as_member`.
        """
        node = self._config.node
        if node.swarm_key_file is not None:
            if self._invite is not None:
                raise UsageError("the swarm's key makes this node a member already: leave out --join")
            return
        self._member = await as_member(
            data.path,
            identity,
            self._invite,
            name=node.name or socket.gethostname(),
            events=self._events,
            clock=self._clock,
        )
        if self._member is not None:
            fitted = self._member.fitted(node)
            self._config = msgspec.structs.replace(self._config, node=fitted)

    def _open_tracer(self, stack: AsyncExitStack, context: NodeContext) -> RoundTracer | None:
        if not self._config.node.log.opentelemetry:
            return None
        resource = {
            "service.instance.id": context.node_id,
            "service.version": p2pdrl.__version__,
            "p2pdrl.node": context.name_of(context.node_id),
        }
        tracer = open_tracer(self._clock, resource)
        stack.push_async_callback(asyncio.to_thread, tracer.close)
        return tracer

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
            self._manager.tell(STOPPING="1", STATUS=f"leaves: {reason}")
            self.exit_timer.start()

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
        context = self._context
        async with asyncio.TaskGroup() as group:
            jobs = [
                group.create_task(context.membership.watch(), name="membership"),
                group.create_task(context.lag.run(), name="loop lag"),
                group.create_task(self._manager.run(self._events), name="service manager"),
                group.create_task(context.reachability.run(), name="reachability"),
            ]
            self._writers.start()
            jobs.append(group.create_task(self._writers.watch(), name="writers"))
            context.gossip = self._make_gossip()
            jobs.append(group.create_task(context.gossip.run(), name="gossip"))
            jobs.append(group.create_task(give_back_memory(), name="memory"))
            if most_nbytes := self._config.node.limits.memory_bytes:
                files = not self._config.node.learner.replay_on_disk
                watching = watch_memory(most_nbytes, self._events, files=files)
                why = "it takes too much memory"
                jobs.append(group.create_task(self._watch(watching, why), name="memory bound"))
            if opened.key_watch is not None:
                jobs.append(group.create_task(opened.key_watch.run(), name="swarm key"))
            jobs += await self._look_around(group, may_move=opened.may_move)
            memory = recall_members(context, await self._memory.read())
            origin = await self._admission.find_swarm(
                context.membership.joiner, context.address, remembers=opened.remembers, memory=memory
            )
            early = group.create_task(self._leave_if_done(), name="halt before training")
            self._believe_history(origin.info)
            require_runnable(origin.task, self._config)  # a resumed one is of an earlier run's configuration
            stack.push_async_callback(self._end_training)
            training = await self._build_training(origin)
            self._admission.tell_founded(origin)  # not before: the learner may refuse the task
            store = CheckpointStore(self._checkpoint_folder(training), self._config.node.checkpoint.keep)
            checkpoint = await load_checkpoint(store, context.progress_tracker, self._events)
            context.training = self._admission.training = training
            self._serve()
            state, lineage = await first_state(context, training, origin, checkpoint, self._start)
            await training.begin(state, lineage)
            opened.data.keep = True
            context.checkpointer = self._make_checkpointer(store, training, checkpoint)
            self._make_others(training, checkpoint)
            context.state = "paused" if training.paused else "training"
            self._follower.saved_mode = SavedMode(context.data_dir, training.task_hash, context.swarm_id)
            await recall_mode(context, self._follower.saved_mode, origin, checkpoint)
            self._tell_training(training)
            if origin.how == "resumed" and memory is not None:
                self._memory.had_others = True
                recall_stop(context, memory)
            given = state is not None and state.head.lineage
            orphaned = not given and origin.info is not None and lineage != origin.info.lineage
            if (
                origin.how != "joined" or orphaned
            ):  # nobody had the state: a lineage of our own, with its records
                self._follower.found(training, founded_at(checkpoint, self._clock.wall()))
            jobs.append(group.create_task(self._fold_later(), name="fold"))
            early.cancel()
            await self._train_on(store, training)
            for job in jobs:
                job.cancel()
        self.leave("the swarm is done")

    async def _build_training(self, origin: SwarmOrigin) -> Training:
        training = self._latest = self._context.building = self._make_training(origin.task)
        await training.build()
        if self._start is not None and origin.info is None:
            self._start.check_if_needed(training, self._checkpoint_folder(training))
        await self._writers.ready()
        context = self._context
        self._writers.begin(
            partial(
                run_info,
                node_id=context.node_id,
                name=context.name,
                swarm_id=context.swarm_id,
                task=origin.task,
            )
        )
        return training

    async def _leave_if_done(self) -> None:
        """Leave as soon as we hear, before we train, that the swarm is done: its members leave, too.

        Who stays up afterwards goes on to fetch the policy, and serves it.
        """
        reason = await self._follower.until_done()
        if not self._config.node.keep_running:
            self._follower.halt(reason)
            self.leave("the swarm is done")

    def _believe_history(self, info: JoinInfo | None) -> None:
        """Believe, for a while, what members say the swarm did before it took us in, if one did."""
        context, follower = self._context, self._follower
        if info is None:
            return

        def age_s() -> float:
            began = follower.founded_at
            return self._clock.wall() - (info.founded_at if began is None else began)

        if context.progress_tracker.bounds is not None:
            period = period_s(len(context.alive()) + 1)
            context.progress_tracker.bounds.joined(self._clock.monotonic(), age_s, period)

    async def _follow_address(self) -> None:
        """Tell the others when this machine gets another address: another network, another lease."""
        context = self._context
        seeds = [Address.parse(peer) for peer in self._config.node.peers]
        while True:
            await asyncio.sleep(context.membership.core.config.probe_interval_s)
            moved = moved_to(context.address, [*seeds, *context.alive().values()])
            if moved is not None and self._mapped is None:
                text = f"this machine has lost the address {context.address.host}; others reach it at {moved}"
                context.address = moved
                context.membership.move(moved)
                self._events.emit("moved", text, level="warning", address=str(moved))

    async def _train_on(self, store: CheckpointStore, begun: Training) -> None:
        """Train until the swarm is done, in whatever roles."""
        training: Training | None = begun
        while training is not None and await self._train(training):
            training = await self._change_roles(store, training)

    async def _train(self, training: Training) -> bool:
        """Train until the swarm is done (False), or this node is to have other roles (True)."""
        context = self._context
        if context.checkpointer is None or context.inference is None:
            raise AssertionError("the node has no state to train")
        async with asyncio.TaskGroup() as group:
            jobs = [
                group.create_task(self._memory.run(training), name="memory"),
                group.create_task(self._follower.run(training), name="records"),
                group.create_task(self._watch(training.supervisor.watch()), name="learner"),
                group.create_task(self._watch(training.learners.watch()), name="workers"),
                group.create_task(self._watch(training.watch_actors()), name="actors"),
                group.create_task(self._watch(training.send()), name="experience"),
                group.create_task(training.adoptions.watch(), name="adoptions"),
                group.create_task(training.mode.watch(), name="strategy"),
                group.create_task(context.checkpointer.run(), name="checkpoints"),
                group.create_task(self._evaluations.run(), name="evaluations"),
                group.create_task(self._videos.run(), name="videos"),
                group.create_task(self._watch(context.inference.run()), name="inference"),
            ]
            halted = group.create_task(self._follower.halted.wait(), name="halt")
            wanted = group.create_task(self._roles_wanted.wait(), name="roles")
            await asyncio.wait([halted, wanted], return_when=asyncio.FIRST_COMPLETED)
            done = halted.done()
            if done:
                await self._linger()
            for job in (*jobs, halted, wanted):
                job.cancel()
        return not done

    async def _linger(self) -> None:
        """After the halt: who stays up goes on answering; others wait until everybody has heard."""
        if self._config.node.keep_running:
            self._context.state = "stopped"
            await asyncio.Event().wait()
        await asyncio.sleep(HALT_LINGER_S)

    def set_roles(self, roles: Sequence[str]) -> None:
        """Have other roles soon: what is trained stays, and the others go on meanwhile.

        Raises:
            ConfigError: this node can't have them.
        """
        context = self._context
        training = context.training
        if training is None or context.state not in ("starting", "training", "paused"):
            raise ConfigError(f"this node is {context.state}; it can change its roles once it trains")
        if (unknown := sorted(set(roles).difference(get_args(Role)))) or not roles:
            what = f"{', '.join(unknown)}: no such role" if unknown else "no role is named"
            raise ConfigError(f"{what}; there are {', '.join(get_args(Role))}")
        asked = cast("tuple[Role, ...]", tuple(roles))
        if context.allowed is not None and (more := sorted(set(roles) - context.allowed)):
            may = " and ".join(sorted(context.allowed))
            raise ConfigError(f"this node was invited as {may} alone, and can't be {' and '.join(more)}")
        # whom to join by is no question any more
        node = msgspec.structs.replace(self._config.node, roles=asked, peers=("127.0.0.1:1",))
        problem = next(role_problems(training.task, node), None)
        if problem is not None:
            raise ConfigError(problem.message)
        if "learner" not in roles and not context.learners() and training.learns:
            raise ConfigError("nobody else learns: have another node learn first")
        self._wanted_roles = asked
        self._roles_wanted.set()

    async def _change_roles(self, store: CheckpointStore, old: Training) -> Training | None:
        """End a training, and go on from its state in other roles; None where the swarm is done before."""
        context = self._context
        context.state = "starting"
        await old.stop()
        checkpointer = context.checkpointer
        checkpoint = await checkpointer.snapshot() if checkpointer is not None and old.ready else None
        try:
            training = await self._rebuilt(old)
            if training is None:
                inference = context.inference = self._make_inference(old)
                async with beside(self._watch(inference.run()), "inference"):  # its policy is still served
                    await self._linger()
                return None
            state = None if checkpoint is None else as_state(checkpoint, training.spec)
            if training.learns and not old.learns:
                state = await training.adoptions.newest(old.lineage) or state
            context.training = self._admission.training = training
            await training.begin(state, old.lineage)
        finally:
            if context.training is not old:
                old.close()
        context.checkpointer = self._make_checkpointer(store, training, checkpoint)
        self._make_others(training, checkpoint)
        self._follower.renew()
        training.pause(paused=old.paused)
        context.state = "paused" if old.paused else "training"
        self._tell_training(training)
        return training

    async def _rebuilt(self, old: Training) -> Training | None:
        """Build a training in the roles that are wanted; in others if these are wanted before it is there.

        Of a node that only acts it isn't until a learner takes what it makes. None where the swarm is done
        before.
        """
        context, before = self._context, self._config.node.roles
        while not self._follower.halted.is_set():
            self._roles_wanted.clear()
            self._have_roles(self._wanted_roles)
            training = self._latest = context.building = self._make_training(old.task, old.done())
            building = asyncio.create_task(training.build(), name="build")
            wanted = asyncio.create_task(self._roles_wanted.wait(), name="roles")
            halted = asyncio.create_task(self._follower.halted.wait(), name="halt")
            await first_ended((building, wanted, halted))
            if not building.cancelled():
                building.result()
                return training
            await training.stop()
            training.close()
        self._have_roles(before)
        self._latest = context.building = old
        context.state = "stopping"
        return None

    def _have_roles(self, roles: tuple[Role, ...]) -> None:
        """Have all know this node's roles."""
        context = self._context
        named = ", ".join(roles_in(tags_of(roles)))
        self._events.emit("roles", f"its roles are {named} from now on", roles=list(roles))
        node = msgspec.structs.replace(self._config.node, roles=roles)
        self._config = context.config = msgspec.structs.replace(self._config, node=node)
        context.membership.retag(tags_of(roles, promote=node.promote))

    async def _end_training(self) -> None:
        for training in {self._latest, self._context.training}:
            if training is not None:
                await training.stop()
                training.close()

    def _make_others(self, training: Training, checkpoint: Checkpoint | None) -> None:
        """Make what judges and serves a training's policy; the checkpoint's learning curve is taken in."""
        if checkpoint is not None and checkpoint.meta.get("lineage") == training.lineage:
            self._context.evaluations.restore(checkpoint.meta.get("evaluations", []))
        self._evaluations = self._make_evaluations(training)
        self._videos = self._make_videos()
        self._context.inference = self._make_inference(training)

    def _tell_training(self, training: Training) -> None:
        subject = training.task.subject
        if training.holds_replay:
            doing = f"holds a shard of the replay memory of {subject}"
        elif training.learns:
            doing = f"trains {subject} on {training.supervisor.device}"
        else:
            doing = f"acts in {subject}"
        self._events.emit("training", doing)

    def _serve(self) -> None:
        """Answer what peers ask of the training, whichever it is, from now on."""
        transport, most = self._context.transport, self._config.node.limits.max_vector_bytes

        def asked(answer: Callable[[Training], Callable[[Incoming], Awaitable[R]]]) -> Answerer[R]:
            async def answered(incoming: Incoming) -> R:
                if self._context.training is None:
                    raise Refusal(503, "this node doesn't train yet")
                return await answer(self._context.training)(incoming)

            return answered

        for route in ROUTES:
            answer = self._sharing_settings(asked(lambda training: training.mode.answer))
            transport.serve(route, answer, max_vector_bytes=most, roles=_TRAINERS)
        accept = self._sharing_settings(asked(lambda training: training.mode.accept))
        transport.serve_pipes(PIPE_ROUTE, accept, roles=_TRAINERS)
        transport.serve(traces.ROUTE, asked(lambda training: training.traces.answer), roles=_TRAINERS)
        donate = asked(lambda training: training.state_server.answer)
        transport.serve(state_transfer.ROUTE, donate, roles=RouteRoles(callees=TRAINS))
        take = asked(lambda training: training.take_unroll)
        transport.serve(experience.ROUTE, take, max_vector_bytes=most, roles=RouteRoles(callees=_COLLECT))
        give = asked(lambda training: training.give_rows)
        transport.serve(
            experience.REPLAY_ROUTE, give, max_vector_bytes=most, roles=RouteRoles(TRAINS, _COLLECT)
        )

    async def _watch(
        self, processes: Coroutine[Any, Any, None], why: str = "its learner can't go on"
    ) -> None:
        """Leave in good order, and end with the error, when processes can't go on: the state is kept."""
        try:
            await processes
        except P2PDRLError as error:
            self._failed = self._failed or error
            self.exit_timer.args = (error.exit_code,)
            self.leave(why)

    def _sharing_settings(
        self, answer: Callable[[Incoming], Awaitable[R]]
    ) -> Callable[[Incoming], Awaitable[R]]:
        """Send the swarm's settings at once to a peer that is refused for an older mode or view (409)."""

        async def answered(incoming: Incoming) -> R:
            try:
                return await answer(incoming)
            except Refusal as refusal:
                if refusal.status == 409:
                    self._context.membership.tell_settings(incoming.sender)
                raise

        return answered

    def _make_training(self, task: TaskConfig, before: Done = NOTHING) -> Training:
        config, context = self._config.node, self._context
        seed = config.seed
        if seed is None:
            digest = hashlib.sha256(f"{context.node_id} {context.boot}".encode()).digest()
            seed = int.from_bytes(digest[:4], "little") >> 1
        training = Training(
            me=context.node_id,
            task=task,
            config=config,
            seed=seed,
            transport=context.transport,
            clock=self._clock,
            events=self._events,
            progress_tracker=context.progress_tracker,
            rng=random.Random(seed),
            alive=context.learners,
            donors=self._donors,
            observed=self._meters.registry.observe_exchange,
            rounds=self._meters.round,
            named=context.name_of,
            direct=direct(config.advertise) and context.reachability.reach != "outbound-only",
            pipes=context.transport,
            keyed=context.transport.tls is not None,
            entered=self._on_lineage,
            folder=Path(context.data_dir),
            boot=context.boot,
            actors=context.actors,
            acting=context.acting,
            heirs=context.heirs,
            learner_left=context.learner_left,
            trainers=self._reporter.trainers,
            speeds=self._reporter.busy_steps_per_s,
            shards=context.shards,
            stale=self._meters.registry.unroll_staleness.observe,
            learning=lambda: context.membership.retag(tags_of((*config.roles, "learner"))),
            outranks=self._reporter.outranks,
            before=before,
        )
        context.state = "starting"
        return training

    def _map_port(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Have the router pass our port on, if it is to be asked."""
        config, context = self._config.node, self._context
        if not config.port_mapping or config.advertise is not None:
            return []

        def moved(outside: Address | None) -> None:
            inside = self._inside()
            self._mapped = None if outside is None else (outside, inside)
            context.address = outside or inside
            context.membership.move(context.address)

        mapping = PortMapping(self._inside, moved, self._events)
        return [group.create_task(mapping.run(), name="port mapping")]

    def _inside(self) -> Address:
        """Where this node is on its own network."""
        return self._context.address if self._mapped is None else self._mapped[1]

    async def _look_around(self, group: asyncio.TaskGroup, *, may_move: bool) -> list[asyncio.Task[None]]:
        """Follow this machine's address, ask the router for our port, look for others near."""
        jobs = self._map_port(group)
        if may_move:
            jobs.append(group.create_task(self._follow_address(), name="address"))
        if not self._config.node.discover:
            return jobs
        lan = self._make_discovery()
        job = group.create_task(lan.run(), name="local network")
        await set_within(lan.found, LOOK_FIRST_S)
        return [*jobs, job]

    def _make_discovery(self) -> LanDiscovery:
        context, admission = self._context, self._admission
        membership = context.membership
        keyed = context.transport.tls is not None

        def heard_of(address: Address) -> None:
            if not membership.core.lives(str(address), None):
                membership.joiner.heard_of(address)

        return LanDiscovery(
            context.node_id,
            lambda: fingerprint(context.swarm_id, "" if keyed else admission.wanted_task),
            self._inside,
            heard_of,
            self._events,
        )

    def _make_gossip(self) -> MetricsGossip:
        context = self._context
        made = MetricsGossip(
            transport=context.transport,
            progress_tracker=context.progress_tracker,
            clock=self._clock,
            rng=random.Random(context.boot + 1),
            alive=context.alive,
            make_report=self._reporter.report,
            on_round=self._on_round,
            refused=self._on_forged,
        )
        limit = metrics_gossip.MAX_META_BYTES
        context.transport.serve(metrics_gossip.ROUTE, made.answer, max_meta_bytes=limit)
        return made

    def _checkpoint_folder(self, training: Training) -> Path:
        return Path(self._context.data_dir) / "checkpoints" / training.task_hash[:12]

    def _make_checkpointer(
        self, store: CheckpointStore, training: Training, checkpoint: Checkpoint | None
    ) -> Checkpointer:
        return Checkpointer(
            store=store,
            config=self._config.node.checkpoint,
            training=training,
            progress_tracker=self._context.progress_tracker,
            clock=self._clock,
            events=self._events,
            evaluations=lambda: self._context.evaluations,
            best=None if checkpoint is None else checkpoint.meta.get("best_mean_return"),
            judged=training.task.evaluated,
        )

    def _make_evaluations(self, training: Training) -> Evaluations:
        config = self._config.node
        process = EvaluatorProcess(threads=config.learner.threads, allow_import=config.may_import)
        return Evaluations(self._context, self._reporter, training, process, self._meters.evaluated)

    def _make_videos(self) -> Videos:
        config = self._config.node
        process = EvaluatorProcess(threads=1, allow_import=config.may_import, longest_s=LONGEST_S)
        return Videos(self._context, config.video, process)

    def _make_inference(self, training: Training) -> Inference:
        return Inference(
            self._config.node,
            training,
            self._context.progress_tracker,
            seed=self._context.boot % 2**31,
            clock=self._clock,
            events=self._events,
            registry=self._meters.registry,
        )

    async def _fold_later(self) -> None:
        await asyncio.sleep(FOLD_AFTER_S)
        self._context.progress_tracker.fold_own()
        await asyncio.Event().wait()

    def _donors(self) -> list[tuple[str, Address]]:
        alive = self._context.learners()
        return [(node, alive[node]) for node in self._reporter.donors() if node in alive]

    def _on_forged(self, peer: str, why: str) -> None:
        if self._context.training is not None:
            self._context.training.swarm.strike(peer, why)

    # --- news -----------------------------------------------------------------------------------

    def _on_round(self) -> None:
        context = self._context
        if context.alive():
            context.alone_since_s = None
        elif context.alone_since_s is None:
            context.alone_since_s = self._clock.monotonic()
        training = context.training
        if training is None:
            return
        if context.checkpointer is not None:
            context.checkpointer.mean_return = self._reporter.mean_return
            self._evaluations.hear()
        training.sweep_actors(context.alive())
        self._follower.on_gossip_round(training)
        self._meters.write_scalars()
        self._reporter.sample()

    def _on_member(self, event: MemberEvent) -> None:
        member = event.member
        if member.is_self:
            return
        if event.kind in ("dead", "left", "banned") and self._context.gossip is not None:
            self._context.gossip.table.drop([member.id])
        if event.kind == "banned":
            self._context.transport.relay.drop(member.id)
        if event.kind == "joined":
            self._memory.changed()
        if event.kind != "updated":
            self._events.emit(
                f"member-{event.kind}",
                f"{member.name} ({short(member.id)}) {_VERBS[event.kind]}: {event.reason}",
                level="warning" if event.kind in ("suspect", "dead", "banned") else "info",
                peer=member.id,
            )

    def _on_record(self, record: SwarmRecord) -> None:
        self._follower.record_changed()
        self._memory.changed()
        membership = self._context.membership
        if record.key == settings.OPERATORS:
            names = ", ".join(operator.words for operator in membership.records.operators)
            by = self._context.author(record.proposer)
            self._events.emit("operators", f"{names} may command the swarm from now on, by {by}")
        ban = membership.records.bans.get(self._context.node_id)
        if ban is not None and membership.joined.is_set():  # or it may be one of long ago
            self._failed = self._failed or JoinRefusedError(f"this node is {ban.words}")
            self.exit_timer.args = (self._failed.exit_code,)
            self.leave("it is banned")

    def _on_lineage(self, lineage: str) -> None:
        self._follower.enter(lineage)
        self._memory.changed()

    def _on_twin(self, address: str) -> None:
        self._fatal = UsageError(
            f"another node was started with this node's identity, at {address}; this one ends. "
            "Give each node a data folder of its own with --data-dir"
        )
        self.leave("its identity runs elsewhere")


async def shutdown(context: NodeContext, reporter: StatusReporter, reason: str) -> None:
    """Finish the exchange in flight, stop the learner, save, spread the last report, say goodbye."""
    events, training, checkpointer = context.events, context.training, context.checkpointer
    events.emit("leaving", f"leaves: {reason}")
    context.state = "stopping"
    if training is not None:
        await _within(STOP_TRAINING_S, training.stop(), "stopping the learner", events)
        if checkpointer is not None and training.ready:
            await _within(CHECKPOINT_S, checkpointer.try_save(), "the last checkpoint", events)
            if context.halted is not None and (path := checkpointer.best_path) is not None:
                text = f"the policy is in {path}; `p2pdrl eval` measures it"
                events.emit("result", text, path=path)
    await _within(LAST_REPORT_S, _spread_last_report(context), "telling the last figures", events)
    summary = write_summary(context, reporter, context.halted or reason)
    await _within(SUMMARY_S, summary, "the summary", events)
    heard = await context.membership.leave(timeout_s=GOODBYE_S)
    context.state = "stopped"
    events.emit("left", f"left; {heard} members heard the goodbye")


async def _spread_last_report(context: NodeContext) -> None:
    gossip = context.gossip
    if gossip is None:
        return
    gossip.refresh()
    alive = context.alive()
    await asyncio.gather(*(gossip.tell(peer, alive[peer]) for peer in sorted(alive)[:2]))


async def _within(seconds: float, step: Awaitable[object], what: str, events: EventLog) -> None:
    try:
        async with asyncio.timeout(seconds):
            await step
    except TimeoutError:
        events.emit("slow-shutdown", f"{what} took over {seconds:g} s; goes on without", level="warning")
