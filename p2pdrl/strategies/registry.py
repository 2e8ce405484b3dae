"""From a strategy's options to the strategy.

The node builds through it. A new strategy is one module beside this one and one line here.
"""

from __future__ import annotations

from p2pdrl.config.strategy import (
    AdpsgdConfig,
    DsgdConfig,
    FederatedConfig,
    GalaConfig,
    GradAverageConfig,
    HogwildConfig,
    LocalConfig,
    ParamAverageConfig,
    PipelineConfig,
    ServerAsyncConfig,
    ServerSyncConfig,
    SgpConfig,
    StrategyConfig,
    StromConfig,
)
from p2pdrl.strategies.allreduce.federated import Privacy
from p2pdrl.strategies.allreduce.grad_average import AveragedGradients
from p2pdrl.strategies.allreduce.param_average import AveragedParameters
from p2pdrl.strategies.allreduce.rounds import GroupRounds
from p2pdrl.strategies.gossip.adpsgd import AdpsgdStrategy
from p2pdrl.strategies.gossip.gala import GalaStrategy
from p2pdrl.strategies.gossip.sgp import SgpStrategy
from p2pdrl.strategies.local import LocalStrategy
from p2pdrl.strategies.neighbours.dsgd import DsgdStrategy
from p2pdrl.strategies.pipeline.strategy import PipelineStrategy
from p2pdrl.strategies.protocol import Strategy, StrategyContext
from p2pdrl.strategies.relay.strom import StromStrategy
from p2pdrl.strategies.servers.server_async import ServerAsyncStrategy
from p2pdrl.strategies.servers.server_sync import ServerSyncStrategy

__all__ = ["build"]


def build(config: StrategyConfig, context: StrategyContext) -> Strategy:  # noqa: C901 - a line for each strategy
    """Return the strategy that ``config`` names.

    Raises:
        ConfigError: this node can't run it.
    """
    match config:
        case LocalConfig() | HogwildConfig(between_nodes=False):
            return LocalStrategy()
        case ServerSyncConfig():
            return ServerSyncStrategy(config, context)
        case ServerAsyncConfig():
            return ServerAsyncStrategy(config, context)
        case AdpsgdConfig():
            return AdpsgdStrategy(config, context)
        case DsgdConfig():
            return DsgdStrategy(config, context)
        case StromConfig():
            return StromStrategy(config, context)
        case SgpConfig():
            return SgpStrategy(config, context)
        case GalaConfig():
            return GalaStrategy(config, context)
        case GradAverageConfig():
            return GroupRounds(config, context, AveragedGradients(context))
        case ParamAverageConfig():
            return GroupRounds(config, context, AveragedParameters(config, context))
        case FederatedConfig():
            privacy = Privacy(config, context.epoch, context.swarm.node_id)
            return GroupRounds(config, context, AveragedParameters(config, context, privacy))
        case PipelineConfig():
            return PipelineStrategy(config, context)
