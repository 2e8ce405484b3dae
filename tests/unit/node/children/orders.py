"""An order to be a stage, as the daemon gives it to its learner; for the tests beside this one."""

from __future__ import annotations

import msgspec

from p2pdrl.pipeline.plan import StageOrder

__all__ = ["stage_order"]


def stage_order(generation: int = 1, **changes: object) -> StageOrder:
    """Rank 0 of two; ``changes`` are other fields."""
    order = StageOrder(
        generation=generation,
        rank=0,
        blocks=2,
        cuts=(1,),
        schedule="1f1b",
        microbatches=4,
        ranks=2,
        timeout_s=10.0,
        idle_timeout_s=60.0,
        state_every=10,
    )
    return msgspec.structs.replace(order, **changes)
