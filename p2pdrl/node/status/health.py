"""Whether a node is well, and if not why, in words a person can act on. Pure.

The daemon gathers the inputs once a second; the verdict is shown by ``/healthz``, by ``p2pdrl
status`` and, through the digest, by every peer.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HealthInputs", "judge"]

MOST_REASONS = 5
"""Reasons told at most, the gravest first; a report holds no more."""
LONGEST_REASON = 200
"""Characters of a reason."""


LEARNER_DOWN_S = 15.0
"""A restart may take this long: importing torch takes seconds on a busy machine."""
LEARNER_STARTING_S = 60.0
PROGRESS_S = 60.0
"""Longest time between two updates, or two unrolls that a learner takes."""
LOOP_LAG_S = 1.0
"""Peers begin to suspect a node whose loop lags that much."""
ALONE_S = 15.0
"""A first join may take this long."""
ADOPTING_S = 60.0
IDLE_S = 15.0
"""Longest time without a learner that takes what actors make, where it is known why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthInputs:
    """What the verdict is made from; every default is the healthy one."""

    learner_down_s: float | None = None
    """Since when the learner hasn't run though it should; None while it runs."""
    learner_restarts_in_a_row: int = 0
    """Deaths of the learner without a minute of life between."""
    learner_death: str = ""
    """What it died of last, in words that follow "it"; empty when it never died."""
    learner_starting_s: float | None = None
    """Since when the first learner is being built; None once it is."""
    learner_stopped_s: float = 0.0
    """For how long the learner's process has been stopped (SIGSTOP)."""
    progress_age_s: float | None = None
    """Since the last update; None when none is due (paused, no learner, a lower stage of a pipeline)."""
    loop_lag_s: float = 0.0
    """99th percentile of the daemon loop's lag over the last minute."""
    storage_error: str | None = None
    """Why the last write to disk failed; None when it went well."""
    seeds_given: bool = False
    """The node was told peers to join through."""
    alone_s: float = 0.0
    """For how long there has been no living peer."""
    quarantined: tuple[str, ...] = ()
    """Names of peers in quarantine for poisoned vectors."""
    adopting_s: float = 0.0
    """For how long this node has been trying to adopt a peer's state."""
    return_fall: str = ""
    """How the swarm's learning curve has fallen for long; empty when it hasn't."""
    idle_s: float = 0.0
    """For how long a node that only acts has had no learner that takes what it makes."""
    without_learner: str = ""
    """Why it has none; empty where it has one."""
    mode_error: str | None = None
    """Why this node can't run the swarm's mode and trains alone; None while it can."""


def judge(inputs: HealthInputs) -> tuple[bool, list[str]]:
    """Return whether the node is well, and the reasons why not, the gravest first."""
    reasons = [*_of_learner(inputs), *_of_machine(inputs), *_of_swarm(inputs)]
    return not reasons, [reason[:LONGEST_REASON] for reason in reasons[:MOST_REASONS]]


def _of_learner(inputs: HealthInputs) -> list[str]:
    reasons = []
    down_s = inputs.learner_down_s
    if down_s is not None and (down_s > LEARNER_DOWN_S or inputs.learner_restarts_in_a_row > 1):
        deaths = inputs.learner_restarts_in_a_row
        times = f" and died {deaths} times in a row" if deaths > 1 else ""
        why = f": it {inputs.learner_death}" if inputs.learner_death else ""
        reasons.append(f"the learner has been down for {down_s:.0f} s{times}{why}")
    elif inputs.learner_starting_s is not None and inputs.learner_starting_s > LEARNER_STARTING_S:
        reasons.append(f"the learner is starting for {inputs.learner_starting_s:.0f} s")
    elif inputs.learner_stopped_s > 0:
        reasons.append(f"the learner's process has been stopped for {inputs.learner_stopped_s:.0f} s")
    elif inputs.progress_age_s is not None and inputs.progress_age_s > PROGRESS_S:
        reasons.append(f"the learner has made no update for {inputs.progress_age_s:.0f} s")
    return reasons


def _of_machine(inputs: HealthInputs) -> list[str]:
    reasons = []
    if inputs.storage_error is not None:
        reasons.append(f"no checkpoint can be written: {inputs.storage_error}")
    if inputs.loop_lag_s > LOOP_LAG_S:
        reasons.append(
            f"the daemon answers {inputs.loop_lag_s:.1f} s late: its machine is overloaded or swaps"
        )
    return reasons


def _of_swarm(inputs: HealthInputs) -> list[str]:
    reasons = []
    if inputs.seeds_given and inputs.alone_s > ALONE_S:
        reasons.append(f"none of the peers it was told of has answered for {inputs.alone_s:.0f} s")
    if inputs.idle_s > (IDLE_S if inputs.without_learner else PROGRESS_S):
        why = f": {inputs.without_learner}" if inputs.without_learner else ""
        reasons.append(f"no learner has taken what its actors make for {inputs.idle_s:.0f} s{why}")
    if inputs.mode_error is not None:
        reasons.append(f"trains alone: {inputs.mode_error}")
    if inputs.adopting_s > ADOPTING_S:
        reasons.append(f"has been trying to take over a peer's state for {inputs.adopting_s:.0f} s")
    if inputs.return_fall:
        reasons.append(inputs.return_fall)
    if inputs.quarantined:
        reasons.append(f"in quarantine for bad parameters: {', '.join(inputs.quarantined)}")
    return reasons
