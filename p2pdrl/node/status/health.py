"""Whether a node is well, and if not why, in words a person can act on. Pure.

The daemon gathers the inputs once a second; the verdict is shown by ``/healthz``, by ``p2pdrl
status`` and, through the digest, by every peer.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HealthInputs", "HealthLimits", "judge"]

MOST_REASONS = 5
"""Reasons told at most, the gravest first; a report holds no more."""
LONGEST_REASON = 200
"""Characters of a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthInputs:
    """What the verdict is made from; every default is the healthy one.

    Attributes:
        learner_down_s: seconds that the learner hasn't run though it should; None while it runs.
        learner_restarts_in_a_row: deaths of the learner without a minute of life between.
        learner_death: what it died of last, in words that follow "it"; empty when it never died.
        learner_starting_s: seconds that the first learner has been being built; None once it is.
        learner_stopped_s: seconds that the learner's process has been stopped.
        progress_age_s: seconds since the last update; None when none is due (paused, no learner, a lower
            stage of a pipeline).
        loop_lag_s: 99th percentile of the daemon loop's lag over the last minute.
        storage_error: why the last write to disk failed; None when it went well.
        seeds_given: the node was told peers to join through.
        alone_s: seconds without any living peer.
        join_refused: why a peer doesn't let this node in; None when none refuses.
        suspected_by: how many peers suspect this node.
        quarantined: names of peers in quarantine for poisoned vectors.
        adopting_s: seconds that this node has been trying to take over a peer's state.
        mode_error: why this node can't run the swarm's mode and trains alone; None while it can.
    """

    learner_down_s: float | None = None
    learner_restarts_in_a_row: int = 0
    learner_death: str = ""
    learner_starting_s: float | None = None
    learner_stopped_s: float = 0.0
    progress_age_s: float | None = None
    loop_lag_s: float = 0.0
    storage_error: str | None = None
    seeds_given: bool = False
    alone_s: float = 0.0
    join_refused: str | None = None
    suspected_by: int = 0
    quarantined: tuple[str, ...] = ()
    adopting_s: float = 0.0
    mode_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthLimits:
    """Where well ends.

    Attributes:
        learner_down_s: a restart may take this long (importing torch takes seconds on a busy machine).
        learner_starting_s: to build the first one may take this long before it is told.
        progress_s: longest time between two updates.
        loop_lag_s: peers begin to suspect a node whose loop lags for a second.
        alone_s: a first join may take this long.
        adopting_s: longest time for taking over a peer's state.
    """

    learner_down_s: float = 15.0
    learner_starting_s: float = 60.0
    progress_s: float = 60.0
    loop_lag_s: float = 1.0
    alone_s: float = 15.0
    adopting_s: float = 60.0


def judge(inputs: HealthInputs, limits: HealthLimits | None = None) -> tuple[bool, list[str]]:
    """Return whether the node is well, and the reasons why not, the gravest first.

    Args:
        inputs: what is known now.
        limits: where well ends; None takes the defaults.
    """
    limits = limits or HealthLimits()
    reasons = [*_of_learner(inputs, limits), *_of_machine(inputs, limits), *_of_swarm(inputs, limits)]
    return not reasons, [reason[:LONGEST_REASON] for reason in reasons[:MOST_REASONS]]


def _of_learner(inputs: HealthInputs, limits: HealthLimits) -> list[str]:
    reasons = []
    down_s = inputs.learner_down_s
    if down_s is not None and (down_s > limits.learner_down_s or inputs.learner_restarts_in_a_row > 1):
        deaths = inputs.learner_restarts_in_a_row
        times = f" and died {deaths} times in a row" if deaths > 1 else ""
        why = f": it {inputs.learner_death}" if inputs.learner_death else ""
        reasons.append(f"the learner has been down for {down_s:.0f} s{times}{why}")
    elif inputs.learner_starting_s is not None and inputs.learner_starting_s > limits.learner_starting_s:
        reasons.append(f"the learner is starting for {inputs.learner_starting_s:.0f} s")
    elif inputs.learner_stopped_s > 0:
        reasons.append(f"the learner's process has been stopped for {inputs.learner_stopped_s:.0f} s")
    elif inputs.progress_age_s is not None and inputs.progress_age_s > limits.progress_s:
        reasons.append(f"the learner has made no update for {inputs.progress_age_s:.0f} s")
    return reasons


def _of_machine(inputs: HealthInputs, limits: HealthLimits) -> list[str]:
    reasons = []
    if inputs.storage_error is not None:
        reasons.append(f"no checkpoint can be written: {inputs.storage_error}")
    if inputs.loop_lag_s > limits.loop_lag_s:
        reasons.append(
            f"the daemon answers {inputs.loop_lag_s:.1f} s late: its machine is overloaded or swaps"
        )
    return reasons


def _of_swarm(inputs: HealthInputs, limits: HealthLimits) -> list[str]:
    reasons = []
    if inputs.join_refused is not None:
        reasons.append(f"the swarm doesn't let this node in: {inputs.join_refused}")
    elif inputs.seeds_given and inputs.alone_s > limits.alone_s:
        reasons.append(f"none of the peers it was told of has answered for {inputs.alone_s:.0f} s")
    if inputs.mode_error is not None:
        reasons.append(f"trains alone: {inputs.mode_error}")
    if inputs.suspected_by > 0:
        peers = "one peer suspects" if inputs.suspected_by == 1 else f"{inputs.suspected_by} peers suspect"
        reasons.append(f"{peers} this node: their probes get no answer in time")
    if inputs.adopting_s > limits.adopting_s:
        reasons.append(f"has been trying to take over a peer's state for {inputs.adopting_s:.0f} s")
    if inputs.quarantined:
        reasons.append(f"in quarantine for bad parameters: {', '.join(inputs.quarantined)}")
    return reasons
