"""The swarm's records as typed values: mode, stop condition, halt, pause.

Membership spreads them signed, last writer wins. Operators and bans are its own (`membership.operators`).
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.config.task import StopConfig, TaskConfig
from p2pdrl.errors import ConfigError, WireError
from p2pdrl.membership.operators import MAX_BANS, Ban, BansSetting, OperatorsSetting
from p2pdrl.transport import codec

__all__ = [
    "BANS",
    "HALT",
    "KINDS",
    "MODE",
    "OPERATORS",
    "PAUSE",
    "STOP",
    "HaltSetting",
    "ModeSetting",
    "PauseSetting",
    "StopSetting",
    "decode",
    "epoch_of",
    "stamp",
    "with_ban",
    "without_ban",
]

MODE, STOP, HALT, PAUSE = "mode", "stop", "halt", "pause"
OPERATORS, BANS = "operators", "bans"
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

    kind: Literal["env_steps", "time_s", "mean_return", "command"]
    """The condition that was met, or that somebody has ended the training before."""
    reason: str
    stop_epoch: int
    stop_proposer: str
    """Epoch and proposer of the stop record that was met or in force; another one makes the halt void."""


class PauseSetting(msgspec.Struct, frozen=True):
    """Whether all learners are held."""

    paused: bool


KINDS: dict[str, type[msgspec.Struct]] = {
    MODE: ModeSetting,
    STOP: StopSetting,
    HALT: HaltSetting,
    PAUSE: PauseSetting,
    OPERATORS: OperatorsSetting,
    BANS: BansSetting,
}
"""What each record holds."""


def with_ban(setting: BansSetting | None, ban: Ban) -> BansSetting:
    """The setting with one more node that is refused.

    Raises:
        ConfigError: there is no room for it.
    """
    others = () if setting is None else tuple(other for other in setting.bans if other.id != ban.id)
    if len(others) >= MAX_BANS:
        raise ConfigError(f"{MAX_BANS} nodes are banned, and no more can be: unban one, or rotate the key")
    return BansSetting((*others, ban))


def without_ban(setting: BansSetting | None, node: str) -> BansSetting:
    """The setting without a node, which is taken again."""
    return BansSetting(() if setting is None else tuple(ban for ban in setting.bans if ban.id != node))


def decode(value: bytes, kind: type[S]) -> S | None:
    """Read a record's value; None when it can't be read."""
    try:
        found: S = codec.decode(value, kind)
    except WireError:
        return None
    return found
