"""Follows and writes the swarm's records: mode, stop condition, halt, pause.

The founder writes the first mode and stop records. Every node follows what the records say, and
whichever first sees the stop condition met writes the halt record that ends training everywhere; in a swarm
with operators it ends whoever finds the condition met as well, and an operator's ends all. A change
of mode waits for the exchange in flight, so it has a task of its own and the other records never wait.

``p2pdrl mode set``: `cli.mode` → `api.client` → `api.routes` → `status.view` → `propose_mode` here →
`membership.service`, which signs and gossips the record → on each node `_follow_mode` →
`training.ActiveMode.use` → `LearnerPool.change` and `strategies.registry.build` → the new strategy.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from p2pdrl.config.checks import as_built, idle_keys, mode_problems
from p2pdrl.config.mode import mode_words, protocol_of, told_options
from p2pdrl.config.strategy import LocalConfig, StrategyConfig
from p2pdrl.config.task import StopConfig
from p2pdrl.errors import ConfigError, StorageError
from p2pdrl.membership.operators import Ban, BansSetting
from p2pdrl.membership.records import BadRecordError, SwarmRecord
from p2pdrl.node import settings, stop
from p2pdrl.node.background import set_within
from p2pdrl.node.context import NodeContext
from p2pdrl.node.settings import HaltSetting, ModeSetting, PauseSetting, StopSetting
from p2pdrl.node.state.swarm_memory import SavedMode
from p2pdrl.node.status.pipeline import serves
from p2pdrl.node.status.reporter import StatusReporter
from p2pdrl.node.training import Training

__all__ = ["RecordFollower"]

CATCH_UP_EVERY_S = 2.0
JUDGE_AGAIN_S = 1.0
HALT_COUNTS_S = 600.0
"""An operator's halt ends nodes for so long. Who starts later goes on, whoever shows it that halt again."""

S = TypeVar("S", bound=msgspec.Struct)


class RecordFollower:
    """Keeps this node in line with the swarm's records."""

    def __init__(self, context: NodeContext, reporter: StatusReporter) -> None:
        self._context = context
        self._reporter = reporter
        self._changed = asyncio.Event()
        self._mode_changed = asyncio.Event()
        self._caught_up_s = float("-inf")
        self._told_unreadable: dict[str, tuple[int, str]] = {}
        self._stop: tuple[tuple[int, str], StopSetting] | None = None
        self._born_s = 0.0
        """Monotonic time of the founding: the wall clock may jump once the records have told it."""
        self._met: tuple[int, str] | None = None
        """The stop record whose condition this node finds met, by what it knows itself."""
        self._mode_at: tuple[int, str] = (0, "")
        self._pause_at: tuple[int, str] = (0, "")
        self.halted = asyncio.Event()
        self.saved_mode: SavedMode | None = None
        """Where the mode is kept; None keeps it nowhere."""
        self.founded_at: float | None = None
        """Wall time of the swarm's founding; None until the records tell."""

    def record_changed(self) -> None:
        """Look at the records soon: one was replaced."""
        self._changed.set()
        self._mode_changed.set()

    def enter(self, lineage: str) -> None:
        """Follow the records of ``lineage``, which our state belongs to now, and no other's."""
        membership = self._context.membership
        if membership.records.lineage == lineage:
            return
        self._stop = self._met = None
        self._caught_up_s = float("-inf")
        membership.follow(lineage)
        self.record_changed()

    def renew(self) -> None:
        """Follow all records anew: another training of this node hasn't heard of them."""
        self._mode_at = (0, "")

    def found(self, training: Training, founded_at: float) -> None:
        """Write the first records; those that others wrote already stay."""
        membership = self._context.membership
        first = {
            settings.MODE: ModeSetting.of(training.task.strategy),
            settings.STOP: StopSetting.of(training.task, founded_at),
        }
        for key, value in first.items():
            if membership.records.get(key) is not None:
                continue
            try:
                membership.propose(key, value)
            except BadRecordError as error:  # a lineage that somebody else founded
                text = f"this node can't write the swarm's {key}: {error}; an operator can"
                self._context.events.emit("settings-missing", text, level="warning")

    def pause(self, *, paused: bool) -> None:
        """Hold or release all learners of the swarm."""
        self._context.membership.propose(settings.PAUSE, PauseSetting(paused))

    def set_stop(self, stop: StopConfig) -> SwarmRecord:
        """Give the swarm another stop condition; return the record that says so."""
        founded_at = self._context.clock.wall() if self.founded_at is None else self.founded_at
        return self._context.membership.propose(settings.STOP, StopSetting(stop, founded_at))

    def end_all(self, reason: str) -> SwarmRecord:
        """End the training everywhere; return the record that says so.

        Raises:
            ConfigError: there is no stop condition yet that a halt could name.
        """
        if self._stop is None:
            raise ConfigError("this node doesn't know the swarm's stop condition yet; wait until it trains")
        return self._context.membership.propose(settings.HALT, HaltSetting("command", reason, *self._stop[0]))

    def ban(self, node: str, *, reason: str, banned: bool) -> SwarmRecord:
        """Have every member refuse a node, or take it again; return the record that says so.

        Raises:
            ConfigError: too many are banned.
        """
        context = self._context
        held = self._read(settings.BANS, BansSetting)
        before = None if held is None else held[1]
        by = context.author(context.node_id)[:100]
        named = context.name_of(node)
        ban = Ban(node, "" if named == node else named[:64], reason[:100], by)
        value = settings.with_ban(before, ban) if banned else settings.without_ban(before, node)
        try:
            return context.membership.propose(settings.BANS, value)
        except ValueError as error:  # BadRecordError is one
            if isinstance(error, BadRecordError):
                raise
            raise ConfigError(f"no more fits beside the nodes that are banned: {error}") from error

    def propose_mode(self, strategy: StrategyConfig) -> SwarmRecord:
        """Make ``strategy`` the whole swarm's; return the record that says so.

        Raises:
            ConfigError: it can't work, here at least.
        """
        self.check_mode(strategy)
        try:
            return self._context.membership.propose(settings.MODE, ModeSetting.of(strategy))
        except ValueError as error:
            raise ConfigError(f"the options are too many to be told to the swarm: {error}") from error

    def check_mode(self, strategy: StrategyConfig) -> None:
        """See whether the swarm could take this mode.

        Raises:
            ConfigError: it can't work, here at least.
        """
        self.check_open("its mode counts")
        why = self._impossible(strategy, exact=True)
        if why is not None:
            raise ConfigError(why)

    def check_open(self, what: str) -> None:
        """See whether the swarm is not done yet.

        Args:
            what: "its … counts", for people.

        Raises:
            ConfigError: it is.
        """
        if self.halted.is_set():
            raise ConfigError(f"the swarm is done; {what} for nothing any more")

    async def until_done(self) -> str:
        """Wait until the records say that the swarm is done, without training by them; return why."""
        while True:
            self._changed.clear()
            condition, halt = self._read(settings.STOP, StopSetting), self._read(settings.HALT, HaltSetting)
            if condition is None or halt is None or not _ends(halt[1], condition[0]):
                await self._changed.wait()
            elif self._counts(halt[0], condition):
                return self._why(*halt)
            else:
                await set_within(self._changed, JUDGE_AGAIN_S)

    async def run(self, training: Training) -> None:
        """Follow the records for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_modes(training), name="modes")
            while True:
                self._follow_settings(training)
                await self._changed.wait()
                self._changed.clear()

    async def follow(self, training: Training) -> None:
        """Bring this node in line with the records as they are now."""
        self._follow_settings(training)
        await self._follow_mode(training)

    def _follow_settings(self, training: Training) -> None:
        """Follow all records but the mode: none of them has to wait for an exchange."""
        if (found := self._read(settings.STOP, StopSetting)) is not None:
            record, condition = found
            version = (record.epoch, record.proposer)
            if self._stop is None or self._stop[0] != version:
                clock = self._context.clock
                age_s = max(0.0, clock.wall() - condition.founded_at)
                self._born_s = clock.monotonic() - age_s
            self._stop = (version, condition)
            self.founded_at = condition.founded_at
            training.stop_config = condition.stop
            training.supervisor.set_window(condition.stop.window)
            if self._context.checkpointer is not None:
                self._context.checkpointer.stop_setting = condition
        self._follow_pause(training)
        self._follow_halt(training)

    async def _run_modes(self, training: Training) -> None:
        while True:
            self._mode_changed.clear()
            await self._follow_mode(training)
            await self._mode_changed.wait()

    def hold(self, training: Training, *, paused: bool, by: str = "") -> None:
        """Hold or release this node's learner; once the swarm is done it stays held.

        Args:
            by: who asks for it, in words.
        """
        if self.halted.is_set():
            return
        training.pause(paused=paused)
        if self._context.state in ("training", "paused"):
            self._context.state = "paused" if paused else "training"
        text = "paused" if paused else "training goes on"
        self._context.events.emit("paused" if paused else "resumed", f"{text}, by {by}" if by else text)

    def on_gossip_round(self, training: Training) -> None:
        """Act on the newest reports: catch up, adopt a greater lineage, judge the stop condition.

        By the records as they are now: while a node waits for a learner nothing else follows them.
        """
        context = self._context
        self._follow_settings(training)
        training.share_moments()
        if serves(training):
            training.supervisor.returns.clear()  # should it train again: these are of an older policy
        self._catch_up()
        self._adopt_greater(training)
        if self._stop is None or self.halted.is_set():
            return
        version, condition = self._stop
        steps = context.progress_tracker.total().env_steps
        last = condition.stop.env_steps
        training.progress(min(1.0, steps / last) if last else 0.0, steps)
        reports = self._reporter.living_reports()
        age_s = context.clock.monotonic() - self._born_s
        evaluations = context.evaluations if training.task.evaluated else None
        reached = stop.judge(condition.stop, steps, age_s, reports or [], evaluations)
        self._met = None if reached is None else version
        self._follow_halt(training)  # somebody may have found so before us
        # who has no say leaves it to those who have
        if reached is not None and context.steers and not self.halted.is_set():
            self._halt(training, HaltSetting(reached.kind, reached.reason, *version))

    async def _follow_mode(self, training: Training) -> None:
        found = self._read(settings.MODE, ModeSetting)
        if found is None or (found[0].epoch, found[0].proposer) == self._mode_at:
            return
        record, mode = found
        self._mode_at = (record.epoch, record.proposer)
        await self._use(training, mode.strategy, record)
        await self._save_mode(record, mode.strategy)

    async def _use(self, training: Training, strategy: StrategyConfig, record: SwarmRecord) -> None:
        """Train by a strategy; alone if it can't work here."""
        stamp = settings.stamp(record.epoch, record.proposer)
        why = self._impossible(strategy)
        if why is None:
            try:
                await training.mode.use(strategy, stamp)
            except ConfigError as error:
                why = str(error)
        name = f"{strategy.mode} ({protocol_of(strategy)})"
        self._context.mode_error = None if why is None else f"this node can't run mode {name}: {why}"
        if why is not None:
            await training.mode.use(LocalConfig(), stamp)
            text = f"{self._context.mode_error}; it trains alone until the mode changes"
            self._context.events.emit("mode-failed", text, level="warning", epoch=record.epoch)
            return
        self._context.events.emit(
            "mode",
            f"mode is {mode_words(strategy)} by {self._context.author(record.proposer)}",
            mode=strategy.mode,
            protocol=protocol_of(strategy),
            options=told_options(strategy),
            epoch=record.epoch,
            proposer=record.proposer,
        )
        self._tell_idle_keys(strategy)

    async def _save_mode(self, record: SwarmRecord, strategy: StrategyConfig) -> None:
        """Save the mode for the next start; a disk that doesn't take it is told of, no more."""
        try:
            if self.saved_mode is not None:
                await asyncio.to_thread(self.saved_mode.write, record, strategy)
        except StorageError as error:
            text = f"{error}; should all nodes stop, this one won't know the mode"
            self._context.events.emit("mode-unsaved", text, level="warning")

    def _catch_up(self) -> None:
        """Ask a member whose mode is newer than our record: gossip tells a change only so many times."""
        newest, peer = self._reporter.newest_mode()
        record = self._context.membership.records.get(settings.MODE)
        held = 0 if record is None else settings.stamp(record.epoch, record.proposer)
        now_s = self._context.clock.monotonic()
        if newest > held and now_s >= self._caught_up_s + CATCH_UP_EVERY_S:
            self._caught_up_s = now_s
            self._context.membership.catch_up(peer)

    def _adopt_greater(self, training: Training) -> None:
        """Adopt the state of a greater lineage that a living member reports.

        Nodes of two lineages follow different records, so their strategies may never meet.
        """
        found = self._reporter.greater_lineage()
        if found is not None and training.ready and not training.adoptions.under_way:
            donor, lineage, why = found
            training.adoptions.begin(donor, lineage, why)

    def _impossible(self, strategy: StrategyConfig, *, exact: bool = False) -> str | None:
        """Why a strategy can't run here, as far as options and task tell: a peer may propose anything.

        With ``exact``, blocks are counted in the network that our learner has built: a person who proposes
        the mode is told what only this finds; a swarm that is in such a mode makes the best of it.
        """
        context = self._context
        task = context.config.task if context.training is None else context.training.task
        if exact and context.training is not None:
            task = as_built(task, (entry.name for entry in context.training.spec.layout.entries))
        asked = msgspec.structs.replace(task, strategy=strategy)
        problem = next(mode_problems(asked, context.config.node), None)
        return None if problem is None else f"{problem.key}: {problem.message}"

    def _tell_idle_keys(self, strategy: StrategyConfig) -> None:
        """Tell what this node's own configuration asks for in vain; no reason to leave the mode."""
        for problem in idle_keys(strategy, self._context.config.node.learner):
            self._context.events.emit("keys-idle", f"{problem.key} {problem.message}", level="warning")

    def _follow_pause(self, training: Training) -> None:
        """Follow a new pause record; what a person did on this node alone since then stays."""
        found = self._read(settings.PAUSE, PauseSetting)
        if found is None or self.halted.is_set() or (found[0].epoch, found[0].proposer) == self._pause_at:
            return
        record, pause = found
        self._pause_at = (record.epoch, record.proposer)
        if pause.paused != training.paused:
            self.hold(training, paused=pause.paused, by=self._context.author(record.proposer))

    def _halt(self, training: Training, halt: HaltSetting) -> None:
        """Write that the stop condition is met. This node ends even where the record can't be written."""
        membership = self._context.membership
        try:
            written = membership.propose(settings.HALT, halt)
        except BadRecordError:
            written = None
        if written is None or membership.records.get(settings.HALT) != written:
            training.pause(paused=True)
            self.halt(halt.reason)  # an operator's halt of an earlier stop condition stands there

    def _counts(self, record: SwarmRecord, condition: tuple[SwarmRecord, StopSetting]) -> bool:
        """Whether a halt ends this node: in a swarm with operators a member's word alone doesn't."""
        records = self._context.membership.records
        if not records.roots:
            return True
        operator = records.operator(record.proposer)
        if operator is None:
            version = (condition[0].epoch, condition[0].proposer)
            return self._met == version or (self._stop is None and self._met_early(condition[1]))
        age_s = self._context.clock.wall() - record.at_ms / 1000
        if abs(age_s) <= HALT_COUNTS_S:
            return True
        which = (record.epoch, record.proposer)
        if self._told_unreadable.get(settings.HALT) != which:
            self._told_unreadable[settings.HALT] = which
            side = "old" if age_s > 0 else "ahead of this node's clock"
            text = f"passes over a halt by {operator.words}, which is {abs(age_s):.0f} s {side}"
            self._context.events.emit("halt-passed-over", text, level="warning")
        return False

    def _met_early(self, condition: StopSetting) -> bool:
        """Whether the stop condition is met, before this node trains: by steps and time, as it was told."""
        context = self._context
        steps = context.progress_tracker.steps(context.membership.records.lineage)
        age_s = max(0.0, context.clock.wall() - condition.founded_at)
        return stop.judge(condition.stop, steps, age_s, ()) is not None

    def _follow_halt(self, training: Training) -> None:
        condition, halt = self._read(settings.STOP, StopSetting), self._read(settings.HALT, HaltSetting)
        if condition is None or halt is None or self.halted.is_set() or not _ends(halt[1], condition[0]):
            return
        if self._counts(halt[0], condition):
            training.pause(paused=True)
            self.halt(self._why(*halt))

    def _why(self, record: SwarmRecord, halt: HaltSetting) -> str:
        """Why the swarm is done, and for a command by whom."""
        command = f"halted by {self._context.author(record.proposer)}" if halt.kind == "command" else ""
        return ": ".join(filter(None, (command, halt.reason)))

    def halt(self, reason: str) -> None:
        """End: the swarm is done."""
        self._context.halted = reason
        self._context.state = "stopping"
        self._context.events.emit("halted", f"the swarm is done: {reason}", reason=reason)
        self.halted.set()

    def _read(self, key: str, kind: type[S]) -> tuple[SwarmRecord, S] | None:
        """The record under ``key`` and its value; None without one, or one that can't be read: told once."""
        record = self._context.membership.records.get(key)
        if record is None:
            return None
        value = settings.decode(record.value, kind)
        if value is not None:
            return record, value
        which = (record.epoch, record.proposer)
        if self._told_unreadable.get(key) != which:
            self._told_unreadable[key] = which
            text = f"the swarm's {key} record can't be read; it may come from a newer release of p2pdrl"
            self._context.events.emit("record-unreadable", text, level="warning")
        return None


def _ends(halt: HaltSetting, condition: SwarmRecord) -> bool:
    """Whether a halt is for this stop condition, and not for one before."""
    return (halt.stop_epoch, halt.stop_proposer) == (condition.epoch, condition.proposer)
