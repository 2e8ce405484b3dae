"""How much sooner a swarm has solved its task than its fastest machine alone, by strategy.

The simulation says how many updates learners make; what they are worth follows from what an update is made
of (`description.Update`). Of learners that average, each makes a part of every update (`task.scaling`): n of
them go through the data of one, n times as fast. Where there are more learners than parts, or each applies
its updates in full, the data of an update grow, and a larger batch is worth less: with B rows, and B_c the
critical ones, a task takes E ∝ 1 + B / B_c rows in all (McCandlish 2018, arXiv 1812.06162, equation 2.11).
"""

from __future__ import annotations

import msgspec

from p2pdrl.config.strategy import LocalConfig, StrategyConfig
from p2pdrl.planner.description import SwarmDescription
from p2pdrl.planner.forecast import Forecast
from p2pdrl.planner.simulate import predict

__all__ = ["MOST_UPDATES", "Speedup", "divided", "label_of", "parts_of", "speedup", "time_to_solve"]

MOST_UPDATES = 300_000
"""Simulated at most, all learners together, unless that were fewer than `LEAST_UPDATES` of each."""
LEAST_UPDATES = 12
KILLS = 3
"""How many nodes are to end within the time that is simulated, where any do."""
AVERAGED = 0.8
"""What a step of averaged parameters is worth of one with the whole batch: docs/scaling.md."""
STALE = 0.5
"""What an update counts that began on parameters which nobody else's work had reached since the last."""


class Speedup(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy's time to the goal.

    Attributes:
        label: of the strategy, for people.
        speedup: seconds of the fastest machine alone, over the swarm's.
        parts: that an update is divided into.
        forecast: of the swarm with updates so divided.
    """

    label: str
    speedup: float
    parts: int
    forecast: Forecast


def parts_of(swarm: SwarmDescription, strategy: StrategyConfig) -> int:
    """Among how many learners an update is divided."""
    return 1 if strategy.averages == "nothing" else min(swarm.nodes, swarm.update.parts)


def divided(swarm: SwarmDescription, strategy: StrategyConfig) -> SwarmDescription:
    """Return the swarm with updates as long as a learner's part of them takes."""
    share = swarm.update.fixed + (1.0 - swarm.update.fixed) / parts_of(swarm, strategy)
    machines = tuple(
        msgspec.structs.replace(machine, update_s=machine.update_s * share) for machine in swarm.machines
    )
    return msgspec.structs.replace(swarm, machines=machines)


def time_to_solve(
    swarm: SwarmDescription, strategy: StrategyConfig, *, seconds: float | None = None, seed: int = 0
) -> Speedup:
    """Simulate one strategy, and say how much sooner it solves the task.

    Args:
        swarm: updates as one learner alone makes them.
        strategy: options of the strategy.
        seconds: of virtual time; None takes a minute, or as long as some nodes to be killed take, within what
            `MOST_UPDATES` allows.
        seed: of everything random.
    """
    parts = divided(swarm, strategy)
    forecast = predict(parts, strategy, seconds=seconds or _enough_s(parts), seed=seed)
    return Speedup(
        label=label_of(strategy),
        speedup=speedup(swarm, strategy, forecast),
        parts=parts_of(swarm, strategy),
        forecast=forecast,
    )


def speedup(swarm: SwarmDescription, strategy: StrategyConfig, forecast: Forecast) -> float:
    """How much sooner; 1 where nodes don't meet, since any one of them would do as well.

    Args:
        forecast: of the ``divided`` swarm.
    """
    if swarm.nodes < 2 or isinstance(strategy, LocalConfig) or not forecast.healthy_updates_s:
        return 1.0
    update, parts = swarm.update, parts_of(swarm, strategy)
    alone_s = min(swarm.machine(node).update_s * swarm.machine(node).factor for node in range(swarm.nodes))
    updates_s = forecast.updates_s * swarm.nodes / parts
    critical = update.critical_rows or update.rows / 2
    batch = update.rows * swarm.nodes / parts
    rows = (1.0 + batch / critical) / (1.0 + update.rows / critical)
    fresh = forecast.fresh_updates_s / forecast.healthy_updates_s
    excess = max(0.0, forecast.staleness / forecast.nodes - 1.0)
    worth = (fresh + STALE * (1.0 - fresh)) / (1.0 + 0.1 * excess)
    if strategy.averages != "gradients":
        worth *= AVERAGED
    return updates_s * alone_s / rows * worth


def label_of(strategy: StrategyConfig) -> str:
    """The strategy's name, and what carries it where that isn't the swarm's own transport."""
    name = str(type(strategy).__struct_config__.tag)
    return f"{name} (torch)" if getattr(strategy, "backend", "own") == "torch" else name


def _enough_s(swarm: SwarmDescription) -> float:
    """How long to simulate."""
    speeds = [1.0 / (one.update_s * one.factor) for one in map(swarm.machine, range(swarm.nodes))]
    kills = swarm.churn.kills_per_minute
    wanted_s = max(60.0, 60.0 * KILLS / kills if kills else 0.0)
    return max(min(wanted_s, MOST_UPDATES / sum(speeds)), LEAST_UPDATES * swarm.nodes / sum(speeds))
