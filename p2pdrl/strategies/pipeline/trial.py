"""Whether torch.distributed proved itself where nobody had asked for it: ``backend = auto`` had chosen it.

A set-up that can't work is to cost one generation, not all of them.
"""

from __future__ import annotations

from p2pdrl.pipeline.order import StageNews
from p2pdrl.strategies.pipeline.term import Term
from p2pdrl.strategies.protocol import Swarm

__all__ = ["Trial"]

LONGEST = 160
"""Characters of what a learner told of it."""


class Trial:
    """What this node learnt of it as a head, since its mode began.

    Args:
        swarm: told the first failure.
        counts: whether torch was chosen; what people asked for is tried again and again.

    Attributes:
        failed: how it came to nothing, in words; empty as long as it didn't.
    """

    def __init__(self, swarm: Swarm, *, counts: bool) -> None:
        self._swarm, self._counts = swarm, counts
        self.failed = ""

    def unmet(self, generation: int, why: str) -> None:
        """The ranks of a generation didn't meet."""
        self._fail(f"the ranks of generation {generation} couldn't meet over torch", why)

    def ended(self, term: Term, news: StageNews) -> None:
        """A generation ended."""
        if term.leads and term.order.backend == "torch" and news.what == "broken" and not term.progressed:
            self._fail(f"generation {term.generation} broke over torch before its first update", news.why)

    def _fail(self, what: str, why: str) -> None:
        if not self._counts or self.failed:
            return
        self.failed = f"{what}: {why[:LONGEST]}" if why else what
        self._swarm.tell(
            "pipeline-backend",
            f"{self.failed}; the next pipelines that this node heads run over stream",
            warning=True,
        )
