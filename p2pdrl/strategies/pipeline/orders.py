"""From what a head ordered to the order of one node's learner."""

from __future__ import annotations

from p2pdrl.config.pipeline import PipelineConfig
from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.order import Meeting, StageOrder
from p2pdrl.strategies.pipeline.messages import Form
from p2pdrl.strategies.pipeline.planning import schedule_of
from p2pdrl.strategies.pipeline.term import Term

__all__ = ["COME_S", "IDLE_S", "TORCH_S", "closes_circle", "term_of"]

TORCH_S = (10.0, 30.0)
"""Least and longest wait for a neighbour with torch.distributed."""
COME_S = 30.0
"""Longest wait until all ranks have come to where they meet: some may be importing torch.distributed."""
IDLE_S = 600.0
"""Longest wait for the next minibatch, while the head makes experience; that it lives is seen elsewhere."""


def closes_circle(config: PipelineConfig, ranks: int) -> bool:
    """Whether the last rank sends to the first."""
    return schedule_of(config, ranks) == "interleaved"


def term_of(config: PipelineConfig, form: Form, rank: int, host: str = "") -> Term:
    """Return the generation in which a learner takes a rank.

    Args:
        config: the strategy's options, the same at all ranks.
        form: what the head ordered.
        rank: ours.
        host: where the store of torch.distributed is; for rank 0 where any other rank is.

    Raises:
        ConfigError: the numbers don't fit each other, or our options.
    """
    ranks = 1 if form.alone else len(form.members)
    if form.alone and form.cuts:
        raise ConfigError("peers that compute by themselves hold all blocks")
    over_torch = form.backend == "torch" and ranks > 1
    if ranks > 1 and config.backend not in ("auto", form.backend):
        raise ConfigError(f"pipelines run over {config.backend} here, not over {form.backend}")
    timeout_s = config.deadline_s
    if over_torch:
        timeout_s = min(max(TORCH_S[0], timeout_s), TORCH_S[1])
    order = StageOrder(
        generation=form.generation,
        rank=0 if form.alone else rank,
        blocks=form.blocks,
        cuts=form.cuts,
        schedule=schedule_of(config, ranks),
        microbatches=form.microbatches,
        ranks=ranks,
        timeout_s=timeout_s,
        idle_timeout_s=IDLE_S,
        state_every=config.state_every,
        tune=config.microbatches == "auto",
        backend=form.backend if ranks > 1 else "stream",
        meeting=Meeting(host, form.port, COME_S) if over_torch else None,
        checkpoint_activations=config.checkpoint_activations,
    )
    _ = order.plan  # raises
    return Term(
        order,
        form.members,
        rank,
        alone=form.alone,
        why=form.why,
        step_s=form.step_s,
        bubble=form.bubble,
        lineage=form.lineage,
        policy_version=form.policy_version,
    )
