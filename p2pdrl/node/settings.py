"""The swarm's records as typed values: mode, stop condition, halt, pause.

Membership spreads them signed, last writer wins.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.config.task import StopConfig, TaskConfig
from p2pdrl.errors import WireError
from p2pdrl.transport import codec

__all__ = [
    "HALT",
    "MODE",
    "PAUSE",
    "STOP",
    "HaltSetting",
    "ModeSetting",
    "PauseSetting",
    "StopSetting",
    "decode",
    "epoch_of",
    "stamp",
]

MODE, STOP, HALT, PAUSE = "mode", "stop", "halt", "pause"
_PROPOSER_BITS = 16
_EPOCHS = 1 << 37

S = TypeVar("S", bound=msgspec.Struct)


def stamp(epoch: int, proposer: str) -> int:
    """One number for a mode record, below 2⁵³ and in the records' own order (ties of one in 65,536 apart).

    Two nodes may propose a mode at once, with the same epoch. Until all have heard of both, each follows the
    one that it knows; messages carry the stamp, so that what belongs to one is refused by the other.
    """
    return ((epoch % _EPOCHS) << _PROPOSER_BITS) | int(proposer[:4] or "0", 16)


def epoch_of(stamp: int) -> int:
    """The epoch that a stamp was made from."""
    return stamp >> _PROPOSER_BITS


class ModeSetting(msgspec.Struct, frozen=True):
    """How the swarm agrees."""

    mode: str
    """As people type it: ``gossip``, ``local``; for those who read records. The strategy is what counts."""
    strategy: StrategyConfig

    @classmethod
    def of(cls, strategy: StrategyConfig) -> ModeSetting:
        """The setting for a strategy's options."""
        return cls(strategy.mode, strategy)


class StopSetting(msgspec.Struct, frozen=True):
    """When the swarm is done."""

    stop: StopConfig
    founded_at: float
    """Wall time of the founding, seconds since the Unix epoch."""

    @classmethod
    def of(cls, task: TaskConfig, founded_at: float) -> StopSetting:
        """The setting for a task's stop conditions."""
        return cls(task.stop, founded_at)


class HaltSetting(msgspec.Struct, frozen=True):
    """The swarm is done."""

    kind: Literal["env_steps", "time_s", "mean_return"]
    reason: str
    stop_epoch: int
    stop_proposer: str
    """Epoch and proposer of the stop record that was met; another stop record makes the halt void."""


class PauseSetting(msgspec.Struct, frozen=True):
    """Whether all learners are held."""

    paused: bool


def decode(value: bytes, kind: type[S]) -> S | None:
    """Read a record's value; None when it can't be read."""
    try:
        found: S = codec.decode(value, kind)
    except WireError:
        return None
    return found
