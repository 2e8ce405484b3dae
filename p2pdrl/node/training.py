"""The training side of a node: learner, board, mode, lineage, adoption.

The daemon builds it once the task is known, gives it a first state (none when founding), asks for figures.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np

from p2pdrl.clock import Clock
from p2pdrl.config.node import NodeConfig
from p2pdrl.config.task import TaskConfig, batches_of, minibatch_rows, minibatches_of, task_hash
from p2pdrl.errors import WireError, WorkerError
from p2pdrl.group.compatibility import Summary
from p2pdrl.ids import short
from p2pdrl.node.accounting.counters import Counts
from p2pdrl.node.accounting.exchanges import Accounting
from p2pdrl.node.accounting.steps import StepAccounting
from p2pdrl.node.bootstrap.joining import direct
from p2pdrl.node.children.actors import ActorPool, actor_count
from p2pdrl.node.children.group_process import GroupProcesses
from p2pdrl.node.children.learner_pool import LearnerPool
from p2pdrl.node.children.supervisor import LearnerPort, LearnerSupervisor
from p2pdrl.node.events import EventLog
from p2pdrl.node.mode import ModeInForce
from p2pdrl.node.state.adoption import Adoptions, Donors, Download, without_moments
from p2pdrl.node.state.state_transfer import StateRequest, TransferredState
from p2pdrl.node.status.traces import TraceCollector
from p2pdrl.node.swarm_side import SwarmSide
from p2pdrl.strategies.pipeline.port import Pipes
from p2pdrl.strategies.protocol import RoundReport, StrategyContext
from p2pdrl.tensors.board import BoardSpec, DaemonBoard
from p2pdrl.transport.protocol import Address, Transport
from p2pdrl.workers.protocol import LearnerPace, Progress, Report, Start

__all__ = ["Training"]


class Training:
    """What trains on this node, and what it agrees on with peers.

    Args:
        me: own node id.
        task: the swarm's task.
        config: this machine's options.
        seed: of environments and exploration.
        transport: how peers are reached.
        clock: time.
        events: what is told.
        step_accounting: counts and moments.
        rng: source of the random choices.
        alive: the living members, without ourselves.
        donors: the same, the best donor first.
        observed: told how each exchange that we began has ended, and its seconds.
        rounds: told how each round has ended.
        named: from a member's id to its name.
        pipes: opens pipes to peers; None where the transport has none.
        entered: told the lineage of each state that we take.
    """

    def __init__(
        self,
        *,
        me: str,
        task: TaskConfig,
        config: NodeConfig,
        seed: int,
        transport: Transport,
        clock: Clock,
        events: EventLog,
        step_accounting: StepAccounting,
        rng: random.Random,
        alive: Callable[[], dict[str, Address]],
        donors: Donors,
        observed: Callable[[str, float], None],
        rounds: Callable[[RoundReport], None] = lambda report: None,
        named: Callable[[str], str] = str,
        pipes: Pipes | None = None,
        entered: Callable[[str], None] = lambda lineage: None,
    ) -> None:
        self._me = me
        self._pipes = pipes
        self._entered = entered
        self._config = config
        self._transport = transport
        self._clock = clock
        self._events = events
        self._step_accounting = step_accounting
        self._rng = rng
        self.accounting = Accounting(me, clock)
        self._seed = seed
        self._adopted = 0
        self._paused = False
        self._progress = 0.0
        self.task = task
        self.stop_config = task.stop
        """The stop conditions in force, which may differ from the task's own."""
        self.task_hash = task_hash(task)
        self.lineage = ""
        self.adoptions = Adoptions(
            download=Download(transport, events, config.limits.max_abs_parameter),
            donors=donors,
            clock=clock,
            request=self.state_request,
            spec=lambda: self.spec,
            take=self._take,
        )
        actors = actor_count(config.actors, task)
        start = Start(
            task=msgspec.json.encode(task),
            seed=seed,
            device=config.learner.device,
            threads=config.learner.threads,
            allow_import=config.allow_import,
            step_delay_s=config.learner.step_delay_s,
            microbatches=config.learner.microbatches,
            checkpoint_activations=config.learner.checkpoint_activations,
            activation_limit_bytes=config.learner.activation_limit_bytes,
            split_devices=config.learner.split_devices,
            split_cuts=config.learner.split_cuts,
            actors=actors,
            actors_ahead=config.actors.ahead,
        )
        self.actors = ActorPool(start, config.learner, clock, events) if actors else None
        """Processes that act for the learner; None where it does so itself."""
        self.supervisor = LearnerSupervisor(
            start=start,
            config=config.learner,
            window=task.stop.window,
            clock=clock,
            events=events,
            on_report=self._report,
            actors=self.actors,
        )
        self.learner_pool = LearnerPool(
            supervisor=self.supervisor,
            start=start,
            config=config.learner,
            clock=clock,
            events=events,
            on_report=self._report,
        )
        self.mode = ModeInForce(self.context, self.learner_pool.change, self.accounting)
        self.swarm = SwarmSide(
            me=me,
            limits=config.limits,
            clock=clock,
            events=events,
            adoptions=self.adoptions,
            alive=alive,
            named=named,
            summary=self.summary,
            env_steps=lambda: self.learner_pool.totals.env_steps,
            observed=observed,
            rounds=(self.accounting.round, rounds),
        )

        self.timelines = TraceCollector(
            me=me,
            stages=self.supervisor.stages,
            members=lambda: self.mode.members,
            transport=transport,
            clock=clock,
            alive=alive,
            named=named,
        )

    # --- life -------------------------------------------------------------------------------

    async def build(self) -> None:
        """Start the learner process and wait for its layout.

        Raises:
            ConfigError: the task can't be run as configured.
            WorkerError: the learner can't be started, or ended by itself while it was built.
        """
        await self.supervisor.build()
        self._step_accounting.open_streams(self.spec.sidecar)

    async def begin(self, state: TransferredState | None, lineage: str) -> None:
        """Begin to train, from ``state`` or (None) from the task's initial weights.

        Raises:
            WorkerError: no learner was built.
        """
        self.enter(lineage)
        if state is not None:
            clean = without_moments(state, self.spec)
            self.board.seed(clean.vector, clean.sidecar, clean.head.policy_version)
        if self._config.debug.perturb_start > 0:
            noise = np.random.default_rng(self._seed).normal(
                0.0, self._config.debug.perturb_start, self.spec.layout.size
            )
            self.board.post_delta(noise.astype(np.float32), 0)
        self.share_moments()
        self.learner_pool.tell(self._pace())
        await self.supervisor.begin(restore=state is not None)
        if self.actors is not None:
            self.actors.begin()

    async def stop(self) -> None:
        """Finish the exchange in flight, stop the learner; the last state stays readable."""
        await self.adoptions.stop()
        await self.mode.stop()
        await self.learner_pool.stop()
        await self.supervisor.stop()
        if self.actors is not None:
            await self.actors.stop()

    async def watch_actors(self) -> None:
        """Wait for ever; raise what ended the keeping of actors.

        Raises:
            ConfigError: they can't act as configured.
            WorkerError: one dies again and again in the same way.
        """
        if self.actors is not None:
            await self.actors.watch()
        await asyncio.Event().wait()

    def pause(self, *, paused: bool) -> None:
        """Hold the learner, or let it go on; averaging continues meanwhile."""
        self._paused = paused
        self.learner_pool.tell(self._pace())

    def progress(self, fraction: float, env_steps: int) -> None:
        """Tell the learner how far the swarm is.

        Args:
            fraction: towards its last environment step, 0 to 1.
            env_steps: that it has made.
        """
        self._progress = fraction
        self.learner_pool.tell(Progress(fraction, env_steps))

    def close(self) -> None:
        """Free the memory that is shared with children. Nobody may use it afterwards."""
        self.supervisor.close()
        if self.actors is not None:
            self.actors.close()

    def share_moments(self) -> None:
        """Give the learner what everybody else's normalisers counted."""
        self.learner_pool.share(self._step_accounting.others_moments())

    # --- figures ----------------------------------------------------------------------------

    @property
    def board(self) -> DaemonBoard:
        """The daemon's end of the board."""
        if self.supervisor.board is None:
            raise WorkerError("the learner isn't built yet")
        return self.supervisor.board

    @property
    def spec(self) -> BoardSpec:
        """Layout of parameters and sidecar."""
        if self.supervisor.spec is None:
            raise WorkerError("the learner isn't built yet")
        return self.supervisor.spec

    @property
    def ready(self) -> bool:
        """Whether there is a state."""
        return self.supervisor.board is not None and self.supervisor.board.published_once

    @property
    def paused(self) -> bool:
        """Whether the learner is held."""
        return self._paused

    @property
    def policy_version(self) -> int:
        """Of the state as it is now; 0 while there is none."""
        return self.board.policy_version if self.ready else 0

    @property
    def lineage_steps(self) -> int:
        """Environment steps made within our lineage, as far as known."""
        return self._step_accounting.steps(self.lineage)

    @property
    def outcomes(self) -> dict[str, int]:
        """Exchanges by outcome, over all strategies of this boot."""
        return dict(self.mode.outcomes + Counter(adopted=self._adopted))

    def summary(self) -> Summary | None:
        """What we say of ourselves; None without a state, or while adopting one."""
        if not self.ready or self.adoptions.under_way:
            return None
        return Summary(
            node_id=self._me,
            task_hash=self.task_hash,
            layout_hash=self.spec.layout.hash,
            mode_epoch=self.mode.epoch,
            lineage=self.lineage,
            lineage_steps=self.lineage_steps,
            policy_version=self.board.policy_version,
        )

    # --- inside ---------------------------------------------------------------------------------

    async def _take(self, giver: str, state: TransferredState, why: str) -> None:
        clean = without_moments(state, self.spec)
        await asyncio.to_thread(self.board.post_set, clean.vector, clean.sidecar, clean.head.policy_version)
        self.enter(state.head.lineage)
        self.tell_adopted(giver, state, why)

    def tell_adopted(self, giver: str, state: TransferredState, why: str) -> None:
        """Tell that a state was adopted, with the hash that shows it."""
        self._adopted += 1
        self._events.emit(
            "adopted",
            f"took over the state of {short(giver)} at version {state.head.policy_version}: {why}",
            peer=giver,
            policy_version=state.head.policy_version,
            params_hash=state.head.params_hash,
            lineage=state.head.lineage,
        )

    def enter(self, lineage: str) -> None:
        """What is trained from now on belongs to this lineage."""
        self.lineage = lineage
        self._step_accounting.follow(lineage)
        self._entered(lineage)

    def context(self, epoch: int) -> StrategyContext:
        """What a strategy of that mode epoch is given."""
        config = self._config
        return StrategyContext(
            swarm=self.swarm,
            learner=LearnerPort(self.supervisor, self.task.algorithm, lambda: self._progress),
            transport=self._transport,
            clock=self._clock,
            rng=self._rng,
            epoch=epoch,
            size=self.spec.layout.size,
            max_abs=config.limits.max_abs_parameter,
            trusted_network=config.trusted_network,
            direct=direct(config.advertise),
            max_exchanges=config.debug.max_exchanges,
            start_at_members=config.debug.start_at_members,
            group_process=GroupProcesses(config.learner) if config.trusted_network else None,
            stages=self.supervisor.stages,
            pipes=self._pipes,
            experience=self.actors,
            minibatches=minibatches_of(self.task.algorithm),
            batches=batches_of(self.task.algorithm),
            rows=minibatch_rows(self.task)[0],
        )

    def state_request(self) -> StateRequest:
        """What we ask a peer for its state with."""
        return StateRequest(
            task_hash=self.task_hash,
            layout_hash=self.spec.layout.hash,
            sidecar_hash=self.spec.sidecar.hash,
        )

    def _pace(self) -> LearnerPace:
        return LearnerPace(paused=self._paused, max_updates_per_s=self._config.learner.max_updates_per_s)

    def _report(self, report: Report, new_updates: int) -> None:
        totals = self.learner_pool.totals
        self._step_accounting.credit(Counts(totals.env_steps, totals.episodes, totals.updates))
        if report.moments:
            try:
                self._step_accounting.put_moments(self.learner_pool.moments)
            except WireError as error:
                self._events.emit("moments-failed", str(error), level="warning")
        if new_updates > 0:
            self.mode.strategy.updated(new_updates)
