"""Keeps this node in line with the swarm's records: mode, stop condition, halt, pause.

The founder writes the first mode and stop records. Every node follows what the records say, and
whichever first sees the stop condition met writes the halt record that ends training everywhere.
"""

from __future__ import annotations

import asyncio

from p2pdrl.node import settings, stop
from p2pdrl.node.figures import Figures
from p2pdrl.node.parts import Parts
from p2pdrl.node.settings import HaltSetting, ModeSetting, PauseSetting, StopSetting
from p2pdrl.node.training import Training

__all__ = ["Conduct"]


class Conduct:
    """Follows and writes the swarm's records.

    Args:
        parts: the node.
        figures: its figures.
    """

    def __init__(self, parts: Parts, figures: Figures) -> None:
        self._parts = parts
        self._figures = figures
        self._changed = asyncio.Event()
        self._stop: tuple[tuple[int, str], StopSetting] | None = None
        self._mode_at: tuple[int, str] = (0, "")
        self._pause_at: tuple[int, str] = (0, "")
        self.halted = asyncio.Event()
        self.founded_at: float | None = None
        """Wall time of the swarm's founding; None until the records tell."""

    def record_changed(self) -> None:
        """A swarm record was replaced: look at all of them soon."""
        self._changed.set()

    def found(self, training: Training, founded_at: float) -> None:
        """Write the first records; those that others wrote already stay."""
        membership = self._parts.membership
        records = membership.records
        wanted = ModeSetting.of(training.task.strategy)
        if records.get(settings.MODE) is None:
            membership.propose(settings.MODE, wanted)
        if records.get(settings.STOP) is None:
            membership.propose(settings.STOP, StopSetting.of(training.task, founded_at))

    def pause(self, *, paused: bool) -> None:
        """Hold or release all learners of the swarm."""
        self._parts.membership.propose(settings.PAUSE, PauseSetting(paused))

    async def run(self, training: Training) -> None:
        """Follow the records for ever."""
        while True:
            await self.follow(training)
            await self._changed.wait()
            self._changed.clear()

    async def follow(self, training: Training) -> None:
        """Bring this node in line with the records as they are now."""
        records = self._parts.membership.records
        stop_record = records.get(settings.STOP)
        if stop_record is not None:
            condition = settings.decode(stop_record.value, StopSetting)
            if condition is None:
                self._unreadable(settings.STOP)
            else:
                self._stop = ((stop_record.epoch, stop_record.proposer), condition)
                self.founded_at = condition.founded_at
                training.stop_config = condition.stop
                training.supervisor.set_window(condition.stop.window)
                if self._parts.saving is not None:
                    self._parts.saving.stop_setting = condition
        await self._follow_mode(training)
        self._follow_pause(training)
        self._follow_halt(training)

    def hold(self, training: Training, *, paused: bool) -> None:
        """Hold or release this node's learner; once the swarm is done it stays held."""
        if self.halted.is_set():
            return
        training.pause(paused=paused)
        if self._parts.state in ("training", "paused"):
            self._parts.state = "paused" if paused else "training"
        self._parts.events.emit("paused" if paused else "resumed", "paused" if paused else "training goes on")

    def look(self, training: Training) -> None:
        """Judge the stop condition from the newest reports, and pass figures on to the learner."""
        parts = self._parts
        training.share_moments()
        if self._stop is None or self.halted.is_set():
            return
        version, condition = self._stop
        steps = parts.ledger.total().env_steps
        if condition.stop.env_steps:
            training.progress(min(1.0, steps / condition.stop.env_steps))
        reports = self._figures.living_reports()
        age_s = max(0.0, parts.clock.wall() - condition.founded_at)
        reached = stop.judge(condition.stop, steps, age_s, reports or [])
        if reached is not None:
            halt = HaltSetting(reached.kind, reached.reason, *version)
            parts.membership.propose(settings.HALT, halt)

    async def _follow_mode(self, training: Training) -> None:
        record = self._parts.membership.records.get(settings.MODE)
        if record is None or (record.epoch, record.proposer) == self._mode_at:
            return
        mode = settings.decode(record.value, ModeSetting)
        self._mode_at = (record.epoch, record.proposer)
        if mode is None:
            self._unreadable(settings.MODE)
            return
        await training.use(mode.strategy, record.epoch)
        self._parts.events.emit("mode", f"mode is {mode.mode}", mode=mode.mode, epoch=record.epoch)

    def _follow_pause(self, training: Training) -> None:
        """Follow a new pause record; what a person did on this node alone since then stays."""
        record = self._parts.membership.records.get(settings.PAUSE)
        if record is None or self.halted.is_set() or (record.epoch, record.proposer) == self._pause_at:
            return
        self._pause_at = (record.epoch, record.proposer)
        pause = settings.decode(record.value, PauseSetting)
        if pause is None:
            self._unreadable(settings.PAUSE)
        elif pause.paused != training.paused:
            self.hold(training, paused=pause.paused)

    def _follow_halt(self, training: Training) -> None:
        record = self._parts.membership.records.get(settings.HALT)
        if record is None or self._stop is None or self.halted.is_set():
            return
        halt = settings.decode(record.value, HaltSetting)
        if halt is None or (halt.stop_epoch, halt.stop_proposer) != self._stop[0]:
            return
        self._parts.halted = halt.reason
        self._parts.state = "stopping"
        training.pause(paused=True)
        self._parts.events.emit("halted", f"the swarm is done: {halt.reason}", reason=halt.reason)
        self.halted.set()

    def _unreadable(self, key: str) -> None:
        self._parts.events.emit(
            "record-unreadable",
            f"the swarm's {key} record can't be read; it may come from a newer release of p2pdrl",
            level="warning",
        )
