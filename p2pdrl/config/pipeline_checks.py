"""What a pipeline asks of the task that it trains, and of the node that takes part in it.

`strategy_checks` knows the rules among the strategy's own options.
"""

from __future__ import annotations

from collections.abc import Iterator

from p2pdrl.config.batches import minibatch_rows
from p2pdrl.config.block_count import block_count
from p2pdrl.config.node import LearnerConfig
from p2pdrl.config.problem import Problem
from p2pdrl.config.strategy import PipelineConfig, StrategyConfig
from p2pdrl.config.task import TaskConfig

__all__ = ["LIST_BLOCKS", "idle_keys", "pipeline_problems", "too_few_blocks"]

LIST_BLOCKS = "`p2pdrl pipeline plan --config …` lists them"
"""Where to find the numbers of a model's blocks."""


def pipeline_problems(task: TaskConfig) -> Iterator[Problem]:
    """Yield what a pipeline asks of its task: as many blocks as stages, as many rows as microbatches."""
    strategy = task.strategy
    if not isinstance(strategy, PipelineConfig):
        return
    yield from _block_problems(strategy, task)
    most, what = minibatch_rows(task)
    if strategy.microbatches != "auto" and strategy.microbatches > most:
        yield Problem(
            "task.strategy.microbatches",
            f"{strategy.microbatches} microbatches can't be cut from the {most} {what} of a minibatch; "
            f"take {most} at most, or auto",
        )


def too_few_blocks(strategy: PipelineConfig, blocks: int, *, most: bool = False) -> Problem | None:
    """Return the problem of a pipeline that has more stages than blocks; None where it hasn't.

    Args:
        strategy: its options.
        blocks: of the model.
        most: it may also have fewer.
    """
    stages, chunks = strategy.stages, strategy.chunks
    if stages * chunks <= blocks:
        return None
    has = f"this model has {blocks}{' at most' if most else ''}"
    if chunks == 1:
        return Problem(
            "task.strategy.stages",
            f"{stages} stages need as many blocks, and {has}; lower stages, or add layers to the model",
        )
    return Problem(
        "task.strategy.chunks",
        f"{strategy.schedule} with chunks = {chunks} on stages = {stages} peers needs {stages * chunks} "
        f"blocks, and {has}; lower chunks or stages, or add layers to the model",
    )


def _block_problems(strategy: PipelineConfig, task: TaskConfig) -> Iterator[Problem]:
    least, blocks = block_count(task)
    problem = too_few_blocks(strategy, blocks, most=least < blocks)
    if problem is not None:
        yield problem
    elif strategy.cuts and strategy.cuts[-1] >= blocks:
        several = "" if least == blocks else " at most"
        yield Problem(
            "task.strategy.cuts",
            f"this model's blocks are numbered 0 to {blocks - 1}{several}, so no stage begins at "
            f"{strategy.cuts[-1]}; {LIST_BLOCKS}",
        )


def idle_keys(strategy: StrategyConfig, learner: LearnerConfig) -> Iterator[Problem]:
    """Yield what a node has set about its gradients and has no effect under its strategy."""
    if not isinstance(strategy, PipelineConfig):
        return
    why = "has no effect under pipeline, where all peers compute as the strategy says"
    if learner.microbatches != 1:
        yield Problem(
            "node.learner.microbatches", f"{why}; leave it 1, and set task.strategy.microbatches instead"
        )
    if learner.checkpoint_activations:
        yield Problem(
            "node.learner.checkpoint_activations",
            f"{why}; leave it false, and set task.strategy.checkpoint_activations instead",
        )
    if learner.activation_limit_bytes:
        yield Problem(
            "node.learner.activation_limit_bytes",
            f"{why}; leave it 0: stages are cut to fit the peers' memory, and task.strategy.microbatches and "
            "task.strategy.checkpoint_activations make them need less",
        )
