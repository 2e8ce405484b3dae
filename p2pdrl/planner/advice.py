"""Which strategy to take on a swarm, and why, from the forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from p2pdrl.planner.description import SwarmDescription
from p2pdrl.planner.forecast import Forecast

__all__ = ["TRUSTS", "Trust", "advise", "progress"]

Trust = Literal["own", "lan", "strangers"]
TRUSTS: tuple[Trust, ...] = ("own", "lan", "strangers")
"""Whose machines they are: one's own; of people who know each other; of anybody with the key."""

PREFERRED = (
    "grad_average",
    "server_sync",
    "param_average",
    "dsgd",
    "adpsgd",
    "sgp",
    "gala",
    "server_async",
    "strom",
    "federated",
)
"""Of strategies that do about as well, the one whose result is easiest to foresee comes first."""
NEAR = 0.9
STALE_WORTH = 0.5
"""What an update counts that began on parameters which nobody else's work had reached since the last."""
FULL = 0.7
"""Share of the upload beyond which a strategy has no room left."""
OPEN_TO_ANYBODY = ("adpsgd", "dsgd", "gala", "grad_average", "param_average")
"""What can bound the harm of a bad vector by ``mixing``, without one node that all depend on."""


def progress(forecast: Forecast) -> float:
    """Updates per second of a healthy node, those that use others' work in full, the rest by half.

    A share of rounds that is lost, and staleness beyond all others' latest updates, take from it.
    """
    stale = max(0.0, forecast.healthy_updates_s - forecast.fresh_updates_s)
    worth = forecast.fresh_updates_s + STALE_WORTH * stale
    excess = max(0.0, forecast.staleness / forecast.nodes - 1.0)
    return worth * (1.0 - min(forecast.lost, 1.0)) / (1.0 + 0.1 * excess)


def advise(swarm: SwarmDescription, forecasts: Sequence[Forecast], trust: Trust = "lan") -> list[str]:
    """Recommend in sentences, the recommendation first.

    Args:
        swarm: what was simulated.
        forecasts: one of each strategy.
        trust: whose machines they are.
    """
    if swarm.nodes < 2:
        return ["Take local: there is one node, and nobody to agree with."]
    fit, words = [], []
    for one in forecasts:
        why = _unfit(swarm, one, trust)
        if why:
            words.append(f"{one.strategy} is out: {why}.")
        elif one.strategy in PREFERRED:
            fit.append(one)
    if not fit:
        return ["Take local, or change the swarm: no strategy fits.", *words]
    best = max(progress(one) for one in fit)
    near = [one for one in fit if progress(one) >= NEAR * best]
    chosen = min(near, key=lambda one: PREFERRED.index(one.strategy))
    return [f"Take {chosen.strategy}: {'; '.join(_reasons(chosen, fit, near, swarm))}.", *words]


def _reasons(
    chosen: Forecast, fit: Sequence[Forecast], near: Sequence[Forecast], swarm: SwarmDescription
) -> list[str]:
    slow = " (the stragglers left aside)" if swarm.stragglers else ""
    fresh = _percent(chosen.fresh_updates_s, chosen)
    reasons = [
        f"each node makes {chosen.healthy_updates_s:.3g} updates/s{slow}, {fresh} with others' newest work",
        f"it waits {chosen.waiting:.0%} of its time",
    ]
    reasons.append(
        f"it sends {chosen.wire_out_s / 1e6:.3g} MB/s, {_upload(swarm, chosen):.1%} of the slowest upload"
    )
    if chosen.strategy == "strom":
        reasons.append(
            f"that is so while a message names about {swarm.moved:.0%} of the parameters: measure it"
        )
    elif chosen.consensus_s is not None:
        reasons.append(f"nodes that differ agree to 1 % in {chosen.consensus_s:.3g} s")
    others = [one.strategy for one in near if one is not chosen]
    if others:
        reasons.append(f"{', '.join(others)} would do about as well, with more to watch")
    worse = [one for one in fit if one not in near]
    if worse:
        worst = min(worse, key=progress)
        why = f"it waits {worst.waiting:.0%} of its time" if worst.waiting > 0.2 else "it loses or ages more"
        reasons.append(f"{worst.strategy} would do {progress(worst) / progress(chosen):.0%} of it: {why}")
    return reasons


def _unfit(swarm: SwarmDescription, one: Forecast, trust: Trust) -> str:
    """Why a strategy doesn't fit; empty when it does."""
    if one.strategy in ("local", "hogwild"):
        return ""
    if trust == "strangers" and one.strategy not in OPEN_TO_ANYBODY:
        return "with strangers in the swarm it can't bound what one bad node does"
    if one.consensus_s is None:
        return f"after {one.seconds:.0f} s nodes are still {one.left:.0%} of their first distance apart"
    if _upload(swarm, one) > FULL:
        return f"it fills {_upload(swarm, one):.0%} of the slowest upload"
    if one.lost > 0.3:
        return f"{one.lost:.0%} of its rounds come to nothing"
    return ""


def _upload(swarm: SwarmDescription, one: Forecast) -> float:
    slowest = min(swarm.link(node).out_bytes_s for node in range(swarm.nodes))
    return one.wire_out_s / slowest


def _percent(part: float, one: Forecast) -> str:
    return f"{part / one.healthy_updates_s:.0%}" if one.healthy_updates_s else "none"
