"""What a node tells of its part in a pipeline: ``pipeline`` of ``/v1/status``, and a word of it to all peers.

The order that its learner works at says who it is; the learner's own figures say how well that goes.
"""

from __future__ import annotations

import math
from typing import Any

from p2pdrl.node.training import Training
from p2pdrl.strategies.pipeline.strategy import PipelineStrategy

__all__ = [
    "experience_words",
    "measured_facts",
    "pipeline_bubble",
    "pipeline_document",
    "serves",
    "stage_words",
    "steps_per_s",
    "trains",
]

PREFIX = "pipeline_"
"""Of the learner's figures that are about its stage."""
KNOWN = ("generation", "rank", "ranks", "stages")
"""Figures that the order says as well, as whole numbers."""
LONGEST_STAGE = 64
"""Characters of `stage_words`."""


def trains(training: Training) -> bool:
    """Whether the learner makes updates of its own, from experience that is made here or comes here.

    Not so under a pipeline, unless it is the first rank of one: then it computes for another, or stands by.
    """
    learner = training.supervisor
    if not training.learns:
        return False
    if not learner.requests.learner_mode.stages:
        return True
    return learner.stages.order is not None and learner.stages.order.rank == 0


def serves(training: Training) -> bool:
    """Whether the learner computes for another, or stands by: returns that it had before are out of date."""
    learner = training.supervisor
    if not learner.requests.learner_mode.stages:
        return False
    if learner.stages.order is not None:
        return learner.stages.order.rank > 0
    strategy = training.mode.strategy
    return isinstance(strategy, PipelineStrategy) and strategy.figures.standby


def steps_per_s(training: Training, now_s: float) -> float:
    """Environment steps a second that this node counts: its learner's, and its actors' for a first rank."""
    rate = training.supervisor.speed.rate(now_s)
    lent = training.lent_actors
    return rate if lent is None else rate + lent.sender.steps_per_s


def experience_words(training: Training) -> str:
    """Who makes the experience that this node's pipeline learns from, for people; empty without an order."""
    order, actors, lent = training.supervisor.stages.order, training.actors, training.lent_actors
    if order is None:
        return ""
    own = 0 if actors is None else actors.spec.local
    acts = f"{own} actor{'s' * (own > 1)}"
    if order.rank == 0 and not own:
        return "makes the experience in its learner's process"
    if order.rank == 0:
        others = " and of the other ranks'" if training.receiver is not None and order.ranks > 1 else ""
        return f"takes unrolls of its {acts}{others}"
    if not own:
        return "makes no experience: it has no actors (node.actors.count)"
    if lent is None:
        name = training.task.algorithm.__struct_config__.tag
        return f"makes no experience: {name} learns from unrolls of the newest policy only, so from rank 0's"
    if lent.working:
        return f"its {acts} work{'s' * (own == 1)} for rank 0"
    return f"its {acts} wait{'s' * (own == 1)} for rank 0 to take unrolls"


def stage_words(training: Training) -> str:
    """``2/3`` for the second of three stages, ``1+3/4`` for two of four; empty without a pipeline."""
    order = training.supervisor.stages.order
    if order is None:
        return ""
    plan = order.plan
    held = "+".join(str(stage + 1) for stage in plan.stages_of(order.rank))
    return f"{held}/{plan.stages}"[:LONGEST_STAGE]


def pipeline_bubble(training: Training) -> float | None:
    """Part of its time that the learner waited for its neighbours, 0 to 1; None without a pipeline."""
    return _metrics(training).get("bubble")


def measured_facts(training: Training) -> dict[str, float]:
    """What was measured here of that which the strategy's facts predict; empty without a pipeline."""
    measured = _metrics(training)
    return {f"measured_{name}": measured[name] for name in ("step_s", "bubble") if name in measured}


def pipeline_document(training: Training) -> dict[str, Any] | None:
    """All of it as JSON types; None in another mode.

    ``rank``, ``stage`` and what else comes of an order are missing as long as there is none. Stages count
    from 1, ranks from 0.
    """
    if not training.supervisor.requests.learner_mode.stages:
        return None
    document = _ordered(training)
    order = training.supervisor.stages.order
    if order is not None:
        plan = order.plan
        stages = plan.stages_of(order.rank)
        document |= {
            "generation": order.generation,
            "rank": order.rank,
            "ranks": order.ranks,
            "stage": [stage + 1 for stage in stages],
            "stages": plan.stages,
            "blocks": [[plan.blocks_of(stage)[0], plan.blocks_of(stage)[-1]] for stage in stages],
            "schedule": order.schedule,
            "microbatches": order.microbatches,
            "backend": order.backend if order.ranks > 1 else "none",
            "state_every": order.state_every,
            "experience": experience_words(training),
        }
        measured = _metrics(training)
        document |= {name: value for name, value in measured.items() if name not in KNOWN}
    return document


def _ordered(training: Training) -> dict[str, Any]:
    """What the strategy knows: who is with us, what was predicted."""
    strategy = training.mode.strategy
    if not isinstance(strategy, PipelineStrategy):
        return {}
    figures = strategy.figures
    return {
        "role": figures.role,
        "pipeline": figures.pipeline,
        "pipelines": figures.pipelines,
        "peers": list(figures.ranks),
        "alone": figures.alone,
        "why": figures.why,
        "limit": figures.limit,
        "copies": figures.copies,
        "from_version": figures.from_version,
        "predicted_step_s": figures.step_s,
        "predicted_bubble": figures.bubble,
    }


def _metrics(training: Training) -> dict[str, float]:
    """The learner's figures of its stage, without their prefix; none that are of an earlier pipeline."""
    learner = training.supervisor
    order = learner.stages.order
    if order is None or learner.metrics.get(f"{PREFIX}generation", order.generation) != order.generation:
        return {}
    return {
        name.removeprefix(PREFIX): value
        for name, value in learner.metrics.items()
        if name.startswith(PREFIX) and math.isfinite(value)
    }
