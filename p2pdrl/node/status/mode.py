"""What a node says of the swarm's mode: what is in force, since when, and who follows it already.

Serves ``/v1/mode``, which ``p2pdrl mode show`` prints and ``p2pdrl mode set`` waits on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from p2pdrl.config.mode import protocol_of, told_options
from p2pdrl.config.strategy import StrategyConfig, mode_of
from p2pdrl.ids import short
from p2pdrl.node import settings
from p2pdrl.node.accounting.report_table import PeerReport
from p2pdrl.node.parts import NodeParts
from p2pdrl.node.settings import ModeSetting
from p2pdrl.node.status.pipeline import measured_facts
from p2pdrl.strategies.protocol import Strategy

__all__ = ["describe", "facts_of", "mode_document"]


def describe(strategy: StrategyConfig) -> dict[str, object]:
    """A strategy's name, and its options: those that say what it is, and those that aren't the defaults."""
    return {"name": protocol_of(strategy), "options": told_options(strategy)}


def facts_of(strategy: Strategy) -> dict[str, Any]:
    """What a strategy tells of its group: members, our role in it; empty where there is nothing to tell."""
    return dict(strategy.facts)


def mode_document(parts: NodeParts, reports: Sequence[tuple[str, PeerReport | None]]) -> dict[str, object]:
    """The document of ``/v1/mode``.

    Args:
        parts: the node.
        reports: the newest report of ourselves and of every living member, with its name.
    """
    training = parts.training
    record = parts.membership.records.get(settings.MODE)
    setting = None if record is None else settings.decode(record.value, ModeSetting)
    document: dict[str, object] = {
        "mode": None,
        "protocol": None,
        "options": {},
        "epoch": 0,
        "since": None,
        "error": parts.mode_error,
        "facts": {},
        "record": None,
    }
    if training is not None:
        strategy = training.mode.config
        document |= {"mode": mode_of(strategy), "protocol": protocol_of(strategy)}
        document |= {"options": told_options(strategy), "epoch": settings.epoch_of(training.mode.epoch)}
        facts = facts_of(training.mode.strategy) | measured_facts(training)
        document |= {"since": training.accounting.since_wall_s, "facts": facts}
    wanted = 0
    if record is not None:
        wanted = settings.stamp(record.epoch, record.proposer)
        document["record"] = {
            "epoch": record.epoch,
            "proposer": record.proposer,
            "proposer_name": _name(parts, record.proposer),
            "mode": None if setting is None else mode_of(setting.strategy),
            "protocol": None if setting is None else protocol_of(setting.strategy),
            "options": {} if setting is None else told_options(setting.strategy),
        }
    protocol = None if setting is None else protocol_of(setting.strategy)
    document["members"] = [_member(name, report, wanted, protocol) for name, report in reports]
    return document


def _member(name: str, report: PeerReport | None, wanted: int, protocol: str | None) -> dict[str, object]:
    """One member: where it stands, and whether it runs what the record says."""
    if report is None:
        return {"name": name, "state": "unheard", "epoch": None, "protocol": "", "role": "", "follows": False}
    return {
        "name": name,
        "state": report.state,
        "epoch": settings.epoch_of(report.mode_epoch),
        "protocol": report.strategy,
        "role": report.role,
        "follows": report.mode_epoch == wanted and report.strategy == protocol,
    }


def _name(parts: NodeParts, node: str) -> str:
    name = parts.name_of(node)
    return short(node) if name == node else name
