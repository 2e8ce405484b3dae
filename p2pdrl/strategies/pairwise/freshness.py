"""How far each side of a pair moves when experience counts: pure, and computed alike by both sides.

With ``merge_weights = "fresh"`` a side is trusted by the environment steps that it made since its last
exchange and by how little it lags in policy version:

    t = (1 + steps) / (1 + lag / 100)        each moves by  2 · weight · t_other / (t_mine + t_other)

so the two weights add up to twice ``weight``; with ``weight`` = ½ both come to the same point, the
trust-weighted mean of the two. **What happens to the mean**: it is no longer kept. An exchange moves the
swarm's mean by (w_i − w_j)(x_j − x_i)/n, towards the fresher side; equally fresh sides keep it.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Freshness", "fresh_weight"]

LAG_HALVES = 100.0
"""Policy versions of lag that halve the trust."""

LEAST_SHARE = 0.1
"""Neither side gives up more than nine tenths of its own, whatever the other claims."""


class Freshness(NamedTuple):
    """What one side claims.

    Args:
        steps: environment steps since its last exchange.
        policy_version: of its vector.
    """

    steps: int
    policy_version: int


def fresh_weight(weight: float, mine: Freshness, theirs: Freshness) -> float:
    """Return how far our side moves towards the other, in [0.2, 1.8] · ``weight``.

    Args:
        weight: half of what both sides' weights add up to, in (0, ½].
        mine: our side.
        theirs: the other side.
    """
    newest = max(mine.policy_version, theirs.policy_version)
    my_trust, their_trust = _trust(mine, newest), _trust(theirs, newest)
    share = their_trust / (my_trust + their_trust)
    return 2.0 * weight * min(max(share, LEAST_SHARE), 1.0 - LEAST_SHARE)


def _trust(side: Freshness, newest: int) -> float:
    return (1.0 + side.steps) / (1.0 + (newest - side.policy_version) / LAG_HALVES)
