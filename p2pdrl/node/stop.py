"""When the swarm is done: judged by each node from what all report, at every gossip round. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from p2pdrl.config.task import StopConfig
from p2pdrl.node.accounting.evaluations import EvaluationLog
from p2pdrl.node.accounting.report_table import PeerReport

__all__ = ["StopReached", "judge", "returns_ready"]


@dataclass(frozen=True, slots=True)
class StopReached:
    """Why the swarm is done: the stop condition that was met, and the same in words with the numbers."""

    kind: Literal["env_steps", "time_s", "mean_return"]
    reason: str


def judge(
    stop: StopConfig,
    swarm_env_steps: int,
    swarm_age_s: float,
    reports: Sequence[PeerReport],
    evaluations: EvaluationLog | None = None,
) -> StopReached | None:
    """Return the first condition that is met; None while none is.

    Args:
        swarm_env_steps: of all nodes and boots.
        reports: the newest report of every living node, this one's included. Without evaluations the mean
            return is judged by them: a node that is still coming up holds that back until it trains; one that
            only computes for another (a lower stage of a pipeline) has no returns to judge.
        evaluations: of the swarm's policy; None where none are made.
    """
    if stop.env_steps and swarm_env_steps >= stop.env_steps:
        return StopReached("env_steps", f"{swarm_env_steps} of {stop.env_steps} environment steps are done")
    if stop.time_s and swarm_age_s >= stop.time_s:
        return StopReached("time_s", f"{swarm_age_s:.0f} of {stop.time_s:g} seconds are over")
    if evaluations is not None:
        return _evaluated(stop, reports, evaluations)
    coming = any(report.state in ("joining", "starting", "fetching") for report in reports)
    training = [report for report in reports if report.state == "training" and report.trains]
    if (
        not coming
        and training
        and all(returns_ready(stop, report.episodes_in_window, report.mean_return) for report in training)
    ):
        lowest = min(report.mean_return for report in training if report.mean_return is not None)
        return StopReached(
            "mean_return",
            f"mean return {stop.mean_return:g} over {stop.window} episodes is reached by "
            f"{'the node that trains' if len(training) == 1 else f'all {len(training)} nodes'} "
            f"(lowest {lowest:.4g})",
        )
    return None


def _evaluated(
    stop: StopConfig, reports: Sequence[PeerReport], evaluations: EvaluationLog
) -> StopReached | None:
    if stop.mean_return is None:
        return None
    alone = sum(report.state == "training" and report.trains for report in reports) == 1
    reached = evaluations.reached(stop.mean_return, alone=alone)
    if reached is None:
        return None
    means = " and ".join(f"{entry.evaluation.mean:.4g}" for entry in reached)
    return StopReached(
        "mean_return",
        f"mean return {stop.mean_return:g} is reached: {means} in the last two evaluations, of "
        f"{reached[1].evaluation.episodes} episodes each",
    )


def returns_ready(stop: StopConfig, episodes_in_window: int, mean_return: float | None) -> bool:
    """Tell whether one node's returns meet the condition; False when there is none."""
    return (
        stop.mean_return is not None
        and mean_return is not None
        and episodes_in_window >= stop.window
        and mean_return >= stop.mean_return
    )
