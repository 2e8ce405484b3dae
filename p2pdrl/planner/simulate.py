"""Predict a strategy's run: build the world, let it run, read the statistics."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from p2pdrl.config.mode import protocol_of
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
from p2pdrl.errors import UsageError
from p2pdrl.planner.description import SwarmDescription
from p2pdrl.planner.forecast import Forecast, forecast_of
from p2pdrl.planner.gossip import AdpsgdModel, GalaModel, SgpModel
from p2pdrl.planner.neighbours import NeighboursModel
from p2pdrl.planner.rounds import RoundsModel
from p2pdrl.planner.servers import ServersAsyncModel, ServersSyncModel
from p2pdrl.planner.strom import StromModel
from p2pdrl.planner.world import ChurnEvents, Model, World, moments

__all__ = ["predict"]


class AloneModel(Model):
    """Nobody meets anybody."""

    def updated(self, node: int) -> None:
        """Nothing follows."""


MODELS: dict[type, Callable[[Any, World], Model]] = {
    AdpsgdConfig: AdpsgdModel,
    DsgdConfig: NeighboursModel,
    SgpConfig: SgpModel,
    GalaConfig: GalaModel,
    StromConfig: StromModel,
    ServerSyncConfig: ServersSyncModel,
    ServerAsyncConfig: ServersAsyncModel,
    GradAverageConfig: RoundsModel,
    ParamAverageConfig: RoundsModel,
    FederatedConfig: RoundsModel,
    LocalConfig: lambda _config, world: AloneModel(world),
    HogwildConfig: lambda config, world: (
        AdpsgdModel(config, world) if config.between_nodes else AloneModel(world)
    ),
}
"""By the type of a strategy's options."""


def model_of(strategy: StrategyConfig, world: World) -> Model:
    """Return the model of a strategy.

    Raises:
        UsageError: it has none.
    """
    make = MODELS.get(type(strategy))
    if make is None:
        raise UsageError(
            f"{protocol_of(strategy)} has no model to predict it by; scripts/plan_swarm.py --real runs the "
            "strategy itself on a virtual network"
        )
    return make(strategy, world)


def predict(
    swarm: SwarmDescription, strategy: StrategyConfig, *, seconds: float = 60.0, seed: int = 0
) -> Forecast:
    """Simulate one strategy; the same arguments give the same figures.

    Args:
        swarm: what it is made of.
        strategy: options of the strategy.
        seconds: of virtual time.
        seed: of everything random.

    Raises:
        ValueError: ``seconds`` isn't above zero.
        UsageError: the strategy is a pipeline. Its ranks hold one model between them, so there is nothing to
            agree on; how fast they are depends on what the network's blocks cost and send, which a swarm's
            description doesn't say.

    Example:
        >>> from p2pdrl.config.strategy import LocalConfig
        >>> round(predict(SwarmDescription(nodes=2), LocalConfig(), seconds=10).updates_s)
        10
    """
    if not 0 < seconds < float("inf"):
        raise ValueError("seconds must be above zero")
    if isinstance(strategy, PipelineConfig):
        raise UsageError(
            "a pipeline can't be predicted from a swarm's description: its speed depends on what the blocks "
            "of the network cost and send; see `p2pdrl pipeline plan`, which takes that and predicts a step"
        )
    rng, churn = random.Random(seed), swarm.churn
    kills_s = moments(churn.kills_per_minute, seconds, rng)
    joins_s = moments(churn.joins_per_minute, seconds, rng)
    world = World(swarm, strategy, swarm.nodes + len(joins_s), seed)
    model = model_of(strategy, world)
    world.learners.updated, world.learners.requested = model.updated, model.requested
    comings = ChurnEvents(world, model, churn, kills_s, joins_s)
    model.begin()
    for node in list(world.view):
        world.learners.start(node)
    world.events.run(seconds)
    world.learners.settle(seconds)
    world.statistics.settle()
    comings.close()
    return forecast_of(swarm, strategy, world.statistics, world.replicas, seconds, kills=comings.kills)
