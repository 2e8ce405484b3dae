"""From a strategy's options to the strategy.

The node builds through it. A new strategy is one module beside this one and one line here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

__all__ = ["STRATEGIES", "build"]


def _hogwild(config: HogwildConfig, context: StrategyContext) -> Strategy:
    return AdpsgdStrategy(config, context) if config.between_nodes else LocalStrategy()


def _grad_average(config: GradAverageConfig, context: StrategyContext) -> Strategy:
    return GroupRounds(config, context, AveragedGradients(config, context))


def _param_average(config: ParamAverageConfig, context: StrategyContext) -> Strategy:
    return GroupRounds(config, context, AveragedParameters(config, context))


def _federated(config: FederatedConfig, context: StrategyContext) -> Strategy:
    privacy = Privacy(config, context.epoch, context.swarm.node_id)
    return GroupRounds(config, context, AveragedParameters(config, context, privacy))


STRATEGIES: dict[type, Callable[[Any, StrategyContext], Strategy]] = {
    AdpsgdConfig: AdpsgdStrategy,
    DsgdConfig: DsgdStrategy,
    SgpConfig: SgpStrategy,
    GalaConfig: GalaStrategy,
    StromConfig: StromStrategy,
    ServerSyncConfig: ServerSyncStrategy,
    ServerAsyncConfig: ServerAsyncStrategy,
    GradAverageConfig: _grad_average,
    ParamAverageConfig: _param_average,
    FederatedConfig: _federated,
    PipelineConfig: PipelineStrategy,
    LocalConfig: lambda _config, _context: LocalStrategy(),
    HogwildConfig: _hogwild,
}
"""By the type of ``task.strategy``, exactly: options may inherit from another strategy's."""


def build(config: StrategyConfig, context: StrategyContext) -> Strategy:
    """Return the strategy that ``config`` names.

    Raises:
        ConfigError: this node can't run it.
    """
    return STRATEGIES[type(config)](config, context)
