"""Which strategy to take on a swarm, and why, from the predicted times to a solved task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from p2pdrl.planner.description import SwarmDescription
from p2pdrl.planner.forecast import Forecast
from p2pdrl.planner.speedup import Speedup

__all__ = ["TRUSTS", "Trust", "advise", "choose"]

Trust = Literal["own", "lan", "strangers"]
TRUSTS: tuple[Trust, ...] = ("own", "lan", "strangers")
"""Whose machines they are: one's own; of people who know each other; of anybody with the key."""

PREFERRED = (
    "grad_average (torch)",
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
WORTH = 1.1
"""With less of a speed-up than this, several machines aren't worth the trouble."""
FULL = 0.7
"""Share of the upload beyond which a strategy has no room left."""
OPEN_TO_ANYBODY = ("adpsgd", "dsgd", "gala", "grad_average", "param_average")
"""What can bound the harm of a bad vector by ``mixing``, without one node that all depend on."""


def advise(
    swarm: SwarmDescription,
    predictions: Sequence[Speedup],
    trust: Trust = "lan",
    doubled: Speedup | None = None,
) -> list[str]:
    """Recommend in sentences, the recommendation first.

    Args:
        swarm: what was simulated.
        predictions: one of each strategy.
        trust: whose machines they are.
        doubled: of the strategy that is recommended, with twice as many nodes.
    """
    if swarm.nodes < 2:
        return ["Take local: there is one node, and nobody to agree with."]
    words = [f"{one.label} is out: {why}." for one in predictions if (why := _unfit(swarm, one, trust))]
    if swarm.churn.kills_per_minute and all(one.forecast.kills == 0 for one in predictions):
        seconds = max(one.forecast.seconds for one in predictions)
        words.append(f"No node was killed in the {seconds:.0f} s that were simulated: give more --seconds.")
    fit = _fit(swarm, predictions, trust)
    chosen = choose(swarm, predictions, trust)
    if chosen is None:
        best = max((one.speedup for one in fit), default=0.0)
        why = f"the best strategy comes to {best:.2f} times one machine" if fit else "no strategy fits"
        return [f"Take local, the fastest machine alone, or change the swarm: {why}.", *words]
    near = _near(fit)
    sentences = [f"Take {chosen.label}: {'; '.join(_reasons(chosen, fit, near, swarm))}."]
    if doubled is not None:
        sentences.append(_doubling(swarm, chosen, doubled))
    return [*sentences, *words]


def choose(swarm: SwarmDescription, predictions: Sequence[Speedup], trust: Trust = "lan") -> Speedup | None:
    """Return the strategy to take; None where one machine alone does about as well."""
    near = [one for one in _near(_fit(swarm, predictions, trust)) if one.speedup >= WORTH]
    return min(near, key=lambda one: PREFERRED.index(one.label), default=None)


def _fit(swarm: SwarmDescription, predictions: Sequence[Speedup], trust: Trust) -> list[Speedup]:
    return [one for one in predictions if one.label in PREFERRED and not _unfit(swarm, one, trust)]


def _near(fit: Sequence[Speedup]) -> list[Speedup]:
    """Those that are about as good as the best."""
    best = max((one.speedup for one in fit), default=0.0)
    return [one for one in fit if one.speedup >= NEAR * best]


def _doubling(swarm: SwarmDescription, chosen: Speedup, doubled: Speedup) -> str:
    """What twice as many machines would bring."""
    gain = doubled.speedup / chosen.speedup
    if gain < WORTH:
        why = "an update isn't divided further, and a larger one teaches little more"
        if doubled.parts == 2 * swarm.nodes:
            why = "they would wait for each other, or for the network"
        worth = f"{2 * swarm.nodes} would be worth {doubled.speedup:.2g} of one"
        return f"Further machines hardly help: {worth}; {why}."
    each = (doubled.speedup - chosen.speedup) / swarm.nodes
    return (
        f"{2 * swarm.nodes} such machines would be worth {doubled.speedup:.2g} of one: each further one adds "
        f"{each:.2g}."
    )


def _reasons(
    chosen: Speedup,
    fit: Sequence[Speedup],
    near: Sequence[Speedup],
    swarm: SwarmDescription,
) -> list[str]:
    forecast = chosen.forecast
    slow = " (the stragglers left aside)" if swarm.stragglers else ""
    fresh = _percent(forecast.fresh_updates_s, forecast)
    part = f", each of 1/{chosen.parts} of the data" if chosen.parts > 1 else ""
    sent = f"{forecast.wire_out_s / 1e6:.3g} MB/s, {_upload(swarm, forecast):.1%} of the slowest upload"
    reasons = [
        f"it solves the task in 1/{chosen.speedup:.2g} of the fastest machine's time",
        f"each node makes {forecast.healthy_updates_s:.3g} updates/s{slow}{part}, {fresh} with others' news",
        f"it waits {forecast.waiting:.0%} of its time",
        f"it sends {sent}",
    ]
    if chosen.label == "strom":
        reasons.append(
            f"that is so while a message names about {swarm.moved:.0%} of the parameters: measure it"
        )
    elif forecast.consensus_s is not None:
        reasons.append(f"nodes that differ agree to 1 % in {forecast.consensus_s:.3g} s")
    others = [one.label for one in near if one is not chosen]
    if others:
        reasons.append(f"{', '.join(others)} would do about as well, with more to watch")
    worse = [one for one in fit if one not in near]
    if worse:
        worst = min(worse, key=lambda one: one.speedup)
        waits = worst.forecast.waiting
        why = f"it waits {waits:.0%} of its time" if waits > 0.2 else "its updates are worth less"
        reasons.append(f"{worst.label} would do {worst.speedup / chosen.speedup:.0%} of it: {why}")
    return reasons


def _unfit(swarm: SwarmDescription, prediction: Speedup, trust: Trust) -> str:
    """Why a strategy doesn't fit; empty when it does."""
    one = prediction.forecast
    if prediction.label in ("local", "hogwild"):
        return ""
    if prediction.label.endswith("(torch)") and trust != "own":
        return "torch.distributed listens without authentication, and not all machines are your own"
    if trust == "strangers" and one.strategy not in OPEN_TO_ANYBODY:
        return "with strangers in the swarm it can't bound what one bad node does"
    if one.consensus_s is None:
        return f"after {one.seconds:.0f} s nodes are still {one.left:.0%} of their first distance apart"
    if _upload(swarm, one) > FULL:
        return f"it fills {_upload(swarm, one):.0%} of the slowest upload"
    if one.failed > 0.3:
        return f"{one.failed:.0%} of its rounds come to nothing"
    return ""


def _upload(swarm: SwarmDescription, one: Forecast) -> float:
    slowest = min(swarm.link(node).out_bytes_s for node in range(swarm.nodes))
    return one.wire_out_s / slowest


def _percent(part: float, one: Forecast) -> str:
    return f"{part / one.healthy_updates_s:.0%}" if one.healthy_updates_s else "none"
