"""What a coordinator orders: who holds which blocks, and whether a pipeline pays at all. Pure.

Each block was measured at the coordinator; what it costs at another rank follows from how long all blocks
take there. Cuts made by hand are taken as given, where there are as many peers as they were made for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from p2pdrl.config.checks import LIST_BLOCKS
from p2pdrl.config.schedules import ScheduleName
from p2pdrl.config.strategy import PipelineConfig
from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.advice import (
    Advice,
    Pipeline,
    PipelineOptions,
    UpdateWork,
    advise,
    bytes_alone,
    too_large,
)
from p2pdrl.pipeline.layers import FREE, Layer, Links, Peer
from p2pdrl.pipeline.plan import PipelinePlan
from p2pdrl.pipeline.timeline import Timeline

__all__ = ["AUTO", "NO_PIPELINE", "Design", "RankCandidate", "design", "measured_with", "schedule_of"]

AUTO = (1, 2, 4, 8)
"""Numbers of microbatches that ``auto`` chooses from."""
LEAST_S = 1e-9
NO_PIPELINE = "no pipeline: "


@dataclass(frozen=True, slots=True)
class RankCandidate:
    """One peer of a pipeline that is planned.

    Attributes:
        seconds: that all blocks take there, forwards and backwards, for one microbatch.
        memory_bytes: that its stage may take; without a limit by default.
    """

    peer: str
    name: str
    seconds: float
    memory_bytes: float = math.inf


@dataclass(frozen=True, slots=True)
class Design:
    """The plan of a pipeline.

    Attributes:
        members: node ids by rank.
        plan: of the pipeline, or of each peer when they compute by themselves.
        alone: whether they do, because the pipeline would be slower, or can't be.
        why: in a sentence, with numbers.
        step_s: predicted for one minibatch.
        bubble: predicted part of the time in which ranks idle, their mean.
        timeline: predicted for one minibatch, in the number of microbatches that ``auto`` would take; None
            without a pipeline.
    """

    members: tuple[str, ...]
    plan: PipelinePlan
    alone: bool
    why: str
    step_s: float
    bubble: float
    timeline: Timeline | None = None


def schedule_of(config: PipelineConfig, ranks: int) -> ScheduleName:
    """Return the schedule of so many ranks: a single one has no turns to take, and stores one at a time."""
    return "1f1b" if ranks == 1 else config.schedule


def measured_with(config: PipelineConfig, rows: int = 0) -> int:
    """Return into how many microbatches a minibatch is cut when blocks are measured.

    Args:
        rows: of a minibatch, which isn't cut into more; 0 is no bound.
    """
    wanted = AUTO[-1] if config.microbatches == "auto" else config.microbatches
    return min(wanted, rows) if rows else wanted


def design(
    config: PipelineConfig,
    layers: Sequence[Layer],
    ranks: Sequence[RankCandidate],
    links: Links = FREE,
    *,
    minibatches: int = 1,
    rows: int = 0,
) -> Design:
    """Plan a pipeline.

    Args:
        layers: what the blocks cost at rank 0 with one of `measured_with` microbatches.
        ranks: rank 0 first.
        links: between them, by index.
        minibatches: of one update.
        rows: as of `measured_with`.

    Raises:
        ConfigError: the model is too large for all of them together, and for each of them alone.
    """
    blocks, most = len(layers), measured_with(config, rows)
    mine_s = max(ranks[0].seconds, LEAST_S)
    single = PipelinePlan(blocks, (), schedule_of(config, 1), most, 1)
    alone = Design((ranks[0].peer,), single, False, "no other rank is in its pipeline", mine_s * most, 0.0)
    peers = [Peer(one.name, mine_s / max(one.seconds, LEAST_S), one.memory_bytes) for one in ranks]
    # No bytes of the input: the first rank has the batch in any case, and cuts it into views.
    work = UpdateWork(
        {most: layers},
        minibatches=minibatches,
        checkpoint=config.checkpoint_activations,
        state_every=config.state_every,
    )
    fits = [bytes_alone(work, most) <= peer.memory_bytes for peer in peers]
    if not any(fits) and len(ranks) == 1:
        raise ConfigError(too_large(work, peers, (most,)))
    if len(ranks) == 1:
        return alone
    members = tuple(one.peer for one in ranks)
    try:
        advice = advise(work, peers, links, _wishes(config, len(ranks), most, blocks))
        pipeline = _trainable(layers, advice)
    except ConfigError as error:
        if not any(fits):
            raise ConfigError(f"{too_large(work, peers, (most,))}; no pipeline: {error}") from error
        return Design(members, single, True, f"{NO_PIPELINE}{error}", alone.step_s, 0.0)
    why = advice.why
    if config.backend == "auto" and not advice.take_pipeline:
        if all(fits):
            return Design(members, single, True, why, alone.step_s, 0.0)
        without = [peer for peer, enough in zip(peers, fits, strict=True) if not enough]
        why = f"{why}; but {too_large(work, without, (most,))}"
    plan = pipeline.plan
    if config.microbatches == "auto":
        plan = _with(plan, AUTO[-1])
    bubbles = pipeline.timeline.bubbles
    order = tuple(members[index] for index in pipeline.order)
    return Design(order, plan, False, why, pipeline.step_s, sum(bubbles) / len(bubbles), pipeline.timeline)


def _wishes(config: PipelineConfig, ranks: int, most: int, blocks: int) -> PipelineOptions:
    numbers = tuple(number for number in AUTO if number <= most)
    if config.microbatches != "auto":  # fewer where an interleaved schedule of so many ranks wants it
        numbers = (_allowed(most, ranks, config.chunks) if config.schedule == "interleaved" else most,)
    cuts = config.cuts if ranks == config.stages else ()
    if cuts and cuts[-1] >= blocks:
        raise ConfigError(
            f"task.strategy.cuts = {list(cuts)} must rise from 1 to at most {blocks - 1}, the number of the "
            f"last block; {LIST_BLOCKS}"
        )
    return PipelineOptions(schedule_of(config, ranks), numbers, config.chunks, cuts)


def _allowed(microbatches: int, ranks: int, chunks: int) -> int:
    """Return how many of so many microbatches an interleaved schedule takes."""
    stages = ranks * chunks
    plan = PipelinePlan(stages, tuple(range(1, stages)), "interleaved", 1, ranks)
    return _with(plan, microbatches).microbatches


def _with(plan: PipelinePlan, microbatches: int) -> PipelinePlan:
    """Return the plan with so many microbatches, or as many fewer as its schedule takes."""
    for number in range(microbatches, 1, -1):
        try:
            return PipelinePlan(plan.blocks, plan.cuts, plan.schedule, number, plan.ranks)
        except ConfigError:
            continue
    return PipelinePlan(plan.blocks, plan.cuts, plan.schedule, 1, plan.ranks)


def _trainable(layers: Sequence[Layer], advice: Advice) -> Pipeline:
    """Return the pipeline that was found.

    Raises:
        ConfigError: there is none, or a rank of it has nothing to train.
    """
    pipeline = advice.pipeline
    if pipeline is None:
        raise ConfigError(advice.why)
    for rank in range(pipeline.plan.ranks):
        if not any(layers[number].parameter_bytes for number in pipeline.plan.numbers(rank)):
            raise ConfigError(
                f"rank {rank} would have no parameters to train: set other task.strategy.cuts, or lower "
                "task.strategy.stages"
            )
    return pipeline
