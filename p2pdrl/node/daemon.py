"""The daemon of one node: brings its parts up in order, keeps them running, takes them down.

    data folder, identity → port → membership → task (founded or joined) → learner → state →
    records (mode, stop) → rumours, checkpoints — until a signal, ``leave`` or the swarm's halt.

`run` is what ``p2pdrl node`` calls.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import signal
import socket
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any

import msgspec

import p2pdrl
from p2pdrl.api.keyfile import read_swarm_key
from p2pdrl.clock import SystemClock
from p2pdrl.config.checks import task_problems
from p2pdrl.config.loader import Resolved
from p2pdrl.config.root import Config
from p2pdrl.config.task import TaskConfig
from p2pdrl.config.task_hash import task_hash
from p2pdrl.errors import ConfigError, JoinRefusedError, P2PDRLError, WireError
from p2pdrl.ids import short, swarm_id_from_key, swarm_id_from_name
from p2pdrl.membership.events import MemberEvent
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.joining import JoinHooks
from p2pdrl.membership.known_members import KnownMembers
from p2pdrl.membership.parameters import MembershipConfig
from p2pdrl.membership.records import SwarmRecord
from p2pdrl.membership.opening import open_core
from p2pdrl.membership.service import MembershipService
from p2pdrl.node import rumours, state_transfer
from p2pdrl.node.checkpoints import CheckpointStore
from p2pdrl.node.conduct import Conduct
from p2pdrl.node.datadir import DataDir
from p2pdrl.node.endpoint import Endpoint
from p2pdrl.node.events import EventLog
from p2pdrl.node.figures import Figures
from p2pdrl.node.first_state import first_state, restore_ledger, take_up
from p2pdrl.node.joining import JoinInfo, Origin, advertised, decode_info, patience_s, refuse_task
from p2pdrl.node.ledger import Ledger
from p2pdrl.node.meters import Meters
from p2pdrl.node.parts import Parts
from p2pdrl.node.rumours import Rumours
from p2pdrl.node.saving import Saving
from p2pdrl.node.training import Training
from p2pdrl.node.view import View
from p2pdrl.strategies import gossip
from p2pdrl.telemetry import logging as telemetry_logging
from p2pdrl.transport.protocol import Address, Refusal

__all__ = ["Node", "run"]

LAST_WORDS_S = 1.5
"""After a halt the node stays this long, so that everybody hears of it and sees the last figures."""
FOLD_AFTER_S = 60.0
STILL_TRYING_S = 10.0


def run(resolved: Resolved) -> int:
    """Run a node until it leaves or the swarm is done; return the exit code.

    Raises:
        P2PDRLError: the node can't start, or can't go on.
    """
    config = resolved.config
    telemetry_logging.configure(config.node.log.level, config.node.log.format)
    insists = any(
        key.split(".")[1] in ("seed", "env", "network", "algorithm") for key in resolved.given("task")
    )
    try:
        return asyncio.run(Node(config, insists_on_task=insists).live())
    except BaseExceptionGroup as group:
        known = group.subgroup(P2PDRLError)
        if known is None or group.split(P2PDRLError)[1] is not None:
            raise
        raise _first(known) from None


def _first(group: BaseExceptionGroup[P2PDRLError]) -> P2PDRLError:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


class Node:
    """One node's life.

    Args:
        config: the whole configuration.
        insists_on_task: the person named a task, so that a swarm with another one is refused.
    """

    def __init__(self, config: Config, *, insists_on_task: bool) -> None:
        self._config = config
        self._insists = insists_on_task
        self._clock = SystemClock()
        self._events = EventLog(2000, self._clock)
        self._leaving = asyncio.Event()
        self._leave_reason = ""
        self._welcome: JoinInfo | None = None
        self._refusals: dict[str, str] = {}
        self._refused = asyncio.Event()

    async def live(self) -> int:
        """Come up, train, go down; return the exit code."""
        async with AsyncExitStack() as stack:
            parts, view = await self._come_up(stack)
            figures = Figures(parts)
            conduct = Conduct(parts, figures)
            meters = Meters(parts, figures)
            view.attach(parts, figures, meters, conduct)
            self._conduct, self._figures, self._meters, self._parts = conduct, figures, meters, parts
            await parts.membership.start()
            stack.push_async_callback(parts.membership.close)
            await self._until_left(self._work(stack))
            await self._go_down(parts)
        return 0

    # --- up -------------------------------------------------------------------------------------

    async def _come_up(self, stack: AsyncExitStack) -> tuple[Parts, View]:
        config, clock, events = self._config.node, self._clock, self._events
        key = None if config.swarm_key_file is None else read_swarm_key(config.swarm_key_file)
        swarm_id = swarm_id_from_name(config.swarm) if key is None else swarm_id_from_key(key)
        data = stack.enter_context(DataDir.acquire(config.data_dir))
        if data.picked_other:
            events.emit("data-dir", f"the first data folder is in use; this node takes {data.path}")
        identity = Identity.load_or_create(data.path)
        endpoint = Endpoint(
            node_id=identity.node_id, swarm_id=swarm_id, swarm_key=key, config=config, clock=clock
        )
        stack.push_async_callback(endpoint.close)
        view = View(
            name=config.name or "",
            token=data.token(),
            swarm_key=key,
            open_metrics=config.open_metrics,
            data_dir=str(data.path),
            events=events,
            leave=self.leave,
        )
        self._catch_signals(stack)
        bound = await endpoint.open(view)
        address = advertised(config.advertise, bound, config.peers)
        name = config.name or f"{socket.gethostname()}:{bound.port}"
        view.name = name
        known = KnownMembers(data.path)
        core = open_core(
            config=MembershipConfig.wan() if config.membership == "wan" else MembershipConfig.lan(),
            signer=identity,
            swarm_id=swarm_id,
            name=name,
            address=str(address),
            clock=clock,
            rng=random.Random(identity.node_id),
            known=known,
        )
        boot = core.me.incarnation.boot_ms
        membership = MembershipService(
            core,
            endpoint.transport,
            clock,
            [Address.parse(peer) for peer in config.peers],
            hooks=JoinHooks(
                meta=self._join_meta,
                check_join=self._check_join,
                info=self._join_info,
                check_welcome=self._check_welcome,
                on_refused=self._on_refused,
            ),
            known=known,
            rng=random.Random(boot),
            on_record=self._on_record,
            on_twin=self._on_twin,
        )
        membership.subscribe(self._on_member)
        parts = Parts(
            config=self._config,
            name=name,
            node_id=identity.node_id,
            swarm_id=swarm_id,
            boot=boot,
            data_dir=str(data.path),
            address=address,
            clock=clock,
            events=events,
            transport=endpoint.transport,
            membership=membership,
            ledger=Ledger(identity.node_id, boot),
            began_s=clock.monotonic(),
        )
        self._remembers = bool(known.members)
        events.emit(
            "started",
            f"{name} ({short(parts.node_id)}) listens on {address}; "
            f"others join with: p2pdrl node --peers {address}"
            + ("" if key is None else " --swarm-key-file FILE"),
            address=str(address),
            version=p2pdrl.__version__,
            data_dir=parts.data_dir,
        )
        return parts, view

    def _catch_signals(self, stack: AsyncExitStack) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.leave, f"signal {number.name}")
            stack.callback(loop.remove_signal_handler, number)

    def leave(self, reason: str) -> None:
        """Begin to leave the swarm."""
        if not self._leaving.is_set():
            self._leave_reason = reason
            self._leaving.set()

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

    async def _work(self, stack: AsyncExitStack) -> None:
        parts = self._parts
        async with asyncio.TaskGroup() as group:
            jobs = [
                group.create_task(parts.membership.watch(), name="membership"),
                group.create_task(parts.lag.run(), name="loop lag"),
            ]
            rumours_ = self._make_rumours()
            parts.rumours = rumours_
            origin = await self._find_swarm()
            training = self._make_training(origin.task)
            await training.build()
            stack.callback(training.supervisor.close)
            store = CheckpointStore(self._folder(training), self._config.node.checkpoint.keep)
            checkpoint = take_up(store, self._events)
            if checkpoint is not None:
                restore_ledger(parts.ledger, checkpoint)
            parts.training = training
            parts.transport.serve(
                gossip.ROUTE,
                training.answer_exchange,
                max_vector_bytes=self._config.node.limits.max_vector_bytes,
            )
            parts.transport.serve(state_transfer.ROUTE, training.answer_state)
            jobs.append(group.create_task(rumours_.run(), name="rumours"))
            state, lineage = await first_state(parts, training, origin, checkpoint)
            await training.begin(state, lineage)
            parts.saving = self._make_saving(store, training, checkpoint)
            parts.state = "training"
            self._events.emit("training", f"trains {origin.task.env.id} on {training.supervisor.device}")
            if origin.how == "founded":
                self._conduct.found(training, origin_founded_at(checkpoint, self._clock.wall()))
            jobs += [
                group.create_task(self._conduct.run(training), name="records"),
                group.create_task(training.supervisor.watch(), name="learner"),
                group.create_task(parts.saving.run(), name="checkpoints"),
                group.create_task(self._fold_later(), name="fold"),
            ]
            await self._conduct.halted.wait()
            if self._config.node.keep_running:
                parts.state = "stopped"
                await asyncio.Event().wait()
            await asyncio.sleep(LAST_WORDS_S)
            for job in jobs:
                job.cancel()
        self.leave("the swarm is done")

    async def _find_swarm(self) -> Origin:
        """Wait for a member to take us in, or found.

        Raises:
            JoinRefusedError: every seed refuses us.
        """
        parts, seeds = self._parts, self._config.node.peers
        patience = patience_s(seeds, parts.address, remembers=self._remembers)
        if patience != 0:
            self._events.emit(
                "joining", f"looks for a swarm at {', '.join(seeds) or 'members of the last run'}"
            )
        waiting = asyncio.create_task(self._say_still_trying(), name="patience")
        try:
            async with asyncio.timeout(patience):
                while not parts.membership.joined.is_set():
                    await self._wait_for_news()
        except TimeoutError:
            pass
        finally:
            waiting.cancel()
            await asyncio.wait([waiting])
        info = self._welcome
        if info is not None:
            parts.founded_at = info.founded_at
            parts.join_refused = None
            self._events.emit(
                "joined", f"joined a swarm that trains {info.task.env.id}", lineage=info.lineage
            )
            return Origin("joined", info.task, info)
        self._events.emit("founded", f"founds a swarm that trains {self._config.task.env.id}")
        return Origin("founded", self._config.task, None)

    async def _wait_for_news(self) -> None:
        joined = asyncio.create_task(self._parts.membership.joined.wait())
        refused = asyncio.create_task(self._refused.wait())
        try:
            await asyncio.wait([joined, refused], return_when=asyncio.FIRST_COMPLETED)
        finally:
            joined.cancel()
            refused.cancel()
        self._refused.clear()
        refusals = self._parts.membership.refusals()
        seeds = self._config.node.peers
        if not self._parts.membership.joined.is_set() and seeds and len(refusals) >= len(seeds):
            where, why = next(iter(refusals.items()))
            raise JoinRefusedError(f"{where} doesn't take this node in: {why}")

    async def _say_still_trying(self) -> None:
        while True:
            await asyncio.sleep(STILL_TRYING_S)
            seeds = ", ".join(self._config.node.peers) or "the members of the last run"
            self._events.emit(
                "still-trying",
                f"no answer from {seeds} yet; goes on trying. Is a node running there, is the address right, "
                "is the port open?",
                level="warning",
            )

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
            ledger=parts.ledger,
            rng=random.Random(seed),
            alive=parts.alive,
            donors=self._donors,
            observed=self._meters.registry.observe_exchange,
        )
        parts.state = "starting"
        return training

    def _make_rumours(self) -> Rumours:
        parts = self._parts
        made = Rumours(
            me=parts.node_id,
            transport=parts.transport,
            ledger=parts.ledger,
            clock=self._clock,
            rng=random.Random(parts.boot + 1),
            alive=parts.alive,
            make_report=self._figures.report,
            on_round=self._on_round,
        )
        parts.transport.serve(rumours.ROUTE, made.answer, max_meta_bytes=rumours.MAX_META_BYTES)
        return made

    def _make_saving(self, store: CheckpointStore, training: Training, checkpoint: Any) -> Saving:
        saving = Saving(
            store=store,
            config=self._config.node.checkpoint,
            training=training,
            ledger=self._parts.ledger,
            clock=self._clock,
            events=self._events,
        )
        if checkpoint is not None:
            saving.was_best(checkpoint.meta.get("best_mean_return"))
        return saving

    def _folder(self, training: Training) -> Any:
        from pathlib import Path

        return Path(self._parts.data_dir) / "checkpoints" / training.task_hash[:12]

    async def _fold_later(self) -> None:
        await asyncio.sleep(FOLD_AFTER_S)
        self._parts.ledger.fold_own()
        await asyncio.Event().wait()

    def _donors(self) -> list[tuple[str, Address]]:
        alive = self._parts.alive()
        return [(node, alive[node]) for node in self._figures.donors() if node in alive]

    # --- news -----------------------------------------------------------------------------------

    def _on_round(self) -> None:
        parts = self._parts
        now_s = self._clock.monotonic()
        if parts.alive():
            parts.alone_since_s = None
        elif parts.alone_since_s is None:
            parts.alone_since_s = now_s
        training = parts.training
        if training is None:
            return
        if parts.saving is not None:
            parts.saving.mean_return = self._figures.mean_return
        self._conduct.look(training)

    def _on_member(self, event: MemberEvent) -> None:
        member = event.member
        if member.is_self:
            return
        if event.kind in ("dead", "left") and self._parts.rumours is not None:
            self._parts.rumours.table.drop([member.id])
        if event.kind != "updated":
            self._events.emit(
                f"member-{event.kind}",
                f"{member.name} ({short(member.id)}) {_VERBS[event.kind]}: {event.reason}",
                level="warning" if event.kind in ("suspect", "dead") else "info",
                peer=member.id,
            )

    def _on_record(self, _record: SwarmRecord) -> None:
        self._conduct.record_changed()

    def _on_twin(self, address: str) -> None:
        raise ConfigError(
            f"another node runs with this node's identity at {address}: "
            "give each node a data folder of its own with --data-dir"
        )

    def _on_refused(self, address: str, reason: str) -> None:
        self._refusals[address] = reason
        self._events.emit("refused", f"{address}: {reason}", level="warning", address=address)
        self._refused.set()

    def _join_meta(self) -> bytes:
        return (task_hash(self._config.task) if self._insists else "").encode()

    def _check_join(self, meta: bytes) -> str | None:
        training = self._parts.training
        if training is None:
            raise Refusal(503, "this node is only just starting")
        return refuse_task(meta.decode("ascii", "replace"), training.task, training.task_hash)

    def _join_info(self) -> bytes:
        training = self._parts.training
        if training is None:
            raise Refusal(503, "this node is only just starting")
        founded_at = self._parts.founded_at
        return msgspec.msgpack.encode(
            JoinInfo(
                task=training.task,
                task_hash=training.task_hash,
                lineage=training.lineage,
                policy_version=training.policy_version,
                founded_at=self._clock.wall() if founded_at is None else founded_at,
            )
        )

    def _check_welcome(self, data: bytes) -> str | None:
        try:
            info = decode_info(data)
        except WireError as error:
            return str(error)
        training = self._parts.training
        if training is not None and training.task_hash != info.task_hash:
            return refuse_task(training.task_hash, info.task, info.task_hash)
        if training is None and self._insists:
            refusal = refuse_task(task_hash(self._config.task), info.task, info.task_hash)
            if refusal is not None:
                return refusal
        problem = next(iter(task_problems(info.task)), None)
        if problem is not None:
            return f"its task can't be run: {problem.key}: {problem.message}"
        if self._welcome is None:
            self._welcome = info
        return None

    # --- down -----------------------------------------------------------------------------------

    async def _go_down(self, parts: Parts) -> None:
        self._events.emit("leaving", f"leaves: {self._leave_reason or 'done'}")
        parts.state = "stopping"
        if parts.training is not None:
            await parts.training.stop()
        if parts.saving is not None and parts.training is not None and parts.training.ready:
            await parts.saving.try_save()
        if parts.rumours is not None:
            parts.rumours.refresh()
            alive = parts.alive()
            for peer in sorted(alive)[:2]:
                with suppress(TimeoutError):
                    await parts.rumours.tell(peer, alive[peer])
        heard = await parts.membership.leave(timeout_s=2.0)
        parts.state = "stopped"
        self._events.emit("left", f"left; {heard} members heard the goodbye")


_VERBS = {
    "joined": "joined",
    "suspect": "is suspected",
    "alive": "is alive again",
    "dead": "is dead",
    "left": "has left",
}


def origin_founded_at(checkpoint: Any, now: float) -> float:
    """Return when the swarm was founded: as an earlier run has it, or now."""
    stop = None if checkpoint is None else checkpoint.meta.get("stop")
    return float(stop["founded_at"]) if isinstance(stop, dict) and "founded_at" in stop else now
