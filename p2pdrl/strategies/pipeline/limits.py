"""What of a pipeline's options can't be had in a view of the group, and which key is to be changed. Pure.

`strategy` asks at each view; `telling` says it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from p2pdrl.config.pipeline import PipelineConfig
from p2pdrl.config.pipeline_checks import too_few_blocks
from p2pdrl.config.problem import Problem
from p2pdrl.strategies.pipeline.layout import Place, blocks_of
from p2pdrl.strategies.pipeline.messages import Note

__all__ = ["limits"]


def limits(config: PipelineConfig, notes: Mapping[str, Note], place: Place | None) -> Iterator[Problem]:
    """Yield what our pipeline does without.

    Args:
        config: the strategy's options.
        notes: of the view's members.
        place: our pipeline; None where we stand by.
    """
    blocks = blocks_of(notes)
    if blocks:
        problem = too_few_blocks(config, blocks)
        if problem is not None:
            yield problem
    if config.cuts and place is not None and len(place.members) != config.stages:
        yield Problem(
            "task.strategy.cuts",
            f"they are for pipelines of {config.stages} peers, and go unused while this one has "
            f"{len(place.members)}",
        )
