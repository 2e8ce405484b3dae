"""The whole configuration: the swarm's half and this machine's half."""

from __future__ import annotations

import msgspec

from p2pdrl.config.node import NodeConfig
from p2pdrl.config.task import TaskConfig

__all__ = ["Config"]


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every source (flags, variables, files, defaults) is merged into."""

    task: TaskConfig = TaskConfig()
    node: NodeConfig = NodeConfig()
