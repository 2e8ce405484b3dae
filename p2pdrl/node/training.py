"""The training side of a node: learners, board, the mode in force, lineage, adoption of states.

The daemon builds it once the task is known, and gives it a first state (none when founding).
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from p2pdrl.clock import Clock
from p2pdrl.config.learner_mode import LearnerMode
from p2pdrl.config.node import NodeConfig
from p2pdrl.config.strategy import LocalConfig, StrategyConfig
from p2pdrl.config.task import (
    RegressionConfig,
    ReplayOptions,
    TaskConfig,
    batches_of,
    minibatch_rows,
    minibatches_of,
    rate_power,
    relative_speeds,
    task_hash,
)
from p2pdrl.errors import ConfigError, WireError, WorkerError
from p2pdrl.group.compatibility import Summary
from p2pdrl.ids import short
from p2pdrl.node import settings
from p2pdrl.node.accounting.counters import ZERO, Counts
from p2pdrl.node.accounting.exchanges import Accounting
from p2pdrl.node.accounting.progress_tracker import ProgressTracker
from p2pdrl.node.background import first_ended
from p2pdrl.node.children.actors import ActorPool, actor_count, lanes_for_ranks, remote_actor_count
from p2pdrl.node.children.group_process import GroupProcesses
from p2pdrl.node.children.learner_pool import LearnerPool, pooled
from p2pdrl.node.children.supervisor import LearnerPort, LearnerSupervisor
from p2pdrl.node.events import EventLog
from p2pdrl.node.experience.messages import acting_together, learner_of
from p2pdrl.node.experience.policy import PolicyFollower
from p2pdrl.node.experience.receiver import ExperienceReceiver
from p2pdrl.node.experience.sampler import ReplaySampler
from p2pdrl.node.experience.sender import ExperienceSender, LentActors
from p2pdrl.node.experience.shard import ReplayServer
from p2pdrl.node.state.replay_store import ReplayStore
from p2pdrl.node.state.state_transfer import (
    Adoptions,
    Donors,
    OwnState,
    StateRequest,
    StateServer,
    TransferredState,
    without_moments,
)
from p2pdrl.node.status.traces import TraceCollector
from p2pdrl.node.swarm_view import NodeSwarmView
from p2pdrl.strategies.local import LocalStrategy
from p2pdrl.strategies.pipeline.port import Pipes
from p2pdrl.strategies.protocol import EXCHANGE_END_S, RoundReport, Strategy, StrategyContext
from p2pdrl.strategies.registry import build
from p2pdrl.tensors.board import BoardSpec, DaemonBoard
from p2pdrl.tensors.shared_policy import PolicyCopies
from p2pdrl.transport.pipe.ticket import PipeReply
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply, Transport
from p2pdrl.workers.protocol import DataShare, LearnerPace, LendActors, Progress, Report, Start

__all__ = ["NOTHING", "ActiveMode", "Done", "Training"]

LOOK_EVERY_S = 0.5
STEADY_S = 3.0
"""For so long the same nodes act before environments are divided among them anew."""
ALONE_S = 2.0
"""After nobody has learned for so long, somebody who only acted begins."""
LONGEST_END_S = 15.0
"""A strategy may have to wait for an update, or for a whole state, but no longer than this."""


class Done(NamedTuple):
    """What a node did, to be counted on from.

    Args:
        counts: steps, episodes and updates.
        moments: of its normalisers, msgpack by stream.
    """

    counts: Counts
    moments: dict[str, bytes]


NOTHING = Done(ZERO, {})


def _learner_of(me: str, actors: Iterable[str], learners: dict[str, Address]) -> tuple[str, Address] | None:
    """Return whom our actors work for, and where that is; see `learner_of`."""
    learner = learner_of(me, actors, learners)
    return None if learner is None else (learner, learners[learner])


def _start(config: NodeConfig, task: TaskConfig, seed: int) -> Start:
    """Return what this node's learner process is told first, or that of its shard of the replay.

    Raises:
        ConfigError: the node's roles don't go with the task.
    """
    count, remote = actor_count(config, task), remote_actor_count(config, task)
    name = task.algorithm.__struct_config__.tag
    replays = isinstance(task.algorithm, ReplayOptions)
    start = Start(
        task=msgspec.json.encode(task),
        seed=seed,
        device=config.learner.device,
        threads=config.learner.threads,
        allow_import=config.may_import,
        step_delay_s=config.learner.step_delay_s,
        microbatches=config.learner.microbatches,
        checkpoint_activations=config.learner.checkpoint_activations,
        activation_limit_bytes=config.learner.activation_limit_bytes,
        split_devices=config.learner.split_devices,
        split_cuts=config.learner.split_cuts,
        compiled=config.learner.compile,
        actors=count,
        actors_ahead=config.actors.ahead,
        remote_actors=remote,
        remote_ahead=0 if lanes_for_ranks(config) else 1,
    )
    if config.holds_replay:
        if not replays:
            raise ConfigError(f"node.roles: {name} has no replay memory; leave replay out")
        return msgspec.structs.replace(start, device="cpu", replay="shard")
    if replays and config.draws_replay:
        return _drawing(start)
    if not config.learns and not count:
        raise ConfigError("a regression has no environments to act in; leave node.roles out")
    if not (config.acts or remote or isinstance(task.algorithm, RegressionConfig)):
        raise ConfigError(f"node.roles: {name} learns from this node's own unrolls only; add actor")
    return start


def _drawing(start: Start) -> Start:
    """Return the same for a learner that draws from a replay memory on other nodes."""
    return msgspec.structs.replace(start, actors=0, remote_actors=0, replay="sampled")


class ActiveMode:
    """The strategy in force, from one mode to the next; `LocalStrategy` before the first.

    Args:
        context: makes what a strategy is given, for the stamp of a mode.
        change: has the learners work under a learner mode, from the mode of that stamp on.
    """

    def __init__(
        self,
        context: Callable[[int], StrategyContext],
        change: Callable[[LearnerMode, int], Awaitable[None]],
        accounting: Accounting,
        build: Callable[[StrategyConfig, StrategyContext], Strategy] = build,
    ) -> None:
        self._build = build
        self._context = context
        self._change = change
        self._accounting = accounting
        self._past: Counter[str] = Counter()
        self._used = asyncio.Event()
        self._using = asyncio.Lock()
        self.strategy: Strategy = LocalStrategy()
        self.config: StrategyConfig = LocalConfig()
        self.epoch = 0
        """A `settings.stamp`, so that two modes proposed at once never mix."""

    @property
    def outcomes(self) -> Counter[str]:
        """Exchanges by outcome, over all strategies of this boot."""
        return self._past + Counter(self.strategy.outcomes)

    async def use(self, config: StrategyConfig, epoch: int) -> None:
        """Change to another strategy, after the exchange in flight; ``epoch`` is the mode record's stamp.

        Raises:
            ConfigError: this node can't run it; until the next call it trains alone.
        """
        async with self._using:
            await self._use(config, epoch)

    async def _use(self, config: StrategyConfig, epoch: int) -> None:
        await self.strategy.stop(min(self.strategy.ends_within_s, LONGEST_END_S))
        self._past.update(self.strategy.outcomes)
        self._accounting.saw_distance(self.strategy.consensus_distance)
        interim = LocalStrategy()
        self.strategy, self.config = interim, LocalConfig()
        self.epoch = epoch
        strategy = self._build(config, self._context(epoch))
        await self._change(config.learner_mode, epoch)
        self.strategy = strategy
        await interim.stop(0.0)  # who began to watch it meanwhile goes on to this one
        try:
            await strategy.start()
        except ConfigError:
            self.strategy = LocalStrategy()
            await strategy.stop(0.0)
            raise
        self.config = config
        self._accounting.entered(config, settings.epoch_of(epoch))
        self._used.set()

    async def watch(self) -> None:
        """Wait for ever, from one strategy to the next; raise what ended one: a bug of ours."""
        while True:
            self._used.clear()
            await self.strategy.watch()
            await self._used.wait()

    async def answer(self, incoming: Incoming) -> Reply:
        """Pass a peer's call on to the strategy, which may raise Refusal."""
        return await self.strategy.answer(incoming)

    async def accept(self, incoming: Incoming) -> PipeReply:
        """Pass a peer's request for a pipe on to the strategy.

        Raises:
            Refusal: the strategy refuses, or has no use for pipes (409).
        """
        return await self.strategy.accept(incoming)

    async def stop(self) -> None:
        """Finish the exchange in flight, soon: when the node leaves, others wait their turn."""
        await self.strategy.stop(EXCHANGE_END_S)


class Training:
    """What trains on this node, and what it agrees on with peers.

    Args:
        seed: of environments and exploration.
        alive: tells the living learners, without ourselves; ``donors`` the same, the best donor first.
        observed: told how each exchange that we began has ended, and its seconds.
        direct: whether peers reach any port of this machine.
        pipes: opens pipes to peers; None where the transport has none.
        entered: told the lineage of each state that is trained here.
        folder: where a replay memory is kept if it is to be on disk; None keeps none there.
        boot: of this node.
        actors: tells the other living nodes that act and don't learn.
        acting: tells the other living nodes that act, whether they learn or not.
        heirs: tells those of them that would learn if nobody else did.
        learner_left: tells whether another node learns.
        trainers: tells those of the living learners that actors of other nodes may work for; None for all.
        speeds: tells environment steps a second of the other living learners' own work, 0 for unknown.
        shards: tells the other living nodes that hold a shard of the replay memory.
        learning: told when this node begins to learn, which only acted before.
        stale: told how many versions old the policy of each unroll from another node was.
        keyed: whether the swarm has a key, be it that this node was invited and doesn't hold it.
        before: what this node did in this boot in other roles.
    """

    _last_look: tuple[float, dict[str, float]] = (float("-inf"), {})
    """When living learners were last looked for, and how fast they are, by id."""
    _divided_by: tuple[float, float, list[str]] | None = None
    """What parts of updates were last reckoned from: that look, rate power, members."""
    _last_divided_s = float("-inf")
    """When environments were last divided among actors."""
    _seen_acting: tuple[float, list[str]] = (float("-inf"), [])
    """Who was last seen to act for the same learner, and since when just those."""

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
        progress_tracker: ProgressTracker,
        rng: random.Random,
        alive: Callable[[], dict[str, Address]],
        donors: Donors,
        observed: Callable[[str, float], None],
        rounds: Callable[[RoundReport], None] = lambda report: None,
        named: Callable[[str], str] = str,
        direct: bool = True,
        pipes: Pipes | None = None,
        entered: Callable[[str], None] = lambda lineage: None,
        folder: Path | None = None,
        boot: int = 0,
        actors: Callable[[], Iterable[str]] = tuple,
        acting: Callable[[], Iterable[str]] = tuple,
        heirs: Callable[[], Iterable[str]] = tuple,
        learner_left: Callable[[], bool] = lambda: True,
        trainers: Callable[[], dict[str, Address]] | None = None,
        speeds: Callable[[], Mapping[str, float]] = dict,
        shards: Callable[[], dict[str, Address]] = dict,
        learning: Callable[[], None] = lambda: None,
        stale: Callable[[int], None] = lambda _: None,
        outranks: Callable[[str], bool] = lambda lineage: True,
        keyed: bool = False,
        before: Done = NOTHING,
    ) -> None:
        self._me, self._before, self._boot = me, before, boot
        self._direct, self._keyed = direct, keyed
        self._pipes = pipes
        self._entered = entered
        self._others_acting, self._other_actors, self._heirs, self._speeds = acting, actors, heirs, speeds
        self._learner_left = learner_left
        self._alive, self._shards, self._named = alive, shards, named
        self._learning = learning
        self._config = config
        self._transport, self._clock, self._events = transport, clock, events
        self._progress_tracker, self._rng = progress_tracker, rng
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
            transport=transport,
            events=events,
            max_abs=config.limits.max_abs_parameter,
            donors=donors,
            clock=clock,
            request=self.state_request,
            spec=lambda: self.spec,
            take=self._take,
        )
        self.state_server = StateServer(self._own_state, events)
        start = self._start = _start(config, task, seed)
        self._replays = isinstance(task.algorithm, ReplayOptions)
        self.holds_replay = start.replay == "shard"
        """Whether a shard of the swarm's replay memory is here."""
        self.learns = config.learns
        """Whether parameters are updated here; else this node's actors work for another's learner."""
        self.actors = (
            ActorPool(start, config.learner, clock, events, batched=config.actors.inference == "batched")
            if start.actors or start.remote_actors
            else None
        )
        """Processes that act for the learner, here or elsewhere; None where it does so itself."""
        self.swarm = NodeSwarmView(
            me=me,
            limits=config.limits,
            clock=clock,
            events=events,
            adoptions=self.adoptions,
            alive=alive,
            named=named,
            summary=self.summary,
            env_steps=lambda: self.totals.env_steps,
            observed=observed,
            rounds=(self.accounting.round, rounds),
            outranks=outranks,
        )
        self.sampler = self._make_sampler() if start.replay == "sampled" else None
        """Brings samples of a replay memory on other nodes; None where the learner has its own."""
        self.supervisor = LearnerSupervisor(
            start=start,
            config=config.learner,
            window=task.stop.window,
            clock=clock,
            events=events,
            on_report=self._report,
            actors=self.actors,
            replay=ReplayStore(
                folder / f"replay-{self.task_hash[:12]}"
                if folder is not None and config.learner.replay_on_disk
                else None,
                config.limits.memory_bytes,
            ),
            sampler=self.sampler,
        )
        self.learners = LearnerPool(
            supervisor=self.supervisor,
            start=start,
            config=config.learner,
            clock=clock,
            events=events,
            on_report=self._report,
        )
        self.mode = ActiveMode(self.context, self._change, self.accounting, self._strategy)
        self.receiver = self._make_receiver(stale)
        """Takes in unrolls of other nodes; None where nobody here wants any."""
        self._made_for_rank0 = ZERO
        acts_for_learner = not (self.learns or self.holds_replay)
        self.sender = (
            self._make_sender(self._post_of(actors, trainers or alive)) if acts_for_learner else None
        )
        """Sends unrolls to another node; None where they are learned from or stored here."""
        self.lent_actors = self._make_lent_actors()
        """Has this node's actors work for the first rank of its pipeline; None where that can't be."""
        self.replay_server = self._make_replay_server(boot) if self.holds_replay else None
        """Serves this node's shard of the replay memory; None without one."""
        self.follower = self._make_follower() if self.holds_replay else None
        """Keeps the policy for actors that send their unrolls to this node's shard."""
        self.traces = TraceCollector(
            me=me,
            stages=self.supervisor.stages,
            members=lambda: self.mode.strategy.members,
            transport=transport,
            clock=clock,
            alive=alive,
            named=named,
        )

    # --- life -------------------------------------------------------------------------------

    async def build(self) -> None:
        """Start the learner process and wait for its layout, or for that of the learner we act for."""
        if self.sender is None or self.actors is None:
            await self.supervisor.build()
        else:
            board, unrolls = await self.sender.layout()
            self.supervisor.open(board)
            self.actors.open(unrolls, board)
        self._progress_tracker.open_streams(self.spec.sidecar)

    async def begin(self, state: TransferredState | None, lineage: str) -> None:
        """Begin to train, from ``state`` or (None) from the task's initial weights."""
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
        self.divide_data()
        self.learners.tell(self._pace())
        if self.learns or self.holds_replay:
            await self.supervisor.begin(restore=state is not None)
        if self.actors is not None:
            self.actors.begin()

    async def stop(self) -> None:
        """Finish the exchange in flight, stop the learner; the last state stays readable."""
        await self.adoptions.stop()
        await self.mode.stop()
        await self.learners.stop()
        await self.supervisor.stop()
        if self.actors is not None:
            await self.actors.stop()

    async def watch_actors(self) -> None:
        """Wait for ever; raises as `ActorPool.watch`."""
        if self.actors is not None:
            await self.actors.watch()
        await asyncio.Event().wait()

    async def send(self) -> None:
        """Move experience from node to node, for ever.

        Who only acts sends unrolls to their learner, or to a shard of the replay, and keeps the whole state;
        who holds a shard, the policy; who draws from shards, samples; a later rank of a pipeline sends
        unrolls to the first. Nothing to do for all others.
        """
        if self.learns:
            await self._lend_actors()
        if self.sampler is not None:
            await self.sampler.run()
        if self.follower is not None:
            await self._first_ended(self.follower.run(), self._keep_state())
        if self.sender is None or self.actors is None:
            return
        await self._first_ended(self._until_alone(), self.sender.run(self.actors), self._keep_state())
        sender = self.sender
        await self._learn()
        await self._lend_actors()
        if self.sampler is not None:
            await self._first_ended(self.sampler.run(), sender.run(self.actors))

    async def _lend_actors(self) -> None:
        """Have our actors work for the first rank whenever we are a later one; return at once if none can."""
        if self.lent_actors is not None and self.actors is not None:
            await self.lent_actors.run(self.actors)

    async def _first_ended(self, *jobs: Coroutine[Any, Any, None]) -> None:
        """Do all of them until one has ended; raise what ended it."""
        tasks = [asyncio.create_task(job) for job in jobs]
        await first_ended(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()

    def _make_receiver(self, stale: Callable[[int], None]) -> ExperienceReceiver | None:
        if self.actors is None or not self._start.remote_actors:
            return None
        return ExperienceReceiver(
            task_hash=self.task_hash,
            pool=self.actors,
            spec=lambda: self.spec,
            strikes=self.swarm,
            named=self._named,
            events=self._events,
            stale=stale,
        )

    def _post_of(
        self, actors: Callable[[], Iterable[str]], trainers: Callable[[], dict[str, Address]]
    ) -> Callable[[], tuple[str, Address] | None]:
        """Return what tells for whom the actors of a node that only acts work."""
        return lambda: _learner_of(self._me, actors(), (self._replays and self._shards()) or trainers())

    def _make_lent_actors(self) -> LentActors | None:
        algorithm = self.task.algorithm
        if isinstance(algorithm, RegressionConfig) or not algorithm.remote_actors:
            return None
        if self._replays or not self._start.actors:
            return None
        return LentActors(
            self._make_sender(self._first_rank, self._count_sent),
            lend=lambda number: self.supervisor.tell(LendActors(number)),
            loan=lambda: self.supervisor.loan,
            serves=self._serves,
            first=self._first_rank,
            asked=lambda: None if self.receiver is None else self.receiver.keep(()),
        )

    def _serves(self) -> bool | None:
        """Whether our learner computes for another rank; None under a pipeline that is being formed."""
        if not self.supervisor.requests.learner_mode.stages:
            return False
        order = self.supervisor.stages.order
        return None if order is None else order.rank > 0

    def _first_rank(self) -> tuple[str, Address] | None:
        """Return the first rank of our pipeline, if it is whole and that is another node."""
        first = next(iter(self.mode.strategy.members), self._me)
        address = self._alive().get(first)
        return None if first == self._me or address is None else (first, address)

    def _count_sent(self, counts: Counts) -> None:
        self._made_for_rank0 += counts
        self._credit()

    def _make_sender(
        self,
        target: Callable[[], tuple[str, Address] | None],
        counts: Callable[[Counts], None] | None = None,
    ) -> ExperienceSender:
        return ExperienceSender(
            task=self.task,
            task_hash=self.task_hash,
            boot=self._boot,
            transport=self._transport,
            learner=target,
            counts=counts,
            actors=self._start.actors,
            remote=self._start.remote_actors,
            ahead=self._config.actors.ahead,
            named=self._named,
            clock=self._clock,
            events=self._events,
            max_bytes=self._config.limits.max_vector_bytes,
            divide=self.divide_environments,
        )

    def _make_replay_server(self, boot: int) -> ReplayServer:
        return ReplayServer(
            task_hash=self.task_hash, boot=boot, port=self.supervisor.draws, strikes=self.swarm
        )

    def _make_follower(self) -> PolicyFollower:
        return PolicyFollower(
            task_hash=self.task_hash,
            transport=self._transport,
            learner=lambda: _learner_of(self._me, self._shards(), self._alive()),
            copies=self._copies,
            named=self._named,
            clock=self._clock,
            events=self._events,
            max_bytes=self._config.limits.max_vector_bytes,
        )

    def _make_sampler(self) -> ReplaySampler:
        return ReplaySampler(
            task=self.task,
            task_hash=self.task_hash,
            transport=self._transport,
            shards=self._shards,
            learners=lambda: 1 + len(self._alive()),
            strikes=self.swarm,
            named=self._named,
            clock=self._clock,
            events=self._events,
            rng=np.random.default_rng(self._seed),
        )

    def _copies(self) -> PolicyCopies:
        if self.actors is None:
            raise WorkerError("nobody acts for this node")
        return self.actors.policy

    async def give_rows(self, incoming: Incoming) -> Reply:
        """Serve a call of a learner that draws from this node's shard of the replay memory.

        Raises:
            Refusal: there is none (503); and as `ReplayServer.answer`.
        """
        if self.replay_server is None:
            raise Refusal(503, "no shard of a replay memory is here")
        return await self.replay_server.answer(incoming)

    async def take_unroll(self, incoming: Incoming) -> Reply:
        """Serve a call of a node that acts.

        Raises:
            Refusal: nobody learns here, or from own unrolls only, or it is no rank of ours (503); and as
                `ExperienceReceiver.answer`.
        """
        if self.sampler is not None and self.learns:
            return await self.sampler.answer(incoming)
        if self.receiver is None or not (self.learns or self.holds_replay):
            raise Refusal(
                503,
                "nobody learns here"
                if not self.learns
                else "this learner takes no unrolls of others; `p2pdrl roles set learner,actor` there has it "
                "do so, and node.actors.count take those of its pipeline's ranks",
            )
        if self.lent_actors is not None and self.lent_actors.away:
            raise Refusal(503, "this node is a later rank of a pipeline, whose first rank takes unrolls")
        if lanes_for_ranks(self._config) and incoming.sender not in self._ranks:
            raise Refusal(
                503,
                "this learner takes unrolls of its pipeline's other ranks only; `p2pdrl roles set "
                "learner,actor` there has it take all",
            )
        return await self.receiver.answer(incoming)

    @property
    def _ranks(self) -> Collection[str]:
        """Node ids of our pipeline's ranks, where we are the first; else nobody."""
        members = self.mode.strategy.members
        return members if members and members[0] == self._me else ()

    def sweep_actors(self, alive: Collection[str]) -> None:
        """Free the lanes of actors whose nodes are gone, or send to another learner by now."""
        if self.receiver is None:
            return
        self.receiver.sweep(alive)
        if lanes_for_ranks(self._config) and self._serves() is not None:
            self.receiver.keep(self._ranks)

    async def _until_alone(self) -> None:
        """Wait until nobody learns, and it is this node's turn to begin."""
        since_s = None
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._learner_left() or self._paused or not self._config.may_learn:
                since_s = None
                continue
            now_s = self._clock.monotonic()
            since_s = now_s if since_s is None else since_s
            if now_s - since_s >= ALONE_S and self._me < min(self._heirs(), default="g"):
                return

    async def _learn(self) -> None:
        """Begin to learn from the state on the board; what our actors make is for that from now on."""
        draws = self._replays and bool(self._shards())
        self.learns = True
        if draws:  # its actors' unrolls go on to the shards, as everybody's
            self.sampler = self._make_sampler()
        else:
            self.sender = None
        self._learning()
        self._events.emit(
            "promoted",
            f"nobody is left who learns: this node does, from its copy of version {self.policy_version}",
            level="warning",
            policy_version=self.policy_version,
        )
        self.share_moments()
        self.supervisor.wake(_drawing(self._start) if draws else None, self.sampler)
        await self.mode.use(self.mode.config, self.mode.epoch)

    async def _change(self, learner_mode: LearnerMode, epoch: int) -> None:
        if self.learns:
            await self.learners.change(learner_mode, epoch)

    def _strategy(self, config: StrategyConfig, context: StrategyContext) -> Strategy:
        """Return the strategy in force, in which who only acts has no part."""
        return build(config, context) if self.learns else LocalStrategy()

    async def _keep_state(self) -> None:
        while True:
            await asyncio.sleep(self._config.actors.state_every_s)
            found = await self.adoptions.newest(self.lineage)
            if found is not None:
                clean = without_moments(found, self.spec)
                await asyncio.to_thread(
                    self.board.post_set, clean.vector, clean.sidecar, clean.head.policy_version
                )

    def pause(self, *, paused: bool) -> None:
        """Hold the learner, or let it go on; averaging continues meanwhile."""
        self._paused = paused
        self.learners.tell(self._pace())

    def progress(self, fraction: float, env_steps: int) -> None:
        """Tell the learners how many steps the swarm made, and which ``fraction`` (0 to 1) of all that is."""
        self._progress = fraction
        self.learners.tell(Progress(fraction, env_steps))

    def close(self) -> None:
        """Free the memory that is shared with children. Nobody may use it afterwards."""
        self.supervisor.close()
        if self.actors is not None:
            self.actors.close()

    def divide_data(self) -> None:
        """Tell the learners which part of divided data, or of each update's, is theirs, if that is new.

        By our rank among the members of the strategy's group view, on which all agree, so that the gradients
        of a round are over the whole data set; without a view among the living learners, looked for now and
        then. It is asked before each answer to the learner, so only the gradients that were under way when a
        view changed may have missed a shard or had one twice.
        """
        self.divide_environments()
        power = rate_power(self.task, self.mode.config)
        if power is None:
            self._divided_by = None
            if self.learners.share_told is not None:
                self.learners.divide(DataShare(0, 1))
            return
        group = self.mode.strategy.group
        view = None if group is None else group.view
        speeds = self._living_learners()
        members = sorted(speeds if view is None else view.members)
        looked = self._last_look[0], power, members
        if self._me in members and looked != self._divided_by:
            self._divided_by = looked
            rank = members.index(self._me)
            relative = relative_speeds([speeds.get(member, 0.0) for member in members], power)
            share = DataShare(rank, len(members), power, relative[rank], sum(relative))
            if share != self.learners.share_told:
                self.learners.divide(share)

    def divide_environments(self) -> None:
        """Assign this node's actors their part of a batch's environments, looked at now and then.

        With n nodes that act for the same learner, or for learners that share out each update, each acts in
        1/n of them, once n has been that for `STEADY_S`: environments begin anew where their number changes.
        ε ladders are over all. A replay memory draws from the environments that have come, so actors keep
        all of theirs there.
        """
        now_s = self._clock.monotonic()
        if self.actors is None or now_s < self._last_divided_s + LOOK_EVERY_S:
            return
        self._last_divided_s = now_s
        whole = self.task.scaling == "none" or self._replays
        nodes = [self._me] if whole else self._acting_together()
        since_s, seen = self._seen_acting
        if nodes != seen:
            self._seen_acting = since_s, _ = (now_s if seen else float("-inf")), nodes
        if now_s >= since_s + STEADY_S:
            self.actors.divide(nodes.index(self._me), len(nodes))

    def _acting_together(self) -> list[str]:
        """Ids of the nodes whose unrolls go to the same batches as ours, ourselves included."""
        if self.supervisor.requests.learner_mode.stages:
            return sorted({self._me, *self.mode.strategy.members})
        divided = rate_power(self.task, self.mode.config) is not None
        return acting_together(
            self._me,
            self._others_acting(),
            self._other_actors(),
            [*self._alive(), *([self._me] if self.learns else [])],
            joint=divided,
        )

    def _living_learners(self) -> dict[str, float]:
        """Steps a second of the learners that are alive, by id, ourselves included, as of the last look."""
        now_s = self._clock.monotonic()
        looked_s, learners = self._last_look
        if now_s >= looked_s + LOOK_EVERY_S:
            speeds = self._speeds()
            learners = {node: speeds.get(node, 0.0) for node in self._alive()}
            learners[self._me] = self.supervisor.busy_steps_per_s
            self._last_look = now_s, learners
        return learners

    def share_moments(self) -> None:
        """Give the learner what everybody else's normalisers counted."""
        self.learners.share(pooled([self._progress_tracker.others_moments(), self._before.moments]))

    def done(self) -> Done:
        """Return what this node did so far in this boot."""
        counts = self._before.counts + self.totals
        return Done(counts, pooled([self._before.moments, self.learners.moments]))

    # --- figures ----------------------------------------------------------------------------

    @property
    def sender_at_work(self) -> ExperienceSender | None:
        """Who sends what this node's actors make to another, if it goes there at the moment."""
        lent = self.lent_actors
        return self.sender if lent is None or not lent.lent else lent.sender

    @property
    def totals(self) -> Counts:
        """What this node did in these roles: its learners, and its actors for another rank's."""
        return self.learners.totals + self._made_for_rank0

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
        return self._progress_tracker.steps(self.lineage)

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

    # --- states and modes -----------------------------------------------------------------------

    def state_request(self) -> StateRequest:
        """What we ask a peer for its state with."""
        return StateRequest(
            task_hash=self.task_hash,
            layout_hash=self.spec.layout.hash,
            sidecar_hash=self.spec.sidecar.hash,
        )

    def _own_state(self) -> OwnState | None:
        if self.summary() is None:
            return None
        return OwnState(self.board, self.spec, self.task_hash, self.lineage, self.lineage_steps)

    async def _take(self, donor: str, state: TransferredState, why: str) -> None:
        clean = without_moments(state, self.spec)
        await asyncio.to_thread(self.board.post_set, clean.vector, clean.sidecar, clean.head.policy_version)
        self.enter(state.head.lineage)
        self.tell_adopted(donor, state, why)

    def tell_adopted(self, donor: str, state: TransferredState, why: str) -> None:
        """Tell that a state was adopted, with the hash that shows it."""
        self._adopted += 1
        self._events.emit(
            "adopted",
            f"took over the state of {short(donor)} at version {state.head.policy_version}: {why}",
            peer=donor,
            policy_version=state.head.policy_version,
            params_hash=state.head.params_hash,
            lineage=state.head.lineage,
        )

    def enter(self, lineage: str) -> None:
        """What is trained from now on belongs to this lineage."""
        self.lineage = lineage
        self._progress_tracker.follow(lineage)
        self._entered(lineage)

    def context(self, epoch: int) -> StrategyContext:
        """What a strategy of that mode epoch is given."""
        config = self._config
        return StrategyContext(
            swarm=self.swarm,
            learner=LearnerPort(
                self.supervisor, self.task.algorithm, lambda: self._progress, self.divide_data
            ),
            transport=self._transport,
            clock=self._clock,
            rng=self._rng,
            epoch=epoch,
            size=self.spec.layout.size,
            max_abs=config.limits.max_abs_parameter,
            trusted_network=config.trusted_network,
            bounded=self._keyed and not config.trusted_network,
            direct=self._direct,
            max_exchanges=config.debug.max_exchanges,
            start_at_members=config.debug.start_at_members,
            group_process=GroupProcesses(config.learner) if config.trusted_network else None,
            stages=self.supervisor.stages,
            pipes=self._pipes,
            minibatches=minibatches_of(self.task.algorithm),
            batches=batches_of(self.task.algorithm),
            rows=minibatch_rows(self.task)[0],
        )

    # --- the learner's reports ------------------------------------------------------------------

    def _pace(self) -> LearnerPace:
        return LearnerPace(paused=self._paused, max_updates_per_s=self._config.learner.max_updates_per_s)

    def _credit(self) -> None:
        self._progress_tracker.credit(self._before.counts + self.totals)

    def _report(self, report: Report, new_updates: int) -> None:
        self._credit()
        self.divide_data()
        if report.moments:
            try:
                self._progress_tracker.put_moments(pooled([self._before.moments, self.learners.moments]))
            except WireError as error:
                self._events.emit("moments-failed", str(error), level="warning")
        if new_updates > 0:
            self.mode.strategy.updated(new_updates)
