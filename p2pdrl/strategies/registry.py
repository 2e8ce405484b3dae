"""From a strategy's options to the strategy.

The node builds through it. A new strategy is one module beside this one and one line here.
"""

from __future__ import annotations

from p2pdrl.config.strategy import AdpsgdConfig, HogwildConfig, LocalConfig, StrategyConfig
from p2pdrl.errors import ConfigError
from p2pdrl.strategies.gossip import GossipStrategy
from p2pdrl.strategies.local import LocalStrategy
from p2pdrl.strategies.protocol import Context, Strategy

__all__ = ["build"]


def build(config: StrategyConfig, context: Context) -> Strategy:
    """Return the strategy that ``config`` names.

    Raises:
        ConfigError: this node can't run it.
    """
    match config:
        case LocalConfig() | HogwildConfig(between_nodes=False):
            return LocalStrategy()
        case AdpsgdConfig():
            return GossipStrategy(config, context)
        case _:
            raise ConfigError(f"this release has no strategy {type(config).__name__}")
