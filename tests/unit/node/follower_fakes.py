"""What a node's follower works on."""

from __future__ import annotations

from p2pdrl.config.task import StopConfig
from p2pdrl.node import settings
from p2pdrl.node.settings import StopSetting


class FakeFigures:
    """Reports of the living; None while one is unheard of."""

    reports: list | None = None
    newest: tuple[int, str] = (0, "")
    greater: tuple[str, str, str] | None = None

    def living_reports(self):
        return self.reports

    def newest_mode(self):
        return self.newest

    def greater_lineage(self):
        return self.greater


def at(epoch: int, proposer) -> int:
    return settings.stamp(epoch, proposer.identity.node_id)


def stop_setting(**conditions) -> StopSetting:
    return StopSetting(StopConfig(**conditions), 500.0)
